"""Attention on the tiles of AMX, emulated and, where there are any, real: what the case tables do
not reach. Those run on the emulation in tests/ops."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from child_process import run_python
from torch import Tensor

import fastattn
from fastattn.testing import Target, assert_right, targets

attention = fastattn.scaled_dot_product_attention
EMULATED, REAL = "amx_bf16_emulated", "amx_bf16"
HERE = [target.isa for target in targets(emulated=True)]


def on(isa: str) -> Any:
    reason = "needs AVX-512" if isa == EMULATED else "needs AMX"
    return pytest.param(isa, marks=pytest.mark.skipif(isa not in HERE, reason=reason), id=isa)


@pytest.fixture(params=[on(EMULATED), on(REAL)])
def tiles(request: pytest.FixtureRequest, native: ModuleType) -> Iterator[str]:
    isa: str = request.param
    with Target("cpu", isa).active():
        yield isa


def qkv(
    batch: int, heads: int, queries: int, keys: int, dim: int, dim_v: int = 0, kv_heads: int = 0
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(queries * keys + dim)
    shapes = (
        (batch, heads, queries, dim),
        (batch, kv_heads or heads, keys, dim),
        (batch, kv_heads or heads, keys, dim_v or dim),
    )
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def in_double(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores = scores if bias is None else scores + bias
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def assert_close(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    out, lse = expected
    torch.testing.assert_close(got[0].double(), out, atol=8e-3, rtol=8e-3)
    torch.testing.assert_close(got[1].double(), lse, atol=2e-3, rtol=1e-5)


# -- what one call computes -----------------------------------------------------------------------


@pytest.mark.parametrize("keys", [500, 1300])  # of 512 channels, 512 keys are a piece
def test_keys_in_pieces(tiles: str, keys: int) -> None:
    q, k, v = qkv(1, 4, 70, keys, 512, kv_heads=2)
    assert_close(attention(q, k, v, enable_gqa=True, return_lse=True), in_double(q, k, v))


@pytest.mark.parametrize(("queries", "keys", "dim"), [(2100, 130, 40), (1100, 600, 512)])
def test_tasks_of_part_of_a_head_give_the_same_bits(
    tiles: str, queries: int, keys: int, dim: int
) -> None:
    """Few heads and many queries: how many tasks there are depends on the threads."""
    q, k, v = qkv(1, 1, queries, keys, dim)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            found += [attention(q, k, v, is_causal=c, return_lse=True) for c in (False, True)]
    finally:
        torch.set_num_threads(threads)
    for n, got in enumerate(found[2:]):
        assert all(torch.equal(a, b) for a, b in zip(got, found[n % 2], strict=True)), n


def grows(factor: float, query: int, keys: int) -> Tensor:
    """A bias that makes each block of keys outweigh the one before by far, for one query."""
    bias = torch.zeros(64, keys)
    bias[query] = torch.arange(keys) // 64 * factor
    return bias


@pytest.mark.parametrize("factor", [40.0, 1e4, 1e30])
@pytest.mark.parametrize("keys", [300, 1300])
def test_a_later_key_far_above_the_first_block(tiles: str, factor: float, keys: int) -> None:
    q, k, v = qkv(1, 1, 64, keys, 512)
    bias = grows(factor, 33, keys)
    got = attention(q, k, v, attn_mask=bias, return_lse=True)
    assert_close(got, in_double(q, k, v, bias))
    # No other query of its panel changes by a bit.
    plain = attention(q, k, v, attn_mask=torch.zeros_like(bias), return_lse=True)
    others = [i for i in range(64) if i != 33]
    for a, b in zip(got, plain, strict=True):
        assert torch.equal(a[:, :, others], b[:, :, others])


def test_large_scores_and_values(tiles: str) -> None:
    q, k, v = qkv(1, 2, 40, 200, 64)
    assert_close(attention(q * 64, k * 8, v, return_lse=True), in_double(q * 64, k * 8, v))
    # Weights up to 2^60 of these would overflow the output.
    v = v * 2.0**120
    bias = grows(9.0, 3, 200)[:40]
    out = attention(q, k, v, attn_mask=bias)
    torch.testing.assert_close(
        out.double() * 2.0**-120, in_double(q, k, v * 2.0**-120, bias)[0], atol=8e-3, rtol=8e-3
    )


@pytest.mark.parametrize("value", [-1e9, -6e9, -1e11, -1e15, torch.finfo(torch.float32).min])
def test_uniform_rows_of_large_numbers(tiles: str, value: float) -> None:
    q, k, v = qkv(1, 1, 40, 130, 32)
    bias = torch.full((40, 130), value)
    out = attention(q, k, v, attn_mask=bias)
    torch.testing.assert_close(
        out.double(), v.double().mean(2, keepdim=True).expand_as(out), atol=4e-3, rtol=8e-3
    )


def test_equal_scores_beyond_the_precision_of_a_product(tiles: str) -> None:
    q, k = torch.full((1, 1, 40, 64), 1.3e5), torch.full((1, 1, 40, 64), 4.4e3)
    out = attention(q.bfloat16(), k.bfloat16(), torch.ones(1, 1, 40, 64).bfloat16())
    assert torch.equal(out, torch.ones_like(out))


def test_queries_that_see_their_first_key_late(tiles: str) -> None:
    q, k, v = qkv(1, 1, 96, 400, 64)
    mask = torch.zeros(96, 400, dtype=torch.bool)
    for i in range(96):
        mask[i, 4 * i :] = i % 7 != 0  # and some that see none
    got = attention(q, k, v, attn_mask=mask, return_lse=True)
    bias = torch.zeros(96, 400, dtype=torch.float64).masked_fill(~mask, -math.inf)
    out, lse = in_double(q, k, v, bias)
    assert_close(got, (out.nan_to_num(0), lse))


def test_heads_of_a_group_with_padding_of_their_own(tiles: str) -> None:
    """A task has all query heads of a key head, and skips blocks that the padding of one covers."""
    q, k, v = qkv(1, 4, 70, 400, 64, kv_heads=1)
    seen = torch.zeros(1, 4, 1, 400, dtype=torch.bool)
    for h, (begin, end) in enumerate([(0, 400), (0, 50), (130, 260), (399, 400)]):
        seen[:, h, :, begin:end] = True
    seen[:, 0, :, 64:128] = False
    bias = torch.zeros(1, 4, 1, 400, dtype=torch.float64).masked_fill(~seen, -math.inf)
    got = attention(q, k, v, attn_mask=seen, enable_gqa=True, return_lse=True)
    assert_close(got, in_double(q, k, v, bias))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_no_query_sees(tiles: str, bad: float) -> None:
    q, k, v = qkv(1, 2, 70, 200, 48, 80)
    clean = attention(q, k, v, is_causal=True, return_lse=True)
    k[:, :, 70:] = bad
    v[:, :, 70:] = bad
    dirty = attention(q, k, v, is_causal=True, return_lse=True)
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a, b)
    k, v = (x[:, :, :70].clone() for x in (k, v))
    v[:, :, 40] = bad
    out = attention(q, k, v, is_causal=True)
    assert out[:, :, :40].isfinite().all()
    assert not out[:, :, 40:].isfinite().any()


# -- gradients ------------------------------------------------------------------------------------


def gradients(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Of the query, the key, the value, and of a mask that wants one."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    mask = options.get("attn_mask")
    wanted = [q, k, v, *([mask] if mask is not None and mask.requires_grad else [])]
    out = attention(q, k, v, enable_gqa=True, **options)
    generator = torch.Generator().manual_seed(out.numel())
    return torch.autograd.grad(out, wanted, torch.randn(out.shape, generator=generator).to(out))


def assert_gradients(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    got = gradients(q, k, v, **options)
    with fastattn.use_backend("reference"):
        expected = gradients(q.double(), k.double(), v.double(), **options)
    for name, a, b in zip("qkv", got, expected, strict=True):
        error = (a - b).norm() / b.norm()
        assert error < 6e-3, (name, error)


@pytest.mark.parametrize("causal", [False, True])
def test_panels_of_queries_and_chunks_of_keys(tiles: str, causal: bool) -> None:
    """Of 512 channels, 256 queries are a panel. 1024 keys are a chunk."""
    q, k, v = qkv(1, 2, 540, 1100, 400, 33, kv_heads=1)
    assert_gradients(q, k, v, is_causal=causal, causal_alignment="bottom_right")


def test_keys_and_queries_that_meet_in_a_band(tiles: str) -> None:
    """Each row of squares of a block has other columns, or none."""
    q, k, v = qkv(1, 1, 700, 700, 32)
    for window in ((70, 0), (0, 130), (200, -1), (300, 10)):
        assert_gradients(q, k, v, window=window)


def test_gradients_of_a_chunk_do_not_depend_on_the_threads(tiles: str) -> None:
    """Two threads take the chunks of a head in parallel. A mask's gradient adds up over heads."""
    q, k, v = qkv(1, 2, 300, 2100, 40, kv_heads=1)
    mask = torch.zeros(300, 2100, requires_grad=True)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            causal = gradients(q, k, v, is_causal=True, causal_alignment="bottom_right")
            found.append((*causal, *gradients(q, k, v, attn_mask=mask)))
    finally:
        torch.set_num_threads(threads)
    for n, got in enumerate(found[1:]):
        assert all(torch.equal(a, b) for a, b in zip(got, found[0], strict=True)), n


@pytest.mark.parametrize("bad", [3.0, math.nan, math.inf])
def test_hidden_keys_and_values_change_no_gradient(tiles: str, bad: float) -> None:
    q, k, v = qkv(1, 2, 70, 300, 40)
    keys = torch.arange(300)
    padding = ((keys % 7 != 0) & (keys < 290) & (keys // 32 != 2)).view(1, 1, 1, 300)
    partial = padding & (torch.arange(70)[:, None] % 5 != keys % 5)
    clean = [gradients(q, k, v, attn_mask=mask) for mask in (padding, partial)]
    hidden = ~padding.view(300)
    k[:, :, hidden] = bad
    v[:, :, hidden] = -bad
    for mask, expected in zip((padding, partial), clean, strict=True):
        for a, b in zip(gradients(q, k, v, attn_mask=mask), expected, strict=True):
            assert torch.equal(a, b)


def test_a_key_that_some_queries_see_is_not_finite(tiles: str) -> None:
    q, k, v = qkv(1, 1, 90, 90, 32)
    k[:, :, 50] = math.nan
    grad_q, _, _ = gradients(q, k, v, is_causal=True)
    assert grad_q[:, :, :50].isfinite().all()
    assert not grad_q[:, :, 50:].isfinite().any()


def test_lanes_past_the_last_query_give_no_gradient(tiles: str) -> None:
    """Of 40 queries the second square has 8; softcap keeps the scores of an inf finite."""
    q, k, v = qkv(1, 1, 40, 40, 32)
    k[:, :, 5, 3] = math.inf
    _, grad_k, grad_v = gradients(q, k, v, softcap=20.0)
    assert grad_k.isfinite().all()
    assert grad_v.isfinite().all()


def test_scores_too_large_to_be_weighed_directly(tiles: str) -> None:
    """One channel adds the same to all scores. Its own gradients are 0 but for rounding."""
    q, k, v = qkv(1, 1, 40, 130, 32)
    q[..., 0], k[..., 0] = 128, 128
    got = gradients(q, k, v)
    with fastattn.use_backend("reference"):
        expected = gradients(q.double(), k.double(), v.double())
    for a, b in zip(got, expected, strict=True):
        assert (a - b)[..., 1:].norm() < 6e-3 * b[..., 1:].norm()


@pytest.mark.skipif(REAL not in HERE, reason="needs AMX")
@pytest.mark.parametrize("dim", [24, 64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_real_tiles_give_the_bits_of_emulated_ones(dim: int, causal: bool) -> None:
    q, k, v = qkv(2, 4, 150, 330, dim, kv_heads=2)
    found = []
    for isa in (EMULATED, REAL):
        with Target("cpu", isa).active():
            out = attention(q, k, v, is_causal=causal, enable_gqa=True, return_lse=True)
            found.append((*out, *gradients(q, k, v, is_causal=causal)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sink", [-math.inf, -100.0, 0.0, 60.0, 1e5, math.inf])
def test_a_sink_joins_the_sum(tiles: str, sink: float, dtype: torch.dtype) -> None:
    """Far above all scores, far below, and beside queries that see no key."""
    q, k, v = (x.to(dtype) for x in qkv(1, 2, 70, 200, 32))
    v = v.abs()  # else the terms of the sink's gradient cancel
    seen = torch.ones(70, 200, dtype=torch.bool).tril(60)
    seen[[3, 40]] = False
    sinks = torch.tensor([sink, 0.5], requires_grad=True)

    def definition(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        scores = (q @ k.mT / math.sqrt(32)).masked_fill(~seen, -math.inf)
        every = torch.cat([scores, sinks.view(1, 2, 1, 1).expand(1, 2, 70, 1)], -1)
        lse = every.logsumexp(-1, keepdim=True)
        weights = torch.where(lse.isfinite(), (scores - lse).exp(), 0)
        return weights @ v, lse[..., 0]

    out, lse = definition(q.double(), k.double(), v.double(), sinks.detach().double())
    got = attention(q, k, v, attn_mask=seen, sinks=sinks, return_lse=True)
    tolerance = 1e-6 if dtype is torch.float32 else 8e-3
    torch.testing.assert_close(got[0].double(), out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(got[1].double(), lse, atol=2e-3, rtol=1e-6)
    if math.isinf(sink):
        return
    inputs = [x.detach().double().requires_grad_() for x in (q, k, v, sinks)]
    upstream = torch.ones_like(out)
    expected = torch.autograd.grad(definition(*inputs)[0], inputs, upstream)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    found = attention(*leaves, attn_mask=seen, sinks=sinks)
    for a, b in zip(
        torch.autograd.grad(found, [*leaves, sinks], upstream.to(dtype)), expected, strict=True
    ):
        assert (a - b).norm() <= 4 * tolerance * b.norm() + 1e-30


# -- float32, as parts of bfloat16 ----------------------------------------------------------------


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
    """All its score are 0, or the softmax would have one weight."""
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
def test_floats_all_of_another_size(tiles: str, scale: float) -> None:
    """The scores stay, the output is as large as the values."""
    q, k, v = float_qkv(1, 1, 40, 70, 32)
    q, k, v = q / scale, k * scale, v * scale
    expected = exactly(q, k, v)
    for name, x in results(q, k, v, ours()).items():
        error = (x - expected[name]).norm() / expected[name].norm()
        assert error < 2e-6, (name, error)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_floats_that_are_not_finite(tiles: str, bad: float) -> None:
    """NaN and inf are where those of the definition are: 0 * inf of parts makes no other."""
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


@pytest.mark.parametrize("bad", [3.0, 1e30, 1e-30, math.nan, math.inf])
def test_hidden_floats_change_no_bit(tiles: str, bad: float) -> None:
    q, k, v = float_qkv(1, 2, 70, 300, 40)
    keys = torch.arange(300)
    padding = ((keys % 7 != 0) & (keys < 290) & (keys // 32 != 2)).view(1, 1, 1, 300)
    partial = padding & (torch.arange(70)[:, None] % 5 != keys % 5)
    clean = [results(q, k, v, ours(attn_mask=mask)) for mask in (padding, partial)]
    hidden = ~padding.view(300)
    k[:, :, hidden], v[:, :, hidden] = bad, -bad
    for mask, expected in zip((padding, partial), clean, strict=True):
        for name, x in results(q, k, v, ours(attn_mask=mask)).items():
            assert torch.equal(x, expected[name]), name


def test_bits_of_floats_do_not_depend_on_the_threads(tiles: str) -> None:
    q, k, v = float_qkv(1, 2, 300, 1300, 32, kv_heads=1)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(results(q, k, v, ours(is_causal=True, causal_alignment="bottom_right")))
    finally:
        torch.set_num_threads(threads)
    for name, x in found[0].items():
        assert torch.equal(x, found[1][name]), name


def test_two_parts_only_where_pytorch_allows_them(tiles: str) -> None:
    q, k, v = float_qkv(1, 2, 70, 130, 64)
    exact = exactly(q, k, v)
    found, told = [], []
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high", "medium", "highest"):
            torch.set_float32_matmul_precision(precision)
            found.append(results(q, k, v, ours()))
            told.append(fastattn.explain("scaled_dot_product_attention", q, k, v).because)
    finally:
        torch.set_float32_matmul_precision(before)
    assert ["two bfloat16 parts" in x for x in told] == [False, True, True, False]
    assert ["three bfloat16 parts" in x for x in told] == [True, False, False, True]
    for name, expected in exact.items():
        errors = [float((x[name] - expected).norm() / expected.norm()) for x in found]
        assert errors[0] == errors[3] < 1e-6, (name, errors)
        assert errors[1] == errors[2] < 1e-4, (name, errors)
        assert errors[1] > 1e-6, (name, errors)
        assert torch.equal(found[0][name], found[3][name])


# -- processes, signals and threads ---------------------------------------------------------------

PRELUDE = """
import faulthandler, os, signal, sys, threading, torch, fastattn
from child_process import in_fork
torch.set_num_threads(2)
tensors = [torch.randn(1, 4, 200, 64).bfloat16().requires_grad_() for _ in range(3)]
upstream = torch.ones(1, 4, 200, 64).bfloat16()

def compute():
    results = fastattn.scaled_dot_product_attention(*tensors, is_causal=True, return_lse=True)
    results += torch.autograd.grad(results[0], tensors, upstream)
    return [x.detach().view(torch.uint8).numpy().tobytes() for x in results]

with fastattn.use_backend("cpu"):
"""

PROGRAMS = {
    "a child of fork": """
        expected = compute()
        in_fork(lambda: compute() == expected)
        assert compute() == expected
        in_fork(lambda: in_fork(lambda: compute() == expected) is None)  # a grandchild
    """,
    "a child of fork while other threads compute": """
        expected, stop = compute(), threading.Event()
        def busy():
            with fastattn.use_backend("cpu"):
                while not stop.is_set():
                    assert compute() == expected
        threads = [threading.Thread(target=busy) for _ in range(2)]
        for thread in threads: thread.start()
        try:
            for _ in range(3):
                in_fork(lambda: compute() == expected)
        finally:
            stop.set()
            for thread in threads: thread.join()
    """,
    "threads of Python, each with a team": """
        expected, failed = compute(), []
        def work():
            with fastattn.use_backend("cpu"):
                failed.extend(n for n in range(5) if compute() != expected)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert not failed
    """,
    "signals, also on an alternate stack": """
        expected, count = compute(), [0]
        def handler(*_):
            count[0] += 1
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        faulthandler.register(signal.SIGUSR1, file=open(os.devnull, "w"))
        for _ in range(20):
            os.kill(os.getpid(), signal.SIGUSR1)
            assert compute() == expected
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert count[0] > 0
    """,
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("isa", [on(EMULATED), on(REAL)])
def test_robust(isa: str, program: str) -> None:
    if "fork while" in program and "libasan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("a lock of AddressSanitizer stays locked in the child")
    code = PRELUDE + textwrap.indent(textwrap.dedent(PROGRAMS[program]), "    ")
    done = run_python("-c", code, timeout=200, FASTATTN_CPU_ISA=isa)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("queries", "dtype", "told"),
    [
        (5, torch.bfloat16, "on tiles"),
        (4, torch.bfloat16, "on vectors: so few queries do not fill a tile"),
        (5, torch.float32, "on tiles, as six products of three bfloat16 parts each"),
        (5, torch.float16, "on vectors: the tiles are for bfloat16 and float32"),
    ],
)
def test_explain_says_what_runs_on_tiles(
    tiles: str, queries: int, dtype: torch.dtype, told: str
) -> None:
    x, memory = torch.ones(1, 1, queries, 8, dtype=dtype), torch.ones(1, 1, 9, 8, dtype=dtype)
    found = fastattn.explain("scaled_dot_product_attention", x, memory, memory)
    assert f"instruction set {tiles}" in found.because
    assert told in found.because


def test_the_emulation_is_used_only_if_it_is_named(native: ModuleType) -> None:
    info = native.build_info()
    assert EMULATED not in info["compiled"]
    assert EMULATED not in info["supported"]
    assert EMULATED not in info["isa"]
