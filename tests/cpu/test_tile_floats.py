"""Attention in float32 on the tiles of AMX, as parts of bfloat16."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tile_attention import attention, grows, in_double, qkv
from torch import Tensor
from within_bound import assert_right

import fastattn


def float_qkv(*shape: int, **kwargs: int) -> list[Tensor]:
    """Numbers of 24 bits."""
    generator = torch.Generator().manual_seed(7)
    found = qkv(*shape, **kwargs)
    return [x.float() + 2.0**-9 * torch.randn(x.shape, generator=generator) for x in found]


Function = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def results(q: Tensor, k: Tensor, v: Tensor, f: Function, quiet: int = -1) -> dict[str, Tensor]:
    """The output and log-sum-exp of f, and the gradients of the inputs. The incoming gradient is
    positive, so that sums of it grow; of query `quiet` it is smaller than a normal number."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = f(*inputs)[:2]
    upstream = torch.rand(out.shape, generator=torch.Generator().manual_seed(out.numel()))
    if quiet >= 0:
        upstream[:, :, quiet] *= 1e-41
    grads = torch.autograd.grad(out, inputs, upstream.to(out))
    tensors = (out.detach(), lse.detach(), *grads)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), tensors, strict=True))


def ours(**options: Any) -> Function:
    return lambda q, k, v: attention(q, k, v, enable_gqa=True, return_lse=True, **options)


def exactly(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, quiet: int = -1
) -> dict[str, Tensor]:
    """The results and gradients in float64."""
    tensors = (x.double() for x in (q, k, v))
    return results(*tensors, lambda q, k, v: in_double(q, k, v, bias), quiet)


def assert_float(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, **options: Any
) -> None:
    """The bound, in float32."""
    if bias is not None and not options:
        options = {"attn_mask": bias}
    found = results(q, k, v, ours(**options))
    assert_right(found, lambda: exactly(q, k, v, bias), torch.float32)


def test_floats_in_pieces(tiles: str) -> None:
    """Of 320 channels, some 270 keys are a piece."""
    assert_float(*float_qkv(1, 2, 40, 500, 320, 40, kv_heads=1))


def test_floats_of_many_keys(tiles: str) -> None:
    """The outputs of 1024 keys are a sum of their own."""
    q, k, v = float_qkv(1, 1, 8, 12000, 32)
    assert_float(q, k, v.abs())  # the sum grows


def test_floats_of_many_queries(tiles: str) -> None:
    """The gradients that 1024 queries give a key are a sum of their own."""
    assert_float(*float_qkv(1, 1, 12000, 8, 32))


def test_each_part_of_a_float_decides(tiles: str) -> None:
    size = torch.tensor([1.0, 1.0 + 2.0**-9, 1.0 + 2.0**-17, 1.0 - 2.0**-23])
    q = size[torch.arange(40) % 4].view(1, 1, 40, 1).expand(1, 1, 40, 32)
    k = size[torch.arange(70) // 4 % 4].view(1, 1, 70, 1) * torch.eye(70, 32)
    assert_float(q.contiguous() * 64, k, k.flip(2).contiguous())


@pytest.mark.parametrize("factor", [40.0, 1e4, 1e30])
def test_a_later_float_far_above_the_first_block(tiles: str, factor: float) -> None:
    assert_float(*float_qkv(1, 1, 64, 300, 32), grows(factor, 33, 300))


@pytest.mark.parametrize("size", [1e-41, 1e-20, 1e18, 1e30])
@pytest.mark.parametrize("which", ["q", "k", "v", "upstream"])
def test_a_row_that_tiles_flush_or_overflow(tiles: str, which: str, size: float) -> None:
    """All its scores are 0, or the softmax would have one weight."""
    q, k, v = float_qkv(1, 1, 50, 90, 40)
    quiet = 20 if which == "upstream" else -1
    if which != "upstream":
        row = {"q": q, "k": k, "v": v}[which][:, :, 20]
        row[:] = 0
        row[..., 0] = size
    if which in "qk":
        {"q": k, "k": q}[which][..., 0] = 0
    expected = exactly(q, k, v, quiet=quiet)
    for name, x in results(q, k, v, ours(), quiet).items():
        last = -1 if x.ndim == 4 else ()
        error, scale = (x - expected[name]).abs(), expected[name].abs().clamp(min=1e-36)
        assert (error.amax(last) < 1e-5 * scale.amax(last)).all(), name


@pytest.mark.parametrize("scale", [1e-15, 1e-11, 1e11, 1e18])
def test_scaled_floats(tiles: str, scale: float) -> None:
    """The scores stay, the output is as large as the values."""
    q, k, v = float_qkv(1, 1, 40, 70, 32)
    q, k, v = q / scale, k * scale, v * scale
    expected = exactly(q, k, v)
    for name, x in results(q, k, v, ours()).items():
        error = (x - expected[name]).norm() / expected[name].norm()
        assert error < 2e-6, (name, error)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_floats(tiles: str, bad: float) -> None:
    """NaN and inf are at the places of the definition: 0 * inf of parts adds none."""
    q, k, v = (x.sign() for x in float_qkv(1, 1, 70, 70, 32))  # of which two parts are 0
    v[:, :, 40, 3], k[:, :, 50, 4], q[:, :, 30, 2] = bad, bad, bad
    out, lse = attention(q, k, v, is_causal=True, return_lse=True)
    hidden = torch.ones(70, 70).triu(1).bool()
    scores = (q.double() @ k.double().mT / math.sqrt(32)).masked_fill(hidden, -math.inf)
    expected = scores.softmax(-1) @ v.double().nan_to_num(0, 0, 0)
    expected[:, :, 40:, 3] += bad * scores.softmax(-1)[:, :, 40:, 40]
    for x, judge in ((out, expected), (lse, scores.logsumexp(-1))):
        finite = judge.isfinite()
        assert torch.equal(x.isfinite(), finite)
        torch.testing.assert_close(x[finite].double(), judge[finite], atol=1e-5, rtol=1e-5)


def test_bits_of_floats_do_not_depend_on_the_threads(tiles: str, same_for_any_threads: Any) -> None:
    q, k, v = float_qkv(1, 2, 300, 1300, 32, kv_heads=1)
    call = ours(is_causal=True, causal_alignment="bottom_right")
    same_for_any_threads(lambda: results(q, k, v, call))


def test_two_parts_only_where_pytorch_allows_them(chosen_tiles: str) -> None:
    q, k, v = float_qkv(1, 2, 70, 130, 64)
    exact = exactly(q, k, v)
    found, reasons = [], []
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high", "medium", "highest"):
            torch.set_float32_matmul_precision(precision)
            found.append(results(q, k, v, ours()))
            reasons.append(fastattn.explain("scaled_dot_product_attention", q, k, v).because)
    finally:
        torch.set_float32_matmul_precision(before)
    assert ["two bfloat16 parts" in x for x in reasons] == [False, True, True, False]
    assert ["three bfloat16 parts" in x for x in reasons] == [True, False, False, True]
    for name, expected in exact.items():
        errors = [float((x[name] - expected).norm() / expected.norm()) for x in found]
        assert errors[0] == errors[3] < 1e-6, (name, errors)
        assert errors[1] == errors[2] < 1e-4, (name, errors)
        assert errors[1] > 1e-6, (name, errors)
        assert torch.equal(found[0][name], found[3][name])
