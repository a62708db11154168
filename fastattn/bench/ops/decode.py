"""`decode_attention`: attention of the newest tokens to a cache of keys and values; no gradient.

A paged cache has its pages in random order. torch has no paged caches and reads a contiguous one.
The newest tokens are at the last positions; torch gets masks and biases of all pairs. With the
options int8 and fp8 the cache is quantised; its rows are exact in bf16, which torch gets.

With the option latent (multi-head latent attention, https://arxiv.org/abs/2405.04434) there is one
cache: the value of a row is a view of the first Dv columns of its key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fastattn.bench.cells import DTYPE_BYTES, Cell, keys_of
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._attention import SampledHeads, attend, biases, mask_of, visible_to_last
from fastattn.bench.ops._base import Inputs, Outputs, Prepared
from fastattn.bias import T5
from fastattn.ops._relative_bias import fold_distances

# The dtype and the scale of a quantised cache.
_QUANTISED = {"int8": (torch.int8, 2.0**-5), "fp8": (torch.float8_e4m3fn, 1.0)}


class _Decode(SampledHeads):
    FUNCTION = "decode_attention"
    ABOUT = (
        "the newest Lq tokens and a full cache of Lk, [B, H, Lq, D], [B, Hkv, Lk, D], "
        "[B, Hkv, Lk, Dv]; with P, in pages of P keys"
    )
    TORCH = (
        "F.scaled_dot_product_attention on the contiguous cache; with option=latent, on the "
        "complete keys as values, and the first Dv columns of its result"
    )
    MASKS = ("none", "causal", "documents", "prefix", "window")
    OPTIONS = ("none", "t5", *_QUANTISED, "latent")
    JOINT = ("t5",)
    BY_EQUATION = True
    PASSES = ("fwd",)
    OUTPUT = "B H Lq Dv"
    FLOPS = "attention(pairs * H, D, Dv)"

    def check(self, cell: Cell) -> None:
        super().check(cell)
        if cell.mask != "none" and cell["Lq"] > cell["Lk"]:
            raise ValueError(f"mask={cell.mask}: Lq={cell['Lq']} is more than Lk={cell['Lk']}")
        if cell.option == "latent" and cell["Dv"] > cell["D"]:
            raise ValueError(
                f"option=latent: Dv={cell['Dv']} is more than D={cell['D']}, the columns of a key"
            )

    def leaf_names(self, cell: Cell) -> Sequence[str]:
        return ("query", "key") if cell.option == "latent" else super().leaf_names(cell)

    def pairs(self, cell: Cell, pairs: int) -> int:
        return cell["B"] * sum(map(len, _keys(cell)))

    def items(self, cell: Cell) -> tuple[float, str]:
        return cell["B"] * cell["Lq"], "tokens"

    def elements(self, cell: Cell) -> tuple[int, int]:
        rows = cell["B"] * cell["H"] * cell["Lq"]
        return rows * cell["D"] + _cached(cell, cell["Lk"]), rows * cell["Dv"]

    def unread(self, cell: Cell) -> int:
        seen = _keys(cell)
        return _cached(cell, cell["Lk"] - (seen[-1].stop - seen[0].start))

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        inputs = super().inputs(cell, draw)
        if cell.option == "latent":
            del inputs["value"]
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
        table = inputs.get("block_table")

        def stored(x: Tensor) -> Tensor:
            x = _numbers(cell, x) if cell.option in _QUANTISED else x
            return x if table is None else _in_pages(x, table, cell["P"])

        tensors = self.tensors(cell, inputs, stored)
        options: dict[str, Any] = {
            "mask": mask_of(cell, cell["Lk"]),
            "is_causal": cell.mask == "causal",
            "block_table": table,
        }
        if cell.option == "t5":
            options["relative_bias"] = _t5(inputs)
        if cell.option in _QUANTISED:
            rows, scale = tensors[1].shape[:3], _QUANTISED[cell.option][1]
            for name in ("key_scales", "value_scales"):
                options[name] = torch.full(rows, scale, device=tensors[1].device)
        return tensors, options

    def theirs(self, cell: Cell, inputs: Inputs) -> Prepared:
        """With option=latent, the fastest form that PyTorch has.

        The query heads of a key head are rows of one head, because `enable_gqa` copies the keys for
        every query head. The value is the complete key, because the fused kernel of the CPU needs
        equal widths, and the columns beyond Dv of its result are dropped.
        """
        query, key, value = self.tensors(cell, inputs)
        latent, group = cell.option == "latent", cell["H"] // cell["Hkv"]
        causal = cell.mask == "causal" and cell["Lq"] == cell["Lk"] and cell.option != "t5"
        mask = None
        if cell.option == "t5":
            # Of three dimensions, PyTorch's fused kernel would refuse it.
            lengths, offset = (cell["Lq"], cell["Lk"]), cell["Lk"] - cell["Lq"]
            mask = biases(_distances(cell, inputs), *lengths, offset=offset)
        elif not causal or latent:
            mask = visible_to_last(cell, cell["Lq"], cell["Lk"], query.device)
        if latent:
            rows = query.unflatten(1, (-1, group)).flatten(2, 3)  # [B, Hkv, H / Hkv Lq, D]
            of_rows = None if mask is None else mask.repeat(group, 1)

        def forward() -> Outputs:
            if not latent:
                return (
                    scaled_dot_product_attention(
                        query, key, value, mask, is_causal=causal, enable_gqa=group > 1
                    ),
                )
            out = scaled_dot_product_attention(rows, key, key, of_rows)[..., : cell["Dv"]]
            return (out.unflatten(2, (group, -1)).flatten(1, 2),)

        return forward, [inputs[name] for name in self.leaf_names(cell)]

    def why_not_theirs(self, cell: Cell) -> list[str]:
        both = cell.option == "t5" and cell.mask != "none"
        return ["F.scaled_dot_product_attention has one mask"] if both else []

    def equation(self, cell: Cell, inputs: Inputs) -> Tensor:
        query, key, value = self.tensors(cell, inputs)
        visible = visible_to_last(cell, cell["Lq"], cell["Lk"], query.device)
        table = _distances(cell, inputs)[None] if cell.option == "t5" else None
        given, offset = {"relative_bias": table}, cell["Lk"] - cell["Lq"]
        return attend(query, key, value, visible, given=given, offset=offset)[0]

    def tensors(
        self, cell: Cell, inputs: Inputs, stored: Callable[[Tensor], Tensor] = lambda x: x
    ) -> list[Tensor]:
        """The query, the key and the value, both as they are stored.

        With option=latent there is one cache, [..., D], and the value is a view of it.
        """
        key = stored(inputs["key"])
        latent = cell.option == "latent"
        value = key[..., : cell["Dv"]] if latent else stored(inputs["value"])
        return [inputs["query"], key, value]


def _cached(cell: Cell, rows: int) -> int:
    """The elements of the cell's dtype in the memory of so many cached rows of each head."""
    rows *= cell["B"] * cell["Hkv"]
    if cell.option == "latent":
        return rows * cell["D"]
    width = cell["D"] + cell["Dv"]
    if cell.option in _QUANTISED:
        return rows * (width + 2 * 4) // DTYPE_BYTES[cell.dtype]  # with two scales
    return rows * width


def _numbers(cell: Cell, rows: Tensor) -> Tensor:
    """The numbers of a quantised cache of these rows."""
    dtype, scale = _QUANTISED[cell.option]
    x = rows / scale
    return (x.round().clamp(-127, 127) if dtype == torch.int8 else x).to(dtype)


def _keys(cell: Cell) -> list[range]:
    """The visible keys of each of the newest tokens."""
    last = cell["Lk"]
    return [keys_of(cell, max(at, 0), last) for at in range(last - cell["Lq"], last)]


def _t5(inputs: Inputs) -> T5:
    return T5(inputs["buckets"], bidirectional=False)


def _distances(cell: Cell, inputs: Inputs) -> Tensor:
    """The bias of every distance, [H, 2 M + 1]."""
    most = max(cell["Lq"], cell["Lk"]) - 1
    table = fold_distances("decode_attention", _t5(inputs), inputs["query"], most)[0]
    return table.to(inputs["query"].dtype)


def _in_pages(cache: Tensor, table: Tensor, size: int) -> Tensor:
    """[B, Hkv, Lk, D] as [pages, Hkv, size, D], with each page at its place in the table."""
    pages = cache.unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1)
    placed = torch.empty_like(pages)
    placed[table.flatten().long()] = pages  # index_copy_ has no fp8
    return placed


DECODE = _Decode(
    SIZES={"B": 1, "H": 32, "Hkv": 8, "Lq": 1, "Lk": 4096, "D": 128, "Dv": "D", "P": 0},
    SHAPES={"query": "B H Lq D", "key": "B Hkv Lk D", "value": "B Hkv Lk Dv"},
)
