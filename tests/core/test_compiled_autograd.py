"""PyTorch's compiled autograd: a backward that is traced as one graph."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from batched_cases import OPERATORS
from batched_modules import MODULES
from torch import Tensor
from torch.testing import assert_close

CASES = {**OPERATORS, **MODULES}


@pytest.fixture(autouse=True)
def _compiled_autograd() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(compiled_autograd=True), warnings.catch_warnings():
        warnings.filterwarnings("error", ".*does not know how to trace.*")
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["sdpa-plain", "sdpa-bias-of-each", "hops-plain", "mha-self"])
def test_gradients_are_those_of_the_engine(name: str) -> None:
    torch.manual_seed(0)
    function, inputs = CASES[name]()

    def scalar(*x: Tensor) -> Tensor:
        found = function(*x)
        return (found[0] if isinstance(found, tuple) else found).sin().sum()

    want = torch.autograd.grad(scalar(*inputs), inputs)
    result = scalar(*inputs)

    @torch.compile(backend="eager")
    def backward() -> None:
        result.backward()

    backward()
    assert_close(tuple(x.grad for x in inputs), want)
