"""`scaled_dot_product_attention`: O = softmax(Q Kᵀ / √D) V."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fastattn import masks
from fastattn._seed import draw_seed
from fastattn.backends.reference import dropout_keep
from fastattn.bench.cells import Cell, window_width
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._attention import (
    SampledHeads,
    attend,
    biases,
    document_ids,
    visible_keys,
)
from fastattn.bench.ops._base import Inputs, Outputs, Prepared

_SCORES_AT_ONCE = 1 << 23  # 64 MB in fp64
_SOFTCAP = 2.0  # small compared to the scores, so that a wrong one is visible in 16 bits
_DROPOUT = 0.1


class _Sdpa(SampledHeads):
    FUNCTION = "scaled_dot_product_attention"
    ABOUT = "softmax(Q Kᵀ / √D) V on [B, H, Lq, D], [B, Hkv, Lk, D], [B, Hkv, Lk, Dv]"
    TORCH = "F.scaled_dot_product_attention"
    MASKS = ("none", "causal", "padding", "bool", "bias", "documents")
    WEIGHTS = ("none", "average", "per-head")
    OPTIONS = ("none", "window", "softcap", "alibi", "sinks", "relative", "dropout", "learnable")
    OUTPUT = "B H Lq Dv"
    FLOPS = "attention(pairs * H, D, Dv)"
    JOINT = ("learnable", "relative")
    BLOCKED = -2

    def check(self, cell: Cell) -> None:
        super().check(cell)
        if cell.option == "window" and cell.mask not in ("none", "causal"):
            raise ValueError(
                f"option=window: with a {cell.mask} mask the visible pairs cannot be counted"
            )
        if cell.option == "window" and cell["Lq"] > cell["Lk"]:
            raise ValueError(f"option=window: Lq={cell['Lq']} is more than Lk={cell['Lk']}")
        if cell.option == "learnable" and cell.mask != "bias":
            raise ValueError("option=learnable: needs mask=bias")
        if cell.option == "dropout" and cell.device != "cpu":
            raise ValueError("option=dropout: the check needs the seed of a CPU generator")

    def others(self, cell: Cell, draw: Draw) -> Inputs:
        inputs, heads = {}, cell["H"]
        if cell.mask == "bias":  # the shape of a learned relative position bias
            inputs["attn_mask"] = draw.normal(heads, cell["Lq"], cell["Lk"])
        elif cell.mask != "causal" and (visible := visible_keys(cell, draw)) is not None:
            inputs["attn_mask"] = visible[:, None] if cell.mask == "padding" else visible
        if cell.option == "alibi":
            powers = torch.arange(1, heads + 1) * (-8 / heads)
            inputs["alibi_slopes"] = powers.exp2().view(1, heads, 1, 1)
        elif cell.option == "sinks":  # of the size of lse, so that a wrong one shows
            inputs["sinks"] = draw.normal(1, heads, 1, 1) + math.log(cell["Lk"])
        elif cell.option == "relative":
            inputs["relative_bias"] = draw.normal(heads, 2 * max(cell["Lq"], cell["Lk"]) - 1)
        elif cell.option == "dropout":
            scores = (cell["B"], heads, cell["Lq"], cell["Lk"])
            inputs["kept"] = dropout_keep(scores, _DROPOUT, draw_seed(*_first_seed()))
        return inputs

    def unread(self, cell: Cell) -> int:
        if cell.option != "window":
            return 0
        reached = cell["Lq"] + (0 if cell.mask == "causal" else window_width(cell))
        beyond = max(0, cell["Lk"] - reached)
        return cell["B"] * cell["Hkv"] * beyond * (cell["D"] + cell["Dv"])

    def arguments(self, cell: Cell, inputs: Inputs) -> tuple[Sequence[Any], dict[str, Any]]:
        options = _options(cell, inputs) | {
            "need_weights": cell.weights != "none",
            "average_weights": cell.weights == "average",
        }
        if cell.mask == "documents":
            ids = (document_ids(cell[key]).to(cell.device) for key in ("Lq", "Lk"))
            options |= {"attn_mask": None, "mask": masks.document(*ids)}
        if cell.option == "window":
            options["window"] = (window_width(cell), window_width(cell))
        elif cell.option == "softcap":
            options["softcap"] = _SOFTCAP
        elif cell.option == "dropout":
            options |= {"dropout_p": _DROPOUT, "generator": _first_seed()[1]}
        elif cell.option == "relative":
            options["relative_bias"] = inputs["relative_bias"]
        elif cell.option in ("alibi", "sinks"):
            name = "alibi_slopes" if cell.option == "alibi" else "sinks"
            options[name] = inputs[name].flatten()
        return self.leaves(inputs), options

    def leaf_names(self, cell: Cell) -> Sequence[str]:
        learned = {"learnable": ["attn_mask"], "relative": ["relative_bias"]}
        return [*self.SHAPES, *learned.get(cell.option, [])]

    def theirs(self, cell: Cell, inputs: Inputs) -> Prepared:
        query, key, value = self.leaves(inputs)
        options = _options(cell, inputs)

        def of_table() -> Tensor:
            return biases(inputs["relative_bias"], cell["Lq"], cell["Lk"])

        if cell.option == "relative" and cell.passes == "fwd":
            options["attn_mask"] = of_table()

        def forward() -> Outputs:
            if cell.option == "relative" and cell.passes != "fwd":  # the table has a gradient
                options["attn_mask"] = of_table()
            return (scaled_dot_product_attention(query, key, value, **options),)

        return forward, [inputs[name] for name in self.leaf_names(cell)]

    def why_not_theirs(self, cell: Cell) -> list[str]:
        reasons = []
        if cell.weights != "none":
            reasons.append("F.scaled_dot_product_attention returns no weights")
        if cell.option in ("window", "softcap", "alibi", "sinks"):
            reasons.append(f"F.scaled_dot_product_attention has no {cell.option}")
        if cell.option == "relative" and cell.mask != "none":
            reasons.append("F.scaled_dot_product_attention has one mask")
        if cell.option == "dropout":
            reasons.append("PyTorch drops other weights, so its result cannot be checked")
        return reasons

    def equation(self, cell: Cell, inputs: Inputs, first: int = 0) -> Outputs:
        """The definition, for the queries from the one at position `first` on."""
        slopes, table, sinks = map(inputs.get, ("alibi_slopes", "relative_bias", "sinks"))
        width = window_width(cell) if cell.option == "window" else -1
        query, key, value = self.leaves(inputs)
        out, weights = attend(
            query,
            key,
            value,
            inputs.get("attn_mask"),
            None if slopes is None else slopes.flatten(1),
            given={
                "keep": inputs.get("kept"),
                "sinks": None if sinks is None else sinks.flatten(1),
                "relative_bias": None if table is None else table[None],
            },
            offset=first,
            window_left=width,
            window_right=0 if cell.mask == "causal" else width,
            softcap=_SOFTCAP if cell.option == "softcap" else 0.0,
            dropout_p=_DROPOUT if cell.option == "dropout" else 0.0,
        )
        if cell.weights == "none":
            return (out,)
        return out, weights.mean(1) if cell.weights == "average" else weights

    def exact(self, cell: Cell, inputs: Inputs, block: slice) -> Prepared:
        equation = functools.partial(self.equation, cell, inputs, block.start)
        return self.prepared(cell, inputs, equation)

    def blocks(self, cell: Cell, inputs: Inputs) -> Sequence[slice]:
        """Blocks of queries."""
        batch, heads, rows, _ = inputs["query"].shape
        step = max(1, _SCORES_AT_ONCE // (batch * heads * cell["Lk"]))
        return [slice(n, n + step) for n in range(0, rows, step)]

    def within(self, cell: Cell, name: str, x: Tensor, block: slice) -> Tensor:
        has_rows = name in ("query", "grad_out", "attn_mask", "kept") and x.shape[-2] > 1
        return x[..., block, :] if has_rows else x


def _options(cell: Cell, inputs: Inputs) -> dict[str, Any]:
    """The options that PyTorch's function has too."""
    return {
        "attn_mask": inputs.get("attn_mask"),
        "is_causal": cell.mask == "causal",
        "enable_gqa": cell["H"] != cell["Hkv"],
    }


def _first_seed() -> tuple[torch.device, torch.Generator]:
    """The arguments of `draw_seed` in the first call with dropout, which is the one checked."""
    return torch.device("cpu"), torch.Generator().manual_seed(0)


SDPA = _Sdpa(
    SIZES={"B": 1, "H": 8, "Hkv": "H", "Lq": 512, "Lk": "Lq", "D": 64, "Dv": "D"},
    SHAPES={"query": "B H Lq D", "key": "B Hkv Lk D", "value": "B Hkv Lk Dv"},
)
