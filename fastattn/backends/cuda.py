"""The adapter of the native CUDA module: from tensors to addresses, shapes, strides and a stream.

Every function has the name and the arguments that it has in ``reference.py``; ``docs/design.md``
defines the primitives. The tests bind the same adapter to a module whose kernels run under an
emulator, on CPU tensors (``tests/emulator``).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from fastattn import _cuda
from fastattn.backends._alloc import empty_output

__all__ = [
    "scaled_dot_product_attention",
    "scaled_dot_product_attention_backward",
    "why_not",
]

_INFO: dict[str, Any] = _cuda.build_info()
_DEVICE: str = _INFO["device"]
_MAX_WIDTH: int = _INFO["widths"][-1]
_MAX_LENGTH = 2**30  # kMaxLength in csrc/cuda/params.h
_DTYPES = {torch.float32: 0, torch.bfloat16: 2, torch.float16: 3}
_MASK_DTYPES = {**_DTYPES, torch.bool: 4}
_OLDEST = (8, 0)  # the first compute capability with the instructions that all kernels use


def why_not(op: str, *tensors: Tensor | None, **_: Any) -> list[str]:
    """Return the reasons why the CUDA kernels cannot run ``op`` on these arguments."""
    given = [tensor for tensor in tensors if tensor is not None]
    for tensor in given:
        if tensor.device.type != _DEVICE:
            return [f"a tensor is on {tensor.device}"]
        if tensor.device != given[0].device:
            return [f"tensors are on {given[0].device} and {tensor.device}"]
    reasons = _why_not_this_device(given[0].device)
    first = 0 if op == "scaled_dot_product_attention" else 3  # cotangents come first
    query, key, value, mask, alibi_slopes = tensors[first : first + 5]
    assert query is not None
    assert key is not None
    assert value is not None
    if query.dtype not in _DTYPES:
        reasons.append(f"the dtype {query.dtype} is not one of float32, bfloat16, float16")
    if mask is not None and mask.dtype not in _MASK_DTYPES:
        reasons.append(f"the mask's dtype {mask.dtype} is not bool, float32, bfloat16 or float16")
    width = max(query.shape[-1], value.shape[-1])
    if width > _MAX_WIDTH:
        reasons.append(f"a head has {width} columns; the kernels take up to {_MAX_WIDTH}")
    if max(*query.shape[:3], key.shape[2]) > _MAX_LENGTH:
        reasons.append(f"a size is greater than {_MAX_LENGTH}")
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        reasons.append("alibi_slopes requires a gradient, which the kernel does not compute")
    return reasons


def _why_not_this_device(device: torch.device) -> list[str]:
    if device.type != "cuda":
        return []
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST:
        found, oldest = (".".join(map(str, c)) for c in (capability, _OLDEST))
        return [f"the GPU has compute capability {found}; the kernels need {oldest}"]
    return []


def scaled_dot_product_attention(
    query: Tensor,  # [B, Hq, Lq, D]
    key: Tensor,  # [B, Hkv, Lk, D]
    value: Tensor,  # [B, Hkv, Lk, Dv]
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    seed: Tensor | None = None,
    *,
    scale: float,
    offset: int,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    weights: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(out, lse, weights)``, see ``docs/design.md``."""
    batch, heads, queries, _ = query.shape
    out = empty_output(query, value.shape[-1])
    lse = query.new_empty((batch, heads, queries), dtype=torch.float64)
    applied, results = query.new_empty(0), None
    if weights != 0:
        # [B, Hq, Lq, Lk], or their mean over the heads as [B, 1, Lq, Lk]
        applied = query.new_empty((batch, heads if weights == 1 else 1, queries, key.shape[2]))
        stats = _row_stats(query)
        results = (_result(applied), stats.data_ptr(), 1.0 if weights == 1 else 1.0 / max(heads, 1))
    options = _options(query, key, attn_mask, alibi_slopes, seed, offset, window_left,
                       window_right, softcap, dropout_p, weights)  # fmt: skip
    with _on(query) as stream:
        _cuda.attention_forward(
            _DTYPES[query.dtype],
            stream,
            _sizes(query, key, value),
            (_operand(query), _operand(key), _operand(value), _operand(out)),
            lse.data_ptr(),
            scale,
            options,
            results,
        )
    return out, lse, applied[:, 0] if weights == 2 else applied


def scaled_dot_product_attention_backward(
    grad_out: Tensor | None,  # [B, Hq, Lq, Dv]
    grad_lse: Tensor | None,  # [B, Hq, Lq]
    grad_weights: Tensor | None,  # as weights
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    offset: int,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    weights: int,
    needs_mask_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, key, value and the mask, see ``docs/design.md``."""
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    if grad_lse is not None:
        grad_lse = grad_lse.to(torch.float64).contiguous()
    if grad_weights is not None and weights == 2:
        grad_weights = grad_weights.unsqueeze(1).expand(*query.shape[:3], key.shape[2])
    grad_query = empty_output(query, query.shape[-1])
    grad_key = empty_output(key, key.shape[-1])
    grad_value = empty_output(value, value.shape[-1])
    grad_mask = None
    if needs_mask_grad:
        assert attn_mask is not None
        grad_mask = query.new_empty(attn_mask.shape, dtype=torch.float32)
    stats = _row_stats(query)
    options = _options(query, key, attn_mask, alibi_slopes, seed, offset, window_left,
                       window_right, softcap, dropout_p, weights)  # fmt: skip
    with _on(query) as stream:
        _cuda.attention_backward(
            _DTYPES[query.dtype],
            stream,
            _sizes(query, key, value),
            (_operand(query), _operand(key), _operand(value), _operand(out)),
            lse.data_ptr(),
            scale,
            options,
            (
                _operand(grad_out),
                0 if grad_lse is None else grad_lse.data_ptr(),
                None if grad_weights is None else _operand(grad_weights),
                _operand(grad_query),
                _operand(grad_key),
                _operand(grad_value),
                stats.data_ptr(),
                None if grad_mask is None else _result(grad_mask),
            ),
        )
    if grad_mask is not None and attn_mask is not None:
        grad_mask = grad_mask.to(attn_mask.dtype)
    return grad_query, grad_key, grad_value, grad_mask


def _sizes(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    batch, heads, queries, width = query.shape
    kv_heads, keys, value_width = key.shape[1], *value.shape[2:]
    return batch, heads, kv_heads, queries, keys, width, value_width


def _row_stats(query: Tensor) -> Tensor:
    """What the kernels keep of each row between them, see RowStats in csrc/cuda/kernels."""
    return query.new_empty((*query.shape[:3], 4), dtype=torch.float32)


def _result(x: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return x.data_ptr(), x.stride(), tuple(x.shape)


@contextlib.contextmanager
def _on(tensor: Tensor) -> Any:
    """The tensor's device is current within the block; yields its current stream, as a number."""
    if tensor.device.type != "cuda":
        yield 0
        return
    with torch.cuda.device(tensor.device):
        yield torch.cuda.current_stream(tensor.device).cuda_stream


def _options(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    offset: int,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    weights: int,
) -> tuple[Any, ...]:
    shape = (*query.shape[:3], key.shape[2])
    alibi = None
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.expand(shape[:2])
        alibi = _operand(alibi_slopes)
    return (
        offset,
        window_left,
        window_right,
        softcap,
        None if attn_mask is None else _operand(attn_mask.expand(shape)),
        0 if attn_mask is None else _MASK_DTYPES[attn_mask.dtype],
        alibi,
        dropout_p,
        0 if seed is None else seed.data_ptr(),
        weights,
    )


def _operand(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.stride()
