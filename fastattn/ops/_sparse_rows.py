"""Sparse gradients of a table: only the rows that are used, not the whole table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastattn.compat import is_first_vmap, transforms_active


def used_rows(
    tokens: Tensor, weight: Tensor, padding_idx: int | None
) -> tuple[Tensor, Tensor, int | None]:
    """Return tokens, weight and padding_idx renumbered to a table of the used rows only.

    The result is the same. The gradient of weight, [V, D] or [G, V, D], is sparse: each used row
    occurs once.

    Raises:
        IndexError: a token that is neither the padding nor a row.
    """
    words, place = tokens.unique(return_inverse=True)
    used = torch.ones_like(words, dtype=torch.bool) if padding_idx is None else words != padding_idx
    wrong = used & ((words < 0) | (words >= weight.shape[-2]))
    if wrong.any():
        word = int(words[wrong][0])
        where = (tokens == word).nonzero()[0].tolist()
        raise IndexError(f"tokens{where} is {word}, but weight has {weight.shape[-2]} rows")
    number = (used.cumsum(0) - 1).masked_fill(~used, -1)  # the new row of each word; -1: padding
    rows = _Rows.apply(weight, words[used].long())
    return number[place], rows, None if padding_idx is None else -1


class _Rows(torch.autograd.Function):
    """weight[..., words, :]; words are sorted and unique."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, words: Tensor) -> Tensor:
        ctx.save_for_backward(words)
        ctx.shape = weight.shape
        return weight.index_select(-2, words)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if is_first_vmap(grad) or transforms_active():
            raise RuntimeError(
                "encode_memory: sparse=True has no batched gradients, because a sparse tensor "
                "cannot hold a batch of them; use sparse=False"
            )
        (words,) = ctx.saved_tensors
        index = words[None]  # [1, U], or [2, G·U]
        if grad.ndim == 3:
            tables = torch.arange(grad.shape[0], device=grad.device)
            index = torch.stack((tables.repeat_interleave(len(words)), words.repeat(grad.shape[0])))
            grad = grad.flatten(0, 1)
        made: dict[str, Any] = {"is_coalesced": True, "check_invariants": False}
        return torch.sparse_coo_tensor(index, grad, ctx.shape, **made), None
