"""The functions of the package flash-attn, with its names and its order of arguments.

``from flash_attn import flash_attn_func`` becomes ``from fastattn.flash_attn import
flash_attn_func``. As there, tensors are [B, L, H, D], ``causal`` and ``window_size`` align the last
query with the last key, a softcap of 0 means none, and there may be fewer key heads than query
heads (https://github.com/Dao-AILab/flash-attention). Every function is an alias of an operator
here; see its documentation for everything else.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastattn.bias import T5
from fastattn.checks import check_real, check_window
from fastattn.masks import Mask
from fastattn.ops._pages import gather_pages
from fastattn.ops.decode import decode_attention
from fastattn.ops.sdpa import scaled_dot_product_attention
from fastattn.ops.varlen import varlen_attention

__all__ = [
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Any:
    """:func:`fastattn.scaled_dot_product_attention` of q, k, v [B, L, H, D].

    Always ``deterministic``. With ``return_attn_probs`` the result is a tuple of the output,
    ``softmax_lse`` [B, H, Lq], and None. flash-attn's third result, the dropped probabilities for
    its own tests, is not supported: with dropout this raises NotImplementedError.
    """
    _refuse_probabilities("flash_attn_func", return_attn_probs, dropout_p)
    if not all(isinstance(x, Tensor) and x.dim() == 4 for x in (q, k, v)):
        raise ValueError("flash_attn_func: q, k and v must be tensors of shape [B, L, H, D]")
    result = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        dropout_p=dropout_p,
        is_causal=causal,
        scale=softmax_scale,
        enable_gqa=True,
        window=window_size,
        softcap=softcap or None,
        alibi_slopes=alibi_slopes,
        sinks=s_aux,
        causal_alignment="bottom_right",
        return_lse=return_attn_probs,
    )
    if return_attn_probs:
        return result[0].transpose(1, 2), result[1], None
    return result.transpose(1, 2)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_func` of one tensor [B, L, 3, H, D]."""
    if not isinstance(qkv, Tensor) or qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ValueError("flash_attn_qkvpacked_func: qkv must be a tensor of [B, L, 3, H, D]")
    q, k, v = qkv.unbind(2)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return flash_attn_func(q, k, v, *options, deterministic, return_attn_probs)


def _as_int(length: int | Tensor) -> Any:
    """Convert an integer tensor without dimensions to an int; leave anything else unchanged."""
    if isinstance(length, Tensor) and length.ndim == 0 and not length.is_floating_point():
        return int(length)
    return length


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
) -> Any:
    """:func:`fastattn.varlen_attention` of packed q, k, v [T, H, D].

    ``deterministic`` and ``return_attn_probs`` are as in :func:`flash_attn_func`, with
    ``softmax_lse`` [H, Tq]. ``max_seqlen_q`` and ``max_seqlen_k`` may be integer tensors without
    dimensions, as ``(cu_seqlens[1:] - cu_seqlens[:-1]).max()`` is.

    With a ``block_table`` [B, P], int32 or int64, k and v are caches of pages, [pages, page size,
    Hkv, D]: the keys of sequence b are the first ``cu_seqlens_k[b + 1] - cu_seqlens_k[b]`` rows of
    the pages ``block_table[b]``. Entries beyond its length are never used. Each call copies these
    rows into packed keys and values, which takes their memory again;
    :func:`flash_attn_with_kvcache` reads the pages in place.
    """
    _refuse_probabilities("flash_attn_varlen_func", return_attn_probs, dropout_p)
    longest_q, longest_k = _as_int(max_seqlen_q), _as_int(max_seqlen_k)
    if block_table is not None:
        k, v = gather_pages(q, k, v, cu_seqlens_k, longest_k, block_table)
    result = varlen_attention(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        longest_q,
        longest_k,
        dropout_p=dropout_p,
        is_causal=causal,
        scale=softmax_scale,
        window=window_size,
        softcap=softcap or None,
        alibi_slopes=alibi_slopes,
        sinks=s_aux,
        causal_alignment="bottom_right",
        return_lse=return_attn_probs,
    )
    return (*result, None) if return_attn_probs else result


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    rotary_positions: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    relative_bias: Tensor | T5 | None = None,
    mask: Mask | None = None,
    s_aux: Tensor | None = None,
) -> Any:
    """:func:`fastattn.decode_attention` of q [B, Lq, H, D]; k and v are written into the cache.

    ``num_splits`` is ignored: splits depend only on the length of the sequence, so the bits do not
    depend on the batch. Without ``rotary_positions``, a rotation raises NotImplementedError for
    fewer queries than new keys, and for several queries without ``causal``, a window or a mask:
    flash-attn would not rotate these queries to the positions of the new tokens.
    """
    name = "flash_attn_with_kvcache"
    if not all(isinstance(x, Tensor) and x.dim() == 4 for x in (q, q if k is None else k)):
        raise ValueError(f"{name}: q and k must be tensors of shape [B, L, H, D]")
    # flash-attn rotates query i as new key i if they are ordered, else all queries as the first.
    default_rotation = rotary_cos is not None and rotary_positions is None
    if default_rotation and k is not None and q.shape[1] != k.shape[1]:
        raise NotImplementedError(
            f"{name}: with rotary_cos each new key must have its query, got "
            f"{q.shape[1]} queries and {k.shape[1]} new keys; else rotate q and k before the call"
        )
    has_window = window_size is not None and check_window(name, window_size) != (-1, -1)
    is_ordered = causal or has_window or mask is not None
    if default_rotation and not is_ordered and q.shape[1] > 1:
        raise NotImplementedError(
            f"{name}: rotary_cos with several queries needs causal, a window_size, "
            "a mask or rotary_positions; else rotate q and k before the call"
        )
    return decode_attention(
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        key=k,
        value=v,
        key_scales=key_scales,
        value_scales=value_scales,
        block_table=block_table,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        is_causal=causal,
        scale=softmax_scale,
        window=window_size,
        softcap=softcap or None,
        alibi_slopes=alibi_slopes,
        sinks=s_aux,
        relative_bias=relative_bias,
        mask=mask,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        rotary_positions=rotary_positions,
        layout="bnhd",
        return_lse=return_softmax_lse,
    )


def _refuse_probabilities(name: str, return_attn_probs: bool, dropout_p: float) -> None:
    """Raise NotImplementedError for flash-attn's dropped probabilities."""
    if return_attn_probs and check_real(name, "dropout_p", dropout_p) > 0:
        raise NotImplementedError(
            f"{name}: return_attn_probs must be False with dropout; for the weights there is "
            "scaled_dot_product_attention(..., need_weights=True)"
        )
