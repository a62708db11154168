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
    """Whether the ranks divide the numbers of heads."""
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
    query, key, value = _Transpose.apply(
        _Transposition(peers, layouts), True, call.query, call.key, call.value
    )
    own_heads = slice(heads // peers.size * peers.rank, heads // peers.size * (peers.rank + 1))
    mask = None if call.attn_mask is None else _whole_mask(call, peers, own_heads)
    slopes = None if call.alibi_slopes is None else call.alibi_slopes[:, own_heads]
    sinks = None if call.sinks is None else call.sinks[:, own_heads]
    program = None
    if call.mask is not None:
        batch, lengths = query.shape[0], (query.shape[2], key.shape[2])
        sizes = (batch, batch, *lengths, query.device, query.shape[1], 0)
        part_call = masks.PartCall(OP, *sizes, 0, own_heads.start, lengths, heads)
        program = masks.part_program(call.mask, part_call)
    biases = (mask, slopes, call.seed, sinks, None, None, program, *NO_TERMS)
    options = (
        call.options if call.seed is None else replace(call.options, first_head=own_heads.start)
    )
    out, lse, _ = attention(query, key, value, *biases, options)
    to_rows = _Transposition(peers, (call.queries, call.queries))
    # The wider dtype first, so that both are aligned in the message.
    lse, out = _Transpose.apply(to_rows, False, lse[..., None], out)
    return out, lse[..., 0]


def _whole_mask(call: Call, peers: Peers, own_heads: slice) -> Tensor:
    """The mask of all rows, [B|1, heads of this rank|1, Lq of all ranks, Lk of all ranks|1]."""
    mask = call.attn_mask
    assert mask is not None
    mask = mask.expand(-1, -1, call.query.shape[2], -1)
    if mask.shape[1] == 1:  # all ranks need it
        mask = mask.expand(-1, peers.size, -1, -1)
    (mask,) = _Transpose.apply(_Transposition(peers, (call.queries,)), True, mask)
    return mask


class _Transposition:
    """Exchanges rows for heads of tensors [B, H, L, D]."""

    def __init__(self, peers: Peers, layouts: Sequence[Layout]) -> None:
        self.peers, self.layouts = peers, layouts

    def to_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """This rank's rows of all heads -> all rows, by position, of this rank's heads."""
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
        """The inverse of :meth:`to_heads`."""
        size, rank = self.peers.size, self.peers.rank
        sends = [
            [_of_rank(x, layout, n) for x, layout in zip(tensors, self.layouts, strict=True)]
            for n in range(size)
        ]
        shapes = [[tuple(x.shape)] * size for x in sends[rank]]
        received = self._exchange(sends, shapes, rank)
        return [torch.cat([received[n][at] for n in range(size)], 1) for at in range(len(tensors))]

    def _exchange(
        self, sends: Sequence[Sequence[Tensor]], shapes: Any, rank: int
    ) -> list[Sequence[Tensor]]:
        """Exchange tensors of one dtype or more, as bytes; ``shapes[at][n]`` come from rank n."""
        messages = {n: _packed(sends[n]) for n in self.peers.others}
        sizes = {n: [math.prod(of[n]) for of in shapes] for n in self.peers.others}
        widths = [x.element_size() for x in sends[rank]]
        arriving = {
            n: messages[n].new_empty(sum(s * w for s, w in zip(sizes[n], widths, strict=True)))
            for n in self.peers.others
        }
        self.peers.exchange(messages, arriving, "the exchange of heads").wait()
        received: list[Sequence[Tensor]] = []
        for n in range(self.peers.size):
            if n == rank:
                received.append(sends[rank])
                continue
            flat = arriving[n].split([s * w for s, w in zip(sizes[n], widths, strict=True)])
            received.append(
                [
                    part.view(like.dtype).view(of[n])
                    for part, like, of in zip(flat, sends[rank], shapes, strict=True)
                ]
            )
        return received


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors as one message of bytes."""
    return torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in tensors])


def _by_position(of_ranks: Sequence[Tensor], layout: Layout) -> Tensor:
    """The rows of all ranks in the order of positions."""
    runs = {
        run.position: x[:, :, run.rows]
        for x, of in zip(of_ranks, layout.runs, strict=True)
        for run in of
    }
    return torch.cat([runs[at] for at in sorted(runs)], 2) if runs else of_ranks[0]


def _of_rank(x: Tensor, layout: Layout, rank: int) -> Tensor:
    """The rows of one rank, in its order."""
    runs = layout.runs[rank]
    chunks = [x[:, :, run.position : run.position + run.length] for run in runs]
    return torch.cat(chunks, 2) if chunks else x[:, :, :0]


class _Transpose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transposition: _Transposition, to_heads: bool, *tensors: Tensor) -> Any:
        ctx.transposition, ctx.to_heads = transposition, to_heads
        move = transposition.to_heads if to_heads else transposition.to_rows
        return tuple(move(tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *_Transpose.apply(ctx.transposition, not ctx.to_heads, *grads)
