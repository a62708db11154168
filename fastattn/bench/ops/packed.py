"""Attention of packed sequences, and on a cache.

Packed sequences have the lengths of a padded batch; with S they grow by a constant factor from S to
L. A paged cache has its pages in random order. The rows of a quantised cache are exact in bf16,
which torch gets. In a latent cache (https://arxiv.org/abs/2405.04434) the value of a row is a part
of its key.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fastattn.bench.ops._base import Cell, Draw, Forward, Inputs, Operator
from fastattn.bench.ops.attention import HEADS, biases, with_mask
from fastattn.bias import T5
from fastattn.ops._relative_bias import fold_distances

_ENDS = ("cu_seqlens_q", "cu_seqlens_k")
# The dtype and the scale of a quantised cache.
_QUANTISED = {"int8": (torch.int8, 2.0**-5), "fp8": (torch.float8_e4m3fn, 1.0)}


def _lengths(cell: Cell) -> list[int]:
    batch, shortest, longest = cell["B"], cell["S"], cell["L"]
    if not shortest:
        return cell.padded(longest)
    step = (longest / shortest) ** (1 / max(batch - 1, 1))
    return [round(longest / step**n) for n in range(batch)]


class VARLEN(Operator):
    FUNCTION = "varlen_attention"
    ABOUT = "attention within B packed sequences of L/4 to 3L/4, or S to L"
    SIZES = {"B": 16, "H": 8, "Hkv": "H", "L": 256, "S": 0, "D": 64}
    REFUSED = {"S > L": "S={S} is more than L={L}"}
    SHAPES = "query: T H D; key: T Hkv D; value: T Hkv D"
    FLOPS = "attention(pairs * H, D, D)"
    LEARNED = {"relative": "relative_bias"}
    DERIVED = {"T": lambda cell: sum(_lengths(cell))}
    MASKS = ("none", "causal", "documents", "prefix", "window")
    OPTIONS = ("none", "relative")
    KEYWORDS = {"mask": lambda cell: cell.library_mask(*_lengths(cell))}
    BY_EQUATION = True

    def sequences(self, cell: Cell) -> Sequence[tuple[Tensor, int]]:
        return [(torch.arange(n), n) for n in _lengths(cell)]

    def others(self, cell: Cell, draw: Draw) -> dict[str, Tensor]:
        lengths = _lengths(cell)
        inputs = dict.fromkeys(_ENDS, torch.tensor([0, *lengths]).cumsum(0))
        if cell.option == "relative":
            inputs["relative_bias"] = draw.normal(cell["H"], 2 * max(lengths) - 1)
        return inputs

    def theirs(self, cell: Cell, x: Inputs) -> Forward:
        """PyTorch's call; the time includes padding and packing, which packed tensors require."""
        leaves, ends, longest = self.leaves(x), x.cu_seqlens_q, max(_lengths(cell))
        grouped = cell["H"] != cell["Hkv"]
        valid = torch.arange(longest, device=ends.device) < ends.diff()[:, None]  # [B, L]
        seen = valid[:, None, None]
        for b, n in enumerate(_lengths(cell)):
            square = cell.visible(torch.arange(n), n)
            if square is not None:  # a row of padding sees all keys of its sequence: no NaN
                seen = seen.expand(-1, -1, longest, -1).contiguous()  # [B, 1, L, L]
                seen[b, 0, :n, :n] = square

        def padded(x: Tensor) -> Tensor:
            batch = x.new_zeros(*valid.shape, *x.shape[1:])
            return batch.index_put((valid,), x).transpose(1, 2)

        def call(mask: Tensor) -> Tensor:
            query, key, value = (padded(x) for x in leaves)
            out = scaled_dot_product_attention(query, key, value, mask, enable_gqa=grouped)
            return out.transpose(1, 2)[valid]

        return with_mask(cell, x, call, longest, longest, seen)

    def equation(self, cell: Cell, x: Inputs) -> Tensor:
        """Of each sequence, because the reference's definition computes all pairs of all rows."""
        outs, parts = [], (x.split(_lengths(cell)) for x in self.leaves(x))
        for (rows, length), *tensors in zip(self.sequences(cell), *parts, strict=True):
            seen = cell.visible(rows, length, x.query.device)
            if cell.option == "relative":
                seen = biases(x.relative_bias, length, length, seen)
            query, key, value = (x.transpose(0, 1)[None] for x in tensors)
            with sdpa_kernel(SDPBackend.MATH):
                out = scaled_dot_product_attention(query, key, value, seen, enable_gqa=True)
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)


class DECODE(Operator):
    FUNCTION = "decode_attention"
    ABOUT = "the newest Lq tokens on a full cache of Lk; with P, in pages of P keys"
    SIZES = {"B": 1, "H": 32, "Hkv": 8, "Lq": 1, "Lk": 4096, "D": 128, "Dv": "D", "P": 0}
    SHAPES = HEADS
    FLOPS = "attention(pairs * H, D, Dv)"
    MASKS = ("none", "causal", "documents", "prefix", "window")
    OPTIONS = ("none", "t5", *_QUANTISED, "latent")
    PARTED, SAMPLED, JOINT = ("B", "Hkv"), True, ("t5",)
    BY_EQUATION = True
    PASSES, ITEMS = ("fwd",), ("B * Lq", "tokens")

    REFUSED = {
        "mask != 'none' and Lq > Lk": "mask={mask}: Lq={Lq} is more than Lk={Lk}",
        "option == 'latent' and Dv > D": "option=latent: Dv={Dv} is more than D={D} of a key",
    }

    def leaf_names(self, cell: Cell) -> Sequence[str]:
        return ("query", "key") if cell.option == "latent" else super().leaf_names(cell)

    def sequences(self, cell: Cell) -> Sequence[tuple[Tensor, int]]:
        """The newest tokens are the queries."""
        newest = torch.arange(cell["Lk"] - cell["Lq"], cell["Lk"]).clamp(min=0)
        return [(newest, cell["Lk"])] * cell["B"]

    def elements(self, cell: Cell, **read: int) -> tuple[int, int]:
        """Two scales of a quantised row count as elements, too."""
        inputs, outputs = super().elements(cell, **read)
        rows = cell["B"] * cell["Hkv"] * read.get("Lk", cell["Lk"])
        width = cell["D"] + cell["Dv"]
        stored = (width + 2 * 4) / cell.itemsize if cell.option in _QUANTISED else width
        stored = cell["D"] if cell.option == "latent" else stored
        return inputs + int(rows * stored) - rows * width, outputs

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

    def arguments(self, cell: Cell, x: Inputs) -> tuple[Sequence[Any], dict[str, Any]]:
        table = x.get("block_table")

        def stored(rows: Tensor) -> Tensor:
            rows = _numbers(cell, rows) if cell.option in _QUANTISED else rows
            return rows if table is None else _in_pages(rows, table, cell["P"])

        tensors = _cache(cell, x, stored)
        options: dict[str, Any] = {
            "mask": cell.library_mask(cell["Lk"]),
            "is_causal": cell.mask == "causal",
            "block_table": table,
        }
        if cell.option == "t5":
            options["relative_bias"] = T5(x.buckets, bidirectional=False)
        if cell.option in _QUANTISED:
            rows, scale = tensors[1].shape[:3], _QUANTISED[cell.option][1]
            for name in ("key_scales", "value_scales"):
                options[name] = torch.full(rows, scale, device=tensors[1].device)
        return tensors, options

    def theirs(self, cell: Cell, x: Inputs) -> Forward:
        """With option=latent, the fastest form that PyTorch has: docs/benchmarks.md explains it."""
        query, key, value = _cache(cell, x)
        latent, group = cell.option == "latent", cell["H"] // cell["Hkv"]
        queries, keys = cell["Lq"], cell["Lk"]
        causal = cell.mask == "causal" and queries == keys and cell.option not in ("t5", "latent")
        mask = None if causal else cell.visible(*self.sequences(cell)[0], query.device)
        if cell.option == "t5":
            # Of three dimensions, PyTorch's fused kernel would refuse it.
            mask = biases(_distances(cell, x), queries, keys, mask, offset=keys - queries)
        if not latent:
            options: dict[str, Any] = {"is_causal": causal, "enable_gqa": group > 1}
            call = scaled_dot_product_attention
            return functools.partial(call, query, key, value, mask, **options)
        rows = query.unflatten(1, (-1, group)).flatten(2, 3)  # [B, Hkv, H / Hkv Lq, D]
        of_rows = None if mask is None else mask.repeat(group, 1)

        def of_keys() -> Tensor:
            out = scaled_dot_product_attention(rows, key, key, of_rows)[..., : cell["Dv"]]
            return out.unflatten(2, (group, -1)).flatten(1, 2)

        return of_keys


def _cache(
    cell: Cell, x: Inputs, stored: Callable[[Tensor], Tensor] = lambda rows: rows
) -> list[Tensor]:
    """The query, and key and value as stored; in a latent cache the value is a view."""
    key = stored(x.key)
    return [x.query, key, key[..., : cell["Dv"]] if cell.option == "latent" else stored(x.value)]


def _numbers(cell: Cell, rows: Tensor) -> Tensor:
    """The quantised codes of these rows."""
    dtype, scale = _QUANTISED[cell.option]
    x = rows / scale
    return (x.round().clamp(-127, 127) if dtype == torch.int8 else x).to(dtype)


def _distances(cell: Cell, x: Inputs) -> Tensor:
    """The bias of every distance, [H, 2 M + 1]."""
    buckets, most = T5(x.buckets, bidirectional=False), max(cell["Lq"], cell["Lk"]) - 1
    return fold_distances("decode_attention", buckets, x.query, most)[0].to(x.query.dtype)


def _in_pages(cache: Tensor, table: Tensor, size: int) -> Tensor:
    """[B, Hkv, Lk, D] as [pages, Hkv, size, D], with each page at its place in the table."""
    pages = cache.unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1)
    placed = torch.empty_like(pages)
    placed[table.flatten().long()] = pages  # index_copy_ has no fp8
    return placed
