"""Attention in float16 on the tiles of AMX: what the case tables do not reach."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from tile_attention import (
    EMULATED,
    assert_close,
    attention,
    grows,
    in_double,
    qkv,
)
from torch import Tensor

import fastattn

SMALL = 2.0**-20  # subnormal in float16


def halves(*shape: int, **kwargs: int) -> list[Tensor]:
    return [x.half() for x in qkv(*shape, **kwargs)]


def assert_gradients(
    tensors: list[Tensor], size: float = 1.0, judged: str = "qkv", **options: Any
) -> None:
    """The incoming gradient is of this size."""
    found = []
    for dtype, backend in ((torch.float16, "cpu"), (torch.float64, "reference")):
        leaves = [x.to(dtype).requires_grad_() for x in tensors]
        generator = torch.Generator().manual_seed(5)
        with fastattn.use_backend(backend):
            out = attention(*leaves, enable_gqa=True, **options, generator=generator)
            upstream = (size * torch.randn(out.shape, generator=generator)).half().to(dtype)
            found.append(torch.autograd.grad(out, leaves, upstream))
    for name, a, b in zip("qkv", *found, strict=True):
        error = (a - b).norm() / b.norm()
        assert error < 2e-3 or name not in judged, (name, error)


def test_recomputing_a_panel_keeps_the_bits_of_other_rows(tiles: str) -> None:
    """The whole panel is computed again, and each query has the bits that it has alone."""
    q, k, v = halves(1, 1, 64, 400, 32)
    rising = grows(6.0, 40, 400)
    both = rising + grows(1e30, 33, 400)
    got, alone = (attention(q, k, v, attn_mask=bias, return_lse=True) for bias in (both, rising))
    assert_close(got, in_double(q, k, v, both))
    for a, b in zip(got, alone, strict=True):
        assert torch.equal(a[:, :, 34:], b[:, :, 34:])


def test_a_sink_has_the_reference_of_the_weights(tiles: str) -> None:
    """Weights are scaled to the range of float16, and the sink's term of their sum must be too."""
    q, k, v = halves(1, 2, 40, 130, 32)
    sinks = torch.tensor([0.5, 3.0])
    got = attention(q, k, v, sinks=sinks, return_lse=True)
    with fastattn.use_backend("reference"):
        want = attention(q.double(), k.double(), v.double(), sinks=sinks.double(), return_lse=True)
    assert_close(got, want)


@pytest.mark.parametrize("first", [True, False])
def test_many_small_weights_beside_a_large_one(tiles: str, first: bool) -> None:
    """Each is below half of the least number of float16, and together they are a share of 3e-4."""
    keys = 12000
    q, k, v = (torch.zeros(1, 1, n, 32).half() for n in (40, keys, keys))
    bias = torch.full((1, keys), math.log(0.45 * 2.0**-24))
    bias[0, 0 if first else -1] = 0
    v[:] = bias[0].lt(0).half()[:, None]
    out, lse = attention(q, k, v, attn_mask=bias.expand(40, keys), return_lse=True)
    expected, expected_lse = in_double(q, k, v, bias)
    torch.testing.assert_close(out.double(), expected, atol=0, rtol=3e-3)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-5, rtol=0)


def test_large_and_small_numbers(tiles: str) -> None:
    q, k, v = halves(1, 2, 40, 200, 64)
    assert_close(attention(q * 64, k * 8, v, return_lse=True), in_double(q * 64, k * 8, v))
    v = (v * SMALL).half()
    out = attention(q, k, v)
    torch.testing.assert_close(out.double(), in_double(q, k, v)[0], atol=2.0**-25, rtol=0)
    v = v.sign() * 65504
    out = attention(q, k, v).double() / 65504
    torch.testing.assert_close(out, in_double(q, k, v)[0] / 65504, atol=1e-3, rtol=1e-3)
    k, v = k.sign() * SMALL, v / 65504
    assert_close(attention(q * 4096, k, v, return_lse=True), in_double(q * 4096, k, v))


def test_gradients_of_scores_too_large_for_float16(tiles: str) -> None:
    """Products of the incoming gradient and the values are some 2^35."""
    q, k, v = halves(1, 2, 70, 150, 64, kv_heads=1)
    assert_gradients([q * SMALL, k * SMALL, v.clamp(-2, 2) * 30000], 10000.0)


def test_gradients_of_scores_too_small_for_float16(tiles: str) -> None:
    q, k, v = halves(1, 1, 70, 150, 64)
    assert_gradients([q * SMALL, k * 4096, v * 2.0**-8], 2.0**-12, "qv")  # k's is too small


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.98}], ids=str)
def test_gradients(tiles: str, options: dict[str, Any]) -> None:
    """Gradients of weights near 1, near 0, and, with dropout, as large as 50."""
    q, k, v = halves(1, 2, 150, 330, 40, 33, kv_heads=1)
    assert_gradients([q, k, v], **options)


def test_explain_says_whether_the_tiles_multiply_float16(
    chosen_tiles: str, native: ModuleType
) -> None:
    x = torch.ones(1, 16, 5, 8, dtype=torch.float16)
    served = chosen_tiles == EMULATED or "amx_fp16" in native.processor()["features"]
    reason = "on tiles" if served else "on vectors: the processor has no AMX with fp16"
    for op, cache in (("scaled_dot_product_attention", x), ("decode_attention", x[:, :1])):
        found: Any = fastattn.explain(op, x, cache, cache)
        assert f"instruction set {chosen_tiles}" in found.because
        assert reason in found.because
