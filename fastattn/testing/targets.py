"""The targets of tests: the built backends, each on all of its instruction sets."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from fastattn import dispatch

__all__ = ["OnGpu", "Target", "moved", "targets"]


@dataclass(frozen=True)
class Target:
    """A backend, on one of its instruction sets if it has several."""

    backend: str
    isa: str | None = None

    def __str__(self) -> str:
        return self.backend if self.isa is None else f"{self.backend}-{self.isa}"

    @property
    def module(self) -> Any:
        return importlib.import_module(f"fastattn.backends.{self.backend}")

    def is_current(self) -> bool:
        """Return whether this target runs by default."""
        if self.isa is None:
            return True
        isa: str = importlib.import_module("fastattn._cpu").build_info()["isa"]
        return self.isa == isa.split(",")[0]  # after the comma: dtypes with another one

    def has_own_kernel(self, op: str, dtype: torch.dtype) -> bool:
        """Is there something to test that no other target has? Emulated tiles run few kernels;
        the others are those of the vectors below them."""
        if self.isa != "amx_bf16_emulated":
            return True
        return op in self.module.ON_TILES and dtype in self.module.DTYPES_ON_TILES

    @contextlib.contextmanager
    def active(self) -> Iterator[Any]:
        """Run on the instruction set of this target within the block."""
        if self.isa is None:
            yield self.module
            return
        importlib.import_module("fastattn.backends.cpu")  # its import chooses instruction sets
        native = importlib.import_module("fastattn._cpu")
        before = native.build_info()["isa"]
        native.set_isa(self.isa)
        try:
            yield self.module
        finally:
            native.set_isa(before)


@dataclass(frozen=True)
class OnGpu(Target):
    """A backend of the GPU for CPU tensors, which are copied to the GPU and back."""

    device: str = "cuda"

    @property
    def module(self) -> Any:
        real = super().module
        names = [name for name in real.__all__ if callable(getattr(real, name))]
        functions = {name: self._on_device(getattr(real, name)) for name in (*names, "why_not")}
        return SimpleNamespace(**functions)

    @contextlib.contextmanager
    def active(self) -> Iterator[Any]:
        """Make the library use this backend for CPU tensors within the block."""
        found, load = self.module, dispatch.load

        def loaded(name: str) -> ModuleType | str:
            return found if name == self.backend else load(name)

        order = {"cpu": (self.backend, "reference")}
        with (
            mock.patch.object(dispatch, "load", loaded),
            mock.patch.dict(dispatch.PRIORITY, order),
        ):
            yield found

    def _on_device(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # its parameters name the tensors that it takes
        def call(*args: Any, **options: Any) -> Any:
            return moved(function(*moved(args, self.device), **options), "cpu")

        return call


def moved(x: Any, device: str) -> Any:
    """Copy a tensor, or a tuple or dict of them, to a device; strides stay, including 0."""
    if isinstance(x, tuple):
        return tuple(moved(item, device) for item in x)
    if isinstance(x, dict):
        return {name: moved(item, device) for name, item in x.items()}
    if not isinstance(x, torch.Tensor):
        return x
    size = x.untyped_storage().nbytes() // x.element_size()
    memory = x.as_strided((size,), (1,), 0).to(device)
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


def targets(*, emulated: bool = False) -> list[Target]:
    """Return the native targets of this machine and build; the default one is last.

    ``emulated``: also the stand-ins for instruction sets that this processor may lack.
    """
    if importlib.util.find_spec("fastattn._cpu") is None:
        return []
    info = importlib.import_module("fastattn._cpu").build_info()
    isas = [*(info["emulated"] if emulated else ()), *info["supported"]]
    return [Target("cpu", isa) for isa in isas]
