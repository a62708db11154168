"""Merged states of attention on the CUDA kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn import _cuda
from fastattn.backends._states import named_operands, operators, sizes
from fastattn.backends.cuda.operands import DTYPES, on, why_not_dtype

__all__ = ["merge_states", "merge_states_backward", "why_not"]

_LSE_DTYPES = {torch.float32: 0, torch.float64: 1}


def why_not(out_a: Tensor, **_: Any) -> list[str]:
    """Return the reasons why the kernels cannot run on these arguments."""
    return why_not_dtype(out_a.dtype)


def _call(kernel: Callable[..., None]) -> Callable[[dict[str, Any]], None]:
    def run(tensors: dict[str, Any]) -> None:
        out, lse = tensors["out_a"], tensors["lse_a"]
        dtypes = DTYPES[out.dtype], _LSE_DTYPES[lse.dtype]
        with on(out) as stream:
            kernel(*dtypes, stream, sizes(out), named_operands(tensors))

    return run


merge_states, merge_states_backward = operators(
    _call(_cuda.merge_states), _call(_cuda.merge_states_backward)
)
