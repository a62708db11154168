"""A linear layer as a differentiable operator."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastattn._derivative import Derivative
from fastattn._flops import product_flops
from fastattn.backends.primitives import LinearBackwardOptions, LinearOptions
from fastattn.library import Operator


def _flops(results: Any, x: Tensor, weight: Tensor, *rest: Any, backward: bool = False) -> int:
    return product_flops(x.numel() * weight.shape[0], backward)


linear = Operator(
    "linear",
    "x: M K; weight: N K; bias?: N",
    "out: M N",
    options=LinearOptions,
    derivative=Derivative(
        grads="out",
        reads="x weight bias",
        gives="x weight bias",
        options=LinearBackwardOptions,
    ),
    flops=_flops,
)
