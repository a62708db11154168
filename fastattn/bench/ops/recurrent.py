"""The attentions of recurrent translation: Bahdanau et al. 2015 and Luong et al. 2015.

In additive attention a visible pair costs 4·A for its score v·tanh(q + k + b) (add, tanh, multiply,
add; a tanh counts as one) and 2·Dv for its part of the output. In the backward it costs 8·A (the
derivative of tanh, and its parts of the gradients of query, key and v) and 4·Dv.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._attention import softmax_weights, visible_keys
from fastattn.bench.ops._base import Inputs, Operator
from fastattn.bench.ops._module import Module, first
from fastattn.nn import AdditiveAttention, BahdanauAttention, GlobalAttention, LuongAttention

# Additive attention


def _additive_mask(cell: Cell, draw: Draw) -> Inputs:
    if cell.mask == "bias":
        return {"attn_mask": draw.normal(cell["Lq"], cell["Lk"])}
    visible = None if cell.mask == "causal" else visible_keys(cell, draw)
    return {} if visible is None else {"attn_mask": visible}


def _additive(cell: Cell, inputs: Inputs) -> Any:
    query, key, value, v, bias = (inputs[n] for n in ("query", "key", "value", "v", "bias"))
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


ADDITIVE = Operator(
    FUNCTION="additive_attention",
    ABOUT="softmax(v·tanh(q + k + b)) V on [B, Lq, A], [B, Lk, A], [B, Lk, Dv]",
    SIZES={"B": 8, "Lq": 64, "Lk": "Lq", "A": 256, "Dv": "A"},
    MASKS=("none", "causal", "padding", "bool", "bias"),
    WEIGHTS=("none", "per-head"),
    SHAPES={"query": "B Lq A", "key": "B Lk A", "value": "B Lk Dv", "v": "A", "bias": "A"},
    OUTPUT="B Lq Dv",
    SCALES={"v": "A ** -0.5", "bias": 0.1},
    FLOPS=("pairs * (4*A + 2*Dv)", "pairs * (8*A + 4*Dv)"),
    HIDDEN="B * Lq * Lk * A",
    others=_additive_mask,
    arguments=lambda cell, inputs: (
        [inputs[name] for name in ("query", "key", "value", "v", "bias")],
        {
            "attn_mask": inputs.get("attn_mask"),
            "is_causal": cell.mask == "causal",
            "need_weights": cell.weights != "none",
        },
    ),
    equation=_additive,
)


def _additive_module(cell: Cell, inputs: Inputs) -> Tensor:
    query, memory = inputs["query"], inputs["memory"]
    scores = (query[:, :, None] + memory[:, None]).tanh() @ inputs["scale"]
    return scores.softmax(-1) @ memory


ADDITIVE_MODULE = Module(
    FUNCTION="nn.AdditiveAttention",
    ABOUT="softmax(scale·tanh(q + m)) M on q [B, Lq, A], memory [B, Lk, A]",
    SIZES={"B": 8, "Lq": 64, "Lk": "Lq", "A": 256},
    SHAPES={"query": "B Lq A", "memory": "B Lk A"},
    OUTPUT="B Lq A",
    FLOPS=("6 * pairs * A", "12 * pairs * A"),
    HIDDEN="B * Lq * Lk * A",
    make=lambda cell, **made: AdditiveAttention(dim=cell["A"], **made),
    equation=_additive_module,
)


def _matrices(name: str, shape: tuple[int, ...], draw: Draw) -> Tensor:
    return draw.normal(*shape, scale=shape[-1] ** -0.5)


def _bahdanau(cell: Cell, inputs: Inputs) -> Any:
    projected = {
        "query": inputs["query"] @ inputs["query_layer.weight"].T,
        "key": inputs["memory"] @ inputs["memory_layer.weight"].T,
        "bias": inputs["v"].new_zeros(inputs["v"].shape),
    }
    return _additive(cell, projected | {"value": inputs["memory"], "v": inputs["v"]})


BAHDANAU = Module(
    FUNCTION="nn.BahdanauAttention",
    ABOUT="softmax(v·tanh(W q + U m)) M on [B, Lq, E], memory [B, Lk, E], A units",
    SIZES={"B": 8, "Lq": 64, "Lk": "Lq", "E": 256, "A": 256},
    SHAPES={"query": "B Lq E", "memory": "B Lk E"},
    OUTPUT="B Lq E",
    FLOPS=(
        "pairs * (4*A + 2*E) + 2 * B * (Lq + Lk) * E * A",
        "pairs * (8*A + 4*E) + 4 * B * (Lq + Lk) * E * A",
    ),
    HIDDEN="B * Lq * Lk * A",
    KEYWORDS={"need_weights": False},
    make=lambda cell, **made: BahdanauAttention(
        cell["A"], query_size=cell["E"], memory_size=cell["E"], **made
    ),
    parameter=_matrices,
    results=first,
    equation=_bahdanau,
)


class _Decoder(nn.Module):
    """L steps of a GRU, each with its own attention.

        c_i = attention(W s_i-1, U memory),  s_i = GRU([y_i; c_i], s_i-1)

    A query needs the state after the context before it, so the steps follow one another. The keys
    U memory are computed once.
    """

    def __init__(self, width: int, units: int, **made: Any) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"query_size": width, "memory_size": width}
        self.attention = BahdanauAttention(units, **sizes, **made)
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
    OUTPUT="B L E",
    FLOPS=(
        "B*L*S * (4*A + 2*E) + 2*B*E * (S*A + L * (A + 9*E))",
        "B*L*S * (8*A + 4*E) + 4*B*E * (S*A + L * (A + 9*E))",
    ),
    make=lambda cell, **made: _Decoder(cell["E"], cell["A"], **made),
    equation=_steps,
)

# Luong's attention


class _Luong(Operator):
    FUNCTION = "luong_attention"
    ABOUT = (
        "softmax(qᵀ Wᵧ k) V, method general, on [B, Lq, D]; local-m if the half width W < Lk, "
        "local-p around random positions if P=1"
    )
    MASKS = ("none", "padding")
    WEIGHTS = ("none", "per-head")
    OUTPUT = "B Lq Dv"
    FLOPS = (
        "pairs * (2*D + 2*Dv) + 2 * B * Lq * D**2",
        "pairs * (6*D + 4*Dv) + 4 * B * Lq * D**2",
    )
    HIDDEN = "B * Lq * Lk"
    BY_EQUATION = True

    def check(self, sizes: Mapping[str, int]) -> None:
        if sizes["P"] > 1:
            raise ValueError(f"P={sizes['P']}: P is 1 for local-p, else 0")

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        if _is_local(cell):
            keys, width = cell["Lk"], cell["W"]
            near = sum(
                max(0, min(keys, i + width + 1) - max(0, i - width)) for i in range(cell["Lq"])
            )
            pairs = pairs * near // (cell["Lq"] * keys)
        return super().flops(cell, pairs)

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
        options: dict[str, Any] = {
            "method": "general",
            "weight": inputs["weight"],
            "key_padding_mask": inputs.get("key_padding_mask"),
            "need_weights": cell.weights != "none",
        }
        if _is_local(cell):
            options |= {"window": "local-p" if cell["P"] else "local-m", "D": cell["W"]}
            options["positions"] = inputs.get("positions")
        return [inputs["query"], inputs["key"], inputs["value"]], options

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
    SIZES={"B": 8, "Lq": 64, "Lk": "Lq", "D": 256, "Dv": "D", "W": "Lk", "P": 0},
    SHAPES={"query": "B Lq D", "key": "B Lk D", "value": "B Lk Dv", "weight": "D D"},
    SCALES={"weight": "1 / D"},
)


def _general(cell: Cell, inputs: Inputs, weight: str = "weight") -> Tensor:
    query, memory = inputs["query"], inputs["memory"]
    return softmax_weights(query @ inputs[weight], memory, scale=1.0) @ memory


def _global(cell: Cell, inputs: Inputs) -> Tensor:
    own = {"linear_in.weight": inputs["linear_in.weight"].T}
    context = _general(cell, inputs | own, "linear_in.weight")
    joined = torch.cat((context, inputs["query"]), -1)
    return (joined @ inputs["linear_out.weight"].T).tanh()


_ON_A_MEMORY: dict[str, Any] = {
    "SIZES": {"B": 8, "Lq": 64, "Lk": "Lq", "D": 256},
    "SHAPES": {"query": "B Lq D", "memory": "B Lk D"},
    "OUTPUT": "B Lq D",
    # For scores of about 1, because they are not divided by √D.
    "parameter": lambda name, shape, draw: draw.normal(*shape, scale=1 / shape[-1]),
    "results": first,
}

LUONG_MODULE = Module(
    FUNCTION="nn.LuongAttention",
    ABOUT="softmax(qᵀ W m) M, method general, on q [B, Lq, D], memory [B, Lk, D]",
    FLOPS=("4 * pairs * D + 2 * B * Lq * D**2", "10 * pairs * D + 4 * B * Lq * D**2"),
    KEYWORDS={"need_weights": False},
    make=lambda cell, **made: LuongAttention(cell["D"], **made),
    equation=_general,
    **_ON_A_MEMORY,
)

GLOBAL_ATTENTION = Module(
    FUNCTION="nn.GlobalAttention",
    ABOUT="tanh(W [c; q]) with c = softmax((U q)ᵀ m) M, q [B, Lq, D], memory [B, Lk, D]",
    # Two projections, of D to D and of 2·D to D.
    FLOPS=("4 * pairs * D + 6 * B * Lq * D**2", "10 * pairs * D + 12 * B * Lq * D**2"),
    make=lambda cell, **made: GlobalAttention(cell["D"], attn_type="general", **made),
    equation=_global,
    **_ON_A_MEMORY,
)
