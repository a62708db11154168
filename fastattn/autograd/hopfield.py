"""Hopfield retrieval as a differentiable operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn._derivative import Derivative
from fastattn._flops import attention_flops, values
from fastattn.backends.primitives import HopfieldBackwardOptions, HopfieldOptions
from fastattn.library import Operator


def _fake(state: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *lead, width = state.shape
    return (
        state.new_empty(state.shape),
        state.new_empty(lead, dtype=torch.int64),
        state.new_empty((*lead, 2, width), dtype=torch.promote_types(state.dtype, torch.float32)),
    )


def _work(state: Tensor, stored: Tensor, taken: Tensor, options: HopfieldOptions) -> int:
    """The number of multiplications of states and stored patterns in all steps."""
    steps = values(taken.flatten())
    if steps is not None:
        total = sum(map(abs, steps))
    else:  # all allowed steps; one step without a limit
        total = taken.numel() * (options.steps_max if options.steps_max >= 0 else 1)
    return total * stored.shape[1] * stored.shape[2]


def _flops(
    results: Sequence[Any], state: Tensor, stored: Tensor, *rest: Any, backward: bool = False
) -> int:
    return attention_flops(_work(state, stored, results[1], rest[-1]), 1, 1, backward=backward)


hopfield_states = Operator(
    "hopfield_retrieve(Tensor state, Tensor stored, Tensor? keys, Tensor? mask, Tensor? bias)",
    options=HopfieldOptions,
    results="out taken ends",
    fake=_fake,
    derivative=Derivative(
        grads="out",
        # Not the states: the backward repeats the steps.
        reads="state stored keys mask bias taken ends",
        gives="state stored keys bias",
        options=HopfieldBackwardOptions,
        keeps="trace stats",
    ),
    flops=_flops,
    shapes="state: G Q D; stored: G N D; keys: G N D; mask: G|1 Q|1 N|1; bias: G|1 Q|1 N|1; "
    "out: G Q D; taken: G Q; ends: G Q * D",  # the last two states, or all if they are kept
    not_in_onnx={"state": "the number of steps depends on values"},
)
