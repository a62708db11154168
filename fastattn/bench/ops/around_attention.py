"""Around attention: merged states, statistics, the most probable key, head networks, encodings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.bench.ops._base import Cell, Draw, Forward, Inputs, Module, Operator
from fastattn.bench.ops.attention import softmax_weights
from fastattn.nn import HeadNetwork, LearnedPositionalEncoding, SinusoidalPositionalEncoding


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

    def results(self, found: Any, dtype: torch.dtype) -> Tensor:
        return found[0]

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

    def results(self, found: Any, dtype: torch.dtype) -> Tensor:
        joined = [found.column_sums, found.entropy]
        joined += [] if found.top_values is None else [found.top_values.flatten(-2)]
        return torch.cat(joined, -1).to(dtype)

    def equation(self, cell: Cell, x: Inputs) -> Tensor:
        key = x.key.repeat_interleave(cell["H"] // cell["Hkv"], 1)
        seen = cell.visible(*self.sequences(cell)[0], key.device)
        weights = softmax_weights(x.query, key, seen)
        found = [weights.sum(-2), torch.special.entr(weights).sum(-1)]
        found += [weights.topk(cell["K"]).values.flatten(-2)] if cell["K"] else []
        return torch.cat(found, -1)


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
        wanted = draw.integers(0, cell["Lk"], cell["Lq"])
        toward = 4 * cell["D"] ** -0.5  # a score of about 4; other scores are about 0
        query = inputs.key[:, :, wanted] * toward + 0.1 * inputs.query
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

    def make(self, cell: Cell, **made: Any) -> HeadNetwork:
        return HeadNetwork(cell["H"], cell["D"], cell["F"], **made)

    def equation(self, cell: Cell, x: Inputs) -> Tensor:
        return (x.x @ x.weight1.mT + x.bias1[:, None]).relu() @ x.weight2.mT + x.bias2[:, None]

    def parameter(self, name: str, shape: tuple[int, ...], draw: Draw) -> Tensor:
        """Half of the units are far below 0 and half far above: near 0 rounding would decide."""
        drawn = super().parameter(name, shape, draw)
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
    make=lambda cell, **made: SinusoidalPositionalEncoding(cell["E"], scale="sqrt_dim"),
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
    make=lambda cell, **made: LearnedPositionalEncoding(cell["L"], cell["E"], **made),
    equation=lambda cell, x: x.x + x.weight,
    **_OF_ROWS,
)
