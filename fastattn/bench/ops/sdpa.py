"""`scaled_dot_product_attention`: O = softmax(Q Kᵀ / √D) V.

A visible pair costs 2·D for its score and 2·Dv for its part of the output. The backward has five
products, the forward two:

    forward   2·D + 2·Dv           (4·D  when Dv = D)
    backward  6·D + 4·Dv           (10·D when Dv = D)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from fastattn import masks
from fastattn._seed import draw_seed
from fastattn.backends.reference._dropout import dropout_keep, kept_scale
from fastattn.bench.cells import Cell, window_width
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._attention import (
    SampledHeads,
    distances,
    document_ids,
    softmax_of,
    split_mask,
    table_biases,
    visible_keys,
    with_weights,
)
from fastattn.bench.ops._base import Inputs, Outputs, Prepared, Sizes, gradients

_SCORES_AT_ONCE = 1 << 23  # 64 MB in fp64
_SOFTCAP = 2.0  # small compared to the scores, so that a wrong one is visible in 16 bits
_DROPOUT = 0.1


class Sdpa(SampledHeads):
    FUNCTION = "scaled_dot_product_attention"
    ABOUT = "softmax(Q Kᵀ / √D) V on [B, H, Lq, D], [B, Hkv, Lk, D], [B, Hkv, Lk, Dv]"
    TORCH = "F.scaled_dot_product_attention"
    SIZES: ClassVar[Sizes] = {"B": 1, "H": 8, "Hkv": "H", "Lq": 512, "Lk": "Lq", "D": 64, "Dv": "D"}
    MASKS = ("none", "causal", "padding", "bool", "bias", "documents")
    WEIGHTS = ("none", "average", "per-head")
    OPTIONS = ("none", "window", "softcap", "alibi", "sinks", "relative", "dropout", "learnable")
    SHAPES: ClassVar = {"query": "B H Lq D", "key": "B Hkv Lk D", "value": "B Hkv Lk Dv"}
    OUTPUT = "B H Lq Dv"
    JOINT = ("learnable", "relative")

    def check_option(self, cell: Cell) -> None:
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

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        pairs *= cell["H"]
        key, value = cell["D"], cell["Dv"]
        return pairs * (2 * key + 2 * value), pairs * (6 * key + 4 * value)

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        inputs, heads = super().inputs(cell, draw), cell["H"]
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
        return self.leaves(inputs), options | _own_options(cell, inputs)

    def leaf_names(self, cell: Cell) -> Sequence[str]:
        learned = {"learnable": ["attn_mask"], "relative": ["relative_bias"]}
        return [*self.SHAPES, *learned.get(cell.option, [])]

    def theirs(self, cell: Cell, inputs: Inputs) -> Prepared:
        query, key, value = self.leaves(inputs)
        options = _options(cell, inputs)

        def biases() -> Tensor:
            before = distances(cell["Lq"], cell["Lk"], query.device)
            return table_biases(inputs["relative_bias"], before)[None]  # the fused kernel wants 4-D

        if cell.option == "relative" and cell.passes == "fwd":
            options["attn_mask"] = biases()

        def forward() -> Outputs:
            if cell.option == "relative" and cell.passes != "fwd":  # the table has a gradient
                options["attn_mask"] = biases()
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

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        return with_weights(cell, *_attended(cell, inputs, slice(None)))

    def expected(self, cell: Cell, inputs: Inputs) -> Inputs:
        """A block of queries at a time, to bound the memory."""
        wanted = cell.passes != "fwd"
        leaves = self.fresh_leaves(cell, inputs)
        query = inputs["query"]
        step = max(1, _SCORES_AT_ONCE // (query.shape[0] * query.shape[1] * cell["Lk"]))
        outs, all_weights = [], []
        for first in range(0, cell["Lq"], step):
            rows = slice(first, min(first + step, cell["Lq"]))
            with torch.set_grad_enabled(wanted):
                out, weights = _attended(cell, inputs | leaves, rows)
                if wanted:
                    out.backward(inputs["grad_out"][:, :, rows])
            outs.append(out.detach())
            if cell.weights != "none":
                all_weights.append(weights.detach())
        results = {"out": torch.cat(outs, 2)}
        if cell.weights != "none":
            weights = torch.cat(all_weights, 2)
            results["weights"] = with_weights(cell, results["out"], weights)[1]
        return results | gradients(leaves)


def _options(cell: Cell, inputs: Inputs) -> dict[str, Any]:
    """The options that PyTorch's function has too."""
    return {
        "attn_mask": inputs.get("attn_mask"),
        "is_causal": cell.mask == "causal",
        "enable_gqa": cell["H"] != cell["Hkv"],
    }


def _own_options(cell: Cell, inputs: Inputs) -> dict[str, Any]:
    """The options that only the library's function has."""
    if cell.option == "window":
        return {"window": (window_width(cell), window_width(cell))}
    if cell.option == "softcap":
        return {"softcap": _SOFTCAP}
    if cell.option == "alibi":
        return {"alibi_slopes": inputs["alibi_slopes"].flatten()}
    if cell.option == "sinks":
        return {"sinks": inputs["sinks"].flatten()}
    if cell.option == "relative":
        return {"relative_bias": inputs["relative_bias"]}
    if cell.option == "dropout":
        return {"dropout_p": _DROPOUT, "generator": _first_seed()[1]}
    return {}


def _first_seed() -> tuple[torch.device, torch.Generator]:
    """The arguments of `draw_seed` in the first call with dropout, which is the one checked."""
    return torch.device("cpu"), torch.Generator().manual_seed(0)


def _attended(cell: Cell, inputs: Inputs, rows: slice) -> tuple[Tensor, Tensor]:
    """The output and the weights [B, H, rows, Lk] of some queries."""
    query, key, value = (inputs[name] for name in ("query", "key", "value"))
    group = query.shape[1] // key.shape[1]
    visible, bias = (_rows(x, rows) for x in split_mask(inputs))
    before = distances(cell["Lq"], cell["Lk"], query.device)[rows]
    if cell.mask == "causal":
        visible = before >= 0
    if cell.option == "window":
        near = before.abs() <= window_width(cell)
        visible = near if visible is None else visible & near
    if cell.option == "alibi":
        slopes = -inputs["alibi_slopes"] * before.abs()
        bias = slopes if bias is None else bias + slopes
    if cell.option == "relative":
        added = table_biases(inputs["relative_bias"], before)
        bias = added if bias is None else bias + added
    scores = query[:, :, rows] @ key.repeat_interleave(group, 1).mT * query.shape[-1] ** -0.5
    if cell.option == "softcap":
        scores = _SOFTCAP * (scores / _SOFTCAP).tanh()
    if cell.option == "sinks":  # one more key, whose value is 0
        scores = torch.cat([scores, inputs["sinks"].expand(*scores.shape[:3], 1)], -1)
        visible = visible if visible is None else pad(visible, (0, 1), value=True)
        bias = bias if bias is None else pad(bias, (0, 1))
    weights = softmax_of(scores, visible, bias).to(value.dtype)  # slopes are float32
    weights = weights[..., : cell["Lk"]]
    if cell.option == "dropout":
        weights = weights * inputs["kept"][:, :, rows] * kept_scale(_DROPOUT)
    return weights @ value.repeat_interleave(group, 1), weights


def _rows(mask: Tensor | None, rows: slice) -> Tensor | None:
    return mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]


OP = Sdpa()
