"""The arguments of one call: the checks on a single rank, and the values that all ranks compare."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastattn import checks, masks
from fastattn._seed import draw_seed
from fastattn.backends.primitives import AttentionOptions
from fastattn.distributed._dtensor import refuse_dtensors
from fastattn.distributed._peers import OP
from fastattn.distributed.layout import Layout, Run

METHODS = ("auto", "ring", "allgather", "ulysses")
LAYOUTS = ("contiguous", "zigzag")
NO_LAYOUT = Layout(())
_ADDRESS = re.compile(" at 0x[0-9a-f]+")  # of a function, which differs between processes


@dataclass(frozen=True)
class Call:
    """One rank's arguments, and the layouts once they are known."""

    query: Tensor  # [B, Hq, Lq of this rank, D]
    key: Tensor  # [B, Hkv, Lk of this rank, D]
    value: Tensor  # [B, Hkv, Lk of this rank, Dv]
    attn_mask: Tensor | None  # [B|1, Hq|1, Lq of this rank|1, Lk of all ranks|1]
    alibi_slopes: Tensor | None  # [B|1, Hq]
    sinks: Tensor | None  # [1, Hq]
    mask: masks.Mask | None  # for all queries and keys
    sequences: Tensor | None  # [N + 1] int64, starts of packed sequences; part of `mask`, too
    options: AttentionOptions  # with the offset 0
    seed: Tensor | None  # [] int64, of dropout: this rank's, then rank 0's
    method: str
    layout: str | Tensor | Layout
    queries: Layout = NO_LAYOUT
    keys: Layout = NO_LAYOUT

    @property
    def window(self) -> tuple[int, int]:
        """(left, right): the positions that a query sees before and after its own; -1: all."""
        return self.options.window_left, self.options.window_right

    @property
    def uses_positions(self) -> bool:
        """Whether the result depends on which rows are at which positions."""
        position_arguments = (self.attn_mask, self.alibi_slopes, self.mask, self.seed)
        return self.window != (-1, -1) or any(x is not None for x in position_arguments)

    def options_at(self, first_query: int, first_key: int) -> AttentionOptions:
        """The options of queries and keys that begin at these positions."""
        options = replace(self.options, offset=first_query - first_key)
        if self.seed is None:
            return options
        return replace(options, first_query=first_query, first_key=first_key)

    def with_layouts(self, queries: Layout, keys: Layout) -> Call:
        """The call with the positions of all rows."""
        return replace(self, queries=queries, keys=keys)

    def with_seed(self, seed: int) -> Call:
        """The call with this seed of dropout; a call without dropout is unchanged."""
        return self if self.seed is None else replace(self, seed=torch.full_like(self.seed, seed))

    def with_fewest_runs(self) -> Call:
        """The call with one run of rows per rank, unless the result depends on positions."""
        if self.uses_positions:
            return self
        lengths = self.queries.lengths, self.keys.lengths
        return self.with_layouts(*(Layout.contiguous(row_lengths) for row_lengths in lengths))

    def options_to_compare(self) -> dict[str, str]:
        """The values that must be the same on all ranks, by argument."""
        q, options = self.query, self.options
        slopes, sinks, mask = self.alibi_slopes, self.sinks, self.attn_mask
        differentiated = [
            name
            for name in ("query", "key", "value", "attn_mask", "alibi_slopes", "sinks")
            if getattr(self, name) is not None and getattr(self, name).requires_grad
        ]
        layout = self.layout if isinstance(self.layout, (str, Layout)) else "positions"
        return {
            "alibi_slopes": "None" if slopes is None else f"shape {list(slopes.shape)}",
            "cu_seqlens": "None" if self.sequences is None else str(self.sequences.tolist()),
            "attn_mask": "None" if mask is None else f"a {checks.name_of(mask)} mask",
            "dropout_p": repr(options.dropout_p),
            "dtype": checks.name_of(q),
            "key and value": f"[B, H, L, D] of sizes {_sizes(self.key)} and {_sizes(self.value)}",
            "layout": repr(layout),
            "mask": _ADDRESS.sub("", repr(self.mask)),
            "method": repr(self.method),
            "query": f"[B, H, L, D] of sizes {_sizes(q)}",
            "requires_grad": str(differentiated if torch.is_grad_enabled() else []),
            "scale": repr(options.scale),
            "sinks": "None" if sinks is None else f"shape {list(sinks.shape)}",
            "softcap": repr(options.softcap or None),
            "window or is_causal": repr(self.window),
        }

    @property
    def mask_columns(self) -> int:
        """The columns of ``attn_mask``: the keys of all ranks, or 1 or 0 for any number of keys."""
        return 0 if self.attn_mask is None else self.attn_mask.shape[3]

    def local_mask(self, rows: slice, keys: slice) -> Tensor | None:
        """A view of the mask of some of this rank's rows, and of the keys at some positions."""
        mask = self.attn_mask
        return None if mask is None else mask[mask_slices(mask, rows, keys)]

    def mask_program(self, run: Run, first_key: int, k_len: int) -> Tensor | None:
        """The mask program of a run of queries and the keys at positions from ``first_key`` on."""
        if self.mask is None:
            return None
        return masks.part_program(self.mask, self.mask_part(run, first_key, k_len))

    def mask_part(self, run: Run, first_key: int, k_len: int) -> masks.PartCall:
        """A run of queries and the keys from ``first_key`` on, as ``fastattn.masks`` takes it."""
        batch, heads = self.query.shape[:2]
        sizes = (batch, batch, run.length, k_len, self.query.device, heads, run.position)
        lengths = self.queries.total, self.keys.total
        return masks.PartCall(OP, *sizes, first_key, 0, lengths, heads)


def mask_slices(mask: Tensor, rows: slice, keys: slice) -> tuple[slice, ...]:
    """The index of a part of a mask [B|1, Hq|1, Lq|1, Lk|1]; dimensions of size 1 stay whole."""
    every = slice(None)
    index = (rows if mask.shape[2] != 1 else every, keys if mask.shape[3] != 1 else every)
    return every, every, *index


def _sizes(x: Tensor) -> list[int | str]:
    """The sizes of [B, H, L, D] to compare; "L" stands for the length, which may differ."""
    batch, heads, _, width = x.shape
    return [batch, heads, "L", width]


def check_call(args: Any) -> Call:
    """Check the arguments as far as one rank can, and bring them into the form of the primitive.

    ``args`` has the arguments of :func:`fastattn.distributed.attention`.
    """
    query, key, value, layout, method = args.query, args.key, args.value, args.layout, args.method
    slopes, sinks, sequences = args.alibi_slopes, args.sinks, args.cu_seqlens
    attn_mask, mask = args.attn_mask, args.mask
    local_only = {"layout": layout, "attn_mask": attn_mask, "alibi_slopes": slopes}
    refuse_dtensors(OP, **local_only, sinks=sinks, cu_seqlens=sequences)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise checks.wrong_type(OP, name, x, "Tensor")
        checks.check_tensor(OP, name, x, "[B, H, L, D]", 4, query.device)
    for name in ("is_causal", "enable_gqa"):
        checks.check_flag(OP, name, getattr(args, name))
    for name, choice, allowed in (("method", method, METHODS), ("layout", layout, LAYOUTS)):
        if isinstance(choice, str) and choice not in allowed:
            raise ValueError(f"{OP}: {name} must be one of {', '.join(allowed)}, got {choice!r}")
    if not isinstance(method, str):
        raise checks.wrong_type(OP, "method", method, "str")
    if not isinstance(layout, (str, Tensor, Layout)):
        raise checks.wrong_type(OP, "layout", layout, "str, Tensor or Layout")
    dropout_p = checks.check_dropout(OP, args.dropout_p)
    if args.generator is not None:
        checks.check_generator(OP, args.generator, query.device)
    score_arguments = (args.scale, args.softcap, args.window, args.is_causal)
    scores = checks.score_options(OP, query, *score_arguments)
    if attn_mask is not None and args.is_causal:
        raise RuntimeError(
            f"{OP}: Explicit attn_mask should not be set when is_causal=True; "
            "window=(-1, 0) adds the causal exclusion to a mask"
        )
    query, key, value = checks.autocast(query, key, value)
    checks.check_dtypes(OP, query, key, value)
    checks.check_widths(OP, query, key)
    _check_shapes(query, key, value, args.enable_gqa)
    if isinstance(layout, Tensor) and layout.shape != (query.shape[2],):
        raise ValueError(
            f"{OP}: layout must have the position of each of the {query.shape[2]} rows, "
            f"got shape {tuple(layout.shape)}"
        )
    if not isinstance(layout, str) and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"{OP}: query and key must have the same length for a layout of positions, "
            f"got {query.shape[2]} and {key.shape[2]}"
        )
    batch, heads = query.shape[:2]
    if mask is not None:
        mask = masks.dense_mask(OP, mask)
    if sequences is not None:
        sequences = _check_sequences(sequences, query)
        # The index of the sequence of every position, [L].
        documents = masks.document(torch.repeat_interleave(sequences.diff()))
        mask = documents if mask is None else mask & documents
    if attn_mask is not None:
        attn_mask = _fold_mask(attn_mask, query)
    if slopes is not None:
        slopes = checks.fold_slopes(OP, slopes, query, heads, batch)
    if sinks is not None:
        sinks = checks.check_sinks(OP, sinks, query, heads)
    options = AttentionOptions(**scores, dropout_p=dropout_p)
    seed = draw_seed(query.device, args.generator) if dropout_p > 0 else None
    tensors = (query, key, value, attn_mask, slopes, sinks)
    return Call(*tensors, mask, sequences, options, seed, method, layout)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Check batch, lengths and heads against each other."""
    if not query.shape[0] == key.shape[0] == value.shape[0] or key.shape[2] != value.shape[2]:
        raise RuntimeError(
            f"{OP}: query, key and value must have the same batch, and key and value the same "
            f"length, got shapes {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )
    checks.check_heads(OP, query, key, value, 1)
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise RuntimeError(
            f"{OP}: query and key must have the same number of heads without enable_gqa=True, "
            f"got {query.shape[1]} and {key.shape[1]}"
        )


def _check_sequences(cu_seqlens: Any, query: Tensor) -> Tensor:
    """Check ``cu_seqlens``; return it as int64 on the device of the query."""
    starts = checks.check_integers(OP, "cu_seqlens", cu_seqlens, "[N + 1]", 1, query.device)
    if not starts.numel() or starts[0] != 0 or (starts.diff() < 0).any():
        raise ValueError(
            f"{OP}: cu_seqlens must begin with 0 and not decrease, got {starts.tolist()}"
        )
    return starts


def _fold_mask(mask: Any, query: Tensor) -> Tensor:
    """Check the mask and give it four dimensions; its columns are checked with all ranks' keys."""
    mask = checks.check_mask(OP, mask, query)
    rows = tuple(query.shape[:3])
    if not 1 <= mask.dim() <= 4 or not checks.expands_to(mask.shape[:-1], rows):
        raise RuntimeError(
            f"{OP}: attn_mask must be broadcastable to the scores {(*rows, 'L of all ranks')} "
            f"of this rank's rows, got {tuple(mask.shape)}"
        )
    return mask.view((1,) * (4 - mask.dim()) + tuple(mask.shape))
