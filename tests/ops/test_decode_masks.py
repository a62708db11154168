"""Masks and relative biases over a cache: beyond the case table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from case_table import refuses
from torch import Tensor
from torch.testing import assert_close

from fastattn import decode_attention, masks, scaled_dot_product_attention
from fastattn.bias import T5, Window2d

pytestmark = pytest.mark.usefixtures("seeded")

LENGTHS = torch.tensor([4, 0, 9])  # before two new rows
CAPACITY = 12
IDS = torch.arange(3 * CAPACITY).view(3, CAPACITY).div(5, rounding_mode="floor")
PREFIXES = torch.tensor([3, 1, 7])


def operands() -> dict[str, Any]:
    """Queries and a cache."""
    query, (keys, values) = torch.randn(3, 4, 2, 8), torch.randn(2, 3, 2, CAPACITY, 8)
    return {"query": query, "key_cache": keys, "value_cache": values, "cache_seqlens": LENGTHS}


def mask_of(ids: Tensor, prefixes: Any, key_ids: Tensor | None = None) -> masks.Mask:
    """A combined mask: documents without their last keys, and prefixes."""
    return masks.document(ids, key_ids) & ~masks.sliding_window(2, 0) | masks.prefix_lm(prefixes)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("form", ["table", "t5"])
def test_the_last_query_is_at_the_last_key(backend: str, form: str, paged: bool) -> None:
    given, new = operands(), torch.randn(2, 3, 2, 2, 8)
    bias: Any = torch.randn(4, 25) if form == "table" else T5(torch.randn(8, 4), False, 6)
    whole = {name: given[f"{name}_cache"].clone() for name in ("key", "value")}
    for x, rows in zip(whole.values(), new, strict=True):
        for b, n in enumerate(LENGTHS.tolist()):
            x[b, :, n : n + 2] = rows[b]
    if paged:
        pages = torch.tensor([[7, 2, 0], [1, 8, 3], [4, 6, 5]])
        for name in ("key_cache", "value_cache"):
            x = given[name].unflatten(2, (3, 4)).transpose(1, 2).flatten(0, 1)
            given[name] = torch.empty_like(x).index_copy_(0, pages.flatten(), x)
        given["block_table"] = pages
    mask = mask_of(IDS, PREFIXES) & masks.chunked(8)
    out, lse = decode_attention(
        **given, key=new[0], value=new[1], mask=mask, relative_bias=bias, return_lse=True
    )
    for b, n in enumerate((LENGTHS + 2).tolist()):
        own = mask_of(IDS[b, n - 2 : n], int(PREFIXES[b]), IDS[b, :n]) & masks.chunked(8)
        want, want_lse = scaled_dot_product_attention(
            given["query"][b],
            whole["key"][b, :, :n],
            whole["value"][b, :, :n],
            mask=own,
            relative_bias=bias,
            causal_alignment="bottom_right",
            enable_gqa=True,
            return_lse=True,
        )
        assert_close(out[b], want)
        assert_close(lse[b], want_lse)


def test_documents_of_the_queries_may_be_given(backend: str) -> None:
    given = operands() | {"cache_seqlens": 9}
    of_positions = decode_attention(**given, mask=masks.document(IDS))
    of_queries = decode_attention(**given, mask=masks.document(IDS[:, 7:9], IDS))
    assert torch.equal(of_positions, of_queries)


def test_a_program_of_the_same_lengths_is_built_once() -> None:
    mask, lengths, query = mask_of(IDS, PREFIXES), LENGTHS.clone(), operands()["query"]

    def program(mask: masks.Mask, query: Tensor = query) -> Tensor:
        return masks.cache_program("test", mask, query, CAPACITY, lengths)

    first = program(mask)
    assert program(mask) is first
    assert program(mask, query[:, :, :1]) is not first
    lengths += 1  # the next token
    second = program(mask)
    assert second is not first
    assert torch.equal(second, program(mask_of(IDS, PREFIXES)))


def test_a_draft_tree_equals_each_draft_alone(backend: str) -> None:
    given, (keys, values) = operands(), torch.randn(2, 3, 2, 5, 8)
    query = torch.randn(3, 4, 5, 8)
    lengths = torch.tensor([4, 0, 7])
    parents = [-1, 0, 0, 1, 2]  # two drafts: tokens 0, 1, 3 and tokens 0, 2, 4
    tree = torch.eye(5).bool()
    for token, parent in enumerate(parents[1:], 1):
        tree[token] |= tree[parent]

    def decode(tokens: list[int], **options: Any) -> Tensor:
        caches = {n: given[n].clone() for n in ("key_cache", "value_cache")}
        new = {"key": keys[:, :, tokens], "value": values[:, :, tokens]}
        return decode_attention(query[:, :, tokens], **caches, **new, cache_seqlens=lengths,
                                **options)  # fmt: skip

    together = decode(list(range(5)), mask=masks.draft_tree(tree))
    for draft in ([0, 1, 3], [0, 2, 4]):
        assert_close(together[:, :, draft], decode(draft, is_causal=True))
    own = torch.stack([tree, torch.ones(5, 5).tril().bool(), tree])
    several = decode(list(range(5)), mask=masks.draft_tree(own))
    assert torch.equal(several[::2], together[::2])
    assert_close(several[1], decode(list(range(5)), is_causal=True)[1])


@pytest.mark.parametrize(
    ("visible", "error", "message"),
    [
        ([[1]], TypeError, "argument 'visible' must be Tensor"),
        (torch.ones(2, 2), TypeError, "visible must be bool, got torch.float32"),
        (torch.ones(2, 3).bool(), ValueError, r"square, \[Lq, Lq\] or .*, got shape \(2, 3\)"),
        (torch.ones(3).bool(), ValueError, "visible must be square"),
        (torch.ones(2, 2).bool(), ValueError, "token 0 sees token 1; order the tokens so"),
        (torch.ones(2, 3, 3).tril(-1).bool(), ValueError, "see itself, but token 0 does not"),
    ],
)
def test_errors_of_draft_trees(visible: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"draft_tree.*{message}"):
        masks.draft_tree(visible)


def test_vmap(backend: str) -> None:
    given = operands()

    def call(query: Tensor, table: Tensor) -> Tensor:
        options = {"mask": mask_of(IDS, PREFIXES), "relative_bias": table}
        return decode_attention(**given | {"query": query}, **options)

    examples = torch.randn(2, 3, 4, 2, 8), torch.randn(2, 4, 17)
    want = torch.stack([call(*pair) for pair in zip(*examples, strict=True)])
    assert_close(torch.vmap(call)(*examples), want)


BAD = [
    ({"mask": torch.ones(2, 9)}, TypeError, "argument 'mask' must be Mask, not Tensor"),
    ({"mask": masks.from_function(lambda b, h, q, k: q >= k, None, None, 2, 12)}, RuntimeError,
     "mask must be one of positions or documents"),
    ({"mask": masks.document(IDS[:, :9])}, RuntimeError, "keys must have length 12, got 9"),
    ({"mask": masks.draft_tree(torch.eye(3).bool())}, RuntimeError, "have 2 tokens.* got 3"),
    ({"mask": masks.draft_tree(torch.eye(2).bool().repeat(2, 1, 1))}, RuntimeError,
     "the draft tree must be of batch size 1 or 3, got 2"),
    ({"mask": masks.document(IDS, IDS)}, RuntimeError, "queries must have length 2, got 12"),
    ({"mask": masks.document(IDS[:2])}, RuntimeError, "batch size 1 or 3, got 2"),
    ({"mask": masks.prefix_lm(PREFIXES[:2])}, RuntimeError, "batch size 1 or 3, got 2"),
    ({"relative_bias": torch.zeros(4, 15)}, RuntimeError,
     "n odd and at least 17 for 2 queries and 9 keys, got"),
    ({"relative_bias": torch.zeros(4, 17, requires_grad=True)}, RuntimeError,
     "relative_bias requires a gradient"),
    ({"relative_bias": T5(torch.zeros(8, 4, requires_grad=True))}, RuntimeError,
     "relative_bias requires a gradient"),
    ({"relative_bias": Window2d(torch.zeros(9, 4), (2, 2))}, TypeError,
     "'relative_bias' must be Tensor or T5"),
]  # fmt: skip
test_errors = refuses(decode_attention, BAD, "decode_attention.*", **operands())


def test_a_draft_tree_is_of_one_process() -> None:
    tree, runs = masks.draft_tree(torch.eye(2).bool()), ((0, 4), (8, 4))
    with pytest.raises(RuntimeError, match=r"must not have a draft tree.*on one process"):
        masks.part_of_cache_program(
            "decode_attention", tree, torch.randn(1, 2, 2, 8), 8, torch.tensor([5]), runs, 12
        )


def test_a_draft_tree_needs_a_cache() -> None:
    x = torch.zeros(1, 1, 2, 8)
    with pytest.raises(RuntimeError, match="must not have a draft tree, which needs the cache"):
        scaled_dot_product_attention(x, x, x, mask=masks.draft_tree(torch.eye(2).bool()))
