"""The adapter of additive attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn import _cpu
from fastattn.backends._operands import address, broadcast_operand
from fastattn.backends.cpu.operands import DTYPES, accumulator, philox_key
from fastattn.backends.primitives import AdditiveBackwardOptions, AdditiveOptions


def additive_attention(
    query: Tensor,  # [B, Tq, A]
    key: Tensor,  # [B, Tk, A]
    value: Tensor,  # [B, Tk, Dv]
    v: Tensor,  # [A]
    bias: Tensor | None,  # [A]
    attn_mask: Tensor | None,  # [B|1, Tq|1, Tk|1]
    seed: Tensor | None,
    *,
    options: AdditiveOptions,
) -> tuple[Tensor, Tensor | None]:
    """Return ``(out, weights)``, see ``docs/design.md``."""
    batch, queries, width = query.shape
    _, keys, value_width = value.shape
    out = query.new_empty((batch, queries, value_width))
    applied = query.new_empty((batch, queries, keys)) if options.weights else None
    vector, bias = _wide(v), None if bias is None else _wide(bias)
    _cpu.additive_forward(
        DTYPES[query.dtype],
        torch.get_num_threads(),
        (batch, queries, keys, width, value_width),
        options,
        _operands(query, key, value, vector, bias, attn_mask, seed),
        {"out": _headless(out), "applied": None if applied is None else _headless(applied)},
    )
    return out, applied


def additive_attention_backward(
    grad_out: Tensor | None,  # [B, Tq, Dv]
    grad_weights: Tensor | None,  # [B, Tq, Tk]
    query: Tensor,
    key: Tensor,
    value: Tensor,
    v: Tensor,
    bias: Tensor | None,
    attn_mask: Tensor | None,
    seed: Tensor | None,
    *,
    options: AdditiveBackwardOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of query, key, value, v, bias and the mask, see ``docs/design.md``."""
    batch, queries, width = query.shape
    _, keys, value_width = value.shape
    if grad_out is None:
        grad_out = query.new_zeros(1).expand(batch, queries, value_width)
    grad_query, grad_key, grad_value = [
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
    ]
    vector, wide_bias = _wide(v), None if bias is None else _wide(bias)
    grad_v = torch.empty_like(vector)
    grad_bias = None if bias is None else torch.empty_like(vector)
    grad_scores = grad_mask = None
    if options.needs_mask_grad:
        assert attn_mask is not None
        grad_scores = vector.new_empty((batch, queries, keys))
        if attn_mask.shape != grad_scores.shape:  # one element may sum thousands of terms
            grad_mask = torch.zeros(attn_mask.shape, dtype=torch.float64, device="cpu")
    _cpu.additive_backward(
        DTYPES[query.dtype],
        torch.get_num_threads(),
        (batch, queries, keys, width, value_width),
        options,
        _operands(query, key, value, vector, wide_bias, attn_mask, seed),
        {
            "grad_out": _headless(grad_out),
            "grad_weights": None if grad_weights is None else _headless(grad_weights),
            "grad_query": _headless(grad_query),
            "grad_key": _headless(grad_key),
            "grad_value": _headless(grad_value),
            "grad_mask": None if grad_mask is None else broadcast_operand(grad_mask.unsqueeze(1)),
            "grad_vector": grad_v.data_ptr(),
            "grad_bias": address(grad_bias),
            "grad_scores": 0 if grad_scores is None else grad_scores.data_ptr(),
        },
    )
    if grad_mask is None:
        grad_mask = grad_scores
    return (
        grad_query,
        grad_key,
        grad_value,
        grad_v if grad_v.dtype is v.dtype else grad_v.to(v.dtype),
        None if bias is None or grad_bias is None else grad_bias.to(bias.dtype),
        None if attn_mask is None or grad_mask is None else grad_mask.to(attn_mask.dtype),
    )


def plain_additive_call(query: Any, key: Any, value: Any, v: Any, bias: Any) -> int:
    """Return a number that is the same for calls of one dtype, or 0: take the general path.

    It is odd if a tensor requires a gradient. If it is not 0, all are plain tensors of the CPU:
    query, key and value [B, L, A] of one dtype, not empty, v and bias [A], or None for bias.
    """
    return _cpu.plain_additive_call(query, key, value, v, bias)


def plain_additive(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    causal: bool,
    unused: None,
    differentiable: bool,
    v: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor]:
    """Return the output of a call without masks, dropout and weights."""
    vectors = _wide(v), None if bias is None else _wide(bias)
    return (_cpu.plain_additive(query, key, value, *vectors, causal, torch.get_num_threads()),)


def plain_additive_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    causal: bool,
    unused: None,
    wants: Sequence[bool],  # all are computed anyway
    v: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor | None, ...] | None:
    """Return the gradients of query, key, value, v and bias of :func:`plain_additive`, or None: the
    general path has to compute them.
    """
    vectors = _wide(v), None if bias is None else _wide(bias)
    threads = torch.get_num_threads()
    grads = _cpu.plain_additive_backward(grad_out, query, key, value, *vectors, causal, threads)
    if grads is None or vectors[0].dtype is v.dtype:
        return grads
    *others, of_v, of_bias = grads
    return *others, of_v.to(v.dtype), None if of_bias is None else of_bias.to(v.dtype)


def _operands(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    vector: Tensor,
    bias: Tensor | None,
    attn_mask: Tensor | None,
    seed: Tensor | None,
) -> dict[str, Any]:
    return {
        "query": _headless(query),
        "key": _headless(key),
        "value": _headless(value),
        "vector": vector.data_ptr(),
        "bias": 0 if bias is None else bias.data_ptr(),
        "mask": None if attn_mask is None else broadcast_operand(attn_mask.unsqueeze(1)),
        "mask_dtype": 0 if attn_mask is None else DTYPES[attn_mask.dtype],
        "seed": philox_key(seed),
    }


def _wide(x: Tensor) -> Tensor:
    """A small vector in the form that the kernel reads: contiguous, in the accumulator's dtype."""
    wide = accumulator(x.dtype)
    return x if x.dtype is wide and x.is_contiguous() else x.to(wide).contiguous()


def _headless(x: Tensor) -> tuple[int, tuple[int, int, int, int]]:
    """[B, L, D] as an operand with a head dimension."""
    b, i, d = x.stride()
    return x.data_ptr(), (b, 0, i, d)
