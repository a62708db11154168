"""The adapter of the sinusoidal encoding."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fastattn import _cpu
from fastattn.backends.cpu.operands import DTYPES
from fastattn.backends.primitives import SinusoidalOptions
from fastattn.sinusoids import Sinusoids, sinusoids


@functools.lru_cache(maxsize=64)
def _columns(width: int, layout: str, max_timescale: float) -> tuple[Sinusoids, dict[str, int]]:
    """The columns, and what the kernel reads of them: addresses, so both are kept."""
    table = sinusoids(width, layout, max_timescale)
    return table, {
        "frequency": table.frequency.buffer_info()[0],
        "phase": table.phase.buffer_info()[0],
        "pairs": len(table.pairs),
        "interleaved": layout == "interleaved",
        "pair_frequency": table.pairs.buffer_info()[0],
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
    missing = 4 - x.ndim
    if missing < 0:  # the kernel's rank; leading dimensions that cannot be merged are copied
        x, target = x.flatten(0, -4), out.flatten(0, -4)
        positions = None if positions is None else positions.flatten(0, -3)
        missing = 0
    shape = x.shape
    _, columns = _columns(shape[-1], options.layout, options.max_timescale)
    _cpu.sinusoidal(
        DTYPES[x.dtype],
        torch.get_num_threads(),
        (1,) * missing + shape,
        options,
        {
            "x": (x.data_ptr(), (0,) * missing + x.stride()),
            "out": (target.data_ptr(), (0,) * missing + target.stride()),
            "positions": 0 if positions is None else positions.data_ptr(),
            "position_stride": (0, 0, 0)
            if positions is None
            else (0,) * missing + positions.stride(),
        },
        columns,
    )
    if target.data_ptr() != out.data_ptr():
        out.copy_(target.view(out.shape))
    return out


def plain_sinusoidal_call(x: Any) -> int:
    """Return a number that is the same for calls of one dtype, or 0: take the general path.

    It is odd if x requires a gradient. If it is not 0, x is a plain tensor of the CPU, [..., L, D]
    with two to four dimensions, and not empty.
    """
    return _cpu.plain_sinusoidal_call(x)


def plain_sinusoidal(
    x: Tensor, out: Tensor | None, offset: int, layout: str, max_timescale: float, scale: float
) -> Tensor:
    """Return ``x * scale + PE(offset + l)``, in ``out`` if given, which is dense."""
    _, columns = _columns(x.shape[-1], layout, max_timescale)
    return _cpu.plain_sinusoidal(x, out, offset, scale, columns, torch.get_num_threads())
