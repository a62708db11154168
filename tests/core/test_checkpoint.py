"""Every operator and module within ``torch.utils.checkpoint``, against itself outside."""

from __future__ import annotations

import pytest
import torch
from batched_cases import OPERATORS
from batched_modules import MODULES
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

CASES = {**OPERATORS, **MODULES}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::fastattn.FallbackWarning")
def test_gradients_are_those_without_it(name: str) -> None:
    torch.manual_seed(0)
    function, inputs = CASES[name]()

    def scalar(*x: Tensor) -> Tensor:
        found = function(*x)
        found = found if isinstance(found, tuple) else (found,)
        return torch.stack([y.sin().sum() for y in found if y.requires_grad]).sum()

    want = torch.autograd.grad(scalar(*inputs), inputs, allow_unused=True)
    kept = checkpoint(scalar, *inputs, use_reentrant=False)
    assert_close(torch.autograd.grad(kept, inputs, allow_unused=True), want, rtol=0, atol=0)
