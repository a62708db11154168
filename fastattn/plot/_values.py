"""The inputs of the plots: weights as tensors, arrays or lists, and the tokens of both axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def as_matrices(name: str, weights: Any, dims: Sequence[int]) -> Tensor:
    """Return the weights in float32 on the CPU; ``dims`` lists the allowed dimensions."""
    try:
        x = torch.as_tensor(weights)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} must be a tensor, an array or lists of numbers, got {type(weights).__name__}"
        ) from error
    if x.is_complex() or x.is_nested or x.layout is not torch.strided:
        raise TypeError(f"{name} must be dense and real, got {x.dtype}, {x.layout}")
    if x.ndim not in dims or x.numel() == 0:
        allowed = " or ".join(map(str, dims))
        raise ValueError(
            f"{name} must have {allowed} dimensions, none of them empty, got {tuple(x.shape)}"
        )
    return x.detach().to("cpu", torch.float32)


def tokens_of(name: str, tokens: Any, count: int) -> list[str]:
    """Return the labels of one axis: the tokens if given, else numbers."""
    if tokens is None:
        return [str(n) for n in range(count)]
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        raise TypeError(f"{name} must be a sequence of strings, got {type(tokens).__name__}")
    if len(tokens) != count:
        raise ValueError(f"{name} must be {count}, one each, got {len(tokens)}")
    return [str(token) for token in tokens]
