"""The cases of ``append_to_cache`` and their proof.

All elements of the caches before the call are NaN. Besides the new rows no byte may change.
A quantised row is judged as what it stands for: each element is within half the distance of
neighbouring numbers of the one that was given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fastattn import dispatch
from fastattn.backends import reference
from fastattn.backends.primitives import QUANTISED, AppendOptions
from fastattn.backends.reference.decode import elements
from fastattn.testing import memory
from fastattn.testing.calls import Operands, Results, double
from fastattn.testing.cases import Draw, HeadCase, drawn
from fastattn.testing.judge import Proof, Verdict
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
    shuffled: bool = False  # the order of entries differs from that of the sequences
    quantised: torch.dtype | None = None  # of the caches
    layouts: tuple[str, str] = ("contiguous", "contiguous")  # of the other tensors, of the caches

    def places(self, draw: torch.Generator) -> Places:
        """In any order, with three unused entries, or one after another."""
        batch, page = len(self.lengths), self.page or self.capacity
        pages = -(-self.capacity // page)
        if not (self.page or self.shuffled):
            return Places(batch, page, torch.arange(batch).view(batch, 1))
        order = torch.randperm(batch * pages + 3, generator=draw)
        return Places(len(order), page, order[: batch * pages].view(batch, pages))


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
    own_tables: bool = False  # of query's dtype, else float32


_SIZES: dict[str, Sequence[Any]] = {
    "rows queries": [(3, 3), (3, 1), (3, 0), (11, 11), (1, 1), (0, 0)],
    "page shuffled": [(0, False), (0, True), (4, False)],
    "head_dim value_dim": [(32, None), (100, 20), (33, 20), (7, 20), (576, 20), (128, None)],
}
_OPTIONS: dict[str, Sequence[Any]] = {
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
    yield from drawn(AppendCase("mixed"), 71, _SIZES, _OPTIONS)


APPEND_CASES = tuple(_cases())


@dataclass(frozen=True)
class AppendInputs(Operands):
    """The primitive's arguments, and where the new rows are."""

    places: tuple[Tensor, Tensor] = field(kw_only=True)  # entries and rows of the caches, [B, L]

    def results(self, backend: Any) -> Results:
        """The new rows, the rotated queries, and the number of bytes that changed elsewhere."""
        written = {name: self.tensors[name] for name in _WRITTEN}
        copies = {name: moved(x, x.device) for name, x in written.items() if x is not None}
        rotated = self._appended(backend, self.tensors | copies)
        results: Results = {} if rotated is None else {"query": rotated}
        entry, row = self.places
        changed = 0
        for (name, copy), result in zip(copies.items(), _ROWS, strict=False):
            old = written[name]
            assert old is not None
            of_copy, of_old = (elements(x, entry, slice(None), row) for x in (copy, old))
            results[result] = of_copy.transpose(1, 2).clone()
            copy[entry, :, row] = of_old
            changed += int((memory.bytes_of(copy) != memory.bytes_of(old)).sum())
        return results | {"changed": torch.tensor([changed], dtype=torch.float64)}

    def definition(self) -> Results:
        return self.define(reference)

    def define(self, backend: Any) -> Results:
        """The same results in float64, by operations that have rules of rounding."""
        tensors: dict[str, Any] = {n: double(x) for n, x in self.tensors.items()}
        tensors |= dict.fromkeys(_WRITTEN[2:])
        caches = {name: torch.zeros(tensors[name].shape).double() for name in _WRITTEN[:2]}
        rotated = self._appended(backend, tensors | caches)
        entry, row = self.places
        key, value = (x[entry, :, row].transpose(1, 2) for x in caches.values())
        results: Results = {} if rotated is None else {"query": rotated}
        return results | {"key": key, "value": value, "changed": torch.zeros(1).double()}

    def _appended(self, backend: Any, tensors: dict[str, Any]) -> Tensor | None:
        function = backend.append_to_cache
        args = list(replace(self, tensors=tensors).args)
        rotated: Tensor | None = function(*dispatch.taken_by(function, args), options=self.options)
        return rotated

    def dtypes(self) -> dict[str, torch.dtype]:
        return {"changed": torch.float64}


_WRITTEN = ("key_cache", "value_cache", "key_scales", "value_scales")
_ROWS = ("key", "value", "key_scales", "value_scales")


def make_append(case: AppendCase, dtype: torch.dtype) -> AppendInputs:
    """Return the tensors of ``case``, equal from call to call, in poisoned memory."""
    draw = Draw(case, dtype)
    where = case.places(draw.generator)
    page, table = where.page, where.table
    batch, (kv_heads, value_dim) = len(case.lengths), case.of_values
    lengths = torch.tensor(case.lengths, dtype=torch.int64)

    def new(heads: int, rows: int, width: int) -> Tensor:
        return draw.placed(2 * draw.normal(batch, heads, rows, width), case.layouts[0])

    def cache(width: int) -> Tensor:
        empty = torch.full((where.entries, kv_heads, page, width), torch.nan, dtype=dtype)
        if case.quantised is not None:
            empty = torch.full(empty.shape, 127, dtype=torch.int8).view(case.quantised)
        return memory.place(empty, case.layouts[1])

    def scales() -> Tensor:  # of the rows before, and NaN
        x = torch.full((where.entries, kv_heads, page, 1), torch.nan)
        for b, n in enumerate(case.lengths):
            for at in range(n):
                x[table[b, at // page], :, at % page] = 0.5
        return memory.place(x, case.layouts[1])[..., 0]

    tensors: dict[str, Tensor | None] = dict.fromkeys(dispatch.named("append_to_cache", range(13)))
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
    if case.quantised is not None:
        tensors |= {"key_scales": scales(), "value_scales": scales()}
    at = lengths[:, None] + torch.arange(case.rows)  # [B, L]
    places = (table.gather(1, at // page) if case.page else table[:, :1].expand_as(at), at % page)
    tensors |= {"key_cache": cache(case.head_dim), "value_cache": cache(value_dim)}
    tensors["key"] = new(kv_heads, case.rows, case.head_dim)
    tensors["value"] = new(kv_heads, case.rows, value_dim)
    tensors["cache_seqlens"] = lengths
    tensors["block_table"] = table.int() if case.page else None
    tensors["cache_batch_idx"] = table[:, 0] if case.shuffled else None
    options = AppendOptions(rotary_interleaved=case.interleaved)
    return AppendInputs("append_to_cache", tensors, options, places=places)


class _AppendProof(Proof):
    """Judges quantised rows by the rows that they stand for."""

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
                verdict.faults.append(f"the scales of {name} are not those of the largest elements")
            off = (results[name].double() * scale[..., None] - want).abs()
            step = of_rows[..., None]
            if case.quantised != torch.int8:  # three bits of mantissa, the least exponent is -6
                exponent = (want / step).abs().log2().floor().clamp(min=-6)
                step = step * (exponent - 3).exp2()
            worst = float((off / step).max()) if off.numel() else 0.0
            if not worst <= 0.5001:
                verdict.faults.append(f"{name} is off by {worst:.3g} of a step")


check_append = _AppendProof("append_to_cache", APPEND_CASES, make=make_append)
