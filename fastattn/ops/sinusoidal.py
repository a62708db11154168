"""Sinusoidal position encoding: ``x * scale + PE(position)``, exact at any position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastattn import checks
from fastattn.backends.primitives import SinusoidalOptions
from fastattn.call import Plan, Plans, with_arguments_of
from fastattn.library import Operator
from fastattn.sinusoids import LAYOUTS

plans = Plans()
# Up to this many elements, writing the result twice is faster than a Python autograd function.
_FEW_ELEMENTS = 32768
_INTEGERS = (torch.int64, torch.int32)


def sinusoidal_encoding(
    x: Tensor,
    *,
    offset: int | Tensor = 0,
    positions: Tensor | None = None,
    layout: str = "interleaved",
    max_timescale: float = 10000.0,
    scale: float | None = None,
    padding_idx: int | None = None,
) -> Tensor:
    r"""Scale ``x`` and add the sinusoidal encoding of its positions, in one pass.

    .. math:: out = x \cdot scale + PE(position)

    With T = ``max_timescale``, p the position and d the last dimension of ``x``, the layouts are

    ================== ======================================= ================================
    ``interleaved``    PE[2i] = sin(p / T^(2i/d))              PE[2i+1] = cos(p / T^(2i/d))
    ``tensor2tensor``  PE[i] = sin(p / T^(i/(h-1)))            PE[h+i] = cos(p / T^(i/(h-1)))
    ``marian``         PE[i] = sin(p / T^(2i/d))               PE[s+i] = cos(p / T^(2i/d))
    ``split_exponent`` PE[2i] = sin(p / T^(2i/d))              PE[2i+1] = cos(p / T^((2i+1)/d))
    ================== ======================================= ================================

    where h = d // 2 (and h - 1 counts as 1 for d < 4) and s = (d + 1) // 2. An odd d leaves one
    column without a partner: a sine, or zero in ``tensor2tensor``. ``interleaved`` is the layout of
    the paper (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762); docs/sinusoidal.md says which
    library uses which.

    Args:
        x: [..., L, d], float32, float64, bfloat16 or float16, any strides; sizes may be 0.
        offset: the position of the first row. Row l is at ``offset + l``. An integer, or an
            int64/int32 tensor that broadcasts to ``x.shape[:-2]``: a scalar tensor, or [B] for
            sequences at different positions. Not together with ``positions``.
        positions: int64 or int32, broadcasts to ``x.shape[:-1]``: the position of every row.
        layout: one of the four above.
        max_timescale: T, finite and at least 1.
        scale: multiplies ``x``; None is 1, the paper's is ``d ** 0.5``.
        padding_idx: rows at this position get only ``x * scale``, PE = 0.

    Positions may be negative: PE(-p) has the opposite sines and the same cosines.

    Returns:
        [..., L, d] in the dtype and on the device of ``x``. The error of PE is at most 1e-7 up to
        position 1e8 for float32; 16-bit results are computed in float32 and rounded once; float64
        has about 2e-16 + 1.7e-19 * abs(position). Differentiable in ``x``, any number of times.

    Raises:
        TypeError: an argument of the wrong type, or ``x``, ``offset`` or ``positions`` of a dtype
            other than those listed.
        ValueError: an unknown layout, shapes that do not broadcast, ``max_timescale`` below 1, both
            ``offset`` and ``positions``, or tensors on different devices.
    """
    options = (layout, max_timescale, scale, padding_idx)
    signature = plan = None
    # All offsets share a plan.
    if type(offset) is int and -(2**62) <= offset < 2**62 and (positions is None or not offset):
        signature, plan = plans.find((x, positions), *options)
    if plan is None:
        operator, arguments = prepare(x, offset, positions, *options)
        plan = plans.keep(signature, operator, arguments, (x, positions))
    return operator(*arguments) if plan is None else _run_plan(plan, x, offset, positions)


def _run_plan(plan: Plan, x: Tensor, offset: Any, positions: Tensor | None) -> Tensor:
    """Run a call by its plan; see fastattn.call."""
    options, out = plan.options, None
    if plan.requires_grad and torch.is_grad_enabled():
        if x.numel() > _FEW_ELEMENTS:
            return encode_positions(x, positions, replace(options, offset=offset))
        # d out / d x = scale is the derivative of this product, whose node PyTorch creates and runs
        # in C++. The kernel overwrites the values of the product, which no derivative reads.
        out = x * options.scale
    return plan.kernel(x, positions, options=options, offset=offset, out=out)


def sinusoidal_table(
    length: int,
    dim: int,
    *,
    offset: int | Tensor = 0,
    layout: str = "interleaved",
    max_timescale: float = 10000.0,
    padding_idx: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the encodings of positions ``offset``, ..., ``offset + length - 1``: [length, dim].

    The arguments are as in :func:`sinusoidal_encoding`; ``dtype`` and ``device`` default to
    PyTorch's defaults. No table is stored: a call costs about as much as reading one.

    Raises:
        TypeError, ValueError: as :func:`sinusoidal_encoding`; ``length`` or ``dim`` negative.
    """
    for name, size in (("length", length), ("dim", dim)):
        checks.check_int(name, size, "an integer")
        if size < 0:
            raise ValueError(f"{name} must not be negative, got {size}")
        checks.check_int64(name, size)
    # One row of zeros, expanded to length rows: all reads hit the cache.
    zeros = torch.zeros(dim, dtype=dtype, device=device).expand(length, dim)
    return sinusoidal_encoding(
        zeros,
        offset=offset,
        layout=layout,
        max_timescale=max_timescale,
        padding_idx=padding_idx,
    )


def _validate(args: Any) -> tuple[Operator, tuple[Any, ...]]:
    """Validate the named arguments; return the operator and its arguments."""
    x, offset, positions, layout, max_timescale, scale, padding_idx = args
    _check_x(x)
    check_options(layout, max_timescale, scale, padding_idx)
    offset, positions = locate(x, offset, positions)
    scale = 1.0 if scale is None else checks.as_double("scale", scale)
    wavelength = checks.as_double("max_timescale", max_timescale)
    options = SinusoidalOptions(offset, layout, wavelength, scale, padding_idx)
    return encode_positions, (x, positions, options)


prepare = with_arguments_of(sinusoidal_encoding, _validate)


def _check_x(x: Tensor) -> None:
    checks.check_dense("sinusoidal_encoding", x=x)
    checks.check_floating("x", x)
    if x.ndim < 2:
        raise ValueError(f"x must be [..., L, d], got shape {tuple(x.shape)}")


def check_options(
    layout: str, max_timescale: float, scale: float | None, padding_idx: int | None
) -> None:
    checks.check_choice("layout", layout, LAYOUTS)
    if not isinstance(max_timescale, (int, float)):
        raise TypeError(f"max_timescale must be a number, got {type(max_timescale).__name__}")
    if not 1 <= max_timescale < math.inf:
        raise ValueError(f"max_timescale must be finite and at least 1, got {max_timescale}")
    if scale is not None and not isinstance(scale, (int, float, torch.SymFloat)):
        raise TypeError(f"scale must be a number or None, got {type(scale).__name__}")
    if padding_idx is not None:
        checks.check_int("padding_idx", padding_idx, "an integer")
        checks.check_int64("padding_idx", padding_idx)


def _check_positions(name: str, value: Tensor, x: Tensor, dims: int) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be an int64 or int32 Tensor, got {type(value).__name__}")
    if value.dtype not in _INTEGERS:
        raise TypeError(f"{name} must be int64 or int32, got {value.dtype}")
    checks.check_same_device(name, value, "x", x)
    if not checks.expands_to(value.shape, x.shape[:-dims]):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, which does not broadcast to "
            f"x.shape[:-{dims}] = {tuple(x.shape[:-dims])}"
        )


def locate(x: Tensor, offset: int | Tensor, positions: Tensor | None) -> tuple[int, Tensor | None]:
    """Return (offset, None) if a number determines the positions, else (0, int64 tensor)."""
    if positions is not None:
        if isinstance(offset, Tensor) or offset != 0:
            raise ValueError("offset and positions exclude each other: add the offset to positions")
        _check_positions("positions", positions, x, dims=1)
        return 0, positions.to(torch.int64)
    if not isinstance(offset, Tensor):
        checks.check_int("offset", offset, "an integer")
        if not -(2**62) <= offset < 2**62:
            raise ValueError(f"offset must be within 2**62 of zero, got {offset}")
        return offset, None
    _check_positions("offset", offset, x, dims=2)
    rows = torch.arange(x.shape[-2], device=x.device)
    return 0, offset.to(torch.int64).unsqueeze(-1) + rows


# --- the operator -----------------------------------------------------------------------------


def _vmap(
    info: Any, in_dims: Sequence[int | None], x: Tensor, positions: Tensor | None, *options: Any
) -> tuple[Tensor, int]:
    """Move the mapped dimension to the front; positions get it before the dimensions of x."""
    x = x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
    if positions is not None and in_dims[1] is not None:
        positions = positions.movedim(in_dims[1], 0)
        missing_dims = x.ndim - 1 - positions.ndim
        positions = positions.reshape(info.batch_size, *[1] * missing_dims, *positions.shape[1:])
    return encode_positions.dispatched(x, positions, *options), 0


encode_positions = Operator(
    "sinusoidal_encoding",
    "x: ... L D; positions?",
    "out: ... L D",
    options=SinusoidalOptions,
    fake=lambda x, *rest: torch.empty_like(x),
    formula=lambda options, grad: grad if options.scale == 1.0 else grad * options.scale,
    vmap=_vmap,
    flops=lambda _, x, *rest: 2 * x.numel(),  # the scale, and the sum
    not_in_onnx={"": "its frequencies are constants; export the model instead of its graph"},
)
