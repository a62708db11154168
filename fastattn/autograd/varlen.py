"""Attention over packed sequences as a differentiable operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn._derivative import Derivative
from fastattn._flops import flops_of_pairs, values, visible_pairs
from fastattn.backends.primitives import VarlenOptions
from fastattn.checks import default_scale
from fastattn.library import Operator


def _pairs(query: Tensor, key: Tensor, cu_q: Tensor, cu_k: Tensor, *rest: Any) -> int:
    """The visible pairs of a head by the lengths; unknown lengths count as equal."""
    count = cu_q.shape[0] - 1
    starts, ends = values(cu_q), values(cu_k)
    if starts is None or ends is None:
        lengths = [(query.shape[0] // max(count, 1), key.shape[0] // max(count, 1))] * count
    else:
        lengths = [(starts[b + 1] - starts[b], ends[b + 1] - ends[b]) for b in range(count)]
    options = rest[-1]
    window = options.window_left, options.window_right
    offsets = ((q, k, k - q if options.bottom_right else 0) for q, k in lengths)
    return query.shape[1] * sum(visible_pairs(*sizes, *window) for sizes in offsets)


class _Backward(Operator):
    def lifted(self, tensors: Sequence[Any]) -> list[Any]:
        """Convert the lengths of a plan to int64, because a plan also takes int32."""
        lifted = super().lifted(tensors)
        for n in (self.place_of("cu_seqlens_q"), self.place_of("cu_seqlens_k")):
            lifted[n] = lifted[n].to(torch.int64)
        return lifted


packed_attention: Operator = Operator(
    "varlen_attention",
    "query: Tq Hq D; key: Tk Hkv D; value: Tk Hkv Dv; cu_seqlens_q: S; cu_seqlens_k: S; "
    "alibi_slopes?: S-1|1 Hq; seed?; sinks?: 1 Hq; relative_bias?: 1 Hq *; mask_program?; "
    "position_query?: Tq Hq D; query_table?: 1 Hq N D; key_table?: 1 Hq N D; "
    "distance_buckets?: *; Hq % Hkv",
    "out: Tq Hq Dv; lse: Hq Tq",
    options=VarlenOptions,
    out_like="query",
    derivative=Derivative(
        grads="out lse",
        reads="query key value cu_seqlens_q cu_seqlens_k alibi_slopes seed out lse "
        "sinks relative_bias mask_program position_query query_table key_table distance_buckets",
        gives="query key value sinks relative_bias position_query query_table key_table",
        in_order="query key value position_query",
        options=VarlenOptions,
        operator=_Backward,
    ),
    folds=False,  # draws are indexed by each example's own sequences
    flops=flops_of_pairs(_pairs, operator=lambda: packed_attention),
    opaque=("alibi_slopes",),
    checked_by=("cpu",),
    derived={"scale": lambda query, *_: default_scale(query.shape[-1])},
)
