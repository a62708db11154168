"""The projections of an attention layer; ``linear`` is the only function that calls a GEMM.

    y = x Wᵀ + b          x [..., K]   W [N, K]   b [N]   y [..., N]
    dx = dy W     dW = dyᵀ x     db = Σ dy

Three quarters of the arithmetic of a typical layer is here, so the GEMM is chosen by measurement:
``fastattn/evidence.py`` has the rule of each processor, a :class:`fastattn.evidence.Gemm`. On an
AMD EPYC with AVX-512 and BF16 (docs/performance.md has the table; speeds are relative to
``torch.nn.functional.linear``):

- float32: from some size on, oneDNN's inner product has 1.05 to 1.35 times the speed of the MKL
  GEMM. For dW of many rows it copies both transposed operands and is slower, so ``torch.mm`` is
  used.
- bfloat16: our own GEMM reads the weight in place without packing and adds the bias on the way, so
  small calls cost least. For larger y a direct call of oneDNN is as fast as PyTorch's, and fuses
  the bias. The gradients have no bias, and no gain.
- float16 and bfloat16 without native arithmetic: PyTorch's GEMM is partly scalar. Ours computes in
  float32, rounds once at the end, and is 4.7 to 5.5 times as fast for y in float16, 12 times and
  more for dx. dW uses PyTorch in float32. For fewer than 8 rows PyTorch's matrix-vector product
  converts no weight.
- everything else: ``torch.nn.functional.linear``.

On an Intel Xeon with AMX, MKL is the fastest in float32, and oneDNN in bfloat16 at any size. On an
AMD EPYC without AVX-512, MKL is the fastest in float32.

If this PyTorch does not expose oneDNN's inner product (`fastattn/compat.py`), or oneDNN is switched
off (``torch.backends.mkldnn.flags(enabled=False)``), ``torch.nn.functional.linear`` is used.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn import compat, dispatch, evidence
from fastattn.nn._eager import is_plain

# The smallest M·N·K for which oneDNN pays off in float32. A call costs about 15 µs more than that
# of F.linear.
_MIN_WORK = 2**22
_MIN_WORK_WEIGHT_GRAD = 2**25
_MAX_ROWS_WEIGHT_GRAD = 2047  # for oneDNN; with more, two transposed copies cancel its gain

# The minimum number of rows for our own GEMM, which maps rows to vector lanes.
_LEAST_ROWS_OF_OURS = 8


@functools.cache
def rule(dtype: torch.dtype) -> evidence.Gemm:
    """Return which GEMM to use for this dtype on this processor."""
    gemm: evidence.Gemm = evidence.choose("gemm", "cpu", dtype=dtype).use
    if dtype == torch.float32 and gemm.forward == "torch" and not torch.backends.mkl.is_available():
        return gemm._replace(forward="onednn", weight_grad="onednn")
    return gemm


evidence.on_change(rule.cache_clear)


@functools.cache
def _native() -> Any | None:
    """The backend module, or None if it is not built. Called late: import loads no backend."""
    found = dispatch.load("cpu")
    return None if isinstance(found, str) else found


_ONEDNN_LINEAR = compat.onednn_linear
_ONEDNN_DTYPES = {torch.float32} | ({torch.bfloat16} if compat.onednn_has_bfloat16 else set())
# Those of 16 bits that the processor does not multiply.
_WIDE_DTYPES = (set() if compat.onednn_has_float16 else {torch.float16}) | (
    set() if compat.onednn_has_bfloat16 else {torch.bfloat16}
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, as ``torch.nn.functional.linear`` but on the fastest GEMM.

    Args:
        x: [..., K], any strides.
        weight: [N, K], any strides.
        bias: [N] or None.

    Returns:
        [..., N], contiguous, in the dtype of the arguments. Differentiable any number of times.

    Under ``torch.func`` transforms, ``torch.compile`` and dispatch modes, and for tensor subclasses
    and other devices, this calls ``torch.nn.functional.linear``. Errors are those of
    ``torch.nn.functional.linear``, except that a bias of another dtype is always accepted.
    """
    if torch.is_autocast_enabled("cpu") and x.is_cpu:
        dtype = torch.get_autocast_dtype("cpu")
        x, weight = _cast(x, dtype), _cast(weight, dtype)
        bias = None if bias is None else _cast(bias, dtype)
    if not _is_ours(x, weight, bias):
        if bias is None or bias.dtype == x.dtype or x.dtype != weight.dtype:
            return F.linear(x, weight, bias)
        # Whether PyTorch accepts a bias of another dtype depends on the strides of x.
        y = F.linear(x, weight)
        return y + bias.to(y.dtype)
    rows = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        y = _Linear.apply(rows, weight, bias)
    else:
        y = _forward(rows, weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0])


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast as autocast casts an argument of ``torch.nn.functional.linear``."""
    return x if x.dtype == torch.float64 or not x.is_floating_point() else x.to(dtype)


def _is_ours(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the arguments are valid and use another GEMM than that of ``F.linear``."""
    if torch.compiler.is_compiling():
        return False  # before reading any size, which would add a guard to the compiled code
    dtype = x.dtype
    if dtype == torch.float32 and x.numel() * weight.numel() < _MIN_WORK * x.shape[-1]:
        return False
    if dtype not in _WIDE_DTYPES and (
        dtype not in _ONEDNN_DTYPES
        or _ONEDNN_LINEAR is None
        or not torch.backends.mkldnn.enabled
        or rule(dtype).forward != "onednn"
    ):
        return False
    if not is_plain(x, weight, bias):
        return False
    return (
        x.dim() >= 2
        and weight.dim() == 2
        and x.shape[-1] == weight.shape[1]
        and weight.dtype == dtype
        and (bias is None or (bias.dtype == dtype and bias.shape == weight.shape[:1]))
        and x.numel() > 0
        and weight.numel() > 0
    )


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [M, K], weight [N, K], bias [N] -> [M, N]"""
    if _is_for_our_gemm(x, weight, bias):
        return _native().linear(x, weight, bias)  # type: ignore[union-attr]
    if x.dtype in _WIDE_DTYPES and x.shape[0] >= _LEAST_ROWS_OF_OURS:
        wide = _forward(x.float(), weight.float(), None if bias is None else bias.float())
        return wide.to(x.dtype)
    if _ONEDNN_LINEAR is None or rule(x.dtype).forward != "onednn" or x.dtype in _WIDE_DTYPES:
        return F.linear(x, weight, bias)
    return _ONEDNN_LINEAR(x, weight, bias, "none", [], "")


def _is_for_our_gemm(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    rows, width = x.shape
    return (
        rows * width * weight.shape[0] <= rule(x.dtype).ours_up_to
        and rows >= _LEAST_ROWS_OF_OURS
        and _native() is not None
        and (weight.stride(1) == 1 or (x.dtype in _WIDE_DTYPES and weight.stride(0) == 1))
        and (bias is None or bias.is_contiguous())
    )


def _weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    """grad [M, N], x [M, K] -> gradᵀ x [N, K]"""
    if grad.dtype in _WIDE_DTYPES:
        return _weight_grad(grad.float(), x.float()).to(grad.dtype)
    m, n = grad.shape
    by_onednn = m <= _MAX_ROWS_WEIGHT_GRAD and rule(grad.dtype).weight_grad == "onednn"
    work = m * n * x.shape[1] if by_onednn else 0
    if _ONEDNN_LINEAR is None or work < _MIN_WORK_WEIGHT_GRAD:
        return grad.t() @ x
    return _ONEDNN_LINEAR(grad.t(), x.t(), None, "none", [], "")


class _Linear(torch.autograd.Function):
    """Old style, without ``setup_context``: a third of the cost. No transform reaches it, see
    ``is_plain``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        if need_x:
            grad_x = linear(grad, weight.t())
        if need_weight:
            # With create_graph the product itself must be differentiable: yᵀ = linear(gradᵀ, xᵀ)
            differentiable = torch.is_grad_enabled() or not is_plain(grad, x)
            grad_weight = linear(grad.t(), x.t()) if differentiable else _weight_grad(grad, x)
        if need_bias:
            grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias
