"""The calls of memories and encodings that tests/ops/test_plans.py makes with plans and without."""

from __future__ import annotations

import math
from typing import Any

import torch
from planned import Call, Planned, at, normal, of_subclass
from torch import Tensor

import fastattn

# --- Hopfield retrieval ---------------------------------------------------------------------------


def patterns(
    batch: int = 2, queries: int = 5, stored: int = 30, projected: bool = False, dim: int = 20
) -> Call:
    """Patterns whose heads are adjacent in memory. Some queries converge before the last step."""
    sizes = {"state": (queries, dim), "stored": (stored, dim)}
    sizes |= {"projection": (stored, 9)} if projected else {}
    call: Call = {
        name: 0.7 * torch.randn(batch, length, 3, width).transpose(1, 2)
        for name, (length, width) in sizes.items()
    }
    return call | {"beta": 3.0, "update_steps_eps": 0.3}


def of_rank(rank: int, **options: Any) -> Call:
    """A retrieval whose tensors have `rank` dimensions."""
    lowered = {
        name: x[(0,) * (4 - rank)] if isinstance(x, Tensor) else x
        for name, x in patterns(projected=True).items()
    }
    returned = {"update_steps_max": 3, "need_steps": True, "need_weights": True}
    return lowered | returned | options


PROJECTION = 0.7 * normal(2, 30, 3, 9).transpose(1, 2)
HOPFIELD = Planned(
    function=fastattn.hopfield_retrieve,
    make=patterns,
    fixed=("attn_mask",),
    wants=("state stored projection", "state", "stored", "projection", "state projection", ""),
    crossed=False,
    second=False,
    forms={
        "": {},
        **{
            f"{steps}-steps-of-{queries}": lambda c, steps=steps, queries=queries: (
                patterns(queries=queries, projected=True) | {"update_steps_max": steps}
            )
            for steps in (3, 9)
            for queries in (1, 7, 40)
        },
        "rank-2": lambda c: of_rank(2),
        "rank-3": lambda c: of_rank(3),
        "masked-of-rank-2": lambda c: of_rank(2, attn_mask=torch.rand(5, 30) < 0.7),
        "masked-of-rank-3": lambda c: of_rank(3, attn_mask=torch.rand(5, 30) < 0.7),
    },
    options={
        "default": {},  # until every query converges
        "few-steps": {"update_steps_max": 3},
        "many-steps": {"update_steps_max": 9},
        "projected": {"update_steps_max": 3, "projection": PROJECTION},
        "implicit": {"grad": "implicit"},
        "one-step": {"grad": "one_step", "projection": PROJECTION},
        "by-head": {"stop": "head", "update_steps_max": 3},
        "bool-mask": {"attn_mask": normal(30) < 0.5, "update_steps_max": 3},
        "mask-of-heads": {"attn_mask": normal(3, 5, 30) < 0.5, "update_steps_max": 9},
        "bias": {"attn_mask": normal(2, 3, 1, 30), "update_steps_max": 3},
        "learned-mask": {"attn_mask": normal(30).requires_grad_(), "update_steps_max": 3},
        "learned-mask-of-heads": {"attn_mask": normal(3, 1, 30).requires_grad_()},
        "dropout": {"dropout_p": 0.3, "update_steps_max": 2},
        "everything": {"need_weights": True, "need_steps": True, "update_steps_max": 3},
        "several": {
            "need_weights": True,
            "need_steps": True,
            "stop": "head",
            "dropout_p": 0.2,
            "attn_mask": normal(5, 30),
            "projection": PROJECTION,
        },
    },
    base={"beta": 1.0, "update_steps_max": 2, "update_steps_eps": 1e-4},
    changes={
        "width": lambda c: {name: c[name][..., :18] for name in ("state", "stored")},
        "heads": lambda c: {name: c[name][:, :2] for name in ("state", "stored")},
        "projection": lambda c: {"projection": c["stored"]},
        "beta": {"beta": 0.5},
        "type-of-beta": {"beta": 1},
        "no-limit": {"update_steps_max": None},
        "eps": {"update_steps_eps": 0.1},
        "stop": {"stop": "head"},
        "mask": {"attn_mask": torch.ones(30, dtype=torch.bool)},
        "dtype-of-mask": {"attn_mask": torch.ones(30)},
        "weights": {"need_weights": True},
        "steps-returned": {"need_steps": True},
    },
    leaving={
        "patterns-of-all": at("stored", lambda x: x[:1]),
        "expanded-patterns": at("stored", lambda x: x[:1].expand_as(x)),
        "subclass": of_subclass("state"),
        "beta": {"beta": torch.tensor(0.5)},
        "no-steps": {"update_steps_max": 0},
    },
    wrong={
        "beta": [-1.0],
        "update_steps_max": [True],
        "update_steps_eps": [-1.0],
        "stop": ["all"],
        "dropout_p": [2.0],
        "need_steps": [1],
        "attn_mask": [torch.ones(29)],
        "projection": [torch.ones(2, 3, 29, 9)],
    },
    sizes=lambda: [
        [
            patterns(*sizes, dim=16) | {"stop": stop, "update_steps_max": 2, "beta": 0.25}
            for sizes in ((2, 6, 9), (4, 6, 10), (5, 7, 11), (9, 13, 200))
        ]
        for stop in ("query", "head")
    ],
)


# --- memory hops ----------------------------------------------------------------------------------

HOPS = 3


def memory(*sizes: int, rows: int = 50) -> Tensor:
    """A memory of random rows."""
    return torch.randn(*sizes, rows, 20)


def hops(batch: int = 4, rows: int = 50) -> Call:
    """The tensors of memory hops."""
    memories = {name: memory(batch, rows=rows) for name in ("in_memory", "out_memory")}
    return {"query": torch.randn(batch, 20), **memories, "hops": HOPS}


def memories(in_memory: Any, out_memory: Any = lambda: None) -> Any:
    """A change of both memories."""
    return lambda call: {"in_memory": in_memory(), "out_memory": out_memory()}


def by_columns(*sizes: int) -> Tensor:
    """A memory whose columns are contiguous."""
    return memory(*sizes).mT.contiguous().mT


def rows_of(call: Call) -> int:
    return call["in_memory"].shape[-2]


def queries(call: Call) -> Call:
    """Several of each entry, unless the memories are a stack."""
    is_stack = call["out_memory"] is None and call["in_memory"].ndim == 4
    return {} if is_stack else {"query": torch.randn(4, 2, 20)}


def expanded(memories: int) -> Call:
    """Input memories that the batch shares, by an expanded tensor."""
    shared = normal(1, memories, 50, 20).expand(4, -1, -1, -1)
    return {"in_memory": shared, "out_memory": normal(4, 50, 20)}


MEMORY_HOPS = Planned(
    function=fastattn.memory_hop_attention,
    make=hops,
    wants=("query in_memory out_memory hop_proj memory_bias", "query", "in_memory", ""),
    forms={
        "two": {},
        "stack": memories(lambda: memory(4, HOPS + 1)),
        "same": {"out_memory": None},
        "each": memories(lambda: memory(4, HOPS), lambda: memory(4, HOPS)),
        "of-many-rows": lambda c: hops(rows=100),
        "rows-apart": memories(
            lambda: memory(4, HOPS)[:, 1], lambda: memory(4).repeat(1, 1, 2)[..., 20:]
        ),
        "columns-apart": memories(lambda: by_columns(4), lambda: by_columns(4, HOPS)),
        "one-for-all": memories(lambda: memory(1), lambda: memory(1)),
        "one-expanded": memories(
            lambda: memory(1).expand(4, -1, -1), lambda: memory(1).expand(4, -1, -1)
        ),
        "one-of-two": memories(lambda: memory(1), lambda: memory(4)),
        "one-with-columns-apart": memories(lambda: by_columns(1).expand(4, -1, -1)),
    },
    options={
        "default": queries,
        "scale": {"scale": 0.5},
        "relu": {"activation": "relu"},
        "linear": {"normalize": "none", "scale": 0.1},
        "weights": lambda c: queries(c) | {"need_weights": True},
        "projection": {"hop_proj": normal(20, 20) / 5},
        "projections": {"hop_proj": (normal(HOPS, 20, 20) / 5).mT},
        "mask": lambda c: {
            "memory_mask": torch.arange(rows_of(c)) < torch.tensor([[50], [3], [0], [17]])
        },
        "scattered-mask": lambda c: {"memory_mask": torch.rand(rows_of(c)) < 0.6},
        "bias": lambda c: {"memory_bias": torch.randn(4, rows_of(c))},
        "biases": lambda c: {"memory_bias": torch.randn(4, HOPS, 1)},
        "several": lambda c: {
            "memory_bias": torch.randn(1, rows_of(c)),
            "memory_mask": torch.rand(4, 1, rows_of(c)) < 0.6,
            "hop_proj": torch.randn(20, 20) / 5,
            "activation": "tanh",
            "need_weights": True,
        },
    },
    changes={
        "one-memory": at("in_memory", lambda x: x[:1]),
        "expanded-memory": at("in_memory", lambda x: x[:1].expand(4, -1, -1)),
        "one-a-hop": lambda c: {"in_memory": memory(4, HOPS)},
        "queries": queries,
        "no-output": {"out_memory": None},
        "hops": {"hops": 2},
        "normalize": {"normalize": "none"},
        "type-of-scale": {"scale": 1},
    },
    # Wrong numbers of hops alone have the signature of a valid call.
    valid=[
        {"in_memory": normal(4, HOPS, 50, 20), "out_memory": normal(4, HOPS, 50, 20), **given}
        for given in (
            {"memory_mask": torch.ones(4, HOPS, 50, dtype=torch.bool)},
            {"hop_proj": normal(HOPS, 20, 20)},
            expanded(HOPS),
            {},
        )
    ],
    wrong={
        "in_memory": [
            *(lambda x: x[..., :19], lambda x: x[..., :49, :], Tensor.double, lambda x: x[:3]),
            normal(4, HOPS + 2, 50, 20),
            expanded(HOPS + 2),
        ],
        "memory_mask": [torch.ones(4, *n, dtype=torch.bool) for n in ((49,), (7, 50))],
        "hop_proj": [normal(HOPS + 2, 20, 20)],
        "hops": [0],
        "scale": [None],
        "need_weights": [1],
    },
    sizes=lambda: [
        [
            hops(batch, rows) | {"memory_mask": torch.rand(batch, rows) < 0.7, "hops": 2}
            for batch, rows in ((4, 50), (5, 51), (9, 130), (2, 3))
        ]
    ],
)


# --- memory encoding and sinusoidal encoding ------------------------------------------------------


def sentences(batch: int = 2, lines: int = 6, words: int = 5, rows: int = 30) -> Call:
    """The tokens and embeddings of a sentence memory."""
    return {
        "tokens": torch.randint(0, rows, (batch, lines, words)),
        "weight": torch.randn(rows, 8),
    }


def tables(*sizes: int, temporal: bool) -> Any:
    """With gaps, and a line that is all padding."""

    def make(call: Call) -> Call:
        tokens = torch.randint(0, 30, (2, 6, 5))[..., ::2]
        tokens[:, 1] = 0
        made = {"tokens": tokens, "weight": torch.randn(*sizes, 30, 16)[..., ::2]}
        return made | ({"temporal": torch.randn(*sizes, 8, 6).mT} if temporal else {})

    return make


ENCODE_MEMORY = Planned(
    function=fastattn.encode_memory,
    make=sentences,
    wants=("weight temporal", "weight", "temporal", ""),
    forms={
        f"{name}{'-temporal' * temporal}": tables(*sizes, temporal=temporal)
        for name, sizes in {"table": (), "one-of-tables": (1,), "tables": (3,)}.items()
        for temporal in (False, True)
    },
    options={
        "default": {},
        "centered": {"encoding": "centered"},
        "no-padding": {"padding_idx": None},
    },
    changes={
        "tables": {"weight": normal(3, 30, 8)},
        "temporal": {"temporal": normal(6, 8)},
        "encoding": {"encoding": "bow"},
        "padding": {"padding_idx": 1},
    },
    leaving={  # the complete path changes more than views
        "int32": at("tokens", Tensor.int),
        "factors": {"encoding": torch.ones(5, 8)},
        "sparse": {"sparse": True},
    },
    valid=({"tokens": torch.full((2, 6, 5), 29), "temporal": normal(6, 8)},),
    wrong={
        "tokens": [lambda x: x + 30],
        "weight": [lambda x: x[:20]],
        "temporal": [lambda x: x[:5], lambda x: x[:, :7], Tensor.double],
        "encoding": ["other"],
        "padding_idx": [0.0],
    },
    sizes=lambda: [
        [
            sentences(*sizes) | {"temporal": torch.randn(sizes[1], 8)}
            for sizes in ((2, 6, 5, 30), (3, 7, 4, 31), (5, 9, 3, 40))
        ]
    ],
)


def sequences(batch: int = 3, length: int = 7, width: int = 33) -> Call:
    """A batch of sequences."""
    return {"x": torch.randn(batch, length, width)}


ROWS = torch.arange(7)
PLACES = {
    "": {},
    "-offset": {"offset": -5, "scale": 2.5},
    "-far": {"offset": 10**9, "scale": 0.3, "padding_idx": 10**9 + 2},
    "-positions": {"positions": 3 * ROWS - 4, "padding_idx": 2},
}
SINUSOIDAL = Planned(
    function=fastattn.sinusoidal_encoding,
    make=sequences,
    wants=("x", ""),
    forms={
        "": {},
        "one-sequence": at("x", lambda x: x[0]),
        "heads": at("x", lambda x: x.view(3, 1, 7, 33).expand(3, 2, 7, 33)),
        "transposed": at("x", lambda x: x.mT.contiguous().mT),
        "sliced": at("x", lambda x: x[..., 1::2]),
    },
    options={
        f"{layout}{place}": {"layout": layout, **given}
        for layout in ("interleaved", "tensor2tensor", "marian", "split_exponent")
        for place, given in PLACES.items()
    },
    changes={
        "dimensions": at("x", lambda x: x[0]),
        "one-row": at("x", lambda x: x[:, :1]),
        "max_timescale": {"max_timescale": 100.0},
        "scale": {"scale": 2.0},
        "padding": {"padding_idx": 3},
        "positions": {"positions": ROWS},
    },
    leaving={
        "offset": {"offset": torch.tensor(1)},
        "int32": {"positions": ROWS.int()},
        "dimensions": at("x", lambda x: x.expand(1, 2, *x.shape)),
        "empty": at("x", lambda x: x[:, :0]),
        "subclass": of_subclass("x"),
    },
    valid=({"positions": ROWS}, {}),
    wrong={
        "offset": [True, 2**62],
        "positions": [torch.arange(6), torch.arange(7.0), {"positions": ROWS, "offset": 1}],
        "layout": ["unknown"],
        "max_timescale": [0.5, math.nan],
        "scale": ["2"],
        "padding_idx": [1.0],
    },
    sizes=lambda: [
        [
            sequences(2, rows + n, width) | {"offset": offset}
            for n, (offset, width) in enumerate(((0, 8), (5, 16), (-(10**12), 33)))
        ]
        for rows in (3, 3000)
    ],
)

OPERATORS_OF_MEMORY = [HOPFIELD, MEMORY_HOPS, ENCODE_MEMORY, SINUSOIDAL]
