"""Composite operations of PyTorch, written as their steps.

:mod:`fastattn.testing.rounding` adds an error to each step. The names and arguments are those of
``torch.ops.aten``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["STEPS"]

aten = torch.ops.aten


def _softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    if x.shape[dim] == 0:  # amax needs an element
        return x
    e = (x - x.amax(dim, keepdim=True)).exp()
    return e / e.sum(dim, keepdim=True)


def _safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    empty = (x == -torch.inf).all(dim, keepdim=True)
    return torch.where(empty, 0.0, _softmax(torch.where(empty, 0.0, x), dim))


def _softmax_backward_data(grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    product = grad * y
    return product - y * product.sum(dim, keepdim=True)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    centered = x - x.amax(dim, keepdim=True)
    return centered - centered.exp().sum(dim, keepdim=True).log()


def _logsumexp(x: Tensor, dims: list[int], keepdim: bool = False) -> Tensor:
    largest = x.amax(dims, keepdim=True)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    result = (x - largest).exp().sum(dims, keepdim=True).log() + largest
    return result if keepdim else result.squeeze(dims)


def _logaddexp(a: Tensor, b: Tensor) -> Tensor:
    return torch.maximum(a, b) + (a - b).abs().neg().exp().log1p()


def _add_product(added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    product = a @ b if alpha == 1 else (a @ b) * alpha
    return product + (added if beta == 1 else added * beta)


def _silu(x: Tensor) -> Tensor:
    return x * x.sigmoid()


def _silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    share = x.sigmoid()
    return grad * (share * (1 + x * (1 - share)))


# The tanh form of gelu: x (1 + tanh(c (x + a x^3))) / 2
_C, _A = math.sqrt(2 / math.pi), 0.044715


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        return x * (((x + x * x * x * _A) * _C).tanh() + 1) * 0.5
    return x * ((x * math.sqrt(0.5)).erf() + 1) * 0.5


def _gelu_backward(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        tanh = ((x + x * x * x * _A) * _C).tanh()
        slope = (1 + x * x * (3 * _A)) * _C
        return grad * ((tanh + 1) * 0.5 + x * (1 - tanh * tanh) * slope * 0.5)
    share = ((x * math.sqrt(0.5)).erf() + 1) * 0.5
    density = (x * x * -0.5).exp() * (1 / math.sqrt(2 * math.pi))
    return grad * (share + x * density)


def _layer_norm(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = tuple(range(-len(shape), 0))
    mean = x.mean(dims, keepdim=True)
    centered = x - mean
    rstd = ((centered * centered).mean(dims, keepdim=True) + eps).rsqrt()
    y = centered * rstd
    y = y if weight is None else y * weight
    return y if bias is None else y + bias, mean, rstd


def _layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    wanted: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dims = tuple(range(-len(shape), 0))
    normal = (x - mean) * rstd
    scaled = grad if weight is None else grad * weight
    # dx = rstd (g - mean(g) - normal mean(g normal)), g = grad weight
    means = scaled.mean(dims, keepdim=True), (scaled * normal).mean(dims, keepdim=True)
    rows = (-1, *shape)
    return (
        rstd * (scaled - means[0] - normal * means[1]) if wanted[0] else None,
        (grad * normal).reshape(rows).sum(0) if wanted[1] else None,
        grad.reshape(rows).sum(0) if wanted[2] else None,
    )


_BY_NAME: dict[str, Callable[..., Any]] = {
    "_softmax": _softmax,
    "_safe_softmax": _safe_softmax,
    "_softmax_backward_data": _softmax_backward_data,
    "_log_softmax": _log_softmax,
    "logsumexp": _logsumexp,
    "logaddexp": _logaddexp,
    "addmm": _add_product,
    "baddbmm": _add_product,
    "silu": _silu,
    "silu_backward": _silu_backward,
    "gelu": _gelu,
    "gelu_backward": _gelu_backward,
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
}
# Some versions of PyTorch lack some of them.
STEPS = {getattr(aten, name): steps for name, steps in _BY_NAME.items() if hasattr(aten, name)}
