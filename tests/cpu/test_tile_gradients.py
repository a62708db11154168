"""Gradients on the tiles of AMX: what the case tables do not reach."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tile_attention import EMULATED, HERE, REAL, attention, gradients, needs_tiles, qkv
from torch import Tensor

import fastattn
from fastattn import decode_attention
from fastattn.testing import Target

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def assert_gradients(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """The gradients must be near the reference in float64."""
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


def test_gradients_of_a_chunk_do_not_depend_on_the_threads(
    tiles: str, same_for_any_threads: Any
) -> None:
    """Two threads take the chunks of a head in parallel. A mask's gradient adds up over heads."""
    q, k, v = qkv(1, 2, 300, 2100, 40, kv_heads=1)
    mask = torch.zeros(300, 2100, requires_grad=True)
    causal = {"is_causal": True, "causal_alignment": "bottom_right"}
    same_for_any_threads(
        lambda: (*gradients(q, k, v, **causal), *gradients(q, k, v, attn_mask=mask))
    )


@DTYPES
def test_the_gradient_of_a_table_does_not_depend_on_the_threads(
    tiles: str, dtype: torch.dtype, same_for_any_threads: Any
) -> None:
    """Two chunks of keys, whose sums are added in order."""
    q, k, v = (x.to(dtype) for x in qkv(1, 2, 40, 1100, 32, kv_heads=1))
    table = torch.randn(2, 2199, generator=torch.Generator().manual_seed(5), requires_grad=True)

    def gradient() -> Tensor:
        out = attention(q, k, v, relative_bias=table, enable_gqa=True)
        return torch.autograd.grad(out.float().square().sum(), table)[0]

    found = same_for_any_threads(gradient)
    assert (found[:, : 1099 + 40] != 0).all()
    assert (found[:, 1099 + 40 :] == 0).all()


@DTYPES
@pytest.mark.parametrize("bad", [3.0, 1e-30, math.nan, math.inf])
def test_hidden_keys_and_values_change_no_bit(tiles: str, dtype: torch.dtype, bad: float) -> None:
    needs_tiles(tiles, dtype)
    q, k, v = (x.to(dtype) for x in qkv(1, 2, 70, 300, 40))
    keys = torch.arange(300)
    padding = ((keys % 7 != 0) & (keys < 290) & (keys // 32 != 2)).view(1, 1, 1, 300)
    partial = padding & (torch.arange(70)[:, None] % 5 != keys % 5)
    found = []
    for _ in range(2):
        found.append(
            [
                x
                for mask in (padding, partial)
                for x in (attention(q, k, v, attn_mask=mask), *gradients(q, k, v, attn_mask=mask))
            ]
        )
        k[:, :, ~padding.view(300)], v[:, :, ~padding.view(300)] = bad, -bad
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


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
@DTYPES
def test_real_tiles_give_the_bits_of_emulated_ones(
    dim: int, causal: bool, dtype: torch.dtype
) -> None:
    needs_tiles(REAL, dtype)
    q, k, v = (x.to(dtype) for x in qkv(2, 4, 150, 330, dim, kv_heads=2))
    stacked = torch.cat([q[:, :, :1]] * 8, 1)  # sixteen rows of a key head
    found = []
    for isa in (EMULATED, REAL):
        with Target("cpu", isa).active():
            out = attention(q, k, v, is_causal=causal, enable_gqa=True, return_lse=True)
            out += decode_attention(stacked, k, v, return_lse=True)
            found.append((*out, *gradients(q, k, v, is_causal=causal)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sink", [-math.inf, -100.0, 0.0, 60.0, 1e5, math.inf])
def test_a_sink_joins_the_sum(tiles: str, sink: float, dtype: torch.dtype) -> None:
    """Far above all scores, far below, and beside fully masked rows."""
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("exponent", [6, 20, 40, 50])
def test_scores_as_large_as_floats(tiles: str, exponent: int, dtype: torch.dtype) -> None:
    """The rounding of such a score overflows an exponential. Pairs of keys are equal."""
    q, k, v = qkv(1, 2, 150, 150, 64)
    k[..., ::2, :] = k[..., 1::2, :]
    q, k = q * 2.0**exponent, k * 2.0**exponent
    expected = gradients(q.double(), k.double(), v.double())
    found = gradients(q.to(dtype), k.to(dtype), v.to(dtype))
    # Of two equal keys the gradients of the scores cancel, up to their rounding.
    sizes = (float(k.abs().max()), float(q.abs().max()), 1.0)
    for got, exact, size in zip(found, expected, sizes, strict=True):
        assert (got.double() - exact).abs().max() <= 0.05 * size
