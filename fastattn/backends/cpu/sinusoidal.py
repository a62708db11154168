"""The adapter of the sinusoidal encoding."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn import _cpu
from fastattn.backends.cpu.operands import DTYPES
from fastattn.backends.primitives import SinusoidalOptions
from fastattn.sinusoids import sinusoids


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
    missing = 4 - x.ndim
    table = sinusoids(x.shape[-1], options.layout, options.max_timescale)
    _cpu.sinusoidal(
        DTYPES[x.dtype],
        torch.get_num_threads(),
        (1,) * missing + x.shape,
        x.data_ptr(),
        (0,) * missing + x.stride(),
        target.data_ptr(),
        (0,) * missing + target.stride(),
        0 if positions is None else positions.data_ptr(),
        (0, 0, 0) if positions is None else (0,) * missing + positions.stride(),
        table.frequency.buffer_info()[0],
        table.phase.buffer_info()[0],
        len(table.pairs),
        options.layout == "interleaved",
        table.pairs.buffer_info()[0],
        options,
    )
    if target.data_ptr() != out.data_ptr():
        out.copy_(target.view(out.shape))
    return out
