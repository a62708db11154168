"""Memories: Hopfield retrieval (Ramsauer et al. 2021) and memory networks (Sukhbaatar et al. 2015).

A step of retrieval, or a hop, costs an attention of each query to the stored rows. No query stops
early, so that all steps are counted and compared. The operations of layer norms are not counted.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._attention import softmax_weights
from fastattn.bench.ops._base import Inputs, Operator, Prepared
from fastattn.bench.ops._module import Module, below
from fastattn.nn import Hopfield, HopfieldLayer, HopfieldPooling, KeyValueMemory, MemN2N
from fastattn.ops.encode_memory import encoding_factors

# Hopfield networks


def _check_shared(cell: Cell) -> None:
    if cell["S"] not in (1, cell["B"]):
        raise ValueError(f"S={cell['S']} must be 1 or B={cell['B']}")


def _retrieved(steps: int, xi: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    for _ in range(steps):
        xi = softmax_weights(xi, keys) @ keys
    return softmax_weights(xi, keys) @ values


HOPFIELD = Operator(
    FUNCTION="hopfield_retrieve",
    ABOUT="ξ ← Xᵀ softmax(X ξ / √D), K steps and a readout, ξ [B, H, L, D], X [S, H, N, D]; "
    "S = 1 is shared",
    SIZES={"B": 4, "S": "B", "H": 8, "L": 128, "N": 128, "D": 64, "K": 3},
    SHAPES={"state": "B H L D", "stored": "S H N D"},
    # Small, so that the steps contract; diverging steps would amplify rounding errors.
    SCALES={"state": 0.5, "stored": 0.5},
    FLOPS="attention(B*H*L*N * (K + 1), D, D)",
    check=_check_shared,
    arguments=lambda cell, inputs: (
        [inputs["state"], inputs["stored"]],
        {"update_steps_max": cell["K"], "update_steps_eps": 0.0},
    ),
    equation=lambda cell, inputs: _retrieved(
        cell["K"], inputs["state"], inputs["stored"], inputs["stored"]
    ),
)


def _energy(cell: Cell, inputs: Inputs) -> Tensor:
    """−lse(β X ξ) / β + ξ·ξ / 2 + (log N) / β + max |x|² / 2; the constants pass no gradient."""
    xi, stored, root = inputs["state"], inputs["stored"], math.sqrt(cell["D"])  # 1 / β
    longest = stored.detach().square().sum(-1).amax(-1, keepdim=True)
    constants = longest / 2 + root * math.log(stored.shape[-2])
    return xi.square().sum(-1) / 2 - root * (xi @ stored.mT / root).logsumexp(-1) + constants


HOPFIELD_ENERGY = Operator(
    FUNCTION="hopfield_energy",
    ABOUT="−lse(β X ξ) / β + ξ·ξ / 2 + constants, β = 1 / √D, ξ [B, H, L, D], X [B, H, N, D]",
    SIZES={"B": 4, "H": 8, "L": 128, "N": 128, "D": 64},
    SHAPES={"state": "B H L D", "stored": "B H N D"},
    OUTPUT="B H L",
    FLOPS="attention(B*H*L*N, D, 0)",
    results=lambda found, dtype: found.to(dtype),
    equation=_energy,
)


class _Hopfield(Module):
    """A module of retrieval: projections of each state, twice, and of each stored row, twice.

    `KIND(E, **sizes)` is the module; `where` has the states, the rows and the prefix of the names
    of the parameters of its `Hopfield`.
    """

    KIND: Any

    def make(self, cell: Cell, **made: Any) -> nn.Module:
        if self.KIND is not Hopfield:
            made["quantity"] = cell["L" if self.KIND is HopfieldPooling else "N"]
        options = {"num_heads": cell["H"], "update_steps_max": cell["K"], "update_steps_eps": 0.0}
        module: nn.Module = self.KIND(cell["E"], **options, **made)
        return module

    def parameter(self, name: str, shape: tuple[int, ...], draw: Draw) -> Tensor:
        """Small, so that the steps contract; diverging steps would amplify rounding errors."""
        drawn = super().parameter(name, shape, draw)
        return drawn / 2 if "in_proj" in name else drawn

    def where(self, cell: Cell, inputs: Inputs) -> tuple[Tensor, Tensor, str]:
        return inputs["state"], inputs["stored"], ""

    def equation(self, cell: Cell, inputs: Inputs) -> Tensor:
        state, stored, prefix = self.where(cell, inputs)
        own = below(inputs, prefix)
        core = below(own, "association_core.")

        def heads(n: int, kind: str, x: Tensor) -> Tensor:
            norm = below(own, f"norm_{kind}.")
            weight, bias = (core[f"in_proj_{name}"].chunk(3)[n] for name in ("weight", "bias"))
            x = functional.layer_norm(x, x.shape[-1:], norm["weight"], norm["bias"])
            return functional.linear(x, weight, bias).unflatten(-1, (cell["H"], -1)).transpose(1, 2)

        xi, keys = heads(0, "state_pattern", state), heads(1, "stored_pattern", stored)
        out = _retrieved(cell["K"], xi, keys, heads(2, "pattern_projection", stored))
        out = out.transpose(1, 2).flatten(2)
        out = functional.linear(out, core["out_proj.weight"], core["out_proj.bias"])
        return out.flatten(1) if self.KIND is HopfieldPooling else out


def _hopfield(
    kind: Any, about: str, batch: int, states: int, rows: str, **fields: Any
) -> _Hopfield:
    return _Hopfield(
        FUNCTION=f"nn.{kind.__name__}",
        KIND=kind,
        ABOUT=f"{about}, H heads, K steps, norms, projections",
        SIZES={"B": batch, "L": states, "N": 128, "E": 512, "H": 8, "K": 3},
        FLOPS=f"attention(B*L*N * (K + 1), E, E) + products(2 * E**2 * (B*L + {rows}))",
        **fields,
    )


HOPFIELD_MODULE = _hopfield(
    Hopfield,
    "states [B, L, E] retrieve from patterns [B, N, E]",
    batch=4,
    states=128,
    rows="B*N",
    SHAPES={"state": "B L E", "stored": "B N E"},
    call=lambda cell, module, inputs: module((inputs["stored"], inputs["state"], inputs["stored"])),
)

HOPFIELD_LAYER = _hopfield(
    HopfieldLayer,
    "states [B, L, E] retrieve from N learned patterns",
    batch=4,
    states=128,
    rows="N",
    SHAPES={"state": "B L E"},
    where=lambda cell, inputs: (inputs["state"], inputs["lookup_weights"], "hopfield."),
)

HOPFIELD_POOLING = _hopfield(
    HopfieldPooling,
    "L learned states retrieve from bags of patterns [B, N, E]",
    batch=32,
    states=1,
    rows="B*N",
    SHAPES={"stored": "B N E"},
    OUTPUT="B L*E",
    where=lambda cell, inputs: (
        inputs["pooling_weights"].expand(cell["B"], -1, -1),
        inputs["stored"],
        "hopfield.",
    ),
)

# Memory networks


def _hops(cell: Cell, inputs: Inputs) -> Any:
    u, m, c = (inputs[name] for name in ("query", "in_memory", "out_memory"))
    mask, all_weights = inputs.get("memory_mask"), []
    for _ in range(cell["K"]):
        scores = u @ m[0].T if cell["S"] == 1 else torch.bmm(m, u.unsqueeze(2)).squeeze(2)
        p = (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1)
        u = u + (p @ c[0] if cell["S"] == 1 else torch.bmm(p.unsqueeze(1), c).squeeze(1))
        all_weights.append(p)
    return u if cell.weights == "none" else (u, torch.stack(all_weights, 1))


MEMORY_HOPS = Operator(
    FUNCTION="memory_hop_attention",
    ABOUT="u ← u + Cᵀ softmax(M u), K hops, u [B, D], M and C [S, N, D]; S = 1 is shared",
    SIZES={"B": 32, "S": "B", "N": 50, "D": 20, "K": 3},
    MASKS=("none", "padding"),
    WEIGHTS=("none", "per-head"),
    SHAPES={"query": "B D", "in_memory": "S N D", "out_memory": "S N D"},
    SCALES={"in_memory": 0.1, "out_memory": 0.1},
    FLOPS="attention(B*K*N, D, D)",
    check=_check_shared,
    others=lambda cell, draw: (
        {"memory_mask": draw.valid(cell["B"], cell["N"])} if cell.mask == "padding" else {}
    ),
    arguments=lambda cell, inputs: (
        [inputs[name] for name in ("query", "in_memory", "out_memory")],
        {
            "hops": cell["K"],
            "memory_mask": inputs.get("memory_mask"),
            "need_weights": cell.weights != "none",
        },
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
    ABOUT="mᵢ = Σⱼ lⱼ ∘ A xᵢⱼ + Tᵢ on tokens [B, N, J], A [V, D], T [N, D]",
    TORCH="(embedding * l * mask).sum(2) + T",
    SIZES={"B": 32, "N": 50, "J": 11, "V": 175, "D": 50},
    SHAPES={"weight": "V D", "temporal": "N D"},
    OUTPUT="B N D",
    SCALES={"weight": 0.1, "temporal": 0.1},
    FLOPS="B*N*D * (2*J + 1)",
    elements=lambda cell: (
        (min(cell["V"], cell["B"] * cell["N"] * cell["J"]) + cell["N"]) * cell["D"],
        cell["B"] * cell["N"] * cell["D"],
    ),
    others=lambda cell, draw: {"tokens": draw.sentences(*(cell[key] for key in "BNJV"))},
    arguments=lambda cell, inputs: (
        [inputs["tokens"], inputs["weight"]],
        {"temporal": inputs["temporal"]},
    ),
    equation=lambda cell, inputs: _encoded(inputs["tokens"], inputs["weight"], inputs["temporal"]),
)


class _Memn2n(Module):
    def others(self, cell: Cell, draw: Draw) -> Inputs:
        return {
            "stories": draw.sentences(*(cell[key] for key in "BNJV")),
            "questions": draw.integers(0, cell["V"], cell["B"], cell["J"]),
        }

    def parameter(self, name: str, shape: tuple[int, ...], draw: Draw) -> Tensor:
        return draw.normal(*shape, scale=shape[-1] ** -0.5 if name == "hop_proj" else 0.1)

    def make(self, cell: Cell, **made: Any) -> nn.Module:
        tying = "layerwise" if cell.option == "layerwise" else "adjacent"
        sizes: dict[str, Any] = {"hops": cell["K"], "memory_size": cell["N"]}
        return MemN2N(cell["V"], cell["D"], **sizes, weight_tying=tying, **made)

    def equation(self, cell: Cell, inputs: Inputs) -> Tensor:
        own, embedding = cell.option == "layerwise", inputs["embedding"]
        tables = zip(embedding, inputs["temporal"], strict=True)
        memories = [_encoded(inputs["stories"], table, row) for table, row in tables]
        u = _encoded(inputs["questions"], inputs["question"] if own else embedding[0])
        for m, c in [memories] * cell["K"] if own else itertools.pairwise(memories):
            p = torch.einsum("bnd,bd->bn", m, u).softmax(-1)
            kept = u @ inputs["hop_proj"].T if own else u
            u = kept + torch.einsum("bn,bnd->bd", p, c)
        return u @ (inputs["answer"] if own else embedding[-1]).T


MEMN2N = _Memn2n(
    FUNCTION="nn.MemN2N",
    ABOUT="stories [B, N, J] and questions [B, J] of V words, width D, K hops, adjacent tying or "
    "layerwise",
    TORCH="the same network in plain PyTorch",
    SIZES={"B": 32, "N": 50, "J": 11, "V": 175, "D": 50, "K": 3},
    SHAPES={},
    OPTIONS=("none", "layerwise"),
    OUTPUT="B V",
    # Adjacent hops share K + 1 tables; layerwise ones have two, and each a projection.
    FLOPS="2 * B*J*D * ((2 if option == 'layerwise' else K + 1) * N + 1) + "
    "attention(B*K*N, D, D) + products(B*D * (V + (option == 'layerwise') * K*D))",
    call=lambda cell, module, inputs: module(inputs["stories"], inputs["questions"]),
)


def _reading(cell: Cell, inputs: Inputs) -> Prepared:
    query, keys, values = (inputs[name] for name in ("query", "keys", "values"))
    made: dict[str, Any] = {"device": query.device, "dtype": query.dtype}
    memory = KeyValueMemory(cell["N"], cell["D"], cell["Dv"], batch_size=cell["B"], **made)
    memory.keys, memory.values = keys, values
    memory.used = torch.ones_like(memory.used)
    return lambda: (memory.read(query),), [query, keys, values]


def _pytorch_reading(cell: Cell, inputs: Inputs) -> Prepared:
    query, keys, values = leaves = [inputs[name] for name in ("query", "keys", "values")]
    return lambda: (functional.scaled_dot_product_attention(query, keys, values),), leaves


KEY_VALUE_MEMORY = Operator(
    FUNCTION="nn.KeyValueMemory",
    ABOUT="softmax(q Kᵀ / √D) V of queries [B, L, D] and N full slots of D keys and Dv values",
    TORCH="F.scaled_dot_product_attention",
    SIZES={"B": 8, "L": 16, "N": 1024, "D": 64, "Dv": "D"},
    SHAPES={"query": "B L D", "keys": "B N D", "values": "B N Dv"},
    OUTPUT="B L Dv",
    FLOPS="attention(B*L*N, D, Dv)",
    ours=_reading,
    theirs=_pytorch_reading,
    equation=lambda cell, inputs: (
        softmax_weights(inputs["query"], inputs["keys"]) @ inputs["values"]
    ),
)
