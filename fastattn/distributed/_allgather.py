"""Attention to the keys of all ranks that a rank needs, gathered before it begins.

Each rank sends its keys to the ranks that need them, which sort them by position. So a run of
queries takes one call of attention, and there is nothing to merge. The derivative is the derivative
of attention, except that the gradients of keys return to their owner, who adds up the parts of all
ranks in the order of ranks, in float32 or wider.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.distributed._call import Call
from fastattn.distributed._peers import KeyMessages, Peers
from fastattn.distributed._schedule import Schedule
from fastattn.distributed.layout import Run
from fastattn.ops._disentangled import NO_TERMS
from fastattn.ops.sdpa import attention


def gathered_attention(call: Call, peers: Peers) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)`` of this rank's queries, lse in float64."""
    call = call.in_fewest_runs()
    schedule = Schedule(call, peers)
    gathering = _Gathering(call, peers, schedule)
    key, value = _Gather.apply(gathering, call.key, call.value)
    first_key, k_len = gathering.first, key.shape[2]
    # A rank without queries calls attention, too: it takes part in the gradients.
    results = [
        attention(*_arguments(call, run, key, value, first_key, k_len))
        for run in schedule.queries or (Run(0, first_key, 0),)
    ]
    outs, lses, _ = zip(*results, strict=True)
    if len(results) == 1:
        return outs[0], lses[0]
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _arguments(
    call: Call, run: Run, key: Tensor, value: Tensor, first: int, k_len: int
) -> tuple[Any, ...]:
    """The arguments of attention for one run of queries and the gathered keys."""
    mask = call.own_mask(run.rows, slice(first, first + k_len))
    program = call.program(run, first, k_len)
    biases_of_call = (mask, call.alibi_slopes, call.seed, call.sinks, None, None, program)
    biases = (*biases_of_call, *NO_TERMS)
    options = call.options_at(run.position, first)
    return call.query[:, :, run.rows], key, value, *biases, options


class _Gathering(KeyMessages):
    """The ranks that send keys to this rank, and the ranks that need this rank's keys."""

    def __init__(self, call: Call, peers: Peers, schedule: Schedule) -> None:
        super().__init__(call.key, call.value, call.keys.lengths)
        self.peers, self.runs, rank = peers, call.keys.runs, peers.rank
        self.givers = schedule.needs[rank].nonzero().flatten().tolist()
        self.takers = schedule.needs[:, rank].nonzero().flatten().tolist()
        # The gathered keys have consecutive positions. The keys of a rank in between that is not
        # needed are 0, and no query can see them.
        runs = [run for giver in self.givers for run in self.runs[giver]]
        self.first = min((run.position for run in runs), default=0)
        self.length = max((run.position + run.length for run in runs), default=0) - self.first

    def gather(self, key: Tensor, value: Tensor) -> list[Tensor]:
        """Gather keys and values of consecutive positions from all ranks."""
        local, rank = self.packed(key, value), self.peers.rank
        sends = {taker: local for taker in self.takers if taker != rank}
        receives = {giver: self.empty(giver, key) for giver in self.givers if giver != rank}
        self.peers.exchange(sends, receives, "gathering the keys").wait()
        gathered = [x.new_zeros(*x.shape[:2], self.length, x.shape[3]) for x in (key, value)]
        for giver in self.givers:
            tensors = (key, value) if giver == rank else self.unpacked(receives[giver], giver)
            for x, rows in zip(gathered, tensors, strict=True):
                for run in self.runs[giver]:
                    x[:, :, self._rows(run)] = rows[:, :, run.rows]
        return gathered

    def give_back(self, grad_key: Tensor, grad_value: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's gradients: the sums over the gathered keys of all ranks."""
        wide, rank = torch.promote_types(grad_key.dtype, torch.float32), self.peers.rank
        sends = {
            giver: self.packed(*(self._of(giver, x).to(wide) for x in (grad_key, grad_value)))
            for giver in self.givers
        }
        wide_like = grad_key.new_empty(0, dtype=wide)
        received = {taker: self.empty(rank, wide_like) for taker in self.takers if taker != rank}
        local = sends.pop(rank, None)
        self.peers.exchange(sends, received, "returning the gradients of keys").wait()
        total = self.empty(rank, wide_like).zero_()
        for taker in self.takers:
            grads = local if taker == rank else received[taker]
            assert grads is not None
            total += grads
        return self.unpacked(total, rank)

    def _of(self, rank: int, x: Tensor) -> Tensor:
        """The rows of one rank in its order."""
        return torch.cat([x[:, :, self._rows(run)] for run in self.runs[rank]], 2)

    def _rows(self, run: Run) -> slice:
        """The rows of the gathered keys at the positions of a run."""
        return slice(run.position - self.first, run.position - self.first + run.length)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gathering: _Gathering, key: Tensor, value: Tensor) -> Any:
        ctx.gathering, ctx.dtype = gathering, key.dtype
        return tuple(gathering.gather(key, value))

    @staticmethod
    def backward(ctx: Any, grad_key: Tensor, grad_value: Tensor) -> tuple[Tensor | None, ...]:
        grads = _GiveBack.apply(ctx.gathering, grad_key, grad_value)
        return None, *(x.to(ctx.dtype) for x in grads)


class _GiveBack(torch.autograd.Function):
    """Sums gradients at the owners of the keys; its derivative gathers again."""

    @staticmethod
    def forward(ctx: Any, gathering: _Gathering, grad_key: Tensor, grad_value: Tensor) -> Any:
        ctx.gathering, ctx.dtype = gathering, grad_key.dtype
        return gathering.give_back(grad_key, grad_value)

    @staticmethod
    def backward(ctx: Any, key: Tensor, value: Tensor) -> tuple[Tensor | None, ...]:
        gathered = _Gather.apply(ctx.gathering, key, value)
        return None, *(x.to(ctx.dtype) for x in gathered)
