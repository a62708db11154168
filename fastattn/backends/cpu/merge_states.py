"""The adapter of merged states: from tensors to addresses and strides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn import _cpu
from fastattn.backends._states import merged, merged_backward, operands, sizes
from fastattn.backends.cpu.operands import DTYPES
from fastattn.backends.primitives import NoOptions


def merge_states(
    out_a: Tensor,  # [..., L, Dv]
    lse_a: Tensor,  # [..., L] float32 or float64
    out_b: Tensor,  # [..., L, Dv]
    lse_b: Tensor,  # [..., L]
    *,
    options: NoOptions,
) -> tuple[Tensor, ...]:
    """Return ``(out, lse)``, see ``docs/design.md``."""
    return merged(_call(_cpu.merge_states), out_a, lse_a, out_b, lse_b)


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
    run = _call(_cpu.merge_states_backward)
    return merged_backward(run, (grad_out, grad_lse), out_a, lse_a, out_b, lse_b)


def _call(kernel: Callable[..., None]) -> Callable[..., None]:
    def run(*groups: Sequence[Any]) -> None:
        out, lse, *_ = groups[-1]  # the results
        dtypes = (DTYPES[out.dtype], DTYPES[lse.dtype])
        kernel(dtypes, torch.get_num_threads(), sizes(out), *map(operands, groups))

    return run
