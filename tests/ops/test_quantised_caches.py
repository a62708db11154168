"""Caches in int8 and fp8: beyond the case tables."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from cache_calls import LENGTHS, cache_operands, refused
from torch import Tensor
from torch.testing import assert_close

from fastattn import decode_attention, use_backend
from fastattn.backends.reference import quantise

pytestmark = pytest.mark.usefixtures("seeded")
FP8 = torch.float8_e4m3fn
operands = functools.partial(cache_operands, cached=torch.int8)
of_each_dtype = pytest.mark.parametrize("cached", [torch.int8, FP8], ids=["int8", "fp8"])


def test_a_backend_without_quantised_caches_declines() -> None:
    pytest.importorskip("triton")
    given = operands()
    del given["key"], given["value"]
    with use_backend("triton"), pytest.raises(RuntimeError, match="has no key_scales"):
        decode_attention(**given)


def copied(given: dict[str, Any]) -> dict[str, Any]:
    """The call with copies of its tensors."""
    return {n: x.clone() if isinstance(x, Tensor) else x for n, x in given.items()}


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("paged", [False, True])
@of_each_dtype
def test_appends_in_place_and_attends(
    backend: str, layout: str, paged: bool, cached: torch.dtype
) -> None:
    given = operands(layout, paged=paged, cached=cached)
    version = given["key_scales"]._version
    out, lse = decode_attention(**given, return_lse=True)
    assert given["key_scales"]._version > version
    whole = copied(given)
    for name in ("key", "value"):
        scales = whole.pop(f"{name}_scales").nan_to_num(1.0)
        whole[f"{name}_cache"] = whole[f"{name}_cache"].float() * scales[..., None]
        del whole[name]
    whole["cache_seqlens"] = LENGTHS + 2
    want, want_lse = decode_attention(**whole, return_lse=True)
    assert_close(out, want)
    assert_close(lse, want_lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@of_each_dtype
def test_the_error_against_float64_is_a_few_percent(
    backend: str, dtype: torch.dtype, cached: torch.dtype
) -> None:
    """Of normal rows: int8 rounds by max |x| / 254 at most, e4m3 by |x| / 16 or scale / 1024."""
    query = torch.randn(2, 8, 1, 128).to(dtype)
    key, value = torch.randn(2, 2, 2, 500, 128).to(dtype)
    caches = torch.zeros(2, 2, 2, 500, 128).to(cached)
    scales = torch.ones(2, 2, 2, 500)
    tensors = (query, *caches)
    named = {"key_scales": scales[0], "value_scales": scales[1]}
    out = decode_attention(*tensors, 0, key=key, value=value, **named)
    want = decode_attention(*(x.double() for x in (query, key, value)))
    for rows, numbers, scale in zip((key, value), caches, scales, strict=True):
        off = (numbers.float() * scale[..., None] - rows.float()).abs()
        most = rows.float().abs().amax(-1, keepdim=True)
        bound = most / 254
        if cached == FP8:
            bound = torch.maximum(rows.float().abs() / 16, most / 448 / 1024)
        assert bool((off <= 1.001 * bound).all())
    error = (out - want).square().mean().sqrt() / want.square().mean().sqrt()
    low, high = (0.02, 0.045) if cached == FP8 else (0.003, 0.015)
    assert low < error < high


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_far_below_the_maximum_contribute(backend: str, dtype: torch.dtype) -> None:
    """Integer products use two bytes a weight. At 1/270 of the maximum the upper byte is 0."""
    query, key = torch.ones(1, 4, 1, 64, dtype=dtype), torch.zeros(1, 1, 100, 64).to(torch.int8)
    key[:, :, 0] = 1
    scales = {"key_scales": torch.full((1, 1, 100), 0.7), "value_scales": torch.ones(1, 1, 100)}
    out = decode_attention(query, key, 1 - key, **scales)
    others = 99 * math.exp(-0.7 * 8)  # beside the first key, whose value is 0
    assert_close(out, torch.full_like(out, others / (1 + others)))


def test_every_number_of_fp8_is_read_and_written(backend: str) -> None:
    """With a scale of 1: the codes that are not NaN, and halfway between them to the even one."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    numbers = codes[codes.isfinite()].unique()  # -0 is 0
    between = numbers[:-1].lerp(numbers[1:], 0.5)
    rows = torch.cat([numbers, between, numbers.flip(0)])[:, None].expand(-1, 17).clone()
    rows[:, 0] = 448  # so that each scale is 1
    caches = [torch.zeros(1, 1, len(rows), 17).to(FP8) for _ in range(2)]
    named = {f"{name}_scales": torch.ones(1, 1, len(rows)) for name in ("key", "value")}
    zeros = torch.zeros(1, 1, len(rows), 17)
    decode_attention(zeros, *caches, 0, key=zeros, value=rows[None, None], **named)
    assert torch.equal(caches[1].view(torch.uint8)[0, 0], rows.to(FP8).view(torch.uint8))
    for width in (17, 16, 3):
        row = codes.nan_to_num(1.0)[torch.arange(8 * width) % 256].view(8, 1, 1, width)
        one = [torch.zeros(8, 1, 1, width).to(FP8), row.to(FP8)]
        alone = {name: torch.ones(8, 1, 1) for name in named}
        assert torch.equal(decode_attention(torch.zeros(8, 1, 1, width), *one, **alone), row)


def test_a_row_of_zeros_and_a_tiny_one_have_scales(backend: str) -> None:
    given = operands()
    given["key"] *= 0
    given["value"] *= 1e-42
    out = decode_attention(**given)
    assert bool(torch.isfinite(out).all())
    assert float(given["key_scales"][1, :, :2].min()) > 0
    assert float(given["value_scales"][1, :, :2].min()) > 0


@of_each_dtype
def test_many_queries_and_wide_rows(backend: str, cached: torch.dtype) -> None:
    """Kernels that read rows in place, and kernels that need widened rows."""
    for queries, width in ((1, 8), (40, 8), (1, 700)):
        caches = [quantise(torch.randn(2, 2, 50, width), cached) for _ in range(2)]
        query = torch.randn(2, 8, queries, width)
        named = {"key_scales": caches[0][1], "value_scales": caches[1][1]}
        out = decode_attention(query, caches[0][0], caches[1][0], **named)
        want = decode_attention(query, *(x.float() * scale[..., None] for x, scale in caches))
        assert_close(out, want)


ROWS = torch.full((3, 2, 2, 8), torch.inf)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"key_scales": None, "value_scales": None}, ValueError, "int8 needs key_scales"),
        ({"value_scales": None}, ValueError, "must be given together"),
        ({"key_cache": torch.zeros(3, 2, 12, 8)}, RuntimeError,
         "key_cache must be torch.int8 or torch.float8_e4m3fn with key_scales, got torch.float32"),
        ({"value_cache": torch.zeros(3, 2, 12, 8).to(FP8)}, RuntimeError,
         "value_cache must have key_cache's dtype torch.int8, got torch.float8_e4m3fn"),
        ({"key_scales": torch.ones(3, 2, 11)}, ValueError, r"must have the shape \(3, 2, 12\)"),
        ({"key_scales": torch.ones(3, 2, 12, 1)}, ValueError, r"must be \[E, Hkv, N\]"),
        ({"key_scales": torch.ones(3, 2, 12).half()}, RuntimeError, "key_scales must be float32"),
        ({"value_scales": torch.ones(3, 2, 12).requires_grad_()}, RuntimeError,
         "value_scales requires a gradient"),
        ({"key": torch.zeros(3, 2, 2, 8).half()}, RuntimeError, "key must have query's dtype"),
        ({"key": ROWS}, ValueError, "key must be finite to be quantised"),
        ({"value": -ROWS}, ValueError, "value must be finite to be quantised"),
        ({"key": ROWS - ROWS}, ValueError, "key must be finite to be quantised"),
        ({"key_scales": torch.ones(3, 2, 1).expand(3, 2, 12)}, ValueError,
         "key_scales must have memory for each row where rows are appended"),
        ({"cache_seqlens": LENGTHS + 2}, ValueError, "plus 2 to append, at most 12 keys"),
    ],
)  # fmt: skip
def test_errors(backend: str, given: dict[str, Any], error: type[Exception], message: str) -> None:
    refused({**operands(), **given}, error, message)


def test_values_in_the_memory_of_keys_are_read_but_not_appended(backend: str) -> None:
    given = operands()
    shared = {"value_cache": given["key_cache"], "value_scales": given["key_scales"]}
    refused(given | shared, ValueError, "value must be a view of the first columns of key")
    given["value_cache"] = given["key_cache"]
    refused(given, ValueError, "value_cache must not be key_cache or a view of it")
    part = {"key_cache": torch.zeros(3, 2, 12, 20).to(torch.int8)[..., :8]}
    part["value_cache"] = part["key_cache"].as_strided((3, 2, 12, 8), (480, 240, 20, 1), 7)
    refused(given | part, ValueError, "value_cache must not be key_cache or a view of it")
    given = operands()
    scales = {"value_scales": given["key_scales"]}
    refused(given | scales, ValueError, "value_cache must be a view of the first columns of key")
    given["value_scales"] = given["key_scales"].view(3, 2, 12).as_strided((3, 2, 12), (24, 12, 1))
    refused(given, ValueError, "value_cache must be a view of the first columns of key")
    del given["key"], given["value"]
    alone = {name: x.clone() for name, x in shared.items()}
    assert torch.equal(decode_attention(**given | shared), decode_attention(**given | alone))


@pytest.mark.parametrize("paged", [False, True])
@of_each_dtype
def test_values_that_are_columns_of_the_keys_have_their_scales(
    backend: str, paged: bool, cached: torch.dtype
) -> None:
    """Latent heads: a row is quantised once, and no byte elsewhere changes."""
    given = operands(paged=paged, cached=cached)
    rows = given["key"]
    given["value"] = rows[..., :5]
    given["value_cache"], given["value_scales"] = given["key_cache"][..., :5], given["key_scales"]
    numbers, scales = quantise(rows.double(), cached)
    table = given.get("block_table", torch.arange(3)[:, None])
    page = given["key_cache"].shape[2]
    want = copied({name: given[name] for name in ("key_cache", "key_scales")})
    for b, n in enumerate(LENGTHS.tolist()):
        for i in range(2):
            at = table[b, (n + i) // page], slice(None), (n + i) % page
            want["key_cache"].view(torch.uint8)[at] = numbers.view(torch.uint8)[b, :, i]
            want["key_scales"][at] = scales[b, :, i]
    out = decode_attention(**given)
    assert torch.equal(given["key_cache"].view(torch.uint8), want["key_cache"].view(torch.uint8))
    assert_close(given["key_scales"], want["key_scales"], rtol=1e-6, atol=0, equal_nan=True)
    whole = given["key_cache"].float() * given["key_scales"].nan_to_num(1.0)[..., None]
    where = {"block_table": given.get("block_table"), "is_causal": True}
    alone = decode_attention(given["query"], whole, whole[..., :5], LENGTHS + 2, **where)
    assert_close(out, alone)
    given |= {"rotary_cos": torch.ones(12, 2), "rotary_sin": torch.zeros(12, 2)}
    refused(given, ValueError, "rotary_cos must be None where value_scales is key_scales")


@pytest.mark.parametrize("dim", [3, 4])
def test_keys_and_values_may_alternate_in_memory(backend: str, dim: int) -> None:
    """By rows, or by columns."""
    given = operands()
    names = ("key_cache", "value_cache")
    both = torch.stack([given[name] for name in names], dim).unbind(dim)
    alone, out = copied(given), decode_attention(**given | dict(zip(names, both, strict=True)))
    assert_close(out, decode_attention(**alone))
    for name, x in zip(names, both, strict=True):
        assert torch.equal(x, alone[name])


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf"), 1.4e36])
@pytest.mark.parametrize("append", [True, False])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", ["key_scales", "value_scales"])
@pytest.mark.parametrize("queries", [2, 40])  # read in place, and widened first
@of_each_dtype
def test_scales_must_be_positive_and_finite(
    backend: str,
    cached: torch.dtype,
    queries: int,
    name: str,
    paged: bool,
    append: bool,
    wrong: float,
) -> None:
    """The limit of e4m3's scales includes the unit of its codes."""
    if cached == torch.int8 and wrong == 1.4e36:
        wrong = float("nan")
    for row, at in ((0, (2, 0, 0)), (8, (2, 1, 8))):  # of the last sequence
        given = operands(paged=paged, cached=cached, queries=queries)
        if not append:
            del given["key"], given["value"]
        if paged:
            at = (2 - row // 4, at[1], row % 4)
        given[name][at] = wrong
        limit = "at most 1.3e36 for e4m3" if cached == FP8 else "finite"
        message = f"{name} must be positive and {limit}, got .* for row {row} of sequence 2"
        refused(given, ValueError, message)


@pytest.mark.parametrize("name", ["key", "value"])
@of_each_dtype
def test_elements_must_fit_their_scale(backend: str, cached: torch.dtype, name: str) -> None:
    """Elements of float64, the only dtype with such numbers."""
    given = operands(cached=cached)
    for double in ("query", "key", "value"):
        given[double] = given[double].double()
    given[name][1, 0, 1, 3] = 6e38 if cached == FP8 else 4.4e40
    refused(given, ValueError, f"{name} must be finite to be quantised, and its elements at most")
    given[name][1, 0, 1, 3] = 5.9e38 if cached == FP8 else 4.3e40
    decode_attention(**given)
    assert float(given[f"{name}_scales"].nan_to_num(0).max()) > 1e36


@of_each_dtype
def test_missing_pages_are_errors(backend: str, cached: torch.dtype) -> None:
    for page in (-1, 9, 2**32 + 2):
        for append in (True, False):
            given = operands(paged=True, cached=cached)
            if not append:
                del given["key"], given["value"]
            given["block_table"][2, 2] = page
            refused(given, ValueError, "block_table must name one of the 9 pages, got")


@of_each_dtype
def test_values_without_columns(backend: str, cached: torch.dtype) -> None:
    """Four query rows of a key head in 16 bits are multiplied as integers."""
    keys, scales = quantise(torch.randn(2, 1, 9, 8), cached)
    given = {"key_scales": scales, "value_scales": scales, "return_lse": True}
    query = torch.randn(2, 4, 1, 8, dtype=torch.float16)
    out, lse = decode_attention(query, keys, keys[..., :0], 9, **given)
    assert out.shape == (2, 4, 1, 0)
    assert_close(lse, decode_attention(query, keys, keys, 9, **given)[1])
