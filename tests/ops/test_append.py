"""Appending to a cache: rotation of the new keys and queries, on every backend."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from cache_calls import LENGTHS, cache_operands, refused
from case_table import within_the_bound
from torch import Tensor
from torch.testing import assert_close

from fastattn import decode_attention, masks, use_backend

pytestmark = pytest.mark.usefixtures("seeded")

test_case = within_the_bound("append_to_cache")


def test_a_backend_without_rotation_declines() -> None:
    pytest.importorskip("triton")
    given = operands() | dict(zip(("rotary_cos", "rotary_sin"), angles(14, 4), strict=True))
    with (
        use_backend("triton"),
        pytest.raises(RuntimeError, match=r"append_to_cache: .*has no rotary_cos"),
    ):
        decode_attention(**given)


operands = functools.partial(cache_operands, capacity=14)


def angles(positions: int, pairs: int) -> tuple[Tensor, Tensor]:
    """The tables of RoPE."""
    speed = 10000.0 ** -(torch.arange(pairs) / pairs)
    turns = torch.arange(positions)[:, None] * speed
    return turns.cos(), turns.sin()


def rotated(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [B, H, L, 8] at positions [B, L], as transformers does it."""
    cos, sin = cos[positions][:, None], sin[positions][:, None]
    if interleaved:
        cos, sin = (t.repeat_interleave(2, -1) for t in (cos, sin))
        other = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    else:
        cos, sin = (torch.cat([t, t], -1) for t in (cos, sin))
        other = torch.cat([-x[..., 4:], x[..., :4]], -1)
    return x * cos + other * sin


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("queries", [2, 1])
def test_equals_a_rotation_before_the_call(
    backend: str, layout: str, interleaved: bool, queries: int
) -> None:
    given, tables = operands(layout, queries=queries), angles(14, 4)
    before = {n: given[n].clone() for n in ("key_cache", "value_cache", "query", "key")}
    options = {"rotary_cos": tables[0], "rotary_sin": tables[1]}
    got = decode_attention(**given, **options, rotary_interleaved=interleaved)
    assert torch.equal(given["query"], before["query"])
    assert torch.equal(given["key"], before["key"])

    want = {**given, **before}
    at = LENGTHS[:, None] + torch.arange(2)
    for name, positions in (("query", at[:, -queries:]), ("key", at)):
        x = want[name] if layout == "bhnd" else want[name].transpose(1, 2)
        x = rotated(x, positions, *tables, interleaved)
        want[name] = x if layout == "bhnd" else x.transpose(1, 2)
    assert_close(got, decode_attention(**want))
    assert_close(given["key_cache"], want["key_cache"])
    assert torch.equal(given["value_cache"], want["value_cache"])


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize(("key", "value"), [(2, 2), (4, 4), (2, 4)])
def test_rows_of_the_cache_itself_are_appended_unchanged(
    backend: str, layout: str, key: int, value: int
) -> None:
    """Even if a row to write is a row that is still to be read."""
    given = operands(layout)
    dim = 2 if layout == "bhnd" else 1
    for _ in range(2):  # the second call takes the fast path
        own = given | {n: given[n].clone() for n in ("key_cache", "value_cache")}
        own["cache_seqlens"] = torch.full((3,), 3)
        own["key"] = own["key_cache"].narrow(dim, key, 2)
        own["value"] = own["key_cache" if key == value else "value_cache"].narrow(dim, value, 2)
        apart = own | {n: own[n].clone() for n in ("key_cache", "value_cache", "key", "value")}
        assert torch.equal(decode_attention(**own), decode_attention(**apart))
        assert torch.equal(own["key_cache"], apart["key_cache"])
        assert torch.equal(own["value_cache"], apart["value_cache"])


def test_siblings_of_a_draft_tree_share_a_position(backend: str) -> None:
    given, tables = operands(), angles(14, 4)
    options: dict[str, Any] = {"rotary_cos": tables[0], "rotary_sin": tables[1]}
    options["mask"] = masks.draft_tree(torch.eye(2).bool())
    positions = LENGTHS[:, None].expand(-1, 2)
    together = decode_attention(**given, **options, rotary_positions=positions)
    del options["mask"]
    for token in range(2):
        one = operands() | {n: given[n] for n in ("key_cache", "value_cache")}
        one |= {n: given[n][:, :, token : token + 1] for n in ("query", "key", "value")}
        assert_close(together[:, :, token : token + 1], decode_attention(**one, **options))


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_tables_without_columns_rotate_nothing(backend: str, layout: str) -> None:
    given, none = operands(layout), torch.zeros(14, 0)
    want = decode_attention(**{**given, "key_cache": given["key_cache"].clone()})
    assert torch.equal(decode_attention(**given, rotary_cos=none, rotary_sin=none), want)


def test_rotated_queries_keep_their_strides(backend: str) -> None:
    given = operands("bnhd")
    names = ("key_cache", "value_cache", "key", "value")
    tensors = [given[n].transpose(1, 2) for n in names]
    query = given["query"].transpose(1, 2)
    args = (*tensors, given["cache_seqlens"], None, None, *angles(14, 4), None, query)
    rotated = torch.ops.fastattn.append_to_cache(*args, *[None] * 3, False)
    assert rotated.stride() == query.stride()


COS, SIN = angles(14, 4)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"rotary_sin": None}, ValueError, "rotary_cos and rotary_sin must be given together"),
        ({"rotary_cos": 1}, TypeError, "argument 'rotary_cos' must be Tensor"),
        ({"rotary_cos": COS[0]}, ValueError, r"rotary_cos must be \[M, R / 2\]"),
        ({"rotary_cos": COS.double()}, RuntimeError, "float32 or of query's dtype"),
        ({"rotary_cos": COS[:-1]}, ValueError, "must have the same shape and dtype"),
        ({"rotary_cos": torch.zeros(14, 5), "rotary_sin": torch.zeros(14, 5)}, ValueError,
         "at most 4 columns, for half of the 8 columns of key, got 5"),
        ({"rotary_cos": COS[:10], "rotary_sin": SIN[:10]}, ValueError,
         "a row for each position, got 10 rows and position 10"),
        ({"rotary_cos": COS.clone().requires_grad_()}, RuntimeError,
         "rotary_cos requires a gradient"),
        ({"rotary_interleaved": 1}, TypeError, "argument 'rotary_interleaved' must be bool"),
        ({"rotary_positions": torch.zeros(3).int()}, ValueError, r"\(2,\) or \(3, 2\), got \(3,\)"),
        ({"rotary_positions": torch.zeros(2)}, TypeError, "must be int32 or int64"),
        ({"rotary_positions": torch.tensor([0, -1])}, ValueError, "and position -1"),
        ({"key": None, "value": None}, ValueError, "rotary_cos needs key and value"),
        ({"query": torch.zeros(3, 4, 3, 8)}, ValueError, "got 3 queries and 2 new keys"),
        ({"rotary_cos": None, "rotary_sin": None, "rotary_positions": torch.zeros(2).int()},
         ValueError, "rotary_positions must be None without rotary_cos"),
    ],
)  # fmt: skip
def test_errors(given: dict[str, Any], error: type[Exception], message: str) -> None:
    call = {**operands(), "rotary_cos": COS, "rotary_sin": SIN, **given}
    refused(call, error, f"decode_attention.*{message}")
