"""The sinusoidal encoding as a differentiable operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn.backends.primitives import SinusoidalOptions
from fastattn.library import Operator


def _vmap(
    info: Any, in_dims: Sequence[int | None], x: Tensor, positions: Tensor | None, *options: Any
) -> tuple[Tensor, int]:
    """Move the mapped dimension to the front; positions get it before the dimensions of x."""
    x = x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
    if positions is not None and in_dims[1] is not None:
        positions = positions.movedim(in_dims[1], 0)
        missing = x.ndim - 1 - positions.ndim
        positions = positions.reshape(info.batch_size, *[1] * missing, *positions.shape[1:])
    return encode_positions.dispatched(x, positions, *options), 0


encode_positions = Operator(
    "sinusoidal_encoding",
    "x: ... L D; positions?",
    "out: ... L D",
    options=SinusoidalOptions,
    fake=lambda x, *rest: torch.empty_like(x),
    formula=lambda options, grad: grad if options.scale == 1.0 else grad * options.scale,
    vmap=_vmap,
    flops=lambda _, x, *rest: 2 * x.numel(),  # the scale, and the sum
    not_in_onnx={"": "its frequencies are constants; export the model instead of its graph"},
)
