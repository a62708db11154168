"""`additive_attention`: scores v·tanh(q + k + b) (Bahdanau et al. 2015).

A visible pair costs 4·A for its score (add, tanh, multiply, add; a tanh counts as one) and 2·Dv
for its part of the output. In the backward it costs 8·A (the derivative of tanh, and its parts
of the gradients of query, key and v) and 4·Dv.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._attention import softmax_of, split_mask, visible_keys
from fastattn.bench.ops._base import Inputs, Operator, Outputs, Sizes, gradients

_HIDDEN_AT_ONCE = 1 << 25  # 256 MB in fp64, and the same for the gradients
_PER_SEQUENCE = ("query", "key", "value", "grad_out")


class Additive(Operator):
    FUNCTION = "additive_attention"
    ABOUT = "softmax(v·tanh(q + k + b)) V on [B, Lq, A], [B, Lk, A], [B, Lk, Dv]"
    SIZES: ClassVar[Sizes] = {"B": 8, "Lq": 64, "Lk": "Lq", "A": 256, "Dv": "A"}
    MASKS = ("none", "causal", "padding", "bool", "bias")
    WEIGHTS = ("none", "per-head")
    SHAPES: ClassVar = {
        "query": "B Lq A",
        "key": "B Lk A",
        "value": "B Lk Dv",
        "v": "A",
        "bias": "A",
    }
    OUTPUT = "B Lq Dv"

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        units, width = cell["A"], cell["Dv"]
        return pairs * (4 * units + 2 * width), pairs * (8 * units + 4 * width)

    def scale(self, cell: Cell, name: str) -> float:
        return {"v": cell["A"] ** -0.5, "bias": 0.1}.get(name, 1.0)

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        inputs = super().inputs(cell, draw)
        if cell.mask == "bias":
            inputs["attn_mask"] = draw.normal(cell["Lq"], cell["Lk"])
        elif cell.mask != "causal" and (visible := visible_keys(cell, draw)) is not None:
            inputs["attn_mask"] = visible
        return inputs

    def arguments(self, cell: Cell, inputs: Inputs) -> tuple[Sequence[Any], dict[str, Any]]:
        options = {
            "attn_mask": inputs.get("attn_mask"),
            "is_causal": cell.mask == "causal",
            "need_weights": cell.weights != "none",
        }
        return self.leaves(inputs), options

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        query, key, value, v, bias = self.leaves(inputs)
        hidden = query[:, :, None] + key[:, None] + bias  # [B, Lq, Lk, A]
        scores = hidden.tanh() @ v
        visible, added = split_mask(inputs)
        if cell.mask == "causal":
            visible = torch.ones(scores.shape[1:], dtype=torch.bool, device=v.device).tril()
        weights = softmax_of(scores, visible, added)
        out = weights @ value
        return (out,) if cell.weights == "none" else (out, weights)

    def expected(self, cell: Cell, inputs: Inputs) -> Inputs:
        """A few sequences at a time, to bound the memory of the hidden layers."""
        wanted = cell.passes != "fwd"
        step = max(1, _HIDDEN_AT_ONCE // (cell["Lq"] * cell["Lk"] * cell["A"]))
        leaves = self.fresh_leaves(cell, inputs)
        found: list[Outputs] = []
        for first in range(0, cell["B"], step):
            some = slice(first, first + step)
            one = {name: _of(name, x, some) for name, x in (inputs | leaves).items()}
            with torch.set_grad_enabled(wanted):
                outputs = self.plain(cell, one)
            if wanted:
                outputs[0].backward(one["grad_out"])
            found.append(tuple(x.detach() for x in outputs))
        names = ("out", "weights")
        results = {n: torch.cat(x) for n, x in zip(names, zip(*found, strict=True), strict=False)}
        return results | gradients(leaves)


def _of(name: str, x: Tensor, some: slice) -> Tensor:
    """The part of an input that belongs to these sequences."""
    per_sequence = name in _PER_SEQUENCE or (name == "attn_mask" and x.dim() == 3)
    return x[some] if per_sequence else x


OP = Additive()
