"""Attention sinks: beyond the case table."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from fastattn import (
    decode_attention,
    merge_states,
    scaled_dot_product_attention,
    use_backend,
    varlen_attention,
)

pytestmark = pytest.mark.usefixtures("seeded")
BACKENDS = pytest.mark.parametrize("backend", ["cpu", "reference"])


def qkv(dtype: torch.dtype = torch.float32, k_len: int = 9) -> list[Tensor]:
    """Random queries, keys and values; two query heads share a key head."""
    return [torch.randn(2, heads, n, 8).to(dtype) for heads, n in ((4, 6), (2, k_len), (2, k_len))]


def attend(*args: Any, **options: Any) -> Any:
    """Attention with grouped heads."""
    return scaled_dot_product_attention(*args, enable_gqa=True, **options)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_sink_of_minus_inf_has_no_effect(backend: str, dtype: torch.dtype) -> None:
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
    assert_close(*results, rtol=0, atol=0)


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
    assert_close(merge_states(*first, *second), whole)


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


# --- packed sequences and caches ------------------------------------------------------------------


@BACKENDS
def test_sequences_without_keys_have_the_lse_of_the_sink(backend: str) -> None:
    query, key, value = torch.randn(3, 9, 4, 8)
    sinks = torch.randn(4, requires_grad=True)
    q_starts, k_starts = torch.tensor([0, 2, 5, 8]), torch.tensor([0, 2, 2, 8])
    with use_backend(backend):
        out, lse = varlen_attention(
            query, key, value, q_starts, k_starts, sinks=sinks, return_lse=True
        )
        (found,) = torch.autograd.grad(lse[:, 2:5].sum(), sinks)
    assert (out[2:5] == 0).all()
    assert_close(lse[:, 2:5], sinks[:, None].expand(4, 3))
    assert (lse[:, 8] == -math.inf).all()  # after the last sequence
    assert_close(found, torch.full((4,), 3.0))


def test_jagged_tensors() -> None:
    rows = [torch.randn(4, n, 8) for n in (3, 5)]
    sinks = torch.randn(4)
    packed = torch.nested.nested_tensor([x.transpose(0, 1) for x in rows], layout=torch.jagged)
    jagged = packed.transpose(1, 2)
    out = scaled_dot_product_attention(jagged, jagged, jagged, sinks=sinks)
    for got, x in zip(out.unbind(), rows, strict=True):
        assert_close(got, scaled_dot_product_attention(x[None], x[None], x[None], sinks=sinks)[0])


def test_decoding() -> None:
    query, keys, values = torch.randn(2, 4, 1, 8), *torch.randn(2, 2, 2, 20, 8)
    sinks = torch.randn(4)
    lengths = torch.tensor([7, 0])
    out, lse = decode_attention(query, keys, values, lengths, sinks=sinks, return_lse=True)
    want, want_lse = attend(
        query[:1], keys[:1, :, :7], values[:1, :, :7], sinks=sinks, return_lse=True
    )
    assert_close(out[:1], want)
    assert_close(lse[:1], want_lse)
    assert (out[1] == 0).all()
    assert_close(lse[1, :, 0], sinks)
    with pytest.raises(RuntimeError, match="decode_attention: sinks requires a gradient"):
        decode_attention(query, keys, values, lengths, sinks=sinks.requires_grad_())


@pytest.mark.parametrize(
    ("sinks", "error", "message"),
    [
        ([0.0], TypeError, "argument 'sinks' must be Tensor, not list"),
        (torch.zeros(3), ValueError, r"sinks must have shape \(4,\), .* got \(3,\)"),
        (torch.zeros(4).double(), TypeError, "sinks must be float32 or .* got float64"),
        (torch.zeros(4, device="meta"), RuntimeError, "sinks must be on query's device cpu"),
    ],
)
def test_errors_of_the_others(sinks: Any, error: type[Exception], message: str) -> None:
    x, starts = torch.zeros(5, 4, 8), torch.tensor([0, 5])
    with pytest.raises(error, match=f"varlen_attention.*{message}"):
        varlen_attention(x, x, x, starts, starts, sinks=sinks)
    x = torch.zeros(1, 4, 5, 8)
    with pytest.raises(error, match=f"decode_attention.*{message}"):
        decode_attention(x, x, x, sinks=sinks)


# --- errors ---------------------------------------------------------------------------------------


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
