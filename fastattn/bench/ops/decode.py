"""`decode_attention`: attention of the newest tokens to a cache of keys and values; no gradient.

A paged cache has its pages in random order. torch has no paged caches and reads a contiguous one.
The newest tokens are at the last positions; torch gets masks and biases of all pairs. With the
options int8 and fp8 the cache is quantised; its rows are exact in bf16, which torch gets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fastattn import masks
from fastattn.bench.cells import DTYPE_BYTES, Cell, keys_of, prefix_length, window_width
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._attention import (
    SampledHeads,
    attend,
    distances,
    document_ids,
    t5_biases,
    visible_to_last,
)
from fastattn.bench.ops._base import Inputs, Outputs, Prepared, Sizes
from fastattn.bias import T5

# The dtype and the scale of a quantised cache.
_QUANTISED = {"int8": (torch.int8, 2.0**-5), "fp8": (torch.float8_e4m3fn, 1.0)}


class Decode(SampledHeads):
    FUNCTION = "decode_attention"
    ABOUT = (
        "the newest Lq tokens and a full cache of Lk, [B, H, Lq, D], [B, Hkv, Lk, D]; with P, in "
        "pages of P keys"
    )
    TORCH = "F.scaled_dot_product_attention on the contiguous cache"
    SIZES: ClassVar[Sizes] = {"B": 1, "H": 32, "Hkv": 8, "Lq": 1, "Lk": 4096, "D": 128, "P": 0}
    MASKS = ("none", "causal", "documents", "prefix", "window")
    OPTIONS = ("none", "t5", *_QUANTISED)
    JOINT = ("t5",)
    PASSES = ("fwd",)
    TINY: ClassVar[Mapping[str, int]] = {**SampledHeads.TINY, "P": 1}
    SHAPES: ClassVar = {"query": "B H Lq D", "key": "B Hkv Lk D", "value": "B Hkv Lk D"}
    OUTPUT = "B H Lq D"

    def check(self, sizes: Mapping[str, int]) -> None:
        super().check(sizes)
        if sizes["P"] and sizes["Lk"] % sizes["P"]:
            raise ValueError(f"Lk={sizes['Lk']} is not a multiple of P={sizes['P']}")

    def check_option(self, cell: Cell) -> None:
        if cell.mask != "none" and cell["Lq"] > cell["Lk"]:
            raise ValueError(f"mask={cell.mask}: Lq={cell['Lq']} is more than Lk={cell['Lk']}")

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        pairs = cell["B"] * sum(map(len, _keys(cell)))
        return 4 * pairs * cell["H"] * cell["D"], 0

    def items(self, cell: Cell) -> tuple[float, str]:
        return cell["B"] * cell["Lq"], "tokens"

    def elements(self, cell: Cell) -> tuple[int, int]:
        queries = cell["B"] * cell["H"] * cell["Lq"] * cell["D"]
        return queries + _cached(cell, cell["Lk"]), queries

    def unread(self, cell: Cell) -> int:
        seen = _keys(cell)
        return _cached(cell, cell["Lk"] - (seen[-1].stop - seen[0].start))

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        inputs = super().inputs(cell, draw)
        if cell.option in _QUANTISED:
            for name in ("key", "value"):
                numbers, scale = _numbers(cell, inputs[name]), _QUANTISED[cell.option][1]
                inputs[name] = numbers.to(draw.dtype) * scale
        if cell.option == "t5":
            inputs["buckets"] = draw.normal(32, cell["H"])
        if cell["P"]:
            pages = cell["B"] * cell["Lk"] // cell["P"]
            order = torch.randperm(pages, generator=draw.generator)
            inputs["block_table"] = order.view(cell["B"], -1).int()
        return inputs

    def arguments(self, cell: Cell, inputs: Inputs) -> tuple[Sequence[Any], dict[str, Any]]:
        query, key, value = self.leaves(inputs)
        options: dict[str, Any] = {"mask": _mask(cell), "is_causal": cell.mask == "causal"}
        if cell.option == "t5":
            options["relative_bias"] = T5(inputs["buckets"], bidirectional=False)
        if cell.option in _QUANTISED:
            key, value = (_numbers(cell, x) for x in (key, value))
        if cell["P"]:
            table = options["block_table"] = inputs["block_table"]
            key, value = (_in_pages(x, table, cell["P"]) for x in (key, value))
        if cell.option in _QUANTISED:
            for name in ("key_scales", "value_scales"):
                scale = _QUANTISED[cell.option][1]
                options[name] = torch.full(key.shape[:3], scale, device=key.device)
        return [query, key, value], options

    def theirs(self, cell: Cell, inputs: Inputs) -> Prepared:
        query, key, value = leaves = self.leaves(inputs)
        grouped = cell["H"] != cell["Hkv"]
        if cell.mask == "causal" and cell["Lq"] == cell["Lk"] and cell.option != "t5":
            return lambda: (
                scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped),
            ), leaves
        visible, bias = _pairs(cell, inputs)
        # Of three dimensions, PyTorch's fused kernel would refuse it.
        mask = bias[None] if visible is None and bias is not None else visible
        return lambda: (
            scaled_dot_product_attention(query, key, value, mask, enable_gqa=grouped),
        ), leaves

    def why_not_theirs(self, cell: Cell) -> list[str]:
        both = cell.option == "t5" and cell.mask != "none"
        return ["F.scaled_dot_product_attention has one mask"] if both else []

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        query, key, value = self.leaves(inputs)
        return attend(query, key, value, *_pairs(cell, inputs))[:1]


def _cached(cell: Cell, rows: int) -> int:
    """The elements of the cell's dtype in the memory of so many cached rows of each head."""
    row = 2 * cell["D"]
    if cell.option in _QUANTISED:
        row = (row + 2 * 4) // DTYPE_BYTES[cell.dtype]  # with two scales
    return cell["B"] * cell["Hkv"] * rows * row


def _numbers(cell: Cell, rows: Tensor) -> Tensor:
    """The numbers of a quantised cache of these rows."""
    dtype, scale = _QUANTISED[cell.option]
    x = rows / scale
    return (x.round().clamp(-127, 127) if dtype == torch.int8 else x).to(dtype)


def _keys(cell: Cell) -> list[range]:
    """The visible keys of each of the newest tokens."""
    last = cell["Lk"]
    return [keys_of(cell, max(at, 0), last) for at in range(last - cell["Lq"], last)]


def _pairs(cell: Cell, inputs: Inputs) -> tuple[Tensor | None, Tensor | None]:
    """The visible pairs [Lq, Lk] and the bias of all pairs [H, Lq, Lk], or None."""
    queries, keys, bias = cell["Lq"], cell["Lk"], None
    device = inputs["query"].device
    if cell.option == "t5":
        bias = t5_biases(inputs["buckets"], distances(queries, keys, device, keys - queries))
    return visible_to_last(cell, queries, keys, device), bias


def _mask(cell: Cell) -> masks.Mask | None:
    """The mask of `fastattn.masks` of the cell."""
    if cell.mask == "documents":
        return masks.document(document_ids(cell["Lk"]).to(cell.device))
    if cell.mask == "prefix":
        return masks.prefix_lm(prefix_length(cell["Lk"]))
    return masks.sliding_window(window_width(cell), 0) if cell.mask == "window" else None


def _in_pages(cache: Tensor, table: Tensor, size: int) -> Tensor:
    """[B, Hkv, Lk, D] as [pages, Hkv, size, D], with each page at its place in the table."""
    pages = cache.unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1)
    placed = torch.empty_like(pages)
    placed[table.flatten().long()] = pages  # index_copy_ has no fp8
    return placed


OP = Decode()
