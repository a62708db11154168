"""The sinusoidal encoding on the CUDA kernels."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fastattn import _cuda
from fastattn.backends._operands import operand
from fastattn.backends.cuda.operands import DTYPES, on, why_not_dtype
from fastattn.backends.primitives import SinusoidalOptions
from fastattn.sinusoids import sinusoids

__all__ = ["sinusoidal_encoding", "why_not"]


def why_not(x: Tensor, **_: Any) -> list[str]:
    """Return the reasons why the kernels cannot run on these arguments."""
    return why_not_dtype(x.dtype)


@functools.lru_cache(maxsize=64)
def _columns(
    width: int, layout: str, max_timescale: float, device: torch.device
) -> tuple[list[Tensor], dict[str, int]]:
    """The columns on the device, and what the kernel reads of them: addresses, so both are kept."""
    table = sinusoids(width, layout, max_timescale)
    # This copies on the CPU, too, where the emulator runs: the tensors must own their memory.
    tensors = [
        torch.tensor(column.tolist() or [0], dtype=torch.uint64).view(torch.int64).to(device)
        for column in (table.frequency, table.phase, table.pairs)
    ]
    frequency, phase, pairs = (x.data_ptr() for x in tensors)
    return tensors, {
        "frequency": frequency,
        "phase": phase,
        "pairs": len(table.pairs),
        "interleaved": layout == "interleaved",
        "pair_frequency": pairs,
    }


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
    lifted = x[missing]
    _, columns = _columns(x.shape[-1], options.layout, options.max_timescale, x.device)
    at = (0, (0, 0, 0)) if positions is None else operand(positions[missing])
    with on(x) as stream:
        _cuda.sinusoidal_encoding(
            DTYPES[x.dtype],
            stream,
            lifted.shape,
            options,
            {
                "x": operand(lifted),
                "out": operand(target[missing]),
                "positions": at[0],
                "position_stride": at[1],
            },
            columns,
        )
    if target.data_ptr() != out.data_ptr():
        out.copy_(target.view(out.shape))
    return out
