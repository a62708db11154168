"""`MultiheadAttention` with its attention on Triton: PyTorch's results and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastattn

pytestmark = pytest.mark.usefixtures("triton_interpreter")

PADDING = torch.arange(9) >= torch.tensor([[9], [6]])
CAUSAL = torch.ones(9, 9, dtype=torch.bool).triu(1)
CALLS: dict[str, dict[str, Any]] = {
    "plain": {"need_weights": False},
    "padding-weights": {"key_padding_mask": PADDING},
    "causal": {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False},
    "bias-weights-of-heads": {
        "attn_mask": torch.linspace(-1, 1, 4 * 81).view(4, 9, 9),
        "average_attn_weights": False,
    },
}


def _results(module: nn.MultiheadAttention, x: Tensor, call: dict[str, Any]) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    out, weights = module(leaf, leaf, leaf, **call)
    total = out.square().sum() + (0 if weights is None else weights.square().sum())
    grads = torch.autograd.grad(total, [leaf, *module.parameters()])
    return [out, *grads] if weights is None else [out, weights, *grads]


@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_are_those_of_torch(name: str, generator: torch.Generator) -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(24, 2, batch_first=True)
    ours = fastattn.MultiheadAttention(24, 2, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 9, 24, generator=generator)
    wanted = _results(theirs, x, CALLS[name])
    with fastattn.use_backend("triton"):
        found = _results(ours, x, CALLS[name])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_within_its_rounding(
    dtype: torch.dtype, generator: torch.Generator
) -> None:
    torch.manual_seed(0)
    exact = nn.MultiheadAttention(24, 2, batch_first=True)
    half = fastattn.MultiheadAttention(24, 2, batch_first=True, dtype=dtype)
    half.load_state_dict(exact.state_dict())
    exact.load_state_dict(half.state_dict())
    x = torch.randn(2, 9, 24, generator=generator).to(dtype)
    wanted, _ = exact(x.float(), x.float(), x.float())
    with fastattn.use_backend("triton"):
        found, _ = half(x, x, x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), wanted, rtol=0, atol=4 * torch.finfo(dtype).eps)
