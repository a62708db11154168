"""A linear layer as a differentiable operator."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastattn._derivative import Derivative
from fastattn._flops import product_flops
from fastattn.backends.primitives import LinearBackwardOptions, LinearOptions
from fastattn.library import Operator


def _fake(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def _flops(results: Any, x: Tensor, weight: Tensor, *rest: Any, backward: bool = False) -> int:
    return product_flops(x.numel() * weight.shape[0], backward)


linear = Operator(
    "linear(Tensor x, Tensor weight, Tensor? bias)",
    options=LinearOptions,
    fake=_fake,
    derivative=Derivative(
        grads="out",
        reads="x weight bias",
        gives="x weight bias",
        options=LinearBackwardOptions,
    ),
    flops=_flops,
    shapes="x: M K; weight: N K; bias: N; out: M N",
)
