"""The definition of memory hops.

``memory_hop_attention`` (Sukhbaatar et al. 2015, https://arxiv.org/abs/1503.08895), for one query
u_1 and the hops k = 1 ... K, with M_k the rows of its input memory and C_k the rows of its output
memory:

    s_ki = scale * M_ki . u_k + bias_ki
    p_ki = exp(s_ki - log sum_j exp(s_kj))     normalize = "softmax"; 0 where excluded
    p_ki = s_ki                                normalize = "none" (the linear start)
    o_k  = sum_i p_ki C_ki
    u_k+1 = phi(H_k u_k + o_k)                 H_k = 1 without hop_proj

Exclusion works as in attention: a memory row that the mask excludes is left out of every sum, even
if it holds NaN or inf, and a fully masked query has o = 0, p = 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn.backends.primitives import AttentionOptions, MemoryHopOptions
from fastattn.backends.reference._masked import INF, compute_dtype, dot_products, replace_nonfinite
from fastattn.backends.reference._vjp import backward_of
from fastattn.backends.reference.sdpa import attend

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


def memory_hop_attention(
    query: Tensor,  # [B, D] or [B, Q, D]
    in_memory: Tensor,  # [B|1, N, D] or [B|1, K, N, D]; [B|1, K+1, N, D] if out_memory is None
    out_memory: Tensor | None,  # [B|1, N, D] or [B|1, K, N, D]
    hop_proj: Tensor | None,  # [D, D] or [K, D, D]
    memory_mask: Tensor | None,  # [B|1, Q|1, K|1, N|1] bool, True takes part
    memory_bias: Tensor | None,  # [B|1, Q|1, K|1, N|1], added to the scores
    *,
    options: MemoryHopOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``(out, trace, stats, weights)``: as query, [..., 2K+1, D], [..., K, 2], [..., K, N].

    ``trace`` holds u_1, o_1, u_2, ..., o_K, u_K+1 in the dtype of the computation. ``stats`` holds
    m and l of p = exp(s - m) / l. Backward needs both; they have no gradient. A backend may choose
    another m; it is -inf for a fully masked query. The weights are empty, [0], unless requested.
    """
    tensors = (query, in_memory, out_memory, hop_proj, memory_mask, memory_bias)
    trace, m, p = hop_states(*tensors, options)
    maxima = torch.stack(m, -1).detach()
    return (
        trace[-1].to(query.dtype),
        torch.stack([x.detach() for x in trace], -2),
        torch.stack([maxima, torch.ones_like(maxima)], -1),
        torch.stack(p, -2).to(query.dtype) if options.weights else query.new_empty(0),
    )


def hop_states(
    query: Tensor,
    in_memory: Tensor,
    out_memory: Tensor | None,
    hop_proj: Tensor | None,
    memory_mask: Tensor | None,
    memory_bias: Tensor | None,
    options: MemoryHopOptions,
    read: Callable[..., tuple[Any, Any, Any]] | None = None,
) -> tuple[list[Any], list[Any], list[Any]]:
    """Return u_1, o_1, u_2, ..., u_K+1 as the query, lse [...] and p [..., N] of each hop.

    A hop reads the memory by the function ``read``, with the arguments and results of
    :func:`_attend`; lse and p may be None.
    """
    if read is None:
        read = _attend if options.normalize == "softmax" else _weigh
    compute = compute_dtype(query.dtype)
    u = query.to(compute) if query.ndim == 3 else query.to(compute)[:, None]  # [B, Q, D]
    trace: list[Any] = [u]
    lses: list[Any] = []
    probabilities: list[Any] = []
    for hop in range(options.hops):
        rows_in = _memory_of_hop(in_memory, hop).to(compute)  # [B|1, N, D]
        if out_memory is not None:
            rows_out = _memory_of_hop(out_memory, hop).to(compute)
        else:  # the next memory of a stack; a single memory is its own output
            rows_out = _memory_of_hop(in_memory, hop + 1).to(compute)
        mask = None if memory_mask is None else _of_hop(memory_mask, hop)  # [B|1, Q|1, N|1]
        bias = None if memory_bias is None else _of_hop(memory_bias, hop)
        o, lse, p = read(u, rows_in, rows_out, mask, bias, options.scale)
        if hop_proj is not None:
            projection = (hop_proj if hop_proj.ndim == 2 else hop_proj[hop]).to(compute)
            u = u @ projection.mT
        u = _ACTIVATIONS[options.activation](u + o)
        trace += [o, u]
        lses.append(lse)
        probabilities.append(p)
    if query.ndim == 3:
        return trace, lses, probabilities
    states = (trace, lses, probabilities)
    first_query = [[None if x is None else x[:, 0] for x in results] for results in states]
    return first_query[0], first_query[1], first_query[2]


memory_hop_attention_backward = backward_of(
    memory_hop_attention,
    results="out trace stats weights",
    takes="grad_out grad_weights query in_memory out_memory hop_proj memory_mask memory_bias "
    "trace stats",
    gives="query in_memory out_memory hop_proj memory_bias",
)


def _memory_of_hop(memory: Tensor, hop: int) -> Tensor:
    """The rows of this hop, [B|1, N, D]; a single memory serves all hops."""
    return memory if memory.ndim == 3 else memory[:, hop]


def _of_hop(x: Tensor, hop: int) -> Tensor:
    """The mask or bias [B|1, Q|1, N|1] of this hop, of x [B|1, Q|1, K|1, N|1]."""
    return x.select(2, hop if x.shape[2] > 1 else 0)


def _attend(
    u: Tensor,  # [B, Q, D]
    rows_in: Tensor,  # [B|1, N, D]
    rows_out: Tensor,
    mask: Tensor | None,  # [B|1, Q|1, N|1]
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return o, lse and p of a hop: attention of one head."""
    added = mask if bias is None else bias
    if mask is not None and bias is not None:
        added = torch.where(mask, bias, -INF)
    if added is not None and added.shape[-1] != rows_in.shape[1]:
        added = added.expand(*added.shape[:-1], rows_in.shape[1])
    o, lse, p = attend(
        u[:, None],
        rows_in[:, None],
        rows_out[:, None],
        None if added is None else added[:, None],
        None,  # no slopes
        None,  # no seed of dropout
        AttentionOptions(scale=scale),
    )
    return o[:, 0], lse[:, 0], p[:, 0]


def _weigh(
    u: Tensor,
    rows_in: Tensor,
    rows_out: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`_attend` without softmax: p are the scores, 0 where excluded, and lse is 0."""
    visible = mask
    if bias is not None:
        finite_bias = bias != -INF
        visible = finite_bias if mask is None else mask & finite_bias
    s = dot_products(u[:, None], rows_in[:, None], visible is not None)[:, 0]
    if visible is not None:
        s = torch.where(visible, s, 0.0)
    s = s * scale
    if bias is not None:
        s = s + torch.where(finite_bias, bias, 0.0).to(s.dtype)
    if visible is None:
        return s @ rows_out, s.new_zeros(s.shape[:2]), s
    # A score that is not finite has no finite gradient.
    s = s * torch.where(visible & ~torch.isfinite(s), s.detach().abs(), 1.0)
    p = torch.where(visible, s, 0.0)
    # In p @ rows_out, 0 * inf is NaN, which only elements of visible rows may produce.
    visible_weights = visible.to(s.dtype).expand_as(p)
    is_nonfinite = torch.where(torch.isfinite(rows_out), 0.0, torch.ones_like(rows_out))
    is_nan = (visible_weights @ is_nonfinite) > 0
    # A product, so that the gradient of the row is NaN too.
    nan = torch.where(is_nan, torch.where(is_nan, torch.nan, 0.0) * p.sum(-1, keepdim=True), 0.0)
    return p @ replace_nonfinite(rows_out) + nan, s.new_zeros(s.shape[:2]), p
