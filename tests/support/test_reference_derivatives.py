"""The derivatives of the reference of attention, and the reference under transforms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from reference_calls import INF, PLAIN, SEED, attend, normal
from torch import Tensor

from fastattn.backends import reference

pytestmark = pytest.mark.without_kernels

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"window_right": 0},
    "bottom_right": {"window_right": 0, "offset": 1},
    "window": {"window_left": 1, "window_right": 1},
    "softcap": {"softcap": 1.5},
    "alibi": {"slopes": torch.tensor([[0.3, 0.7]], dtype=torch.float64)},
    "dropout": {"dropout_p": 0.4, "seed": SEED},
    "everything": {
        "window_left": 2,
        "window_right": 1,
        "softcap": 2.0,
        "dropout_p": 0.3,
        "seed": SEED,
        "slopes": torch.tensor([[0.3, 0.7], [0.0, 1.0]], dtype=torch.float64),
    },
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    ("mask", "weights"), [("none", 1), ("bool", 2), ("learned", 1), ("learned_broadcast", 2)]
)
def test_first_and_second_derivatives(options: dict[str, Any], mask: str, weights: int) -> None:
    q, k, v = normal(2, 2, 3, 2), normal(2, 1, 4, 2), normal(2, 1, 4, 3)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    m = None
    if mask == "bool":
        m = normal(2, 2, 3, 4) > -0.8
        m[0, 0, 1] = False  # a fully masked row
    elif mask != "none":
        m = normal(1, 2, 1, 4) if mask == "learned_broadcast" else normal(2, 2, 3, 4)
        leaves.append(m.requires_grad_())

    def results(*leaves: Tensor) -> tuple[Tensor, ...]:
        learned = leaves[3] if len(leaves) > 3 else m
        out, lse, w = attend(*leaves[:3], learned, scale=0.7, weights=weights, **options)
        return out, torch.where(lse == -INF, 0.0, lse), w  # numerical differences of -inf are NaN

    assert torch.autograd.gradcheck(results, leaves)
    assert torch.autograd.gradgradcheck(results, leaves, atol=1e-4, fast_mode=True)


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


@pytest.mark.complete
def test_vmap_hessian_and_compile() -> None:
    q, k, v = normal(3, 1, 2, 3, 2), normal(3, 1, 2, 4, 2), normal(3, 1, 2, 4, 2)
    bias = torch.where(normal(3, 4) > -0.5, 0.0, -INF).double().view(1, 1, 3, 4)
    bias[:, :, 1] = -INF

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (attend(q, k, v, bias, softcap=3.0, window_right=1)[0] ** 2).sum()

    mapped = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    for n in range(3):
        leaves = [x[n].clone().requires_grad_() for x in (q, k, v)]
        for a, b in zip(mapped, torch.autograd.grad(loss(*leaves), leaves), strict=True):
            torch.testing.assert_close(a[n], b)
    assert torch.isfinite(torch.func.hessian(loss)(q[0], k[0], v[0])).all()
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q[0], k[0], v[0]), loss(q[0], k[0], v[0]))
