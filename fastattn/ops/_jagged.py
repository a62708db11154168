"""Attention over jagged NestedTensors: their rows are already packed, so it calls varlen."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.checks import check_flag, is_jagged, wrong_type
from fastattn.library import Operator
from fastattn.ops import varlen

_NAME = "scaled_dot_product_attention"
_VARLEN_PARAMETERS = inspect.signature(varlen.varlen_attention).parameters


class JaggedFolding(NamedTuple):
    """Restores the caller's [B, H, *, D], or [B, *, D] without heads, from packed rows."""

    offsets: Tensor  # [B + 1] int64, the starts of the sequences of queries
    has_heads: bool

    def restore(self, x: Tensor, has_head: bool = True) -> Tensor:  # as Folding.restore of sdpa
        """out [T, H, Dv] -> [B, H, *, Dv]; lse [H, T] -> [B, H, *]; no H if the input had none."""
        if x.dim() == 2:
            x = x.mT
        if not self.has_heads:
            return torch.nested.nested_tensor_from_jagged(x[:, 0], self.offsets)
        return torch.nested.nested_tensor_from_jagged(x, self.offsets).transpose(1, 2)


def packed_rows(x: Any) -> tuple[Tensor, Tensor]:
    """Return a jagged [B, *, ...] as rows [T, ...], and the start of each sequence, [B + 1]."""
    if x.lengths() is not None:  # it has unused rows between its sequences
        x = x.contiguous()
    return x.values(), x.offsets()


def same_lengths(x: Any, y: Any) -> bool:
    """Whether two jagged tensors with the same number of dimensions have the same lengths."""
    # Tensors built from the same offsets have equal symbolic sizes; others are compared by value.
    return x.shape[-2] == y.shape[-2] or torch.equal(x.offsets(), y.offsets())


def prepare(args: Any) -> tuple[Operator, tuple[Any, ...], JaggedFolding]:
    """Validate; return the operator of packed sequences, its arguments, and the folding."""
    query, key, value, enable_gqa = args.query, args.key, args.value, args.enable_gqa
    check_flag(_NAME, "enable_gqa", enable_gqa)
    if args.attn_mask is not None:
        raise RuntimeError(f"{_NAME}: attn_mask must be None if query is jagged")
    if args.need_weights or args.average_weights:
        raise RuntimeError(f"{_NAME}: need_weights must be False if query is jagged")
    (q, q_starts), (k, k_starts), (v, _) = (
        _pack(name, x, query) for name, x in (("query", query), ("key", key), ("value", value))
    )
    batch = q_starts.shape[0] - 1
    if k_starts.shape[0] - 1 != batch:
        raise RuntimeError(
            f"{_NAME}: query and key must have the same number of sequences, "
            f"got {batch} and {k_starts.shape[0] - 1}"
        )
    if not same_lengths(key, value):
        raise RuntimeError(f"{_NAME}: key and value must have the same lengths")
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise RuntimeError(
            f"{_NAME}: query and key must have the same number of heads without enable_gqa=True, "
            f"got {q.shape[1]} and {k.shape[1]}"
        )
    args = args._replace(query=q, key=k, value=v)
    options = {name: x for name, x in args._asdict().items() if name in _VARLEN_PARAMETERS}
    operator, arguments = varlen.prepare(cu_seqlens_q=q_starts, cu_seqlens_k=k_starts, **options)
    return operator, arguments, JaggedFolding(q_starts, query.dim() == 4)


def _pack(name: str, x: Any, query: Tensor) -> tuple[Tensor, Tensor]:
    """Check [B, H, *, D] or [B, *, D]; return rows [T, H, D] and the starts of the sequences."""
    if not isinstance(x, Tensor):
        raise wrong_type(_NAME, name, x, "Tensor")
    if not is_jagged(x):
        raise RuntimeError(f"{_NAME}: {name} must be jagged, as query is")
    if x.dim() == query.dim() == 4:
        packed, starts = packed_rows(x.transpose(1, 2))
        fits = packed.shape[1] == x.shape[1]
    elif x.dim() == query.dim() == 3:
        packed, starts = packed_rows(x)
        fits, packed = packed.shape[1] == x.shape[2], packed.unsqueeze(1)
    else:
        fits = False
    if not fits:
        raise RuntimeError(
            f"{_NAME}: a jagged {name} must be [B, H, *, D], or [B, *, D] without heads, as query "
            f"is, got shape {tuple(x.shape)}"
        )
    return packed, starts
