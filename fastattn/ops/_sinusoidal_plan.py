"""The plan of the sinusoidal encoding, see :mod:`fastattn.call`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastattn import dispatch
from fastattn.autograd.sinusoidal import encode_positions
from fastattn.backends.primitives import SinusoidalOptions
from fastattn.call import Plans, may_plan
from fastattn.sinusoids import sinusoids

__all__ = ["find", "keep"]

_plans = Plans()
_ROWS = 0  # no size of x is in the signature: the frequencies of each width are kept elsewhere
# Up to so many elements, writing them twice takes less time than a function of autograd in Python.
_FEW_ELEMENTS = 32768


def find(
    x: Any, offset: Any, positions: Any, options: tuple[Any, ...]
) -> tuple[bytes | None, Plan | None]:
    """The signature and the plan of a call, None where it has none. Any offset has the same."""
    if type(offset) is not int or not -(2**62) <= offset < 2**62:
        return None, None
    if (offset and positions is not None) or not may_plan():
        return None, None
    signature = _plans.sign((x, positions), _ROWS, (dispatch.forced.get(), options))
    return signature, _plans.get(signature)


def keep(signature: bytes, positions: Any, call: tuple[Any, ...]) -> None:
    """Keep the plan of a call that the complete path prepared."""
    x, prepared, options = call
    if prepared is positions and encode_positions.choose(call) == "cpu":
        _plans.keep(signature, Plan(options, x.requires_grad))


class Plan:
    """How the calls of one signature run."""

    __slots__ = ("core", "options", "requires_grad")

    def __init__(self, options: SinusoidalOptions, requires_grad: bool) -> None:
        backend: Any = dispatch.load("cpu")
        self.core: Any = backend._cpu
        self.options, self.requires_grad = options, requires_grad

    def run(self, x: Tensor, offset: Any, positions: Tensor | None) -> Tensor:
        options, out = self.options, None
        if self.requires_grad and torch.is_grad_enabled():
            if x.numel() > _FEW_ELEMENTS:
                encoded: Tensor = encode_positions(x, positions, replace(options, offset=offset))
                return encoded
            # d out / d x = scale is the derivative of this product, whose node PyTorch makes and
            # runs in C++. The kernel writes the result over its values, which no derivative reads.
            out = x * options.scale
        columns = sinusoids(x.shape[-1], options.layout, options.max_timescale)
        result: Tensor = self.core.sinusoidal_encoding(options, offset, x, positions, *columns, out)
        return result
