"""Attention as an operator: its tensors, results, derivative and arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastattn import compat, dispatch
from fastattn._derivative import Derivative
from fastattn._flops import flops_of_pairs, visible_pairs
from fastattn.backends.primitives import AttentionBackwardOptions, AttentionOptions
from fastattn.checks import default_scale
from fastattn.library import Operator

# In place of position_query, query_table, key_table, distance_buckets, row_bias and column_bias.
NO_TERMS = (None,) * 6


def _pairs(query: Tensor, key: Tensor, *rest: Any) -> int:
    """The visible pairs by the sizes and the window."""
    (batch, heads, q_len, _), options = query.shape, rest[-1]
    offset = _last_at_last(query, key) if options.offset is None else options.offset
    window = (offset, options.window_left, options.window_right)
    return batch * heads * visible_pairs(q_len, key.shape[2], *window)


def _last_at_last(query: Tensor, key: Tensor, *_: Any) -> int:
    """The offset that aligns the last query with the last key."""
    return key.shape[2] - query.shape[2]


class _Backward(Operator):
    def _run(self, backend: str, tensors: Sequence[Any], options: Any) -> Any:
        _, grad_lse, _, *of_forward = tensors
        if backend != "torch" or grad_lse is None:
            return super()._run(backend, tensors, options)
        return compat.run_outside(self._by_ours, tensors, of_forward, options)

    def _by_ours(self, tensors: Sequence[Any], of_forward: Sequence[Any], options: Any) -> Any:
        """Differentiate lse, which PyTorch's kernel cannot, by fastattn's forward and backward."""
        named = dict(zip(self.names[3:], of_forward, strict=True))
        call = [named[name] for name in attention.names]
        backend = dispatch.choose(attention.name, call, options, without="torch")
        named["out"], named["lse"], _ = attention.run(*call, options, backend)
        return super()._run(backend, (*tensors[:3], *named.values()), options)


attention: Operator = Operator(
    "scaled_dot_product_attention",
    "query: B Hq Lq D; key: B Hkv Lk D; value: B Hkv Lk Dv; attn_mask?: B|1 Hq|1 Lq|1 Lk|1; "
    "alibi_slopes?: B|1 Hq; seed?; sinks?: B|1 Hq; relative_bias?: B|1 Hq *; positions?: Lk; "
    "mask_program?; position_query?: B Hq Lq D; query_table?: B|1 Hq N D; "
    "key_table?: B|1 Hq N D; distance_buckets?: *; row_bias?: B Hq Lq *; "
    "column_bias?: B Hq Lq *; Hq % Hkv",
    "out: B Hq Lq Dv; lse: B Hq Lq; weights: B Hq Lq Lk / B Lq Lk",
    options=AttentionOptions,
    out_like="query",
    derivative=Derivative(
        grads="out lse weights",
        # Not the weights: O(L) memory.
        reads="query key value attn_mask alibi_slopes seed out lse "
        "sinks relative_bias positions mask_program position_query query_table key_table "
        "distance_buckets row_bias column_bias",
        gives="query key value attn_mask sinks relative_bias position_query query_table key_table "
        "row_bias column_bias",
        in_order="query key value position_query",
        options=AttentionBackwardOptions,
        operator=_Backward,
    ),
    flops=flops_of_pairs(_pairs, operator=lambda: attention),
    opaque=("alibi_slopes",),
    checked_by=("cpu",),
    derived={
        "scale": lambda query, *_: default_scale(query.shape[-1]),
        "offset": _last_at_last,
    },
)
attention_backward = attention.backward
