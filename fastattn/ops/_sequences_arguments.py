"""What the operators on sequences with lengths of their own check before anything is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.ops import _sdpa_arguments as arguments

_INTEGERS = (torch.int64, torch.int32)


def check_tensor(op: str, name: str, x: Any, shape: str, dims: int, device: torch.device) -> None:
    if not isinstance(x, Tensor):
        raise arguments.wrong_type(name, x, "Tensor", op=op)
    if x.is_nested or x.layout is not torch.strided:
        raise arguments.not_dense(name, x, op)
    if x.dim() != dims:
        raise ValueError(f"{op}: {name} must be {shape}, got shape {tuple(x.shape)}")
    if x.device != device:
        raise RuntimeError(f"{op}: {name} must be on query's device {device}, got {x.device}")


def check_integers(
    op: str, name: str, x: Any, shape: str, dims: int, device: torch.device
) -> Tensor:
    """An int32 or int64 tensor, as int64."""
    check_tensor(op, name, x, shape, dims, device)
    if x.dtype not in _INTEGERS:
        raise TypeError(f"{op}: {name} must be int32 or int64, got {x.dtype}")
    return x.to(torch.int64)


def check_heads(op: str, query: Tensor, key: Tensor, value: Tensor, dim: int) -> None:
    """Query head h uses key head h // (Hq // Hkv)."""
    heads, kv_heads = query.shape[dim], key.shape[dim]
    if value.shape[dim] != kv_heads:
        raise ValueError(
            f"{op}: key and value must have the same number of heads (dimension {dim}), got "
            f"{kv_heads} and {value.shape[dim]}"
        )
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(
            f"{op}: the number of heads of key must divide that of query (dimension {dim}), got "
            f"{kv_heads} and {heads}"
        )


def check_widths(op: str, query: Tensor, key: Tensor) -> None:
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"{op}: query and key must have the same last dimension, "
            f"got shapes {tuple(query.shape)} and {tuple(key.shape)}"
        )
    if query.shape[-1] == 0:
        raise ValueError(f"{op}: the last dimension of query and key must not be 0")


def fold_slopes(op: str, slopes: Any, query: Tensor, heads: int, batch: int) -> Tensor:
    """ALiBi's slopes as [B|1, Hq], float32 (float64 for float64)."""
    if not isinstance(slopes, Tensor):
        raise arguments.wrong_type("alibi_slopes", slopes, "Tensor", op=op)
    if not slopes.is_floating_point():
        raise TypeError(f"{op}: alibi_slopes must be floating, got {slopes.dtype}")
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        raise ValueError(
            f"{op}: alibi_slopes must have shape {(heads,)} or {(batch, heads)}, "
            f"got {tuple(slopes.shape)}"
        )
    if slopes.device != query.device:
        raise RuntimeError(
            f"{op}: alibi_slopes must be on query's device {query.device}, got {slopes.device}"
        )
    slopes = slopes.to(torch.float64 if query.dtype == torch.float64 else torch.float32)
    return slopes[None] if slopes.dim() == 1 else slopes


def check_flag(op: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise arguments.wrong_type(name, value, "bool", op=op)
