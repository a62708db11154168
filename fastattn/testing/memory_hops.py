"""The cases of ``memory_hop_attention``, their inputs and their proof."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastattn.testing.calls import Call
from fastattn.testing.cases import Draw, NamedCase, drawn
from fastattn.testing.inputs import poison
from fastattn.testing.judge import Proof
from fastattn.testing.memory import STRIDED


@dataclass(frozen=True)
class HopCase(NamedCase):
    """Sizes, and which arguments are given, in which shape."""

    batch: int = 3
    queries: int | None = None  # None: query [B, D]
    rows: int = 11
    width: int = 7
    hops: int = 2
    in_memory: str = "BN"  # dimensions before D: "BN", "1N", "BKN", "1KN", or "BSN", a stack
    out_memory: str | None = "BN"
    hop_proj: str | None = None  # "", or "K"
    mask: str | None = None  # dimensions
    bias: str | None = None
    bias_excludes: bool = False  # the bias has -inf too
    poison: bool = False  # NaN and inf in rows of memories "BN" that a mask or bias "BN" hides
    activation: str | None = None
    normalize: str = "softmax"
    scale: float = 0.8
    weights: bool = False
    layout: str = "contiguous"  # of all tensors


_SIZES: dict[str, Sequence[Any]] = {
    "batch queries": [
        *((3, None), (1, None), (40, None), (70, None), (5, None)),
        *((2, 2), (3, 3), (2, 37), (9, 5), (3, 9)),
    ],
    "rows width": [
        *((11, 7), (1, 1), (50, 20), (64, 16), (65, 33), (130, 64), (17, 31), (63, 100), (70, 48)),
        *((600, 6), (40, 129), (97, 40), (1100, 5)),
    ],
    "hops in_memory out_memory": [
        *((1, "BN", "BN"), (3, "BN", None), (3, "BKN", "BKN"), (2, "BSN", None), (2, "BN", "BKN")),
        *((2, "1N", "1N"), (2, "1N", "BN"), (2, "BN", "1KN"), (2, "1SN", None), (2, "1KN", "1KN")),
        *((2, "BN", "BN"), (2, "1N", None)),
    ],
}
_OPTIONS: dict[str, Sequence[Any]] = {
    "hop_proj": ["", "K"] * 2,
    "mask": ["BN", "BQN", "N"],
    "queries bias": [(None, "BN"), (None, "BKN"), (3, "BN"), (9, "N")],
    "queries bias bias_excludes": [(2, "BQKN", True), (3, "BQKN", False), (3, "BQ1N", False)],
    "in_memory out_memory mask poison": [("BN", "BN", "BN", True)] * 2,
    "in_memory out_memory bias bias_excludes poison": [("BN", "BN", "BN", True, True)],
    "activation": ["tanh", "relu", "sigmoid"],
    "normalize scale": [("none", 0.05)] * 3,
    "weights": [True] * 4,
    "layout": STRIDED,
}
HOP_CASES = (
    HopCase("plain"),
    HopCase("long", batch=1, rows=3000, width=6, mask="BN", weights=True),
    HopCase("long-shared", 20, None, 2100, 19, 1, "1N", None),
    *(case for case in drawn(HopCase("mixed"), 60, _SIZES, _OPTIONS)
      if not case.poison or case.bias in (None, "BN")),
)  # fmt: skip


def make_hop_inputs(case: HopCase, dtype: torch.dtype) -> Call:
    """Return the tensors of ``case``, equal from call to call, in poisoned memory."""
    draw, d = Draw(case, dtype), case.width
    sizes = {"B": case.batch, "Q": case.queries or 1, "K": case.hops, "N": case.rows}
    sizes |= {"S": case.hops + 1, "1": 1}
    lead = (case.batch,) if case.queries is None else (case.batch, case.queries)

    def shape(dims: str) -> tuple[int, ...]:
        return tuple(sizes[dim] for dim in dims)

    def normal(dims: str | None, *last: int, scale: float = 1.0) -> Tensor | None:
        if dims is None:
            return None
        return draw.placed(draw.normal(*shape(dims), *last) * scale, case.layout)

    tensors: dict[str, Any] = {
        "query": draw.placed(draw.normal(*lead, d), case.layout),
        "in_memory": normal(case.in_memory, d, scale=2 / d**0.5),
        "out_memory": normal(case.out_memory, d),
        "hop_proj": normal(case.hop_proj, d, d, scale=1 / d**0.5),
        "memory_mask": None,
    }
    if case.mask is not None:
        mask = draw.kept(shape(case.mask), 0.6)
        if mask.ndim > 1 and mask.shape[0] > 1:
            mask[1].view(-1, case.rows)[0] = False  # a fully masked query, or batch of queries
        tensors["memory_mask"] = draw.placed(mask, case.layout, torch.bool)
    tensors["memory_bias"] = bias = normal(case.bias)
    if bias is not None and case.bias_excludes:
        bias[draw.kept(bias.shape, 0.3)] = -torch.inf
    options = {name: getattr(case, name) for name in ("hops", "activation", "normalize", "scale")}
    options["need_weights"] = case.weights
    weights = draw.placed(draw.normal(*lead, case.hops, case.rows), case.layout)
    grads: dict[str, Any] = {"out": draw.placed(draw.normal(*lead, d), case.layout)}
    grads |= {"weights": weights if case.weights else None}
    clean = {}
    if case.poison:
        mask = tensors["memory_mask"]
        excluded = torch.isneginf(tensors["memory_bias"]) if mask is None else ~mask
        for name in ("in_memory", "out_memory"):
            clean[name] = memory = tensors[name]
            tensors[name] = draw.placed(poison(memory, excluded), case.layout)
    return Call("memory_hop_attention", tensors, options, grads, clean=clean)


check_hops = Proof("memory_hop_attention", HOP_CASES, make=make_hop_inputs)
