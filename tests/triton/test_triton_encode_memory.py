"""Memory encoding on Triton: nothing to encode, and words that occur often."""

from __future__ import annotations

import pytest
import torch

import fastattn

pytestmark = pytest.mark.usefixtures("triton_interpreter")


@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 0, 3), (2, 2, 0)])
def test_nothing_to_encode(shape: tuple[int, int, int]) -> None:
    tokens, weight = torch.zeros(shape, dtype=torch.int64), torch.ones(4, 5, requires_grad=True)
    with fastattn.use_backend("triton"):
        out = fastattn.encode_memory(tokens, weight, padding_idx=None)
        (grad,) = torch.autograd.grad(out.sum(), weight)
    assert torch.equal(out, torch.zeros(*shape[:2], 5))
    assert torch.equal(grad, torch.zeros(4, 5))


def test_a_common_word_is_summed_in_one_order(generator: torch.Generator) -> None:
    """More places than a program takes at once; the same bits in every run."""
    tokens = torch.randint(0, 3, (4, 9, 11), generator=generator)
    grad = torch.randn(4, 9, 6, generator=generator)
    weight = torch.randn(3, 6, generator=generator, requires_grad=True)
    found = []
    for name in ("triton", "triton", "reference"):
        with fastattn.use_backend(name):
            out = fastattn.encode_memory(tokens, weight)
            found.append(torch.autograd.grad(out, weight, grad)[0])
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], found[2], rtol=1e-5, atol=1e-5)
