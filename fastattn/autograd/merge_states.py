"""Merged states of attention as a differentiable operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn._derivative import Derivative
from fastattn.backends.primitives import NoOptions
from fastattn.library import Operator


def _fake_backward(
    grad_out: Tensor | None, grad_lse: Tensor | None, *seen: Any
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in seen[:4])


merge_states = Operator(
    "merge_states",
    "out_a: ... L Dv; lse_a: ... L; out_b: ... L Dv; lse_b: ... L",
    "out: ... L Dv; lse: ... L",
    fake=lambda out_a, lse_a, *rest: (torch.empty_like(out_a), torch.empty_like(lse_a)),
    derivative=Derivative(
        grads="out lse",
        reads="out_a lse_a out_b lse_b",
        gives="out_a lse_a out_b lse_b",
        options=NoOptions,
        fake=_fake_backward,
    ),
    flops=lambda _, out_a, *rest, backward=False: (8 if backward else 4) * out_a.numel(),
)
