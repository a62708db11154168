"""Local attention: the kernel under luong_attention's windows."""

from __future__ import annotations

import pytest
import torch
from case_table import within_the_bound
from torch import Tensor

import fastattn
from fastattn.backends.primitives import LocalOptions
from fastattn.ops.luong import local_attention
from fastattn.testing import Target

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]

test_case = within_the_bound("luong_attention")


OPTIONS = LocalOptions(reach=2, bell=True)


def operands(dtype: torch.dtype = torch.float64, grad: bool = True) -> tuple[Tensor, ...]:
    """query, key, value, positions, padding, factor; some windows are outside or at an end."""
    draw = torch.Generator().manual_seed(0)
    query, key, value, factor = (
        torch.randn(2, *size, dtype=torch.float64, generator=draw).to(dtype)
        for size in [(5, 3), (7, 3), (7, 2), (5, 5)]
    )
    positions = [[-1.3, 1.5, 4.2, 6.7, 20.1], [-9.1, 2.2, 2.6, 7.9, 3.1]]
    p = torch.tensor(positions, dtype=torch.promote_types(dtype, torch.float32))
    padding = torch.rand(2, 7, generator=draw) < 0.2
    leaves = (x.requires_grad_(grad) for x in (query, key, value, p))
    return *leaves, padding, factor


@pytest.mark.parametrize("position", [float("inf"), -float("inf"), 1e30, -1e30])
def test_a_window_without_keys_has_no_result(target: Target, position: float) -> None:
    query, key, value, p, padding, _ = operands()
    p.data[0, 1] = position
    with fastattn.use_backend(target.backend):
        out, weights = local_attention(query, key, value, p, padding, None, OPTIONS)
        assert not out[0, 1].any()
        assert not weights[0, 1].any()
        grads = torch.autograd.grad(out.square().sum(), (query, key, value, p))
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[3][0, 1].any()
    assert not grads[0][0, 1].any()


@pytest.mark.parametrize("bell", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_query_at_nan_is_nan(engine: Target, dtype: torch.dtype, bell: bool) -> None:
    """So are the gradients of every key that it may have seen: all but the padding."""
    query, key, value, p, padding, factor = operands(dtype)
    p.data[0, 1] = float("nan")
    padding[0] = torch.tensor([True, True, False, True, False, False, False])
    options = LocalOptions(reach=2, bell=bell)
    for extra in (None, factor):
        out, weights = local_attention(query, key, value, p, padding, extra, options)
        for x in (out, weights):
            assert x[0, 1].isnan().all()
            assert not x[0, [0, 2, 3, 4]].isnan().any()
            assert not x[1].isnan().any()
        for results, of_value in (((out, weights), True), ((out,), True), ((weights,), False)):
            total = sum(x.sum() for x in results)
            grads = torch.autograd.grad(total, (query, key, value, p), retain_graph=True)
            of_query, of_key, of_rows, of_p = (x.isnan() for x in grads)
            assert torch.equal(of_query[0].any(-1), torch.arange(5) == 1)
            assert torch.equal(of_key[0].all(-1), ~padding[0])
            assert not of_key[0, padding[0]].any()
            assert torch.equal(of_rows[0].any(-1), ~padding[0] & of_value)
            assert torch.equal(of_p[0], (torch.arange(5) == 1) & (of_value and bell))
            assert not any(x[1].any() for x in (of_query, of_key, of_rows, of_p))


def test_a_query_at_nan_without_keys_has_no_result(engine: Target) -> None:
    query, key, value, p, padding, _ = operands()
    p.data[0, 1] = float("nan")
    padding[0] = True
    results = local_attention(query, key, value, p, padding, None, OPTIONS)
    grads = torch.autograd.grad(sum(x.sum() for x in results), (query, key, value, p))
    assert not any(x[0].any() for x in (*results, *grads))
    empty = local_attention(query, key[:, :0], value[:, :0], p, padding[:, :0], None, OPTIONS)
    assert not any(x.any() for x in empty)


def test_nan_reaches_only_the_keys_of_its_window(backend: str) -> None:
    query, key, value, p, padding, factor = operands()
    query.data[0, 2] = float("nan")  # whose window is of keys 3 to 6
    padding[0] = torch.tensor([False] * 4 + [True, False, True])
    out, weights = local_attention(query, key, value, p, padding, factor, OPTIONS)
    assert out[0, 2].isnan().all()
    assert not out[0, [0, 1, 3, 4]].isnan().any()
    for grad in torch.autograd.grad(out.sum() + weights.sum(), (key, value)):
        assert grad[0, [3, 5]].isnan().all()
        assert not grad[0, [0, 1, 2, 4, 6]].isnan().any()


def test_the_gradient_of_a_factor() -> None:
    *leaves, padding, factor = operands()
    factor.requires_grad_()
    with fastattn.use_backend("reference"):
        out, _ = local_attention(*leaves, padding, factor, OPTIONS)
    assert torch.autograd.grad(out.sum(), factor)[0].abs().sum() > 0
