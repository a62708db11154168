"""The definition of the sinusoidal encoding."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.backends.primitives import SinusoidalOptions
from fastattn.backends.reference._masked import compute_dtype
from fastattn.sinusoids import encode_positions


def sinusoidal_encoding(
    x: Tensor,  # [..., L, D]
    positions: Tensor | None,  # [..., L] int64, broadcasts; None: offset, offset + 1, ...
    *,
    options: SinusoidalOptions,
) -> Tensor:
    """Return ``x * scale + PE(positions)`` [..., L, D], see :mod:`fastattn.sinusoids` for PE."""
    if positions is None:
        positions = torch.arange(options.offset, options.offset + x.shape[-2], device=x.device)
    encoding = encode_positions(positions, x.shape[-1], options.layout, options.max_timescale)
    if options.padding_idx is not None:
        encoding = torch.where((positions == options.padding_idx).unsqueeze(-1), 0.0, encoding)
    compute = compute_dtype(x.dtype)
    return (x.to(compute) * options.scale + encoding.to(compute)).to(x.dtype)
