"""Decoding on the tiles of AMX, where sixteen or more query rows share a key head: what the case
table does not reach. That runs on the emulation in tests/ops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tile_attention import assert_close, in_double, qkv
from torch import Tensor

import fastattn
from fastattn import decode_attention

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def assert_right(
    got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float = 2e-6
) -> None:
    """The output and the log-sum-exp must be near the exact ones."""
    if got[0].dtype is not torch.float32:
        assert_close(got, expected)
        return
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, atol=tolerance, rtol=tolerance)


@DTYPES
@pytest.mark.parametrize("heads", [16, 40])
@pytest.mark.parametrize("factor", [1.0, 30.0, 1e4])
def test_chunks_of_very_different_scores(
    tiles: str, heads: int, factor: float, dtype: torch.dtype
) -> None:
    """The keys of each chunk outweigh the chunks before, for every other head."""
    q, k, v = (x.to(dtype) for x in qkv(1, heads, 1, 1300, 32, kv_heads=1))
    q[:, :, :, 0], k[..., 0] = 0, 0
    q[:, ::2, :, 0] = 5.5
    k[..., 0] = (torch.arange(1300) // 512 * factor).to(dtype)
    got = decode_attention(q, k, v, return_lse=True)
    assert_right(got, in_double(q, k, v), max(2e-6, 2e-7 * factor))  # the error of the scores


@DTYPES
def test_bits_of_a_sequence_do_not_depend_on_its_batch(
    tiles: str, dtype: torch.dtype, same_for_any_threads: Any
) -> None:
    """Alone or in a batch, on any number of threads, in pages or not."""
    q, k, v = (x.to(dtype) for x in qkv(3, 36, 1, 1408, 40, 24, kv_heads=2))
    lengths = torch.tensor([1408, 9, 520])
    want = same_for_any_threads(lambda: decode_attention(q, k, v, lengths, return_lse=True))
    order = torch.randperm(3 * 88, generator=torch.Generator().manual_seed(1)).view(3, 88)
    pages = []
    for x in (k, v):
        rows = x.unflatten(2, (88, 16)).transpose(1, 2).flatten(0, 1)
        pages.append(torch.empty_like(rows).index_copy_(0, order.flatten(), rows))
    paged = decode_attention(q, *pages, lengths, block_table=order, return_lse=True)
    alone = [
        decode_attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], n, return_lse=True)
        for b, n in enumerate(lengths.tolist())
    ]
    for got in (paged, [torch.cat(x) for x in zip(*alone, strict=True)]):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@DTYPES
@pytest.mark.parametrize("sink", [-math.inf, -100.0, 0.0, 60.0, math.inf])
def test_a_sink_of_one_head(tiles: str, sink: float, dtype: torch.dtype) -> None:
    """Only the rows of that head change."""
    q, k, v = (x.to(dtype) for x in qkv(1, 9, 2, 600, 32, kv_heads=1))
    sinks = torch.full((9,), -math.inf)
    sinks[4] = sink
    out, lse = decode_attention(q, k, v, sinks=sinks, return_lse=True)
    plain, plain_lse = in_double(q, k, v)
    expected = torch.logaddexp(plain_lse, sinks.double().view(1, 9, 1))
    share = (plain_lse - expected).exp().nan_to_num(1)
    share[:, 4] = 0 if sink == math.inf else share[:, 4]
    assert_right((out, lse), (plain * share[..., None], expected))


@DTYPES
def test_each_query_of_a_stack_has_its_own_diagonal(tiles: str, dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in qkv(1, 8, 5, 300, 32, kv_heads=1))
    slopes = torch.rand(8, generator=torch.Generator().manual_seed(2))
    got = decode_attention(
        q, k, v, is_causal=True, window=(100, 0), alibi_slopes=slopes, return_lse=True
    )
    distance = torch.arange(5)[:, None] + 295 - torch.arange(300)
    bias = -slopes.double().view(8, 1, 1) * distance
    bias = bias.masked_fill((distance < 0) | (distance > 100), -math.inf)
    assert_right(got, in_double(q, k, v, bias))


@pytest.mark.parametrize(
    ("heads", "queries", "dtype", "reason"),
    [
        (16, 1, torch.bfloat16, "on tiles"),
        (16, 1, torch.float32, "on tiles, as six products of three bfloat16 parts each"),
        (15, 1, torch.bfloat16, "on vectors: 15 query rows share a key head"),
        (4, 4, torch.bfloat16, "on tiles"),
        (1, 5, torch.bfloat16, "on tiles"),
        (16, 1, torch.float64, "on vectors: the tiles are for bfloat16, float16 and float32"),
    ],
)
def test_explain_names_the_kernels_of_decoding(
    chosen_tiles: str, heads: int, queries: int, dtype: torch.dtype, reason: str
) -> None:
    query = torch.ones(1, heads, queries, 8, dtype=dtype)
    cache = torch.ones(1, 1, 9, 8, dtype=dtype)
    found: Any = fastattn.explain("decode_attention", query, cache, cache)
    assert f"instruction set {chosen_tiles}" in found.because
    assert reason in found.because
