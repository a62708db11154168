"""The steps of Hopfield retrieval over ranks, each of which has some of the patterns.

The derivatives are the same as on one process (``backends/_hopfield.py``). The steps, and J times a
vector, are reads of the patterns and derivatives of reads, so each sends D + 2 or D numbers for
each query. Their bits are equal on all ranks, which thus take the same number of steps.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastattn.backends._hopfield import Gradients, Patterns, Retrieval, Steps
from fastattn.backends.primitives import HopfieldOptions
from fastattn.distributed._peers import Peers
from fastattn.distributed._read import Reader


def retrieve_over_ranks(peers: Peers, arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Return the final state [G, Q, D], in float32 or wider, and the steps of each query [G, Q].

    ``arguments`` are the primitive's, with the patterns, mask and bias of this rank.
    """
    return _Retrieval.apply(peers, *arguments)


class _Retrieval(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        peers: Peers,
        state: Tensor,  # [G, Q, D]
        stored: Tensor,  # [G, N of this rank, D]
        keys: Tensor | None,
        mask: Tensor | None,
        bias: Tensor | None,
        options: HopfieldOptions,
    ) -> tuple[Tensor, Tensor]:
        xi, taken, ends = _RankPatterns(stored, keys, mask, bias, options, peers).search(state)
        ctx.peers, ctx.options = peers, options
        ctx.save_for_backward(state, stored, keys, mask, bias, taken, ends)
        ctx.mark_non_differentiable(taken)
        return xi, taken

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_xi: Tensor, _taken: None) -> tuple[Tensor | None, ...]:
        state, stored, keys, mask, bias, taken, ends = ctx.saved_tensors
        needs_grad = [ctx.needs_input_grad[n] for n in (1, 2, 3, 5)]  # state, stored, keys, bias
        needed = sum(1 << n for n, needs in enumerate(needs_grad) if needs)
        # Leaves in the dtype of the computation.
        stored_leaf, keys_leaf, bias_leaf = (
            None if x is None else x.detach().to(grad_xi.dtype).requires_grad_(needs)
            for x, needs in zip((stored, keys, bias), needs_grad[1:], strict=True)
        )
        assert stored_leaf is not None
        patterns = _RankPatterns(stored_leaf, keys_leaf, mask, bias_leaf, ctx.options, ctx.peers)
        grads = patterns.gradients(grad_xi, state, taken, ends, needed)
        triples = zip(grads, needs_grad, (state, stored, keys, bias), strict=True)
        grad_state, grad_stored, grad_keys, grad_bias = (
            grad.to(x.dtype) if needs and grad is not None else None for grad, needs, x in triples
        )
        return None, grad_state, grad_stored, grad_keys, None, grad_bias, None


@dataclass(frozen=True)
class _RankPatterns(Patterns):
    """This rank's patterns, read together with the patterns of all ranks."""

    peers: Peers
    few_steps = -1  # always count the steps, because each one costs a message

    @property
    def most_directions(self) -> int:
        return self.stored.shape[2]  # the number of patterns differs between ranks

    def search(self, state: Tensor) -> Retrieval:
        """Step until all queries have converged, or for ``options.steps_max`` steps."""
        # Imported late, because importing fastattn loads no backend.
        reference = importlib.import_module("fastattn.backends.reference.hopfield")
        reader = Reader(self.peers, lambda n: f"step {n} of the retrieval")
        patterns = (self.stored, self.keys, self.mask, self.bias)
        steps = replace(self.options, grad="unroll")
        return reference.hopfield_states(state, *patterns, steps, read=reader.softmax)

    def repeat(self, state: Tensor, taken: Tensor, max_steps: int) -> Steps:
        """Run the steps again; ``trace`` is the last state, with its autograd graph."""
        reader = Reader(self.peers, lambda n: f"step {n} of the retrieval, for its derivative")
        keys = self.stored if self.keys is None else self.keys
        leaf = state.detach().requires_grad_()
        with torch.enable_grad():
            xi = leaf.to(self.stored.dtype)
            for step in range(max_steps):
                new, _, _ = reader.softmax(
                    xi, keys, self.stored, self.mask, self.bias, self.options.scale
                )
                xi = torch.where((taken > step)[..., None], new, xi)
        return Steps(leaf, taken, max_steps, xi, xi.new_empty(0))

    def gradients_of_steps(self, grad_out: Tensor, steps: Steps, needed: int) -> Gradients:
        patterns = (self.stored, self.keys, self.bias)
        needed_patterns = [x if needed >> bit & 1 else None for bit, x in enumerate(patterns, 1)]
        inputs = [steps.state, *needed_patterns]
        leaves = [x for x in inputs if x is not None]
        grads = torch.autograd.grad(
            steps.trace, leaves, grad_out, retain_graph=True, materialize_grads=True
        )
        next_grad = iter(grads)
        return tuple(None if x is None else next(next_grad) for x in inputs)
