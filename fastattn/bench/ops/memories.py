"""Memories: Hopfield retrieval (Ramsauer et al. 2021) and memory networks (Sukhbaatar et al. 2015).

A step of retrieval, or a hop, costs an attention of each query to the stored rows. No query stops
early, so that all steps are counted and compared. The operations of layer norms are not counted.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastattn.bench.ops._base import Cell, Draw, Forward, Inputs, Module, Operator
from fastattn.bench.ops.attention import masked_softmax, softmax_weights
from fastattn.nn import Hopfield, HopfieldLayer, HopfieldPooling, KeyValueMemory, MemN2N
from fastattn.ops.encode_memory import encoding_factors

# Hopfield networks


_SHARED = {"S not in (1, B)": "S={S} must be 1 or B={B}"}


def _retrieved(steps: int, xi: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    for _ in range(steps):
        xi = softmax_weights(xi, keys) @ keys
    return softmax_weights(xi, keys) @ values


HOPFIELD = Operator(
    FUNCTION="hopfield_retrieve",
    ABOUT="ξ ← Xᵀ softmax(X ξ / √D), K steps and a readout; stored patterns X of S = 1 are shared",
    SIZES={"B": 4, "S": "B", "H": 8, "L": 128, "N": 128, "D": 64, "K": 3},
    SHAPES="state: B H L D; stored: S H N D",
    # Small, so that the steps contract; diverging steps would amplify rounding errors.
    SCALES={"state": 0.5, "stored": 0.5},
    FLOPS="attention(B*H*L*N * (K + 1), D, D)",
    KEYWORDS={"update_steps_max": itemgetter("K"), "update_steps_eps": 0.0},
    REFUSED=_SHARED,
    equation=lambda cell, x: _retrieved(cell["K"], x.state, x.stored, x.stored),
)


def _energy(cell: Cell, x: Inputs) -> Tensor:
    """−lse(β X ξ) / β + ξ·ξ / 2 + (log N) / β + max |x|² / 2; the constants pass no gradient."""
    xi, stored, root = x.state, x.stored, math.sqrt(cell["D"])  # 1 / β
    longest = stored.detach().square().sum(-1).amax(-1, keepdim=True)
    constants = longest / 2 + root * math.log(stored.shape[-2])
    return xi.square().sum(-1) / 2 - root * (xi @ stored.mT / root).logsumexp(-1) + constants


HOPFIELD_ENERGY = Operator(
    FUNCTION="hopfield_energy",
    ABOUT="−lse(β X ξ) / β + ξ·ξ / 2 + constants, β = 1 / √D",
    SIZES={"B": 4, "H": 8, "L": 128, "N": 128, "D": 64},
    SHAPES="state: B H L D; stored: B H N D; out: B H L",
    FLOPS="attention(B*H*L*N, D, 0)",
    results=lambda energy, dtype: energy.to(dtype),
    equation=_energy,
)


class _Hopfield(Module):
    """A module of retrieval, `KIND(E, **sizes)`; `PREFIX` begins the names of its parameters."""

    PREFIX = "hopfield."

    def __init__(
        self, kind: Any, about: str, batch: int, states: int, rows: str, **more: Any
    ) -> None:
        self.KIND, self.FUNCTION = kind, f"nn.{kind.__name__}"
        self.ABOUT = f"{about}, H heads, K steps, norms, projections"
        self.SIZES = {"B": batch, "L": states, "N": 128, "E": 512, "H": 8, "K": 3}
        self.FLOPS = f"attention(B*L*N * (K + 1), E, E) + products(2 * E**2 * (B*L + {rows}))"
        super().__init__(**more)

    def make(self, cell: Cell, **made: Any) -> nn.Module:
        if self.KIND is not Hopfield:
            made["quantity"] = cell["L" if self.KIND is HopfieldPooling else "N"]
        made |= {"num_heads": cell["H"], "update_steps_max": cell["K"], "update_steps_eps": 0.0}
        return self.KIND(cell["E"], **made)

    def draw_parameter(self, name: str, shape: tuple[int, ...], draw: Draw) -> Tensor:
        """Small, so that the steps contract; diverging steps would amplify rounding errors."""
        drawn = super().draw_parameter(name, shape, draw)
        return drawn / 2 if "in_proj" in name else drawn

    def equation(self, cell: Cell, x: Inputs) -> Tensor:
        core = f"{self.PREFIX}association_core."

        def heads(n: int, kind: str, rows: Tensor) -> Tensor:
            norm, names = f"{self.PREFIX}norm_{kind}.", ("weight", "bias")
            weight, bias = (x[f"{core}in_proj_{name}"].chunk(3)[n] for name in names)
            shape = rows.shape[-1:]
            rows = functional.layer_norm(rows, shape, x[norm + "weight"], x[norm + "bias"])
            rows = functional.linear(rows, weight, bias)
            return rows.unflatten(-1, (cell["H"], -1)).transpose(1, 2)

        stored = x.lookup_weights if self.KIND is HopfieldLayer else x.stored
        pools = self.KIND is HopfieldPooling
        state = x.pooling_weights.expand(cell["B"], -1, -1) if pools else x.state
        xi, keys = heads(0, "state_pattern", state), heads(1, "stored_pattern", stored)
        out = _retrieved(cell["K"], xi, keys, heads(2, "pattern_projection", stored))
        out = out.transpose(1, 2).flatten(2)
        out = functional.linear(out, x[f"{core}out_proj.weight"], x[f"{core}out_proj.bias"])
        return out.flatten(1) if pools else out


_ABOUT = "states retrieve from "
HOPFIELD_MODULE = _Hopfield(
    *(Hopfield, _ABOUT + "N patterns", 4, 128, "B*N"),
    PREFIX="",
    SHAPES="state: B L E; stored: B N E",
    call=lambda cell, module, x: module((x.stored, x.state, x.stored)),
)
HOPFIELD_LAYER = _Hopfield(
    *(HopfieldLayer, _ABOUT + "N learned patterns", 4, 128, "N"), SHAPES="state: B L E"
)
HOPFIELD_POOLING = _Hopfield(
    *(HopfieldPooling, "L learned states retrieve from bags of N patterns", 32, 1, "B*N"),
    SHAPES="stored: B N E; out: B L*E",
)

# Memory networks


def _hops(cell: Cell, x: Inputs) -> Any:
    u, (m, c), all_weights = x.query, (x.in_memory, x.out_memory), []
    for _ in range(cell["K"]):
        scores = u @ m[0].T if cell["S"] == 1 else torch.bmm(m, u.unsqueeze(2)).squeeze(2)
        p = masked_softmax(scores, x.get("memory_mask"))
        u = u + (p @ c[0] if cell["S"] == 1 else torch.bmm(p.unsqueeze(1), c).squeeze(1))
        all_weights.append(p)
    return u if cell.weights == "none" else (u, torch.stack(all_weights, 1))


MEMORY_HOPS = Operator(
    FUNCTION="memory_hop_attention",
    ABOUT="u ← u + Cᵀ softmax(M u), K hops; memories of S = 1 are shared",
    SIZES={"B": 32, "S": "B", "N": 50, "D": 20, "K": 3},
    MASKS=("none", "padding"),
    WEIGHTS=("none", "per-head"),
    SHAPES="query: B D; in_memory: S N D; out_memory: S N D",
    SCALES={"in_memory": 0.1, "out_memory": 0.1},
    FLOPS="attention(B*K*N, D, D)",
    KEYWORDS={"hops": itemgetter("K")},
    REFUSED=_SHARED,
    others=lambda cell, draw: (
        {"memory_mask": draw.valid(cell, cell["N"])} if cell.mask == "padding" else {}
    ),
    equation=_hops,
)


def _encoded(tokens: Tensor, table: Tensor, temporal: Tensor | None = None) -> Tensor:
    """Σⱼ lⱼ ∘ A xⱼ over the last dimension of `tokens`; token 0 is padding."""
    made: dict[str, Any] = {"dtype": table.dtype, "device": table.device}
    factors = encoding_factors("position", tokens.shape[-1], table.shape[-1], **made)
    filled = (tokens != 0).unsqueeze(-1)
    encoded = (functional.embedding(tokens, table) * factors * filled).sum(-2)
    return encoded if temporal is None else encoded + temporal * filled.any(-2)


ENCODE_MEMORY = Operator(
    FUNCTION="encode_memory",
    ABOUT="mᵢ = Σⱼ lⱼ ∘ A xᵢⱼ + Tᵢ of N sentences of J words",
    SIZES={"B": 32, "N": 50, "J": 11, "V": 175, "D": 50},
    SHAPES="weight: V D; temporal: N D; out: B N D",
    SCALES={"weight": 0.1, "temporal": 0.1},
    FLOPS="B*N*D * (2*J + 1)",
    READ={"V": "min(V, B*N*J)"},
    others=lambda cell, draw: {"tokens": draw.token_ids(*(cell[key] for key in "BNJV"))},
    equation=lambda cell, x: _encoded(x.tokens, x.weight, x.temporal),
)


class MEMN2N(Module):
    FUNCTION = "nn.MemN2N"
    ABOUT = "stories of N sentences and questions of J of V words, K hops, adjacent or layerwise"
    SIZES = {"B": 32, "N": 50, "J": 11, "V": 175, "D": 50, "K": 3}
    SHAPES = "out: B V"
    OPTIONS = ("none", "layerwise")
    # Adjacent hops share K + 1 tables; layerwise hops have two tables, and a projection per hop.
    FLOPS = (
        "2 * B*J*D * ((2 if option == 'layerwise' else K + 1) * N + 1) + "
        "attention(B*K*N, D, D) + products(B*D * (V + (option == 'layerwise') * K*D))"
    )

    def call(self, cell: Cell, module: nn.Module, x: Inputs) -> Any:
        return module(x.stories, x.questions)

    def others(self, cell: Cell, draw: Draw) -> dict[str, Tensor]:
        return {
            "stories": draw.token_ids(*(cell[key] for key in "BNJV")),
            "questions": draw.integers(0, cell["V"], cell["B"], cell["J"]),
        }

    def draw_parameter(self, name: str, shape: tuple[int, ...], draw: Draw) -> Tensor:
        return draw.normal(*shape, scale=shape[-1] ** -0.5 if name == "hop_proj" else 0.1)

    def make(self, cell: Cell, **made: Any) -> nn.Module:
        tying = "layerwise" if cell.option == "layerwise" else "adjacent"
        sizes: dict[str, Any] = {"hops": cell["K"], "memory_size": cell["N"]}
        return MemN2N(cell["V"], cell["D"], **sizes, weight_tying=tying, **made)

    def equation(self, cell: Cell, x: Inputs) -> Tensor:
        own, embedding = cell.option == "layerwise", x.embedding
        tables = zip(embedding, x.temporal, strict=True)
        memories = [_encoded(x.stories, table, row) for table, row in tables]
        u = _encoded(x.questions, x.question if own else embedding[0])
        for m, c in [memories] * cell["K"] if own else itertools.pairwise(memories):
            p = torch.einsum("bnd,bd->bn", m, u).softmax(-1)
            u = (u @ x.hop_proj.T if own else u) + torch.einsum("bn,bnd->bd", p, c)
        return u @ (x.answer if own else embedding[-1]).T


class KEY_VALUE_MEMORY(Operator):
    FUNCTION = "nn.KeyValueMemory"
    ABOUT = "softmax(q Kᵀ / √D) V of L queries and N full slots"
    SIZES = {"B": 8, "L": 16, "N": 1024, "D": 64, "Dv": "D"}
    SHAPES = "query: B L D; keys: B N D; values: B N Dv; out: B L Dv"
    FLOPS = "attention(B*L*N, D, Dv)"

    def ours(self, cell: Cell, x: Inputs, library: Any = None) -> Forward:
        made: dict[str, Any] = {"device": x.query.device, "dtype": x.query.dtype}
        memory = KeyValueMemory(cell["N"], cell["D"], cell["Dv"], batch_size=cell["B"], **made)
        memory.keys, memory.values = x["keys"], x["values"]
        memory.used = torch.ones_like(memory.used)
        return partial(memory.read, x.query)

    def stock(self, cell: Cell, x: Inputs) -> Forward:
        attention = functional.scaled_dot_product_attention
        return partial(attention, x.query, x["keys"], x["values"])
