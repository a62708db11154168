"""Masks of a call for a rectangle of its pairs, as a rank of a group needs them."""

from __future__ import annotations

import pytest
import torch

from fastattn import masks
from fastattn.backends.reference._mask_program import visible_by_program

L = 300
IDS = torch.arange(L) // 70
PREFIXES = torch.tensor([3, 170])
MASKS = {
    "causal": masks.causal(),
    "window": masks.sliding_window(40, 3),
    "not-chunks": ~masks.chunked(8) | masks.causal(),
    "prefix": masks.prefix_lm(PREFIXES),
    "documents": masks.document(IDS) & masks.causal(),
    "of-keys": masks.document(IDS, IDS.flip(0)),
    "function": masks.from_function(lambda b, h, q, k: (q - k) % (h + 2) == 0, None, 4, L, L),
    "not-function": ~masks.from_function(lambda b, h, q, k: q // 128 == k // 128, 2, None, L, L),
}


def part_of(part: tuple[int, int, int, int], heads: tuple[int, int] = (1, 2)) -> masks.PartCall:
    """A part (first query, queries, first key, keys) of a call of L queries and keys."""
    first_query, q_len, first_key, k_len = part
    first_head, count = heads
    sizes = (2, 2, q_len, k_len, torch.device("cpu"), count, first_query, first_key)
    return masks.PartCall("test", *sizes, first_head, (L, L), 4)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    "part", [(0, L, 0, L), (7, 20, 3, 30), (70, 70, 140, 70), (L - 1, 1, 0, 1), (120, 0, 5, 9)]
)
def test_the_program_of_a_part_is_a_part_of_the_mask(
    name: str, part: tuple[int, int, int, int]
) -> None:
    i, q_len, j, k_len = part
    mask = MASKS[name]
    every = visible_by_program(masks.program("test", mask, torch.empty(2, 4, L, 8), L, 0), 2, L, L)
    want = every.expand(2, 4, L, L)[:, 1:3, i : i + q_len, j : j + k_len]
    call = part_of(part)
    found = visible_by_program(masks.part_program(mask, call), 2, q_len, k_len)
    assert torch.equal(found.expand(2, 2, q_len, k_len), want)
    assert masks.part_is_visible(mask, call) or not want.any()


def test_parts_without_a_visible_pair_are_known() -> None:
    def sees(mask: masks.Mask, first_query: int, first_key: int) -> bool:
        return masks.part_is_visible(mask, part_of((first_query, 8, first_key, 8)))

    halves = masks.document(torch.arange(L) // 150)
    assert (sees(halves, 0, 8), sees(halves, 0, 150)) == (True, False)
    assert (sees(masks.causal(), 8, 0), sees(masks.causal(), 0, 8)) == (True, False)
    assert not sees(masks.causal() & halves, 150, 0)
    assert sees(masks.causal() | halves, 150, 0)
    squares = masks.from_function(lambda b, h, q, k: q // 128 == k // 128, None, None, L, L)
    assert (sees(squares, 128, 130), sees(squares, 0, 128)) == (True, False)


def test_a_part_is_validated_by_the_whole_mask() -> None:
    masks.check_whole(masks.document(IDS), part_of((0, 5, 0, 5)))
    with pytest.raises(RuntimeError, match="ids of the queries must have length 300, got 299"):
        masks.check_whole(masks.document(IDS[1:]), part_of((0, 5, 0, 5)))
    heads = masks.from_function(lambda b, h, q, k: q >= k, None, 3, L, L)
    with pytest.raises(RuntimeError, match="mask must have 1 or 4 heads, got 3"):
        masks.check_whole(heads, part_of((0, 5, 0, 5)))
