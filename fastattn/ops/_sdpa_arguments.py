"""From PyTorch's argument list of attention to the primitive's: validate, broadcast, fold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.autograd import lse_dtype

_NAME = "scaled_dot_product_attention"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Folding(NamedTuple):
    """How the primitive's [B, H, ...] came from the caller's leading dimensions."""

    rank: int  # of the scores: 2 has no head, 3 no batch, more than 4 has several
    batch: tuple[int, ...]  # the caller's batch dimensions, before the head

    def restore(self, x: Tensor, has_head: bool = True) -> Tensor:
        """[B, H, ...] -> the caller's leading dimensions; [B, ...] without a head."""
        if self.rank == 4:
            return x
        if self.rank > 4:
            return x.unflatten(0, self.batch)
        return x[0, 0] if self.rank == 2 and has_head else x[0]


def check_tensors(query: Any, key: Any, value: Any) -> None:
    for position, (name, x) in enumerate(_named(query, key, value), 1):
        if not isinstance(x, Tensor):
            raise TypeError(
                f"{_NAME}(): argument '{name}' (position {position}) must be Tensor, "
                f"not {type(x).__name__}"
            )
        if x.is_nested or x.layout is not torch.strided:
            kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
            raise RuntimeError(f"{_NAME}: {name} must be a dense tensor, got a {kind} one")
    for name, x in _named(query, key, value):
        if x.dim() < 2:
            raise RuntimeError(
                f"{_NAME}: {name} must have at least 2 dimensions, got shape {_shape(x)}"
            )
        if x.device != query.device:
            raise RuntimeError(
                f"{_NAME}: query, key and value must be on the same device, "
                f"got {query.device}, {key.device} and {value.device}"
            )


def check_dtypes(query: Tensor, key: Tensor, value: Tensor) -> None:
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(
            f"{_NAME}: query, key and value must have the same dtype, "
            f"got {_dtype(query)}, {_dtype(key)} and {_dtype(value)}"
        )
    if query.dtype not in _FLOATS:
        # PyTorch's types: no kernel for complex or 8-bit floats, no meaning for integers.
        floating = query.dtype.is_floating_point or query.dtype.is_complex
        error = NotImplementedError if floating else RuntimeError
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _FLOATS)
        raise error(f"{_NAME}: query must be one of {allowed}, got {_dtype(query)}")


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as PyTorch's autocast does for attention: every floating dtype but float64."""
    device = tensors[0].device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors
    )


def fold(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Folding]:
    """Return query [B, Hq, Lq, D], key [B, Hkv, Lk, D], value [B, Hkv, Lk, Dv]; as views."""
    if query.shape[-1] != key.shape[-1]:
        raise RuntimeError(
            f"{_NAME}: query and key must have the same last dimension, "
            f"got shapes {_shape(query)} and {_shape(key)}"
        )
    if key.shape[-2] != value.shape[-2]:
        raise RuntimeError(
            f"{_NAME}: key and value must have the same length (dimension -2), "
            f"got shapes {_shape(key)} and {_shape(value)}"
        )
    tensors = (query, key, value)
    if enable_gqa and min(x.dim() for x in tensors) < 3:
        raise IndexError(
            f"{_NAME}: enable_gqa=True needs a head dimension (dimension -3) in query, key and "
            f"value, got shapes {_shape(query)}, {_shape(key)} and {_shape(value)}"
        )
    rank = max(x.dim() for x in tensors)
    batch = _broadcast("batch dimensions", *(tuple(x.shape[:-3]) for x in tensors))
    query, key, value = (_fold_batch(x, batch) for x in tensors)
    query, key, value = (_group_heads if enable_gqa else _broadcast_heads)(query, key, value)
    return query, key, value, Folding(rank, batch)


def _fold_batch(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    """[*, H, L, D] -> [B, H, L, D], B the product of ``batch``."""
    if x.dim() == 2:
        x = x.unsqueeze(0)
    if x.dim() == 4 and tuple(x.shape[:1]) == batch:
        return x
    rows = tuple(x.shape[-3:])
    return x.expand(batch + rows).reshape((math.prod(batch), *rows))


def _broadcast_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One head may serve all of them; key and value keep it, as a group of all query heads."""
    sizes = [x.shape[1] for x in (query, key, value)]
    (heads,) = _broadcast("number of heads (dimension -3)", *((n,) for n in sizes))
    if sizes[0] != heads:
        query = query.expand(-1, heads, -1, -1)
    if sizes[1] != sizes[2]:
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
    return x.expand(-1, heads, -1, -1) if n == 1 else x.repeat_interleave(heads // n, 1)


def fold_mask(
    mask: Any, query: Tensor, k_len: int, folding: Folding
) -> Tensor:  # [B|1, Hq|1, Lq|1, Lk|1]
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"{_NAME}(): argument 'attn_mask' must be Tensor, not {type(mask).__name__}"
        )
    if mask.dtype not in (torch.bool, query.dtype, torch.float32):
        raise RuntimeError(
            f"{_NAME}: attn_mask must be bool, float32 or of query's dtype {_dtype(query)}, "
            f"got {_dtype(mask)}"
        )
    if mask.device != query.device:
        raise RuntimeError(
            f"{_NAME}: attn_mask must be on query's device {query.device}, got {mask.device}"
        )
    if mask.is_nested or mask.layout is not torch.strided:
        raise RuntimeError(f"{_NAME}: attn_mask must be a dense tensor")
    _, heads, q_len, _ = query.shape
    scores = (*folding.batch, heads, q_len, k_len)[-folding.rank :]
    aligned = scores[len(scores) - mask.dim() :] if mask.dim() <= len(scores) else ()
    if len(aligned) != mask.dim() or any(
        n not in (1, m) for n, m in zip(mask.shape, aligned, strict=True)
    ):
        raise RuntimeError(
            f"{_NAME}: attn_mask must be broadcastable to the scores {scores}, got {_shape(mask)}"
        )
    if mask.dim() < 4:
        return mask[(None,) * (4 - mask.dim())]
    if folding.rank == 4:
        return mask
    return _fold_leading(mask, 3, folding.batch)


def fold_slopes(slopes: Any, query: Tensor, folding: Folding) -> Tensor:  # [B|1, Hq]
    if not isinstance(slopes, Tensor):
        raise TypeError(
            f"{_NAME}(): argument 'alibi_slopes' must be Tensor, not {type(slopes).__name__}"
        )
    if not slopes.is_floating_point() or slopes.device != query.device:
        raise RuntimeError(
            f"{_NAME}: alibi_slopes must be floating and on query's device {query.device}, "
            f"got {_dtype(slopes)} on {slopes.device}"
        )
    expected = (*folding.batch, query.shape[1])
    ok = 1 <= slopes.dim() <= len(expected) and slopes.shape[-1] == expected[-1]
    if not ok or any(
        n not in (1, m) for n, m in zip(slopes.shape, expected[-slopes.dim() :], strict=True)
    ):
        raise RuntimeError(
            f"{_NAME}: alibi_slopes must have shape {expected[-1:]} or {expected}, "
            f"got {_shape(slopes)}"
        )
    slopes = slopes.to(lse_dtype(query.dtype))
    if slopes.dim() == 1:
        return slopes[None]
    return _fold_leading(slopes, 1, folding.batch)


def _fold_leading(x: Tensor, kept: int, batch: tuple[int, ...]) -> Tensor:
    """Fold all but the last ``kept`` dimensions into one, of size 1 or the product of ``batch``."""
    rows = tuple(x.shape[-kept:])
    if all(n == 1 for n in x.shape[:-kept]):
        return x.reshape((1, *rows))
    return x.expand(batch + rows).reshape((math.prod(batch), *rows))


def check_float(name: str, value: Any) -> float:
    if isinstance(value, (float, torch.SymFloat)):
        return value  # type: ignore[return-value]
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"{_NAME}(): argument '{name}' must be float, not {type(value).__name__}")
    return float(value)


def check_bool(name: str, value: Any) -> bool:
    if value is not True and value is not False:
        raise TypeError(f"{_NAME}(): argument '{name}' must be bool, not {type(value).__name__}")
    return value


def check_dropout(dropout_p: Any) -> float:
    p = check_float("dropout_p", dropout_p)
    if not 0.0 <= p <= 1.0:
        raise RuntimeError(f"{_NAME}: dropout_p must be between 0 and 1, got {p}")
    return p


def check_softcap(softcap: Any) -> float:
    cap = check_float("softcap", softcap)
    if not 0.0 < cap < math.inf:
        raise ValueError(f"{_NAME}: softcap must be None or a positive number, got {softcap}")
    return cap


def check_window(window: Any, is_causal: bool) -> tuple[int, int]:
    """Return (left, right), where causal is a right window of 0."""
    left, right = -1, -1
    if window is not None:
        if (
            not isinstance(window, (tuple, list))
            or len(window) != 2
            or not all(map(_is_int, window))
        ):
            raise TypeError(f"{_NAME}: window must be None or a pair of ints, got {window!r}")
        left, right = window
        if left < -1 or right < -1:
            raise ValueError(f"{_NAME}: window must be at least -1 (unlimited), got {window!r}")
    return left, 0 if is_causal else right


def check_alignment(causal_alignment: Any) -> bool:
    if causal_alignment not in ("upper_left", "bottom_right"):
        raise ValueError(
            f"{_NAME}: causal_alignment must be 'upper_left' or 'bottom_right', "
            f"got {causal_alignment!r}"
        )
    return causal_alignment == "bottom_right"


def check_generator(generator: Any, device: torch.device) -> None:
    if not isinstance(generator, torch.Generator):
        raise TypeError(
            f"{_NAME}(): argument 'generator' must be torch.Generator, "
            f"not {type(generator).__name__}"
        )
    if generator.device.type != device.type:
        raise RuntimeError(
            f"{_NAME}: generator must be on query's device {device}, got {generator.device}"
        )


def _is_int(x: Any) -> bool:
    return isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool)


def _broadcast(what: str, *shapes: Sequence[int]) -> tuple[int, ...]:
    first = tuple(shapes[0])
    if all(tuple(shape) == first for shape in shapes):
        return first
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        listed = ", ".join(str(tuple(shape)) for shape in shapes)
        raise RuntimeError(
            f"{_NAME}: the {what} of query, key and value must be broadcastable, got {listed}"
        ) from None


def _named(query: Any, key: Any, value: Any) -> tuple[tuple[str, Any], ...]:
    return (("query", query), ("key", key), ("value", value))


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
