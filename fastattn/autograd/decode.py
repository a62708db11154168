"""Attention over a cache as an operator."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastattn._flops import flops_of_pairs, values, visible_pairs
from fastattn.backends.primitives import DecodeOptions
from fastattn.checks import default_scale
from fastattn.library import Operator


def _no_gradient(*_: Any) -> Any:
    raise RuntimeError("decode_attention has no gradient: it is for inference")


def _pairs(
    query: Tensor, key_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor | None, *rest: Any
) -> int:
    """The visible pairs by the lengths; a cache of unknown length counts as full."""
    batch, heads, q_len, _ = query.shape
    cache_leftpad, options = rest[5], rest[-1]
    pages = 1 if block_table is None else block_table.shape[1]
    filled = values(cache_seqlens) or [pages * key_cache.shape[2]] * batch
    pads = (None if cache_leftpad is None else values(cache_leftpad)) or [0] * batch
    window = options.window_left, options.window_right
    return heads * sum(
        visible_pairs(q_len, end - pad, end - pad - q_len, *window)
        for end, pad in zip(filled, pads, strict=True)
    )


decode = Operator(
    "decode_attention",
    "query: B Hq Lq D; key_cache: E Hkv N D; value_cache: E Hkv N Dv; cache_seqlens: B; "
    "block_table?: B *; cache_batch_idx?: B; alibi_slopes?: B|1 Hq; sinks?: 1 Hq; "
    "relative_bias?: 1 Hq *; mask_program?; cache_leftpad?: B; key_scales?: E Hkv N; "
    "value_scales?: E Hkv N; Hq % Hkv",
    "out: B Hq Lq Dv; lse: B Hq Lq",
    options=DecodeOptions,
    out_like="query",
    formula=_no_gradient,
    folds=False,
    flops=flops_of_pairs(_pairs),
    derived={"scale": lambda query, *_: default_scale(query.shape[-1])},
)
