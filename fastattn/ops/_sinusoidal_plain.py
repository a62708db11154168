"""The fast path of the sinusoidal encoding, see :mod:`fastattn.fast_path`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastattn.autograd.sinusoidal import encode_positions
from fastattn.backends.primitives import SinusoidalOptions
from fastattn.fast_path import Native, calls_are_open
from fastattn.sinusoids import LAYOUTS

_native = Native("plain_sinusoidal", encode_positions)
_KNOWN = frozenset(LAYOUTS)
# Up to so many elements, writing them twice takes less time than a function of autograd in Python.
_FEW_ELEMENTS = 32768


def encode_plainly(
    x: Any, offset: Any, layout: Any, max_timescale: Any, scale: Any
) -> Tensor | None:
    """Return the encoding of rows from one offset on, or None: take the general path.

    Returns None unless x has two to four dimensions, is not empty, has few elements if it needs a
    gradient, and all arguments are valid.
    """
    if (
        type(offset) is not int
        or not -(2**62) <= offset < 2**62
        or type(layout) is not str
        or layout not in _KNOWN
        or type(max_timescale) is not float
        or not 1 <= max_timescale < math.inf
        or (scale is not None and type(scale) is not float)
        or not calls_are_open()
    ):
        return None
    number = _native.call(x)
    if not number:
        return None
    native = _native.found.get(number | 1) or _native.find(
        number | 1, x, None, SinusoidalOptions(offset=offset)
    )
    if native is None:
        return None
    scale = 1.0 if scale is None else scale
    out = None
    if number & 1 and torch.is_grad_enabled():
        if x.numel() > _FEW_ELEMENTS:
            return None
        # d out / d x = scale is the derivative of this product, whose node PyTorch makes and runs
        # in C++. The kernel writes the result over its values, which no derivative reads.
        out = x * scale
    encoded: Tensor = native[1].plain_sinusoidal(x, out, offset, layout, max_timescale, scale)
    return encoded
