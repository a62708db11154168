"""The cases of ``decode_attention`` and their proof: the oracle of attention, by sequence.

All elements of the cache outside the sequences are NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastattn import masks
from fastattn.backends import reference
from fastattn.backends.primitives import AttentionOptions, DecodeOptions
from fastattn.testing import memory, oracle
from fastattn.testing.caches import places_of
from fastattn.testing.cases import FLOATS
from fastattn.testing.draws import alibi_slopes, numbers_of
from fastattn.testing.inputs import Inputs
from fastattn.testing.varlen import PROGRAMS
from fastattn.testing.verdict import Proof

__all__ = ["DECODE_CASES", "DecodeCase", "DecodeInputs", "check_decode", "make_decode"]


@dataclass(frozen=True)
class DecodeCase:
    """One call of ``decode_attention``."""

    name: str
    lengths: tuple[int, ...] = (70, 0, 1, 129)
    capacity: int = 140  # keys per entry, or per row of the block table
    page: int = 0  # keys per page; 0: not paged
    shuffled: bool = False  # the order of entries differs from that of the sequences
    heads: int = 4
    kv_heads: int = 2
    queries: int = 1
    leftpad: tuple[int, ...] = ()  # rows before the first key of each sequence
    values: str = "normal"  # ones; inf: normal, but the last of the first sequence
    spread: float = 2.0  # the standard deviation of the queries
    quantised: torch.dtype | None = None  # of the caches
    head_dim: int = 32
    value_dim: int | None = None
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str | None = None  # h: one slope per head; bh: per sequence and head
    sinks: bool = False
    relative_bias: bool = False  # a table of distances
    program: str | None = None  # a mask of fastattn.masks, see testing.varlen.PROGRAMS
    tree: str | None = None  # a draft tree; all: the same for all sequences, b: one for each
    layouts: tuple[str, str] = ("contiguous", "contiguous")  # of the query and of the caches
    dtypes: tuple[torch.dtype, ...] = FLOATS
    slow: bool = False


def _cases() -> Iterator[DecodeCase]:
    base = DecodeCase("plain")
    paged = replace(base, page=16)
    yield base
    yield replace(paged, name="paged")
    yield replace(base, name="entries", shuffled=True)
    for page in (1, 7, 64, 100, 256):
        yield replace(paged, name=f"page-{page}", page=page)
    for case in (base, paged):
        label = "paged-" if case.page else ""
        for heads, kv_heads in ((1, 1), (3, 1), (8, 2), (6, 3), (40, 2)):
            name = f"{label}heads-{heads}-{kv_heads}"
            yield replace(case, name=name, heads=heads, kv_heads=kv_heads)
        for d, dv in ((1, 1), (5, 40), (64, 64), (100, 33), (128, 128), (600, 20), (24, 520)):
            yield replace(case, name=f"{label}head_dim-{d}-{dv}", head_dim=d, value_dim=dv)
        for queries in (0, 2, 4, 5, 40):
            some = replace(case, queries=queries, window=(-1, 0), lengths=(70, 3, 40, 129))
            yield replace(some, name=f"{label}queries-{queries}-causal")
        for queries in (5, 8):
            some = replace(case, queries=queries, window=(-1, 0), lengths=(70, 8, 63, 129, 64))
            yield replace(some, name=f"{label}few-{queries}", head_dim=64, capacity=140)
        # Sixteen rows of a key head are a tile; 32 are a panel.
        for heads in (15, 16, 33):
            yield replace(case, name=f"{label}rows-{heads}", heads=heads, kv_heads=1)
        latent = replace(case, heads=20, kv_heads=1, head_dim=576, value_dim=512)
        yield replace(latent, name=f"{label}latent", lengths=(70, 0, 129))
        many = replace(latent, heads=128, window=(90, 0), lengths=(70, 0, 129))
        many = replace(many, dtypes=(torch.float32, torch.bfloat16))
        yield replace(many, name=f"{label}latent-128")
        grouped = replace(many, heads=130, kv_heads=2, head_dim=40, value_dim=24)
        yield replace(grouped, name=f"{label}rows-65", leftpad=(9, 0, 50), softcap=4.0)
        stacked = replace(case, heads=12, queries=3, lengths=(70, 2, 129), window=(20, 0))
        yield replace(stacked, name=f"{label}stacked")
        yield replace(stacked, name=f"{label}stacked-everything", softcap=4.0, alibi="bh",
                      sinks=True, window=(70, 1), layouts=("blhd", "blhd"))  # fmt: skip
        many = replace(case, heads=16, kv_heads=1, lengths=(1100, 513, 512), capacity=1100)
        yield replace(many, name=f"{label}stacked-long", sinks=True)
        yield replace(many, name=f"{label}stacked-long-window", window=(600, 0), alibi="h")
        many = replace(many, dtypes=(torch.float32, torch.bfloat16))
        yield replace(many, name=f"{label}stacked-long-inf", values="inf", window=(500, 0),
                      lengths=(1100, 1100))  # fmt: skip
        # Whatever the scores' rounding, the weights sum to 1.
        yield replace(many, name=f"{label}stacked-long-ones", values="ones", spread=2000.0)
        yield replace(case, name=f"{label}window", window=(20, 0), queries=3)
        yield replace(case, name=f"{label}softcap-alibi", softcap=4.0, alibi="bh", queries=2)
        yield replace(case, name=f"{label}alibi", alibi="h", window=(-1, 0))
        yield replace(case, name=f"{label}sinks", sinks=True, window=(20, 0), queries=2)
        long = replace(case, lengths=(2000, 513, 512, 1), capacity=2050, kv_heads=1)
        yield replace(long, name=f"{label}long")
        yield replace(long, name=f"{label}long-sinks", sinks=True)
        yield replace(long, name=f"{label}long-batch", lengths=(600, 9, 700, 512, 0, 1024, 33, 7))
        for layout in ("blhd", "unaligned", "sliced", "every_second", "transposed"):
            yield replace(case, name=f"{label}layout-{layout}", layouts=(layout, layout))
        padded = replace(case, leftpad=(9, 0, 1, 128), sinks=True)
        yield replace(padded, name=f"{label}leftpad")
        padded = replace(padded, dtypes=(torch.float32, torch.bfloat16))
        yield replace(padded, name=f"{label}leftpad-everything", queries=3, alibi="bh", tree="b",
                      program="many", window=(100, -1), relative_bias=True)  # fmt: skip
        yield replace(padded, name=f"{label}leftpad-panels", queries=40, window=(-1, 0))
        yield replace(padded, name=f"{label}leftpad-rows", heads=16, kv_heads=1, queries=2)
        yield replace(long, name=f"{label}leftpad-long", leftpad=(700, 512, 511, 0),
                      dtypes=(torch.float32,))  # fmt: skip
        yield from _quantised(replace(case, quantised=torch.int8), f"{label}int8")
        yield from _quantised(replace(case, quantised=torch.float8_e4m3fn), f"{label}fp8")
    # So many key heads that a thread takes all chunks of one, up to four threads.
    yield replace(base, name="stacked-long-heads", heads=64, kv_heads=4, head_dim=16, capacity=1030,
                  lengths=(1030, 900, 1024, 700), dtypes=(torch.bfloat16,))  # fmt: skip
    # More chunks than are merged at once, and a window that begins after the first one.
    yield replace(base, name="many-chunks", kv_heads=1, head_dim=16, capacity=9000, lengths=(9000,),
                  window=(6500, 0), dtypes=(torch.float32, torch.bfloat16))  # fmt: skip
    yield replace(base, name="no-sequences", lengths=())
    yield replace(paged, name="paged-no-sequences", lengths=())
    for case in (base, paged):
        yield from _biased(case, "paged-" if case.page else "")


def _quantised(case: DecodeCase, label: str) -> Iterator[DecodeCase]:
    yield replace(case, name=label)
    # For queries of 16 bits, products with int8 can be those of integers.
    integers = case.quantised is torch.int8
    case = replace(case, dtypes=(torch.float32, torch.bfloat16)[: 1 + integers])
    if integers:
        zeros = replace(case, spread=0.0, dtypes=(torch.bfloat16,))
        yield replace(zeros, name=f"{label}-queries-of-zero")
        large = replace(case, spread=50.0, head_dim=128, dtypes=(torch.bfloat16, torch.float16))
        large = replace(large, lengths=(600, 3), capacity=610)
        yield replace(large, name=f"{label}-large-scores")
    for d, dv in ((1, 1), (5, 40), (100, 33), (128, 128), (600, 20), (576, 512)):
        yield replace(case, name=f"{label}-head_dim-{d}-{dv}", head_dim=d, value_dim=dv)
    for heads, kv_heads in ((3, 1), (40, 2), (66, 1)):
        yield replace(
            case, name=f"{label}-heads-{heads}-{kv_heads}", heads=heads, kv_heads=kv_heads
        )
    for queries in (0, 4, 40):
        some = replace(case, queries=queries, window=(-1, 0), lengths=(70, 3, 40, 129))
        yield replace(some, name=f"{label}-queries-{queries}-causal")
    yield replace(case, name=f"{label}-everything", queries=3, softcap=4.0, alibi="bh", sinks=True,
                  relative_bias=True, program="many", leftpad=(9, 0, 1, 128))  # fmt: skip
    long = replace(case, lengths=(2000, 513, 512, 1), capacity=2050, kv_heads=1)
    yield replace(long, name=f"{label}-long")
    for layout in ("blhd", "unaligned", "sliced", "every_second"):
        yield replace(case, name=f"{label}-layout-{layout}", layouts=(layout, layout))
    # Rows are widened up to the longest sequence; masks are those of the whole cache.
    spare = replace(case, capacity=400, tree="b", program="many", dtypes=(torch.float32,))
    yield replace(spare, name=f"{label}-spare-queries", queries=40)
    yield replace(spare, name=f"{label}-spare-heads", heads=66, kv_heads=1, leftpad=(9, 0, 1, 128))
    if not case.page:
        yield replace(case, name=f"{label}-entries", shuffled=True)
        yield replace(case, name=f"{label}-no-sequences", lengths=())
    else:
        yield replace(case, name=f"{label}-pages-of-7", page=7)


def _biased(base: DecodeCase, label: str) -> Iterator[DecodeCase]:
    """Relative biases and masks of fastattn.masks, with the other options."""
    relative = replace(base, relative_bias=True, queries=2)
    yield replace(relative, name=f"{label}relative", window=(20, 0))
    yield replace(relative, name=f"{label}relative-rows", queries=9)  # enough for tiles
    long = replace(base, lengths=(2000, 513, 512, 1), capacity=2050, kv_heads=1)
    yield replace(long, name=f"{label}relative-long", relative_bias=True, window=(-1, 0))
    for program in PROGRAMS:
        case = replace(base, program=program, queries=3, lengths=(70, 1, 40, 129), alibi="h")
        yield replace(case, name=f"{label}program-{program}")
    yield replace(long, name=f"{label}program-long", program="documents")
    for tree, queries in (("b", 3), ("all", 12), ("b", 70)):
        case = replace(base, tree=tree, queries=queries, lengths=(70, 2, 129, 75))
        dtypes = FLOATS if queries == 3 else (torch.float32,)
        yield replace(case, name=f"{label}tree-{queries}", dtypes=dtypes)
    single = (torch.float32,)
    yield replace(base, name=f"{label}tree-one", tree="all", dtypes=single)
    yield replace(long, name=f"{label}tree-long", tree="b", queries=6, heads=2, dtypes=single)
    stacked = replace(base, tree="b", queries=5, heads=12, kv_heads=2)
    yield replace(stacked, name=f"{label}tree-everything", program="chunks", alibi="bh", sinks=True)
    both = replace(relative, program="many", sinks=True, softcap=3.0)
    yield replace(both, name=f"{label}relative-everything")
    yield replace(both, name=f"{label}relative-gathered", queries=40, lengths=(70, 3, 40, 129))
    spare = replace(both, tree="b", queries=40, capacity=400, lengths=(70, 41, 129), dtypes=single)
    yield replace(spare, name=f"{label}spare-gathered")
    yield replace(both, name=f"{label}relative-no-sequences", lengths=())


DECODE_CASES = tuple(_cases())


@dataclass(frozen=True)
class DecodeInputs:
    """The primitive's arguments, and the keys and values of each sequence."""

    args: tuple[Tensor | None, ...]
    options: DecodeOptions
    keys: list[Tensor]  # [Hkv, length, D]; those that are padding too
    values: list[Tensor]
    programs: list[Tensor | None]  # the mask program of each sequence alone


def make_decode(case: DecodeCase, dtype: torch.dtype, *, fence: bool = False) -> DecodeInputs:
    """Return the tensors of ``case``, equal from call to call, in poisoned memory."""
    draw, normal = numbers_of(case.name)
    where = places_of(case, draw)
    page, table = where.page, where.table
    batch, pages = table.shape
    value_dim = case.head_dim if case.value_dim is None else case.value_dim
    keys = [normal(case.kv_heads, n, case.head_dim).to(dtype) for n in case.lengths]
    values = [normal(case.kv_heads, n, value_dim).to(dtype) for n in case.lengths]
    if case.values == "ones":
        values = [torch.ones_like(x) for x in values]
    if case.values == "inf":
        values[0][:, -1] = torch.inf

    def with_padding(x: Tensor, b: int) -> Tensor:
        if not case.leftpad:
            return x
        return x.masked_fill(torch.arange(x.shape[1])[:, None] < case.leftpad[b], torch.nan)

    def cache(rows: list[Tensor], width: int) -> tuple[Tensor, Tensor | None]:
        filled = torch.full((where.entries, case.kv_heads, page, width), torch.nan, dtype=dtype)
        for b, x in enumerate(rows):
            for n, part in enumerate(with_padding(x, b).split(page, 1)):
                filled[table[b, n], :, : part.shape[1]] = part
        if case.quantised is None:
            return memory.place(filled, case.layouts[1], fence=fence), None
        numbers, scales = reference.quantise(filled.double(), case.quantised)
        # NaN: any number, and a scale of NaN
        return (
            memory.place(numbers, case.layouts[1], fence=fence),
            memory.place(scales[..., None], case.layouts[1], fence=fence)[..., 0],
        )

    caches = cache(keys, case.head_dim), cache(values, value_dim)
    if case.quantised is not None:  # what the caches hold
        keys, values = ([_dequantised(x, case.quantised) for x in r] for r in (keys, values))
    query = case.spread * normal(batch, case.heads, case.queries, case.head_dim).to(dtype)
    slopes = alibi_slopes(draw, case.alibi, batch, case.heads, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    # sinks, relative bias, mask program, padding, scales
    more: list[Tensor | None] = [None, None, None, None, caches[0][1], caches[1][1]]
    if case.sinks:
        more[0] = (2 * normal(1, case.heads)).to(wide)
    if case.relative_bias:  # with two distances more than there are
        most = max((*case.lengths, case.queries))
        more[1] = normal(1, case.heads, 2 * most + 1).to(wide)
    programs: list[Tensor | None] = [None for _ in case.lengths]
    if case.program is not None or case.tree is not None:
        capacity = pages * page
        program, programs = _programs(case, query, capacity, draw)
        more[2] = memory.place(program[None, None, None], "contiguous", fence=fence)[0, 0, 0]
    if case.leftpad:
        more[3] = torch.tensor(case.leftpad)
    while more and more[-1] is None:  # a backend need not take tensors that no case has
        more.pop()
    block_table = entries = None
    if case.page:
        block_table = table.int()
        used = torch.arange(pages) * page < torch.tensor(case.lengths)[:, None]
        block_table = torch.where(used, block_table, -7)  # must not be read
    elif case.shuffled:
        entries = table[:, 0].contiguous()
    return DecodeInputs(
        args=(
            memory.place(query, case.layouts[0], fence=fence),
            caches[0][0],
            caches[1][0],
            torch.tensor(case.lengths, dtype=torch.int64),
            block_table,
            entries,
            slopes,
            *more,
        ),
        options=DecodeOptions(
            scale=case.head_dim**-0.5,
            window_left=case.window[0],
            window_right=case.window[1],
            softcap=case.softcap,
        ),
        keys=keys,
        values=values,
        programs=programs,
    )


def _dequantised(x: Tensor, dtype: torch.dtype) -> Tensor:
    numbers, scales = reference.quantise(x.double(), dtype)
    return numbers.double() * scales.double()[..., None]


def _programs(
    case: DecodeCase, query: Tensor, capacity: int, draw: torch.Generator
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the mask program of all sequences, and those of each."""
    make = PROGRAMS.get(case.program or "", lambda documents, prefix: None)
    trees = _trees(case, draw)
    prefixes = torch.randint(60, (len(case.lengths),), generator=draw)
    ids = torch.randint(3, (len(case.lengths), capacity), generator=draw).sort(1).values
    lengths = torch.tensor(case.lengths, dtype=torch.int64)
    whole = make(masks.document(ids), masks.prefix_lm(prefixes))
    if trees is not None:
        tree = masks.draft_tree(trees[0] if case.tree == "all" else trees)
        whole = tree if whole is None else whole & tree
    alone: list[Tensor | None] = []
    for b, n in enumerate(case.lengths):
        offset = n - case.queries
        own = ids[b, (torch.arange(case.queries) + offset).clamp(min=0)]
        mask = make(masks.document(own, ids[b, :n]), masks.prefix_lm(int(prefixes[b])))
        if trees is not None:
            tree = _tree_by_pairs(trees[b], offset, n)
            mask = tree if mask is None else mask & tree
        alone.append(masks.program("testing", mask, query[b : b + 1], n, offset))
    return masks.cache_program("testing", whole, query, capacity, lengths), alone


def _trees(case: DecodeCase, draw: torch.Generator) -> Tensor | None:
    """Which of the new tokens each of them sees, [B, Lq, Lq]."""
    if case.tree is None:
        return None
    size = (1 if case.tree == "all" else len(case.lengths), case.queries, case.queries)
    visible = torch.rand(size, generator=draw).gt(0.4).tril() | torch.eye(case.queries).bool()
    return visible.expand(len(case.lengths), -1, -1)


def _tree_by_pairs(visible: Tensor, offset: int, length: int) -> masks.Mask:
    """The mask of a draft tree from its definition, pair by pair."""

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k < offset) | visible[q, (k - offset).clamp(min=0)]

    return masks.from_function(sees, None, None, visible.shape[0], length)


def _run(backend: Any, inputs: DecodeInputs) -> dict[str, Tensor]:
    out, lse = backend.decode_attention(*inputs.args, options=inputs.options)
    return {"out": out, "lse": lse.to(torch.promote_types(out.dtype, torch.float32))}


def _sequence_by_sequence(
    inputs: DecodeInputs, run: Callable[[Inputs], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Apply ``run``, the proof's attention, to each sequence."""
    query, _, value_cache, *_ = inputs.args
    assert query is not None
    assert value_cache is not None
    shape = query.shape[:3]
    results = {
        "out": torch.zeros(*shape, value_cache.shape[3], dtype=torch.float64),
        "lse": torch.zeros(shape, dtype=torch.float64),
    }
    for b in range(shape[0]):
        alone = run(_alone(inputs, b))
        for name, result in results.items():
            result[b] = alone[name][0]
    return results


def _alone(inputs: DecodeInputs, b: int) -> Inputs:
    query, _, _, _, _, _, slopes, *more = inputs.args
    assert query is not None
    key, value = inputs.keys[b][None], inputs.values[b][None]
    padding = more[3] if len(more) > 3 else None
    filled = None
    if padding is not None:
        filled = (torch.arange(key.shape[2]) >= padding[b])[None, None, None]
    return Inputs(
        query=query[b : b + 1],
        key=key,
        value=value,
        alibi_slopes=None if slopes is None else slopes[b % slopes.shape[0]][None],
        sinks=more[0] if more else None,
        relative_bias=more[1] if len(more) > 1 else None,
        mask_program=inputs.programs[b],
        attn_mask=filled,
        options=AttentionOptions(offset=key.shape[2] - query.shape[2], **vars(inputs.options)),
    )


_NAMES = (
    "query",
    "key_cache",
    "value_cache",
    "seqlens",
    "table",
    "entries",
    "slopes",
    "sinks",
    "relative_bias",
    "mask_program",
    "leftpad",
    "key_scales",
    "value_scales",
)

check_decode = Proof(
    "decode_attention",
    DECODE_CASES,
    make=make_decode,
    watched=lambda inputs: dict(zip(_NAMES, inputs.args, strict=False)),
    primitive=lambda inputs: (inputs.args, inputs.options),
    run=_run,
    definition=lambda inputs: _sequence_by_sequence(inputs, oracle.definition),
    extended=lambda naive, inputs: _sequence_by_sequence(
        inputs, functools.partial(oracle.extended, naive)
    ),
    dtypes=lambda x: {"lse": torch.promote_types(x.args[0].dtype, torch.float32)},
    coarse=("lse",),
)
