"""Derivatives of attention, up to the third, and what they keep."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attention_calls import attention, loss, rand, stock
from torch import Tensor
from torch.testing import assert_close

pytestmark = pytest.mark.usefixtures("seeded", "fresh_compiler")


def _small(*shape: int) -> Tensor:
    return rand(*shape, requires_grad=True)


def test_third_derivatives(backend: str) -> None:
    query = _small(1, 1, 2, 2)

    def nth(f: Callable[..., Tensor], order: int) -> Tensor:
        result = f(query, query, query).sin().sum()
        for _ in range(order):
            (gradient,) = torch.autograd.grad(result, query, create_graph=True)
            result = gradient.sin().sum()
        return gradient

    assert_close(nth(attention, 3), nth(stock, 3))


def test_an_unused_result_costs_no_gradient(backend: str) -> None:
    query = rand(1, 2, 3, 4, requires_grad=True)
    results = attention(query, query, query, return_lse=True, need_weights=True)
    for n in range(3):
        (alone,) = torch.autograd.grad(results[n].sin().sum(), query, retain_graph=True)
        others = [0.0 if m != n else 1.0 for m in range(3)]
        weighted = sum(w * x.sin().sum() for w, x in zip(others, results, strict=True))
        assert_close(torch.autograd.grad(weighted, query, retain_graph=True)[0], alone)


@pytest.mark.parametrize("results", [(0,), (0, 1), (0, 1, 2)])
def test_saved_memory_is_linear_in_the_length(backend: str, results: tuple[int, ...]) -> None:
    query = rand(1, 2, 64, 4, requires_grad=True)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: (saved.append(x.untyped_storage().nbytes()), x)[1], lambda x: x
    ):
        attention(query, query, query, return_lse=1 in results, need_weights=2 in results)
    assert saved
    assert max(saved) <= query.untyped_storage().nbytes()


def test_checkpointing_recomputes_the_same_dropout(backend: str) -> None:
    query = rand(1, 2, 8, 4, requires_grad=True)

    def call(x: Tensor) -> Tensor:
        return attention(x, x, x, dropout_p=0.5)

    torch.manual_seed(1)
    (expected,) = torch.autograd.grad(loss(call(query)), query)
    torch.manual_seed(1)
    out = torch.utils.checkpoint.checkpoint(call, query, use_reentrant=False)
    assert_close(torch.autograd.grad(loss(out), query)[0], expected)
