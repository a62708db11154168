"""Attention with the keys passing from rank to rank, and its derivative.

In step s, rank r has the keys of rank r - s and passes them on to rank r + 1 while it attends to
them. A block of keys stops at the last rank that needs it. The partial results of a run of queries,
in float32 or wider, are merged in the order of the steps:

    lse' = log(exp(lse) + exp(lse_s)),  out' = exp(lse - lse') out + exp(lse_s - lse') out_s

In the backward pass the gradients of a block follow it, one step behind, and each rank adds its
part. The last rank returns them to the owner. A block needs only out and lse of whole rows:

    P_s = exp(S_s - lse),  dS_s = P_s o (dout V_s^T - delta),  delta = sum(dout out) - dlse
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.backends.primitives import AttentionBackwardOptions, extend_options
from fastattn.distributed._call import Call, mask_slices
from fastattn.distributed._peers import OP, Exchange, KeyMessages, Peers
from fastattn.distributed._schedule import Piece, Schedule
from fastattn.ops._disentangled import NO_TERMS
from fastattn.ops.merge_states import merge as merge_states
from fastattn.ops.sdpa import attention, attention_backward


def ring_attention(call: Call, peers: Peers) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)`` of this rank's queries, lse in float64."""
    call, slopes = call.with_fewest_runs(), call.alibi_slopes
    if slopes is not None:
        call = replace(call, alibi_slopes=slopes.detach())
    tensors = (call.query, call.key, call.value, call.attn_mask, call.sinks, slopes)
    return _Ring.apply(call, peers, Schedule(call, peers), *tensors)


class _Block(NamedTuple):
    """The block of keys that this rank holds in a step."""

    step: int
    owner: int
    # key [B, Hkv, Lk of the owner, D] and value; None: no further rank needs them
    keys: tuple[Tensor, Tensor] | None


class _KeyRing(KeyMessages):
    """Passes the blocks of keys from rank to rank, each as far as a rank needs it."""

    def __init__(self, call: Call, peers: Peers, schedule: Schedule) -> None:
        super().__init__(call.key, call.value, call.keys.lengths)
        self.peers, self.size = peers, peers.size
        self.next, self.previous = (peers.rank + 1) % self.size, (peers.rank - 1) % self.size
        self.reach = schedule.reach

    def blocks(self, key: Tensor, value: Tensor, ring_name: str) -> Iterator[_Block]:
        """Yield the block of each step, while the next step's block arrives."""
        message = self.pack(key, value)
        for step in range(max(self.reach) + 1):
            owner = (self.peers.rank - step) % self.size
            next_owner = (owner - 1) % self.size
            sends = {self.next: message} if self.reach[owner] > step else {}
            incoming = (
                self.empty(next_owner, key) if self.reach[next_owner] > step else key.new_empty(0)
            )
            receives = {self.previous: incoming} if self.reach[next_owner] > step else {}
            exchange = self.peers.exchange(sends, receives, self.name(ring_name, step))
            needed_here = self.reach[owner] >= step
            yield _Block(step, owner, self.unpack(message, owner) if needed_here else None)
            exchange.wait()
            message = incoming

    def name(self, ring_name: str, step: int) -> str:
        """The name of a step in error messages."""
        return f"step {step + 1} of {max(self.reach) + 1} of the {ring_name} ring"


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        peers: Peers,
        schedule: Schedule,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        sinks: Tensor | None,
        slopes: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ring = _KeyRing(call, peers, schedule)
        wide = torch.promote_types(query.dtype, torch.float32)
        wide_call = replace(call, query=query.to(wide))
        ctx.by_table = ctx.needs_input_grad[8]  # of slopes
        states = [_first_state(wide_call, run.length) for run in schedule.queries]
        backends: dict[Piece, str] = {}
        for block in ring.blocks(key, value, "forward"):
            if block.keys is None or not schedule.pieces[block.owner]:
                continue
            keys, values = (x.to(wide) for x in block.keys)
            for piece in schedule.pieces[block.owner]:
                args = _piece_arguments(wide_call, piece, keys, values, ctx.by_table)
                backends[piece] = attention.choose(args)
                out, lse, _ = attention.run(*args, backends[piece])
                states[piece.query_run] = merge_states(*states[piece.query_run], out, lse)
        out, lse = _join_runs(wide_call, states)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, attn_mask, sinks, slopes, out, lse)
        ctx.set_materialize_grads(False)
        # Drop the tensors that autograd keeps.
        call = replace(call, query=query[:0], key=key[:0], value=value[:0])
        ctx.call = replace(call, attn_mask=None, sinks=None, alibi_slopes=None)
        ctx.state = ring, schedule, backends
        return out, lse

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return _Ring.gradients(ctx, grad_out, grad_lse)
        with torch.no_grad():
            grads = _Ring.gradients(ctx, grad_out, grad_lse)
        return _OnceDifferentiable.apply(len(grads), *grads, grad_out, grad_lse, *ctx.saved_tensors)

    @staticmethod
    def gradients(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """The gradients of the arguments of ``forward``."""
        query, key, value, attn_mask, sinks, slopes, out, lse = ctx.saved_tensors
        ring, schedule, backends = ctx.state
        wide = torch.promote_types(query.dtype, torch.float32)
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        call = replace(ctx.call, query=query.to(wide), attn_mask=attn_mask, alibi_slopes=slopes)
        rows_of_rank = _RowResults(grad_out.to(wide), grad_lse, out.to(wide), lse)
        needs_mask = ctx.needs_input_grad[6]  # of attn_mask
        grad_query = torch.zeros_like(call.query)
        grad_mask = torch.zeros_like(attn_mask, dtype=wide) if needs_mask else None
        grad_slopes = torch.zeros_like(slopes, dtype=torch.float64) if ctx.by_table else None
        gradients = _BlockGradients(ring, key.new_empty(0, dtype=wide))
        for block in ring.blocks(key, value, "backward"):
            grads_of_block = None
            if block.keys is not None and schedule.pieces[block.owner]:
                keys, values = (x.to(wide) for x in block.keys)
                grads_of_block = torch.zeros_like(keys), torch.zeros_like(values)
                for piece in schedule.pieces[block.owner]:
                    args = _piece_arguments(call, piece, keys, values, ctx.by_table)
                    grads = rows_of_rank.piece_gradients(piece, backends[piece], args, needs_mask)
                    grad_query[:, :, piece.queries.rows] += grads[0]
                    for total, grad in zip(grads_of_block, grads[1:3], strict=True):
                        total[:, :, piece.keys.rows] += grad
                    if grad_mask is not None:
                        grad_mask[mask_slices(grad_mask, piece.queries.rows, piece.columns)] += (
                            grads[3]
                        )
                    if grad_slopes is not None:
                        grad_slopes += _gradient_of_slopes(grads[5], grad_slopes)
            gradients.add(block, grads_of_block)
        grad_key, grad_value = gradients.local_gradients(key, value)
        return (
            None,
            None,
            None,
            grad_query.to(query.dtype),
            grad_key.to(key.dtype),
            grad_value.to(value.dtype),
            None if grad_mask is None else grad_mask.to(attn_mask.dtype),
            None if sinks is None else rows_of_rank.gradient_of_sinks(sinks),
            None if grad_slopes is None else grad_slopes.to(slopes.dtype),
        )


class _OnceDifferentiable(torch.autograd.Function):
    """Returns gradients, and raises an error if they are differentiated."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        raise NotImplementedError(
            f"{OP}: method='ring' has first derivatives only, use 'allgather' or 'ulysses'"
        )


def _first_state(call: Call, length: int) -> tuple[Tensor, Tensor]:
    """The initial (out, lse) of a run of queries: no keys, or a sink, whose value is 0."""
    batch, heads, _, _ = call.query.shape
    out = call.query.new_zeros(batch, heads, length, call.value.shape[3])
    lse = call.query.new_full((batch, heads, length), -torch.inf, dtype=torch.float64)
    if call.sinks is not None:
        lse.copy_(call.sinks[:, :, None])
    return out, lse


def _join_runs(call: Call, states: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Concatenate the results (out, lse) of the runs of queries."""
    if not states:
        return _first_state(call, 0)
    outs, lses = zip(*states, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _piece_arguments(
    call: Call, piece: Piece, key: Tensor, value: Tensor, by_table: bool
) -> tuple[Any, ...]:
    """The tensors and the options of the primitive for one piece, without sinks.

    With ``by_table``, ALiBi is a relative bias, because kernels compute the gradient of that.
    """
    mask = call.local_mask(piece.queries.rows, piece.columns)
    if mask is not None and mask.is_floating_point() and mask.dtype is not torch.float32:
        mask = mask.to(call.query.dtype)
    program = call.mask_program(piece.queries, piece.keys.position, piece.keys.length)
    rows, columns = piece.queries.rows, piece.keys.rows
    tensors = (call.query[:, :, rows], key[:, :, columns], value[:, :, columns])
    slopes, table = call.alibi_slopes, None
    if by_table and slopes is not None:
        max_distance = max(abs(piece.last_distance), abs(piece.first_distance))
        table = -slopes.to(call.query.dtype)[..., None] * _distances(max_distance, slopes)
        slopes = None
    biases = (mask, slopes, call.seed, None, table, None, program, *NO_TERMS)
    return *tensors, *biases, call.options_at(piece.queries.position, piece.keys.position)


def _distances(max_distance: int, like: Tensor) -> Tensor:
    """The absolute distances |d| for d from -max_distance to max_distance."""
    return torch.arange(-max_distance, max_distance + 1, device=like.device).abs()


def _gradient_of_slopes(grad_table: Tensor, slopes: Tensor) -> Tensor:
    """The gradient of the slopes [B|1, Hq] from their table's gradient [B|1, Hq, 2 M + 1]."""
    distances = _distances(grad_table.shape[2] // 2, grad_table)
    return -(grad_table.double() * distances).sum(2).sum_to_size(slopes.shape)


class _RowResults(NamedTuple):
    """The results of this rank's queries over all keys and their gradients, float32 or wider."""

    grad_out: Tensor  # [B, Hq, Lq, Dv]
    grad_lse: Tensor | None  # [B, Hq, Lq]
    out: Tensor  # [B, Hq, Lq, Dv]
    lse: Tensor  # [B, Hq, Lq] float64

    def piece_gradients(
        self, piece: Piece, backend: str, args: tuple[Any, ...], needs_mask: bool
    ) -> tuple[Tensor, ...]:
        """The gradients of ``args``, the arguments of one piece."""
        rows = piece.queries.rows
        *tensors, options = args
        grad_lse = None if self.grad_lse is None else self.grad_lse[:, :, rows]
        results = self.out[:, :, rows], self.lse[:, :, rows].contiguous()
        return attention_backward.run(
            self.grad_out[:, :, rows],
            grad_lse,
            None,  # no gradient of weights
            *tensors[:6],  # query to seed, then sinks and others after the results
            *results,
            *tensors[6:],
            extend_options(
                AttentionBackwardOptions, options, needs_mask_grad=needs_mask, partial=True
            ),
            backend,
        )

    def gradient_of_sinks(self, sinks: Tensor) -> Tensor:
        """The sum of e^(sink - lse) (dlse - delta) over the rows of this rank."""
        sink = sinks[:, :, None].double()
        share = torch.where(sink == -torch.inf, 0.0, (sink - self.lse).exp())
        share = torch.where(sink == torch.inf, 1.0, share)
        grad_of_lse = -(self.grad_out * self.out).sum(3).double()
        if self.grad_lse is not None:
            grad_of_lse = grad_of_lse + self.grad_lse
        return (share * grad_of_lse).sum(2).sum_to_size(sinks.shape).to(sinks.dtype)


class _BlockGradients:
    """The gradients of the blocks of keys, which follow the blocks one step behind."""

    def __init__(self, ring: _KeyRing, like: Tensor) -> None:
        self.ring, self.like = ring, like
        self.exchange: Exchange | None = None
        self.from_previous = like  # the sum of the previous ranks, for the block of this step
        self.from_others: Tensor | None = None  # the sum of all other ranks, for this rank's block
        self.from_own: tuple[Tensor, Tensor] | None = None  # this rank's part for its own block

    def add(self, block: _Block, grads_of_block: tuple[Tensor, Tensor] | None) -> None:
        """Add this rank's part of a block's gradients, and pass the sum on."""
        ring, step, rank = self.ring, block.step, self.ring.peers.rank
        if step == 0:
            self.from_own = grads_of_block
            return
        if self.exchange is not None:
            self.exchange.wait()
        sends, receives = {}, {}
        if block.keys is not None:
            # The ranks add to the gradients of a block in the order of the ring.
            total = self.from_previous
            if step == 1:
                total = ring.empty(block.owner, self.like).zero_()
            if grads_of_block is not None:
                total += ring.pack(*grads_of_block)
            sends[ring.next if ring.reach[block.owner] > step else block.owner] = total
        next_owner = (block.owner - 1) % ring.size
        if ring.reach[next_owner] > step:
            self.from_previous = ring.empty(next_owner, self.like)
            receives[ring.previous] = self.from_previous
        if ring.reach[rank] == step:
            self.from_others = ring.empty(rank, self.like)
            receives[(rank + step) % ring.size] = self.from_others
        step_name = ring.name("backward", step) + ", gradients of keys"
        self.exchange = ring.peers.exchange(sends, receives, step_name)

    def local_gradients(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of this rank's keys and values."""
        if self.exchange is not None:
            self.exchange.wait()
        contributions = [] if self.from_own is None else [self.from_own]
        if self.from_others is not None:
            contributions.append(self.ring.unpack(self.from_others, self.ring.peers.rank))
        grad_key, grad_value = (torch.zeros_like(x, dtype=self.like.dtype) for x in (key, value))
        for contribution in contributions:
            grad_key += contribution[0]
            grad_value += contribution[1]
        return grad_key, grad_value
