"""Reading rows that are spread over the ranks: one step of memory hops or of Hopfield retrieval.

Each rank reads its own rows; the states of all ranks are merged:

    out_r, lse_r = attention(query, keys_r, values_r),   out, lse = merge of all (out_r, lse_r)

So a read takes a message of D + 2 numbers for each query and rank, whatever the number of rows, and
its derivative one of D numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fastattn.backends.primitives import AttentionOptions, MemoryHopOptions
from fastattn.distributed._peers import Peers
from fastattn.distributed._replicated import enter, merge_over_ranks, sum_over_ranks
from fastattn.ops._disentangled import NO_TERMS
from fastattn.ops.memory_hops import hop_attention
from fastattn.ops.sdpa import attention


class Reader:
    """Reads the rows of all ranks, with the arguments and results of the reference's ``read``.

    The query is the same on all ranks, and so are o and lse; keys, values, mask, bias and p belong
    to this rank's rows. ``name(n)`` is the name of read n = 1, 2, ... in error messages.
    """

    def __init__(self, peers: Peers, name: Callable[[int], str], weights: bool = False) -> None:
        self._peers, self._name, self._weights = peers, name, weights
        self._count = 0

    def softmax(
        self,
        u: Tensor,  # [G, Q, D]
        keys: Tensor,  # [G|1, N of this rank, D]
        values: Tensor,  # [G|1, N of this rank, Dv]
        mask: Tensor | None,  # [G|1, Q|1, N|1] bool
        bias: Tensor | None,  # [G|1, Q|1, N|1]
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return o [G, Q, Dv], lse [G, Q], and p [G, Q, N of this rank] if it was requested."""
        (groups, queries, _), rows = u.shape, keys.shape[1]
        added = mask
        if bias is not None:
            added = bias.to(u.dtype)
            added = added if mask is None else torch.where(mask, added, -torch.inf)
        if keys.shape[0] == values.shape[0] == 1 != groups:  # one memory is read by all queries
            u = u.reshape(1, 1, groups * queries, -1)
            if added is not None and (added.shape[0] > 1 or added.shape[1] > 1):
                added = added.expand(groups, queries, -1).reshape(1, groups * queries, -1)
        else:
            u = u[:, None]
        added = None if added is None else added[:, None]
        options = AttentionOptions(scale)
        out, lse, p = self.attend(u, keys[:, None], values[:, None], added, options)
        if p is not None:
            p = p.reshape(groups, queries, rows)
        return out.reshape(groups, queries, -1), lse.reshape(groups, queries), p

    def attend(
        self,
        u: Tensor,  # [B, H, Q, D]
        keys: Tensor,  # [B|1, H, N of this rank, D]
        values: Tensor,  # [B|1, H, N of this rank, Dv]
        mask: Tensor | None,  # [B|1, H|1, Q|1, N|1], bool or of the dtype of u
        options: AttentionOptions,
        seed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return o [B, H, Q, Dv], lse [B, H, Q], and p [B, H, Q, N of this rank] if requested."""
        step, u = self._enter_query(u)
        keys, values = (x.expand(len(u), -1, -1, -1) for x in (keys, values))
        options = replace(options, weights=1 if self._weights else 0)
        biases = (mask, None, seed, *[None] * 4, *NO_TERMS)
        out_of_rank, lse_of_rank, p = attention(u, keys, values, *biases, options)
        out, lse = merge_over_ranks(self._peers, step, out_of_rank, lse_of_rank)
        if not self._weights:
            return out, lse, None
        # The softmax over all ranks is this rank's times exp(lse_r - lse), or 0 if all rows of this
        # rank are masked.
        lse_of_all = enter(self._peers, f"the gradient of the weights of {step}", lse)
        share = (lse_of_rank - lse_of_all).masked_fill(lse_of_rank == -torch.inf, -torch.inf).exp()
        return out, lse, p * share[..., None].to(p.dtype)

    def linear(
        self,
        u: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, None, Tensor | None]:
        """Return o, no lse, and p if requested, without a softmax: the scores are the weights."""
        step, u = self._enter_query(u)
        # A projection H = 0 of the state: the result of the hop is o itself.
        no_projection = u.new_zeros(u.shape[2], u.shape[2])
        options = MemoryHopOptions(normalize="none", scale=scale, weights=self._weights)
        bias = None if bias is None else bias.to(u.dtype)
        per_hop = [None if x is None else x[:, :, None] for x in (mask, bias)]
        out, _, _, p = hop_attention(u, keys, values, no_projection, *per_hop, options)
        return sum_over_ranks(self._peers, step, out), None, p[:, :, 0] if self._weights else None

    def _enter_query(self, u: Tensor) -> tuple[str, Tensor]:
        """Return the name of the next read, and its query as it enters this rank's part."""
        self._count += 1
        step = self._name(self._count)
        return step, enter(self._peers, f"the gradient of the query of {step}", u)
