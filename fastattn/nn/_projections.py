"""The projections of multi-head attention, from rows to heads and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fastattn.nn._linear import linear

__all__ = ["project", "project_out", "project_query"]


def project(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, batch_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The projections as views [N, H, L, D]; inputs that are the same tensor share one GEMM."""
    bias = module.in_proj_bias
    q_weight: Any = module.q_proj_weight  # None if one weight serves all three
    if q_weight is not None:
        weights: Sequence[Tensor] = (q_weight, module.k_proj_weight, module.v_proj_weight)
    else:
        weight = module.in_proj_weight  # [3E, E]
        if query is key and key is value:
            q, k, v = _heads(module, linear(query, weight, bias), batch_dim, 3)
            return q, k, v
        if key is value:
            e = module.embed_dim
            b_q, b_kv = (None, None) if bias is None else (bias[:e], bias[e:])
            (q,) = _heads(module, linear(query, weight[:e], b_q), batch_dim, 1)
            k, v = _heads(module, linear(key, weight[e:], b_kv), batch_dim, 2)
            return q, k, v
        weights = weight.chunk(3)
    biases: Sequence[Tensor | None] = (None, None, None) if bias is None else bias.chunk(3)
    q, k, v = (
        _heads(module, linear(x, w, b), batch_dim, 1)[0]
        for x, w, b in zip((query, key, value), weights, biases, strict=True)
    )
    return q, k, v


def project_query(module: nn.MultiheadAttention, query: Tensor, batch_dim: int) -> Tensor:
    bias = None if module.in_proj_bias is None else module.in_proj_bias[: module.embed_dim]
    weight: Any = module.q_proj_weight
    if weight is None:
        weight = module.in_proj_weight[: module.embed_dim]
    return _heads(module, linear(query, weight, bias), batch_dim, 1)[0]


def _heads(
    module: nn.MultiheadAttention, packed: Tensor, batch_dim: int, count: int
) -> tuple[Tensor, ...]:
    """[N, L, count·E] or [L, N, count·E] -> ``count`` views [N, H, L, D]"""
    split = packed.view(*packed.shape[:2], count, module.num_heads, module.head_dim)
    order = (0, 2, 1, 3) if batch_dim == 0 else (1, 2, 0, 3)
    # unbind first: its backward then writes the gradient of `packed` in its own layout, in one pass
    return tuple(part.permute(order) for part in split.unbind(2))


def project_out(module: nn.MultiheadAttention, out: Tensor, batch_dim: int) -> Tensor:
    """[N, H, L, D] -> [N, L, E] or [L, N, E]"""
    order = (0, 2, 1, 3) if batch_dim == 0 else (2, 0, 1, 3)
    # As in PyTorch, out_proj's parameters are read and it is never called; wrappers rely on that.
    return linear(out.permute(order).flatten(2), module.out_proj.weight, module.out_proj.bias)
