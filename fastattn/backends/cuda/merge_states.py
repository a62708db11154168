"""Merged states of attention on the CUDA kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn import _cuda
from fastattn.backends._states import merged, merged_backward, operands, sizes
from fastattn.backends.cuda.operands import DTYPES, on, why_not_dtype
from fastattn.backends.primitives import NoOptions

__all__ = ["merge_states", "merge_states_backward", "why_not"]

_LSE_DTYPES = {torch.float32: 0, torch.float64: 1}


def why_not(out_a: Tensor, **_: Any) -> list[str]:
    """Return the reasons why the kernels cannot run on these arguments."""
    return why_not_dtype(out_a.dtype)


def merge_states(
    out_a: Tensor,  # [..., L, Dv]
    lse_a: Tensor,  # [..., L] float32 or float64
    out_b: Tensor,  # [..., L, Dv]
    lse_b: Tensor,  # [..., L]
    *,
    options: NoOptions,
) -> tuple[Tensor, ...]:
    """Return ``(out, lse)``, see ``docs/design.md``."""
    return merged(_call(_cuda.merge_states), out_a, lse_a, out_b, lse_b)


def merge_states_backward(
    grad_out: Tensor | None,  # [..., L, Dv]
    grad_lse: Tensor | None,  # [..., L]
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    options: NoOptions,
) -> tuple[Tensor, ...]:
    """Return the gradients of out_a, lse_a, out_b and lse_b, see ``docs/design.md``."""
    run = _call(_cuda.merge_states_backward)
    return merged_backward(run, (grad_out, grad_lse), out_a, lse_a, out_b, lse_b)


def _call(kernel: Callable[..., None]) -> Callable[..., None]:
    def run(*groups: Sequence[Any]) -> None:
        out, lse, *_ = groups[-1]  # the results
        dtypes = (DTYPES[out.dtype], _LSE_DTYPES[lse.dtype])
        with on(out) as stream:
            kernel(dtypes, stream, sizes(out), *map(operands, groups))

    return run
