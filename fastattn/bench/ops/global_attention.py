"""`GlobalAttention`: OpenNMT's layer, Luong's attention with an output projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastattn.bench.cells import Cell
from fastattn.bench.ops._attention import softmax_of
from fastattn.bench.ops._base import Inputs, Outputs
from fastattn.bench.ops.luong_module import LuongModule
from fastattn.nn import GlobalAttention


class Global(LuongModule):
    FUNCTION = "nn.GlobalAttention"
    ABOUT = "tanh(W [c; q]) with c = softmax((U q)ᵀ m) M, q [B, Lq, D], memory [B, Lk, D]"

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        projections = 6 * cell["B"] * cell["Lq"] * cell["D"] ** 2  # D to D, and 2·D to D
        return 4 * pairs * cell["D"] + projections, 10 * pairs * cell["D"] + 2 * projections

    def make(self, cell: Cell, **made: Any) -> nn.Module:
        return GlobalAttention(cell["D"], attn_type="general", **made)

    def call(self, cell: Cell, module: nn.Module, inputs: Inputs) -> Tensor:
        out: Tensor = module(*self.leaves(inputs))[0]
        return out

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        query, memory = self.leaves(inputs)
        scores = query @ inputs["linear_in.weight"].T @ memory.mT
        context = softmax_of(scores) @ memory
        return ((torch.cat((context, query), -1) @ inputs["linear_out.weight"].T).tanh(),)


OP = Global()
