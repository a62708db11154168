"""Validates, broadcasts and folds PyTorch's arguments of attention into the primitive's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn import checks
from fastattn.checks import check_mask, expands_to, name_of

_NAME = "scaled_dot_product_attention"
_FLAGS = ("is_causal", "enable_gqa", "return_lse", "need_weights", "average_weights")


class Folding(NamedTuple):
    """How to restore the caller's leading dimensions from the primitive's [B, H, ...]."""

    rank: int  # of the scores: 2 has no head, 3 no batch, more than 4 has several
    batch: tuple[int, ...]  # the caller's batch dimensions, before the head

    def restore(self, x: Tensor, has_head: bool = True) -> Tensor:
        """[B, H, ...] -> the caller's leading dimensions; [B, ...] without a head."""
        if self.rank == 4:
            return x
        if self.rank > 4:
            return x.unflatten(0, self.batch)
        return x[0, 0] if self.rank == 2 and has_head else x[0]


# --- query, key, value -----------------------------------------------------------------------


def check_tensors(query: Any, key: Any, value: Any) -> None:
    for position, name, x in ((1, "query", query), (2, "key", key), (3, "value", value)):
        checks.check_strided(_NAME, name, x, position)
        if x.dim() < 2:
            raise RuntimeError(
                f"{_NAME}: {name} must have at least 2 dimensions, got shape {tuple(x.shape)}"
            )
    if not query.device == key.device == value.device:
        raise RuntimeError(
            f"{_NAME}: query, key and value must be on the same device, "
            f"got {query.device}, {key.device} and {value.device}"
        )


def fold(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Folding]:
    """Return query [B, Hq, Lq, D], key [B, Hkv, Lk, D], value [B, Hkv, Lk, Dv], without copies.

    Copies are needed only if several batch dimensions broadcast, or if key and value have
    different numbers of heads.
    """
    qs, ks, vs = query.shape, key.shape, value.shape
    if qs[-1] != ks[-1]:
        raise RuntimeError(
            f"{_NAME}: query and key must have the same last dimension, "
            f"got shapes {tuple(qs)} and {tuple(ks)}"
        )
    if ks[-2] != vs[-2]:
        raise RuntimeError(
            f"{_NAME}: key and value must have the same length (dimension -2), "
            f"got shapes {tuple(ks)} and {tuple(vs)}"
        )
    ranks = len(qs), len(ks), len(vs)
    if enable_gqa and min(ranks) < 3:
        raise IndexError(
            f"{_NAME}: enable_gqa=True needs a head dimension (dimension -3) in query, key and "
            f"value, got shapes {tuple(qs)}, {tuple(ks)} and {tuple(vs)}"
        )
    if ranks == (4, 4, 4) and qs[0] == ks[0] == vs[0]:
        batch: tuple[int, ...] = (qs[0],)
    else:
        batch = _common_shape("batch dimensions", qs[:-3], ks[:-3], vs[:-3])
        query, key, value = (_fold_batch(x, batch) for x in (query, key, value))
    if not query.shape[1] == key.shape[1] == value.shape[1]:
        query, key, value = (_group_heads if enable_gqa else _broadcast_heads)(query, key, value)
    return query, key, value, Folding(max(ranks), batch)


def _fold_batch(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    """[*, H, L, D] -> [B, H, L, D], where B is the product of ``batch``."""
    if x.dim() == 2:
        x = x.unsqueeze(0)
    rows = x.shape[-3:]
    return x.expand(*batch, *rows).reshape(math.prod(batch), *rows)


def _broadcast_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Broadcast the heads. A single head of key and value is kept: all query heads share it."""
    q_heads, k_heads, v_heads = query.shape[1], key.shape[1], value.shape[1]
    what = "numbers of heads (dimension -3)"
    (heads,) = _common_shape(what, (q_heads,), (k_heads,), (v_heads,))
    if q_heads != heads:
        query = query.expand(-1, heads, -1, -1)
    if k_heads != v_heads:
        key, value = key.expand(-1, heads, -1, -1), value.expand(-1, heads, -1, -1)
    return query, key, value


def _group_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    heads = query.shape[1]
    for name, x in (("key", key), ("value", value)):
        n = x.shape[1]
        if heads % n if n else heads:
            raise RuntimeError(
                f"{_NAME}: with enable_gqa=True the number of heads of {name} must divide that of "
                f"query, got {n} and {heads}"
            )
    if key.shape[1] == value.shape[1]:
        return query, key, value
    return query, _repeat_heads(key, heads), _repeat_heads(value, heads)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    n = x.shape[1]
    if n == heads:  # also for 0 heads
        return x
    return x.expand(-1, heads, -1, -1) if n == 1 else x.repeat_interleave(heads // n, 1)


# --- bias and options ------------------------------------------------------------------------


def fold_mask(mask: Any, query: Tensor, k_len: int, folding: Folding) -> Tensor:
    """Return the mask as [B|1, Hq|1, Lq|1, Lk|1]."""
    mask = check_mask(_NAME, mask, query)
    _, heads, q_len, _ = query.shape
    scores = (*folding.batch, heads, q_len, k_len)[-folding.rank :]
    shape = mask.shape
    if not expands_to(shape, scores):
        raise RuntimeError(
            f"{_NAME}: attn_mask must be broadcastable to the scores {scores}, got {tuple(shape)}"
        )
    if len(shape) < 4:
        return mask.view((1,) * (4 - len(shape)) + tuple(shape))
    return mask if folding.rank == 4 else _fold_leading(mask, 3, folding.batch)


def causal_alignment_of(
    bias: Any, query: Tensor, key: Tensor, is_causal: Any, alignment: Any
) -> str:
    """Return the ``causal_alignment`` that makes ``is_causal`` equal to this bias."""
    if is_causal:
        raise ValueError(f"{_NAME}: CausalBias should not be used with causal=True")
    if alignment != "upper_left":
        raise ValueError(f"{_NAME}: causal_alignment must be left out with a CausalBias")
    lengths = getattr(bias, "seq_len_q", None), getattr(bias, "seq_len_kv", None)  # None: a view
    expected = query.shape[-2], key.shape[-2]
    if lengths != expected:
        raise RuntimeError(
            f"{_NAME}: attn_mask must be a CausalBias of the lengths of query and key, {expected}, "
            f"got {lengths}"
        )
    return "bottom_right" if bias.variant.name == "LOWER_RIGHT" else "upper_left"


def fold_slopes(slopes: Any, query: Tensor, folding: Folding) -> Tensor:
    """Return the slopes as [B|1, Hq], float32 (float64 for float64)."""
    checks.check_strided(_NAME, "alibi_slopes", slopes)
    if not slopes.is_floating_point():
        raise RuntimeError(f"{_NAME}: alibi_slopes must be floating, got {name_of(slopes)}")
    checks.check_device(_NAME, "alibi_slopes", slopes, query.device)
    heads = query.shape[1]
    full = (*folding.batch, heads)
    if slopes.dim() == 0 or slopes.shape[-1] != heads or not expands_to(slopes.shape, full):
        raise RuntimeError(
            f"{_NAME}: alibi_slopes must have shape {(heads,)} or {full}, got {tuple(slopes.shape)}"
        )
    slopes = slopes.to(torch.promote_types(query.dtype, torch.float32))
    return slopes[None] if slopes.dim() == 1 else _fold_leading(slopes, 1, folding.batch)


def _fold_leading(x: Tensor, kept: int, batch: tuple[int, ...]) -> Tensor:
    """Fold all but the last ``kept`` dimensions into one, of size 1 or the product of ``batch``."""
    rows = x.shape[-kept:]
    if all(n == 1 for n in x.shape[:-kept]):
        return x.reshape(1, *rows)
    return x.expand(*batch, *rows).reshape(math.prod(batch), *rows)


def check_flags(arguments: Any) -> None:
    for name in _FLAGS:
        checks.check_flag(_NAME, name, getattr(arguments, name))


def check_combinations(
    attn_mask: Any, is_causal: bool, need_weights: bool, average_weights: bool, alignment: Any
) -> None:
    if attn_mask is not None and is_causal:
        raise RuntimeError(
            f"{_NAME}: Explicit attn_mask should not be set when is_causal=True; "
            "window=(-1, 0) adds the causal exclusion to a mask"
        )
    if average_weights and not need_weights:
        raise ValueError(f"{_NAME}: average_weights=True needs need_weights=True")
    if alignment != "upper_left" and alignment != "bottom_right":
        raise ValueError(
            f"{_NAME}: causal_alignment must be 'upper_left' or 'bottom_right', got {alignment!r}"
        )


# --- shared ----------------------------------------------------------------------------------


def _common_shape(what: str, *shapes: Sequence[int]) -> tuple[int, ...]:
    first = tuple(shapes[0])
    if all(tuple(shape) == first for shape in shapes[1:]):
        return first
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        listed = ", ".join(str(tuple(shape)) for shape in shapes)
        raise RuntimeError(
            f"{_NAME}: the {what} of query, key and value must be broadcastable, got {listed}"
        ) from None
