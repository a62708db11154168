"""The cases of ``decode_attention`` and of ``append_to_cache``, and their proofs.

Each sequence begins in a cache at the rows of ``leftpad``; unused memory is NaN. Appending must not
change any byte outside the new rows. A quantised row is judged by its dequantised values: each
element is within half the distance of neighbouring numbers of the original element.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fastattn import dispatch, masks
from fastattn.backends import reference
from fastattn.backends.primitives import QUANTISED, AppendOptions, DecodeOptions
from fastattn.backends.reference.decode import index_cache
from fastattn.testing.calls import Operands, Results, declared, double
from fastattn.testing.cases import FLOATS, AttentionCase, Draw, HeadCase, bytes_of, drawn, place
from fastattn.testing.judge import Proof, Verdict
from fastattn.testing.packed import PROGRAMS, Sequences, biases
from fastattn.testing.targets import moved


@dataclass(frozen=True)
class Places:
    """A cache of ``entries`` of ``page`` keys, and the entries of each sequence."""

    entries: int
    page: int
    table: Tensor  # [B, pages of a sequence]; one column unless the cache is paged


@dataclass(frozen=True, kw_only=True)
class CacheCase(HeadCase):
    """A case with caches of keys and values."""

    lengths: tuple[int, ...] = ()  # before the call
    capacity: int = 0  # keys per entry, or per row of the block table
    page: int = 0  # keys per page; 0: not paged
    leftpad: tuple[int, ...] = ()  # rows before the first key of each sequence
    shuffled: bool = False  # entries are in another order than the sequences
    quantised: torch.dtype | None = None  # of the caches
    layouts: tuple[str, str] = ("contiguous", "contiguous")  # of the other tensors, of the caches

    def places(self, draw: torch.Generator) -> Places:
        """Places in random order, with three unused entries, or consecutive places."""
        batch, page = len(self.lengths), self.page or self.capacity
        pages = -(-self.capacity // page)
        if not (self.page or self.shuffled):
            return Places(batch, page, torch.arange(batch).view(batch, 1))
        order = torch.randperm(batch * pages + 3, generator=draw)
        return Places(len(order), page, order[: batch * pages].view(batch, pages))


def filled(
    case: CacheCase, where: Places, rows: list[Tensor], width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A cache of the rows of each sequence, its scales, and its dequantised values, NaN as 0."""
    shape = (where.entries, case.of_values[0], where.page, width)
    cache = torch.full(shape, torch.nan, dtype=dtype)
    for b, x in enumerate(rows):
        if case.leftpad:
            x = x.masked_fill(torch.arange(x.shape[1])[:, None] < case.leftpad[b], torch.nan)
        for n, part in enumerate(x.split(where.page, 1)):
            cache[where.table[b, n], :, : part.shape[1]] = part
    if case.quantised is None:
        return place(cache, case.layouts[1]), None, torch.where(cache.isnan(), 0.0, cache)
    numbers, scales = reference.quantise(cache.double(), case.quantised)
    clean = (numbers.double() * scales.double()[..., None]).nan_to_num(0.0)
    # NaN becomes any number with a scale of NaN.
    placed = place(scales[..., None], case.layouts[1])[..., 0]
    return place(numbers, case.layouts[1]), placed, clean


@dataclass(frozen=True)
class DecodeCase(AttentionCase, CacheCase):
    """One call of ``decode_attention``."""

    lengths: tuple[int, ...] = (70, 0, 1, 129)
    capacity: int = 140
    _: KW_ONLY
    heads: int = 4
    kv_heads: int | None = 2
    queries: int = 1
    values: str = "normal"  # or ones; inf: normal, except the last value of the first sequence
    spread: float = 2.0  # the standard deviation of the queries
    head_dim: int = 32
    sinks: bool = False
    relative_bias: bool = False  # a table of distances
    tree: str | None = None  # a draft tree; all: one for all sequences, b: one for each


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
    """Up to ``count`` cases of random sizes and options."""
    for case in drawn(DecodeCase(name), count, _SIZES, _OPTIONS):
        if case.heads * case.queries * case.head_dim * case.capacity > 2**24:
            continue  # its reference takes too long
        leftpad = tuple(n // (2 + b) for b, n in enumerate(case.lengths)) if case.leftpad else ()
        values = case.values if case.quantised is None and case.lengths else "normal"
        yield replace(case, leftpad=leftpad, values=values)


# More chunks than are merged at once, and a window that begins after the first chunk.
_LONG = DecodeCase("many-chunks", (9000,), 9000, kv_heads=1, head_dim=16, window=(6500, 0))
DECODE_CASES = (*mixed("mixed", 240), _LONG)


def make_decode(case: DecodeCase, dtype: torch.dtype) -> Sequences:
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
    key_cache, key_scales, of_keys = filled(case, where, keys, case.head_dim, dtype)
    value_cache, value_scales, of_values = filled(case, where, values, value_dim, dtype)
    query = case.spread * draw.normal(batch, case.heads, case.queries, case.head_dim).to(dtype)
    lengths = torch.tensor(case.lengths, dtype=torch.int64)
    tensors: dict[str, Any] = dict.fromkeys(declared("decode_attention").names)
    tensors |= {"query": place(query, case.layouts[0]), "cache_seqlens": lengths}
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
        tensors["mask_program"] = place(program)
    tensors["cache_leftpad"] = torch.tensor(case.leftpad) if case.leftpad else None
    options = DecodeOptions(case.head_dim**-0.5, *case.window, case.softcap)
    clean = {"key_cache": of_keys, "value_cache": of_values}
    clean |= {"key_scales": None, "value_scales": None}
    return Sequences("decode_attention", tensors, options, clean=clean).with_each_alone()


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


# --- appending -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class AppendCase(CacheCase):
    """One call of ``append_to_cache``."""

    lengths: tuple[int, ...] = (5, 0, 17)
    capacity: int = 40
    _: KW_ONLY
    rows: int = 3  # to append
    heads: int = 4
    kv_heads: int | None = 2
    queries: int = 3
    head_dim: int = 32
    rotary: int = 0  # rotated columns; 0: no rotation
    interleaved: bool = False
    positions: str | None = None  # bl: any positions for each sequence
    own_tables: bool = False  # tables of query's dtype instead of float32


_APPEND_SIZES: dict[str, Sequence[Any]] = {
    "rows queries": [(3, 3), (3, 1), (3, 0), (11, 11), (1, 1), (0, 0)],
    "page shuffled": [(0, False), (0, True), (4, False)],
    "head_dim value_dim": [(32, None), (100, 20), (33, 20), (7, 20), (576, 20), (128, None)],
}
_APPEND_OPTIONS: dict[str, Sequence[Any]] = {
    "lengths": [(), (0,), (5, 0, 17, 1, 20)],
    "rotary head_dim interleaved": [
        *((32, 32, pairs) for pairs in (False, True) * 2),
        *((rotary, width, pairs) for pairs in (False, True)
          for rotary, width in ((16, 32), (2, 33), (100, 100), (64, 128), (6, 7), (64, 576))),
    ],
    "rotary positions own_tables": [(6, "bl", True), (6, "bl", False), (6, None, True)],
    "quantised": [torch.int8, torch.float8_e4m3fn] * 5,
    "layouts": [
        *((x, x) for x in ("blhd", "unaligned", "sliced", "every_second", "transposed")),
        ("every_second", "contiguous"),
    ],
}  # fmt: skip


def _cases() -> Iterator[AppendCase]:
    yield AppendCase("plain")
    yield AppendCase("half", rotary=32)
    yield AppendCase("many", rows=300, capacity=400, queries=1, heads=1, kv_heads=1, rotary=32)
    yield from drawn(AppendCase("mixed"), 71, _APPEND_SIZES, _APPEND_OPTIONS)


APPEND_CASES = tuple(_cases())


@dataclass(frozen=True)
class AppendInputs(Operands):
    """The primitive's arguments, and the places of the new rows."""

    places: tuple[Tensor, Tensor] = field(kw_only=True)  # entries and rows of the caches, [B, L]

    def results(self, backend: Any) -> Results:
        """The new rows, the rotated queries, and the number of bytes that changed elsewhere."""
        copies = {
            name: moved(x, x.device) for name in _WRITTEN if (x := self.tensors[name]) is not None
        }
        rotated = self._appended(backend, self.tensors | copies)
        results: Results = {} if rotated is None else {"query": rotated}
        entry, row = self.places
        changed = 0
        for name, copy in copies.items():
            old = getattr(self, name)
            of_copy, of_old = (index_cache(x, entry, slice(None), row) for x in (copy, old))
            results[name.removesuffix("_cache")] = of_copy.transpose(1, 2).clone()
            copy[entry, :, row] = of_old
            changed += int((bytes_of(copy) != bytes_of(old)).sum())
        return results | {"changed": torch.tensor([changed], dtype=torch.float64)}

    def definition(self, backend: Any = reference) -> Results:
        """The results in float64, by operations that have rules of rounding."""
        tensors: dict[str, Any] = {n: double(x) for n, x in self.tensors.items()}
        tensors |= dict.fromkeys(_WRITTEN[2:])
        caches = {name: torch.zeros(tensors[name].shape).double() for name in _WRITTEN[:2]}
        rotated = self._appended(backend, tensors | caches)
        entry, row = self.places
        key, value = (x[entry, :, row].transpose(1, 2) for x in caches.values())
        results: Results = {} if rotated is None else {"query": rotated}
        return results | {"key": key, "value": value, "changed": torch.zeros(1).double()}

    def _appended(self, backend: Any, tensors: dict[str, Any]) -> Any:
        function, args = backend.append_to_cache, replace(self, tensors=tensors).args
        return function(*dispatch.accepted_tensors(function, args), options=self.options)

    def dtypes(self) -> dict[str, torch.dtype]:
        return {"changed": torch.float64}


_WRITTEN = ("key_cache", "value_cache", "key_scales", "value_scales")


def make_append(case: AppendCase, dtype: torch.dtype) -> AppendInputs:
    draw = Draw(case, dtype)
    where = case.places(draw.generator)
    page, table = where.page, where.table
    batch, (kv_heads, value_dim) = len(case.lengths), case.of_values
    lengths = torch.tensor(case.lengths, dtype=torch.int64)

    def new(heads: int, rows: int, width: int) -> Tensor:
        return draw.placed(2 * draw.normal(batch, heads, rows, width), case.layouts[0])

    tensors: dict[str, Tensor | None] = dict.fromkeys(
        dispatch.tensors_by_name("append_to_cache", range(13))
    )
    if case.rotary:
        angles = 3 * draw.normal(case.capacity, case.rotary // 2)
        of_tables = dtype if case.own_tables else draw.wide
        tensors["rotary_cos"] = draw.placed(angles.cos(), dtype=of_tables)
        tensors["rotary_sin"] = draw.placed(angles.sin(), dtype=of_tables)
        if case.positions is not None:
            shape = (batch, case.rows)
            positions = torch.randint(case.capacity, shape, generator=draw.generator)
            tensors["rotary_positions"] = positions
        tensors["query"] = new(case.heads, case.queries, case.head_dim)
    for name, width in (("key", case.head_dim), ("value", value_dim)):
        rows = [draw.normal(kv_heads, n, width).to(dtype) for n in case.lengths]
        made = filled(case, where, rows, width, dtype)
        tensors |= {f"{name}_cache": made[0], f"{name}_scales": made[1]}
    at = lengths[:, None] + torch.arange(case.rows)  # [B, L]
    places = (table.gather(1, at // page) if case.page else table[:, :1].expand_as(at), at % page)
    tensors["key"] = new(kv_heads, case.rows, case.head_dim)
    tensors["value"] = new(kv_heads, case.rows, value_dim)
    tensors["cache_seqlens"] = lengths
    tensors["block_table"] = table.int() if case.page else None
    tensors["cache_batch_idx"] = table[:, 0] if case.shuffled else None
    options = AppendOptions(rotary_interleaved=case.interleaved)
    return AppendInputs("append_to_cache", tensors, options, places=places)


class _AppendProof(Proof):
    """Judges quantised rows by their dequantised values."""

    def judge(
        self, verdict: Verdict, case: Any, dtype: torch.dtype, results: Results, products: Any
    ) -> None:
        if case.quantised is None:
            super().judge(verdict, case, dtype, results, products)
            return
        _, exact, _ = self.expected(case, dtype)
        if results["changed"].item():
            verdict.faults.append(f"{results['changed'].item()} bytes changed elsewhere")
        for name in ("key", "value"):
            scale, want = results[f"{name}_scales"].double(), exact[name]
            of_rows = want.abs().amax(-1) / QUANTISED[case.quantised]
            if not torch.allclose(scale, of_rows, rtol=1e-6, atol=0):
                verdict.faults.append(f"the scales of {name} do not match the largest elements")
            off = (results[name].double() * scale[..., None] - want).abs()
            step = of_rows[..., None]
            if case.quantised != torch.int8:  # three bits of mantissa, the least exponent is -6
                exponent = (want / step).abs().log2().floor().clamp(min=-6)
                step = step * (exponent - 3).exp2()
            worst = float((off / step).max()) if off.numel() else 0.0
            if not worst <= 0.5001:
                verdict.faults.append(f"{name} is off by {worst:.3g} of a step")


check_append = _AppendProof("append_to_cache", APPEND_CASES, make=make_append)
