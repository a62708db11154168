"""The adapter of the sinusoidal encoding."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn import _cpu
from fastattn.backends.primitives import SinusoidalOptions
from fastattn.sinusoids import sinusoids


def sinusoidal_encoding(
    x: Tensor,  # [..., L, D]
    positions: Tensor | None,  # [..., L] int64, broadcasts to x
    *,
    options: SinusoidalOptions,
    offset: int | None = None,  # in the place of the one in the options
    out: Tensor | None = None,  # of at most four dimensions
) -> Tensor:
    """Return ``x * scale + PE(positions)``, see ``docs/design.md``."""
    columns = sinusoids(x.shape[-1], options.layout, options.max_timescale)
    if offset is None:
        offset = options.offset
    if x.ndim <= 4:
        return _cpu.sinusoidal_encoding(options, offset, x, positions, *columns, out)
    # The kernel's rank; leading dimensions that cannot be merged are copied.
    out = torch.empty_like(x)
    target = out.flatten(0, -4)
    if positions is not None:
        positions = positions.expand(x.shape[:-1]).flatten(0, -3)
    x = x.flatten(0, -4)
    _cpu.sinusoidal_encoding(options, offset, x, positions, *columns, target)
    if target.data_ptr() != out.data_ptr():
        out.copy_(target.view(out.shape))
    return out
