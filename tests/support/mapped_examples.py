"""`torch.vmap` of a function, and of its gradients, against one example after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.testing import assert_close


def assert_maps_examples(
    call: Callable[..., Any], tensors: Sequence[Tensor], in_dims: tuple[int | None, ...]
) -> None:
    """``call`` takes float64 ``tensors``, and returns tensors; three random examples
    are drawn of each tensor that ``in_dims`` maps."""
    inputs = [
        x if d is None else torch.randn(3, *x.shape, dtype=torch.float64)
        for x, d in zip(tensors, in_dims, strict=True)
    ]

    def gradients(*x: Tensor) -> Any:
        return grad(lambda *y: sum(r.sin().sum() for r in call(*y)), tuple(range(len(x))))(*x)

    for function in (call, gradients):
        examples = [
            function(*(x if d is None else x[i] for x, d in zip(inputs, in_dims, strict=True)))
            for i in range(3)
        ]
        expected = tuple(torch.stack(column) for column in zip(*examples, strict=True))
        assert_close(vmap(function, in_dims)(*inputs), expected)
