"""Attention over packed sequences on the CUDA kernels: those of attention, sequence by sequence.

Where the sequences begin stays on the GPU, so nothing waits for it: the kernels take it as it is,
and keep to the rows that there are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import _cuda
from fastattn.backends._alloc import empty_output
from fastattn.backends._precision import allows_tf32
from fastattn.backends.cuda import sdpa
from fastattn.backends.cuda.operands import DTYPES, on, operand
from fastattn.backends.primitives import VarlenOptions

__all__ = ["varlen_attention", "varlen_attention_backward", "why_not"]


def why_not(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes: Tensor | None = None,
    *_: Tensor | None,
    **__: Any,
) -> list[str]:
    """Return the reasons why the kernels cannot run on these arguments."""
    one = [x.transpose(0, 1)[None] for x in (query, key, value)]
    return sdpa.why_not(*one, None, alibi_slopes)


def varlen_attention(
    query: Tensor,  # [Tq, Hq, D]
    key: Tensor,  # [Tk, Hkv, D]
    value: Tensor,  # [Tk, Hkv, Dv]
    cu_seqlens_q: Tensor,  # [B + 1] int64
    cu_seqlens_k: Tensor,  # [B + 1] int64
    alibi_slopes: Tensor | None = None,  # [B|1, Hq]
    seed: Tensor | None = None,
    *,
    options: VarlenOptions,
) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)``, see ``docs/design.md``."""
    rows, heads, _ = query.shape
    out = empty_output(query, value.shape[2])
    lse = query.new_empty((heads, rows), dtype=torch.float64)
    starts = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    with on(query) as stream:
        _cuda.attention_forward(
            DTYPES[query.dtype],
            stream,
            _sizes(query, key, value, cu_seqlens_q),
            tuple(map(_operand, (query, key, value, out))),
            lse.data_ptr(),
            options.scale,
            _options(query, alibi_slopes, seed, options, starts),
            None,
        )
    return out, lse


def varlen_attention_backward(
    grad_out: Tensor | None,  # [Tq, Hq, Dv]
    grad_lse: Tensor | None,  # [Hq, Tq]
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    options: VarlenOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, see ``docs/design.md``."""
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    if grad_lse is not None:
        grad_lse = grad_lse.to(torch.float64).contiguous()
    grads = tuple(empty_output(x, x.shape[2]) for x in (query, key, value))
    stats = query.new_empty((*lse.shape, 4), dtype=torch.float32)
    starts = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    with on(query) as stream:
        _cuda.attention_backward(
            DTYPES[query.dtype],
            stream,
            _sizes(query, key, value, cu_seqlens_q),
            tuple(map(_operand, (query, key, value, out))),
            lse.data_ptr(),
            options.scale,
            _options(query, alibi_slopes, seed, options, starts),
            (
                _operand(grad_out),
                0 if grad_lse is None else grad_lse.data_ptr(),
                None,
                *map(_operand, grads),
                stats.data_ptr(),
                None,
            ),
        )
    return grads[0], grads[1], grads[2]


def _sizes(query: Tensor, key: Tensor, value: Tensor, starts: Tensor) -> tuple[int, ...]:
    rows, heads, width = query.shape
    keys, kv_heads, value_width = value.shape
    return starts.shape[0] - 1, heads, kv_heads, rows, keys, width, value_width


def _operand(x: Tensor) -> tuple[int, tuple[int, ...]]:
    """[T, H, D] as an operand [-, H, T, D]."""
    rows, heads, columns = x.stride()
    return x.data_ptr(), (0, heads, rows, columns)


def _options(
    query: Tensor,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    options: VarlenOptions,
    starts: tuple[Tensor, Tensor],
) -> tuple[Any, ...]:
    alibi = None
    if alibi_slopes is not None:
        alibi = operand(alibi_slopes.expand(starts[0].shape[0] - 1, query.shape[1]))
    return (
        0,
        options.window_left,
        options.window_right,
        options.softcap,
        None,
        0,
        alibi,
        options.dropout_p,
        0 if seed is None else seed.data_ptr(),
        0,
        allows_tf32(),
        (starts[0].data_ptr(), starts[1].data_ptr(), options.bottom_right),
    )
