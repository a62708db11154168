"""Additive attention as a differentiable operator."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastattn._derivative import Derivative
from fastattn._flops import additive_flops, flops_of_pairs, visible_pairs
from fastattn.backends.primitives import AdditiveBackwardOptions, AdditiveOptions
from fastattn.library import Operator


def _pairs(query: Tensor, key: Tensor, *rest: Any) -> int:
    window = (0, -1, 0) if rest[-1].causal else ()
    return query.shape[0] * visible_pairs(query.shape[1], key.shape[1], *window)


additive = Operator(
    "additive_attention",
    "query: B Tq A; key: B Tk A; value: B Tk Dv; v: A; bias?: A; attn_mask?: B|1 Tq|1 Tk|1; seed?",
    "out: B Tq Dv; weights: B Tq Tk",
    options=AdditiveOptions,
    derivative=Derivative(
        grads="out weights",
        reads="query key value v bias attn_mask seed",  # no result: rows are recomputed
        gives="query key value v bias attn_mask",
        options=AdditiveBackwardOptions,
    ),
    flops=flops_of_pairs(_pairs, additive_flops),
    checked_by=("cpu",),
)
