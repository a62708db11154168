"""The cases of ``varlen_attention`` and their proof: the oracle of attention, sequence by sequence.

The proof is independent of packing, so it also judges the packed reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastattn import masks
from fastattn.backends.primitives import AttentionOptions, VarlenOptions
from fastattn.testing import memory, oracle
from fastattn.testing.cases import FLOATS
from fastattn.testing.draws import alibi_slopes, dropout_seed, numbers_of
from fastattn.testing.inputs import Inputs
from fastattn.testing.verdict import Proof

__all__ = ["VARLEN_CASES", "VarlenCase", "VarlenInputs", "check_varlen", "make_varlen"]

_GRADS = ("grad_query", "grad_key", "grad_value", "grad_sinks", "grad_relative_bias")


@dataclass(frozen=True)
class VarlenCase:
    """One call of ``varlen_attention`` and of its backward."""

    name: str
    q_lengths: tuple[int, ...] = (5, 40, 1, 0, 17)
    k_lengths: tuple[int, ...] | None = None  # None: those of the queries
    after: tuple[int, int] = (0, 0)  # rows of queries and keys after the last sequence, NaN
    heads: int = 2
    kv_heads: int | None = None
    head_dim: int = 16
    value_dim: int | None = None
    bottom_right: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str | None = None  # h: one slope per head; bh: per sequence and head
    sinks: bool = False
    relative_bias: bool = False  # a table of distances
    program: str | None = None  # a mask of fastattn.masks, see PROGRAMS
    dropout_p: float = 0.0
    layouts: tuple[str, str, str] = ("blhd", "blhd", "blhd")  # of [1, H, T, D]
    grads: tuple[str, ...] = ("out", "lse")
    dtypes: tuple[torch.dtype, ...] = FLOATS
    slow: bool = False


def _cases() -> Iterator[VarlenCase]:
    base = VarlenCase("plain")
    yield base
    causal = replace(base, window=(-1, 0))
    yield replace(causal, name="causal")
    cross: dict[str, Any] = {"q_lengths": (33, 0, 70, 1, 20, 9), "k_lengths": (65, 4, 0, 129, 5, 9)}
    for name, bottom_right in (("upper-left", False), ("bottom-right", True)):
        yield replace(causal, name=f"causal-{name}", bottom_right=bottom_right, **cross)
        case = replace(base, window=(9, 4), bottom_right=bottom_right, **cross)
        yield replace(case, name=f"window-{name}", kv_heads=1)
        yield replace(case, name=f"alibi-{name}", alibi="bh", softcap=3.0)
    for name, lengths in (
        ("none", ()),
        ("one-empty", (0,)),
        ("one-row", (1,)),
        ("one-long", (270,)),
        ("all-empty", (0, 0, 0)),
        ("equal", (64, 64, 64)),
        ("many", tuple(n * 7 % 23 for n in range(40))),
        ("uneven", (1, 270, 2, 3)),
    ):
        yield replace(causal, name=f"lengths-{name}", q_lengths=lengths, heads=3)
    yield replace(base, name="after", after=(7, 3))
    yield replace(base, name="after-causal", window=(-1, 0), after=(2, 40), **cross)
    # Sequences of one query use the kernel of decoding, others that of panels.
    mixed: dict[str, Any] = {
        "q_lengths": (1, 2, 1, 50, 1, 1),
        "k_lengths": (530, 1030, 1, 70, 0, 9),
    }
    for heads, kv_heads in ((2, 2), (8, 2), (3, 1)):
        case = replace(causal, name=f"mixed-{heads}-{kv_heads}", heads=heads, kv_heads=kv_heads)
        yield replace(case, bottom_right=True, head_dim=64, **mixed)
    yield replace(base, name="gqa", heads=6, kv_heads=2, **cross)
    for d, dv in ((1, 1), (33, 48), (64, 64), (128, 40), (200, 136)):
        yield replace(causal, name=f"head_dim-{d}-{dv}", head_dim=d, value_dim=dv)
    with_sinks = replace(causal, sinks=True, heads=4, kv_heads=2, bottom_right=True)
    yield replace(with_sinks, name="sinks")
    yield replace(with_sinks, name="sinks-dropout", dropout_p=0.2, softcap=3.0, **cross)
    yield replace(with_sinks, name="sinks-mixed-after", after=(7, 3), grads=("out",), **mixed)
    for p in (0.1, 0.5, 1.0):
        yield replace(causal, name=f"dropout-{p}", dropout_p=p, heads=4, kv_heads=2, **cross)
    yield replace(base, name="alibi-h", alibi="h")
    for layout in ("contiguous", "unaligned", "packed", "transposed", "every_second", "sliced",
                   "expanded_heads", "expanded_dims"):  # fmt: skip
        yield replace(causal, name=f"layout-{layout}", layouts=(layout,) * 3, head_dim=24)
    for grads in ((), ("out",), ("lse",)):
        yield replace(causal, name=f"grads-{'-'.join(grads) or 'none'}", grads=grads)
    yield replace(causal, name="backward-split", q_lengths=(200, 20), k_lengths=(1300, 30), heads=1)
    long = replace(causal, name="long", q_lengths=(2100, 3, 500), head_dim=64, slow=True)
    yield replace(long, dtypes=(torch.float32, torch.bfloat16))
    yield from _biased(replace(base, heads=4, kv_heads=2), cross, mixed)


def _biased(base: VarlenCase, cross: dict[str, Any], mixed: dict[str, Any]) -> Iterator[VarlenCase]:
    """Relative biases and masks of fastattn.masks, with each other option."""
    relative = replace(base, relative_bias=True)
    yield replace(relative, name="relative")
    yield replace(relative, name="relative-cross", window=(9, 4), **cross)
    yield replace(relative, name="relative-bottom-right", bottom_right=True, softcap=3.0, **cross)
    yield replace(relative, name="relative-mixed", bottom_right=True, after=(7, 3), **mixed)
    split = replace(relative, q_lengths=(200, 20), k_lengths=(1300, 30), heads=2, kv_heads=1)
    yield replace(split, name="relative-split")
    for program in PROGRAMS:
        case = replace(base, program=program, bottom_right=program != "causal", after=(7, 3))
        yield replace(case, name=f"program-{program}", **cross)
    yield replace(base, name="program-mixed", program="many", bottom_right=True, **mixed)
    lengths = tuple(n * 7 % 23 for n in range(40))
    yield replace(base, name="program-short", program="documents", q_lengths=lengths)
    yield replace(split, name="program-split", program="many", relative_bias=False)
    both = replace(relative, program="many", sinks=True, softcap=3.0, alibi="bh", **cross)
    yield replace(both, name="relative-everything", dropout_p=0.2, window=(50, -1))
    nothing = replace(both, q_lengths=(), k_lengths=(), alibi="h")
    yield replace(nothing, name="relative-no-sequences", after=(3, 3))


# Masks of fastattn.masks, made of documents and prefixes: those of all sequences, or of one.
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


VARLEN_CASES = tuple(_cases())


@dataclass(frozen=True)
class VarlenInputs:
    """The primitive's arguments, and the gradients of out and lse."""

    args: tuple[Tensor | None, ...]
    given: tuple[Tensor | None, Tensor | None]
    options: VarlenOptions
    lengths: tuple[tuple[int, ...], tuple[int, ...]]
    programs: Sequence[Tensor | None]  # the mask program of each sequence alone


def make_varlen(case: VarlenCase, dtype: torch.dtype, *, fence: bool = False) -> VarlenInputs:
    """Return the tensors of ``case``, equal from call to call, in poisoned memory."""
    draw, normal = numbers_of(case.name)

    def packed(values: Tensor, rows: int, layout: str) -> Tensor:
        values[rows:] = torch.nan
        return memory.place(values.transpose(0, 1)[None].to(dtype), layout, fence=fence)[
            0
        ].transpose(0, 1)

    q_lengths = case.q_lengths
    k_lengths = q_lengths if case.k_lengths is None else case.k_lengths
    kv_heads = case.heads if case.kv_heads is None else case.kv_heads
    value_dim = case.head_dim if case.value_dim is None else case.value_dim
    q_rows, k_rows = sum(q_lengths), sum(k_lengths)
    q_all, k_all = q_rows + case.after[0], k_rows + case.after[1]
    query = packed(2 * normal(q_all, case.heads, case.head_dim), q_rows, case.layouts[0])
    key = packed(normal(k_all, kv_heads, case.head_dim), k_rows, case.layouts[1])
    value = packed(normal(k_all, kv_heads, value_dim), k_rows, case.layouts[2])
    starts = [torch.tensor((0, *n), dtype=torch.int64).cumsum(0) for n in (q_lengths, k_lengths)]
    slopes = alibi_slopes(draw, case.alibi, len(q_lengths), case.heads, dtype)
    seed = dropout_seed(draw, case.dropout_p)
    wide = torch.promote_types(dtype, torch.float32)
    grad_out = grad_lse = None
    if "out" in case.grads:
        grad_out = packed(normal(q_all, case.heads, value_dim), q_rows, case.layouts[0])
    if "lse" in case.grads:
        grad_lse = normal(case.heads, q_all).abs().to(wide).double()
    more: list[Tensor | None] = [None, None, None]  # sinks, relative bias, mask program
    if case.sinks:
        more[0] = (2 * normal(1, case.heads)).to(wide)
    if case.relative_bias:  # with two distances more than there are
        most = max((*q_lengths, *k_lengths, 1))
        more[1] = normal(1, case.heads, 2 * most + 1).to(wide)
    programs: Sequence[Tensor | None] = [None for _ in q_lengths]
    if case.program is not None:
        mask, alone = _masks(case, (q_lengths, k_lengths), draw)
        operands = (query, key, (starts[0], starts[1]), case.bottom_right)
        program = masks.packed_program("testing", mask, *operands)
        more[2] = memory.place(program[None, None, None], "contiguous", fence=fence)[0, 0, 0]
        programs = [
            masks.program(
                "testing", one, query.new_empty(1, case.heads, n, 1), m, (m - n) * case.bottom_right
            )
            for one, n, m in zip(alone, q_lengths, k_lengths, strict=True)
        ]
    while more and more[-1] is None:  # a backend need not take tensors that no case has
        more.pop()
    return VarlenInputs(
        args=(query, key, value, *starts, slopes, seed, *more),
        given=(grad_out, grad_lse),
        options=VarlenOptions(
            scale=case.head_dim**-0.5,
            bottom_right=case.bottom_right,
            window_left=case.window[0],
            window_right=case.window[1],
            softcap=case.softcap,
            dropout_p=case.dropout_p,
        ),
        lengths=(q_lengths, k_lengths),
        programs=programs,
    )


def _masks(
    case: VarlenCase, lengths: tuple[tuple[int, ...], tuple[int, ...]], draw: torch.Generator
) -> tuple[masks.Mask, list[masks.Mask]]:
    """Return the mask of all sequences, and those of each."""
    make = PROGRAMS[case.program or ""]
    prefixes = [int(torch.randint(n + 1, (), generator=draw)) for n in lengths[1]]
    ids = [[torch.randint(3, (n,), generator=draw).sort().values for n in side] for side in lengths]
    rows = [torch.cat([*own, torch.arange(n)]) for own, n in zip(ids, case.after, strict=True)]
    whole = make(masks.document(*rows), masks.prefix_lm(torch.tensor(prefixes, dtype=torch.int64)))
    each = zip(*ids, prefixes, strict=True)
    return whole, [make(masks.document(q, k), masks.prefix_lm(n)) for q, k, n in each]


def run_varlen(backend: Any, inputs: VarlenInputs) -> dict[str, Tensor]:
    """Run the primitive of a backend, forward and backward."""
    out, lse = backend.varlen_attention(*inputs.args, options=inputs.options)
    results = {"out": out, "lse": lse.to(torch.promote_types(out.dtype, torch.float32))}
    if any(grad is not None for grad in inputs.given):
        seen, more = inputs.args[:7], inputs.args[7:]
        grads = backend.varlen_attention_backward(
            *inputs.given, *seen, out, lse, *more, options=inputs.options
        )
        found = zip(_GRADS, grads, strict=False)
        results.update({name: grad for name, grad in found if grad is not None})
    return results


def sequence_by_sequence(
    inputs: VarlenInputs, run: Callable[[Inputs], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Apply ``run``, the proof's attention, to each sequence, and pack the results."""
    query, key, value = inputs.args[:3]
    more = inputs.args[7:9]
    assert query is not None
    assert key is not None
    assert value is not None
    (q_rows, heads, _), dv = query.shape, value.shape[2]
    packed: dict[str, Tensor] = {
        "out": query.new_zeros(q_rows, heads, dv, dtype=torch.float64),
        "lse": query.new_full((heads, q_rows), -torch.inf, dtype=torch.float64),
    }
    if any(grad is not None for grad in inputs.given):
        for name, x in zip(_GRADS, (query, key, value, *more), strict=False):
            if x is not None:
                packed[name] = torch.zeros_like(x, dtype=torch.float64)
    ends = [0, 0]
    for b, lengths in enumerate(zip(*inputs.lengths, strict=True)):
        q, k = (slice(end, end + n) for end, n in zip(ends, lengths, strict=True))
        ends = [q.stop, k.stop]
        found = run(_alone(inputs, b, q, k))
        for name, result in found.items():
            if name in ("grad_sinks", "grad_relative_bias"):
                packed[name] += result.double()
                continue
            rows = result[-1].double() if name == "lse" else result[-1].transpose(0, 1).double()
            if name == "lse":
                packed[name][:, q] = rows
            else:
                packed[name][k if name in ("grad_key", "grad_value") else q] = rows
    return packed


def _alone(inputs: VarlenInputs, b: int, q: slice, k: slice) -> Inputs:
    """Sequence b as the last of a batch, so that its dropout has the same batch index."""
    query, key, value, _, _, slopes, seed, *more = inputs.args
    batch = b + 1 if seed is not None else 1

    def last(x: Tensor | None, rows: slice) -> Tensor | None:
        if x is None:
            return None
        full = x.new_zeros(batch, x.shape[1], rows.stop - rows.start, x.shape[2])
        full[-1] = x[rows].transpose(0, 1)
        return full

    grad_out, grad_lse = inputs.given
    if grad_lse is not None:
        full = grad_lse.new_zeros(batch, grad_lse.shape[0], q.stop - q.start)
        full[-1] = grad_lse[:, q]
        grad_lse = full
    together = vars(inputs.options).copy()
    lengths = q.stop - q.start, k.stop - k.start
    offset = lengths[1] - lengths[0] if together.pop("bottom_right") else 0
    alone = {"query": last(query, q), "key": last(key, k), "value": last(value, k)}
    return Inputs(
        **alone,  # type: ignore[arg-type]
        alibi_slopes=None if slopes is None else slopes[b % slopes.shape[0]][None],
        seed=seed,
        sinks=more[0] if more else None,
        relative_bias=more[1] if len(more) > 1 else None,
        mask_program=inputs.programs[b],
        grad_out=last(grad_out, q),
        grad_lse=grad_lse,
        options=AttentionOptions(offset=offset, **together),
    )


_NAMES = (
    "query",
    "key",
    "value",
    "starts_q",
    "starts_k",
    "alibi_slopes",
    "seed",
    "sinks",
    "relative_bias",
    "mask_program",
)

check_varlen = Proof(
    "varlen_attention",
    VARLEN_CASES,
    make=make_varlen,
    watched=lambda x: {**dict(zip(_NAMES, x.args, strict=False)), "grad": x.given[0]},
    primitive=lambda inputs: (inputs.args, inputs.options),
    run=run_varlen,
    definition=lambda inputs: sequence_by_sequence(inputs, oracle.definition),
    extended=lambda naive, inputs: sequence_by_sequence(
        inputs, functools.partial(oracle.extended, naive)
    ),
    dtypes=lambda x: dict.fromkeys(
        ("lse", "grad_sinks", "grad_relative_bias"),
        torch.promote_types(x.args[0].dtype, torch.float32),
    ),
    coarse=("lse",),
)
