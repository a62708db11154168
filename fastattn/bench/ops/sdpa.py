"""`scaled_dot_product_attention`: O = softmax(Q Kᵀ / √D) V.

A query that may see a key costs 2·D for its score and 2·Dv for its share of the output; the
backward pass has five products where the forward has two:

    forward   2·D + 2·Dv           (4·D  when Dv = D)
    backward  6·D + 4·Dv           (10·D when Dv = D)
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._attention import attend, split_mask, visible_keys, with_weights
from fastattn.bench.ops._base import Inputs, Operator, Outputs, Prepared, Sizes

PAIRS_CHECKED = 1 << 26
_PAIRS_OF_FEW = 1 << 22
_SCORES_AT_ONCE = 1 << 23  # 64 MB in fp64


class Sdpa(Operator):
    FUNCTION = "scaled_dot_product_attention"
    ABOUT = "softmax(Q Kᵀ / √D) V on [B, H, Lq, D], [B, Hkv, Lk, D], [B, Hkv, Lk, Dv]"
    TORCH = "F.scaled_dot_product_attention"
    SIZES: ClassVar[Sizes] = {"B": 1, "H": 8, "Hkv": "H", "Lq": 512, "Lk": "Lq", "D": 64, "Dv": "D"}
    MASKS = ("none", "causal", "padding", "bool", "bias")
    WEIGHTS = ("none", "average", "per-head")
    LEAVES = ("query", "key", "value")

    def check(self, sizes: Mapping[str, int]) -> None:
        if sizes["H"] % sizes["Hkv"]:
            raise ValueError(f"H={sizes['H']} is not a multiple of Hkv={sizes['Hkv']}")

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        pairs *= cell["H"]
        key, value = cell["D"], cell["Dv"]
        return pairs * (2 * key + 2 * value), pairs * (6 * key + 4 * value)

    def elements(self, cell: Cell) -> tuple[int, int]:
        queries = cell["B"] * cell["H"] * cell["Lq"]
        keys = cell["B"] * cell["Hkv"] * cell["Lk"]
        return queries * cell["D"] + keys * (cell["D"] + cell["Dv"]), queries * cell["Dv"]

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        batch, heads, kv_heads = cell["B"], cell["H"], cell["Hkv"]
        inputs = {
            "query": draw.normal(batch, heads, cell["Lq"], cell["D"]),
            "key": draw.normal(batch, kv_heads, cell["Lk"], cell["D"]),
            "value": draw.normal(batch, kv_heads, cell["Lk"], cell["Dv"]),
            "grad_out": draw.normal(batch, heads, cell["Lq"], cell["Dv"]),
        }
        if cell.mask == "bias":  # as a learnt relative position bias has it
            inputs["attn_mask"] = draw.normal(heads, cell["Lq"], cell["Lk"])
        elif cell.mask != "causal" and (visible := visible_keys(cell, draw)) is not None:
            inputs["attn_mask"] = visible[:, None] if cell.mask == "padding" else visible
        return inputs

    def arguments(self, cell: Cell, inputs: Inputs) -> tuple[Sequence[Any], dict[str, Any]]:
        options = _options(cell, inputs) | {
            "need_weights": cell.weights != "none",
            "average_weights": cell.weights == "average",
        }
        return self.leaves(inputs), options

    def theirs(self, cell: Cell, inputs: Inputs) -> Prepared:
        query, key, value = self.leaves(inputs)
        options = _options(cell, inputs)
        return (
            lambda: (scaled_dot_product_attention(query, key, value, **options),),
            (query, key, value),
        )

    def why_not_theirs(self, cell: Cell) -> list[str]:
        if cell.weights == "none":
            return []
        return ["F.scaled_dot_product_attention returns no weights"]

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        query, key, value = self.leaves(inputs)
        group = query.shape[1] // key.shape[1]
        visible, bias = split_mask(inputs)
        if cell.mask == "causal":
            visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
        out, weights = attend(
            query,
            key.repeat_interleave(group, 1),
            value.repeat_interleave(group, 1),
            visible,
            bias,
        )
        return with_weights(cell, out, weights)

    def expected(self, cell: Cell, inputs: Inputs) -> Inputs:
        """A block of queries at a time, which bounds the memory."""
        leaves = [x.clone().requires_grad_(cell.passes != "fwd") for x in self.leaves(inputs)]
        query, key, value = leaves
        group = query.shape[1] // key.shape[1]
        all_visible, all_bias = split_mask(inputs)
        step = max(1, _SCORES_AT_ONCE // (query.shape[0] * query.shape[1] * cell["Lk"]))
        outs, all_weights = [], []
        for first in range(0, cell["Lq"], step):
            rows = slice(first, min(first + step, cell["Lq"]))
            visible, bias = _rows(all_visible, rows), _rows(all_bias, rows)
            if cell.mask == "causal":
                visible = torch.arange(cell["Lk"]) <= torch.arange(rows.start, rows.stop)[:, None]
            with torch.set_grad_enabled(cell.passes != "fwd"):
                out, weights = attend(
                    query[:, :, rows],
                    key.repeat_interleave(group, 1),
                    value.repeat_interleave(group, 1),
                    visible,
                    bias,
                )
                if cell.passes != "fwd":
                    out.backward(inputs["grad_out"][:, :, rows])
            outs.append(out.detach())
            if cell.weights != "none":
                all_weights.append(weights.detach())
        results = {"out": torch.cat(outs, 2)}
        if cell.weights != "none":
            weights = torch.cat(all_weights, 2)
            results["weights"] = with_weights(cell, results["out"], weights)[1]
        for name, leaf in zip(self.LEAVES, leaves, strict=True):
            if leaf.grad is not None:
                results[f"grad_{name}"] = leaf.grad
        return results

    def parts(self, cell: Cell, seed: int, *, few: bool = False) -> list[tuple[int, ...]]:
        """Attention of one (sequence, key head) does not depend on the others: a sample of them.

        Where the weights are averaged over the heads the sample is of whole sequences.
        """
        pairs = cell["B"] * cell["H"] * cell["Lq"] * cell["Lk"]
        most = _PAIRS_OF_FEW if few else PAIRS_CHECKED
        if pairs <= most:
            return [()]
        heads = [()] if cell.weights == "average" else [(h,) for h in range(cell["Hkv"])]
        units = [(b, *h) for b in range(cell["B"]) for h in heads]
        count = max(1, most * len(units) // pairs)
        return sorted(random.Random(seed).sample(units, count))

    def part(self, cell: Cell, name: str, x: Tensor, where: tuple[int, ...]) -> Tensor:
        """Broadcast dimensions stay."""
        if not where:
            return x
        if name == "attn_mask":
            x = x.expand((*[1] * (4 - x.dim()), *x.shape)) if x.dim() < 4 else x
        b = where[0] if x.shape[0] > 1 else 0
        x = x[b : b + 1]
        if len(where) == 1 or x.dim() < 4 or x.shape[1] == 1:
            return x
        group = x.shape[1] // cell["Hkv"]
        return x[:, where[1] * group : (where[1] + 1) * group]

    def coverage(self, cell: Cell, parts: list[tuple[int, ...]]) -> str:
        if parts == [()]:
            return "all"
        if len(parts[0]) == 1:
            return f"{len(parts)} of {cell['B']} sequences"
        return f"{len(parts)} of {cell['B'] * cell['Hkv']} (sequence, head)"


def _options(cell: Cell, inputs: Inputs) -> dict[str, Any]:
    """What PyTorch's function and the library's have in common."""
    return {
        "attn_mask": inputs.get("attn_mask"),
        "is_causal": cell.mask == "causal",
        "enable_gqa": cell["H"] != cell["Hkv"],
    }


def _rows(mask: Tensor | None, rows: slice) -> Tensor | None:
    return mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]


OP = Sdpa()
