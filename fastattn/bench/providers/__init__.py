"""Who can be measured. A provider is a module, imported in its own process when asked for.

    ABOUT                                one line for `bench list`
    versions() -> dict[str, str]         of what it runs on; raises ImportError if not installed
    why_not(cell) -> list[str]           plain reasons why it cannot run the cell, empty if it can
    prepare(cell, inputs) -> callable    all that is not timed: layouts, modules, sessions

The callable is what is timed. It returns the arrays of `inputs.output_names(cell)` in that order,
as torch tensors or numpy arrays. Any importable module of this form is a provider: `--providers
fastattn,mypackage.mykernel`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from torch import Tensor

from fastattn.bench.cells import Cell

PROVIDERS = {
    "fastattn": "fastattn.bench.providers.native",
    "fastattn-reference": "fastattn.bench.providers.reference",
    "torch": "fastattn.bench.providers.torch_default",
    "torch-eager": "fastattn.bench.providers.torch_eager",
    "onnxruntime": "fastattn.bench.providers.onnxruntime_",
    "openvino": "fastattn.bench.providers.openvino_",
}
DEFAULT = ("torch", "fastattn")


def split_isa(name: str) -> tuple[str, str]:
    """`fastattn@avx2` is the provider `fastattn` with that instruction set forced."""
    provider, _, isa = name.partition("@")
    return provider, isa


class Provider(Protocol):
    ABOUT: str

    def versions(self) -> dict[str, str]: ...
    def why_not(self, cell: Cell) -> list[str]: ...
    def prepare(self, cell: Cell, inputs: dict[str, Tensor]) -> Callable[[], Sequence[Any]]: ...


def load(name: str) -> Provider:
    """The provider's module. Raises ImportError for one that is unknown or cannot be imported."""
    name, _ = split_isa(name)
    if name not in PROVIDERS and "." not in name:
        raise ImportError(f"unknown provider {name!r}; known are {', '.join(PROVIDERS)}")
    module = importlib.import_module(PROVIDERS.get(name, name))
    parts = ("ABOUT", "versions", "why_not", "prepare")
    missing = [part for part in parts if not hasattr(module, part)]
    if missing:
        raise ImportError(f"provider {name!r} has no {', '.join(missing)}")
    return cast(Provider, module)
