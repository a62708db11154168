"""A linear layer on the fastest GEMM: the specification."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn import compat, dispatch, evidence
from fastattn._derivative import Derivative
from fastattn._flops import product_flops
from fastattn.backends._precision import allows_bf16_parts
from fastattn.backends.primitives import LinearBackwardOptions, LinearOptions
from fastattn.compat import runs_eagerly
from fastattn.library import Operator, watchers

_OPTIONS, _OWN_GEMM = LinearOptions(), LinearOptions(gemm="ours")
_TENSOR_TYPES = frozenset({Tensor, torch.nn.Parameter, type(None)})
_IN_16_BITS = (torch.bfloat16, torch.float16)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    r"""Apply an affine map to the last dimension, on the fastest GEMM for the dtype, size and CPU.

    .. math:: y = x W^T + b

    The three products, y, :math:`dx = dy\,W` and :math:`dW = dy^T x`, are computed by PyTorch, by
    oneDNN called directly, or by fastattn's own kernel, whichever was measured to be fastest
    (docs/linear.md has the figures, ``fastattn tune`` measures again). The largest gains are in 16
    bits on processors without 16-bit arithmetic, where PyTorch's products are scalar.

    Args:
        input: [..., K], any strides, float32, float64, bfloat16 or float16.
        weight: [N, K], any strides, in the dtype of ``input``. It is read in every call, so it may
            change between calls.
        bias: [N] or None.

    Returns:
        [..., N]. Differentiable any number of times. 16-bit results are summed in float32 and
        rounded once. In fastattn's kernel, a row has the same bits in every batch and for every
        number of threads; ``fastattn.explain("linear", ...)`` says which kernel runs.

    Autocast, ``torch.compile``, ``torch.func``, tensor subclasses, other devices and PyTorch's
    switches (``torch.backends.mkldnn``, the precision of float32 products) affect this function as
    they affect ``torch.nn.functional.linear``, which also serves the calls where it is fastest.

    Raises:
        The errors of ``torch.nn.functional.linear``.

    Example:
        >>> x, weight, bias = torch.randn(2, 100, 64), torch.randn(32, 64), torch.randn(32)
        >>> linear(x, weight, bias).shape
        torch.Size([2, 100, 32])
    """
    if not (isinstance(input, Tensor) and isinstance(weight, Tensor)):
        return F.linear(input, weight, bias)  # type: ignore[unreachable]
    if torch.is_autocast_enabled("cpu") and input.is_cpu:
        return _linear_under_autocast(input, weight, bias)
    if torch.compiler.is_compiling():  # before any size, which would become a guard
        if _is_compiled(input.dtype) and _fits(input, weight, bias):
            return _call_operator(input, weight, bias)
        return F.linear(input, weight, bias)
    if forced := dispatch.forced.get():
        return _run_forced(forced, input, weight, bias)
    choose = _choices.get(input.dtype)
    if choose is None:
        choose = _make_choice(input.dtype)
    size = input.numel()
    gemm = (
        choose(size // max(weight.shape[-1], 1), size * weight.shape[0]) if weight.dim() else None
    )
    if gemm is None or not _fits(input, weight, bias):
        return F.linear(input, weight, bias)
    if not runs_eagerly(input, weight, bias):
        if watchers.get() or products_are_scalar(input.dtype):
            return _call_operator(input, weight, bias)
        return F.linear(input, weight, bias)
    rows = input if input.dim() == 2 else input.reshape(-1, input.shape[-1])
    if torch.is_grad_enabled() and compat.any_requires_grad(input, weight, bias):
        y = operator.planned(rows, weight, bias, _OPTIONS)
    else:
        y = gemm(rows, weight, bias)
    return y if input.dim() == 2 else y.view(*input.shape[:-1], weight.shape[0])


class PackedWeight:
    """A packed copy of a weight, which is used until a change of the weight is detected.

    Another tensor in its place, another storage, and a write that raises its version are detected;
    a write through ``.data`` is not. Copies and pickles of a module hold None in its place.

    ``weight`` is the parameter, ``matrix`` the same as [N, K].
    """

    LEAST_ROWS = 48  # of x: fewer are faster by the weight as it is

    def __init__(self, weight: Tensor, matrix: Tensor) -> None:
        self._weight = weakref.ref(weight)
        self._state = self._state_of(weight)
        native: Any = dispatch.load("cpu")
        self.rows: Tensor | None = native.pack_weight(matrix.detach())

    @staticmethod
    def _state_of(weight: Tensor) -> tuple[Any, ...]:
        return weight.data_ptr(), weight._version, weight.shape, weight.stride(), weight.dtype

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # what a copy or a pickle holds instead

    def serves(self, weight: Tensor) -> bool:
        """Whether the weight has not changed; if it has, free the copy."""
        if self.rows is not None and not (
            self._weight() is weight and self._state == self._state_of(weight)
        ):
            self.rows = None
        return self.rows is not None

    def linear(self, x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor | None:
        """Apply the layer by a copy that :meth:`serves`; None if :func:`linear` must run."""
        if (
            torch.is_autocast_enabled("cpu")
            or dispatch.forced.get()
            or not _fits(x, matrix, bias)
            or x.numel() < self.LEAST_ROWS * x.shape[-1]
            or not runs_eagerly(x, matrix, bias)
            or (torch.is_grad_enabled() and compat.any_requires_grad(x, matrix, bias))
            or (x.dtype == torch.float32 and allows_bf16_parts())
        ):
            return None
        native: Any = dispatch.load("cpu")
        y: Tensor = native.linear_packed(x.reshape(-1, x.shape[-1]), matrix, bias, self.rows)
        return y.view(*x.shape[:-1], matrix.shape[0])


def _run_forced(backend: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply the layer on a forced backend; PyTorch runs all but ``cpu`` and ``reference``."""
    if backend not in ("cpu", "reference") or not _fits(x, weight, bias):
        return F.linear(x, weight, bias)
    return _call_operator(x, weight, bias, _OWN_GEMM if backend == "cpu" else _OPTIONS)


def _linear_under_autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply the layer under autocast: by PyTorch, which caches cast weights, if it is fast."""
    dtype = torch.get_autocast_dtype("cpu")
    if not products_are_scalar(dtype) or torch.float64 in (x.dtype, weight.dtype):
        return F.linear(x, weight, bias)
    with torch.autocast("cpu", enabled=False):
        return linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def _call_operator(
    x: Tensor, weight: Tensor, bias: Tensor | None, options: LinearOptions = _OPTIONS
) -> Tensor:
    y: Tensor = operator(x.reshape(-1, x.shape[-1]), weight, bias, options)
    return y.view(*x.shape[:-1], weight.shape[0])


def prepare(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> tuple[Operator, tuple[Tensor, Tensor, Tensor | None, LinearOptions]]:
    """Validate the arguments of :func:`linear`; return the operator and its arguments."""
    if not (isinstance(input, Tensor) and isinstance(weight, Tensor)) or not _fits(
        input, weight, bias
    ):
        F.linear(input, weight, bias)  # raises
        raise NotImplementedError("linear: PyTorch alone serves these arguments")
    options = _OWN_GEMM if dispatch.forced.get() == "cpu" else _OPTIONS
    return operator, (input.reshape(-1, input.shape[-1]), weight, bias, options)


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the arguments are valid and supported by the operator."""
    return (
        type(x) in _TENSOR_TYPES
        and type(weight) in _TENSOR_TYPES
        and type(bias) in _TENSOR_TYPES
        and x.is_cpu
        and weight.is_cpu
        and not x.is_nested
        and x.dim() >= 1
        and weight.dim() == 2
        and x.shape[-1] == weight.shape[1]
        and weight.dtype == x.dtype
        and (bias is None or (bias.dtype == x.dtype and bias.shape == weight.shape[:1]))
    )


# For each dtype, a function (rows, M·N·K) -> GEMM, or None for F.linear; filled on first use.
_choices: dict[torch.dtype, Callable[[int, int], Any]] = {}
evidence.on_change(_choices.clear)


def _make_choice(dtype: torch.dtype) -> Callable[[int, int], Any]:
    native: Any = dispatch.load("cpu")
    supported = not isinstance(native, str) and dtype in native.DTYPES and dtype.is_floating_point
    _choices[dtype] = native.faster_than_torch(dtype) if supported else lambda rows, work: None
    return _choices[dtype]


@compat.constant_for_compiler
def products_are_scalar(dtype: torch.dtype) -> bool:
    """Whether PyTorch's products of this dtype are scalar code on this processor."""
    if dtype not in _IN_16_BITS:
        return False
    native = dispatch.load("cpu")
    return not isinstance(native, str) and native.rule(dtype).y == "ours"


@compat.constant_for_compiler
def _is_compiled(dtype: torch.dtype) -> bool:
    """Whether compiled code calls fastattn's operator, because it gains more than fusion.

    An exported graph calls PyTorch's, to run without fastattn, unless that is scalar code.
    """
    if products_are_scalar(dtype):
        return True
    native = dispatch.load("cpu")
    if isinstance(native, str) or dtype not in native.DTYPES or not dtype.is_floating_point:
        return False
    return native.rule(dtype).y == "tiles" and not compat.is_exporting()


# --- the operator -----------------------------------------------------------------------------


def _flops(results: Any, x: Tensor, weight: Tensor, *rest: Any, backward: bool = False) -> int:
    return product_flops(x.numel() * weight.shape[0], backward)


operator = Operator(
    "linear",
    "x: M K; weight: N K; bias?: N",
    "out: M N",
    options=LinearOptions,
    derivative=Derivative(
        grads="out",
        reads="x weight bias",
        gives="x weight bias",
        options=LinearBackwardOptions,
    ),
    flops=_flops,
)
