"""The adapter of attention over packed sequences of different lengths."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastattn import _cpu
from fastattn.backends.primitives import VarlenOptions


def varlen_attention(
    query: Tensor,  # [Tq, Hq, D]
    key: Tensor,  # [Tk, Hkv, D]
    value: Tensor,  # [Tk, Hkv, Dv]
    cu_seqlens_q: Tensor,  # [B + 1] int64
    cu_seqlens_k: Tensor,  # [B + 1] int64
    alibi_slopes: Tensor | None = None,  # [B|1, Hq]
    seed: Tensor | None = None,
    sinks: Tensor | None = None,  # [1, Hq]
    relative_bias: Tensor | None = None,  # [1, Hq, 2 M + 1]
    mask_program: Tensor | None = None,  # [size] int32, of packed sequences
    *,
    options: VarlenOptions,
) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)``, see ``docs/design.md``."""
    starts = (cu_seqlens_q, cu_seqlens_k)
    biases = (alibi_slopes, seed, sinks, relative_bias, mask_program)
    return _cpu.varlen_attention(options, query, key, value, *starts, *biases, None, None)


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
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    mask_program: Tensor | None = None,
    *,
    options: VarlenOptions,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key, value, sinks and relative bias, or None."""
    grads: Any = _cpu.varlen_attention_backward(
        options,
        grad_out,
        grad_lse,
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        alibi_slopes,
        seed,
        out,
        lse,
        sinks,
        relative_bias,
        mask_program,
    )
    return tuple(grads)
