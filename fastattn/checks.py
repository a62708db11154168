"""Shared argument checks of the operators, with the same messages, and shared preparation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn import compat

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTEGERS = (torch.int64, torch.int32)
# Larger than the distance of any two rows in memory; see kFarthest in csrc/params.h.
_FARTHEST = 2**61


def wrong_type(
    op: str, name: str, value: Any, expected: str, position: int | None = None
) -> TypeError:
    """The error of PyTorch's own argument parser."""
    where = "" if position is None else f" (position {position})"
    return TypeError(
        f"{op}(): argument '{name}'{where} must be {expected}, not {type(value).__name__}"
    )


def not_dense(op: str, name: str, x: Tensor, error: type[Exception] = RuntimeError) -> Exception:
    kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
    return error(f"{op}: {name} must be a dense tensor, got a {kind} one")


def check_device(op: str, name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        raise RuntimeError(f"{op}: {name} must be on query's device {device}, got {x.device}")


def check_dense(op: str, **tensors: Any) -> None:
    """Check that tensors are dense, for an operator that raises TypeError for every wrong type."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{op}: {name} must be a Tensor, got {type(x).__name__}")
        if x.is_nested or x.layout is not torch.strided:
            raise not_dense(op, name, x, TypeError)


def check_strided(op: str, name: str, x: Any, position: int | None = None) -> None:
    """Check that a tensor is dense, with PyTorch's errors; ``position``: among the arguments."""
    if not isinstance(x, Tensor):
        raise wrong_type(op, name, x, "Tensor", position)
    if x.is_nested or x.layout is not torch.strided:
        raise not_dense(op, name, x)


def is_jagged(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_nested and x.layout is torch.jagged


def shape_of(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


# ``where`` begins the message. It names the argument, and the operator if its other errors do.


def check_floating(where: str, x: Tensor) -> None:
    if x.dtype not in DTYPES:
        raise TypeError(f"{where} must be float32, float64, bfloat16 or float16, got {x.dtype}")


def check_bool(where: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{where} must be a bool, got {type(value).__name__}")


def check_int(where: str, value: Any, kind: str = "an int") -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{where} must be {kind}, got {type(value).__name__}")


def check_number(where: str, value: Any, kind: str = "a number") -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymFloat)):
        raise TypeError(f"{where} must be {kind}, got {type(value).__name__}")


def check_choice(where: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{where} must be one of {', '.join(allowed)}, got {value!r}")


def check_same_device(where: str, x: Tensor, name: str, other: Tensor) -> None:
    if x.device != other.device:
        raise ValueError(f"{where} is on {x.device}, but {name} is on {other.device}")


def check_alike(where: str, x: Tensor, name: str, other: Tensor) -> None:
    """Check that a tensor has the dtype and the device of the tensor ``name``."""
    if x.dtype != other.dtype:
        raise TypeError(f"{where} must have {name}'s dtype {other.dtype}, got {x.dtype}")
    check_same_device(where, x, name, other)


def expands_to(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Whether a tensor of this shape broadcasts to the target without changing it."""
    # Without `strict=False`: the compiler of torch 2.6 to 2.8 treats it as True.
    pairs = zip(reversed(shape), reversed(target))  # noqa: B905
    # Not `n in (1, m)`: torch.compile would compare a symbolic m without reading its value.
    return len(shape) <= len(target) and not [n for n, m in pairs if n != 1 and n != m]


def check_tensor(op: str, name: str, x: Any, shape: str, dims: int, device: torch.device) -> None:
    check_strided(op, name, x)
    if x.dim() != dims:
        raise ValueError(f"{op}: {name} must be {shape}, got shape {tuple(x.shape)}")
    check_device(op, name, x, device)


def check_integers(
    op: str, name: str, x: Any, shape: str, dims: int, device: torch.device
) -> Tensor:
    """Check for an int32 or int64 tensor; return it as int64."""
    check_tensor(op, name, x, shape, dims, device)
    if x.dtype not in _INTEGERS:
        raise TypeError(f"{op}: {name} must be int32 or int64, got {x.dtype}")
    return x.to(torch.int64)


def check_constant(op: str, name: str, x: Any) -> None:
    """Check that a tensor of an operator without a gradient requires none."""
    if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{op}: {name} requires a gradient, but this operator has none: call it under "
            "torch.no_grad() or torch.inference_mode(), or use scaled_dot_product_attention"
        )


def check_flag(op: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise wrong_type(op, name, value, "bool")


def check_real(op: str, name: str, value: Any) -> float:
    """Return a float, or a value that converts to one; raise the errors of PyTorch's parser."""
    if isinstance(value, (float, torch.SymFloat)):
        return value  # type: ignore[return-value]
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise wrong_type(op, name, value, "float")
    if isinstance(value, Tensor) and value.requires_grad:
        raise TypeError(
            f"{op}: {name} is a constant and gets no gradient, got a tensor that requires one: "
            "detach it, or multiply the query by it"
        )
    return as_double(f"{op}: {name}", value)


def as_double(where: str, number: Any) -> float:
    """``float(number)``; ``where`` names the argument."""
    try:
        return float(number)
    except OverflowError:
        raise ValueError(f"{where} must fit a double, got an integer beyond it") from None


def check_dropout(op: str, dropout_p: Any) -> float:
    p = check_real(op, "dropout_p", dropout_p)
    if not 0.0 <= p <= 1.0:
        raise RuntimeError(f"{op}: dropout_p must be between 0 and 1, got {p}")
    return p


def check_softcap(op: str, softcap: Any, dtype: torch.dtype) -> float:
    """The softcap for a query of this dtype, 0 if it has no effect.

    Kernels divide and multiply by it, so it is kept far from the limits of their dtype. A smaller
    softcap gives the same weights as the smallest one here, because all scores are equal.
    """
    cap = check_real(op, "softcap", softcap)
    if not 0.0 < cap < math.inf:
        raise ValueError(f"{op}: softcap must be None or positive and finite, got {cap}")
    largest = 2.0**800 if dtype is torch.float64 else 2.0**100
    return 0.0 if cap >= largest else max(cap, 1 / largest)


def default_scale(width: int) -> float:
    return 1.0 / math.sqrt(width)


def score_options(
    op: str, query: Tensor, scale: Any, softcap: Any, window: Any, is_causal: bool
) -> dict[str, Any]:
    """The options that the records of all attention operators have."""
    if scale is not None:
        scale = check_real(op, "scale", scale)
    elif not compat.sizes_may_change():  # otherwise it stays None, to be derived at run time
        scale = default_scale(query.shape[-1]) if query.shape[-1] else 1.0
    cap = 0.0 if softcap is None else check_softcap(op, softcap, query.dtype)
    left, right = (-1, -1) if window is None else check_window(op, window)
    right = 0 if is_causal else right
    return {"scale": scale, "window_left": left, "window_right": right, "softcap": cap}


def check_int64(where: str, value: int | torch.SymInt) -> None:
    """Raise unless an integer fits the kernels; ``where`` names the argument."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{where} must fit int64, got {value}")


def check_window(op: str, window: Any) -> tuple[int, int]:
    """Check a window; return its sizes to the left and right, -1 if unlimited."""
    is_pair = isinstance(window, (tuple, list)) and len(window) == 2
    if not is_pair or not all(
        isinstance(n, (int, torch.SymInt)) and not isinstance(n, bool) for n in window
    ):
        raise TypeError(f"{op}: window must be None or a pair of ints, got {window!r}")
    left, right = window
    for size in window:
        check_int64(f"{op}: the sizes of window", size)
    if left < -1 or right < -1:
        raise ValueError(
            f"{op}: the sizes of window must be at least -1 (unlimited), got {window!r}"
        )
    return _unlimited(left), _unlimited(right)


def _unlimited(size: int) -> int:
    """Return -1 for a size beyond every length: kernels add sizes to positions."""
    return -1 if isinstance(size, int) and size >= _FARTHEST else size


def check_generator(op: str, generator: Any, device: torch.device) -> None:
    if not isinstance(generator, torch.Generator):
        raise wrong_type(op, "generator", generator, "torch.Generator")
    if torch.compiler.is_compiling():
        raise RuntimeError(f"{op}: generator must be None under torch.compile")
    if generator.device.type != device.type:
        raise RuntimeError(
            f"{op}: generator must be on query's device {device}, got {generator.device}"
        )


def check_dtypes(op: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(
            f"{op}: query, key and value must have the same dtype, "
            f"got {name_of(query)}, {name_of(key)} and {name_of(value)}"
        )
    if query.dtype not in DTYPES:
        # PyTorch's error types: complex and 8-bit floats have no kernel, integers are invalid.
        floating = query.dtype.is_floating_point or query.dtype.is_complex
        error = NotImplementedError if floating else RuntimeError
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise error(f"{op}: query must be one of {allowed}, got {name_of(query)}")


def check_heads(op: str, query: Tensor, key: Tensor, value: Tensor, dim: int) -> None:
    """Check the numbers of heads: query head h uses key head h // (Hq // Hkv)."""
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
    check_strided(op, "alibi_slopes", slopes)
    if not slopes.is_floating_point():
        raise TypeError(f"{op}: alibi_slopes must be floating, got {slopes.dtype}")
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        raise ValueError(
            f"{op}: alibi_slopes must have shape {(heads,)} or {(batch, heads)}, "
            f"got {tuple(slopes.shape)}"
        )
    check_device(op, "alibi_slopes", slopes, query.device)
    slopes = slopes.to(torch.promote_types(query.dtype, torch.float32))
    return slopes[None] if slopes.dim() == 1 else slopes


def check_sinks(
    op: str,
    sinks: Any,
    query: Tensor,
    heads: int,
    *,
    wrong_dtype: type[Exception] = TypeError,
    wrong_shape: type[Exception] = ValueError,
) -> Tensor:
    """Attention sinks [Hq] as [1, Hq], float32 (float64 for float64)."""
    sinks = wide(op, "sinks", sinks, query, wrong_dtype=wrong_dtype)
    if sinks.dim() != 1 or sinks.shape[0] != heads:
        raise wrong_shape(
            f"{op}: sinks must have shape {(heads,)}, one for each query head, "
            f"got {tuple(sinks.shape)}"
        )
    return sinks.unsqueeze(0)


def wide(
    op: str, name: str, x: Any, query: Tensor, *, wrong_dtype: type[Exception] = TypeError
) -> Tensor:
    """Return a tensor that is added to scores, in the dtype of the scores.

    It must be float32 or of query's dtype. Scores are float64 for float64, otherwise float32.
    """
    check_strided(op, name, x)
    x = autocast_bias(x)
    if x.dtype not in (query.dtype, torch.float32):
        raise wrong_dtype(
            f"{op}: {name} must be float32 or of query's dtype {name_of(query)}, got {name_of(x)}"
        )
    check_device(op, name, x, query.device)
    dtype = torch.promote_types(query.dtype, torch.float32)
    return x if x.dtype is dtype else x.to(dtype)


def check_mask(op: str, mask: Any, query: Tensor) -> Tensor:
    """Check the dtype of a mask of any shape; return it as :func:`autocast_bias` casts it."""
    check_strided(op, "attn_mask", mask)
    mask = autocast_bias(mask)
    if mask.dtype not in (torch.bool, query.dtype, torch.float32):
        raise RuntimeError(
            f"{op}: attn_mask must be bool, float32 or of query's dtype {name_of(query)}, "
            f"got {name_of(mask)}"
        )
    check_device(op, "attn_mask", mask, query.device)
    return mask


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as PyTorch's autocast does for attention: every floating dtype except float64."""
    device = "cpu" if tensors[0].is_cpu else tensors[0].device.type
    if device != "cpu" and not torch.amp.is_autocast_available(device):
        return tensors
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors
    )


def autocast_bias(x: Tensor) -> Tensor:
    """Cast a tensor that is added to scores; float32 is valid for every query, so it stays."""
    return autocast(x)[0] if x.dtype in (torch.float16, torch.bfloat16) else x


def is_causal_bias(mask: Any) -> bool:
    """Whether it is a ``torch.nn.attention.bias.CausalBias``, a causal mask without memory.

    Compares the class's name, because importing that module takes seconds.
    """
    return type(mask).__name__ == "CausalBias"


def as_stored_mask(where: str, mask: Any, device: torch.device) -> Any:
    """Return the boolean mask that a ``CausalBias`` represents; any other mask unchanged."""
    if not is_causal_bias(mask):
        return mask
    if not hasattr(mask, "seq_len_q"):
        raise RuntimeError(
            f"{where}: attn_mask must be a tensor or a CausalBias, not a view of one"
        )
    queries, keys = mask.seq_len_q, mask.seq_len_kv
    diagonal = keys - queries if mask.variant.name == "LOWER_RIGHT" else 0
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(diagonal)


def name_of(x: Tensor) -> str:
    """The dtype of a tensor without "torch."."""
    return str(x.dtype).removeprefix("torch.")
