"""The attentions of recurrent translation: Bahdanau et al. 2015 and Luong et al. 2015."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.bench.ops._base import Cell, Draw, Inputs, Module, Operator
from fastattn.bench.ops.attention import (
    attn_mask,
    masked_softmax,
    softmax_weights,
    visible_keys,
    weighted,
)
from fastattn.nn import AdditiveAttention, BahdanauAttention, GlobalAttention, LuongAttention

# Additive attention


def _added(cell: Cell, x: Inputs) -> Any:
    scores = (x.query[:, :, None] + x.key[:, None] + x.bias).tanh() @ x.v
    mask = x.get("attn_mask")
    if cell.mask == "causal":
        mask = torch.ones(scores.shape[1:], dtype=torch.bool, device=x.v.device).tril()
    return weighted(cell, masked_softmax(scores, mask), x.value)


ADDITIVE = Operator(
    FUNCTION="additive_attention",
    ABOUT="softmax(v·tanh(q + k + b)) V",
    SIZES={"B": 8, "Lq": 64, "Lk": "Lq", "A": 256, "Dv": "A"},
    MASKS=("none", "causal", "padding", "bool", "bias"),
    WEIGHTS=("none", "per-head"),
    SHAPES="query: B Lq A; key: B Lk A; value: B Lk Dv; v: A; bias: A; out: B Lq Dv",
    OTHERS={"attn_mask": "B Lq Lk"},
    others=attn_mask,
    equation=_added,
    SCALES={"v": "A ** -0.5", "bias": 0.1},
    FLOPS="additive(pairs, A, Dv)",
)


def _without_masks(query: Tensor, keys: Tensor, v: Tensor, memory: Tensor) -> Tensor:
    return ((query[:, :, None] + keys[:, None]).tanh() @ v).softmax(-1) @ memory


ADDITIVE_MODULE = Module(
    FUNCTION="nn.AdditiveAttention",
    ABOUT="softmax(scale·tanh(q + m)) M, m the rows of the memory M",
    SIZES={"B": 8, "Lq": 64, "Lk": "Lq", "A": 256},
    SHAPES="query: B Lq A; memory: B Lk A",
    FLOPS="additive(pairs, A, A)",
    make=lambda cell, **made: AdditiveAttention(dim=cell["A"], **made),
    equation=lambda cell, x: _without_masks(x.query, x.memory, x.scale, x.memory),
)


def _bahdanau(width: int, units: int, **made: Any) -> BahdanauAttention:
    return BahdanauAttention(units, query_size=width, memory_size=width, **made)


BAHDANAU = Module(
    FUNCTION="nn.BahdanauAttention",
    ABOUT="softmax(v·tanh(W q + U m)) M, A units",
    SIZES={"B": 8, "Lq": 64, "Lk": "Lq", "E": 256, "A": 256},
    SHAPES="query: B Lq E; memory: B Lk E",
    FLOPS="additive(pairs, A, E) + products(B * (Lq + Lk) * E*A)",
    KEYWORDS={"need_weights": False},
    make=lambda cell, **made: _bahdanau(cell["E"], cell["A"], **made),
    parameter=lambda name, shape, draw: draw.normal(*shape, scale=shape[-1] ** -0.5),
    results=lambda found, dtype: found[0],
    equation=lambda cell, x: _without_masks(
        x.query @ x["query_layer.weight"].T, x.memory @ x["memory_layer.weight"].T, x.v, x.memory
    ),
)


class BAHDANAU_DECODER(Module):
    """L steps of a GRU, each with its own attention; the keys U memory are computed once.

    c_i = attention(W s_i-1, U memory),  s_i = GRU([y_i; c_i], s_i-1)
    """

    FUNCTION = "nn.BahdanauAttention, L steps"
    ABOUT = "L steps of a GRU cell with Bahdanau's attention to S rows, A units"
    SIZES = {"B": 1, "L": 20, "S": 40, "E": 256, "A": 256}
    SHAPES = "targets: B L E; memory: B S E; state: B E"
    FLOPS = "additive(B*L*S, A, E) + products(B*E * (S*A + L * (A + 9*E)))"

    def make(self, cell: Cell, **made: Any) -> nn.Module:
        width = cell["E"]
        gru = nn.GRUCell(2 * width, width, **made)
        return nn.ModuleDict({"attention": _bahdanau(width, cell["A"], **made), "cell": gru})

    def call(self, cell: Cell, module: Any, x: Inputs) -> Tensor:
        attention = module["attention"]
        keys = attention.memory_layer(x.memory)

        def context(state: Tensor) -> Tensor:
            return attention(state, x.memory, keys=keys, need_weights=False)[0]

        return self._steps(x, context, module["cell"])

    def equation(self, cell: Cell, x: Inputs) -> Tensor:
        project, keys = (x[f"attention.{name}_layer.weight"].T for name in ("query", "memory"))
        keys = x.memory @ keys
        gru = [x[f"cell.{name}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]

        def context(state: Tensor) -> Tensor:
            scores = (state[:, None] @ project + keys).tanh() @ x["attention.v"]  # [B, S]
            return (scores.softmax(-1)[:, None] @ x.memory)[:, 0]

        return self._steps(x, context, lambda y, state: torch.gru_cell(y, state, *gru))

    def _steps(self, x: Inputs, context: Any, gru: Any) -> Tensor:
        states = [x.state]
        for y in x.targets.unbind(1):
            states.append(gru(torch.cat([y, context(states[-1])], -1), states[-1]))
        return torch.stack(states[1:], 1)


# Luong's attention


class LUONG(Operator):
    FUNCTION = "luong_attention"
    ABOUT = "softmax(qᵀ Wᵧ k) V; local-m if the half width W < Lk; P=1: local-p, random positions"
    SIZES = {"B": 8, "Lq": 64, "Lk": "Lq", "D": 256, "Dv": "D", "W": "Lk", "P": 0}
    REFUSED = {"P > 1": "P={P} is more than 1"}  # local-p, or 0
    MASKS = ("none", "padding")
    WEIGHTS = ("none", "per-head")
    SHAPES = "query: B Lq D; key: B Lk D; value: B Lk Dv; weight: D D; out: B Lq Dv"
    OTHERS = {"key_padding_mask": "B Lk", "positions": "B Lq"}
    SCALES = {"weight": "1 / D"}
    FLOPS = "attention(pairs, D, Dv) + products(B*Lq * D**2)"
    KEYWORDS = {"method": "general"}
    BY_EQUATION = True

    def others(self, cell: Cell, draw: Draw) -> dict[str, Tensor]:
        found = {}
        if (visible := visible_keys(cell, draw)) is not None:
            found["key_padding_mask"] = ~visible[:, 0]
        if cell["P"]:
            found["positions"] = draw.uniform(0, cell["Lk"] - 1, cell["B"], cell["Lq"])
        return found

    def arguments(self, cell: Cell, x: Inputs) -> tuple[Sequence[Any], dict[str, Any]]:
        tensors, options = super().arguments(cell, x)
        if self._is_local(cell):
            options |= {"window": "local-p" if cell["P"] else "local-m", "D": cell["W"]}
        return tensors, options

    def equation(self, cell: Cell, x: Inputs) -> Any:
        seen = ~x.key_padding_mask[:, None] if "key_padding_mask" in x else None
        place = x.get("positions", torch.arange(x.query.shape[1], device=x.query.device))
        distance = torch.arange(x.key.shape[1], device=x.key.device) - place[..., None]
        if self._is_local(cell):
            near = distance.abs() <= cell["W"]
            seen = near if seen is None else near & seen
        weights = softmax_weights(x.query @ x.weight, x.key, seen, scale=1.0)
        if seen is not None:
            weights = weights.nan_to_num()  # 0 for fully masked rows
        if "positions" in x:
            weights = weights * torch.exp(-2 * (distance / cell["W"]) ** 2)
        return weighted(cell, weights, x.value)

    def _is_local(self, cell: Cell) -> bool:
        return cell["P"] > 0 or cell["W"] < max(cell["Lq"], cell["Lk"])


def _general(x: Inputs, weight: Tensor) -> Tensor:
    return softmax_weights(x.query @ weight, x.memory, scale=1.0) @ x.memory


_ON_A_MEMORY: dict[str, Any] = {
    "SIZES": {"B": 8, "Lq": 64, "Lk": "Lq", "D": 256},
    "SHAPES": "query: B Lq D; memory: B Lk D",
    # For scores of about 1, because they are not divided by √D.
    "parameter": lambda name, shape, draw: draw.normal(*shape, scale=1 / shape[-1]),
    "results": lambda found, dtype: found[0],
}

LUONG_MODULE = Module(
    FUNCTION="nn.LuongAttention",
    ABOUT="softmax(qᵀ W m) M, method general",
    FLOPS="attention(pairs, D, D) + products(B*Lq * D**2)",
    KEYWORDS={"need_weights": False},
    make=lambda cell, **made: LuongAttention(cell["D"], **made),
    equation=lambda cell, x: _general(x, x.weight),
    **_ON_A_MEMORY,
)

GLOBAL_ATTENTION = Module(
    FUNCTION="nn.GlobalAttention",
    ABOUT="tanh(W [c; q]) with c = softmax((U q)ᵀ m) M",
    FLOPS="attention(pairs, D, D) + products(3 * B*Lq * D**2)",  # of D to D, and of 2·D to D
    make=lambda cell, **made: GlobalAttention(cell["D"], attn_type="general", **made),
    equation=lambda cell, x: (
        torch.cat((_general(x, x["linear_in.weight"].T), x.query), -1) @ x["linear_out.weight"].T
    ).tanh(),
    **_ON_A_MEMORY,
)
