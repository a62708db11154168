"""The emulated CUDA kernels as a target of the proofs of ``fastattn.testing``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from unittest import mock

import torch

from fastattn import dispatch
from fastattn.testing import Target


@dataclass(frozen=True)
class Emulated:
    """The CUDA adapter on CPU tensors, where the library finds it, and the order of the warps."""

    adapter: ModuleType
    seed: int = 0
    backend: str = "cuda"

    placed = Target.placed
    results = Target.results
    dtype_of_products = Target.dtype_of_products

    def has_own_kernel(self, op: str, dtype: torch.dtype) -> bool:
        return dtype != torch.float64

    @contextlib.contextmanager
    def active(self) -> Iterator[ModuleType]:
        """Use the emulator as the backend "cuda" of CPU tensors."""
        self.adapter._cuda.set_seed(self.seed)
        real = dispatch.load

        def load(name: str) -> ModuleType | str:
            return self.adapter if name == "cuda" else real(name)

        order = {"cpu": ("cuda", "reference")}
        with mock.patch.object(dispatch, "load", load), mock.patch.dict(dispatch.PRIORITY, order):
            yield self.adapter
