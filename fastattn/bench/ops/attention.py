"""`scaled_dot_product_attention`: O = softmax(Q Kᵀ / √D) V; masks and weights of all operators."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention

from fastattn import masks
from fastattn._seed import draw_seed
from fastattn.backends.primitives import AttentionOptions
from fastattn.backends.reference import attend, dropout_keep
from fastattn.bench.cells import DOCUMENTS, Cell, Draw, keys_of, prefix_length, window_width
from fastattn.bench.ops._base import Forward, Inputs, Operator

HEADS = {"query": "B H Lq D", "key": "B Hkv Lk D", "value": "B Hkv Lk Dv"}


def softmax_weights(
    query: Tensor, key: Tensor, visible: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """softmax(query keyᵀ · scale), as a user writes it; True in `visible` takes part."""
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(-1)


def visible_keys(cell: Cell, draw: Draw) -> Tensor | None:
    """True takes part: [B, 1, Lk] for padding, [Lq, Lk] for bool and causal, else None."""
    queries, keys = (cell.sizes.get(key, cell.sizes.get("L", 0)) for key in ("Lq", "Lk"))
    if cell.mask == "padding":
        return draw.valid(cell["B"], keys)[:, None, :]
    if cell.mask == "causal":
        return torch.ones(queries, keys, dtype=torch.bool).tril()
    if cell.mask == "bool":
        return draw.visible(queries, keys)
    if cell.mask == "documents":
        return document_ids(queries)[:, None] == document_ids(keys)
    return None


def attn_mask(cell: Cell, draw: Draw, *heads: int) -> dict[str, Tensor]:
    """The input `attn_mask` of a function that has `is_causal`, by its name."""
    if cell.mask == "bias":
        return {"attn_mask": draw.normal(*heads, cell["Lq"], cell["Lk"])}
    visible = None if cell.mask == "causal" else visible_keys(cell, draw)
    if visible is None:
        return {}
    return {"attn_mask": visible[:, None] if heads and cell.mask == "padding" else visible}


def visible_to_last(cell: Cell, queries: int, length: int, device: torch.device) -> Tensor | None:
    """The visible pairs of the last queries of a sequence, [queries, length]; None: all."""
    if cell.mask == "none":
        return None
    keys = torch.arange(length)
    first, end = keys_of(cell, keys[length - queries :, None], length)
    return ((first <= keys) & (keys < end)).to(device)


def mask_of(cell: Cell, *lengths: int) -> masks.Mask | None:
    """The mask of `fastattn.masks` of the cell, for one length of all sequences or one of each."""
    if cell.mask == "documents":
        return masks.document(torch.cat([*map(document_ids, lengths)]).to(cell.device))
    if cell.mask == "prefix":
        prefixes = [*map(prefix_length, lengths)]
        several = torch.tensor(prefixes, device=cell.device)
        return masks.prefix_lm(several if len(prefixes) > 1 else prefixes[0])
    return masks.sliding_window(window_width(cell), 0) if cell.mask == "window" else None


def document_ids(length: int) -> Tensor:
    """The document of each row, [length]."""
    return torch.arange(length) * DOCUMENTS // max(length, 1)


def biases(
    table: Tensor, queries: int, keys: int, visible: Tensor | None = None, offset: int = 0
) -> Tensor:
    """The bias of all pairs [1, H, queries, keys], from one of each distance, [H, 2 M + 1].

    -inf where `visible` is False. Query 0 is at position `offset`.
    """
    rows, columns = (torch.arange(n, device=table.device) for n in (queries, keys))
    distances = rows[:, None] + offset - columns
    found = embedding(distances + table.shape[1] // 2, table.mT).permute(2, 0, 1)[None]
    return found if visible is None else found.masked_fill(~visible, -torch.inf)


def unseen(cell: Cell, at: Tensor) -> int:
    """The keys that no query at these positions sees."""
    first, end = keys_of(cell, at, cell["Lk"])
    return cell["Lk"] - int(end.max() - first.min())


def defined(
    x: Mapping[str, Tensor], tensors: Sequence[Tensor], mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """The definition of attention: the output, and the weights [B, H, Lq, Lk]."""
    mask = None if mask is None else mask[(None,) * (4 - mask.dim())]
    names = ("alibi_slopes", "sinks", "relative_bias")
    slopes, sinks, table = (x[name][None] if name in x else None for name in names)
    record = AttentionOptions(scale=tensors[0].shape[-1] ** -0.5, **options)
    given: dict[str, Any] = {"keep": x.get("kept"), "sinks": sinks, "relative_bias": table}
    query, key, value = tensors
    out, _, weights = attend(query, key, value, mask, slopes, None, record, **given)
    return out.to(query.dtype), weights.to(query.dtype)


def with_masks(
    cell: Cell,
    x: Inputs,
    lengths: Sequence[tuple[int, int]],
    visible: Sequence[Tensor | None],
    call: Callable[[Sequence[Tensor | None]], Tensor],
) -> Forward:
    """A call of PyTorch, which gets a table of biases as masks: in each call, if it has a gradient.

    `lengths` are the queries and keys of each mask.
    """
    table = x.get("relative_bias")
    if table is None:
        return functools.partial(call, visible)

    def made() -> Sequence[Tensor | None]:
        return [biases(table, *of, seen) for of, seen in zip(lengths, visible, strict=True)]

    return functools.partial(call, made()) if cell.passes == "fwd" else lambda: call(made())


_SOFTCAP = 2.0  # small compared to the scores, so that a wrong one is visible in 16 bits
_DROPOUT = 0.1


class _Sdpa(Operator):
    MASKS = ("none", "causal", "padding", "bool", "bias", "documents")
    WEIGHTS = ("none", "average", "per-head")
    OPTIONS = ("none", "window", "softcap", "alibi", "sinks", "relative", "dropout", "learnable")
    SAMPLED, BLOCKED = ("B", "Hkv"), "Lq"
    JOINT = ("learnable", "relative")
    LEARNED = {"relative": "relative_bias", "learnable": "attn_mask"}  # noqa: RUF012
    OTHERS = dict.fromkeys(("attn_mask", "kept", "weights"), "B H Lq Lk") | {
        "alibi_slopes": "H",
        "sinks": "H",
    }

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

    def others(self, cell: Cell, draw: Draw) -> dict[str, Tensor]:
        heads = cell["H"]
        inputs = attn_mask(cell, draw, heads)  # a bias has the shape of a learned relative one
        if cell.option == "alibi":
            inputs["alibi_slopes"] = (torch.arange(1, heads + 1) * (-8 / heads)).exp2()
        elif cell.option == "sinks":  # of the size of lse, so that a wrong one shows
            inputs["sinks"] = draw.normal(heads) + math.log(cell["Lk"])
        elif cell.option == "relative":
            inputs["relative_bias"] = draw.normal(heads, 2 * max(cell["Lq"], cell["Lk"]) - 1)
        elif cell.option == "dropout":
            scores = (cell["B"], heads, cell["Lq"], cell["Lk"])
            inputs["kept"] = dropout_keep(scores, _DROPOUT, draw_seed(*_first_seed()))
        return inputs

    def dims(self, cell: Cell, name: str, x: Tensor) -> list[str]:
        dims, is_average = super().dims(cell, name, x), name == "weights" and x.dim() == 3
        return [size for size in dims if size != "H"] if is_average else dims

    def unread(self, cell: Cell) -> int:
        if cell.option != "window":
            return 0
        beyond = unseen(cell, torch.arange(cell["Lq"]))
        return cell["B"] * cell["Hkv"] * beyond * (cell["D"] + cell["Dv"])

    def arguments(self, cell: Cell, x: Inputs) -> tuple[Sequence[Any], dict[str, Any]]:
        tensors, options = super().arguments(cell, x)
        options["average_weights"] = cell.weights == "average"
        if cell.mask == "documents":
            ids = (document_ids(cell[key]).to(cell.device) for key in ("Lq", "Lk"))
            options |= {"attn_mask": None, "mask": masks.document(*ids)}
        if cell.option == "window":
            options["window"] = (window_width(cell), window_width(cell))
        elif cell.option == "softcap":
            options["softcap"] = _SOFTCAP
        elif cell.option == "dropout":
            options |= {"dropout_p": _DROPOUT, "generator": _first_seed()[1]}
        return tensors, options

    def theirs(self, cell: Cell, x: Inputs) -> Forward:
        query, key, value = self.leaves(x)
        causal, grouped = cell.mask == "causal", cell["H"] != cell["Hkv"]

        def call(masks: Sequence[Tensor | None]) -> Tensor:
            return scaled_dot_product_attention(
                query, key, value, masks[0], is_causal=causal, enable_gqa=grouped
            )

        return with_masks(cell, x, [(cell["Lq"], cell["Lk"])], [x.get("attn_mask")], call)

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

    def equation(self, cell: Cell, x: Inputs, first: int = 0) -> tuple[Tensor, ...]:
        """The definition, for the queries from the one at position `first` on."""
        width = window_width(cell) if cell.option == "window" else -1
        out, weights = defined(
            x,
            self.leaves(x),
            x.get("attn_mask"),
            offset=first,
            window_left=width,
            window_right=0 if cell.mask == "causal" else width,
            softcap=_SOFTCAP if cell.option == "softcap" else 0.0,
            dropout_p=_DROPOUT if cell.option == "dropout" else 0.0,
        )
        if cell.weights == "none":
            return (out,)
        return out, weights.mean(1) if cell.weights == "average" else weights

    def exact(self, cell: Cell, x: Inputs, start: int) -> Forward:
        return functools.partial(self.equation, cell, x, start)


def _first_seed() -> tuple[torch.device, torch.Generator]:
    """The arguments of `draw_seed` in the first call with dropout, which is the one checked."""
    return torch.device("cpu"), torch.Generator().manual_seed(0)


SDPA = _Sdpa(
    FUNCTION="scaled_dot_product_attention",
    ABOUT="softmax(Q Kᵀ / √D) V on [B, H, Lq, D], [B, Hkv, Lk, D], [B, Hkv, Lk, Dv]",
    TORCH="F.scaled_dot_product_attention",
    SIZES={"B": 1, "H": 8, "Hkv": "H", "Lq": 512, "Lk": "Lq", "D": 64, "Dv": "D"},
    SHAPES=HEADS,
    OUTPUT="B H Lq Dv",
    FLOPS="attention(pairs * H, D, Dv)",
)
