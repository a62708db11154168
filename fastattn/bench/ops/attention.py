"""`scaled_dot_product_attention`: O = softmax(Q Kᵀ / √D) V; masks and weights of all operators."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention

from fastattn import masks
from fastattn.bench.ops._base import Cell, Draw, Forward, Inputs, Operator, Part
from fastattn.bias import Disentangled

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
    found = embedding(distances + table.shape[1] // 2, table.mT).permute(2, 0, 1)[None]
    return found if visible is None else found.masked_fill(~visible, -torch.inf)


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
    OPTIONS = (
        *("none", "window", "softcap", "alibi", "sinks"),
        *("relative", "terms", "dropout", "learnable"),
    )
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
            ids = (cell.documents(cell[key]) for key in ("Lq", "Lk"))
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

    def theirs(self, cell: Cell, x: Inputs) -> Forward:
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
        terms = cell.option == "terms"
        return (
            {"factor": draw.normal(cell["H"]), "columns": draw.normal(cell["Lk"])} if terms else {}
        )

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
            ids = (cell.documents(cell[key]) for key in ("Lq", "Lk"))
            options["block_mask"] = masks.document(*ids)
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
