"""Local attention as a PyTorch operator; ``luong_attention`` uses it for local windows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastattn._derivative import Derivative
from fastattn._flops import flops_of_pairs
from fastattn.backends.primitives import LocalOptions
from fastattn.library import Operator


def _pairs(query: Tensor, key: Tensor, *rest: Any) -> int:
    """The pairs of whole windows, because the existing keys depend on the positions."""
    return query.shape[0] * query.shape[1] * min(2 * rest[-1].reach + 1, key.shape[1])


local_attention = Operator(
    "local_attention",
    "query: B Lq D; key: B Lk D; value: B Lk Dv; positions: B Lq; padding?: B Lk; factor?: B Lq W",
    "out: B Lq Dv; weights: B Lq W",
    options=LocalOptions,
    sizes=lambda options, known: {"W": options.rows(known["Lk"])},
    derivative=Derivative(
        grads="out weights",
        reads="query key value positions padding factor weights",
        gives="query key value positions",
        options=LocalOptions,
    ),
    flops=flops_of_pairs(_pairs),
    opaque=("factor",),
    checked_by=("cpu",),
)
