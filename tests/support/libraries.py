"""Imports the libraries of tests/models/requirements.txt, which are installed without their
dependencies, in a folder of their own: transformers should not find them in its own tests.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from required import REQUIRE_NATIVE

_declared: list[torch.library.Library] = []  # declarations end with their last reference
FOLDER = Path(sys.prefix) / "models"  # `make test` installs them there

# Packages for images, texts and metrics that the libraries import but their models do not use.
ABSENT = {
    "open_clip": ("ftfy",),
    "sentence_transformers": ("scipy", "sklearn"),
    "tabpfn": ("joblib",),
    "whisper": ("numba", "tiktoken"),
}

# Packages whose own code, which their architectures do not need, imports scikit-learn and others.
BARE = {"tabpfn": ("tabpfn", "tabpfn.preprocessing", "tabpfn.preprocessing.torch")}


def library(name: str) -> ModuleType:
    """Import a library; if it is missing, skip the test, or fail it under `make test`."""
    if str(FOLDER) not in sys.path:
        _remember_what_is_installed()
        sys.path.append(str(FOLDER))
    package = name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        missing = f"{package} is not installed: see tests/models/requirements.txt"
        pytest.fail(missing) if REQUIRE_NATIVE else pytest.skip(missing)
    for bare in BARE.get(package, ()):
        if bare not in sys.modules:
            _import_without_its_code(bare)
    with _StandIns(ABSENT.get(package, ())).in_place():
        return _imported(name)


def _imported(name: str) -> ModuleType:
    """Import a library. torchvision's operators, of which models call none, are only declared."""
    try:
        importlib.import_module("torchvision")
    except ImportError:
        pass  # tests that need it skip or fail
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        library = torch.library.Library("torchvision", "DEF")
        for function in ("nms", "qnms"):
            library.define(f"{function}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)
    return importlib.import_module(name)


def _import_without_its_code(package: str) -> None:
    """Import a package as an empty module, so that its submodules can be imported alone."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    module = sys.modules[package] = importlib.util.module_from_spec(spec)
    if "." not in package:
        module.__version__ = importlib.metadata.version(package)  # type: ignore[attr-defined]


def _remember_what_is_installed() -> None:
    """Let transformers detect its optional packages now, because it detects them only once."""
    installed = importlib.import_module("transformers.utils.import_utils")
    for name in ("scipy", "sklearn", "timm", "torchvision"):
        getattr(installed, f"is_{name}_available")()


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports mocks in place of packages that are not installed, and of all modules in them."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self._packages = {p for p in packages if importlib.util.find_spec(p) is None}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Use the stand-ins in place of the libraries."""
        sys.meta_path.append(self)
        try:
            yield
        finally:
            sys.meta_path.remove(self)
            for name in [name for name in sys.modules if self._replaces(name)]:
                del sys.modules[name]

    def _replaces(self, name: str) -> bool:
        return name.partition(".")[0] in self._packages

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if self._replaces(name) else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return MagicMock(__version__="0")

    def exec_module(self, module: Any) -> None:
        pass
