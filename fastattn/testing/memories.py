"""The cases of Hopfield retrieval and of memory networks, their inputs and their proofs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, product
from typing import Any

import torch
from torch import Tensor

from fastattn.testing.calls import Call
from fastattn.testing.cases import LAYOUTS, STRIDED, Case, Draw, NamedCase, drawn
from fastattn.testing.inputs import make_inputs, poison
from fastattn.testing.judge import Proof


@dataclass(frozen=True)
class HopfieldCase(Case):
    """A case of attention: states, stored patterns, and projections for query, key and value."""

    q_len: int = 3
    k_len: int = 11
    head_dim: int = 7
    steps: int = 3
    shared: bool = False  # patterns of all entries of the batch
    projection: bool = False
    beta: str = "number"  # or "scalar", "heads"
    grad: str = "unroll"


# Few steps: after many, most gradients vanish, and the query with the slowest contraction
# determines both the error and the noise.
_HOPFIELD_SIZES: dict[str, Sequence[Any]] = {
    "batch heads shared": [(2, 2, False), (1, 1, False), (5, 2, True), (3, 2, True)],
    "q_len steps": [(1, 3), (2, 3), (3, 3), (4, 2), (9, 3), (12, 2), (37, 3), (70, 2)],
    "k_len head_dim": [
        *((11, 7), (1, 1), (50, 20), (70, 48), (40, 65), (33, 16), (97, 40), (41, 18), (300, 33)),
        *((60, 24), (64, 32)),
    ],
}
_HOPFIELD_OPTIONS: dict[str, Sequence[Any]] = {
    "projection": [True] * 4,
    "mask mask_dims": [
        *(("bool_rows", "bhqk"), ("bool", "bk"), ("bool", "qk")),
        *(("float", dims) for dims in ("bhqk", "hqk", "qk", "k")),
    ],
    "beta": ["scalar", "heads", "heads"],
    "grad": ["one_step"] * 3,
    "grad steps k_len head_dim": [("implicit", 60, 6, 12)] * 3,
    "layouts mask_layout grad_layout": [((x, x, x), x, x) for x in STRIDED],
}
HOPFIELD_CASES = (
    HopfieldCase("plain"),
    HopfieldCase("long", batch=1, heads=1, k_len=1500, head_dim=6, steps=2, mask="bool"),
    *drawn(HopfieldCase("mixed"), 48, _HOPFIELD_SIZES, _HOPFIELD_OPTIONS),
)


def make_hopfield_inputs(case: HopfieldCase, dtype: torch.dtype) -> Call:
    # Implicit derivatives assume a fixed point, so the steps must converge.
    sharp = 3.0 if case.grad == "implicit" else 1.0
    spreads = (1.0, sharp / case.head_dim**0.5 * 1.5)
    inputs = make_inputs(replace(case, spreads=spreads), dtype)
    patterns = slice(1 if case.shared else None)
    tensors: dict[str, Any] = {
        "state": inputs.query,
        "stored": inputs.key[patterns],
        "projection": inputs.value[patterns] if case.projection else None,
        "beta": 1.4,
        "attn_mask": inputs.attn_mask,
    }
    if case.beta != "number":
        heads = (case.heads,) if case.beta == "heads" else ()
        tensors["beta"] = (1 + Draw(case, dtype).normal(*heads).abs() / 2).to(dtype)
    options = {"update_steps_max": case.steps, "update_steps_eps": 0.0, "grad": case.grad}
    grads = {"out": inputs.grads["out"]}
    return Call("hopfield_retrieve", tensors, options, grads)


check_hopfield = Proof("hopfield_retrieve", HOPFIELD_CASES, make=make_hopfield_inputs)


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


_HOP_SIZES: dict[str, Sequence[Any]] = {
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
_HOP_OPTIONS: dict[str, Sequence[Any]] = {
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
    *(case for case in drawn(HopCase("mixed"), 60, _HOP_SIZES, _HOP_OPTIONS)
      if not case.poison or case.bias in (None, "BN")),
)  # fmt: skip


def make_hop_inputs(case: HopCase, dtype: torch.dtype) -> Call:
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
        mask = torch.rand(shape(case.mask), generator=draw.generator) < 0.6
        if mask.ndim > 1 and mask.shape[0] > 1:
            mask[1].view(-1, case.rows)[0] = False  # a fully masked query, or batch of queries
        tensors["memory_mask"] = draw.placed(mask, case.layout, torch.bool)
    tensors["memory_bias"] = bias = normal(case.bias)
    if bias is not None and case.bias_excludes:
        bias[torch.rand(bias.shape, generator=draw.generator) < 0.3] = -torch.inf
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


@dataclass(frozen=True)
class EncodeCase(NamedCase):
    """Sizes: batch, sentences, words, rows, width, tables (None: weight [V, D]); and factors."""

    sizes: tuple[int, int, int, int, int, int | None] = (3, 4, 5, 11, 8, None)
    encoding: str = "position"  # "own": a tensor of factors
    layout: str = "contiguous"  # of the gradient, and of the tensors unless it expands them


_ENCODE_SIZES = (
    *((3, 4, 5, 11, 8, None), (2, 3, 1, 7, 1, 2), (2, 5, 7, 13, 20, None), (1, 6, 4, 9, 33, 3)),
    *((4, 7, 12, 30, 50, 4), (2, 3, 6, 17, 64, None), (2, 3, 5, 8, 67, 2), (1, 2, 9, 5, 300, None)),
)
_ENCODINGS = ("position", "centered", "bow", "own")
ENCODE_CASES = tuple(
    EncodeCase(f"{'x'.join(map(str, filter(None, sizes)))}-{encoding}", sizes, encoding, layout)
    for (sizes, encoding), layout in zip(
        product(_ENCODE_SIZES, _ENCODINGS), cycle(LAYOUTS), strict=False
    )
)


def draw_sentences(
    sizes: tuple[int, int, int, int, int, int | None],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, of which a third are padding (0), weight and temporal."""
    b, n, j, v, d, g = sizes
    tokens = torch.randint(0, v, (b, n, j), generator=generator)
    tokens *= torch.rand(b, n, j, generator=generator) < 0.67
    tokens[0, 0] = 0
    lead = () if g is None else (g,)

    def normal(*size: int) -> Tensor:
        return torch.randn(*lead, *size, dtype=torch.float64, generator=generator).to(dtype)

    return tokens, normal(v, d), normal(n, d)


def _make_encoding(case: EncodeCase, dtype: torch.dtype) -> Call:
    draw = Draw(case, dtype)
    tokens, weight, temporal = draw_sentences(case.sizes, dtype, draw.generator)
    layout = case.layout if case.layout in STRIDED else "contiguous"
    own = case.encoding == "own"
    options = {"encoding": draw.normal(case.sizes[2], case.sizes[4]) if own else case.encoding}
    grads = {"out": draw.placed(draw.normal(case.sizes[0], *temporal.shape), case.layout)}
    tensors: dict[str, Any] = {"tokens": draw.placed(tokens, layout, tokens.dtype)}
    tensors |= {"weight": draw.placed(weight, layout), "temporal": draw.placed(temporal, layout)}
    return Call("encode_memory", tensors, options, grads)


check_encoding = Proof("encode_memory", ENCODE_CASES, make=_make_encoding)
