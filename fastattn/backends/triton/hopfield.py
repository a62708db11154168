"""Hopfield retrieval on Triton: all steps in one launch, and the three derivatives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fastattn.backends._alloc import summed_to
from fastattn.backends._hopfield import (
    Gradients,
    Patterns,
    Retrieval,
    Steps,
    make_backward,
)
from fastattn.backends.primitives import (
    HopfieldOptions,
    MemoryHopBackwardOptions,
    MemoryHopOptions,
)
from fastattn.backends.triton._launch import block_of, launch, operand, plan
from fastattn.backends.triton._memory_hops_kernels import Hops, retrieve
from fastattn.backends.triton.memory_hops import (
    _width_arguments,
    describe_call,
    run_backward,
    run_forward,
)

TOGETHER = 16  # the most queries that can stop together: the queries of one tile
_ULPS = 4
ROUND = 256  # steps per call of a search without a limit, which may never converge


@dataclass(frozen=True)
class _Memory(Patterns):
    def describe_steps(self, state: Tensor, steps: int) -> Hops:
        """Describe steps to the kernels, as memory hops."""
        mask, bias = (None if x is None else x.unsqueeze(2) for x in (self.mask, self.bias))
        options = MemoryHopOptions(steps, scale=self.options.scale)
        return describe_call(state, *self.memories, mask, bias, options, shared=False)

    def search(self, state: Tensor) -> Retrieval:
        """Step until all queries have converged, or for ``options.steps_max`` steps."""
        options = self.options
        *leading, width = state.shape
        call = self.describe_steps(state, 1)
        out = state.new_empty((*leading, width))
        taken = torch.zeros(leading, dtype=torch.int64, device=state.device)
        ends = state.new_empty((*leading, 2, width), dtype=torch.float32)
        launch_plan = plan("hops", state, block_of(width))
        queries_of_tile = launch_plan.BM // options.together * options.together
        # One round if there is a limit: then the host does not wait for the GPU.
        round_steps = ROUND if options.steps_max < 0 else options.steps_max
        for done, until in _rounds(taken, options.steps_max, round_steps):
            launch(
                retrieve,
                launch_plan,
                -(-leading[1] // queries_of_tile) * leading[0],
                state.device,
                state=operand(state.unsqueeze(2)) if done == 0 else None,
                call=call,
                p_out=out,
                p_ends=ends,
                p_steps=taken,
                first_step=done,
                steps_max=until,
                eps_squared=options.eps * options.eps,
                rounding_squared=(_ULPS * torch.finfo(torch.float32).eps) ** 2,
                together=options.together,
                **_width_arguments(width),
            )
        return out, taken, ends

    def repeat(self, state: Tensor, taken: Tensor, max_steps: int) -> Steps:
        taken = taken.contiguous()
        call = self.describe_steps(state, max_steps)._replace(p_steps=taken)
        _, trace, stats = run_forward(state, call, MemoryHopOptions())
        return Steps(state, taken, max_steps, trace, stats)

    def gradients_of_steps(self, grad_out: Tensor, steps: Steps, needed: int) -> Gradients:
        state, taken, max_steps, trace, stats = steps
        call = self.describe_steps(state, max_steps)._replace(p_steps=taken)
        if self.keys is not None:  # the input memory, so the bits of stored (2) and keys (4) swap
            needed = needed & 8 | (needed & 2) << 1 | (needed & 4) >> 1
        needs_scores = self.bias is not None and bool(needed & 8)
        options = MemoryHopBackwardOptions(needed=needed)
        grad_state, (grad_input, grad_output), _, grad_scores = run_backward(
            grad_out, state, *self.memories, call, trace, stats, options, needs_scores
        )
        grad_bias = None
        if grad_scores is not None and self.bias is not None:  # [G, Q, K, N]
            grad_bias = summed_to(self.bias.unsqueeze(2), grad_scores).squeeze(2)
        if self.keys is None:
            return grad_state, grad_input, None, grad_bias
        return grad_state, grad_output, grad_input, grad_bias

    @property
    def memories(self) -> tuple[Tensor, Tensor | None]:
        """The input memory and the output memory of a hop; None: the same as the input."""
        return (self.stored, None) if self.keys is None else (self.keys, self.stored)


def _rounds(taken: Tensor, steps_max: int, round_steps: int) -> Iterator[tuple[int, int]]:
    """Yield the first step and the end of each round of a search.

    A round has at most ``round_steps`` steps. The last round ends at ``steps_max``, or when all
    queries have converged. The caller runs each round, which updates ``taken``.
    """
    done = 0
    while True:
        until = done + round_steps if steps_max < 0 else min(done + round_steps, steps_max)
        yield done, until
        done = until
        if done == steps_max or bool((taken > 0).all()):
            return


def hopfield_retrieve(
    state: Tensor,  # [G, Q, D]
    stored: Tensor,  # [G, N, D]
    keys: Tensor | None,  # [G, N, D]
    mask: Tensor | None,  # [G|1, Q|1, N|1]
    bias: Tensor | None,  # [G|1, Q|1, N|1]
    *,
    options: HopfieldOptions,
) -> Retrieval:
    """Return ``(xi, taken, ends)``, see ``docs/design.md``."""
    return _Memory(stored, keys, mask, bias, options).search(state)


hopfield_retrieve_backward = make_backward(_Memory)
