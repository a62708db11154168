"""varlen_attention under autograd, torch.func and torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastattn import varlen_attention

ENDS = torch.tensor([0, 3, 3, 4])
K_ENDS = torch.tensor([0, 2, 4, 9])


def inputs(dtype: torch.dtype = torch.float64, requires_grad: bool = True) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = ((5, 2, 3), (9, 1, 3), (9, 1, 2))
    return [
        torch.randn(shape, generator=draw, dtype=dtype).requires_grad_(requires_grad)
        for shape in shapes
    ]


def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = varlen_attention(q, k, v, ENDS, K_ENDS, return_lse=True, **options)
    return out, lse[:, :4].exp()  # the fifth row is of no sequence


@pytest.mark.filterwarnings("ignore::fastattn.FallbackWarning")
def test_slopes_have_a_gradient_by_the_reference() -> None:
    slopes = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    tensors = inputs(requires_grad=False)
    assert torch.autograd.gradcheck(lambda s: call(*tensors, alibi_slopes=s), (slopes,))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_equals_eager_without_graph_breaks(backend: str, dynamic: bool) -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
        out = varlen_attention(q, k, v, ends, ends, is_causal=True, window=(4, -1))
        return out.sin().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for ends in (torch.tensor([0, 2, 7]), torch.tensor([0, 1, 1, 9])):
        tensors = [torch.randn(int(ends[-1]), 2, 4, requires_grad=True) for _ in range(3)]
        for got, want in zip(
            torch.autograd.grad(compiled(*tensors, ends), tensors),
            torch.autograd.grad(loss(*tensors, ends), tensors),
            strict=True,
        ):
            torch.testing.assert_close(got, want)


def test_vmap_and_functional_gradients(backend: str) -> None:
    tensors = [torch.stack([x, -x, 2 * x]) for x in inputs(requires_grad=False)]
    ends = torch.stack([ENDS, ENDS, torch.tensor([0, 1, 2, 5])])

    def loss(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
        return varlen_attention(q, k, v, ends, K_ENDS, is_causal=True).sin().sum()

    gradient = torch.func.grad(loss, argnums=(0, 1, 2))
    got = torch.vmap(gradient)(*tensors, ends)
    for n in range(3):
        want = gradient(*(x[n] for x in tensors), ends[n])
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a[n], b)
