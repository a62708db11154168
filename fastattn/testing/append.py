"""The cases of ``append_to_cache`` and their proof.

All elements of the caches before the call are NaN. Besides the new rows no byte may change.
A quantised row is judged as what it stands for: each element is within half the distance of
neighbouring numbers of the one that was given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastattn import dispatch
from fastattn.backends import reference
from fastattn.backends.primitives import QUANTISED, AppendOptions
from fastattn.backends.reference.decode import elements
from fastattn.testing import memory
from fastattn.testing.caches import places_of
from fastattn.testing.calls import double
from fastattn.testing.cases import FLOATS
from fastattn.testing.draws import numbers_of
from fastattn.testing.targets import Target
from fastattn.testing.verdict import Proof, Results, Verdict

__all__ = ["APPEND_CASES", "AppendCase", "AppendInputs", "check_append", "make_append"]


@dataclass(frozen=True)
class AppendCase:
    """One call of ``append_to_cache``."""

    name: str
    lengths: tuple[int, ...] = (5, 0, 17)  # before
    rows: int = 3  # to append
    capacity: int = 40  # keys per entry, or per row of the block table
    page: int = 0  # keys per page; 0: not paged
    shuffled: bool = False  # the order of entries differs from that of the sequences
    heads: int = 4
    kv_heads: int = 2
    queries: int = 3
    head_dim: int = 32
    value_dim: int | None = None
    rotary: int = 0  # rotated columns; 0: no rotation
    interleaved: bool = False
    positions: str | None = None  # bl: any positions for each sequence
    quantised: torch.dtype | None = None  # of the caches
    own_tables: bool = False  # of query's dtype, else float32
    layouts: tuple[str, str] = ("contiguous", "contiguous")  # of the new rows and of the caches
    dtypes: tuple[torch.dtype, ...] = FLOATS
    slow: bool = False


_LAYOUTS = ("blhd", "unaligned", "sliced", "every_second", "transposed")


def _cases() -> Iterator[AppendCase]:
    base = AppendCase("plain")
    half = replace(base, rotary=32)
    pairs = replace(half, interleaved=True)
    yield base
    yield replace(base, name="entries", shuffled=True)
    yield replace(base, name="more-than-a-page", page=4, rows=11)
    for width in (7, 33, 100, 576):
        yield replace(base, name=f"width-{width}", head_dim=width, value_dim=20)
    for layout in _LAYOUTS:
        yield replace(base, name=f"layout-{layout}", layouts=(layout, layout))
    yield replace(base, name="layout-mixed", layouts=("every_second", "contiguous"))
    yield replace(base, name="nothing", rows=0, queries=0)
    yield replace(base, name="no-sequences", lengths=())
    for case, label in ((half, "half"), (pairs, "pairs")):
        yield replace(case, name=label)
        yield replace(case, name=f"{label}-entries", shuffled=True, queries=1)
        yield replace(case, name=f"{label}-pages", page=4, rows=11, queries=11)
        yield replace(case, name=f"{label}-positions", positions="bl", own_tables=True)
        for width, rotary in ((32, 16), (33, 2), (100, 100), (128, 64), (7, 6), (576, 64)):
            some = replace(case, head_dim=width, rotary=rotary, value_dim=20)
            some = replace(some, dtypes=FLOATS if rotary == 6 else (torch.float32,))
            yield replace(some, name=f"{label}-{rotary}-of-{width}")
        for layout in _LAYOUTS:
            some = replace(case, layouts=(layout, layout), dtypes=(torch.float32,))
            yield replace(some, name=f"{label}-layout-{layout}")
        mixed = replace(case, layouts=("every_second", "contiguous"))
        yield replace(mixed, name=f"{label}-layout-mixed")
        yield replace(case, name=f"{label}-nothing", rows=0, queries=0)
        yield replace(case, name=f"{label}-no-queries", queries=0)
        yield replace(case, name=f"{label}-no-sequences", lengths=())
    for dtype, kind in ((torch.int8, "int8"), (torch.float8_e4m3fn, "fp8")):
        for case, label in ((base, kind), (half, f"half-{kind}"), (pairs, f"pairs-{kind}")):
            some = replace(case, quantised=dtype)
            yield replace(some, name=label)
            yield replace(some, name=f"{label}-pages", page=4, rows=11, head_dim=100)
            yield replace(some, name=f"{label}-layout", layouts=("every_second", "every_second"))
        yield replace(base, name=f"{kind}-entries", quantised=dtype, shuffled=True, head_dim=33)
    yield replace(half, name="many", rows=300, capacity=400, queries=1, heads=1, kv_heads=1)


APPEND_CASES = tuple(_cases())


@dataclass(frozen=True)
class AppendInputs:
    """The primitive's arguments, and where the new rows are."""

    args: tuple[Tensor | None, ...]
    options: AppendOptions
    places: tuple[Tensor, Tensor]  # entries and rows of the caches, [B, L]


def make_append(case: AppendCase, dtype: torch.dtype, *, fence: bool = False) -> AppendInputs:
    """Return the tensors of ``case``, equal from call to call, in poisoned memory."""
    draw, normal = numbers_of(case.name)
    where = places_of(case, draw)
    page, table = where.page, where.table
    batch = len(case.lengths)
    value_dim = case.head_dim if case.value_dim is None else case.value_dim
    lengths = torch.tensor(case.lengths, dtype=torch.int64)

    def new(heads: int, rows: int, width: int) -> Tensor:
        x = 2 * normal(batch, heads, rows, width)
        return memory.place(x.to(dtype), case.layouts[0], fence=fence)

    def cache(width: int) -> Tensor:
        empty = torch.full((where.entries, case.kv_heads, page, width), torch.nan, dtype=dtype)
        if case.quantised is not None:
            empty = torch.full(empty.shape, 127, dtype=torch.int8).view(case.quantised)
        return memory.place(empty, case.layouts[1], fence=fence)

    def scales() -> Tensor:  # of the rows before, and NaN
        x = torch.full((where.entries, case.kv_heads, page, 1), torch.nan)
        for b, n in enumerate(case.lengths):
            for at in range(n):
                x[table[b, at // page], :, at % page] = 0.5
        return memory.place(x, case.layouts[1], fence=fence)[..., 0]

    rotary: list[Tensor | None] = []
    if case.rotary:
        angles = 3 * normal(case.capacity, case.rotary // 2)
        wide = torch.promote_types(dtype, torch.float32) if not case.own_tables else dtype
        rotary = [memory.place_any(x.to(wide), fence=fence) for x in (angles.cos(), angles.sin())]
        positions = None
        if case.positions is not None:
            positions = torch.randint(case.capacity, (batch, case.rows), generator=draw)
        rotary += [positions, new(case.heads, case.queries, case.head_dim)]
    if case.quantised is not None:
        rotary += [None] * (4 - len(rotary)) + [scales(), scales()]
    at = lengths[:, None] + torch.arange(case.rows)  # [B, L]
    places = (table.gather(1, at // page) if case.page else table[:, :1].expand_as(at), at % page)
    caches = cache(case.head_dim), cache(value_dim)
    keys = new(case.kv_heads, case.rows, case.head_dim), new(case.kv_heads, case.rows, value_dim)
    tables = (table.int() if case.page else None, table[:, 0] if case.shuffled else None)
    options = AppendOptions(rotary_interleaved=case.interleaved)
    return AppendInputs((*caches, *keys, lengths, *tables, *rotary), options, places)


def _run(backend: Any, inputs: AppendInputs) -> Results:
    """The new rows, the rotated queries, and the number of bytes that changed elsewhere."""
    written = {n: inputs.args[n] for n in _WRITTEN if n < len(inputs.args)}
    copies = {n: _copied(x) for n, x in written.items() if x is not None}
    function = backend.append_to_cache
    args = [copies.get(n, x) for n, x in enumerate(inputs.args)]
    rotated = function(*dispatch.taken_by(function, args), options=inputs.options)
    results: Results = {} if rotated is None else {"query": rotated}
    entry, row = inputs.places
    changed = 0
    rows: dict[int, Tensor] = {}
    for n, copy in copies.items():
        old = written[n]
        assert old is not None
        of_copy, of_old = (elements(x, entry, slice(None), row) for x in (copy, old))
        rows[n] = of_copy.transpose(1, 2).clone()
        copy[entry, :, row] = of_old
        changed += int((_bytes(copy) != _bytes(old)).sum())
    results |= {"key": rows[0], "value": rows[1]}
    results["changed"] = torch.tensor([changed], dtype=torch.float64)
    if len(rows) > 2:
        results |= {"key_scales": rows[11], "value_scales": rows[12]}
    return results


_WRITTEN = (0, 1, 11, 12)  # of the arguments


def _copied(x: Tensor) -> Tensor:
    """The same view of a copy of the whole memory."""
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage().clone())
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


def _bytes(x: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


def _define(backend: Any, inputs: AppendInputs) -> Results:
    """The same results in float64, by operations that have rules of rounding."""
    args = double(inputs.args)
    caches = [x.clone() for x in args[:2]]
    rotated = backend.append_to_cache(*caches, *args[2:], options=inputs.options)
    entry, row = inputs.places
    key, value = (x[entry, :, row].transpose(1, 2) for x in caches)
    results: Results = {} if rotated is None else {"query": rotated}
    return results | {"key": key, "value": value, "changed": torch.zeros(1).double()}


def _watched(inputs: AppendInputs) -> dict[str, Tensor | None]:
    names = ("seqlens", "table", "entries", "cos", "sin", "positions", "query")
    tensors = zip(("key", "value", *names), inputs.args[2:], strict=False)
    caches = zip(("key_cache", "value_cache"), inputs.args, strict=False)  # `_run` copies them
    return {**dict(tensors), **dict(caches)}


def _primitive(inputs: AppendInputs) -> tuple[tuple[Tensor | None, ...], AppendOptions]:
    return inputs.args, inputs.options


class _AppendProof(Proof):
    """Judges quantised rows by the rows that they stand for."""

    def __call__(self, case: Any, dtype: torch.dtype, target: Target) -> Verdict:
        if case.quantised is None:
            return super().__call__(case, dtype, target)
        plain, largest = replace(case, quantised=None), QUANTISED[case.quantised]
        inputs, (_, exact, _) = self.make(case, dtype), self.expected(plain, dtype)
        verdict = Verdict()
        with target.active() as backend:
            tensors, options = _primitive(inputs)
            verdict.declined = dispatch.reasons_of(backend, self.operator, tensors, options)
            if verdict.declined:
                return verdict
            results = target.results(self, backend, inputs)
        if results["changed"].item():
            verdict.faults.append(f"{results['changed'].item()} bytes changed elsewhere")
        for name in ("key", "value"):
            scale, want = results[f"{name}_scales"].double(), exact[name]
            of_rows = want.abs().amax(-1) / largest
            if not torch.allclose(scale, of_rows, rtol=1e-6, atol=0):
                verdict.faults.append(f"the scales of {name} are not those of the largest elements")
            off = (results[name].double() * scale[..., None] - want).abs()
            step = of_rows[..., None]
            if case.quantised != torch.int8:  # three bits of mantissa, the least exponent is -6
                exponent = (want / step).abs().log2().floor().clamp(min=-6)
                step = step * (exponent - 3).exp2()
            verdict.faults += [
                f"{name} is off by {float(worst):.3g} of a step"
                for worst in (off / step).flatten().topk(min(1, off.numel())).values
                if worst > 0.5001
            ]
        return verdict


check_append = _AppendProof(
    "append_to_cache",
    APPEND_CASES,
    make=make_append,
    watched=_watched,
    primitive=_primitive,
    run=_run,
    definition=lambda inputs: _define(reference, inputs),
    extended=_define,
    dtypes=lambda inputs: {"changed": torch.float64},
)
