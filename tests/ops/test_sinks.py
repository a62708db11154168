"""Attention sinks: what the case table does not show."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, vmap
from torch.testing import assert_close

from fastattn import merge_states, scaled_dot_product_attention, use_backend

BACKENDS = pytest.mark.parametrize("backend", ["cpu", "reference"])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def qkv(dtype: torch.dtype = torch.float32, k_len: int = 9) -> list[Tensor]:
    return [torch.randn(2, heads, n, 8).to(dtype) for heads, n in ((4, 6), (2, k_len), (2, k_len))]


def attend(*args: Any, **options: Any) -> Any:
    return scaled_dot_product_attention(*args, enable_gqa=True, **options)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_sink_of_minus_inf_is_none(backend: str, dtype: torch.dtype) -> None:
    wanted: dict[str, Any] = {"return_lse": True, "need_weights": True}
    mask = torch.rand(6, 9) < 0.5
    mask[2] = False
    leaves = [x.requires_grad_() for x in qkv(dtype)]
    results = []
    for sinks in (None, torch.full((4,), -math.inf)):
        with use_backend(backend):
            found = attend(*leaves, mask, sinks=sinks, **wanted)
            grads = torch.autograd.grad(found[0].sum() + found[2].square().sum(), leaves)
        results.append((*found, *grads))
    for without, with_sink in zip(*results, strict=True):
        assert_close(with_sink, without, rtol=0, atol=0)


@BACKENDS
def test_a_sink_of_inf_takes_all_the_weight(backend: str) -> None:
    leaves = [*qkv(), torch.tensor([0.5, math.inf, -1.0, math.inf])]
    leaves = [x.requires_grad_() for x in leaves]
    with use_backend(backend):
        out, lse, weights = attend(
            *leaves[:3], sinks=leaves[3], return_lse=True, need_weights=True, is_causal=True
        )
        loss = out.sum() + weights.square().sum() + 2 * torch.where(lse == math.inf, 0, lse).sum()
        grads = torch.autograd.grad(loss, leaves)
    for x in (out[:, 1::2], weights[:, 1::2], grads[0][:, 1::2]):
        assert (x == 0).all()
    assert (lse[:, 1::2] == math.inf).all()
    assert all(x.isfinite().all() for x in (out, weights, *grads))


@BACKENDS
def test_a_sink_of_nan_reaches_its_own_head_only(backend: str) -> None:
    with use_backend(backend):
        out, lse = attend(*qkv(), sinks=torch.tensor([0.0, math.nan, 0.0, 0.0]), return_lse=True)
    for x in (out, lse):
        assert x[:, 1].isnan().all()
        assert x[:, [0, 2, 3]].isfinite().all()


@BACKENDS
@pytest.mark.parametrize("k_len", [0, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fully_masked_row_has_the_lse_of_its_sink(
    backend: str, k_len: int, dtype: torch.dtype
) -> None:
    sinks = torch.tensor([-3.0, 0.3, 0.0, 50.0], requires_grad=True)
    tensors = [x.requires_grad_() for x in qkv(dtype, k_len)]
    mask = torch.zeros(6, k_len, dtype=torch.bool)
    with use_backend(backend):
        out, lse = attend(*tensors, mask, sinks=sinks, return_lse=True)
        grad_lse = torch.rand_like(lse)
        grads = torch.autograd.grad((out, lse), (*tensors, sinks), (out + math.nan, grad_lse))
    assert (out == 0).all()
    assert_close(lse, sinks.view(4, 1).expand_as(lse))
    for x in grads[:3]:
        assert (x == 0).all()
    assert_close(grads[3], grad_lse.sum((0, 2)))


def test_states_are_merged_with_the_sinks_in_one_of_them() -> None:
    query, key, value = qkv(k_len=20)
    sinks = torch.randn(4)
    whole = attend(query, key, value, sinks=sinks, return_lse=True)
    first = attend(query, key[:, :, :7], value[:, :, :7], sinks=sinks, return_lse=True)
    second = attend(query, key[:, :, 7:], value[:, :, 7:], return_lse=True)
    for got, want in zip(merge_states(*first, *second), whole, strict=True):
        assert_close(got, want)


@BACKENDS
def test_derivatives(backend: str) -> None:
    leaves = [x.requires_grad_() for x in (*qkv(torch.float64), torch.randn(4).double())]
    mask = torch.rand(6, 9) < 0.6
    mask[1] = False

    def call(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Any:
        with use_backend(backend):
            return attend(
                query,
                key,
                value,
                mask,
                sinks=sinks,
                return_lse=True,
                need_weights=True,
                softcap=2.0,
            )

    forward = backend == "reference"
    assert gradcheck(call, leaves, check_batched_grad=True, check_forward_ad=forward)
    assert gradgradcheck(call, leaves)


def test_the_gradient_of_sinks_has_their_dtype() -> None:
    for dtype, own in ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)):
        sinks = torch.randn(4, dtype=own, requires_grad=True)
        attend(*qkv(dtype), sinks=sinks).sum().backward()
        assert sinks.grad is not None
        assert sinks.grad.dtype is own


def test_autocast_takes_sinks_of_any_float_below_float64() -> None:
    sinks, tensors = torch.randn(4).half(), qkv()
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(*tensors, sinks=sinks)
        assert torch.equal(out, attend(*tensors, sinks=sinks.bfloat16()))
    assert out.dtype is torch.bfloat16


@pytest.mark.parametrize("in_dims", [(0, 0, 0, 0), (0, 0, 0, None), (None, None, None, 0)])
def test_vmap(in_dims: tuple[int | None, ...]) -> None:
    tensors = [*qkv(torch.float64), torch.randn(4).double()]
    inputs = [
        x if d is None else torch.randn(3, *x.shape).double()
        for x, d in zip(tensors, in_dims, strict=True)
    ]

    def call(*x: Tensor) -> Any:
        return attend(*x[:3], sinks=x[3], return_lse=True)

    def gradients(*x: Tensor) -> Any:
        return grad(lambda *y: sum(r.sin().sum() for r in call(*y)), (0, 1, 2, 3))(*x)

    for function in (call, gradients):
        examples = [
            function(*(x if d is None else x[i] for x, d in zip(inputs, in_dims, strict=True)))
            for i in range(3)
        ]
        expected = tuple(torch.stack(column) for column in zip(*examples, strict=True))
        assert_close(vmap(function, in_dims)(*inputs), expected)


def test_compiled() -> None:
    leaves = [x.requires_grad_() for x in (*qkv(), torch.randn(4))]

    def call(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        return attend(query, key, value, sinks=sinks, is_causal=True)

    results = []
    for function in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        out = function(*leaves)
        results.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("sinks", "error", "message"),
    [
        ([0.0] * 4, TypeError, r"argument 'sinks' must be Tensor, not list"),
        (torch.zeros(3), RuntimeError, r"sinks must have shape \(4,\), .* got \(3,\)"),
        (torch.zeros(()), RuntimeError, r"sinks must have shape \(4,\), .* got \(\)"),
        (torch.zeros(2, 4), RuntimeError, r"sinks must have shape \(4,\), .* got \(2, 4\)"),
        (torch.zeros(4, device="meta"), RuntimeError, "must be on query's device cpu, got meta"),
        (torch.zeros(4).double(), RuntimeError, "sinks must be float32 or .* float16, got float64"),
        (torch.zeros(4).bfloat16(), RuntimeError, "query's dtype float16, got bfloat16"),
        (torch.zeros(4).int(), RuntimeError, "sinks must be float32 or .* got int32"),
        (torch.zeros(4).to_sparse(), RuntimeError, "sinks must be a dense tensor, got a sparse"),
    ],
)  # fmt: skip
def test_errors(sinks: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attend(*qkv(torch.float16), sinks=sinks)
