"""Additive, Luong's and hard attention; merged states, statistics, head networks, encodings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fastattn.nn
from fastattn.bench.ops import attention
from fastattn.bench.ops._base import Cell, Draw, Forward, Inputs, Module, Operator
from fastattn.bench.ops.attention import masked_softmax, softmax_weights, visible_keys, weighted


class MERGE_STATES(Operator):
    """It is memory bound: it reads two outputs and writes one, with 4 operations per element."""

    FUNCTION = "merge_states"
    ABOUT = "(e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b)"
    SIZES = {"B": 8, "H": 8, "L": 512, "D": 64}
    SHAPES = "out_a: B H L D; lse_a: B H L; out_b: B H L D; lse_b: B H L"
    FLOPS = "products(2 * B*H*L*D)"
    BY_EQUATION = True

    def equation(self, cell: Cell, x: Inputs) -> Tensor:
        a, b = torch.stack([x.lse_a, x.lse_b]).softmax(0)[..., None]
        return (a * x.out_a + b * x.out_b).to(x.out_a.dtype)

    def results(self, merged: Any, dtype: torch.dtype) -> Tensor:
        return merged[0]

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        inputs = super().inputs(cell, draw)
        for name in ("lse_a", "lse_b"):
            inputs[name] = inputs[name].to(torch.promote_types(draw.dtype, torch.float32))
        return inputs


class ATTENTION_STATS(Operator):
    """The cost counts the scores, Q Kᵀ; the sums are O(Lq·Lk) and not counted.

    The backward is not timed, because it stores the weights, which the function exists to avoid.
    """

    FUNCTION = "attention_stats"
    ABOUT = "column sums, entropies, the K largest weights a query of softmax(Q Kᵀ / √D)"
    SIZES = {"B": 1, "H": 8, "Hkv": "H", "Lq": 512, "Lk": "Lq", "D": 64, "K": 0}
    REFUSED = {"K > Lk": "K={K} is more than Lk={Lk}"}
    MASKS = ("none", "causal")
    PASSES = ("fwd",)
    SHAPES = "query: B H Lq D; key: B Hkv Lk D; out: B H Lk+Lq*(1+K)"  # joined
    FLOPS = "attention(pairs * H, D, 0)"
    KEYWORDS = {"top_k": lambda cell: cell["K"]}

    def results(self, stats: Any, dtype: torch.dtype) -> Tensor:
        top = [] if stats.top_values is None else [stats.top_values.flatten(-2)]
        return torch.cat([stats.column_sums, stats.entropy, *top], -1).to(dtype)

    def equation(self, cell: Cell, x: Inputs) -> Tensor:
        key = x.key.repeat_interleave(cell["H"] // cell["Hkv"], 1)
        seen = cell.visible(*self.sequences(cell)[0], key.device)
        weights = softmax_weights(x.query, key, seen)
        top = [weights.topk(cell["K"]).values.flatten(-2)] if cell["K"] else []
        return torch.cat([weights.sum(-2), torch.special.entr(weights).sum(-1), *top], -1)


class HARD(Operator):
    """The most probable key instead of a random one, because two computations must agree.

    Every query is close to one key, so that rounding does not decide. The backward costs as much as
    soft attention's, without the product with the values, whose rows are gathered.
    """

    FUNCTION = "hard_attention"
    ABOUT = "V of the key with the largest q·k, straight_through"
    SIZES = {"B": 1, "H": 8, "Lq": 512, "Lk": "Lq", "D": 64, "Dv": "D"}
    SHAPES = "query: B H Lq D; key: B H Lk D; value: B H Lk Dv; out: B H Lq Dv"
    FLOPS = "attention(pairs * H, D, 0) + backward * 2 * pairs * H * Dv"
    KEYWORDS = {"estimator": "straight_through", "deterministic": True}

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        inputs = super().inputs(cell, draw)
        nearest_key = draw.integers(0, cell["Lk"], cell["Lq"])
        gain = 4 * cell["D"] ** -0.5  # a scaled score of about 4 there, of about 0 elsewhere
        query = inputs.key[:, :, nearest_key] * gain + 0.1 * inputs.query
        inputs["query"] = query.to(draw.dtype)
        return inputs

    def equation(self, cell: Cell, x: Inputs) -> Tensor:
        weights = softmax_weights(x.query, x.key)
        chosen = weights.argmax(-1, keepdim=True)
        out = x.value.gather(-2, chosen.expand(*chosen.shape[:-1], cell["Dv"]))
        if not torch.is_grad_enabled():
            return out
        mean = weights @ x.value.detach()
        return out + (mean - mean.detach())  # the value of `out`, the derivative of `mean`


class HEAD_NETWORK(Module):
    FUNCTION = "nn.HeadNetwork"
    ABOUT = "W₂ relu(W₁ x + b₁) + b₂ of each head, F hidden units"
    SIZES = {"B": 8, "H": 8, "L": 128, "D": 64, "F": 64}
    SHAPES = "x: B H L D"
    FLOPS = "products(2 * B*H*L*D*F)"

    def make(self, cell: Cell, **made: Any) -> fastattn.nn.HeadNetwork:
        return fastattn.nn.HeadNetwork(cell["H"], cell["D"], cell["F"], **made)

    def equation(self, cell: Cell, x: Inputs) -> Tensor:
        return (x.x @ x.weight1.mT + x.bias1[:, None]).relu() @ x.weight2.mT + x.bias2[:, None]

    def draw_parameter(self, name: str, shape: tuple[int, ...], draw: Draw) -> Tensor:
        """Half of the units are far below 0 and half far above: near 0 rounding would decide."""
        drawn = super().draw_parameter(name, shape, draw)
        return drawn + 8 * (2 * (torch.arange(shape[-1]) % 2) - 1) if name == "bias1" else drawn


# Position encodings


def _table(cell: Cell, like: Tensor) -> Tensor:
    """[L, E], with the sine and the cosine of a frequency in adjacent columns."""
    halves = torch.arange(0, cell["E"], 2, dtype=torch.float64, device=like.device)
    position = torch.arange(cell["L"], dtype=torch.float64, device=like.device)[:, None]
    angle = position * 10000.0 ** (-halves / cell["E"])
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, : cell["E"]].to(like.dtype)


def _added(cell: Cell, x: Inputs) -> Forward:
    rows, table = x.x, _table(cell, x.x)
    return lambda: rows * cell["E"] ** 0.5 + table


_OF_ROWS = {"SIZES": {"B": 1, "L": 512, "E": 512}, "SHAPES": "x: B L E"}
_SINUSOIDAL = _OF_ROWS | {
    "ABOUT": "x·√E + PE(position)",
    "FLOPS": "(2 - backward) * B*L*E",
    "eager": _added,
}

SINUSOIDAL = Operator(
    FUNCTION="sinusoidal_encoding",
    KEYWORDS={"scale": lambda cell: cell["E"] ** 0.5},
    **_SINUSOIDAL,
)
POSITIONAL = Module(
    FUNCTION="nn.SinusoidalPositionalEncoding",
    make=lambda cell, **made: fastattn.nn.SinusoidalPositionalEncoding(cell["E"], scale="sqrt_dim"),
    **_SINUSOIDAL,
)
SINUSOIDAL_TABLE = Operator(
    FUNCTION="sinusoidal_table",
    ABOUT="PE(0), ..., PE(L − 1)",
    SIZES={"L": 512, "E": 512},
    PASSES=("fwd",),
    SHAPES="out: L E",
    FLOPS="L*E",  # a sine counts as one operation
    # The table has no input; this tensor carries dtype and device.
    others=lambda cell, draw: {"like": draw.normal(0)},
    arguments=lambda cell, x: (
        [cell["L"], cell["E"]],
        {"dtype": x.like.dtype, "device": x.like.device},
    ),
    equation=lambda cell, x: _table(cell, x.like),
)
LEARNED = Module(
    FUNCTION="nn.LearnedPositionalEncoding",
    ABOUT="x + weight[position], L learned rows",
    FLOPS="B*L*E",
    make=lambda cell, **made: fastattn.nn.LearnedPositionalEncoding(cell["L"], cell["E"], **made),
    equation=lambda cell, x: x.x + x.weight,
    **_OF_ROWS,
)


# Additive attention (Bahdanau et al. 2015)


def _additive(cell: Cell, x: Inputs) -> Any:
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
    others=attention.attn_mask,
    equation=_additive,
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
    make=lambda cell, **made: fastattn.nn.AdditiveAttention(dim=cell["A"], **made),
    equation=lambda cell, x: _without_masks(x.query, x.memory, x.scale, x.memory),
)


def _bahdanau(width: int, units: int, **made: Any) -> fastattn.nn.BahdanauAttention:
    return fastattn.nn.BahdanauAttention(units, query_size=width, memory_size=width, **made)


BAHDANAU = Module(
    FUNCTION="nn.BahdanauAttention",
    ABOUT="softmax(v·tanh(W q + U m)) M, A units",
    SIZES={"B": 8, "Lq": 64, "Lk": "Lq", "E": 256, "A": 256},
    SHAPES="query: B Lq E; memory: B Lk E",
    FLOPS="additive(pairs, A, E) + products(B * (Lq + Lk) * E*A)",
    KEYWORDS={"need_weights": False},
    make=lambda cell, **made: _bahdanau(cell["E"], cell["A"], **made),
    parameter=lambda name, shape, draw: draw.normal(*shape, scale=shape[-1] ** -0.5),
    results=lambda outputs, dtype: outputs[0],
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
        layer = module["attention"]
        keys = layer.memory_layer(x.memory)

        def context(state: Tensor) -> Tensor:
            return layer(state, x.memory, keys=keys, need_weights=False)[0]

        return self._steps(x, context, module["cell"])

    def equation(self, cell: Cell, x: Inputs) -> Tensor:
        to_query, to_keys = (x[f"attention.{name}_layer.weight"].T for name in ("query", "memory"))
        keys = x.memory @ to_keys
        gru = [x[f"cell.{name}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]

        def context(state: Tensor) -> Tensor:
            scores = (state[:, None] @ to_query + keys).tanh() @ x["attention.v"]  # [B, S]
            return (scores.softmax(-1)[:, None] @ x.memory)[:, 0]

        return self._steps(x, context, lambda y, state: torch.gru_cell(y, state, *gru))

    def _steps(self, x: Inputs, context: Any, gru: Any) -> Tensor:
        states = [x.state]
        for y in x.targets.unbind(1):
            states.append(gru(torch.cat([y, context(states[-1])], -1), states[-1]))
        return torch.stack(states[1:], 1)


# Luong's attention (Luong et al. 2015)


class LUONG(Operator):
    FUNCTION = "luong_attention"
    ABOUT = "softmax(qᵀ Wₐ k) V; local-m if the half width W is less than Lq or Lk; P=1: local-p"
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
        inputs = {}
        if (visible := visible_keys(cell, draw)) is not None:
            inputs["key_padding_mask"] = ~visible[:, 0]
        if cell["P"]:
            places = torch.rand(cell["B"], cell["Lq"], generator=draw.generator)
            inputs["positions"] = (places * (cell["Lk"] - 1)).to(draw.dtype)
        return inputs

    def arguments(self, cell: Cell, x: Inputs) -> tuple[Sequence[Any], dict[str, Any]]:
        tensors, options = super().arguments(cell, x)
        if self._is_local(cell):
            options |= {"window": "local-p" if cell["P"] else "local-m", "D": cell["W"]}
        return tensors, options

    def equation(self, cell: Cell, x: Inputs) -> Any:
        seen = ~x.key_padding_mask[:, None] if "key_padding_mask" in x else None
        positions = x.get("positions", torch.arange(x.query.shape[1], device=x.query.device))
        distance = torch.arange(x.key.shape[1], device=x.key.device) - positions[..., None]
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
    "results": lambda outputs, dtype: outputs[0],
}

LUONG_MODULE = Module(
    FUNCTION="nn.LuongAttention",
    ABOUT="softmax(qᵀ W m) M, method general",
    FLOPS="attention(pairs, D, D) + products(B*Lq * D**2)",
    KEYWORDS={"need_weights": False},
    make=lambda cell, **made: fastattn.nn.LuongAttention(cell["D"], **made),
    equation=lambda cell, x: _general(x, x.weight),
    **_ON_A_MEMORY,
)

GLOBAL_ATTENTION = Module(
    FUNCTION="nn.GlobalAttention",
    ABOUT="tanh(W [c; q]) with c = softmax((U q)ᵀ m) M",
    FLOPS="attention(pairs, D, D) + products(3 * B*Lq * D**2)",  # of D to D, and of 2·D to D
    make=lambda cell, **made: fastattn.nn.GlobalAttention(cell["D"], attn_type="general", **made),
    equation=lambda cell, x: (
        torch.cat((_general(x, x["linear_in.weight"].T), x.query), -1) @ x["linear_out.weight"].T
    ).tanh(),
    **_ON_A_MEMORY,
)
