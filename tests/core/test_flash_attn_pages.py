"""flash_attn_varlen_func on the pages of a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fastattn.flash_attn import flash_attn_varlen_func

# Of queries and keys: without either, one key, a whole page of 7 or 16 keys, and parts of pages.
Q_LENGTHS = (3, 1, 0, 5, 2, 16, 4, 2)
K_LENGTHS = (9, 1, 4, 0, 7, 16, 33, 0)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (4, 2)},
    "scale": {"softmax_scale": 0.3, "causal": True},
}
page_sizes = pytest.mark.parametrize("page_size", [1, 7, 16])


def ends(lengths: tuple[int, ...]) -> Tensor:
    """Where packed sequences of these lengths begin and end."""
    return torch.tensor([0, *lengths]).cumsum(0)


def paged(packed: Tensor, page_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Shuffled pages of the packed rows, and the table of pages of each sequence.

    Unused rows hold NaN, and unused entries of the table name no page.
    """
    needed = [-(-length // page_size) for length in K_LENGTHS]
    free = torch.randperm(sum(needed) + 3, generator=generator)
    cache = packed.new_full((len(free), page_size, *packed.shape[1:]), torch.nan)
    table = torch.full((len(needed), max(needed) + 2), -1)
    table[:, -1] = len(free)
    for b, rows in enumerate(packed.split(K_LENGTHS)):
        table[b, : needed[b]], free = free[: needed[b]], free[needed[b] :]
        for n, row in enumerate(rows):
            cache[table[b, n // page_size], n % page_size] = row
    return cache, table


def tensors(generator: torch.Generator, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Packed queries of 4 heads; keys and values of 2, of other widths."""
    shapes = ((sum(Q_LENGTHS), 4, 8), (sum(K_LENGTHS), 2, 8), (sum(K_LENGTHS), 2, 6))
    return [torch.randn(x, generator=generator, dtype=torch.float64).to(dtype) for x in shapes]


def both_paged(packed: list[Tensor], page_size: int, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """Packed keys and values as paged caches, with one block table."""
    pairs = [paged(x, page_size, torch.Generator().manual_seed(seed)) for x in packed]
    return [cache for cache, _ in pairs], pairs[0][1]


def call(q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor | None = None, **options: Any) -> Tensor:
    """flash_attn_varlen_func on the sequences of this file."""
    q_ends = ends(Q_LENGTHS) if q_ends is None else q_ends
    out: Tensor = flash_attn_varlen_func(
        q, k, v, q_ends, ends(K_LENGTHS), max(Q_LENGTHS), max(K_LENGTHS), **options
    )
    return out


def expected(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    """PyTorch's attention of each sequence, with the last query at the last key."""
    left, right = options.get("window_size", (-1, 0 if options.get("causal") else -1))
    found = []
    sequences = zip(q.split(Q_LENGTHS), k.split(K_LENGTHS), v.split(K_LENGTHS), strict=True)
    for of_q, of_k, of_v in sequences:
        at = torch.arange(len(of_q))[:, None] + len(of_k) - len(of_q)
        distance = torch.arange(len(of_k)) - at
        seen = torch.ones_like(distance, dtype=torch.bool)
        seen &= distance <= right if right >= 0 else seen
        seen &= distance >= -left if left >= 0 else seen
        by_head = [x.transpose(0, 1)[None].double() for x in (of_q, of_k, of_v)]
        scale = options.get("softmax_scale")
        out = scaled_dot_product_attention(*by_head, seen, scale=scale, enable_gqa=True)
        out = out.where(seen.any(-1, keepdim=True), 0)
        found.append(out[0].transpose(0, 1))
    return torch.cat(found)


@page_sizes
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_each_sequence_attends_to_the_rows_of_its_pages(
    backend: str, page_size: int, options: dict[str, Any], generator: torch.Generator
) -> None:
    q, k, v = tensors(generator)
    caches, table = both_paged([k, v], page_size)
    got = call(q, *caches, block_table=table, **options)
    torch.testing.assert_close(got, expected(q, k, v, options))


@page_sizes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_pages_give_the_bits_of_packed_rows(
    page_size: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    q, k, v = tensors(generator, dtype)
    caches, table = both_paged([k, v], page_size)
    options = {
        "softmax_scale": 0.3,
        "causal": True,
        "window_size": (6, -1),
        "softcap": 2.0,
        "alibi_slopes": torch.rand(len(K_LENGTHS), 4, generator=generator),
        "s_aux": torch.rand(4, generator=generator),
        "return_attn_probs": True,
    }
    found = call(q, *caches, block_table=table.int(), **options)
    for got, want in zip(found[:2], call(q, k, v, **options)[:2], strict=True):
        assert torch.equal(got, want)
    out = call(q, *caches, block_table=table, causal=True).double()
    atol = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    want = expected(q, k, v, {"causal": True})
    torch.testing.assert_close(out, want, rtol=atol, atol=atol)


def test_any_strides(generator: torch.Generator) -> None:
    q, k, v = tensors(generator)
    caches, table = both_paged([k, v], 7)
    want = call(q, *caches, block_table=table)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in caches]
    beside = [torch.stack([x, torch.full_like(x, torch.nan)], 1)[:, 0] for x in caches]
    spread = [torch.stack([x, x], -1)[..., 0] for x in caches]
    tables = (table.T.contiguous().T, table.repeat_interleave(2, 1)[:, ::2])
    for others, at in zip((heads_first, beside, spread), (table, *tables), strict=True):
        q_ends = ends(Q_LENGTHS).repeat_interleave(2)[::2]
        assert torch.equal(call(q, *others, q_ends, block_table=at), want)
    strided = ends(K_LENGTHS).repeat_interleave(2)[::2]
    got = flash_attn_varlen_func(q, *caches, ends(Q_LENGTHS), strided, 16, 33, block_table=table)
    assert torch.equal(got, want)


def test_sequences_share_pages_and_their_gradients_add_up(generator: torch.Generator) -> None:
    q = torch.randn(6, 2, 4, generator=generator)
    caches = [torch.randn(3, 4, 1, 4, generator=generator).requires_grad_() for _ in range(2)]
    table = torch.tensor([[2, 0], [2, 1], [2, -1]])
    rows = torch.tensor([8, 9, 10, 11, 0, 1, 8, 9, 10, 11, 4, 8, 9, 10])
    given = (torch.tensor([0, 1, 3, 6]), torch.tensor([0, 6, 11, 14]), 3, 6)
    weights = torch.randn(6, 2, 4, generator=generator)
    for whole in (caches, [x.transpose(1, 2).contiguous().transpose(1, 2) for x in caches]):
        got = flash_attn_varlen_func(q, *whole, *given, causal=True, block_table=table)
        want = flash_attn_varlen_func(
            q, *(x.flatten(0, 1)[rows] for x in caches), *given, causal=True
        )
        assert torch.equal(got, want)
        for a, b in zip(
            torch.autograd.grad((got * weights).sum(), caches),
            torch.autograd.grad((want * weights).sum(), caches),
            strict=True,
        ):
            torch.testing.assert_close(a, b)


def test_gradients_of_shared_pages_are_bitwise_reproducible() -> None:
    """PyTorch's indexing adds them with atomics, in any order."""
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(4, 16, 8, 64, generator=generator).requires_grad_()
    table = torch.randint(4, (64, 4), generator=generator)
    starts = torch.arange(0, 65 * 64, 64)
    q = torch.randn(64, 8, 64, generator=generator)

    def gradient() -> Tensor:
        given = (torch.arange(65), starts, 1, 64)
        out = flash_attn_varlen_func(q, cache, cache, *given, block_table=table)
        return torch.autograd.grad(out.sin().sum(), cache)[0]

    want = gradient()
    assert all(torch.equal(gradient(), want) for _ in range(5))


@pytest.mark.complete
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("longest", [33, 40, 1000, None])
def test_compiled_equals_eager_without_graph_breaks(
    dynamic: bool, longest: int | None, generator: torch.Generator
) -> None:
    """Compiled code does not know the lengths: it gathers the maximum number of rows."""
    q, k, v = tensors(generator, torch.float32)

    def loss(q: Tensor, k: Tensor, v: Tensor, k_ends: Tensor, table: Tensor) -> Tensor:
        given = (ends(Q_LENGTHS), k_ends, 16, longest)
        out: Tensor = flash_attn_varlen_func(q, k, v, *given, causal=True, block_table=table)
        return out.sin().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for page_size in (7, 16):
        caches, table = both_paged([k, v], page_size)
        inputs = [x.requires_grad_() for x in (q, *caches)]
        got, want = (f(*inputs, ends(K_LENGTHS), table) for f in (compiled, loss))
        torch.testing.assert_close(got, want)
        for a, b in zip(
            torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs), strict=True
        ):
            torch.testing.assert_close(a, b)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("shape", [(0, 4, 2, 8), (3, 0, 2, 8), (3, 4, 2, 8)])
@pytest.mark.parametrize("columns", [0, 2])
@pytest.mark.parametrize("batch", [0, 2])
def test_no_keys(shape: tuple[int, ...], columns: int, batch: int) -> None:
    cache, table = torch.full(shape, torch.nan), torch.full((batch, columns), 99)
    q, q_ends = torch.ones(2 * batch, 4, 8), torch.arange(0, 2 * batch + 1, 2)
    k_ends = torch.zeros(batch + 1, dtype=torch.int64)

    def call() -> Tensor:
        out: Tensor = flash_attn_varlen_func(
            q, cache, cache, q_ends, k_ends, 2, 0, block_table=table
        )
        return out

    assert torch.equal(call(), torch.zeros(2 * batch, 4, 8))
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert torch.equal(compiled(), torch.zeros(2 * batch, 4, 8))


def test_errors() -> None:
    q, k = torch.ones(4, 2, 8), torch.ones(3, 4, 2, 8)
    q_ends, k_ends = torch.tensor([0, 2, 4]), torch.tensor([0, 7, 9])
    table = torch.tensor([[0, 2], [1, -1]])
    base = {
        "q": q, "k": k, "v": k, "cu_seqlens_q": q_ends, "cu_seqlens_k": k_ends,
        "max_seqlen_q": 2, "max_seqlen_k": 7, "block_table": table,
    }  # fmt: skip
    assert flash_attn_varlen_func(**base).shape == q.shape
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"q": None}, TypeError, "argument 'q' must be Tensor, not NoneType"),
        ({"k": 3}, TypeError, "argument 'k' must be Tensor, not int"),
        ({"k": k[0]}, ValueError, r"k must be \[pages, page size, Hkv, D\] with a block_table, got "
            r"shape \(4, 2, 8\)"),
        ({"v": k[0]}, ValueError, r"v must be \[pages, page size, Hkv, D\]"),
        ({"v": k.to_sparse()}, RuntimeError, "v must be a dense tensor, got a sparse_coo one"),
        ({"v": k.to("meta")}, RuntimeError, "v must be on query's device cpu, got meta"),
        ({"v": k[:, :3]}, ValueError, r"k and v must have the same pages and page size with a "
            r"block_table, got shapes \(3, 4, 2, 8\) and \(3, 3, 2, 8\)"),
        ({"v": k[:2]}, ValueError, "k and v must have the same pages and page size"),
        ({"v": k[:, :, :1]}, ValueError, "key and value must have the same number of heads"),
        ({"k": k.double()}, RuntimeError, "query, key and value must have the same dtype"),
        ({"block_table": [[0, 2], [1, -1]]}, TypeError, "'block_table' must be Tensor, not list"),
        ({"block_table": table[0]}, ValueError, r"block_table must be \[B, P\], got shape \(2,\)"),
        ({"block_table": table.float()}, TypeError,
            "block_table must be int32 or int64, got torch.float32"),
        ({"block_table": table.to("meta")}, RuntimeError,
            "block_table must be on query's device cpu, got meta"),
        ({"block_table": table[:1]}, ValueError, "block_table must have a row for each of the 2 "
            "sequences of cu_seqlens_k, got 1"),
        ({"block_table": table[:, :1]}, ValueError, "block_table must have room for the 7 keys of "
            "the longest sequence, got 1 pages of 4 rows for each"),
        ({"block_table": table + 1}, ValueError,
            "block_table must name one of the 3 pages, got 3"),
        ({"block_table": -table}, ValueError, "block_table must name one of the 3 pages, got -2"),
        ({"cu_seqlens_k": k_ends.tolist()}, TypeError, "'cu_seqlens_k' must be Tensor, not list"),
        ({"cu_seqlens_k": k_ends + 1}, ValueError, "cu_seqlens_k must begin with 0, got 1"),
        ({"cu_seqlens_k": torch.tensor([0, 7, 6])}, ValueError, "cu_seqlens_k must not decrease"),
        ({"cu_seqlens_k": k_ends[:0]}, ValueError, r"cu_seqlens_k must be \[B \+ 1\]"),
        ({"cu_seqlens_q": q_ends[:2]}, ValueError, "must have the same length, got 2 and 3"),
        ({"max_seqlen_k": 6}, ValueError, "max_seqlen_k must be at least the longest sequence, 7"),
        ({"max_seqlen_k": 7.0}, TypeError, "'max_seqlen_k' must be int or None, not float"),
        ({"alibi_slopes": torch.ones(3)}, ValueError, "alibi_slopes must have shape"),
        ({"window_size": 3}, TypeError, "window must be None or a pair of ints"),
        ({"dropout_p": 0.1, "return_attn_probs": True}, NotImplementedError, "with dropout"),
    ]  # fmt: skip
    for change, error, message in cases:
        with pytest.raises(error, match=message):
            flash_attn_varlen_func(**base | change)
