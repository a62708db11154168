"""The cases of ``varlen_attention``, their inputs and their proof.

The definition of packed sequences and of caches is attention for each sequence, independent of
packing, so the proofs also judge the reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastattn import masks
from fastattn.backends._sequences import locate_rows
from fastattn.backends.primitives import AttentionOptions, VarlenOptions
from fastattn.backends.reference._mask_program import visible_by_program
from fastattn.testing.calls import Operands, Results
from fastattn.testing.cases import SCALED, AttentionCase, Draw, drawn, place
from fastattn.testing.inputs import BUCKETS, attention_operands
from fastattn.testing.judge import Proof

# What all sequences share, and what has a row for each query.
_SHARED, _ROWS = ("sinks", "relative_bias", "query_table", "key_table"), ("position_query",)
_Alone = tuple[slice, slice, Operands]  # the rows of queries and keys, and the call of attention


@dataclass(frozen=True)
class Sequences(Operands):
    """The arguments of a primitive, and a call of attention for each sequence."""

    alone: tuple[_Alone, ...] = ()

    def with_each_alone(self) -> Sequences:
        of_cache = self.operator == "decode_attention"
        return replace(self, alone=tuple(_cached(self) if of_cache else _packed(self)))

    def definition(self) -> Results:
        return self.by_sequence(Operands.definition)

    def by_sequence(self, run: Callable[[Operands], Results]) -> Results:
        """Apply ``run`` to each sequence, and combine the results."""
        shape, in_cache = self.query.shape[:-1], self.operator == "decode_attention"
        value = self.value_cache if in_cache else self.value
        results: Results = {
            "out": torch.zeros(*shape, value.shape[-1], dtype=torch.float64),
            "lse": torch.full(shape if in_cache else shape[::-1], -torch.inf).double(),
        }
        if any(grad is not None for grad in self.grads.values()):
            for name in ("query", "key", "value", *_ROWS, *_SHARED):
                if (x := self.tensors.get(name)) is not None:
                    results[f"grad_{name}"] = torch.zeros_like(x, dtype=torch.float64)
        for q, k, alone in self.alone:
            for name, result in run(alone).items():
                if name.removeprefix("grad_") in _SHARED:
                    results[name] += result.double()
                elif in_cache:
                    results[name][q] = result.double()
                elif name == "lse":
                    results[name][:, q] = result[-1].double()
                else:
                    rows = k if name in ("grad_key", "grad_value") else q
                    results[name][rows] = result[-1].transpose(0, 1).double()
        return results


def _packed(inputs: Operands) -> Iterator[_Alone]:
    starts_q, starts_k = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()
    options = vars(inputs.options).copy()
    at_end = options.pop("bottom_right")
    visible: Any = None
    if inputs.mask_program is not None:
        of_keys = locate_rows(inputs.cu_seqlens_k, inputs.key.shape[0])[1]
        rows = inputs.query.shape[0], inputs.key.shape[0]
        visible = visible_by_program(inputs.mask_program, 1, *rows, packed_keys=of_keys)[0, 0]
    for b in range(len(starts_q) - 1):
        q, k = slice(*starts_q[b : b + 2]), slice(*starts_k[b : b + 2])
        n, m = q.stop - q.start, k.stop - k.start
        # The last of a batch, so that its dropout has the same batch index.
        batch = b + 1 if inputs.seed is not None else 1

        def last(x: Tensor | None, rows: slice, batch: int = batch) -> Any:
            if x is None:
                return None
            full = x.new_zeros(batch, x.shape[1], rows.stop - rows.start, x.shape[2])
            full[-1] = x[rows].transpose(0, 1)
            return full

        own = {"query": last(inputs.query, q), "key": last(inputs.key, k)}
        own |= {"value": last(inputs.value, k), "grad_out": last(inputs.grads["out"], q)}
        own["position_query"] = last(inputs.position_query, q)
        if (grad_lse := inputs.grads["lse"]) is not None:
            own["grad_lse"] = last(grad_lse.mT[..., None], q)[..., 0]
        offset = (m - n) * at_end
        if visible is not None:
            mask = masks.from_function(functools.partial(_seen, visible[q, k]), None, None, n, m)
            own["mask_program"] = masks.program("testing", mask, own["query"], m, offset)
        yield q, k, _call(inputs, b, AttentionOptions(offset=offset, **options), **own)


def _seen(pairs: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return pairs[q, k]


def _cached(inputs: Operands) -> Iterator[_Alone]:
    clean = inputs.cleaned()
    (batch, _, queries, _), page = clean.query.shape, clean.key_cache.shape[2]
    table, entries = clean.block_table, clean.cache_batch_idx
    if table is None:
        table = (torch.arange(batch) if entries is None else entries)[:, None]
    filled = torch.ones(batch, 1, queries, table.shape[1] * page, dtype=torch.bool)
    if clean.mask_program is not None:
        filled = visible_by_program(clean.mask_program, batch, queries, filled.shape[3])
    if clean.cache_leftpad is not None:
        padding = clean.cache_leftpad[:, None, None, None]
        filled = filled & (torch.arange(filled.shape[3]) >= padding)
    for b, n in enumerate(clean.cache_seqlens.tolist()):
        used = table[b, : -(-n // page)].long()
        key, value = (x[used].transpose(0, 1).flatten(1, 2)[None, :, :n]
                      for x in (clean.key_cache, clean.value_cache))  # fmt: skip
        own = {"query": clean.query[b : b + 1], "key": key, "value": value}
        if clean.mask_program is not None or clean.cache_leftpad is not None:
            own["attn_mask"] = filled[b : b + 1, ..., :n]
        options = AttentionOptions(offset=n - queries, **vars(inputs.options))
        yield slice(b, b + 1), slice(0, n), _call(clean, b, options, **own)


def _call(inputs: Operands, b: int, options: AttentionOptions, **own: Any) -> Operands:
    """The call of sequence b, with the shared arguments."""
    slopes = inputs.alibi_slopes
    own["alibi_slopes"] = None if slopes is None else slopes[b % slopes.shape[0]][None]
    names = ("seed", *_SHARED, "distance_buckets")
    return attention_operands(options, **own, **{n: inputs.tensors.get(n) for n in names})


@dataclass(frozen=True)
class VarlenCase(AttentionCase):
    """One call of ``varlen_attention`` and of its backward."""

    q_lengths: tuple[int, ...] = (5, 40, 1, 0, 17)
    k_lengths: tuple[int, ...] | None = None  # None: as q_lengths
    after: tuple[int, int] = (0, 0)  # rows of queries and keys after the last sequence, NaN
    bottom_right: bool = False
    sinks: bool = False
    relative_bias: bool = False  # a table of distances
    terms: str | None = None  # of relative attention: query | key | both (tables)
    dropout_p: float = 0.0
    layouts: tuple[str, str, str] = ("blhd", "blhd", "blhd")  # of [1, H, T, D]
    grads: tuple[str, ...] = SCALED


# Masks of fastattn.masks from documents and prefixes, of all sequences or of one.
PROGRAMS: dict[str, Callable[[masks.Mask, masks.Mask], masks.Mask]] = {
    "causal": lambda documents, prefix: masks.causal(),
    "prefix": lambda documents, prefix: prefix & masks.sliding_window(30, -1),
    "not_prefix": lambda documents, prefix: ~prefix,
    "chunks": lambda documents, prefix: masks.chunked(16) & masks.causal(),
    "documents": lambda documents, prefix: documents & masks.causal(),
    "many": lambda documents, prefix: (
        ~(documents & masks.sliding_window(9, 2)) & ~masks.chunked(8) | prefix & ~masks.causal()
    ),
}
_LAYOUTS = (
    *("contiguous", "unaligned", "packed", "transposed", "every_second", "sliced"),
    *("expanded_heads", "expanded_dims"),
)
_CROSS = ((33, 0, 70, 1, 20, 9), (65, 4, 0, 129, 5, 9))
# Sequences of one query use the decoding kernel, others use panels.
_MIXED = ((1, 2, 1, 50, 1, 1), (530, 1030, 1, 70, 0, 9))
_SIZES: dict[str, Sequence[Any]] = {
    "q_lengths k_lengths": [
        *(_CROSS, _MIXED, ((200, 20), (1300, 30)), ((270,), None), ((1, 270, 2, 3), None)),
        *(((5, 40, 1, 0, 17), None), ((64, 64, 64), None), ((1,), None), ((), None)),
        *((tuple(n * 7 % 23 for n in range(40)), None), ((0, 0, 0), (0, 2, 0)), ((9, 3), (4, 31))),
    ],
    "heads kv_heads": [(2, 2), (4, 2), (6, 2), (8, 1), (3, 3)],
    "head_dim value_dim": [
        *((16, None), (64, None), (1, 1), (33, 48), (128, 40), (200, 136), (24, 8)),
    ],
    "bottom_right window": [
        *((False, (-1, -1)), (False, (-1, 0)), (True, (-1, 0))),
        *((False, (9, 4)), (True, (9, 4)), (True, (50, -1))),
    ],
}
_OPTIONS: dict[str, Sequence[Any]] = {
    "after": [(7, 3), (2, 40)],
    "softcap": [3.0],
    "alibi": ["h", "bh"],
    "sinks": [True, True],
    "relative_bias": [True, True, True],
    "terms": ["query", "key", "both"],
    "program": [*PROGRAMS, "many"],
    "dropout_p": [0.2, 0.5, 1.0],
    "layouts": [(layout,) * 3 for layout in _LAYOUTS],
    "grads": [(), ("out",), ("lse",)],
}


def mixed(name: str, count: int) -> Iterator[VarlenCase]:
    """Cases of any sizes and options."""
    return drawn(VarlenCase(name), count, _SIZES, _OPTIONS)


VARLEN_CASES = tuple(mixed("mixed", 100))


def make_varlen(case: VarlenCase, dtype: torch.dtype) -> Sequences:
    draw = Draw(case, dtype)

    def packed(rows: int, after: int, heads: int, width: int, n: int, spread: int = 1) -> Tensor:
        values = spread * draw.normal(rows + after, heads, width)
        values[rows:] = torch.nan
        return draw.placed(values.transpose(0, 1), case.layouts[n]).transpose(0, 1)

    q_lengths = case.q_lengths
    k_lengths = q_lengths if case.k_lengths is None else case.k_lengths
    kv_heads, value_dim = case.of_values
    of_queries, of_keys = (sum(q_lengths), case.after[0]), (sum(k_lengths), case.after[1])
    query = packed(*of_queries, case.heads, case.head_dim, 0, spread=2)
    key = packed(*of_keys, kv_heads, case.head_dim, 1)
    value = packed(*of_keys, kv_heads, value_dim, 2)
    starts = [torch.tensor((0, *n), dtype=torch.int64).cumsum(0) for n in (q_lengths, k_lengths)]
    tensors: dict[str, Tensor | None] = {"query": query, "key": key, "value": value}
    tensors |= {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
    tensors["alibi_slopes"] = draw.slopes(case.alibi, len(q_lengths), case.heads)
    tensors["seed"] = draw.seed(case.dropout_p)
    grads: dict[str, Tensor | None] = {"out": None, "lse": None}
    if "out" in case.grads:
        grads["out"] = packed(*of_queries, case.heads, value_dim, 0)
    if "lse" in case.grads:
        grads["lse"] = draw.normal(case.heads, sum(of_queries)).abs().to(draw.wide).double()
    tensors |= biases(case, draw, max((*q_lengths, *k_lengths, 1)))
    terms = ("position_query", "query_table", "key_table", "distance_buckets")
    tensors |= dict.fromkeys(("mask_program", *terms))
    if case.terms is not None:
        most = max((*q_lengths, *k_lengths, 1)) + 1
        buckets = BUCKETS["log"](torch.arange(-most, most + 1), draw.generator).int()
        tensors["distance_buckets"] = place(buckets)
        rows = int(buckets.max()) + 2
        if case.terms != "key":
            tensors["position_query"] = packed(*of_queries, case.heads, case.head_dim, 1)
            tensors["query_table"] = draw.placed(draw.normal(1, case.heads, rows, case.head_dim))
        if case.terms != "query":
            tensors["key_table"] = draw.placed(draw.normal(1, case.heads, rows, case.head_dim))
    if case.program is not None:
        mask = _mask(case, (q_lengths, k_lengths), draw.generator)
        operands = (query, key, (starts[0], starts[1]), case.bottom_right)
        tensors["mask_program"] = place(masks.packed_program("testing", mask, *operands))
    options = VarlenOptions(
        case.head_dim**-0.5, case.bottom_right, *case.window, case.softcap, case.dropout_p
    )
    return Sequences("varlen_attention", tensors, options, grads).with_each_alone()


def biases(case: Any, draw: Draw, longest: int) -> dict[str, Tensor | None]:
    """The sinks and the relative bias, with two distances more than needed."""
    sinks = (2 * draw.normal(1, case.heads)).to(draw.wide) if case.sinks else None
    table = draw.normal(1, case.heads, 2 * longest + 1) if case.relative_bias else None
    return {"sinks": sinks, "relative_bias": table if table is None else table.to(draw.wide)}


def _mask(
    case: VarlenCase, lengths: tuple[tuple[int, ...], tuple[int, ...]], draw: torch.Generator
) -> masks.Mask:
    """The mask of all sequences."""
    prefixes = [int(torch.randint(n + 1, (), generator=draw)) for n in lengths[1]]
    ids = [[torch.randint(3, (n,), generator=draw).sort().values for n in side] for side in lengths]
    rows = [torch.cat([*own, torch.arange(n)]) for own, n in zip(ids, case.after, strict=True)]
    prefix = masks.prefix_lm(torch.tensor(prefixes, dtype=torch.int64))
    return PROGRAMS[case.program or ""](masks.document(*rows), prefix)


check_varlen = Proof("varlen_attention", VARLEN_CASES, make=make_varlen, coarse=("lse",))
