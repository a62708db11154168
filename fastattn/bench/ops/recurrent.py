"""The attentions of recurrent translation: Bahdanau et al. 2015 and Luong et al. 2015."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastattn._flops import visible_pairs
from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._attention import softmax_weights, visible_keys
from fastattn.bench.ops._base import Inputs, Operator
from fastattn.bench.ops._module import Module
from fastattn.nn import AdditiveAttention, BahdanauAttention, GlobalAttention, LuongAttention

# Additive attention


class _Additive(Operator):
    def others(self, cell: Cell, draw: Draw) -> Inputs:
        if cell.mask == "bias":
            return {"attn_mask": draw.normal(cell["Lq"], cell["Lk"])}
        visible = None if cell.mask == "causal" else visible_keys(cell, draw)
        return {} if visible is None else {"attn_mask": visible}

    def arguments(self, cell: Cell, inputs: Inputs) -> tuple[list[Tensor], dict[str, Any]]:
        return self.leaves(inputs), {
            "attn_mask": inputs.get("attn_mask"),
            "is_causal": cell.mask == "causal",
            "need_weights": cell.weights != "none",
        }

    def equation(self, cell: Cell, inputs: Inputs) -> Any:
        query, key, value, v, bias = self.leaves(inputs)
        scores = (query[:, :, None] + key[:, None] + bias).tanh() @ v
        mask = inputs.get("attn_mask")
        if cell.mask == "causal":
            mask = torch.ones(scores.shape[1:], dtype=torch.bool, device=v.device).tril()
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        elif mask is not None:
            scores = scores + mask
        weights = scores.softmax(-1)
        return weights @ value if cell.weights == "none" else (weights @ value, weights)


ADDITIVE = _Additive(
    FUNCTION="additive_attention",
    ABOUT="softmax(v·tanh(q + k + b)) V on [B, Lq, A], [B, Lk, A], [B, Lk, Dv]",
    SIZES={"B": 8, "Lq": 64, "Lk": "Lq", "A": 256, "Dv": "A"},
    MASKS=("none", "causal", "padding", "bool", "bias"),
    WEIGHTS=("none", "per-head"),
    SHAPES={"query": "B Lq A", "key": "B Lk A", "value": "B Lk Dv", "v": "A", "bias": "A"},
    OUTPUT="B Lq Dv",
    SCALES={"v": "A ** -0.5", "bias": 0.1},
    FLOPS="additive(pairs, A, Dv)",
    HIDDEN="B * Lq * Lk * A",
)


def _without_masks(query: Tensor, keys: Tensor, v: Tensor, memory: Tensor) -> Tensor:
    return ((query[:, :, None] + keys[:, None]).tanh() @ v).softmax(-1) @ memory


ADDITIVE_MODULE = Module(
    FUNCTION="nn.AdditiveAttention",
    ABOUT="softmax(scale·tanh(q + m)) M on q [B, Lq, A], memory [B, Lk, A]",
    SIZES={"B": 8, "Lq": 64, "Lk": "Lq", "A": 256},
    SHAPES={"query": "B Lq A", "memory": "B Lk A"},
    FLOPS="additive(pairs, A, A)",
    HIDDEN="B * Lq * Lk * A",
    make=lambda cell, **made: AdditiveAttention(dim=cell["A"], **made),
    equation=lambda cell, inputs: _without_masks(
        inputs["query"], inputs["memory"], inputs["scale"], inputs["memory"]
    ),
)


def _bahdanau(width: int, units: int, **made: Any) -> BahdanauAttention:
    return BahdanauAttention(units, query_size=width, memory_size=width, **made)


BAHDANAU = Module(
    FUNCTION="nn.BahdanauAttention",
    ABOUT="softmax(v·tanh(W q + U m)) M on [B, Lq, E], memory [B, Lk, E], A units",
    SIZES={"B": 8, "Lq": 64, "Lk": "Lq", "E": 256, "A": 256},
    SHAPES={"query": "B Lq E", "memory": "B Lk E"},
    FLOPS="additive(pairs, A, E) + products(B * (Lq + Lk) * E*A)",
    HIDDEN="B * Lq * Lk * A",
    KEYWORDS={"need_weights": False},
    make=lambda cell, **made: _bahdanau(cell["E"], cell["A"], **made),
    parameter=lambda name, shape, draw: draw.normal(*shape, scale=shape[-1] ** -0.5),
    results=lambda found, dtype: found[0],
    equation=lambda cell, inputs: _without_masks(
        inputs["query"] @ inputs["query_layer.weight"].T,
        inputs["memory"] @ inputs["memory_layer.weight"].T,
        inputs["v"],
        inputs["memory"],
    ),
)


class _Decoder(nn.Module):
    """L steps of a GRU, each with its own attention.

        c_i = attention(W s_i-1, U memory),  s_i = GRU([y_i; c_i], s_i-1)

    A query needs the state after the context before it, so the steps follow one another. The keys
    U memory are computed once.
    """

    def __init__(self, width: int, units: int, **made: Any) -> None:
        super().__init__()
        self.attention = _bahdanau(width, units, **made)
        self.cell = nn.GRUCell(2 * width, width, **made)

    def forward(self, targets: Tensor, memory: Tensor, state: Tensor) -> Tensor:
        keys, states = self.attention.memory_layer(memory), []
        for y in targets.unbind(1):
            context, _ = self.attention(state, memory, keys=keys, need_weights=False)
            state = self.cell(torch.cat([y, context], -1), state)
            states.append(state)
        return torch.stack(states, 1)


def _steps(cell: Cell, inputs: Inputs) -> Tensor:
    memory, state, v = inputs["memory"], inputs["state"], inputs["attention.v"]
    project = inputs["attention.query_layer.weight"].T
    gru = [inputs[f"cell.{name}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    keys, states = memory @ inputs["attention.memory_layer.weight"].T, []
    for y in inputs["targets"].unbind(1):
        scores = (state[:, None] @ project + keys).tanh() @ v  # [B, S]
        context = (scores.softmax(-1)[:, None] @ memory)[:, 0]
        state = torch.gru_cell(torch.cat([y, context], -1), state, *gru)
        states.append(state)
    return torch.stack(states, 1)


BAHDANAU_DECODER = Module(
    FUNCTION="nn.BahdanauAttention, L steps",
    ABOUT="L steps of a GRU cell with Bahdanau's attention to memory [B, S, E], A units",
    TORCH="the same steps, the equation and torch's GRU cell",
    SIZES={"B": 1, "L": 20, "S": 40, "E": 256, "A": 256},
    SHAPES={"targets": "B L E", "memory": "B S E", "state": "B E"},
    FLOPS="additive(B*L*S, A, E) + products(B*E * (S*A + L * (A + 9*E)))",
    make=lambda cell, **made: _Decoder(cell["E"], cell["A"], **made),
    equation=_steps,
)

# Luong's attention


class _Luong(Operator):
    BY_EQUATION = True

    def pairs(self, cell: Cell, pairs: int) -> int:
        if not _is_local(cell):
            return pairs
        queries, keys, width = cell["Lq"], cell["Lk"], cell["W"]
        near = visible_pairs(queries, keys, 0, width, width)
        return pairs * near // (queries * keys)

    def unread(self, cell: Cell) -> int:
        if not _is_local(cell):
            return 0
        queries, width = cell["Lq"], cell["W"]
        near = queries * (2 * width + 1) if cell["P"] else queries + width
        return cell["B"] * max(0, cell["Lk"] - near) * (cell["D"] + cell["Dv"])

    def others(self, cell: Cell, draw: Draw) -> Inputs:
        found = {}
        if (visible := visible_keys(cell, draw)) is not None:
            found["key_padding_mask"] = ~visible[:, 0]
        if cell["P"]:
            found["positions"] = draw.uniform(0, cell["Lk"] - 1, cell["B"], cell["Lq"])
        return found

    def arguments(self, cell: Cell, inputs: Inputs) -> tuple[list[Tensor], dict[str, Any]]:
        *tensors, weight = self.leaves(inputs)
        options: dict[str, Any] = {
            "method": "general",
            "weight": weight,
            "key_padding_mask": inputs.get("key_padding_mask"),
            "need_weights": cell.weights != "none",
        }
        if _is_local(cell):
            options |= {"window": "local-p" if cell["P"] else "local-m", "D": cell["W"]}
            options["positions"] = inputs.get("positions")
        return tensors, options

    def equation(self, cell: Cell, inputs: Inputs) -> Any:
        query, key, value, weight = self.leaves(inputs)
        visible = ~inputs["key_padding_mask"][:, None] if "key_padding_mask" in inputs else None
        place = inputs.get("positions", torch.arange(query.shape[1], device=query.device))
        distance = torch.arange(key.shape[1], device=key.device) - place[..., None]
        if _is_local(cell):
            near = distance.abs() <= cell["W"]
            visible = near if visible is None else near & visible
        weights = softmax_weights(query @ weight, key, visible, scale=1.0)
        if visible is not None:
            weights = weights.nan_to_num()  # 0 for fully masked rows
        if "positions" in inputs:
            weights = weights * torch.exp(-2 * (distance / cell["W"]) ** 2)
        return weights @ value if cell.weights == "none" else (weights @ value, weights)


def _is_local(cell: Cell) -> bool:
    return cell["P"] > 0 or cell["W"] < max(cell["Lq"], cell["Lk"])


LUONG = _Luong(
    FUNCTION="luong_attention",
    ABOUT="softmax(qᵀ Wᵧ k) V, method general, on [B, Lq, D]; local-m if the half width W < Lk, "
    "local-p around random positions if P=1",
    SIZES={"B": 8, "Lq": 64, "Lk": "Lq", "D": 256, "Dv": "D", "W": "Lk", "P": 0},
    LIMITS={"P": 1},  # local-p, or 0
    MASKS=("none", "padding"),
    WEIGHTS=("none", "per-head"),
    SHAPES={"query": "B Lq D", "key": "B Lk D", "value": "B Lk Dv", "weight": "D D"},
    OUTPUT="B Lq Dv",
    SCALES={"weight": "1 / D"},
    FLOPS="attention(pairs, D, Dv) + products(B*Lq * D**2)",
    HIDDEN="B * Lq * Lk",
)


def _general(inputs: Inputs, weight: Tensor) -> Tensor:
    query, memory = inputs["query"], inputs["memory"]
    return softmax_weights(query @ weight, memory, scale=1.0) @ memory


def _global(cell: Cell, inputs: Inputs) -> Tensor:
    context = _general(inputs, inputs["linear_in.weight"].T)
    joined = torch.cat((context, inputs["query"]), -1)
    return (joined @ inputs["linear_out.weight"].T).tanh()


_ON_A_MEMORY: dict[str, Any] = {
    "SIZES": {"B": 8, "Lq": 64, "Lk": "Lq", "D": 256},
    "SHAPES": {"query": "B Lq D", "memory": "B Lk D"},
    # For scores of about 1, because they are not divided by √D.
    "parameter": lambda name, shape, draw: draw.normal(*shape, scale=1 / shape[-1]),
    "results": lambda found, dtype: found[0],
}

LUONG_MODULE = Module(
    FUNCTION="nn.LuongAttention",
    ABOUT="softmax(qᵀ W m) M, method general, on q [B, Lq, D], memory [B, Lk, D]",
    FLOPS="attention(pairs, D, D) + products(B*Lq * D**2)",
    KEYWORDS={"need_weights": False},
    make=lambda cell, **made: LuongAttention(cell["D"], **made),
    equation=lambda cell, inputs: _general(inputs, inputs["weight"]),
    **_ON_A_MEMORY,
)

GLOBAL_ATTENTION = Module(
    FUNCTION="nn.GlobalAttention",
    ABOUT="tanh(W [c; q]) with c = softmax((U q)ᵀ m) M, q [B, Lq, D], memory [B, Lk, D]",
    FLOPS="attention(pairs, D, D) + products(3 * B*Lq * D**2)",  # of D to D, and of 2·D to D
    make=lambda cell, **made: GlobalAttention(cell["D"], attn_type="general", **made),
    equation=_global,
    **_ON_A_MEMORY,
)
