"""The adapter of the native CPU module: from tensors to addresses, shapes and strides.

Every function has the name and the arguments that it has in ``reference.py``; ``docs/design.md``
defines the primitives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# After torch, whose OpenMP runtime it shares.
from fastattn import _cpu
from fastattn.backends._alloc import empty_output
from fastattn.backends._cpu_decode import append_to_cache, decode_attention
from fastattn.backends._cpu_encode import encode_memory, encode_memory_backward
from fastattn.backends._cpu_hopfield import hopfield_retrieve, hopfield_retrieve_backward
from fastattn.backends._cpu_hops import (
    memory_hop_attention,
    memory_hop_attention_backward,
    plain_hops,
    plain_hops_backward,
)
from fastattn.backends._cpu_sequences import varlen_attention, varlen_attention_backward
from fastattn.sinusoids import sinusoids

__all__ = [
    "additive_attention",
    "additive_attention_backward",
    "append_to_cache",
    "decode_attention",
    "encode_memory",
    "encode_memory_backward",
    "hopfield_retrieve",
    "hopfield_retrieve_backward",
    "linear",
    "memory_hop_attention",
    "memory_hop_attention_backward",
    "plain_attention",
    "plain_attention_backward",
    "plain_hops",
    "plain_hops_backward",
    "scaled_dot_product_attention",
    "scaled_dot_product_attention_backward",
    "self_attention",
    "sinusoidal_encoding",
    "varlen_attention",
    "varlen_attention_backward",
    "why_not",
]

_DTYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.bool: 4,
}
_NAMES = "float32, float64, bfloat16, float16"


def why_not(op: str, *tensors: Tensor | None, **_: Any) -> list[str]:
    """Return the reasons why the CPU kernels cannot run ``op`` on these arguments."""
    for tensor in tensors:
        if tensor is None:
            continue
        if not tensor.is_cpu:
            return [f"a tensor is on {tensor.device}"]
        if tensor.dtype not in _DTYPES and tensor.dtype not in (torch.int64, torch.int32):
            return [f"the dtype {tensor.dtype} is not one of {_NAMES}"]
    if op.startswith("scaled_dot_product_attention"):
        alibi_slopes = tensors[4] if op == "scaled_dot_product_attention" else tensors[7]
        if alibi_slopes is not None and alibi_slopes.requires_grad:
            return ["alibi_slopes requires a gradient, which the kernel does not compute"]
    return []


def additive_attention(
    query: Tensor,  # [B, Tq, A]
    key: Tensor,  # [B, Tk, A]
    value: Tensor,  # [B, Tk, Dv]
    v: Tensor,  # [A]
    bias: Tensor | None = None,  # [A]
    attn_mask: Tensor | None = None,  # [B|1, Tq|1, Tk|1]
    seed: Tensor | None = None,
    *,
    causal: bool,
    dropout_p: float,
    weights: bool,
) -> tuple[Tensor, Tensor]:
    """Return ``(out, weights)``, see ``docs/design.md``."""
    batch, queries, width = query.shape
    keys, value_width = value.shape[1:]
    out = query.new_empty((batch, queries, value_width))
    applied = query.new_empty((batch, queries, keys) if weights else 0)
    vector, bias = _wide(v), None if bias is None else _wide(bias)
    _cpu.additive_forward(
        _DTYPES[query.dtype],
        torch.get_num_threads(),
        (batch, queries, keys, width, value_width),
        (_headless(query), _headless(key), _headless(value)),
        vector.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        _additive_options(attn_mask, seed, (batch, queries, keys), causal, dropout_p),
        (_headless(out), _headless(applied) if weights else None),
    )
    return out, applied


# Parts of the gradients of keys are summed over at most this many chunks of queries.
_MOST_CHUNKS = 8
_CHUNK_ROWS = 128


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
    causal: bool,
    dropout_p: float,
    weights: bool,
    needs_mask_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of query, key, value, v, bias and the mask, see ``docs/design.md``."""
    batch, queries, width = query.shape
    keys, value_width = value.shape[1:]
    if grad_out is None:
        grad_out = query.new_zeros(1).expand(batch, queries, value_width)
    grad_query, grad_key, grad_value = (x.new_empty(x.shape) for x in (query, key, value))
    vector, wide_bias = _wide(v), None if bias is None else _wide(bias)
    grad_v, grad_bias = vector.new_empty(width), vector.new_empty(width)
    grad_scores = grad_mask = None
    if needs_mask_grad:
        assert attn_mask is not None
        grad_scores = vector.new_empty((batch, queries, keys))
        if attn_mask.shape != grad_scores.shape:  # thousands of terms in one element
            grad_mask = torch.zeros(attn_mask.shape, dtype=torch.float64)
    chunk = max(_CHUNK_ROWS, -(-queries // (_MOST_CHUNKS * _CHUNK_ROWS)) * _CHUNK_ROWS)
    chunks = -(-queries // chunk)
    direct = chunks == 1 and query.dtype == vector.dtype
    part = 2 * width + (0 if direct else keys * (width + value_width))
    parts = vector.new_empty(max(1, batch * chunks * part))  # its address says "backward"
    _cpu.additive_backward(
        _DTYPES[query.dtype],
        torch.get_num_threads(),
        (batch, queries, keys, width, value_width),
        (_headless(query), _headless(key), _headless(value)),
        vector.data_ptr(),
        0 if wide_bias is None else wide_bias.data_ptr(),
        _additive_options(attn_mask, seed, (batch, queries, keys), causal, dropout_p),
        (_headless(grad_out), None if grad_weights is None else _headless(grad_weights)),
        (
            _headless(grad_query),
            _headless(grad_key),
            _headless(grad_value),
            grad_v.data_ptr(),
            grad_bias.data_ptr(),
            0 if grad_scores is None else grad_scores.data_ptr(),
            None
            if grad_mask is None
            else _broadcast_operand(grad_mask.unsqueeze(1), (batch, 1, queries, keys)),
        ),
        (parts.data_ptr(), chunk, chunks, direct),
    )
    if grad_mask is None:
        grad_mask = grad_scores
    return (
        grad_query,
        grad_key,
        grad_value,
        grad_v.to(v.dtype),
        None if bias is None else grad_bias.to(bias.dtype),
        None if attn_mask is None or grad_mask is None else grad_mask.to(attn_mask.dtype),
    )


def scaled_dot_product_attention(
    query: Tensor,  # [B, Hq, Lq, D]
    key: Tensor,  # [B, Hkv, Lk, D]
    value: Tensor,  # [B, Hkv, Lk, Dv]
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    seed: Tensor | None = None,
    *,
    scale: float,
    offset: int,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    weights: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(out, lse, weights)``, see ``docs/design.md``."""
    batch, heads, queries, width = query.shape
    keys, value_width = value.shape[2:]
    out = empty_output(query, value_width)
    lse = torch.empty((batch, heads, queries), dtype=torch.float64)
    if weights == 1:
        applied = query.new_empty((batch, heads, queries, keys))
    elif weights == 2:
        applied = query.new_empty((batch, queries, keys))
    else:
        applied = query.new_empty(0)
    options = None
    if not (
        attn_mask is None
        and alibi_slopes is None
        and window_left == window_right == -1
        and softcap == dropout_p == 0.0
        and weights == 0
    ):
        options = _options(
            query,
            keys,
            attn_mask,
            alibi_slopes,
            seed,
            offset,
            window_left,
            window_right,
            softcap,
            dropout_p,
            weights,
            applied,
        )
    _cpu.attention_forward(
        _DTYPES[query.dtype],
        torch.get_num_threads(),
        (batch, heads, key.shape[1], queries, keys, width, value_width),
        query.data_ptr(),
        query.stride(),
        key.data_ptr(),
        key.stride(),
        value.data_ptr(),
        value.stride(),
        out.data_ptr(),
        out.stride(),
        lse.data_ptr(),
        scale,
        options,
    )
    return out, lse, applied


# The options of causal attention: of none but window_right.
_CAUSAL = (0, -1, 0, 0.0, None, 0, None, 0.0, 0, 0, None)


def _plain_options(mask: Tensor | None, causal: bool) -> tuple[Any, ...] | None:
    if mask is None:
        return _CAUSAL if causal else None
    operand = mask.data_ptr(), mask.stride()
    right = 0 if causal else -1
    return (0, -1, right, 0.0, operand, _DTYPES[mask.dtype], None, 0.0, 0, 0, None)


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,  # expanded to [B, Hq, Lq, Lk]
    scale: float,
    causal: bool,
    needs_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return ``(out, lse)`` of a call without other options: the least Python that it takes.

    At 16 rows of 64 in 8 heads this saves 4 of 17 us, and leaving out lse, 2.
    """
    batch, heads, queries, width = query.shape
    _, kv_heads, keys, value_width = value.shape
    out = empty_output(query, value_width)
    lse = torch.empty((batch, heads, queries), dtype=torch.float64) if needs_lse else None
    _cpu.attention_forward(
        _DTYPES[query.dtype],
        torch.get_num_threads(),
        (batch, heads, kv_heads, queries, keys, width, value_width),
        query.data_ptr(),
        query.stride(),
        key.data_ptr(),
        key.stride(),
        value.data_ptr(),
        value.stride(),
        out.data_ptr(),
        out.stride(),
        0 if lse is None else lse.data_ptr(),
        scale,
        _plain_options(mask, causal),
    )
    return out, lse


def plain_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value of a ``plain_attention``; nothing is empty."""
    batch, heads, queries, width = query.shape
    _, kv_heads, keys, value_width = value.shape
    grad_query = empty_output(query, width)
    grad_key = empty_output(key, width)
    grad_value = empty_output(value, value_width)
    _cpu.attention_backward(
        _DTYPES[query.dtype],
        torch.get_num_threads(),
        (batch, heads, kv_heads, queries, keys, width, value_width),
        query.data_ptr(),
        query.stride(),
        key.data_ptr(),
        key.stride(),
        value.data_ptr(),
        value.stride(),
        out.data_ptr(),
        out.stride(),
        lse.data_ptr(),
        scale,
        _plain_options(mask, causal),
        (
            _operand(grad_out),
            0,
            None,
            _operand(grad_query),
            _operand(grad_key),
            _operand(grad_value),
            None,
        ),
    )
    return grad_query, grad_key, grad_value


def scaled_dot_product_attention_backward(
    grad_out: Tensor | None,  # [B, Hq, Lq, Dv]
    grad_lse: Tensor | None,  # [B, Hq, Lq]
    grad_weights: Tensor | None,  # as weights
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    offset: int,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    weights: int,
    needs_mask_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, key, value and the mask, see ``docs/design.md``."""
    batch, heads, queries, width = query.shape
    keys, value_width = value.shape[2:]
    if grad_out is None:
        grad_out = query.new_zeros(1).expand(batch, heads, queries, value_width)
    if out.stride(-1) != 1:
        out = out.contiguous()
    if grad_lse is not None:
        grad_lse = grad_lse.to(torch.float64).contiguous()
    empty = min(queries, keys) == 0  # then the kernel has nothing to write
    grad_query = empty_output(query, width)
    grad_key = empty_output(key, width)
    grad_value = empty_output(value, value_width)
    if empty:
        for grad in (grad_query, grad_key, grad_value):
            grad.zero_()
    grad_mask = None
    if needs_mask_grad:
        assert attn_mask is not None
        summed = 1 in attn_mask.shape[2:]  # thousands of terms in one element
        grad_mask = torch.zeros(
            attn_mask.shape, dtype=torch.float64 if summed else _accumulator(query.dtype)
        )
    _cpu.attention_backward(
        _DTYPES[query.dtype],
        torch.get_num_threads(),
        (batch, heads, key.shape[1], queries, keys, width, value_width),
        query.data_ptr(),
        query.stride(),
        key.data_ptr(),
        key.stride(),
        value.data_ptr(),
        value.stride(),
        out.data_ptr(),
        out.stride(),
        lse.data_ptr(),
        scale,
        _options(
            query,
            keys,
            attn_mask,
            alibi_slopes,
            seed,
            offset,
            window_left,
            window_right,
            softcap,
            dropout_p,
            weights,
            None,
        ),
        (
            _operand(grad_out),
            0 if grad_lse is None else grad_lse.data_ptr(),
            None if grad_weights is None else _weights_operand(grad_weights),
            _operand(grad_query),
            _operand(grad_key),
            _operand(grad_value),
            None
            if grad_mask is None
            else _broadcast_operand(grad_mask, (batch, heads, queries, keys)),
        ),
    )
    if grad_mask is not None and attn_mask is not None:
        grad_mask = grad_mask.to(attn_mask.dtype)
    return grad_query, grad_key, grad_value, grad_mask


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x @ weight.T + bias``: x [M, K], weight [N, K] with rows or columns dense, K > 0."""
    rows, width = x.shape
    transposed = weight.stride(1) != 1
    out = torch.empty((rows, weight.shape[0]), dtype=x.dtype)
    _cpu.linear(
        _DTYPES[x.dtype],
        torch.get_num_threads(),
        (rows, weight.shape[0], width),
        x.data_ptr(),
        x.stride(),
        weight.data_ptr(),
        weight.stride(1 if transposed else 0),
        transposed,
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
    )
    return out


def self_attention(
    x: Tensor,
    sizes: tuple[int, int, int, int],
    row_steps: tuple[int, int],
    w_in: int,
    w_in_stride: int,
    b_in: int,
    w_out: int,
    w_out_stride: int,
    b_out: int,
    padding: int,
    padding_stride: tuple[int, ...],
    causal: bool,
) -> Tensor:
    """Return a multi-head self-attention, projections included; see ``nn/_small.py``."""
    out = torch.empty_like(x)
    _cpu.self_attention(
        _DTYPES[x.dtype],
        torch.get_num_threads(),
        sizes,
        row_steps,
        x.data_ptr(),
        w_in,
        w_in_stride,
        b_in,
        w_out,
        w_out_stride,
        b_out,
        padding,
        padding_stride,
        causal,
        out.data_ptr(),
    )
    return out


def sinusoidal_encoding(
    x: Tensor,  # [..., L, D]
    positions: Tensor | None = None,  # [..., L] int64, broadcasts to x
    *,
    offset: int,
    layout: str,
    max_timescale: float,
    scale: float,
    padding_idx: int | None,
) -> Tensor:
    """Return ``x * scale + PE(positions)``, see ``docs/design.md``."""
    out = target = torch.empty_like(x)
    if positions is not None:
        positions = positions.expand(x.shape[:-1])
    if x.ndim > 4:  # the kernel's rank; leading dimensions that are not one run are copied
        x, target = x.flatten(0, -4), out.flatten(0, -4)
        positions = None if positions is None else positions.flatten(0, -3)
    missing = 4 - x.ndim
    table = sinusoids(x.shape[-1], layout, max_timescale)
    _cpu.sinusoidal(
        _DTYPES[x.dtype],
        torch.get_num_threads(),
        (1,) * missing + x.shape,
        x.data_ptr(),
        (0,) * missing + x.stride(),
        target.data_ptr(),
        (0,) * missing + target.stride(),
        0 if positions is None else positions.data_ptr(),
        (0, 0, 0) if positions is None else (0,) * missing + positions.stride(),
        offset,
        table.frequency.buffer_info()[0],
        table.phase.buffer_info()[0],
        len(table.pairs),
        layout == "interleaved",
        table.pairs.buffer_info()[0],
        scale,
        padding_idx,
    )
    if target.data_ptr() != out.data_ptr():
        out.copy_(target.view(out.shape))
    return out


def _options(
    query: Tensor,
    keys: int,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    offset: int,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    weights: int,
    applied: Tensor | None,
) -> tuple[Any, ...] | None:
    """Everything beyond plain attention, None where there is nothing of it."""
    plain = window_left < 0 and window_right < 0 and not softcap and not dropout_p and not weights
    if plain and attn_mask is None and alibi_slopes is None:
        return None
    batch, heads, queries, _ = query.shape
    mask = alibi = None
    if attn_mask is not None:
        mask = _broadcast_operand(attn_mask, (batch, heads, queries, keys))
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.expand(batch, heads)
        alibi = (alibi_slopes.data_ptr(), alibi_slopes.stride())
    return (
        offset,
        window_left,
        window_right,
        softcap,
        mask,
        0 if attn_mask is None else _DTYPES[attn_mask.dtype],
        alibi,
        dropout_p,
        0 if seed is None else int(seed) & 0xFFFFFFFFFFFFFFFF,
        weights,
        _weights_operand(applied) if applied is not None and weights else None,
    )


def _additive_options(
    attn_mask: Tensor | None,
    seed: Tensor | None,
    scores: tuple[int, int, int],
    causal: bool,
    dropout_p: float,
) -> tuple[Any, int, bool, float, int]:
    mask = None
    if attn_mask is not None:
        batch, queries, keys = scores
        mask = _broadcast_operand(attn_mask.unsqueeze(1), (batch, 1, queries, keys))
    return (
        mask,
        0 if attn_mask is None else _DTYPES[attn_mask.dtype],
        causal,
        dropout_p,
        0 if seed is None else int(seed) & 0xFFFFFFFFFFFFFFFF,
    )


def _wide(x: Tensor) -> Tensor:
    """A small vector as the kernel reads it: contiguous, in the dtype of the computation."""
    return x.to(_accumulator(x.dtype)).contiguous()


def _headless(x: Tensor) -> tuple[int, tuple[int, int, int, int]]:
    """[B, L, D] as an operand with a head dimension."""
    b, i, d = x.stride()
    return x.data_ptr(), (b, 0, i, d)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _operand(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.stride()


def _broadcast_operand(
    tensor: Tensor, shape: tuple[int, int, int, int]
) -> tuple[int, tuple[int, ...]]:
    """A dimension of size one is read with stride 0, so a mask is never expanded in memory."""
    strides = tuple(
        0 if size == 1 else stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.data_ptr(), strides


def _weights_operand(weights: Tensor) -> tuple[int, tuple[int, ...]]:
    """Averaged weights [B, Lq, Lk] have no head axis: its stride is 0."""
    strides = weights.stride()
    return weights.data_ptr(), strides if len(strides) == 4 else (strides[0], 0, *strides[1:])
