"""The attention function for diffusers' registry."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastattn.ops import scaled_dot_product_attention


# diffusers drops, without an error, each argument that has no parameter here.
def attention_forward(
    query: Tensor,  # [B, Lq, Hq, D]
    key: Tensor,  # [B, Lk, Hkv, D]
    value: Tensor,  # [B, Lk, Hkv, Dv]
    attn_mask: Tensor | None = None,  # [B, Lk], or broadcastable to [B, Hq, Lq, Lk]
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Any:  # [B, Lq, Hq, Dv], with return_lse also [B, Hq, Lq]
    """Attention as diffusers' backend "native" computes it, on fused kernels."""
    if _parallel_config is not None:
        raise ValueError(
            "fastattn's attention for diffusers does not support context parallelism; "
            "call model.set_attention_backend('native') for it"
        )
    padding_shape = (query.shape[0], key.shape[1])
    if attn_mask is not None and attn_mask.shape == padding_shape:
        attn_mask = attn_mask[:, None, None]
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    result = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        return_lse=return_lse,
    )
    if not return_lse:
        return result.transpose(1, 2)
    out, lse = result
    return out.transpose(1, 2), lse
