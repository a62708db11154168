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
    Retrieved,
    Steps,
    backward_on,
)
from fastattn.backends.primitives import (
    HopfieldOptions,
    MemoryHopBackwardOptions,
    MemoryHopOptions,
)
from fastattn.backends.triton._launch import block_of, launch, operand, plan
from fastattn.backends.triton._memory_hops_kernels import Hops, retrieve
from fastattn.backends.triton.memory_hops import (
    _widths,
    options_of,
    run_backward,
    run_forward,
)

TOGETHER = 16  # the most queries that can stop together: those of one tile
_ULPS = 4
ROUND = 256  # steps per call of a search without a limit, which may never converge


@dataclass(frozen=True)
class _Memory(Patterns):
    def hops(self, state: Tensor, steps: int) -> Hops:
        mask, bias = (None if x is None else x.unsqueeze(2) for x in (self.mask, self.bias))
        options = MemoryHopOptions(steps, scale=self.options.scale)
        return options_of(state, *self.memories, mask, bias, options, shared=False)

    def search(self, state: Tensor) -> Retrieved:
        options = self.options
        *lead, width = state.shape
        o = self.hops(state, 1)
        out = state.new_empty((*lead, width))
        taken = torch.zeros(lead, dtype=torch.int64, device=state.device)
        ends = state.new_empty((*lead, 2, width), dtype=torch.float32)
        planned = plan("hops", state, block_of(width))
        of_tile = planned.BM // options.together * options.together
        # One round if there is a limit: then the host does not wait for the GPU.
        most = ROUND if options.steps_max < 0 else options.steps_max
        for done, until in _rounds(taken, options.steps_max, most):
            launch(
                retrieve,
                planned,
                -(-lead[1] // of_tile) * lead[0],
                state.device,
                state=operand(state.unsqueeze(2)) if done == 0 else None,
                o=o,
                p_out=out,
                p_ends=ends,
                p_steps=taken,
                first_step=done,
                steps_max=until,
                shortest=options.eps * options.eps,
                unit=(_ULPS * torch.finfo(torch.float32).eps) ** 2,
                together=options.together,
                **_widths(width),
            )
        return out, taken, ends

    def repeat(self, state: Tensor, taken: Tensor, most: int) -> Steps:
        taken = taken.contiguous()
        o = self.hops(state, most)._replace(p_steps=taken)
        _, trace, stats = run_forward(state, o, MemoryHopOptions())
        return Steps(state, taken, most, trace, stats)

    def gradients_of(self, grad_out: Tensor, steps: Steps, needed: int) -> Gradients:
        state, taken, most, trace, stats = steps
        o = self.hops(state, most)._replace(p_steps=taken)
        bits = needed
        if self.keys is not None:  # then the keys are the input memory
            bits = needed & 8 | (needed & 2) << 1 | (needed & 4) >> 1
        of_scores = self.bias is not None and bool(needed & 8)
        options = MemoryHopBackwardOptions(needed=bits)
        grad_state, (compared, read), _, scores = run_backward(
            grad_out, state, *self.memories, o, trace, stats, options, of_scores
        )
        grad_bias = None
        if scores is not None and self.bias is not None:  # [G, Q, K, N]
            grad_bias = summed_to(self.bias.unsqueeze(2), scores).squeeze(2)
        if self.keys is None:
            return grad_state, compared, None, grad_bias
        return grad_state, read, compared, grad_bias

    @property
    def memories(self) -> tuple[Tensor, Tensor | None]:
        """What is compared with, and what is summed if that is another."""
        return (self.stored, None) if self.keys is None else (self.keys, self.stored)


def _rounds(taken: Tensor, steps_max: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the first step of each round of a search and the end of the round.

    A round has at most ``most`` steps. The last one ends with ``steps_max``, or with all queries at
    rest.
    """
    done = 0
    while True:
        until = done + most if steps_max < 0 else min(done + most, steps_max)
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
) -> Retrieved:
    """Return ``(xi, taken, ends)``, see ``docs/design.md``."""
    return _Memory(stored, keys, mask, bias, options).search(state)


hopfield_retrieve_backward = backward_on(_Memory)
