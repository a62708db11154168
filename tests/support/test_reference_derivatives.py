"""The derivatives of the reference of attention, and the reference under transforms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from reference_calls import PLAIN, attend, normal
from torch import Tensor

from fastattn.backends import reference

pytestmark = pytest.mark.without_kernels


def test_backward_is_differentiable() -> None:
    q, k, v, bias = normal(1, 2, 3, 2), normal(1, 2, 4, 2), normal(1, 2, 4, 3), normal(1, 1, 3, 4)
    grads = (normal(1, 2, 3, 3), normal(1, 2, 3), normal(1, 2, 3, 4))
    leaves = [x.requires_grad_() for x in (*grads, q, k, v, bias)]
    options = replace(PLAIN, softcap=2.0, window_right=1, needs_mask_grad=True)

    def backward(*leaves: Tensor) -> tuple[Tensor, ...]:
        out, lse, _ = attend(*leaves[3:])
        found = reference.scaled_dot_product_attention_backward(
            *leaves, None, None, out, lse, options=options
        )
        assert found[3] is not None
        return found[:4]  # type: ignore[return-value]

    assert torch.autograd.gradcheck(backward, leaves)


def test_backward_with_one_tensor_in_three_roles() -> None:
    x = normal(1, 1, 4, 3).requires_grad_()
    out, lse, _ = attend(x, x, x)
    grad = normal(*out.shape)
    parts = reference.scaled_dot_product_attention_backward(
        grad, None, None, x, x, x, None, None, None, out, lse, options=PLAIN
    )
    (whole,) = torch.autograd.grad(out, x, grad)
    torch.testing.assert_close(parts[0] + parts[1] + parts[2], whole)


def test_backward_without_any_gradient_is_zero() -> None:
    q, k, bias = normal(1, 1, 4, 3), normal(1, 1, 5, 3), normal(1, 1, 4, 5)
    out, lse, _ = attend(q, k, k, bias)
    grads = reference.scaled_dot_product_attention_backward(
        None,
        None,
        None,
        q,
        k,
        k,
        bias,
        None,
        None,
        out,
        lse,
        options=replace(PLAIN, needs_mask_grad=True),
    )
    for grad, x in zip(grads[:4], (q, k, k, bias), strict=True):
        assert grad is not None
        assert torch.equal(grad, torch.zeros_like(x))
