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
    call = call.with_fewest_runs()
    schedule = Schedule(call, peers)
    routing = _KeyRouting(call, peers, schedule)
    key, value = _GatherKeys.apply(routing, call.key, call.value)
    first_key, k_len = routing.first_key, key.shape[2]
    # A rank without queries calls attention, too: it takes part in the gradients.
    results = [
        attention(*_attention_arguments(call, run, key, value, first_key, k_len))
        for run in schedule.queries or (Run(0, first_key, 0),)
    ]
    outs, lses, _ = zip(*results, strict=True)
    if len(results) == 1:
        return outs[0], lses[0]
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _attention_arguments(
    call: Call, run: Run, key: Tensor, value: Tensor, first_key: int, k_len: int
) -> tuple[Any, ...]:
    """The arguments of attention for a run of queries; the gathered keys begin at ``first_key``."""
    mask = call.local_mask(run.rows, slice(first_key, first_key + k_len))
    program = call.mask_program(run, first_key, k_len)
    biases_of_call = (mask, call.alibi_slopes, call.seed, call.sinks, None, None, program)
    biases = (*biases_of_call, *NO_TERMS)
    options = call.options_at(run.position, first_key)
    return call.query[:, :, run.rows], key, value, *biases, options


class _KeyRouting(KeyMessages):
    """The ranks that send keys to this rank, and the ranks that need this rank's keys."""

    def __init__(self, call: Call, peers: Peers, schedule: Schedule) -> None:
        super().__init__(call.key, call.value, call.keys.lengths)
        self.peers, self.runs, rank = peers, call.keys.runs, peers.rank
        self.senders = schedule.needs[rank].nonzero().flatten().tolist()
        self.receivers = schedule.needs[:, rank].nonzero().flatten().tolist()
        # The gathered keys have consecutive positions. The keys of a rank in between that is not
        # needed are 0, and no query can see them.
        runs = [run for sender in self.senders for run in self.runs[sender]]
        self.first_key = min((run.position for run in runs), default=0)
        self.length = max((run.position + run.length for run in runs), default=0) - self.first_key

    def gather(self, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return the keys and values of all senders, at consecutive positions."""
        local, rank = self.pack(key, value), self.peers.rank
        sends = {receiver: local for receiver in self.receivers if receiver != rank}
        receives = {sender: self.empty(sender, key) for sender in self.senders if sender != rank}
        self.peers.exchange(sends, receives, "gathering the keys").wait()
        gathered = [x.new_zeros(*x.shape[:2], self.length, x.shape[3]) for x in (key, value)]
        for sender in self.senders:
            tensors = (key, value) if sender == rank else self.unpack(receives[sender], sender)
            for x, rows in zip(gathered, tensors, strict=True):
                for run in self.runs[sender]:
                    x[:, :, self._gathered_rows(run)] = rows[:, :, run.rows]
        return gathered

    def return_gradients(self, grad_key: Tensor, grad_value: Tensor) -> tuple[Tensor, Tensor]:
        """Send gradients of gathered keys to their owners; return the sums for this rank's keys."""
        wide, rank = torch.promote_types(grad_key.dtype, torch.float32), self.peers.rank
        grads = (grad_key, grad_value)
        sends = {
            sender: self.pack(*(self._rank_rows(sender, x).to(wide) for x in grads))
            for sender in self.senders
        }
        wide_like = grad_key.new_empty(0, dtype=wide)
        others = [receiver for receiver in self.receivers if receiver != rank]
        received = {receiver: self.empty(rank, wide_like) for receiver in others}
        local = sends.pop(rank, None)
        self.peers.exchange(sends, received, "returning the gradients of keys").wait()
        total = self.empty(rank, wide_like).zero_()
        for receiver in self.receivers:
            addend = local if receiver == rank else received[receiver]
            assert addend is not None
            total += addend
        return self.unpack(total, rank)

    def _rank_rows(self, rank: int, x: Tensor) -> Tensor:
        """The gathered rows of one rank, in the order of that rank."""
        return torch.cat([x[:, :, self._gathered_rows(run)] for run in self.runs[rank]], 2)

    def _gathered_rows(self, run: Run) -> slice:
        """The rows of the gathered keys at the positions of a run."""
        return slice(run.position - self.first_key, run.position - self.first_key + run.length)


class _GatherKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, routing: _KeyRouting, key: Tensor, value: Tensor) -> Any:
        ctx.routing, ctx.dtype = routing, key.dtype
        return tuple(routing.gather(key, value))

    @staticmethod
    def backward(ctx: Any, grad_key: Tensor, grad_value: Tensor) -> tuple[Tensor | None, ...]:
        grads = _ReturnGradients.apply(ctx.routing, grad_key, grad_value)
        return None, *(x.to(ctx.dtype) for x in grads)


class _ReturnGradients(torch.autograd.Function):
    """Sums gradients at the owners of the keys; its derivative gathers again."""

    @staticmethod
    def forward(ctx: Any, routing: _KeyRouting, grad_key: Tensor, grad_value: Tensor) -> Any:
        ctx.routing, ctx.dtype = routing, grad_key.dtype
        return routing.return_gradients(grad_key, grad_value)

    @staticmethod
    def backward(ctx: Any, key: Tensor, value: Tensor) -> tuple[Tensor | None, ...]:
        gathered = _GatherKeys.apply(ctx.routing, key, value)
        return None, *(x.to(ctx.dtype) for x in gathered)
