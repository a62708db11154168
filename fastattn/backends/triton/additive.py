"""Additive attention on Triton: the launches of each primitive."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.backends._alloc import summed_to
from fastattn.backends.primitives import (
    AdditiveBackwardOptions,
    AdditiveOptions,
    AttentionOptions,
)
from fastattn.backends.triton._additive_kernels import (
    ScoreOperands,
    additive_backward_column,
    additive_backward_scores,
    additive_backward_value,
    additive_forward,
    additive_scores,
)
from fastattn.backends.triton._attend import Biases, kernel_options
from fastattn.backends.triton._core import Options
from fastattn.backends.triton._launch import block_of, launch, operand, plan, precision


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
) -> tuple[Tensor, Tensor]:
    """Return ``(out, weights)``, see ``docs/design.md``."""
    batch, q_len, width = query.shape
    k_len, value_width = value.shape[1:]
    out = query.new_empty((batch, q_len, value_width))
    applied = query.new_empty((batch, q_len, k_len) if options.weights else 0)
    operands = _score_operands(query, key, v, bias)
    launch_plan = plan("additive", query, block_of(value_width))
    launch(
        additive_forward,
        launch_plan,
        launch_plan.q_tiles(q_len) * batch,
        query.device,
        operands=operands,
        value=operand(value.unsqueeze(1)),
        opt=_options(query, key, attn_mask, seed, options),
        out=operand(out.unsqueeze(1)),
        weights=operand(applied.unsqueeze(1)) if options.weights else None,
        width=width,
        DV=value_width,
        BDV=block_of(value_width),
        PRECISION=precision(),
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
    batch, q_len, width = query.shape
    k_len, value_width = value.shape[1:]
    if grad_out is None:
        grad_out = query.new_zeros(1).expand(batch, q_len, value_width)
    opt = _options(query, key, attn_mask, seed, options)
    operands = _score_operands(query, key, v, bias)
    score_inputs = {"operands": operands, "opt": opt, "width": width}
    launch_plan = plan("additive", query, block_of(value_width))

    def empty_float32(*shape: int) -> Tensor:
        return query.new_empty(shape, dtype=torch.float32)

    scores, grad_scores = empty_float32(batch, q_len, k_len), empty_float32(batch, q_len, k_len)
    maxima, sums = empty_float32(batch, q_len), empty_float32(batch, q_len)
    grad_value = value.new_empty(value.shape)
    softmax_inputs: dict[str, Any] = {
        "p_scores": scores,
        "p_top": maxima,
        "p_sum": sums,
        "grad_out": operand(grad_out.unsqueeze(1)),
        "opt": opt,
        "DV": value_width,
        "BDV": block_of(value_width),
        "PRECISION": precision(),
    }
    tiles = launch_plan.tiles(q_len, k_len) * batch
    launch(additive_scores, launch_plan, tiles, query.device, **score_inputs, p_scores=scores)
    launch(
        additive_backward_scores,
        launch_plan,
        launch_plan.q_tiles(q_len) * batch,
        query.device,
        **softmax_inputs,
        value=operand(value.unsqueeze(1)),
        grad_weights=None if grad_weights is None else operand(grad_weights.unsqueeze(1)),
        p_grad=grad_scores,
    )
    launch(
        additive_backward_value,
        launch_plan,
        launch_plan.k_tiles(k_len) * batch,
        query.device,
        **softmax_inputs,
        grad_value=operand(grad_value.unsqueeze(1)),
    )

    q_tiles = launch_plan.q_tiles(q_len)
    grad_q, grad_k = empty_float32(batch, width, q_len), empty_float32(batch, width, k_len)
    partial_grad_v = empty_float32(batch, width, q_tiles)
    for of_keys, grad_x, tiles_of_x in (
        (False, grad_q, q_tiles),
        (True, grad_k, launch_plan.k_tiles(k_len)),
    ):
        launch(
            additive_backward_column,
            launch_plan,
            tiles_of_x * batch * width,
            query.device,
            **score_inputs,
            p_grad=grad_scores,
            p_grad_x=grad_x,
            p_grad_v=None if of_keys else partial_grad_v,
            OF_KEYS=of_keys,
        )
    grad_v = partial_grad_v.sum((0, 2), dtype=torch.float64).to(v.dtype)
    grad_bias = grad_mask = None
    if bias is not None:
        grad_bias = grad_q.sum((0, 2), dtype=torch.float64).to(bias.dtype)
    if options.needs_mask_grad:
        assert attn_mask is not None
        grad_mask = summed_to(attn_mask, grad_scores)
    return (
        grad_q.mT.to(query.dtype, memory_format=torch.contiguous_format),
        grad_k.mT.to(key.dtype, memory_format=torch.contiguous_format),
        grad_value,
        grad_v,
        grad_bias,
        grad_mask,
    )


def _score_operands(query: Tensor, key: Tensor, v: Tensor, bias: Tensor | None) -> ScoreOperands:
    """The operands in float32, with query and key as contiguous [B, A, L]."""
    tensors = (query.mT, key.mT, v, bias)
    return ScoreOperands(
        *(None if x is None else x.to(torch.float32).contiguous() for x in tensors)
    )


def _options(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    seed: Tensor | None,
    options: AdditiveOptions,
) -> Options:
    """The options in the form of the kernels: one head, no scale."""
    biases = Biases(None if attn_mask is None else attn_mask.unsqueeze(1), seed=seed)
    sizes = (1, 1, query.shape[1], key.shape[1])
    window = AttentionOptions(scale=1.0, window_right=0 if options.causal else -1)
    attention_options = kernel_options(
        sizes, biases, window, scale=1.0, offset=0, dropout_p=options.dropout_p
    )
    return attention_options._replace(rescored=1)  # scores in the unit of the definition
