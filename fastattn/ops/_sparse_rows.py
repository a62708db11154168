"""Sparse gradients of a table: only the rows that are used, not the whole table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastattn.compat import is_first_vmap, transforms_active


def keep_used_rows(
    tokens: Tensor, weight: Tensor, padding_idx: int | None
) -> tuple[Tensor, Tensor, int | None]:
    """Reduce a table to the rows that the tokens use, so that its gradient is sparse.

    Return the tokens, the weight and padding_idx for the smaller table, which give the same result.
    The gradient of ``weight``, [V, D] or [G, V, D], has each used row once.

    Raises:
        IndexError: a token that is neither the padding nor a row.
    """
    words, word_places = tokens.unique(return_inverse=True)
    is_used = torch.ones_like(words, dtype=torch.bool)
    if padding_idx is not None:
        is_used = words != padding_idx
    is_wrong = is_used & ((words < 0) | (words >= weight.shape[-2]))
    if is_wrong.any():
        token = int(words[is_wrong][0])
        where = (tokens == token).nonzero()[0].tolist()
        raise IndexError(f"tokens{where} is {token}, but weight has {weight.shape[-2]} rows")
    new_rows = (is_used.cumsum(0) - 1).masked_fill(~is_used, -1)  # of each word; -1: padding
    used_weight = _SelectRows.apply(weight, words[is_used].long())
    return new_rows[word_places], used_weight, None if padding_idx is None else -1


class _SelectRows(torch.autograd.Function):
    """Select weight[..., rows, :]; the rows are sorted and unique."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = weight.shape
        return weight.index_select(-2, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if is_first_vmap(grad) or transforms_active():
            raise RuntimeError(
                "encode_memory: sparse=True has no batched gradients, because a sparse tensor "
                "cannot hold a batch of them; use sparse=False"
            )
        (rows,) = ctx.saved_tensors
        index = rows[None]  # [1, U], or [2, G·U]
        if grad.ndim == 3:
            tables = torch.arange(grad.shape[0], device=grad.device)
            index = torch.stack((tables.repeat_interleave(len(rows)), rows.repeat(grad.shape[0])))
            grad = grad.flatten(0, 1)
        properties: dict[str, Any] = {"is_coalesced": True, "check_invariants": False}
        return torch.sparse_coo_tensor(index, grad, ctx.shape, **properties), None
