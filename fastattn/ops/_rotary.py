"""The checks of a rotation of new queries and keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import checks
from fastattn.compat import runs_eagerly

_OP = "decode_attention"


def check_rotary(
    cos: Any,
    sin: Any,
    positions: Any,
    interleaved: Any,
    query: Tensor,  # [B, Hq, Lq, D]
    new: tuple[Tensor, Tensor] | None,  # [B, Hkv, L, D] and [B, Hkv, L, Dv]
    lengths: Tensor,  # [B] before the new tokens
) -> tuple[Tensor | None, ...]:
    """Return the tensors of the primitive: cos, sin, positions [B, L] int64 or None, query."""
    checks.check_flag(_OP, "rotary_interleaved", interleaved)
    if cos is None and sin is None:
        if positions is not None:
            raise ValueError(f"{_OP}: rotary_positions must be None without rotary_cos")
        return None, None, None, None
    if cos is None or sin is None:
        raise ValueError(f"{_OP}: rotary_cos and rotary_sin must be given together")
    if new is None:
        raise ValueError(f"{_OP}: rotary_cos needs key and value, the rows to append")
    length, width = new[0].shape[2:]
    if query.shape[2] > length:
        raise ValueError(
            f"{_OP}: with rotary_cos each query must be of a new token, got {query.shape[2]} "
            f"queries and {length} new keys"
        )
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        checks.check_tensor(_OP, name, x, "[M, R / 2]", 2, query.device)
        checks.check_constant(_OP, name, x)
        if x.dtype not in (query.dtype, torch.float32):
            raise RuntimeError(
                f"{_OP}: {name} must be float32 or of query's dtype {query.dtype}, got {x.dtype}"
            )
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise ValueError(
            f"{_OP}: rotary_cos and rotary_sin must have the same shape and dtype, got "
            f"{tuple(cos.shape)} {cos.dtype} and {tuple(sin.shape)} {sin.dtype}"
        )
    if 2 * cos.shape[1] > width:
        raise ValueError(
            f"{_OP}: rotary_cos must have at most {width // 2} columns, for half of the {width} "
            f"columns of key, got {cos.shape[1]}"
        )
    own = None if positions is None else _positions(positions, query, length)
    used = lengths if own is None else own
    if used.is_cpu and runs_eagerly(used) and used.numel() and length:
        least, most = (int(n) for n in used.aminmax())
        most += length - 1 if own is None else 0
        if least < 0 or most >= cos.shape[0]:
            wrong = least if least < 0 else most
            raise ValueError(
                f"{_OP}: rotary_cos must have a row for each position, got {cos.shape[0]} rows and "
                f"position {wrong}"
            )
    return cos, sin, own, query


def _positions(positions: Any, query: Tensor, length: int) -> Tensor:
    """Return positions [L] or [B, L] as [B, L]."""
    name, batch = "rotary_positions", query.shape[0]
    dims = positions.dim() if isinstance(positions, Tensor) else 2
    own = checks.check_integers(
        _OP, name, positions, "[L] or [B, L]", 1 if dims == 1 else 2, query.device
    )
    if own.shape[-1] != length or (dims == 2 and own.shape[0] != batch):
        raise ValueError(
            f"{_OP}: {name} must have shape {(length,)} or {(batch, length)}, "
            f"got {tuple(own.shape)}"
        )
    return own.expand(batch, -1)
