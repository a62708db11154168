"""merge_states of any rank, for kernels that support at most four dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def of_any_rank(run: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Wrap a kernel of ``merge_states`` or its derivative, whose last tensors are the states."""

    def merge(*tensors: Tensor | None, options: Any) -> tuple[Tensor, ...]:
        """Return the results in the shapes and the memory order of the states."""
        states = tensors[-4:]
        assert states[0] is not None
        if states[0].ndim <= 4:
            return run(*tensors, options=options)
        # Views if the strides allow it, else copies. Every second tensor is an lse, without Dv.
        flat = [x if x is None else x.flatten(0, n % 2 - 4) for n, x in enumerate(tensors)]
        shaped = []
        for result, x in zip(run(*flat, options=options), states, strict=False):
            assert x is not None
            ordered, result = torch.empty_like(x), result.view(x.shape)
            shaped.append(result if result.stride() == ordered.stride() else ordered.copy_(result))
        return tuple(shaped)

    return merge


def sizes(out: Tensor) -> tuple[int, ...]:
    """Return (B, H, L, Dv) of an output with two to four dimensions."""
    return (1,) * (4 - out.ndim) + out.shape
