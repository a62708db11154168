"""Attention to whole sequences, with a part of the heads on each rank.

Each rank sends its rows of the other ranks' heads to these ranks, so each rank gets all rows of its
own heads (Jacobs et al. 2023, https://arxiv.org/abs/2309.14509). It calls attention once, as on one
machine, and the rows of the output return to their ranks. Both exchanges are permutations, so their
derivatives are the inverse exchanges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastattn import masks
from fastattn.distributed._call import Call
from fastattn.distributed._peers import OP, Peers
from fastattn.distributed.layout import Layout
from fastattn.ops._disentangled import NO_TERMS
from fastattn.ops.sdpa import attention


def heads_divide(call: Call, ranks: int) -> bool:
    """Whether the number of ranks divides the numbers of query heads and of key heads."""
    return call.query.shape[1] % ranks == 0 and call.key.shape[1] % ranks == 0


def head_attention(call: Call, peers: Peers) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)`` of this rank's queries, lse in float64."""
    heads, kv_heads = call.query.shape[1], call.key.shape[1]
    if not heads_divide(call, peers.size):
        raise ValueError(
            f"{OP}: method='ulysses' needs numbers of heads that {peers.size} ranks divide, got "
            f"{heads} of query and {kv_heads} of key, use 'ring' or 'allgather'"
        )
    layouts = (call.queries, call.keys, call.keys)
    query, key, value = _ExchangeHeads.apply(
        _HeadRouting(peers, layouts), True, call.query, call.key, call.value
    )
    local_heads = slice(heads // peers.size * peers.rank, heads // peers.size * (peers.rank + 1))
    mask = None if call.attn_mask is None else _whole_mask(call, peers)
    slopes = None if call.alibi_slopes is None else call.alibi_slopes[:, local_heads]
    sinks = None if call.sinks is None else call.sinks[:, local_heads]
    program = None
    if call.mask is not None:
        batch, lengths = query.shape[0], (query.shape[2], key.shape[2])
        sizes = (batch, batch, *lengths, query.device, query.shape[1], 0)
        part_call = masks.PartCall(OP, *sizes, 0, local_heads.start, lengths, heads)
        program = masks.part_program(call.mask, part_call)
    biases = (mask, slopes, call.seed, sinks, None, None, program, *NO_TERMS)
    options = (
        call.options if call.seed is None else replace(call.options, first_head=local_heads.start)
    )
    out, lse, _ = attention(query, key, value, *biases, options)
    to_rows = _HeadRouting(peers, (call.queries, call.queries))
    # The wider dtype first, so that both are aligned in the message.
    lse, out = _ExchangeHeads.apply(to_rows, False, lse[..., None], out)
    return out, lse[..., 0]


def _whole_mask(call: Call, peers: Peers) -> Tensor:
    """The mask of all rows, [B|1, heads of this rank|1, Lq of all ranks, Lk of all ranks|1]."""
    mask = call.attn_mask
    assert mask is not None
    mask = mask.expand(-1, -1, call.query.shape[2], -1)
    if mask.shape[1] == 1:  # one copy of the head is sent to each rank
        mask = mask.expand(-1, peers.size, -1, -1)
    (mask,) = _ExchangeHeads.apply(_HeadRouting(peers, (call.queries,)), True, mask)
    return mask


class _HeadRouting:
    """Which rows and heads of tensors [B, H, L, D] the ranks exchange: ``layouts`` of the rows."""

    def __init__(self, peers: Peers, layouts: Sequence[Layout]) -> None:
        self.peers, self.layouts = peers, layouts

    def to_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """From this rank's rows of all heads, make all rows, by position, of this rank's heads."""
        size, rank = self.peers.size, self.peers.rank
        chunks = [x.chunk(size, 1) for x in tensors]  # by head, in the order of ranks
        shapes = [
            [(x.shape[0], x.shape[1] // size, layout.lengths[n], x.shape[3]) for n in range(size)]
            for x, layout in zip(tensors, self.layouts, strict=True)
        ]
        received = self._exchange(
            [[chunk[n] for chunk in chunks] for n in range(size)], shapes, rank
        )
        return [
            _by_position([received[n][at] for n in range(size)], layout)
            for at, layout in enumerate(self.layouts)
        ]

    def to_rows(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """From all rows of this rank's heads, make this rank's rows of all heads."""
        size, rank = self.peers.size, self.peers.rank
        sends = [
            [_rows_of_rank(x, layout, n) for x, layout in zip(tensors, self.layouts, strict=True)]
            for n in range(size)
        ]
        shapes = [[tuple(x.shape)] * size for x in sends[rank]]
        received = self._exchange(sends, shapes, rank)
        return [torch.cat([received[n][at] for n in range(size)], 1) for at in range(len(tensors))]

    def _exchange(
        self, sends: Sequence[Sequence[Tensor]], shapes: Any, rank: int
    ) -> list[Sequence[Tensor]]:
        """Send ``sends[n]`` to rank n; return each rank's tensors, of ``shapes[tensor][rank]``."""
        messages = {n: _pack_bytes(sends[n]) for n in self.peers.others}
        sizes = {n: [math.prod(by_rank[n]) for by_rank in shapes] for n in self.peers.others}
        widths = [x.element_size() for x in sends[rank]]
        receives = {
            n: messages[n].new_empty(sum(s * w for s, w in zip(sizes[n], widths, strict=True)))
            for n in self.peers.others
        }
        self.peers.exchange(messages, receives, "the exchange of heads").wait()
        received: list[Sequence[Tensor]] = []
        for n in range(self.peers.size):
            if n == rank:
                received.append(sends[rank])
                continue
            flat = receives[n].split([s * w for s, w in zip(sizes[n], widths, strict=True)])
            received.append(
                [
                    part.view(like.dtype).view(by_rank[n])
                    for part, like, by_rank in zip(flat, sends[rank], shapes, strict=True)
                ]
            )
        return received


def _pack_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors as one message of bytes."""
    return torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in tensors])


def _by_position(rows_of_ranks: Sequence[Tensor], layout: Layout) -> Tensor:
    """Join the rows of all ranks [B, H, L of the rank, D] in the order of positions."""
    runs = {
        run.position: x[:, :, run.rows]
        for x, runs_of_rank in zip(rows_of_ranks, layout.runs, strict=True)
        for run in runs_of_rank
    }
    return torch.cat([runs[position] for position in sorted(runs)], 2) if runs else rows_of_ranks[0]


def _rows_of_rank(x: Tensor, layout: Layout, rank: int) -> Tensor:
    """The rows of one rank, in its order, of x [B, H, L of all ranks, D]."""
    runs = layout.runs[rank]
    chunks = [x[:, :, run.position : run.position + run.length] for run in runs]
    return torch.cat(chunks, 2) if chunks else x[:, :, :0]


class _ExchangeHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, routing: _HeadRouting, to_heads: bool, *tensors: Tensor) -> Any:
        ctx.routing, ctx.to_heads = routing, to_heads
        move = routing.to_heads if to_heads else routing.to_rows
        return tuple(move(tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *_ExchangeHeads.apply(ctx.routing, not ctx.to_heads, *grads)
