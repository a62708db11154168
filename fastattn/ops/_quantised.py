"""The checks of quantised caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import checks
from fastattn.backends.primitives import QUANTISED, same_memory
from fastattn.compat import runs_eagerly
from fastattn.ops._append import check_strides

_OP = "decode_attention"


def check_scales(
    key_scales: Any,
    value_scales: Any,
    key_cache: Tensor,
    value_cache: Tensor,
    layout: str,
    key: Any,
    value: Any,
) -> tuple[Tensor | None, Tensor | None]:
    """Check the scales of both caches, given in ``layout``; return them as [E, Hkv, N], or None.

    ``key`` and ``value`` are the rows to append, or None.
    """
    scales_and_caches = {"key": (key_scales, key_cache), "value": (value_scales, value_cache)}
    if key_scales is None and value_scales is None:
        for name, (_, cache) in scales_and_caches.items():
            if cache.dtype in QUANTISED:
                raise ValueError(f"{_OP}: {name}_cache of {cache.dtype} needs {name}_scales")
        return None, None
    checked = []
    for name, (scales, cache) in scales_and_caches.items():
        if scales is None:
            raise ValueError(f"{_OP}: key_scales and value_scales must be given together")
        if cache.dtype not in QUANTISED:
            raise RuntimeError(
                f"{_OP}: {name}_cache must be {' or '.join(map(str, QUANTISED))} with "
                f"{name}_scales, got {cache.dtype}"
            )
        if cache.dtype != key_cache.dtype:
            raise RuntimeError(
                f"{_OP}: {name}_cache must have key_cache's dtype {key_cache.dtype}, got "
                f"{cache.dtype}"
            )
        shape = "[E, Hkv, N]" if layout == "bhnd" else "[E, N, Hkv]"
        checks.check_tensor(_OP, f"{name}_scales", scales, shape, 3, cache.device)
        checks.check_constant(_OP, f"{name}_scales", scales)
        if scales.dtype != torch.float32:
            raise RuntimeError(f"{_OP}: {name}_scales must be float32, got {scales.dtype}")
        if scales.shape != cache.shape[:3]:
            raise ValueError(
                f"{_OP}: {name}_scales must have the shape {tuple(cache.shape[:3])} of the rows of "
                f"{name}_cache, got {tuple(scales.shape)}"
            )
        checked.append(scales if layout == "bhnd" else scales.transpose(1, 2))
    if key is not None:
        check_strides(key_scales=checked[0], value_scales=checked[1])
        if runs_eagerly(key_cache, value_cache, *checked, key, value):
            if same_memory(*checked):
                _check_columns(key_cache, value_cache, key, value)
            else:
                _check_apart("cache", key_cache, value_cache)
                _check_apart("scales", *checked)
    return checked[0], checked[1]


def _check_apart(kind: str, keys: Tensor, values: Tensor) -> None:
    """Check that quantised keys and values, which have separate scales, share no memory."""
    if keys.numel() == 0 or keys.stride() != values.stride():
        return
    # With equal strides they overlap only if rows of one begin within rows of the other.
    offset = (values.data_ptr() - keys.data_ptr()) // keys.element_size()
    lower = keys if offset >= 0 else values
    columns, stride = (lower.shape[3], max(lower.stride(3), 1)) if lower.ndim == 4 else (1, 1)
    if abs(offset) < columns * stride and offset % stride == 0:
        raise ValueError(
            f"{_OP}: value_{kind} must not be key_{kind} or a view of it where rows are "
            "appended, unless values are the first columns of the keys and value_scales is "
            "key_scales, because other rows of quantised caches have scales of their own"
        )


def _check_columns(key_cache: Tensor, value_cache: Tensor, key: Any, value: Any) -> None:
    """Check that the values are columns of the keys, as a scale that both share requires."""
    for name, key_tensor, value_tensor in (
        ("value_cache", key_cache, value_cache),
        ("value", key, value),
    ):
        if not same_memory(key_tensor, value_tensor) or value_tensor.shape[3] > key_tensor.shape[3]:
            raise ValueError(
                f"{_OP}: {name} must be a view of the first columns of "
                f"{name.replace('value', 'key')} where rows are appended and value_scales is "
                "key_scales, because a key and its value then have one scale"
            )


def check_rotation(key_scales: Any, value_scales: Any) -> None:
    """Refuse a rotation of keys whose columns are the values: it would rotate the values, too."""
    if runs_eagerly(key_scales, value_scales) and same_memory(key_scales, value_scales):
        raise ValueError(
            f"{_OP}: rotary_cos must be None where value_scales is key_scales, because values "
            "would be rotated with the keys that they are columns of; rotate the other columns "
            "before the call"
        )
