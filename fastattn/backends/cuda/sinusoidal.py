"""The sinusoidal encoding on the CUDA kernels."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fastattn import _cuda
from fastattn.backends._sinusoidal import of_any_rank
from fastattn.backends.cuda.operands import launch, why_not_dtype
from fastattn.backends.primitives import SinusoidalOptions
from fastattn.sinusoids import sinusoids

__all__ = ["sinusoidal_encoding", "why_not"]


def why_not(x: Tensor, **_: Any) -> list[str]:
    """Return the reasons why the kernels cannot run on these arguments."""
    return why_not_dtype(x.dtype)


@functools.lru_cache(maxsize=64)
def _columns(
    width: int, layout: str, max_timescale: float, device: torch.device
) -> tuple[Any, ...]:
    """The columns on the device, how many pairs, and whether these are neighbours."""
    table = sinusoids(width, layout, max_timescale)
    # This copies on the CPU, too, where the emulator runs: the tensors must own their memory.
    tensors = [
        torch.tensor(column.tolist() or [0], dtype=torch.uint64).view(torch.int64).to(device)
        for column in (table.frequency, table.phase, table.pairs)
    ]
    return *tensors, len(table.pairs), layout == "interleaved"


def sinusoidal_encoding(
    x: Tensor,  # [..., L, D]
    positions: Tensor | None,  # [..., L] int64, broadcasts to x
    *,
    options: SinusoidalOptions,
) -> Tensor:
    """Return ``x * scale + PE(positions)``, see ``docs/design.md``."""
    columns = _columns(x.shape[-1], options.layout, options.max_timescale, x.device)

    def encode(x: Tensor, positions: Tensor | None, out: Tensor | None) -> Tensor:
        made: Tensor = launch(_cuda.sinusoidal_encoding, x, options, x, positions, *columns, out)
        return made

    return of_any_rank(encode, x, positions)
