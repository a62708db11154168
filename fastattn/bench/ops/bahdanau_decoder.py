"""A decoder of Bahdanau et al. 2015, unrolled: L steps of a GRU, each with its own attention.

    c_i = attention(W s_i-1, U memory),  s_i = GRU([y_i; c_i], s_i-1)

A query needs the state after the context before it, so the steps follow one another. The keys
U memory are computed once.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastattn.bench.cells import Cell
from fastattn.bench.ops._base import Inputs, Outputs, Prepared, Sizes
from fastattn.bench.ops._module import Module
from fastattn.nn import BahdanauAttention


class _Decoder(nn.Module):
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


class BahdanauDecoder(Module):
    FUNCTION = "nn.BahdanauAttention, L steps"
    ABOUT = "L steps of a GRU cell with Bahdanau's attention to memory [B, S, E], A units"
    TORCH = "the same steps, the equation and torch's GRU cell"
    SIZES: ClassVar[Sizes] = {"B": 1, "L": 20, "S": 40, "E": 256, "A": 256}
    SHAPES: ClassVar = {"targets": "B L E", "memory": "B S E", "state": "B E"}
    OUTPUT = "B L E"

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        batch, steps, keys, width, units = (cell[key] for key in ("B", "L", "S", "E", "A"))
        scored = batch * steps * keys
        products = 2 * batch * width * (keys * units + steps * (units + 9 * width))
        forward = scored * (4 * units + 2 * width) + products
        return forward, scored * (8 * units + 4 * width) + 2 * products

    def make(self, cell: Cell, **made: Any) -> nn.Module:
        return _Decoder(cell["E"], cell["A"], **made)

    def theirs(self, cell: Cell, inputs: Inputs) -> Prepared:
        return lambda: self.plain(cell, inputs, torch.gru_cell), [
            inputs[name] for name in self.leaf_names(cell)
        ]

    def plain(self, cell: Cell, inputs: Inputs, gru_cell: Any = None) -> Outputs:
        targets, memory, state = self.leaves(inputs)
        query_layer, keys_layer = (
            inputs[f"attention.{name}_layer.weight"] for name in ("query", "memory")
        )
        gru = [inputs[f"cell.{name}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        keys, states = memory @ keys_layer.T, []
        v = inputs["attention.v"]
        for y in targets.unbind(1):
            scores = (state[:, None] @ query_layer.T + keys).tanh() @ v  # [B, S]
            context = (scores.softmax(-1)[:, None] @ memory)[:, 0]
            state = (gru_cell or _gru_cell)(torch.cat([y, context], -1), state, *gru)
            states.append(state)
        return (torch.stack(states, 1),)


def _gru_cell(
    x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor
) -> Tensor:
    """The equation of `nn.GRUCell`."""
    of_x, of_h = (x @ w_ih.T + b_ih).chunk(3, -1), (h @ w_hh.T + b_hh).chunk(3, -1)
    reset, update = ((a + b).sigmoid() for a, b in zip(of_x[:2], of_h[:2], strict=True))
    new = (of_x[2] + reset * of_h[2]).tanh()
    return new + update * (h - new)


OP = BahdanauDecoder()
