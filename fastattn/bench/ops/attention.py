"""Softmax attention, dense, packed and on a cache; masks and weights of all operators."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import embedding, scaled_dot_product_attention

from fastattn import masks
from fastattn.bench.ops._base import Cell, Draw, Forward, Inputs, Operator, Part
from fastattn.bias import T5, Disentangled
from fastattn.ops._relative_bias import fold_distances

HEADS = "query: B H Lq D; key: B Hkv Lk D; value: B Hkv Lk Dv; out: B H Lq Dv"


def masked_softmax(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """The softmax as users write it: True in a boolean mask takes part, other masks are added."""
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if is_bool else scores + mask
    return scores.softmax(-1)


def softmax_weights(
    query: Tensor, key: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """softmax(query keyᵀ · scale), with a mask."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return masked_softmax(query @ key.mT * scale, mask)


def weighted(cell: Cell, weights: Tensor, value: Tensor) -> Any:
    """The output, with the weights if the cell returns them."""
    out = weights @ value
    return out if cell.weights == "none" else (out, weights)


def visible_keys(cell: Cell, draw: Draw) -> Tensor | None:
    """True takes part: [B, 1, Lk] for padding, [Lq, Lk] for other masks; None: all, or a bias."""
    queries, keys = cell.lengths
    if cell.mask == "padding":
        return draw.valid(cell, keys)[:, None, :]
    if cell.mask == "bool":
        return draw.visible(queries, keys)
    return None if cell.mask == "none" else cell.visible(torch.arange(queries), keys)


def attn_mask(cell: Cell, draw: Draw, *heads: int) -> dict[str, Tensor]:
    """The input `attn_mask` of a function that has `is_causal`, by its name."""
    if cell.mask == "bias":
        return {"attn_mask": draw.normal(*heads, cell["Lq"], cell["Lk"])}
    seen = None if cell.mask == "causal" else visible_keys(cell, draw)
    if seen is None:
        return {}
    return {"attn_mask": seen[:, None] if heads and cell.mask == "padding" else seen}


def biases(
    table: Tensor, queries: int, keys: int, visible: Tensor | None = None, offset: int = 0
) -> Tensor:
    """The bias of all pairs [1, H, queries, keys], from the biases of distances [H, 2 M + 1].

    -inf where `visible` is False. Query 0 is at position `offset`.
    """
    rows, columns = (torch.arange(n, device=table.device) for n in (queries, keys))
    distances = rows[:, None] + offset - columns
    bias = embedding(distances + table.shape[1] // 2, table.mT).permute(2, 0, 1)[None]
    return bias if visible is None else bias.masked_fill(~visible, -torch.inf)


def with_mask(
    cell: Cell, x: Inputs, call: Callable[[Any], Tensor], queries: int, keys: int, seen: Any
) -> Forward:
    """A call of PyTorch with its mask, which has all biases if there is a table of them.

    With a gradient of the table each call makes the mask.
    """
    if "relative_bias" not in x:
        return functools.partial(call, seen)
    make = functools.partial(biases, x.relative_bias, queries, keys, seen)
    if cell.passes == "fwd":
        return functools.partial(call, make())
    return lambda: call(make())


_SOFTCAP = 2.0  # small compared to the scores, so that a wrong one is visible in 16 bits
_TABLES, _SPAN = ("query_table", "key_table"), 256  # of DeBERTa's terms


class SDPA(Operator):
    FUNCTION = "scaled_dot_product_attention"
    ABOUT = "softmax(Q Kᵀ / √D) V"
    SIZES = {"B": 1, "H": 8, "Hkv": "H", "Lq": 512, "Lk": "Lq", "D": 64, "Dv": "D"}
    SHAPES = HEADS
    FLOPS = "attention(pairs * H, D, Dv) + (option == 'terms') * pairs * H * D * (4 + 8 * backward)"
    MASKS = ("none", "causal", "padding", "bool", "bias", "documents")
    WEIGHTS = ("none", "average", "per-head")
    OPTIONS = "none window softcap alibi sinks relative terms dropout learnable".split()
    PARTED, SAMPLED = ("B", "Hkv"), True
    JOINT = ("learnable", "relative", "terms")
    LEARNED = {"relative": "relative_bias", "learnable": "attn_mask", "terms": "query_table"}
    OTHERS = {
        "attn_mask": "B H Lq Lk",
        **dict.fromkeys(("alibi_slopes", "sinks"), "H"),
        "relative_bias": "H distances",
        **dict.fromkeys(_TABLES, "buckets H D"),
    }
    REFUSED = {
        "option == 'window' and mask not in ('none', 'causal')": (
            "option=window: with a {mask} mask the visible pairs cannot be counted"
        ),
        "option == 'window' and Lq > Lk": "option=window: Lq={Lq} is more than Lk={Lk}",
        "option == 'learnable' and mask != 'bias'": "option=learnable: needs mask=bias",
        "option == 'dropout' and device != 'cpu'": "option=dropout: the check needs the seed of a "
        "CPU generator",
    }
    NOT_IN_TORCH = {
        "weights != 'none'": "F.scaled_dot_product_attention returns no weights",
        "option in ('window', 'softcap', 'alibi', 'sinks', 'terms')": (
            "F.scaled_dot_product_attention has no {option}"
        ),
        "option == 'relative' and mask != 'none'": "F.scaled_dot_product_attention has one mask",
        "option == 'dropout'": "PyTorch drops other weights, so its result cannot be checked",
    }

    def others(self, cell: Cell, draw: Draw) -> dict[str, Tensor]:
        heads = cell["H"]
        inputs = attn_mask(cell, draw, heads)  # a bias has the shape of a learned relative bias
        if cell.option == "alibi":
            inputs["alibi_slopes"] = (torch.arange(1, heads + 1) * (-8 / heads)).exp2()
        elif cell.option == "sinks":  # as large as lse, so that a wrong sink shows
            inputs["sinks"] = draw.normal(heads) + math.log(cell["Lk"])
        elif cell.option == "relative":
            inputs["relative_bias"] = draw.normal(heads, 2 * max(cell["Lq"], cell["Lk"]) - 1)
        elif cell.option == "terms":
            inputs |= {name: draw.normal(2 * _SPAN + 1, heads, cell["D"]) for name in _TABLES}
        return inputs

    def arguments(self, cell: Cell, x: Inputs) -> tuple[Sequence[Any], dict[str, Any]]:
        tensors, options = super().arguments(cell, x)
        options["average_weights"] = cell.weights == "average"
        if cell.mask == "documents":
            ids = map(cell.documents, cell.lengths)
            options |= {"attn_mask": None, "mask": masks.document(*ids)}
        if cell.option == "window":
            options["window"] = (cell.window, cell.window)
        elif cell.option == "softcap":
            options["softcap"] = _SOFTCAP
        elif cell.option == "terms":
            of_queries, of_keys = (x[name] for name in _TABLES)
            options["relative_bias"] = Disentangled(of_queries, of_keys, max_distance=2 * _SPAN)
        elif cell.option == "dropout":
            # The first call is checked; it has the same seed everywhere.
            options |= {"dropout_p": 0.1, "generator": torch.Generator().manual_seed(0)}
        return tensors, options

    def stock(self, cell: Cell, x: Inputs) -> Forward:
        options: Any = {"is_causal": cell.mask == "causal", "enable_gqa": cell["H"] != cell["Hkv"]}
        query, key, value = self.leaves(x)
        call = functools.partial(scaled_dot_product_attention, query, key, value, **options)
        return with_mask(cell, x, call, cell["Lq"], cell["Lk"], x.get("attn_mask"))

    def parts(self, cell: Cell, seed: int, *, few: bool = False) -> list[Part]:
        """The pairs that dropout keeps depend on their place in the whole."""
        return [{}] if cell.option == "dropout" else super().parts(cell, seed, few=few)


class FLEX(Operator):
    FUNCTION = "flex_attention"
    ABOUT = "softmax(score_mod(Q Kᵀ / √D)) V"
    SIZES, SHAPES, FLOPS = SDPA.SIZES, SDPA.SHAPES, SDPA.FLOPS
    MASKS = ("none", "causal", "documents")
    OPTIONS = ("none", "softcap", "alibi", "bias", "terms")
    BY_EQUATION = True
    LEARNED = {"bias": "bias", "terms": "columns"}
    OTHERS = {"bias": "H Lq Lk", "slopes": "H", "factor": "H", "columns": "Lk"}

    def others(self, cell: Cell, draw: Draw) -> dict[str, Tensor]:
        if cell.option == "alibi":
            return {"slopes": (torch.arange(1, cell["H"] + 1) * (-8 / cell["H"])).exp2()}
        if cell.option == "bias":
            return {"bias": draw.normal(cell["H"], cell["Lq"], cell["Lk"])}
        if cell.option == "terms":
            return {"factor": draw.normal(cell["H"]), "columns": draw.normal(cell["Lk"])}
        return {}

    def score_mod(self, cell: Cell, x: Inputs) -> Callable[..., Any] | None:
        functions: dict[str, Callable[..., Any]] = {
            "softcap": lambda s, b, h, i, j: _SOFTCAP * torch.tanh(s / _SOFTCAP),
            "alibi": lambda s, b, h, i, j: s - x.slopes[h] * (i - j).abs(),
            "bias": lambda s, b, h, i, j: s + x.bias[h, i, j],
            "terms": lambda s, b, h, i, j: s * torch.sigmoid(x.factor[h]) + x.columns[j],
        }
        return functions.get(cell.option)

    def arguments(self, cell: Cell, x: Inputs) -> tuple[Sequence[Any], dict[str, Any]]:
        tensors, options = super().arguments(cell, x)
        if cell.mask == "documents":
            options["block_mask"] = masks.document(*map(cell.documents, cell.lengths))
        elif cell.mask == "causal":
            options["block_mask"] = masks.causal()
        return tensors, options | {"score_mod": self.score_mod(cell, x)}

    def equation(self, cell: Cell, x: Inputs) -> Tensor:
        groups = cell["H"] // cell["Hkv"]
        key, value = (y.repeat_interleave(groups, 1) for y in (x.key, x.value))
        scores = x.query @ key.mT * cell["D"] ** -0.5
        at = [torch.arange(n, device=scores.device) for n in scores.shape]
        if mod := self.score_mod(cell, x):
            scores = mod(
                scores, *(n.view([-1 if d == m else 1 for m in range(4)]) for d, n in enumerate(at))
            )
        weights = masked_softmax(scores, cell.visible(at[2], cell["Lk"], scores.device))
        return weights.to(value.dtype) @ value


# A paged cache has its pages in random order. Rows of a quantised cache are exact in bf16, which
# torch gets. In a latent cache (https://arxiv.org/abs/2405.04434) a value is a part of its key.

# The dtype and the scale of a quantised cache.
_QUANTISED = {"int8": (torch.int8, 2.0**-5), "fp8": (torch.float8_e4m3fn, 1.0)}


def _lengths(cell: Cell) -> list[int]:
    """The lengths of packed sequences: as in a padded batch, or, with S, from L down to S."""
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
        ends = torch.tensor([0, *lengths]).cumsum(0)
        inputs = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
        if cell.option == "relative":
            inputs["relative_bias"] = draw.normal(cell["H"], 2 * max(lengths) - 1)
        return inputs

    def stock(self, cell: Cell, x: Inputs) -> Forward:
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

    def stock(self, cell: Cell, x: Inputs) -> Forward:
        """With option=latent, the fastest form that PyTorch has: docs/benchmarks.md explains it."""
        query, key, value = _cache(cell, x)
        latent, group = cell.option == "latent", cell["H"] // cell["Hkv"]
        queries, keys = cell["Lq"], cell["Lk"]
        causal = cell.mask == "causal" and queries == keys and cell.option not in ("t5", "latent")
        mask = None if causal else cell.visible(*self.sequences(cell)[0], query.device)
        if cell.option == "t5":
            table, most = T5(x.buckets, bidirectional=False), max(queries, keys) - 1
            folded = fold_distances(self.FUNCTION, table, query, most)[0].to(query.dtype)
            # Of three dimensions, PyTorch's fused kernel would refuse it.
            mask = biases(folded, queries, keys, mask, offset=keys - queries)
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


def _in_pages(cache: Tensor, table: Tensor, size: int) -> Tensor:
    """[B, Hkv, Lk, D] as [pages, Hkv, size, D], with each page at its place in the table."""
    pages = cache.unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1)
    placed = torch.empty_like(pages)
    placed[table.flatten().long()] = pages  # index_copy_ has no fp8
    return placed
