"""Mixtures of experts of transformers: each expert's rows in linear layers on the fastest GEMM."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from fastattn.compat import runs_eagerly
from fastattn.nn.functional import linear


def experts_interface() -> Any:
    """transformers' registry of functions for experts; None in versions without one."""
    try:
        moe = importlib.import_module("transformers.integrations.moe")
    except ImportError:
        return None
    return getattr(moe, "ExpertsInterface", None)


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run the experts of a layer on the tokens that the router assigned to them.

        y_t = Σ_k w_tk down_e(gate(up_e(x_t))),   e = top_k_index[t, k]

    The rows of an expert are gathered, so each of its products is one linear layer, whose GEMM is
    the fastest for the dtype, the size and the processor.

    Args:
        hidden_states, top_k_index, top_k_weights: x [T, E]; [T, K], where the index
            ``num_experts`` means no expert; w [T, K].
    """
    if not (hidden_states.is_cpu and runs_eagerly(hidden_states, top_k_index, top_k_weights)):
        moe = importlib.import_module("transformers.integrations.moe")
        y: Tensor = moe.grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
        return y
    experts_per_token = top_k_index.shape[-1]
    experts, order = top_k_index.reshape(-1).sort(stable=True)
    counts = experts.bincount(minlength=self.num_experts)[: self.num_experts].tolist()
    counts.append(len(experts) - sum(counts))  # rows without an expert
    *rows, other_rows = hidden_states[order // experts_per_token].split(counts)
    up_layers = _layers(self, "gate_up_proj" if self.has_gate else "up_proj")
    outputs = []
    for x, up, down in zip(rows, up_layers, _layers(self, "down_proj"), strict=False):
        if len(x):
            h = linear(x, *up)
            outputs.append(linear(self._apply_gate(h) if self.has_gate else self.act_fn(h), *down))
    outputs.append(other_rows.new_zeros(len(other_rows), hidden_states.shape[1]))
    rows_out = torch.cat(outputs)
    if getattr(self, "has_post_expert_norm", False):
        rows_out = self.post_expert_norm(rows_out)
    rows_out = rows_out * top_k_weights.reshape(-1)[order, None]
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    return (
        rows_out[inverse]
        .view(-1, experts_per_token, rows_out.shape[1])
        .sum(1)
        .to(hidden_states.dtype)
    )


def _layers(experts: Any, name: str) -> list[tuple[Tensor, Tensor | None]]:
    """The weight and the bias of each expert; `unbind` makes one gradient for all of them."""
    weights = getattr(experts, name).unbind(0)
    biases = (
        getattr(experts, f"{name}_bias").unbind(0) if experts.has_bias else [None] * len(weights)
    )
    if experts.is_transposed:
        weights = [w.t() for w in weights]
    return list(zip(weights, biases, strict=True))
