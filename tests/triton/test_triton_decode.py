"""Decoding on Triton: appended rows, and the same bits in any batch."""

from __future__ import annotations

import importlib
import math
from collections import Counter
from typing import Any

import pytest
import torch

import fastattn
from fastattn import masks
from fastattn.testing import Target
from fastattn.testing.decode import DecodeCase, make_decode
from fastattn.testing.packed import VarlenCase, make_varlen

pytestmark = pytest.mark.usefixtures("triton_interpreter")

TRITON = Target("triton")


@pytest.mark.complete
def test_a_sequence_has_the_same_bits_in_any_batch() -> None:
    """The batch, the pages and the cache's capacity do not change its bits."""
    case = DecodeCase("company", (600, 33), capacity=640, head_dim=16)
    inputs = make_decode(case, torch.float32)
    query, keys, values, lengths = inputs.args[:4]
    module = TRITON.module
    both = module.decode_attention(query, keys, values, lengths, options=inputs.options)
    alone = module.decode_attention(
        query[:1], keys[:1, :, :600], values[:1, :, :600], lengths[:1], options=inputs.options
    )
    order = torch.randperm(32)
    scattered = [torch.empty(32, 2, 40, 16) for _ in range(2)]
    for pages, cache in zip(scattered, (keys, values), strict=True):
        pages[order] = cache.unflatten(2, (16, 40)).transpose(1, 2).flatten(0, 1)
    table = order.view(2, 16).int()
    paged = module.decode_attention(query, *scattered, lengths, table, options=inputs.options)
    for whole, one, found in zip(both, alone, paged, strict=True):
        assert torch.equal(whole[:1], one)
        assert torch.equal(whole, found)


def test_invalid_pages_are_not_read() -> None:
    """On a GPU nothing checks the numbers in a table before the kernel reads them."""
    inputs = make_decode(DecodeCase("wild", (40, 9), page=16, kv_heads=1), torch.float32)
    args = list(inputs.args)
    assert args[4] is not None
    args[4] = torch.where(args[4] < 0, args[4], 10**6)
    out, _ = TRITON.module.decode_attention(*args, options=inputs.options)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("hidden_by", ["mask", "relative_bias"])
def test_keys_that_no_query_sees_have_no_effect(hidden_by: str, generator: torch.Generator) -> None:
    query = torch.randn(1, 4, 1, 8, generator=generator)
    keys, values = torch.randn(2, 1, 2, 70, 8, generator=generator)
    keys[:, :, 10:20] = values[:, :, 10:20] = math.nan
    if hidden_by == "mask":
        ids = torch.zeros(70, dtype=torch.int32)
        ids[10:20] = 1
        option: Any = masks.document(ids)
    else:
        option = torch.randn(4, 139, generator=generator)
        option[:, 69 + 50 : 69 + 60] = -math.inf  # of these distances from the query at 69
    outs = []
    for name in ("triton", "reference"):
        with fastattn.use_backend(name):
            outs.append(fastattn.decode_attention(query, keys, values, **{hidden_by: option}))
    assert torch.isfinite(outs[0]).all()
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize(
    ("mask", "tiles"),
    [(masks.causal(), 4), (masks.sliding_window(31, 0), 1), (masks.chunked(64), 2)],
    ids=str,
)
def test_tiles_of_a_cache_without_a_visible_key_are_not_read(
    mask: masks.Mask, tiles: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels: Any = importlib.import_module("fastattn.backends.triton._decode_kernels")
    counts, load = Counter[str](), kernels._load_cached

    def counted(*args: Any) -> Any:
        counts["tiles"] += 1
        return load(*args)

    monkeypatch.setattr(kernels, "_load_cached", counted)
    query, (keys, values) = torch.randn(1, 1, 1, 8), torch.randn(2, 1, 1, 128, 8)
    with fastattn.use_backend("triton"):
        fastattn.decode_attention(query, keys, values, mask=mask)
    assert counts["tiles"] == 2 * tiles  # of keys and of values


@pytest.mark.parametrize("op", ["decode_attention", "varlen_attention"])
def test_distances_beyond_a_table_have_its_last_entry(op: str) -> None:
    """On a GPU the host does not know the longest sequence, and no kernel may read elsewhere."""
    inputs: Any = make_varlen(VarlenCase("short", (40, 9), relative_bias=True), torch.float32)
    if op == "decode_attention":
        case = DecodeCase("short", (40, 9), capacity=40, relative_bias=True)
        inputs = make_decode(case, torch.float32)
    *args, table = inputs.args
    assert table is not None
    short = table[:, :, 30:-30]
    long = torch.nn.functional.pad(short, (30, 30), mode="replicate")
    outs = (
        getattr(TRITON.module, op)(*args, bias, options=inputs.options) for bias in (short, long)
    )
    for found, want in zip(*outs, strict=True):
        assert torch.equal(found, want)
