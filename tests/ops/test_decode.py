"""decode_attention: on every backend and instruction set, eager and compiled."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from cache_calls import cache_operands, refused
from case_table import within_the_bound
from torch import Tensor

from fastattn import decode_attention, masks, scaled_dot_product_attention, use_backend
from fastattn.ops import decode
from fastattn.testing import Target

test_case = within_the_bound("decode_attention")
caches = functools.partial(cache_operands, is_causal=False)


def test_bits_do_not_depend_on_the_order_of_pages(
    target: Target, generator: torch.Generator
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        query = torch.randn(3, 8, 1, 40, generator=generator).to(dtype)
        key, value = torch.randn(2, 3, 2, 1400, 40, generator=generator).to(dtype)
        lengths = torch.tensor([1400, 9, 520])
        want = decode_attention(query, key, value, lengths)
        for page in (1, 14, 100, 1400):
            order = torch.randperm(3 * 1400 // page, generator=generator).view(3, -1)
            pages = []
            for x in (key, value):
                rows = x.unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1)
                pages.append(torch.empty_like(rows).index_copy_(0, order.flatten(), rows))
            assert torch.equal(decode_attention(query, *pages, lengths, block_table=order), want)


# --- the public function ---------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("paged", [False, True])
def test_appends_in_place_and_attends(backend: str, layout: str, paged: bool) -> None:
    given = caches(layout)
    dim = 2 if layout == "bhnd" else 1
    whole = [given[name].clone() for name in ("key_cache", "value_cache")]
    for x, name in zip(whole, ("key", "value"), strict=True):
        for b, n in enumerate((4, 0, 9)):
            x[b].narrow(dim - 1, n, 2).copy_(given[name][b])
    if paged:  # pages of 4 keys in another order
        order = torch.tensor([[7, 2, 0], [1, 8, 3], [4, 6, 5]])
        for name in ("key_cache", "value_cache"):
            pages = given[name].unflatten(dim, (3, 4)).movedim(dim, 1).flatten(0, 1)
            given[name] = torch.empty_like(pages).index_copy_(0, order.flatten(), pages)
        given["block_table"] = order
    memory = [given[name].data_ptr() for name in ("key_cache", "value_cache")]
    version = given["key_cache"]._version
    out, lse = decode_attention(**given, is_causal=True, return_lse=True)
    assert [given[name].data_ptr() for name in ("key_cache", "value_cache")] == memory
    assert given["key_cache"]._version > version
    for name, want in zip(("key_cache", "value_cache"), whole, strict=True):
        got = given[name]
        if paged:
            got = got[given["block_table"]].movedim(1, dim).flatten(dim, dim + 1)
        assert torch.equal(got, want)
    for b, n in enumerate((6, 2, 11)):
        parts = [x[b : b + 1] for x in (given["query"], *whole)]
        q, k, v = (x.transpose(1, 2) if layout == "bnhd" else x for x in parts)
        want, want_lse = scaled_dot_product_attention(
            q,
            k[:, :, :n],
            v[:, :, :n],
            is_causal=True,
            causal_alignment="bottom_right",
            enable_gqa=True,
            return_lse=True,
        )
        got = out[b : b + 1].transpose(1, 2) if layout == "bnhd" else out[b : b + 1]
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(lse[b : b + 1], want_lse)
    assert out.is_contiguous()


def test_an_integer_or_none_is_the_length_of_all_sequences(backend: str) -> None:
    given = {n: x for n, x in caches().items() if n in ("query", "key_cache", "value_cache")}
    assert torch.equal(decode_attention(**given), decode_attention(**given, cache_seqlens=12))
    short = decode_attention(**given, cache_seqlens=5, window=(3, -1))
    want = decode_attention(**given, cache_seqlens=torch.tensor([5, 5, 5]).int(), window=(3, -1))
    assert torch.equal(short, want)


def test_appended_rows_span_several_pages(backend: str) -> None:
    """A prompt in one call, then caches of different lengths together with an empty one."""
    given = caches()
    prompt, values = torch.randn(2, 3, 2, 11, 8)
    pages = [torch.full((9, 2, 4, 8), torch.nan) for _ in range(2)]
    table = torch.tensor([[7, 2, 0], [1, 8, 3], [4, 6, 5]])
    query = torch.randn(3, 4, 11, 8)
    out = decode_attention(
        query, *pages, 0, key=prompt, value=values, block_table=table, is_causal=True
    )
    want = scaled_dot_product_attention(query, prompt, values, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, want)
    lengths = torch.tensor([11, 0, 5])
    out = decode_attention(given["query"][:, :, :1], *pages, lengths, block_table=table)
    for b, n in enumerate(lengths.tolist()):
        one = (x[b : b + 1] for x in (given["query"][:, :, :1], prompt[:, :, :n], values[:, :, :n]))
        torch.testing.assert_close(
            out[b : b + 1], scaled_dot_product_attention(*one, enable_gqa=True)
        )


@pytest.mark.parametrize("paged", [False, True])
def test_left_padding_changes_only_positions(backend: str, paged: bool) -> None:
    if backend == "triton":
        pytest.skip("it has no cache_leftpad")
    given = caches()
    padding, lengths = torch.tensor([3, 0, 7]), torch.tensor([10, 4, 8])
    keys, values = (given.pop(name) for name in ("key_cache", "value_cache"))
    new = {name: given.pop(name) for name in ("key", "value")}
    places = [torch.full_like(x, torch.nan) for x in (keys, values)]
    for place, x in zip(places, (keys, values), strict=True):
        for b, (first, n) in enumerate(zip(padding.tolist(), lengths.tolist(), strict=True)):
            place[b, :, first:n] = x[b, :, : n - first]
    want = decode_attention(**given | new | {"cache_seqlens": lengths - padding},
                            key_cache=keys, value_cache=values, is_causal=True)  # fmt: skip
    if paged:
        given["block_table"] = torch.arange(9).view(3, 3)
        places = [x.unflatten(2, (3, 4)).transpose(1, 2).flatten(0, 1) for x in places]
    caches_of = dict(zip(("key_cache", "value_cache"), places, strict=True))
    got = decode_attention(**given | new | caches_of | {"cache_seqlens": lengths},
                           cache_leftpad=padding, is_causal=True)  # fmt: skip
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("heads", [4, 70, 128])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("size", [(24, 16), (576, 512)])  # the larger is DeepSeek's
def test_values_may_be_a_view_of_the_keys(
    backend: str, heads: int, paged: bool, size: tuple[int, int]
) -> None:
    """Latent heads: a new row is written once as a key, and its first columns again as a value."""
    width, value_width = size
    query, keys = torch.randn(2, heads, 1, width), torch.randn(2, 1, 30, width)
    new, lengths = torch.randn(2, 1, 1, width), torch.tensor([29, 5])
    whole = keys.clone()
    for b, n in enumerate(lengths.tolist()):
        whole[b, :, n] = new[b, :, 0]
    want = decode_attention(query, whole, whole[..., :value_width].clone(), lengths + 1)
    table = torch.tensor([[3, 1, 5], [0, 4, 2]]) if paged else None
    if table is not None:
        pages = keys.unflatten(2, (3, 10)).transpose(1, 2).flatten(0, 1)
        keys = torch.empty_like(pages).index_copy_(0, table.flatten(), pages)
    append = {"key": new, "value": new[..., :value_width], "block_table": table}
    got = decode_attention(query, keys, keys[..., :value_width], lengths, **append)
    if table is not None:
        keys = keys[table].transpose(1, 2).flatten(2, 3)
    assert torch.equal(keys, whole)
    torch.testing.assert_close(got, want)


def _bad() -> list[tuple[dict[str, Any], type[Exception], str]]:
    """Invalid arguments, with the error that each raises."""
    x, n = torch.zeros(3, 2, 12, 8), torch.tensor([4, 0, 9])
    learnt = torch.zeros(3, 4, 2, 8, requires_grad=True)
    return [
        ({"query": 1}, TypeError, "argument 'query' must be Tensor, not int"),
        ({"query": x[0]}, ValueError, r"query must be \[B, H, N, D\], got shape"),
        ({"query": x[..., :4]}, ValueError, "query and key must have the same last dimension"),
        (
            {"query": learnt},
            RuntimeError,
            "query requires a gradient.*no_grad",
        ),
        ({"query": x.double()}, RuntimeError, "key_cache must have query's dtype"),
        ({"key_cache": torch.zeros(3, 3, 12, 8)}, ValueError, "same number of heads"),
        ({"key_cache": torch.zeros(3, 2, 11, 8)}, ValueError, "same entries and lengths"),
        ({"key_cache": None}, TypeError, "argument 'key_cache' must be Tensor"),
        ({"cache_seqlens": n.float()}, TypeError, "cache_seqlens must be int32 or int64"),
        ({"cache_seqlens": n[:2]}, ValueError, "a row for each of the 3 sequences, got 2"),
        ({"cache_seqlens": n + 2}, ValueError, "plus 2 to append, at most 12 keys .* got 11"),
        ({"cache_seqlens": -n}, ValueError, "at least 0, .* got -4"),
        ({"cache_seqlens": 11}, ValueError, "at most 12 keys"),
        ({"cache_seqlens": None}, ValueError, "key and value need cache_seqlens"),
        ({"value": None}, TypeError, "argument 'value' must be Tensor"),
        ({"key": torch.zeros(3, 2, 3, 8)}, ValueError, "value must have shape"),
        ({"block_table": n}, ValueError, r"block_table must be \[B, P\]"),
        ({"block_table": n[:, None].float()}, TypeError, "block_table must be int32 or int64"),
        (
            {"block_table": n[:, None], "cache_batch_idx": n},
            ValueError,
            "block_table and cache_batch_idx must not be given together",
        ),
        ({"key_cache": torch.zeros(4, 2, 12, 8)}, ValueError, "same entries and lengths"),
        ({"cache_leftpad": n + 1}, ValueError, "at most the 4 keys of the sequence, got 5"),
        ({"cache_leftpad": -n}, ValueError, "cache_leftpad must be at least 0 .* got -4"),
        ({"cache_leftpad": n.float()}, TypeError, "cache_leftpad must be int32 or int64"),
        ({"cache_leftpad": n[:2]}, ValueError, "a row for each of the 3 sequences, got 2"),
        (
            {"block_table": torch.zeros(3, 1).long(), "cache_seqlens": n + 2},
            ValueError,
            "12 keys per sequence, those of the 1 pages of 12 in a row of block_table, got 11",
        ),
        (
            {"value_cache": x[:, :, :1].expand(3, 2, 12, 8)},
            ValueError,
            "value_cache must have memory for each row where rows are appended",
        ),
        ({"layout": "nhd"}, ValueError, "layout must be 'bhnd' or 'bnhd', got 'nhd'"),
        ({"window": (1,)}, TypeError, "decode_attention: window must be None or a pair"),
        ({"is_causal": None}, TypeError, "argument 'is_causal' must be bool"),
        ({"alibi_slopes": torch.ones(2)}, ValueError, r"must have shape \(4,\) or \(3, 4\)"),
    ]


@pytest.mark.parametrize(("given", "error", "match"), _bad(), ids=lambda x: str(x)[:40])
def test_errors_say_what_is_wrong(given: Any, error: type[Exception], match: str) -> None:
    refused({**caches(), **given}, error, match)


@pytest.fixture
def checking(backend: str) -> str:
    """The backends that look at numbers of pages and entries."""
    if backend == "triton":
        pytest.skip("it uses the nearest page for one that does not exist")
    return backend


@pytest.mark.parametrize("append", [False, True])
def test_missing_pages_and_entries_are_errors(checking: str, append: bool) -> None:
    given = caches()
    if not append:
        del given["key"], given["value"]
    short = given | {"cache_seqlens": 3}
    for table in ([[0], [3], [1]], [[-1], [0], [1]], [[0], [1], [2**32 + 2]]):
        wrong = short | {"block_table": torch.tensor(table)}
        refused(wrong, ValueError, "must name one of the 3 pages, got")
    if checking == "cpu" and not append:
        one = torch.tensor([1])
        caches_of = (x[:1] for x in (given["query"], given["key_cache"], given["value_cache"]))
        args = (*caches_of, one, *[None] * 6, 2 * one, None, None, 0.3, -1, -1, 0.0, "cpu")
        with pytest.raises(ValueError, match="cache_leftpad must be between 0 and the 1 keys"):
            torch.ops.fastattn.decode_attention(*args)
    if append:
        wrong = given | {"cache_batch_idx": torch.tensor([0, 1, 1])}
        refused(wrong, ValueError, "must not name an entry twice where rows are")
        for table in ([[0], [2], [0]], [[1], [1], [2]]):
            wrong = short | {"block_table": torch.tensor(table)}
            refused(wrong, ValueError, r"must not append twice .*, got page [01] twice")
    for entry in (3, -1):
        wrong = given | {"cache_batch_idx": torch.tensor([0, 1, entry])}
        refused(wrong, ValueError, "cache_batch_idx must name one of the 3 entries")


def test_numbers_of_pages_beyond_a_sequence_are_not_read(checking: str) -> None:
    given, table = caches(), torch.tensor([[1, 2**40], [0, -(2**40)], [2, -7]])
    want = decode_attention(**caches() | {"block_table": table[:, :1]})
    torch.testing.assert_close(decode_attention(**given, block_table=table), want)


def test_a_forced_backend_that_cannot_attend_does_not_append() -> None:
    pytest.importorskip("triton")
    query, key, value = (torch.randn(3, 2, 2, 600) for _ in range(3))
    wide = {name: torch.randn(3, 2, 12, 600) for name in ("key_cache", "value_cache")}
    given = caches() | wide | {"query": query, "key": key, "value": value}
    with use_backend("triton"):
        refused(given, RuntimeError, "a head dimension of 600 is above")


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("planned", [False, True])
def test_an_option_that_does_not_fit_is_an_error_before_the_append(planned: bool) -> None:
    given = caches()
    heads, capacity = given["query"].shape[1], given["key_cache"].shape[2]
    fitting = {"relative_bias": torch.randn(heads, 2 * capacity - 1), "mask": masks.prefix_lm(1)}
    too_short = {"relative_bias": torch.randn(heads, 3)}
    too_many = {"mask": masks.prefix_lm(torch.ones(7, dtype=torch.int64))}
    for wrong in (too_short, too_many):
        decode.plans._clear()
        if planned:
            decode_attention(**caches() | fitting)
        refused(
            given | fitting | wrong, RuntimeError, "relative_bias must|lengths must be of batch"
        )


def test_parameters_are_accepted_without_gradients(backend: str) -> None:
    given = caches()
    query = torch.nn.Parameter(given["query"])
    with torch.no_grad():
        out = decode_attention(**given | {"query": query})
    assert not out.requires_grad
    with torch.inference_mode():
        assert torch.equal(decode_attention(**caches()), out)


def test_autocast_is_not_applied(backend: str) -> None:
    """The cache determines the dtype."""
    with torch.autocast("cpu", torch.bfloat16):
        assert decode_attention(**caches()).dtype == torch.float32


# --- compiled, transformed -------------------------------------------------------------------


def test_vmap(backend: str) -> None:
    query, keys, values, lengths = list(caches().values())[:4]
    stacked = [torch.stack([query, -query]), torch.stack([keys, 2 * keys])]

    def call(query: Tensor, keys: Tensor) -> Tensor:
        return decode_attention(query, keys, values, lengths)

    want = torch.stack([call(q, k) for q, k in zip(*stacked, strict=True)])
    torch.testing.assert_close(torch.vmap(call)(*stacked), want)


def test_the_operator_has_no_gradient() -> None:
    query, keys, values, lengths = list(caches().values())[:4]
    query.requires_grad_()
    args = (query, keys, values, lengths, *[None] * 9, 0.3, -1, -1, 0.0, "")
    out, _ = torch.ops.fastattn.decode_attention(*args)
    with pytest.raises(RuntimeError, match="decode_attention has no gradient"):
        out.sum().backward()
