"""Appends rows to a cache: their checks, and the operator, which writes in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn import checks, compat, dispatch
from fastattn._flops import count
from fastattn.backends._alloc import empty_output
from fastattn.backends.primitives import AppendOptions
from fastattn.compat import runs_eagerly

_OP = "decode_attention"


def check_new_rows(
    key: Tensor,
    value: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_seqlens: Any,
) -> None:
    if cache_seqlens is None:
        raise ValueError(f"{_OP}: key and value need cache_seqlens, the positions to append at")
    length = key.shape[2]
    for name, x, cache in (("key", key, key_cache), ("value", value, value_cache)):
        expected = (query.shape[0], cache.shape[1], length, cache.shape[3])
        if tuple(x.shape) != expected:
            raise ValueError(
                f"{_OP}: {name} must have shape {expected} (as bhnd), got {tuple(x.shape)}"
            )


def check_strides(**written: Tensor) -> None:
    """Check that each row of the tensors that an append writes has its own memory."""
    for name, x in written.items():
        if any(stride == 0 and n > 1 for n, stride in zip(x.shape, x.stride(), strict=True)):
            raise ValueError(
                f"{_OP}: {name} must have memory for each row where rows are appended, got an "
                f"expanded tensor with strides {x.stride()}"
            )


def copy_overlaps(rows: tuple[Tensor, Tensor], caches: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the new keys and values, copied if they share memory with a cache to be written."""
    storages = {cache.untyped_storage().data_ptr() for cache in caches}
    key, value = (x.clone() if x.untyped_storage().data_ptr() in storages else x for x in rows)
    return key, value


def check_rotary(
    cos: Any,
    sin: Any,
    positions: Any,
    interleaved: Any,
    query: Tensor,  # [B, Hq, Lq, D]
    new_rows: tuple[Tensor, Tensor] | None,  # keys [B, Hkv, L, D] and values [B, Hkv, L, Dv]
    lengths: Tensor,  # [B], how many keys each sequence has before the new tokens
) -> tuple[Tensor | None, ...]:
    """Return cos, sin, positions ([B, L] int64 or None) and query; all None without a rotation."""
    checks.check_flag(_OP, "rotary_interleaved", interleaved)
    if cos is None and sin is None:
        if positions is not None:
            raise ValueError(f"{_OP}: rotary_positions must be None without rotary_cos")
        return None, None, None, None
    if cos is None or sin is None:
        raise ValueError(f"{_OP}: rotary_cos and rotary_sin must be given together")
    if new_rows is None:
        raise ValueError(f"{_OP}: rotary_cos needs key and value, the rows to append")
    length, width = new_rows[0].shape[2:]
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
    row_positions = None if positions is None else _check_positions(positions, query, length)
    table_rows = lengths if row_positions is None else row_positions
    if table_rows.is_cpu and runs_eagerly(table_rows) and table_rows.numel() and length:
        least, most = (int(n) for n in table_rows.aminmax())
        most += length - 1 if row_positions is None else 0
        if least < 0 or most >= cos.shape[0]:
            wrong = least if least < 0 else most
            raise ValueError(
                f"{_OP}: rotary_cos must have a row for each position, got {cos.shape[0]} rows and "
                f"position {wrong}"
            )
    return cos, sin, row_positions, query


def _check_positions(positions: Any, query: Tensor, length: int) -> Tensor:
    """Check ``rotary_positions``, [L] or [B, L], and return them as [B, L]."""
    name, batch = "rotary_positions", query.shape[0]
    dims = positions.dim() if isinstance(positions, Tensor) else 2
    row_positions = checks.check_integers(
        _OP, name, positions, "[L] or [B, L]", 1 if dims == 1 else 2, query.device
    )
    if row_positions.shape[-1] != length or (dims == 2 and row_positions.shape[0] != batch):
        raise ValueError(
            f"{_OP}: {name} must have shape {(length,)} or {(batch, length)}, "
            f"got {tuple(row_positions.shape)}"
        )
    return row_positions.expand(batch, -1)


# --- the operator -----------------------------------------------------------------------------


_WRITTEN = ("key_cache", "value_cache", "key_scales", "value_scales")
# No argument has a default: before torch 2.13 the dispatcher omits trailing arguments that equal
# their defaults, and then does not find the scales, which are written, among the others.
_APPEND = (
    "(Tensor(a0!) key_cache, Tensor(a1!) value_cache, Tensor key, Tensor value, "
    "Tensor cache_seqlens, Tensor? block_table, Tensor? cache_batch_idx, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? rotary_positions, Tensor? query, Tensor(a11!)? key_scales, "
    "Tensor(a12!)? value_scales, Tensor? cache_leftpad, bool rotary_interleaved) -> Tensor"
)
_TENSOR_COUNT, _KEY, _QUERY = 14, 2, 10  # of an append: how many tensors, and places of two
_CACHES, _SCALES = slice(0, 2), slice(11, 13)  # the places of the tensors that it writes


@torch.library.custom_op("fastattn::append_to_cache", mutates_args=_WRITTEN, schema=_APPEND)
def append_operator(*args: Any) -> Tensor:
    """Return the rotated queries; without a rotation, an empty tensor."""
    *tensors, rotary_interleaved = args
    rotated, query = _append_on_backend(tensors, AppendOptions(rotary_interleaved)), tensors[_QUERY]
    if rotated is None or query is None:
        empty: Tensor = tensors[_KEY].new_empty(0)
        return empty
    expected = empty_output(query, query.shape[3])  # with the strides of _append_fake
    return rotated if rotated.stride() == expected.stride() else expected.copy_(rotated)


count(torch.ops.fastattn.append_to_cache, lambda args, results: 0)  # moving rows is no arithmetic


@append_operator.register_fake
def _append_fake(*args: Any) -> Tensor:
    if compat.exports_onnx():  # a graph of torch.export, which holds this operator
        raise compat.not_in_onnx("decode_attention", "it writes to its cache")
    query = args[_QUERY]
    return args[_KEY].new_empty(0) if query is None else empty_output(query, query.shape[3])


def _append_on_backend(tensors: Sequence[Tensor | None], options: AppendOptions) -> Tensor | None:
    name = dispatch.choose("append_to_cache", tensors, options)
    function = dispatch.load(name).append_to_cache  # type: ignore[union-attr]
    rotated: Tensor | None = function(
        *dispatch.accepted_tensors(function, tensors), options=options
    )
    return rotated


def append(tensors: Sequence[Tensor | None], options: AppendOptions) -> Tensor | None:
    """Append to the caches, in place; return the rotated queries, or None without a rotation.

    ``tensors`` are in the order of the schema; trailing ones may be missing. PyTorch's dispatcher
    takes long for a decoding step, so it is used only under a tracer, mode or transform.
    """
    if runs_eagerly(*tensors):
        rotated = _append_on_backend(tensors, options)
        for written in (*tensors[_CACHES], *tensors[_SCALES]):
            if written is not None:
                torch.autograd.graph.increment_version(written)
        return rotated
    all_tensors = (*tensors, *[None] * (_TENSOR_COUNT - len(tensors)))
    result: Tensor = append_operator(*all_tensors, options.rotary_interleaved)
    return None if all_tensors[_QUERY] is None else result
