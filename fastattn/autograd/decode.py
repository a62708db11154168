"""Attention over a cache, and appending to it, as PyTorch operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn import compat, dispatch
from fastattn._flops import count, flops_of_pairs, values, visible_pairs
from fastattn.backends._alloc import empty_output
from fastattn.backends.primitives import AppendOptions, DecodeOptions
from fastattn.checks import default_scale
from fastattn.compat import runs_eagerly
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


_WRITTEN = ("key_cache", "value_cache", "key_scales", "value_scales")
# No argument has a default: before torch 2.13 the dispatcher omits trailing arguments that equal
# their defaults, and then does not find the scales, which are written, among the others.
_APPEND = (
    "(Tensor(a0!) key_cache, Tensor(a1!) value_cache, Tensor key, Tensor value, "
    "Tensor cache_seqlens, Tensor? block_table, Tensor? cache_batch_idx, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? rotary_positions, Tensor? query, Tensor(a11!)? key_scales, "
    "Tensor(a12!)? value_scales, Tensor? cache_leftpad, bool rotary_interleaved) -> Tensor"
)
_TENSORS, _QUERY = 14, 10  # the number of tensors of an append, and the place of the query


@torch.library.custom_op("fastattn::append_to_cache", mutates_args=_WRITTEN, schema=_APPEND)
def append_operator(*args: Any) -> Tensor:
    """Return the rotated queries; without a rotation, an empty tensor."""
    *tensors, rotary_interleaved = args
    rotated, query = _append_now(tensors, AppendOptions(rotary_interleaved)), tensors[_QUERY]
    if rotated is None or query is None:
        empty: Tensor = tensors[2].new_empty(0)
        return empty
    promised = empty_output(query, query.shape[3])
    return rotated if rotated.stride() == promised.stride() else promised.copy_(rotated)


count(torch.ops.fastattn.append_to_cache, lambda args, results: 0)  # it moves rows


@append_operator.register_fake
def _append_fake(*args: Any) -> Tensor:
    if compat.exports_onnx():  # a graph of torch.export, which holds this operator
        raise compat.not_in_onnx("decode_attention", "it writes to its cache")
    query = args[_QUERY]
    return args[2].new_empty(0) if query is None else empty_output(query, query.shape[3])


def _append_now(tensors: Sequence[Tensor | None], options: AppendOptions) -> Tensor | None:
    name = dispatch.choose("append_to_cache", tensors, options)
    function = dispatch.load(name).append_to_cache  # type: ignore[union-attr]
    rotated: Tensor | None = function(
        *dispatch.accepted_tensors(function, tensors), options=options
    )
    return rotated


def append(tensors: Sequence[Tensor | None], options: AppendOptions) -> Tensor | None:
    """Append to the first two tensors, in place; return the rotated queries or None.

    Uses the dispatcher only under a tracer, mode or transform: a decoding step is short.
    """
    if runs_eagerly(*tensors):
        rotated = _append_now(tensors, options)
        for written in (*tensors[:2], *tensors[11:13]):
            if written is not None:
                torch.autograd.graph.increment_version(written)
        return rotated
    all_tensors = (*tensors, *[None] * (_TENSORS - len(tensors)))
    result: Tensor = append_operator(*all_tensors, options.rotary_interleaved)
    return None if all_tensors[_QUERY] is None else result
