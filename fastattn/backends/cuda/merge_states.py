"""Merged states of attention on the CUDA kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastattn import _cuda
from fastattn.backends._states import operators
from fastattn.backends.cuda.operands import launch, why_not_dtype

__all__ = ["merge_states", "merge_states_backward", "why_not"]


def why_not(out_a: Tensor, **_: Any) -> list[str]:
    """Return the reasons why the kernels cannot run on these arguments."""
    return why_not_dtype(out_a.dtype)


merge_states, merge_states_backward = operators(
    lambda *states: launch(_cuda.merge_states, states[0], *states),
    lambda *tensors: launch(_cuda.merge_states_backward, tensors[2], *tensors),
)
