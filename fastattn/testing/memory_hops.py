"""The cases of ``memory_hop_attention``, their inputs and their proof."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastattn.backends import reference
from fastattn.ops.memory_hops import prepare
from fastattn.testing.calls import Call
from fastattn.testing.cases import NamedByFields, numbers_of
from fastattn.testing.inputs import poison
from fastattn.testing.judge import Proof
from fastattn.testing.memory import STRIDED, place_any


@dataclass(frozen=True)
class HopCase(NamedByFields):
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


_PLAIN = HopCase()
_LINEAR = HopCase(normalize="none", scale=0.2)
HOP_CASES = (
    _PLAIN,
    HopCase(batch=1, rows=1, width=1, hops=1),
    HopCase(rows=50, width=20, hops=3, out_memory=None),
    HopCase(rows=64, width=16, in_memory="BKN", out_memory="BKN", hops=3),
    HopCase(rows=65, width=33, in_memory="BSN", out_memory=None, hops=3, hop_proj=""),
    HopCase(rows=130, width=64, in_memory="BN", out_memory="BKN", hop_proj="K", activation="tanh"),
    HopCase(rows=17, width=15, in_memory="BKN", activation="relu", hop_proj=""),
    HopCase(rows=17, width=31, activation="sigmoid", weights=True),
    HopCase(rows=63, width=100, mask="BN", bias="BKN", weights=True),
    HopCase(queries=2, rows=70, width=48, mask="BQN", bias="N", weights=True),
    HopCase(rows=30, width=20, mask="BN", poison=True, weights=True),
    HopCase(queries=2, rows=40, width=24, bias="BQKN", bias_excludes=True, weights=True),
    HopCase(rows=600, width=6, mask="BN", bias="BN", bias_excludes=True, poison=True),
    HopCase(queries=3, rows=40, width=129, bias="BQKN", mask="N", hop_proj="K"),
    HopCase(queries=3, rows=30, width=9, in_memory="BSN", out_memory=None, bias="BQ1N"),
    HopCase(batch=5, in_memory="1N", out_memory="1N", rows=90, width=24, weights=True),
    HopCase(batch=5, in_memory="1N", out_memory="BN", rows=20, width=12),
    HopCase(batch=2, in_memory="BN", out_memory="1KN", rows=20, width=12),
    HopCase(batch=9, queries=5, in_memory="1N", out_memory=None, rows=97, width=40, mask="BN"),
    HopCase(
        batch=40, in_memory="1SN", out_memory=None, rows=77, width=20, bias="BKN", weights=True
    ),
    HopCase(batch=70, in_memory="1KN", out_memory="1KN", rows=33, width=65, bias="N"),
    HopCase(batch=2, queries=37, rows=41, width=18, hops=3, mask="BQN", hop_proj="", weights=True),
    HopCase(batch=1, rows=3000, width=6, mask="BN", weights=True),
    HopCase(batch=2, rows=1100, width=5, in_memory="BSN", out_memory=None, bias="BN"),
    HopCase(batch=20, rows=2100, width=19, in_memory="1N", out_memory=None, hops=1),
    _LINEAR,
    replace(_LINEAR, rows=50, width=20, hops=3, mask="BN", bias="BN", weights=True, scale=0.05),
    replace(
        _LINEAR, batch=33, in_memory="1N", out_memory="1N", mask="BKN", bias="BKN", weights=True
    ),
    replace(_LINEAR, rows=20, in_memory="BSN", out_memory=None, hop_proj="K", activation="tanh"),
    *(HopCase(queries=3, rows=20, width=18, in_memory="BKN", hop_proj="K", bias="BQKN", layout=x)
      for x in STRIDED),
    *(HopCase(queries=9, rows=40, width=13, in_memory="BSN", out_memory=None, mask="BQN", layout=x)
      for x in STRIDED),
)  # fmt: skip


def define(**arguments: Any) -> Any:
    _, (*tensors, options) = prepare(**arguments)
    out, _, _, weights = reference.memory_hop_attention(*tensors, options=options)
    return (out, weights) if options.weights else out


def make_hop_inputs(case: HopCase, dtype: torch.dtype) -> Call:
    """Return the tensors of ``case``, equal from call to call, in poisoned memory."""
    draw, normal = numbers_of(str(case))
    sizes = {"B": case.batch, "Q": case.queries or 1, "K": case.hops, "N": case.rows}
    sizes |= {"S": case.hops + 1, "1": 1}

    def placed(values: Tensor, as_dtype: torch.dtype = dtype) -> Tensor:
        return place_any(values.to(as_dtype), case.layout)

    def shape(dims: str) -> tuple[int, ...]:
        return tuple(sizes[dim] for dim in dims)

    d = case.width
    lead = (case.batch,) if case.queries is None else (case.batch, case.queries)
    tensors: dict[str, Tensor | None] = {
        "query": placed(normal(*lead, d)),
        "in_memory": placed(normal(*shape(case.in_memory), d) * 2 / d**0.5),
        "out_memory": None,
        "hop_proj": None,
        "memory_mask": None,
        "memory_bias": None,
    }
    if case.out_memory is not None:
        tensors["out_memory"] = placed(normal(*shape(case.out_memory), d))
    if case.hop_proj is not None:
        tensors["hop_proj"] = placed(normal(*shape(case.hop_proj), d, d) / d**0.5)
    if case.mask is not None:
        mask = torch.rand(shape(case.mask), generator=draw) < 0.6
        if mask.ndim > 1 and mask.shape[0] > 1:
            mask[1].view(-1, case.rows)[0] = False  # a fully masked query, or batch of queries
        tensors["memory_mask"] = placed(mask, torch.bool)
    if case.bias is not None:
        bias = normal(*shape(case.bias))
        if case.bias_excludes:
            bias[torch.rand(bias.shape, generator=draw) < 0.3] = -torch.inf
        tensors["memory_bias"] = placed(bias)
    options = {
        "hops": case.hops,
        "activation": case.activation,
        "normalize": case.normalize,
        "scale": case.scale,
        "need_weights": case.weights,
    }
    grads: dict[str, Tensor | None] = {"out": None, "weights": None}
    if case.weights:
        grads["weights"] = placed(normal(*lead, case.hops, case.rows))
    grads["out"] = placed(normal(*lead, d))
    clean = {}
    if case.poison:
        excluded = _excluded(tensors["memory_mask"], tensors["memory_bias"])
        for name in ("in_memory", "out_memory"):
            memory = clean[name] = tensors[name]
            assert memory is not None
            tensors[name] = placed(poison(memory, excluded))
    return Call("memory_hop_attention", tensors, options, grads, clean=clean, plain=define,
                prepare=prepare)  # fmt: skip


def _excluded(mask: Tensor | None, bias: Tensor | None) -> Tensor:
    """[B, N]: the rows that no query of the batch entry can see."""
    none = torch.tensor(False)
    by_mask = none if mask is None else ~mask
    return by_mask | (none if bias is None else bias == -torch.inf)


check_hops = Proof("memory_hop_attention", HOP_CASES, make=make_hop_inputs)
