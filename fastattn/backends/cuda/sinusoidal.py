"""The sinusoidal encoding on the CUDA kernels."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fastattn import _cuda
from fastattn.backends.cuda.operands import DTYPES, on, operand, why_not_dtype
from fastattn.backends.primitives import SinusoidalOptions
from fastattn.sinusoids import sinusoids

__all__ = ["sinusoidal_encoding", "why_not"]


def why_not(x: Tensor, **_: Any) -> list[str]:
    """Return the reasons why the kernels cannot run on these arguments."""
    return why_not_dtype(x.dtype)


@functools.lru_cache(maxsize=64)
def _tables(
    width: int, layout: str, max_timescale: float, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Frequencies and phases of the columns, and frequencies of pairs, on the device."""
    table = sinusoids(width, layout, max_timescale)
    columns = (table.frequency, table.phase, table.pairs)
    # This copies on the CPU, too, where the emulator runs: the tensors must own their memory.
    frequency, phase, pairs = (
        torch.tensor(column.tolist() or [0], dtype=torch.uint64).view(torch.int64).to(device)
        for column in columns
    )
    return frequency, phase, pairs


def sinusoidal_encoding(
    x: Tensor,  # [..., L, D]
    positions: Tensor | None,  # [..., L] int64, broadcasts to x
    *,
    options: SinusoidalOptions,
) -> Tensor:
    """Return ``x * scale + PE(positions)``, see ``docs/design.md``."""
    out = target = torch.empty_like(x)
    if positions is not None:
        positions = positions.expand(x.shape[:-1])
    if x.ndim > 4:  # the kernel's rank; leading dimensions that cannot be merged are copied
        x, target = x.flatten(0, -4), out.flatten(0, -4)
        positions = None if positions is None else positions.flatten(0, -3)
    missing = (None,) * (4 - x.ndim)
    lifted, lifted_out = x[missing], target[missing]
    tables = _tables(x.shape[-1], options.layout, options.max_timescale, x.device)
    with on(x) as stream:
        _cuda.sinusoidal_encoding(
            DTYPES[x.dtype],
            stream,
            lifted.shape,
            (operand(lifted), operand(lifted_out)),
            None if positions is None else operand(positions[missing]),
            tuple(table.data_ptr() for table in tables),
            options.layout == "interleaved",
            options,
        )
    if target.data_ptr() != out.data_ptr():
        out.copy_(target.view(out.shape))
    return out
