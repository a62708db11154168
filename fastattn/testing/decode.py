"""The cases of ``decode_attention`` and their proof.

All elements of the cache outside the sequences are NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastattn import masks
from fastattn.backends import reference
from fastattn.backends.primitives import DecodeOptions
from fastattn.testing import memory
from fastattn.testing.append import CacheCase, Places
from fastattn.testing.calls import declared
from fastattn.testing.cases import FLOATS, AttentionCase, Draw, drawn
from fastattn.testing.judge import Proof
from fastattn.testing.sequences import Sequences
from fastattn.testing.varlen import PROGRAMS, biases


@dataclass(frozen=True)
class DecodeCase(AttentionCase, CacheCase):
    """One call of ``decode_attention``."""

    lengths: tuple[int, ...] = (70, 0, 1, 129)
    capacity: int = 140
    _: KW_ONLY
    heads: int = 4
    kv_heads: int | None = 2
    queries: int = 1
    leftpad: tuple[int, ...] = ()  # rows before the first key of each sequence
    values: str = "normal"  # ones; inf: normal, but the last of the first sequence
    spread: float = 2.0  # the standard deviation of the queries
    head_dim: int = 32
    sinks: bool = False
    relative_bias: bool = False  # a table of distances
    tree: str | None = None  # a draft tree; all: the same for all sequences, b: one for each


_SIZES: dict[str, Sequence[Any]] = {
    "page shuffled": [(0, False), (0, True), (1, False), (7, False), (16, False), (100, False)],
    "lengths capacity": [
        *(((70, 0, 1, 129), 140), ((2000, 513, 512, 1), 2050), ((600, 9, 700, 512, 0, 33), 1024)),
        *(((1100, 513, 512), 1100), ((300, 64), 320), ((40, 3), 140), ((), 140), ((8,), 400)),
    ],
    "heads kv_heads": [(1, 1), (4, 2), (3, 1), (16, 2), (6, 3), (40, 2), (16, 1), (66, 1), (33, 1)],
    "head_dim value_dim": [
        *((32, None), (64, None), (128, None), (1, 1), (5, 40), (100, 33), (24, 130)),
        *((64, 128), (576, 512)),
    ],
    "queries window": [
        *((1, (-1, -1)), (1, (-1, 0)), (1, (20, 0)), (2, (-1, 0)), (3, (600, 0)), (5, (-1, 0))),
        *((8, (90, 1)), (40, (-1, 0))),
    ],
}
_OPTIONS: dict[str, Sequence[Any]] = {
    "softcap": [4.0],
    "alibi": ["h", "bh"],
    "sinks": [True, True],
    "relative_bias": [True, True],
    "program": [*PROGRAMS, "many"],
    "tree": ["all", "b", "b"],
    "leftpad": [True, True],
    "quantised": [torch.int8, torch.float8_e4m3fn] * 4,
    "layouts": [(x, x) for x in ("blhd", "unaligned", "sliced", "every_second", "transposed")],
    "values spread": [("ones", 2000.0)],
    "values dtypes": [("inf", FLOATS[:3])],  # sums in extended precision need finite values
    "spread": [0.0, 50.0],
}


def mixed(name: str, count: int) -> Iterator[DecodeCase]:
    """Cases of any sizes and options."""
    for case in drawn(DecodeCase(name), count, _SIZES, _OPTIONS):
        if case.heads * case.queries * case.head_dim * case.capacity > 2**24:
            continue
        leftpad = tuple(n // (2 + b) for b, n in enumerate(case.lengths)) if case.leftpad else ()
        values = case.values if case.quantised is None and case.lengths else "normal"
        yield replace(case, leftpad=leftpad, values=values)


# More chunks than are merged at once, and a window that begins after the first one.
_LONG = DecodeCase("many-chunks", (9000,), 9000, kv_heads=1, head_dim=16, window=(6500, 0))
DECODE_CASES = (*mixed("mixed", 240), _LONG)


def make_decode(case: DecodeCase, dtype: torch.dtype) -> Sequences:
    """Return the tensors of ``case``, equal from call to call, in poisoned memory."""
    draw = Draw(case, dtype)
    where = case.places(draw.generator)
    batch, pages = where.table.shape
    kv_heads, value_dim = case.of_values
    keys = [draw.normal(kv_heads, n, case.head_dim).to(dtype) for n in case.lengths]
    values = [draw.normal(kv_heads, n, value_dim).to(dtype) for n in case.lengths]
    if case.values == "ones":
        values = [torch.ones_like(x) for x in values]
    if case.values == "inf":
        values[0][:, -1] = torch.inf
    key_cache, key_scales, of_keys = _cache(case, where, keys, case.head_dim, dtype)
    value_cache, value_scales, of_values = _cache(case, where, values, value_dim, dtype)
    query = case.spread * draw.normal(batch, case.heads, case.queries, case.head_dim).to(dtype)
    lengths = torch.tensor(case.lengths, dtype=torch.int64)
    tensors: dict[str, Any] = dict.fromkeys(declared("decode_attention").names)
    tensors |= {"query": memory.place(query, case.layouts[0]), "cache_seqlens": lengths}
    tensors |= {"key_cache": key_cache, "value_cache": value_cache}
    tensors |= {"key_scales": key_scales, "value_scales": value_scales}
    tensors["alibi_slopes"] = draw.slopes(case.alibi, batch, case.heads)
    if case.page:
        used = torch.arange(pages) * where.page < lengths[:, None]
        tensors["block_table"] = torch.where(used, where.table.int(), -7)  # must not be read
    elif case.shuffled:
        tensors["cache_batch_idx"] = where.table[:, 0].contiguous()
    tensors |= biases(case, draw, max((*case.lengths, case.queries)))
    if case.program is not None or case.tree is not None:
        mask = _mask(case, pages * where.page, draw.generator)
        program = masks.cache_program("testing", mask, query, pages * where.page, lengths)
        tensors["mask_program"] = memory.place_any(program)
    tensors["cache_leftpad"] = torch.tensor(case.leftpad) if case.leftpad else None
    options = DecodeOptions(case.head_dim**-0.5, *case.window, case.softcap)
    clean = {"key_cache": of_keys, "value_cache": of_values}
    clean |= {"key_scales": None, "value_scales": None}
    return Sequences("decode_attention", tensors, options, clean=clean).with_each_alone()


def _cache(
    case: DecodeCase, where: Places, rows: list[Tensor], width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A cache of the rows of each sequence, its scales, and what it stands for, with 0 for NaN."""
    filled = torch.full(
        (where.entries, case.of_values[0], where.page, width), torch.nan, dtype=dtype
    )
    for b, x in enumerate(rows):
        if case.leftpad:
            x = x.masked_fill(torch.arange(x.shape[1])[:, None] < case.leftpad[b], torch.nan)
        for n, part in enumerate(x.split(where.page, 1)):
            filled[where.table[b, n], :, : part.shape[1]] = part
    if case.quantised is None:
        clean = filled.masked_fill(filled.isnan(), 0.0)
        return memory.place(filled, case.layouts[1]), None, clean
    numbers, scales = reference.quantise(filled.double(), case.quantised)
    clean = (numbers.double() * scales.double()[..., None]).nan_to_num(0.0)
    # NaN: any number, and a scale of NaN
    placed = memory.place(scales[..., None], case.layouts[1])[..., 0]
    return memory.place(numbers, case.layouts[1]), placed, clean


def _mask(case: DecodeCase, capacity: int, draw: torch.Generator) -> masks.Mask:
    """The mask of all sequences."""
    tree = None
    if case.tree is not None:  # which of the new tokens each of them sees, [B|1, Lq, Lq]
        size = (1 if case.tree == "all" else len(case.lengths), case.queries, case.queries)
        seen = torch.rand(size, generator=draw).gt(0.4).tril() | torch.eye(case.queries).bool()
        tree = masks.draft_tree(seen[0] if case.tree == "all" else seen)
    prefixes = torch.randint(60, (len(case.lengths),), generator=draw)
    ids = torch.randint(3, (len(case.lengths), capacity), generator=draw).sort(1).values
    if case.program is None:
        assert tree is not None
        return tree
    mask = PROGRAMS[case.program](masks.document(ids), masks.prefix_lm(prefixes))
    return mask if tree is None else mask & tree


check_decode = Proof("decode_attention", DECODE_CASES, make=make_decode, coarse=("lse",))
