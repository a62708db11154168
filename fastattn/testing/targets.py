"""The targets of tests: the built backends, each on all of its instruction sets."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fastattn import dispatch
from fastattn.backends._precision import allows_tf32
from fastattn.testing.calls import Call


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
        """Whether this target has its own kernel; the vectors below emulated tiles run most."""
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
        sizes = native.set_all_sizes_on_tiles(True)  # otherwise few small cases would use tiles
        try:
            yield self.module
        finally:
            native.set_all_sizes_on_tiles(sizes)
            native.set_isa(before)

    def placed(self, inputs: Any) -> Any:
        """The inputs of a case, on the device of the target."""
        return inputs

    def results(self, backend: Any, inputs: Any) -> dict[str, torch.Tensor]:
        """Run a call on a backend; memory that a kernel never writes is NaN."""
        public = isinstance(inputs, Call)
        chosen = dispatch.use_backend(self.backend) if public else contextlib.nullcontext()
        with fresh_memory_is_nan(), chosen:
            return inputs.results(backend)

    def dtype_of_products(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype to which the factors of products may be rounded."""
        return dtype


@dataclass(frozen=True)
class OnGpu(Target):
    """A backend on the GPU, to which the tensors of a case are copied."""

    device: str = "cuda"

    def placed(self, inputs: Any) -> Any:
        return moved(inputs, self.device)

    def has_own_kernel(self, op: str, dtype: torch.dtype) -> bool:
        return hasattr(self.module, op) and dtype != torch.float64

    def dtype_of_products(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype to which factors may be rounded; tf32 has the precision of float16."""
        return torch.float16 if dtype == torch.float32 and allows_tf32() else dtype


def moved(x: Any, device: torch.device | str) -> Any:
    """Copy a tensor, or a tuple, dict or record of them, to a device; strides stay, also 0."""
    if isinstance(x, tuple):
        return tuple(moved(item, device) for item in x)
    if isinstance(x, dict):
        return {name: moved(item, device) for name, item in x.items()}
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return dataclasses.replace(x, **moved(vars(x), device))
    if not isinstance(x, torch.Tensor):
        return x
    whole = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return whole.to(device, copy=True).as_strided(x.shape, x.stride(), x.storage_offset())


@functools.cache
def targets(*, emulated: bool = False) -> tuple[Target, ...]:
    """Return the native targets of this machine and build; the default one is last.

    ``emulated``: also the stand-ins for instruction sets that this processor may lack.
    """
    if importlib.util.find_spec("fastattn._cpu") is None:
        return ()
    info = importlib.import_module("fastattn._cpu").build_info()
    isas = [*(info["emulated"] if emulated else ()), *info["supported"]]
    return tuple(Target("cpu", isa) for isa in isas)


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
