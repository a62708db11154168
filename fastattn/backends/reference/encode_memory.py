"""The definition of memory encoding."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.backends.primitives import EncodeMemoryBackwardOptions, EncodeMemoryOptions
from fastattn.backends.reference._masked import compute_dtype
from fastattn.compat import runs_eagerly


def encode_memory(
    tokens: Tensor,  # [R, B, N, J] int64
    weight: Tensor,  # [R, G, V, D]
    factors: Tensor,  # [J, D]
    temporal: Tensor | None,  # [R, G, N, D]
    *,
    options: EncodeMemoryOptions,
) -> Tensor:
    """Return sum_j factors_j o weight[tokens_j] + temporal [R, B, G, N, D] (Sukhbaatar et al. 2015,
    https://arxiv.org/abs/1503.08895). A padding token is left out of the sum, not multiplied by 0.
    A sentence that is all padding gives 0.
    """
    _check_tokens(tokens, weight.shape[2], options.padding_idx)
    compute = compute_dtype(weight.dtype)
    index, is_word = _rows_of_tokens(tokens, weight.shape[2], options.padding_idx)
    index = index.unsqueeze(1).expand(-1, weight.shape[1], -1, weight.shape[3])
    table = torch.nn.functional.pad(weight.to(compute), (0, 0, 0, 1))  # [R, G, V + 1, D]
    words = table.gather(2, index).unflatten(2, tokens.shape[1:])  # [R, G, B, N, J, D]
    memory = torch.where(is_word, words * factors, 0.0).sum(-2)
    if temporal is not None:
        memory = torch.where(is_word.any(-2), memory + temporal.to(compute).unsqueeze(2), 0.0)
    return memory.transpose(1, 2).to(weight.dtype)


def encode_memory_backward(
    grad: Tensor,  # [R, B, G, N, D]
    tokens: Tensor,
    factors: Tensor,
    *,
    options: EncodeMemoryBackwardOptions,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight [R, G, rows, D] and temporal [R, G, N, D] (or empty)."""
    rows = options.rows
    _check_tokens(tokens, rows, options.padding_idx)
    index, is_word = _rows_of_tokens(tokens, rows, options.padding_idx)
    g = grad.to(compute_dtype(grad.dtype)).transpose(1, 2)  # [R, G, B, N, D]
    words = torch.where(is_word, g.unsqueeze(-2) * factors, 0.0).flatten(2, 4)  # [R, G, B N J, D]
    index = index.unsqueeze(1).expand(-1, g.shape[1], -1, g.shape[4])
    table = g.new_zeros((*g.shape[:2], rows + 1, g.shape[4])).scatter_add(2, index, words)
    grad_temporal = g.new_empty(0)
    if options.temporal:
        grad_temporal = torch.where(is_word.any(-2), g, 0.0).sum(2)
    return table[:, :, :rows].to(grad.dtype), grad_temporal.to(grad.dtype)


def _rows_of_tokens(tokens: Tensor, rows: int, padding_idx: int | None) -> tuple[Tensor, Tensor]:
    """Return each token's row [R, B N J, 1], ``rows`` for padding, and which tokens are words."""
    is_word = torch.ones_like(tokens, dtype=torch.bool)
    if padding_idx is not None:
        is_word = tokens != padding_idx
    index = torch.where(is_word, tokens, rows).flatten(1)
    return index.unsqueeze(-1), is_word[:, None, ..., None]


def _check_tokens(tokens: Tensor, rows: int, padding_idx: int | None) -> None:
    """Raise IndexError for a token that is neither the padding nor in [0, rows).

    Only in eager execution on the CPU, where reading the values costs no synchronization.
    """
    if not (tokens.is_cpu and runs_eagerly(tokens)):
        return
    invalid = (tokens < 0) | (tokens >= rows)
    if padding_idx is not None:
        invalid &= tokens != padding_idx
    if invalid.any():
        _, *index = invalid.nonzero()[0].tolist()
        raise IndexError(f"tokens{index} is {int(tokens[invalid][0])}, but weight has {rows} rows")
