"""The targets of tests: the built backends, each on all of its instruction sets."""

from __future__ import annotations

import contextlib
import dataclasses
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
from fastattn.backends._precision import allows_tf32

__all__ = ["OnGpu", "Target", "fresh_memory_is_nan", "moved", "on_device", "targets"]


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
        sizes = native.set_all_sizes_on_tiles(True)  # else few of the small cases would run there
        try:
            yield self.module
        finally:
            native.set_all_sizes_on_tiles(sizes)
            native.set_isa(before)

    def results(self, proof: Any, backend: Any, inputs: Any) -> dict[str, torch.Tensor]:
        """Run a proof on a backend; memory that a kernel never writes is NaN."""
        chosen = dispatch.use_backend(self.backend) if proof.public else contextlib.nullcontext()
        with fresh_memory_is_nan(), chosen:
            results: dict[str, torch.Tensor] = inputs.results(backend)
        return results

    def dtype_of_products(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that the factors of products may be rounded to."""
        return dtype


@dataclass(frozen=True)
class OnGpu(Target):
    """A backend of the GPU for CPU tensors, which are copied to the GPU and back."""

    device: str = "cuda"

    @property
    def module(self) -> Any:
        return on_device(super().module, self.device)

    def has_own_kernel(self, op: str, dtype: torch.dtype) -> bool:
        return hasattr(super().module, op) and dtype != torch.float64

    def dtype_of_products(self, dtype: torch.dtype) -> torch.dtype:
        """The same; tf32 has the fraction of float16."""
        return torch.float16 if dtype == torch.float32 and allows_tf32() else dtype

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


def on_device(module: Any, device: str) -> SimpleNamespace:
    """Return the functions of a backend for CPU tensors, which are copied to a device and back."""

    def wrapped(name: str) -> Callable[..., Any]:
        function = getattr(module, name)

        @functools.wraps(function)  # its parameters name the tensors that it takes
        def call(*args: Any, **options: Any) -> Any:
            sent = moved(args, device)
            results = moved(function(*sent, **options), "cpu")
            if name == "append_to_cache":  # in place
                for x, y in zip(args, sent, strict=True):
                    if isinstance(x, torch.Tensor):
                        _whole(x).copy_(_whole(y))
            return results

        return call

    names = [name for name in module.__all__ if callable(getattr(module, name))]
    return SimpleNamespace(**{name: wrapped(name) for name in {*names, "why_not"}})


def moved(x: Any, device: str) -> Any:
    """Copy a tensor, or a tuple, dict or record of them, to a device; strides stay, also 0."""
    if isinstance(x, tuple):
        return tuple(moved(item, device) for item in x)
    if isinstance(x, dict):
        return {name: moved(item, device) for name, item in x.items()}
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return dataclasses.replace(x, **moved(vars(x), device))
    if not isinstance(x, torch.Tensor):
        return x
    memory = _whole(x).to(device, copy=True)
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


def _whole(x: torch.Tensor) -> torch.Tensor:
    """All elements of the memory that a tensor is a view of."""
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def targets(*, emulated: bool = False) -> list[Target]:
    """Return the native targets of this machine and build; the default one is last.

    ``emulated``: also the stand-ins for instruction sets that this processor may lack.
    """
    if importlib.util.find_spec("fastattn._cpu") is None:
        return []
    info = importlib.import_module("fastattn._cpu").build_info()
    isas = [*(info["emulated"] if emulated else ()), *info["supported"]]
    return [Target("cpu", isa) for isa in isas]


@contextlib.contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    """Make torch.empty return NaN within the block, to detect elements that are never written."""
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)  # filling is part of this mode
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = before[1]
