"""Self-attention over a NestedTensor, which is what ``torch.nn.TransformerEncoder`` makes of a
padded batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastattn.nn._linear import linear
from fastattn.ops.sdpa import scaled_dot_product_attention

if TYPE_CHECKING:
    from fastattn.nn.mha import MultiheadAttention


def nested_self_attention(
    module: MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    need_weights: bool,
    average_attn_weights: bool,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Sequences of N different lengths L_n: no padding is stored, projected or attended.

    Returns the output, nested as ``query``, and the weights padded with 0, [N, (H,) max L_n, max
    L_n], or None.

    Raises:
        AssertionError: in the cases in which ``torch.nn.MultiheadAttention`` takes no NestedTensor.
    """
    reason = _why_not(module, query, key, value, key_padding_mask, attn_mask)
    if reason:
        raise AssertionError(
            "MultiheadAttention does not support NestedTensor outside of its fast path. "
            f"The fast path was not hit because {reason}"
        )
    need_weights = bool(need_weights)
    average_weights = need_weights and bool(average_attn_weights)
    sequences = query.unbind()  # N of [L_n, E]
    lengths = [len(sequence) for sequence in sequences]
    heads = (3, module.num_heads, module.head_dim)
    packed = linear(torch.cat(sequences), module.in_proj_weight, module.in_proj_bias).unflatten(
        -1, heads
    )
    outs, weights = [], []
    for qkv in packed.split(lengths):  # [L_n, 3, H, D]
        q, k, v = qkv.permute(1, 2, 0, 3).unsqueeze(1).unbind()  # [1, H, L_n, D]
        result = scaled_dot_product_attention(
            q,
            k,
            v,
            is_causal=is_causal,
            need_weights=need_weights,
            average_weights=average_weights,
        )
        if need_weights:
            result, w = result
            weights.append(w)
        outs.append(result[0].transpose(0, 1).flatten(1))  # [L_n, E]
    rows = linear(torch.cat(outs), module.out_proj.weight, module.out_proj.bias)
    nested = torch.nested.as_nested_tensor(list(rows.split(lengths)), layout=torch.strided)
    return nested, _pad(weights, max(lengths)) if need_weights else None


def _pad(weights: list[Tensor], longest: int) -> Tensor:
    """N of [1, (H,) L_n, L_n] -> [N, (H,) L, L]"""
    padded = weights[0].new_zeros(len(weights), *weights[0].shape[1:-2], longest, longest)
    for row, w in zip(padded, weights, strict=True):
        row[..., : w.shape[-2], : w.shape[-1]] = w[0]
    return padded


def _why_not(
    module: MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
) -> str:
    """Why PyTorch would refuse this NestedTensor, in its words; empty if it would not."""
    tensors = (
        query,
        module.in_proj_weight,
        module.in_proj_bias,
        module.out_proj.weight,
        module.out_proj.bias,
    )
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    reasons = {
        f"input not batched; expected query.dim() of 3 but got {query.dim()}": query.dim() != 3,
        "torch.backends.mha.get_fastpath_enabled() was not True": (
            not torch.backends.mha.get_fastpath_enabled()
        ),
        "non-self attention was used (query, key, and value are not the same Tensor)": (
            query is not key or key is not value
        ),
        "in_proj_weight was None": module.in_proj_weight is None,
        "in_proj_bias was None": module.in_proj_bias is None,
        "training is enabled": module.training,
        "self.num_heads is not even": module.num_heads % 2 != 0,
        "batch_first was not True": not module.batch_first,
        "self.bias_k was not None": module.bias_k is not None,
        "add_zero_attn was enabled": module.add_zero_attn,
        "supplying both src_key_padding_mask and src_mask at the same time is not supported with "
        "NestedTensor input": (key_padding_mask is not None or attn_mask is not None),
        "some Tensor argument has_torch_function": query.layout != torch.strided,
        "autocast is enabled": torch.is_autocast_enabled(),
        "grad is enabled and at least one of query or the input/output projection weights or "
        "biases requires_grad": needs_grad,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
