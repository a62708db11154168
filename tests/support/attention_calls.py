"""Inputs of ``scaled_dot_product_attention``, and PyTorch's own function, for its tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastattn

attention = fastattn.scaled_dot_product_attention


def rand(*shape: int, dtype: torch.dtype = torch.float64, requires_grad: bool = False) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)


def stock(*args: Any, **kwargs: Any) -> Tensor:
    """PyTorch's own attention, by its definition: it can be differentiated twice."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


def assert_same(ours: Tensor, expected: Tensor) -> None:
    assert ours.shape == expected.shape
    torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-12)


def qkv(requires_grad: bool = False, heads: int = 4) -> list[Tensor]:
    """Random queries, keys and values."""
    shapes = ((2, 4, 5, 4), (2, heads, 7, 4), (2, heads, 7, 6))
    return [rand(*shape, requires_grad=requires_grad) for shape in shapes]


# Every argument of the primitive at once, except dropout.
EVERYTHING: dict[str, Any] = {
    "softcap": 2.0,
    "window": (3, 4),
    "causal_alignment": "bottom_right",
    "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0], dtype=torch.float64),
    "return_lse": True,
    "need_weights": True,
}


def everything(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Attention with every option and result."""
    return attention(query, key, value, mask, **EVERYTHING)


def loss(results: Any) -> Tensor:
    """A number that depends on all results."""
    results = (results,) if isinstance(results, Tensor) else results
    return sum((x.sin().sum() for x in results), start=torch.zeros((), dtype=torch.float64))


def compiled(function: Callable[..., Any], dynamic: bool, backend: str = "aot_eager") -> Any:
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)
