"""``torch.vmap`` around derivatives of both modes, against a loop over the examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from batched_cases import OPERATORS
from batched_modules import MODULES
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.testing import assert_close

DRAWING = ("dropout", "hard-attention", "luong-module-concat")
CASES = {
    name: make
    for name, make in {**OPERATORS, **MODULES}.items()
    if not any(word in name for word in DRAWING)
}


def gradient(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Callable[..., Any]:
    found = function(*inputs)
    has = [y.requires_grad for y in (found if isinstance(found, tuple) else (found,))]

    def scalar(*x: Tensor) -> Tensor:
        found = function(*x)
        found = found if isinstance(found, tuple) else (found,)
        pairs = zip(found, has, strict=True)
        return torch.stack([y.sin().sum() for y, keep in pairs if keep]).sum()

    return grad(scalar, tuple(range(len(inputs))))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::fastattn.FallbackWarning")
def test_forward_over_reverse(name: str) -> None:
    """Some arguments are common to all examples, the others lie in any dimension."""
    torch.manual_seed(0)
    function, inputs = CASES[name]()
    derivative = gradient(function, inputs)
    primals = [x.detach() for x in inputs]
    tangents = tuple(torch.randn_like(x) for x in primals)
    count = len(primals)
    dims = tuple(None if 0 < n == count - 1 else (0, -1)[n % 2] for n in range(count))
    batches = [
        x if dim is None else torch.stack([x, x + 0.1 * torch.randn_like(x)], dim)
        for x, dim in zip(primals, dims, strict=True)
    ]

    def product(*x: Tensor) -> Any:
        return jvp(derivative, x, tangents)

    rows = [
        product(*(x if d is None else x.select(d, n) for x, d in zip(batches, dims, strict=True)))
        for n in range(2)
    ]
    want = tuple(
        tuple(torch.stack(pair) for pair in zip(*column, strict=True))
        for column in zip(*rows, strict=True)
    )
    assert_close(vmap(product, in_dims=dims)(*batches), want, rtol=1e-9, atol=1e-11)
