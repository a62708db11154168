"""Forward attention on the tiles of AMX: what the case tables do not reach. Those run on the
emulation in tests/ops."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from tile_attention import EMULATED, assert_close, attention, grows, in_double, qkv

import fastattn
from fastattn import dispatch
from fastattn.bias import Disentangled
from fastattn.testing import Target, targets
from fastattn.testing.packed import VarlenCase, make_varlen


@pytest.mark.parametrize("keys", [500, 1300])  # of 512 channels, 512 keys are a piece
def test_keys_in_pieces(tiles: str, keys: int) -> None:
    q, k, v = qkv(1, 4, 70, keys, 512, kv_heads=2)
    assert_close(attention(q, k, v, enable_gqa=True, return_lse=True), in_double(q, k, v))


@pytest.mark.parametrize(("queries", "keys", "dim"), [(2100, 130, 40), (1100, 600, 512)])
def test_tasks_of_part_of_a_head_give_the_same_bits(
    tiles: str, queries: int, keys: int, dim: int, same_for_any_threads: Any
) -> None:
    """Few heads and many queries: how many tasks there are depends on the threads."""
    q, k, v = qkv(1, 1, queries, keys, dim)
    for causal in (False, True):
        same_for_any_threads(lambda c=causal: attention(q, k, v, is_causal=c, return_lse=True))


@pytest.mark.parametrize(
    ("dtype", "factor"),
    [*((torch.bfloat16, factor) for factor in (40.0, 1e4, 1e30)),
     *((torch.float16, factor) for factor in (4.0, 6.0, 40.0, 300.0, 1e30))],
)  # fmt: skip
@pytest.mark.parametrize("keys", [300, 1300])  # of 512 channels, 1300 keys are three pieces
def test_a_later_key_far_above_the_first_block(
    tiles: str, keys: int, factor: float, dtype: torch.dtype
) -> None:
    q, k, v = (x.to(dtype) for x in qkv(1, 1, 64, keys, 512))
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [-1e9, -6e9, -1e11, -1e15, torch.finfo(torch.float32).min])
def test_uniform_rows_of_large_numbers(tiles: str, value: float, dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in qkv(1, 1, 40, 130, 32))
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
        mask[i, 4 * i :] = i % 7 != 0  # and some fully masked
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


# -- which calls run on tiles ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queries", "dtype", "reason"),
    [
        (5, torch.bfloat16, "on tiles"),
        (4, torch.bfloat16, "on vectors: so few queries do not fill a tile"),
        (5, torch.float32, "on tiles, as six products of three bfloat16 parts each"),
        (5, torch.float64, "on vectors: the tiles are for bfloat16, float16 and float32"),
    ],
)
def test_explain_names_calls_on_tiles(
    chosen_tiles: str, queries: int, dtype: torch.dtype, reason: str
) -> None:
    x, memory = torch.ones(1, 1, queries, 8, dtype=dtype), torch.ones(1, 1, 9, 8, dtype=dtype)
    found = fastattn.explain("scaled_dot_product_attention", x, memory, memory)
    assert f"instruction set {chosen_tiles}" in found.because
    assert reason in found.because


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("queries", [4, 5])
@pytest.mark.parametrize("heads", [1, 17])
@pytest.mark.parametrize("how", ["plain", "dropout", "columns apart"])
def test_explain_agrees_with_the_bits(
    chosen_tiles: str, dtype: torch.dtype, queries: int, heads: int, how: str
) -> None:
    q, k, v = (x.to(dtype) for x in qkv(1, heads, queries, 70, 40, kv_heads=1))
    if how == "columns apart":
        k = k.mT.contiguous().mT
    options = {"dropout_p": 0.5} if how == "dropout" else {}

    def run() -> torch.Tensor:
        seed = torch.Generator().manual_seed(1)
        found = attention(q, k, v, enable_gqa=True, generator=seed, **options)
        assert isinstance(found, torch.Tensor)
        return found

    found = run()
    reason = fastattn.explain(
        "scaled_dot_product_attention", q, k, v, enable_gqa=True, **options
    ).because
    on_vectors = []
    for target in targets(emulated=True):
        if not str(target.isa).startswith("amx_"):
            with target.active():
                on_vectors.append(run())
    assert (", on vectors" in reason) == any(torch.equal(x, found) for x in on_vectors), reason


def test_explain_names_parts_that_run_on_vectors(chosen_tiles: str) -> None:
    x = torch.ones(1, 1, 40, 8).bfloat16()
    reason = fastattn.explain("scaled_dot_product_attention", x, x, x, need_weights=True).because
    assert reason.endswith("on tiles; the returned weights on vectors")
    packed, starts = torch.ones(40, 1, 8).bfloat16(), torch.tensor([0, 30, 40], dtype=torch.int32)
    reason = fastattn.explain("varlen_attention", packed, packed, packed, starts, starts).because
    assert reason.endswith("on tiles; small sequences on vectors")
    terms = {"relative_bias": Disentangled(torch.ones(3, 1, 8))}
    reason = fastattn.explain("varlen_attention", *[packed] * 3, *[starts] * 2, **terms).because
    assert reason.endswith("on vectors: a bias that depends on the content has no kernel on tiles")


@pytest.fixture
def by_size(chosen_tiles: str, native: ModuleType) -> Iterator[str]:
    """The instruction set of the tiles, where small calls stay on vectors: what users get."""
    before = native.set_all_sizes_on_tiles(False)
    try:
        yield chosen_tiles
    finally:
        native.set_all_sizes_on_tiles(before)


SIZES = [
    # queries, keys, columns, dtype, on tiles
    (16, 16, 64, torch.float32, False),
    (127, 600, 64, torch.float32, False),
    (600, 127, 64, torch.float32, False),
    (128, 511, 64, torch.float32, False),
    (128, 512, 64, torch.float32, True),
    (256, 256, 63, torch.float32, False),
    (512, 512, 63, torch.float32, True),
    (16, 32, 64, torch.bfloat16, False),
    (16, 33, 64, torch.bfloat16, True),
    (16, 16, 65, torch.bfloat16, True),
]


@pytest.mark.parametrize(("queries", "keys", "columns", "dtype", "tiled"), SIZES)
def test_small_calls_run_on_vectors(
    by_size: str, queries: int, keys: int, columns: int, dtype: torch.dtype, tiled: bool
) -> None:
    q, k, v = (x.to(dtype) for x in qkv(1, 1, queries, keys, columns))

    def run() -> list[torch.Tensor]:
        for x in (q, k, v):
            x.requires_grad_()
        out = attention(q, k, v)
        assert isinstance(out, torch.Tensor)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]

    found = run()
    reason = fastattn.explain("scaled_dot_product_attention", q, k, v).because
    assert (", on tiles" in reason) == tiled, reason
    with Target("cpu", by_size).active():
        on_tiles = run()
    others = []
    for target in targets(emulated=True):
        if not str(target.isa).startswith("amx_"):
            with target.active():
                others.append(run())
    assert same(found, on_tiles) == tiled
    assert any(same(found, x) for x in others) != tiled


def same(these: list[torch.Tensor], those: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(these, those, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_does_not_depend_on_the_batch(by_size: str, dtype: torch.dtype) -> None:
    lengths = (0, 300, 3, 20, 520, 1)
    case = VarlenCase("sizes", lengths, lengths, head_dim=64, kv_heads=1, bottom_right=True)
    inputs = make_varlen(case, dtype)
    backend: Any = dispatch.load("cpu")
    expected = inputs.by_sequence(lambda alone: alone.results(backend))
    for name, found in inputs.results(backend).items():
        assert torch.equal(found, expected[name].to(found.dtype)), name


def test_the_emulation_is_used_only_if_it_is_named(native: ModuleType) -> None:
    info = native.build_info()
    assert EMULATED not in info["compiled"]
    assert EMULATED not in info["supported"]
    assert EMULATED not in info["isa"]
