"""Attention on Triton: converts tensors to operands, and launches each primitive."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.backends._alloc import summed_to
from fastattn.backends._partial import backward_of_part
from fastattn.backends.primitives import AttentionBackwardOptions, AttentionOptions
from fastattn.backends.triton._attend import (
    Attention,
    Biases,
    Cotangents,
    attend,
    backward_statistics,
    differentiate,
    kernel_options,
    positive_scale,
    widths_of,
)
from fastattn.backends.triton._core import Options
from fastattn.backends.triton._launch import launch, operand, plan
from fastattn.backends.triton._sdpa_backward_biases import attention_backward_mask
from fastattn.backends.triton._sdpa_forward import attention_weights


def scaled_dot_product_attention(
    query: Tensor,  # [B, Hq, Lq, D]
    key: Tensor,  # [B, Hkv, Lk, D]
    value: Tensor,  # [B, Hkv, Lk, Dv]
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    seed: Tensor | None = None,
    sinks: Tensor | None = None,  # [B|1, Hq]
    relative_bias: Tensor | None = None,  # [B|1, Hq, 2 M + 1]
    positions: Tensor | None = None,  # [Lk] int32
    mask_program: Tensor | None = None,  # [size] int32
    *,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(out, lse, weights)``, see ``docs/design.md``."""
    batch, heads, q_len, _ = query.shape
    k_len = key.shape[2]
    query, scale, _ = positive_scale(query, options)
    biases = Biases(attn_mask, alibi_slopes, seed, sinks, relative_bias, positions, mask_program)
    opt = _options(query, key, biases, options, scale)
    call = Attention(query, key, value, opt, batch)
    out, lse = attend(call)
    if options.weights == 0:
        return out, lse, query.new_empty(0)

    averaged = options.weights == 2
    applied = query.new_empty((batch, 1 if averaged else heads, q_len, k_len))
    row_statistics = backward_statistics(call, out, lse, Cotangents(), exact=False)
    widths = widths_of(query, value)
    launch_plan = plan("forward_masked", query, widths["BD"])
    launch(
        attention_weights,
        launch_plan,
        launch_plan.tiles(q_len, k_len) * applied.shape[0] * applied.shape[1],
        query.device,
        q=operand(query),
        k=operand(key),
        opt=opt,
        stats=row_statistics,
        weights=operand(applied),
        AVERAGED=averaged,
        D=widths["D"],
        BD=widths["BD"],
        PRECISION=widths["PRECISION"],
    )
    return out, lse, applied[:, 0] if averaged else applied


@backward_of_part(scaled_dot_product_attention)
def scaled_dot_product_attention_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    grad_weights: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    positions: Tensor | None = None,
    mask_program: Tensor | None = None,
    *,
    options: AttentionBackwardOptions,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key, value, mask, sinks and relative bias, or None."""
    biases = Biases(attn_mask, alibi_slopes, seed, sinks, relative_bias, positions, mask_program)
    batch, heads = query.shape[:2]
    cotangents = Cotangents(grad_out, grad_lse, grad_weights)
    if grad_weights is not None and options.weights == 2:
        cotangents = cotangents._replace(
            weights=grad_weights.unsqueeze(1), weight_share=1.0 / max(heads, 1)
        )
    query, scale, sign = positive_scale(query, options)
    opt = _options(query, key, biases, options, scale)
    call = Attention(query, key, value, opt, batch)
    grads, kernel_arguments = differentiate(
        call, out, lse, cotangents, sign, biases, options.needs_mask_grad
    )
    grad_mask = None
    if options.needs_mask_grad:
        assert attn_mask is not None
        grad_mask = _mask_gradient(call, attn_mask, kernel_arguments)
    return *grads[:3], grad_mask, *grads[3:]


def _mask_gradient(call: Attention, attn_mask: Tensor, kernel_arguments: dict[str, Any]) -> Tensor:
    """The gradient of the mask; ``kernel_arguments`` come from ``differentiate``."""
    query, batch = call.query, call.batch
    heads, q_len, k_len = query.shape[1], query.shape[2], call.key.shape[2]
    mask_batch, mask_heads, mask_q, mask_k = attn_mask.shape
    launch_plan = call.plan("backward_mask")
    sum_q, sum_k = mask_q != q_len, mask_k != k_len
    partial_sums = query.new_zeros(
        (
            mask_batch,
            mask_heads,
            launch_plan.q_tiles(q_len) if sum_q else q_len,
            launch_plan.k_tiles(k_len) if sum_k else k_len,
        ),
        dtype=torch.float32,
    )
    launch(
        attention_backward_mask,
        launch_plan,
        launch_plan.tiles(q_len, k_len) * mask_batch * mask_heads,
        query.device,
        **call.operands(),
        **kernel_arguments,
        p_grad=partial_sums,
        mask_heads=mask_heads,
        batch_sum=batch // max(mask_batch, 1),
        head_sum=heads // max(mask_heads, 1),
        SUM_Q=sum_q,
        SUM_K=sum_k,
    )
    return summed_to(attn_mask, partial_sums)


def _options(
    query: Tensor,
    key: Tensor,
    biases: Biases,
    options: AttentionOptions,
    scale: float,
) -> Options:
    """The options of the kernels for a batch [B, H, L, D]."""
    (heads, q_len), (kv_heads, k_len) = query.shape[1:3], key.shape[1:3]
    sizes = (heads, kv_heads, q_len, k_len)
    return kernel_options(sizes, biases, options, scale, options.offset, options.dropout_p)
