"""Hopfield retrieval as a differentiable operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastattn._derivative import Derivative
from fastattn._flops import attention_flops, values
from fastattn.backends.primitives import HopfieldBackwardOptions, HopfieldOptions
from fastattn.library import Operator


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
    "hopfield_retrieve",
    "state: G Q D; stored: G N D; keys?: G N D; mask?: G|1 Q|1 N|1; bias?: G|1 Q|1 N|1",
    "out: G Q D; taken: G Q; ends: G Q * D",  # the last two states, or all if they are kept
    options=HopfieldOptions,
    sizes=lambda options, known: {"*": 2},
    derivative=Derivative(
        grads="out",
        # Not the states: the backward repeats the steps.
        reads="state stored keys mask bias taken ends",
        gives="state stored keys bias",
        options=HopfieldBackwardOptions,
        keeps="trace stats",
    ),
    flops=_flops,
    not_in_onnx={"state": "the number of steps depends on values"},
)
