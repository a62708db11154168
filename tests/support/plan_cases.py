"""The calls of attention that tests/ops/test_plans.py makes with plans and without."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from plan_cases_of_memory import OPERATORS_OF_MEMORY
from planned import Call, Change, Planned, at, normal, of_subclass, on_meta
from torch import Tensor

import fastattn
from fastattn import masks
from fastattn.bias import T5, Decomposed2d, Disentangled

SLOPES, SINKS = torch.linspace(0.1, 0.9, 4), torch.linspace(-1.0, 1.5, 4)
LEARNED_SINKS = torch.linspace(1.5, -1.0, 8)[::2].requires_grad_()  # with gaps
DOCUMENTS = torch.arange(12).view(2, 6) // 5, torch.arange(18).view(2, 9) // 7
TERMS = [normal(9, 4, 8), normal(9, 4, 8), normal(4, 8), normal(4, 8)]
BOTTOM_RIGHT = {"is_causal": True, "causal_alignment": "bottom_right"}


def scattered(*sizes: int) -> Tensor:
    """A mask that excludes two of five pairs."""
    return (torch.arange(torch.Size(sizes).numel()) * 7 % 5 < 3).view(sizes)


# --- dense attention -----------------------------------------------------------------------------


def qkv(
    batch: int = 2, q_len: int = 6, k_len: int = 9, kv_heads: int = 4, width: int = 8, dim: int = 8
) -> Call:
    """Queries, keys and values, with four query heads."""
    sizes = (4, q_len, dim), (kv_heads, k_len, dim), (kv_heads, k_len, width)
    names = ("query", "key", "value")
    return {n: torch.randn(batch, *size) for n, size in zip(names, sizes, strict=True)}


def growing(call: Call, caches: tuple[str, ...], lengths: Iterable[int]) -> list[Call]:
    """The call with caches of several lengths."""
    return [call | {name: call[name][:, :, :n] for name in caches} for n in lengths]


SDPA = Planned(
    function=fastattn.scaled_dot_product_attention,
    make=qkv,
    wants=("query key value", ""),
    wide=("alibi_slopes", "sinks"),
    forms={"": {}, "grouped": lambda c: qkv(kv_heads=2) | {"enable_gqa": True}},
    options={
        "default": {},
        "causal": {"is_causal": True},
        "bottom-right": BOTTOM_RIGHT,
        "scale": {"scale": 0.3},
        "window": {"window": (2, 1)},
        "softcap": {"softcap": 2.0},
        "slopes": {"alibi_slopes": SLOPES},
        "slopes-of-entries": {"alibi_slopes": torch.stack([SLOPES, SLOPES.square()])},
        "sinks": {"sinks": SINKS},
        "bool-mask": {"attn_mask": scattered(6, 9)},
        "vector-mask": {"attn_mask": normal(9)},
        "learned-mask": {"attn_mask": normal(4, 6, 9).requires_grad_()},
        "learned-sinks": {"sinks": LEARNED_SINKS},
        "mask": {"mask": masks.sliding_window(3, 1)},
        "masks": {
            "mask": masks.document(*DOCUMENTS),
            "attn_mask": scattered(6, 9),
            "sinks": LEARNED_SINKS,
        },
        "relative-bias": {"relative_bias": normal(4, 21).requires_grad_()},
        "t5": {"relative_bias": T5(normal(8, 4), False, 6), **BOTTOM_RIGHT},
        "terms": {"relative_bias": Disentangled(*TERMS, max_distance=6), **BOTTOM_RIGHT},
        "term-of-keys": {"relative_bias": Disentangled(None, *TERMS[1:3]), "dropout_p": 0.3},
        "image": {"relative_bias": Decomposed2d(normal(2, 4, 6, 3), normal(2, 4, 6, 3))},
        "lse": {"return_lse": True},
        "weights": {"need_weights": True},
        "everything": {"return_lse": True, "need_weights": True, "average_weights": True},
        "dropout": {"dropout_p": 0.3},
        "several": {"window": (4, 0), "softcap": 3.0, "alibi_slopes": SLOPES, "sinks": SINKS},
    },
    base={"scale": 1.0},
    changes={
        "width": lambda c: qkv(width=16),
        "heads": lambda c: {name: c[name][:, :2] for name in ("query", "key", "value")},
        "type-of-scale": {"scale": 1},
        "mask-of-one-row": {"attn_mask": torch.ones(1, 9, dtype=torch.bool)},
        "dtype-of-mask": {"attn_mask": torch.ones(6, 9)},
        "learned-table": {"relative_bias": Disentangled(TERMS[0].clone().requires_grad_())},
        "gqa": {"enable_gqa": True},
        "alignment": {"causal_alignment": "bottom_right"},
    },
    leaving={"learned-slopes": {"alibi_slopes": SLOPES.clone().requires_grad_()}},
    valid=({"attn_mask": normal(4, 6, 9)}, {}),
    wrong={
        "is_causal": [1],
        "window": [(-2, 0)],
        "softcap": [float("nan")],
        "dropout_p": [2.0],
        "attn_mask": [normal(6, 8), normal(3, 6, 9), normal(4, 5, 9), normal(4, 6, 8)],
        "sinks": [torch.ones(3)],
        "causal_alignment": ["lower"],
        "average_weights": [True],
        "relative_bias": [
            Disentangled(TERMS[0][:8]),
            Disentangled(TERMS[0][:, :3]),
            Disentangled(TERMS[0], TERMS[1][:7]),
            Disentangled(TERMS[0], max_distance=3),
            Decomposed2d(torch.ones(2, 4, 6, 3), torch.ones(2, 4, 6, 2)),
        ],
    },
    sizes=lambda: [
        # Unless sizes that may differ are equal by chance, such as batch and heads.
        [qkv(*n, dim=16) | BOTTOM_RIGHT for n in ((2, 6, 9), (3, 6, 10), (5, 7, 11), (9, 13, 200))],
        growing(qkv(1, 1, 300), ("key", "value"), range(20, 300)),
    ],
)


# --- packed sequences and caches ------------------------------------------------------------------


def packed(lengths: tuple[int, ...] | None = None, q_rows: int = 14, k_rows: int = 15) -> Call:
    """By default 5, 0 and 7 queries for 9, 4 and 0 keys, and rows outside all sequences."""
    q_starts, k_starts = torch.tensor([0, 5, 5, 12]), torch.tensor([0, 9, 13, 13])
    if lengths is not None:
        q_starts = k_starts = torch.tensor([0, *lengths]).cumsum(0)
    tensors = {"query": torch.randn(q_rows, 4, 8)}
    tensors |= {name: torch.randn(k_rows, 2, 8) for name in ("key", "value")}
    return tensors | {"cu_seqlens_q": q_starts, "cu_seqlens_k": k_starts}


VARLEN = Planned(
    function=fastattn.varlen_attention,
    make=packed,
    dtypes=(torch.float32, torch.float64, torch.bfloat16),
    wants=("query key value", ""),
    wide=("alibi_slopes", "sinks"),
    forms={
        "": {},
        "int32": lambda c: {name: c[name].int() for name in ("cu_seqlens_q", "cu_seqlens_k")},
        "lengths": {"max_seqlen_q": 7, "max_seqlen_k": 9},
    },
    options={
        "default": {},
        "bottom-right": BOTTOM_RIGHT,
        "several": {"window": (4, 0), "softcap": 3.0, "alibi_slopes": SLOPES, "sinks": SINKS},
        "learned-sinks": {"sinks": LEARNED_SINKS},
        "lse": {"return_lse": True, "sinks": LEARNED_SINKS},
        "slopes-of-entries": {"alibi_slopes": torch.stack([SLOPES, SLOPES.square(), SLOPES.sin()])},
        "relative-bias": {"relative_bias": normal(4, 25).requires_grad_()},
        "t5": {"relative_bias": T5(normal(8, 4))},
        "terms": {"relative_bias": Disentangled(*TERMS, max_distance=6), **BOTTOM_RIGHT},
        "mask": {"mask": masks.sliding_window(3, 1)},
        "dropout": {"dropout_p": 0.3},
    },
    changes={
        "heads": at("query", lambda x: x[:, :2]),
        "int32": at("cu_seqlens_q", Tensor.int),
        "causal": {"is_causal": True},
    },
    leaving={"learned-slopes": {"alibi_slopes": SLOPES.clone().requires_grad_()}},
    wrong={
        "cu_seqlens_q": [
            torch.tensor(starts) for starts in ([1, 5, 5, 12], [0, 9, 9, 5], [0, 5, 5, 99])
        ],
        "max_seqlen_q": [6, 6.0],
    },
    sizes=lambda: [
        [
            packed(lengths, sum(lengths) + 3, sum(lengths) + 2)
            | {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths), "is_causal": True}
            for lengths in ((3, 9), (5, 2, 7, 1), (20, 1, 1, 1, 1), (2,) * 6)
        ]
    ],
)


LENGTHS = torch.tensor([5, 11])
ANGLES = torch.linspace(0, 3, 80).view(20, 4)
CACHES, SCALES = ("key_cache", "value_cache"), ("key_scales", "value_scales")


def cached(rows: int = 16) -> Call:
    """A query and a cache."""
    return {"query": torch.randn(2, 4, 1, 8)} | {n: torch.randn(2, 2, rows, 8) for n in CACHES}


def appended(call: Call) -> Call:
    """One row for each sequence."""
    rows = {name: torch.randn(2, 2, 1, 8) for name in ("key", "value")}
    return {**rows, "cache_seqlens": 15}


def transposed(call: Call) -> Call:
    """The call in the layout [B, N, H, D]."""
    names = ("query", *CACHES, "key", "value")
    memory = {n: call[n].transpose(1, 2) for n in names if n in call}
    return {**call, **memory, "layout": "bnhd"}


def extended(rows: int) -> Call:
    """A cache of some rows that is appended to."""
    return cached(rows) | appended({})


def rotated(**options: Any) -> Change:
    """With rows to append, because only they are rotated."""

    def change(call: Call) -> Call:
        rows = {name: torch.randn(2, 2, 1, 8) for name in ("key", "value")}
        if call.get("layout") == "bnhd":
            rows = {name: x.transpose(1, 2) for name, x in rows.items()}
        tables = {"rotary_cos": ANGLES.cos(), "rotary_sin": ANGLES.sin()}
        return {**rows, "cache_seqlens": LENGTHS, **tables, **options}

    return change


def quantised(call: Call) -> Call:
    """Caches of int8, whose scales have the layout of the caches."""
    caches = {name: (30 * call[name]).to(torch.int8) for name in CACHES}
    pairs = zip(SCALES, caches.values(), strict=True)
    scales = {name: 0.1 + torch.rand(x.shape[:3]) for name, x in pairs}
    return {**caches, **scales, "cache_seqlens": LENGTHS}


NEW = appended({})
WRONG_LENGTHS = [torch.tensor([5, 17]), torch.tensor([-1, 3]), 17, 2**70, True]
DECODE = Planned(
    function=fastattn.decode_attention,
    make=cached,
    dtypes=(torch.float32, torch.float64, torch.bfloat16),
    wide=("alibi_slopes", "sinks", "rotary_cos", "rotary_sin"),
    fixed=SCALES,
    written=(*CACHES, *SCALES),
    forms={
        "": {},
        "bnhd": transposed,
        "appended": appended,
        "bnhd-appended": lambda c: transposed(c | appended(c)),
    },
    options={
        "full": {},
        "default": {"cache_seqlens": LENGTHS},
        "int32": {"cache_seqlens": LENGTHS.int()},
        "int": {"cache_seqlens": 7},
        "several": {"cache_seqlens": LENGTHS, "window": (4, 0), "softcap": 3.0, "sinks": SINKS},
        "slopes": {"cache_seqlens": LENGTHS, "alibi_slopes": SLOPES, "return_lse": True},
        "padding": {"cache_seqlens": LENGTHS, "cache_leftpad": torch.tensor([2, 0])},
        "entries": {"cache_seqlens": LENGTHS, "cache_batch_idx": torch.tensor([1, 0])},
        "pages": {"cache_seqlens": LENGTHS, "block_table": torch.tensor([[0], [1]]).int()},
        "long-pages": {"cache_seqlens": LENGTHS, "block_table": torch.tensor([[0], [1]])},
        "relative-bias": {"cache_seqlens": LENGTHS, "relative_bias": normal(4, 37)},
        "t5": {"cache_seqlens": LENGTHS, "relative_bias": T5(normal(8, 4), False, 6)},
        "mask": {"cache_seqlens": LENGTHS, "mask": masks.sliding_window(3, 0)},
        "int8": quantised,
        "rotary": rotated(),
        "rotary-interleaved": rotated(
            rotary_interleaved=True, rotary_positions=torch.tensor([[7], [3]])
        ),
    },
    without=("long-pages", "appended-entries"),
    changes={
        "heads": at("query", lambda x: x[:, :2]),
        "rows": appended,
        "window": {"window": (4, 0)},
    },
    valid=({"cache_seqlens": LENGTHS}, {"cache_seqlens": 5}, {"cache_seqlens": LENGTHS, **NEW}),
    wrong={
        "cache_seqlens": [
            *WRONG_LENGTHS,
            *({"cache_seqlens": n, "key": None, "value": None} for n in WRONG_LENGTHS),
        ],
        "key_cache": [lambda x: x[:1].expand_as(x)],
    },
    sizes=lambda: [[call | {"cache_seqlens": n} for n in range(60)] for call in [extended(64)]],
)


# --- additive and local attention -----------------------------------------------------------------


def additive(
    batch: int = 2, queries: int = 6, keys: int = 9, dim: int = 20, width: int = 5
) -> Call:
    """The tensors of additive attention."""
    sizes = {"query": (batch, queries, dim), "key": (batch, keys, dim)}
    sizes |= {"value": (batch, keys, width), "v": (dim,), "bias": (dim,)}
    return {name: torch.randn(size) for name, size in sizes.items()}


PADDING = torch.arange(18).view(2, 9) % 5 == 1
ADDITIVE = Planned(
    function=fastattn.additive_attention,
    make=additive,
    wants=("query key value v bias", "bias", "v", "key", ""),
    crossed=False,
    forms={
        "": {},
        "without-bias": {"bias": None},
        "one-query": lambda c: additive(queries=1),
        "one-query-without-bias": lambda c: additive(queries=1) | {"bias": None},
        "many-queries": lambda c: additive(queries=40),
        "many-queries-without-bias": lambda c: additive(queries=40) | {"bias": None},
    },
    options={
        "default": {},
        "causal": {"is_causal": True},
        "bool-mask": {"attn_mask": scattered(2, 6, 9)},
        "vector-mask": {"attn_mask": normal(9)},
        "padding": {"key_padding_mask": PADDING},
        "both-bool-masks": {"attn_mask": scattered(6, 9), "key_padding_mask": PADDING},
        "learned-mask": {"attn_mask": normal(2, 6, 9).requires_grad_()},
        "learned-row": {"attn_mask": normal(1, 9).requires_grad_()},
        "learned-mask-and-padding": {
            "attn_mask": normal(6, 1).requires_grad_(),
            "key_padding_mask": PADDING,
        },
        "weights": {"need_weights": True},
        "dropout": {"dropout_p": 0.3},
        "several": {"is_causal": True, "dropout_p": 0.2, "need_weights": True},
    },
    changes={
        "one-query": at("query", lambda x: x[:, :1]),
        "bias": {"bias": None},
        "mask-of-one-row": {"attn_mask": torch.ones(1, 9, dtype=torch.bool)},
        "dtype-of-mask": {"attn_mask": torch.ones(6, 9)},
    },
    leaving={
        "empty": at("query", lambda x: x[:, :0]),
        "subclass": of_subclass("query"),
        "negated": at("query", lambda x: torch.complex(x, x).conj().imag),
    },
    wrong={
        "query": [lambda x: x[0], Tensor.bfloat16, on_meta],
        "key": [lambda x: x[:1], lambda x: x[..., :3], Tensor.to_sparse],
        "value": [lambda x: x[:, :4], Tensor.double],
        "v": [None, lambda x: x[:3], Tensor.double, on_meta],
        "bias": [lambda x: x[None], Tensor.double, 0.0],
        "attn_mask": [torch.ones(6, 8)],
        "key_padding_mask": [PADDING[:, 1:], PADDING.float()],
        "dropout_p": [2.0],
        "is_causal": [1],
        "need_weights": [1],
    },
    sizes=lambda: [
        [
            additive(*sizes)
            | {"key_padding_mask": scattered(*sizes[::2]), "bias": None, "is_causal": True}
            for sizes in ((2, 6, 9, 20), (3, 7, 10, 12), (4, 30, 200, 64))
        ]
    ],
)


def local(
    batch: int = 2, queries: int = 9, keys: int = 30, dim: int = 20, value_width: int = 9
) -> Call:
    """The query has gaps between its rows, and positions lie within and beyond the keys."""
    call = {
        "query": torch.randn(batch, queries, dim + 30)[..., :dim],
        "key": torch.randn(batch, keys, dim),
        "value": torch.randn(batch, keys, value_width),
        "positions": torch.rand(batch, queries) * 1.3 * keys - 5,
    }
    return call | {"window": "local-p", "D": 4}


HIDDEN = torch.arange(60).view(2, 30) % 7 == 3
LOCAL = Planned(
    function=fastattn.luong_attention,
    make=local,
    wide=("positions",),
    wants=("query key value positions", "positions", "key", ""),
    crossed=False,
    forms={
        "": {},
        "monotonic": {"window": "local-m"},
        "value-of-the-same-width": lambda c: local(value_width=20),
        "monotonic-of-the-same-width": lambda c: local(value_width=20) | {"window": "local-m"},
        "query-with-columns-apart": at("query", lambda x: x.mT.contiguous().mT),
        "expanded-key": at("key", lambda x: x[:, :1].expand_as(x)),
        "value-of-every-second-column": at("value", lambda x: torch.cat([x, x], -1)[..., ::2]),
        "positions-of-one-row": at("positions", lambda x: x[:1]),
        "transposed-positions": at("positions", lambda x: x.mT.contiguous().mT),
    },
    options={
        "default": {},
        "monotonic": {"window": "local-m"},
        "wide": {"D": 40},
        "padding": {"key_padding_mask": HIDDEN},
        "expanded-padding": {"key_padding_mask": HIDDEN[:1].expand(2, 30)},
        "general": {"method": "general", "weight": normal(20, 20).requires_grad_()},
        "weights": {"need_weights": True},
        "dropout": {"dropout_p": 0.3},
        "several": {"dropout_p": 0.3, "need_weights": True, "key_padding_mask": HIDDEN},
    },
    changes={
        "reach": {"D": 5},
        "dtype-of-positions": at("positions", Tensor.long),
    },
    leaving={
        "subclass": of_subclass("query"),
        "empty": lambda c: {name: c[name][:, :0] for name in ("query", "positions")},
    },
    wrong={
        "query": [lambda x: x[0], Tensor.bfloat16],
        "key": [lambda x: x[:1], lambda x: x[..., :3], Tensor.to_sparse, on_meta],
        "value": [lambda x: x[:, :4], Tensor.double, on_meta],
        "positions": [lambda x: x[:, :3], on_meta],
        "key_padding_mask": [HIDDEN[:, ::2], HIDDEN.float(), HIDDEN.to("meta")],
        "dropout_p": [2.0],
        "weight": [torch.eye(20)],
        "window": ["global"],
        "D": [0],
    },
    sizes=lambda: [[local(*n, 5) for n in ((2, 6, 9, 20), (3, 7, 10, 12), (4, 30, 200, 64))]],
)

OPERATORS = [SDPA, VARLEN, DECODE, ADDITIVE, LOCAL, *OPERATORS_OF_MEMORY]
