"""Additive attention as a differentiable operator."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastattn._derivative import Derivative
from fastattn._flops import additive_flops, flops_of_pairs, visible_pairs
from fastattn.backends.primitives import AdditiveBackwardOptions, AdditiveOptions
from fastattn.library import Operator


def _fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, queries, _ = query.shape
    weights = (batch, queries, key.shape[1]) if rest[-1].weights else (0,)
    return query.new_empty((batch, queries, value.shape[2])), query.new_empty(weights)


def _pairs(query: Tensor, key: Tensor, *rest: Any) -> int:
    window = (0, -1, 0) if rest[-1].causal else ()
    return query.shape[0] * visible_pairs(query.shape[1], key.shape[1], *window)


additive = Operator(
    "additive_attention(Tensor query, Tensor key, Tensor value, Tensor v, Tensor? bias, "
    "Tensor? attn_mask, Tensor? seed)",
    options=AdditiveOptions,
    results="out weights",
    fake=_fake,
    derivative=Derivative(
        grads="out weights",
        reads="query key value v bias attn_mask seed",  # no result: rows are recomputed
        gives="query key value v bias attn_mask",
        options=AdditiveBackwardOptions,
    ),
    flops=flops_of_pairs(_pairs, additive_flops),
    shapes="query: B Tq A; key: B Tk A; value: B Tk Dv; v: A; bias: A; attn_mask: B|1 Tq|1 Tk|1; "
    "out: B Tq Dv; weights: B Tq Tk",
    checked_by=("cpu",),
)
