"""PyTorch's ``CausalBias`` has no memory: every function that takes a mask must not read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import fastattn

Q, K, V = (torch.randn(shape) for shape in [(2, 3, 4, 8), (2, 3, 6, 8), (2, 3, 6, 5)])

CALLS: dict[str, Callable[[Any], Tensor]] = {
    "scaled_dot_product_attention": lambda mask: fastattn.scaled_dot_product_attention(
        Q, K, V, mask
    ),
    "additive_attention": lambda mask: fastattn.additive_attention(
        Q[0], K[0], V[0], torch.ones(8), attn_mask=mask
    ),
    "attention_stats": lambda mask: fastattn.attention_stats(Q, K, attn_mask=mask).column_sums,
    "hard_attention": lambda mask: fastattn.hard_attention(
        Q, K, V, attn_mask=mask, estimator="straight_through", deterministic=True
    ),
    "hopfield_retrieve": lambda mask: fastattn.hopfield_retrieve(
        Q, K, beta=0.1, attn_mask=mask, update_steps_max=1
    ),
    "hopfield_energy": lambda mask: fastattn.hopfield_energy(Q, K, beta=0.1, attn_mask=mask),
}


@pytest.mark.filterwarnings("ignore:Lower right causal bias")  # PyTorch's own may give NaN
@pytest.mark.parametrize("corner", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("name", CALLS)
def test_a_causal_bias_equals_its_triangle(name: str, corner: Callable[..., Any]) -> None:
    triangle = torch.ones(4, 6, dtype=torch.bool).tril(2 if corner is causal_lower_right else 0)
    torch.testing.assert_close(CALLS[name](corner(4, 6)), CALLS[name](triangle))


@pytest.mark.parametrize("name", CALLS)
def test_a_view_of_a_causal_bias_is_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"attn_mask must be a .*CausalBias"):
        CALLS[name](causal_upper_left(4, 6)[None])


@pytest.mark.parametrize("name", CALLS)
def test_a_causal_bias_of_other_lengths_is_refused(name: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"attn_mask .*4, 5"):
        CALLS[name](causal_upper_left(4, 5))
