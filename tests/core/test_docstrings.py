"""The examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
import torch

import fastattn

PACKAGE = Path(fastattn.__file__).parent
# Their examples take a library or a model that is not here.
ELSEWHERE = (
    "fastattn.integrations.diffusers",
    "fastattn.integrations.tabpfn",
    "fastattn.integrations.transformers._registry",
)
MODULES = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", [name for name in MODULES if name not in ELSEWHERE])
def test_the_examples_of_a_module_are_true(name: str) -> None:
    names = {**vars(fastattn), "torch": torch}
    found = doctest.testmod(importlib.import_module(name), extraglobs=names)
    assert (found.failed, found.attempted > 0) == (0, True)
