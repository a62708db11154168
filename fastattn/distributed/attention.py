"""Attention to sequences whose rows are on several ranks: the specification."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import checks, masks
from fastattn._untraced import untraced
from fastattn.call import with_arguments_of
from fastattn.distributed._agree import gather
from fastattn.distributed._allgather import gathered_attention
from fastattn.distributed._call import Call, check_call
from fastattn.distributed._dtensor import local_parts
from fastattn.distributed._peers import OP, Peers, process_group
from fastattn.distributed._replicated import LocalCall, prepare_on_ranks
from fastattn.distributed._ring import ring_attention
from fastattn.distributed._ulysses import head_attention
from fastattn.distributed.layout import Layout, Run
from fastattn.distributed.plan import cheapest

_METHODS = {"ring": ring_attention, "allgather": gathered_attention, "ulysses": head_attention}


@untraced
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Any = None,
    method: str = "auto",
    layout: str | Tensor | Layout = "contiguous",
    attn_mask: Tensor | None = None,
    mask: masks.Mask | None = None,
    is_causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    check: bool = True,
) -> Any:
    r"""Attend from the queries of this rank to the keys of all ranks of a group.

    .. math:: out = softmax(scale \cdot query \, key^T + bias) \, value

    where key and value are the rows of all ranks. Each rank calls this function with its own rows
    of one sequence and gets the output of its own queries; the options are the same on all ranks
    and mean what they mean in :func:`fastattn.scaled_dot_product_attention`. The result equals the
    result of one process up to rounding: partial results are kept in float32 or wider (float64 for
    float64) and are merged in a fixed order, so the same call gives the same bits.

    All ranks of the group must make the same calls in the same order, and compute gradients of the
    same calls.

    Args:
        query: [B, Hq, L_rank, D], float32, bfloat16, float16 or float64. L_rank may differ between
            ranks and may be 0.
        key: [B, Hkv, L_rank, D]. In the two named layouts its length may differ from query's:
            positions of queries and keys then both count from 0.
        value: [B, Hkv, L_rank, Dv].
            The three may be DTensors that are ``Shard(2)`` on one dimension of their mesh, which is
            then the group, and ``Shard(0)``, ``Shard(1)`` or ``Replicate`` on others. The results
            are DTensors, too. All other tensors are local to this rank.
        group: a process group, a one-dimensional ``DeviceMesh``, or None for all ranks.
        method: how keys reach the queries. "ring": the keys pass from rank to rank while each rank
            attends to the keys that it holds. "allgather": each rank first gathers the keys that it
            needs. "ulysses": the ranks exchange heads for rows, which needs numbers of heads that
            the ranks divide. "auto": of ring and ulysses, the one that receives fewer bytes.
        layout: the positions of the rows. "contiguous": the rows of rank 0, then of rank 1, and so
            on. "zigzag": of 2 n chunks, rank r has chunks r and 2 n - 1 - r, which balances
            causal attention; see :meth:`Layout.zigzag`. A tensor, int32 or int64 [L_rank]: the
            position of each row of this rank. A :class:`Layout`: the positions of all ranks.
        attn_mask: the rows of this rank, broadcastable to [B, Hq, L_rank, L], where L is the number
            of keys of all ranks and column j is position j. bool: True takes part. Floating, of
            query's dtype or float32: added to the scores; differentiable.
        mask: a mask of :mod:`fastattn.masks`, or a ``BlockMask``, of the whole sequence, the same
            on all ranks.
        is_causal: exclude the keys after the query's own position. Not together with ``attn_mask``.
        window: (left, right), how many positions before and after its own a query can see; -1 is
            unlimited.
        softcap: None, or the positive bound of the scores.
        alibi_slopes: floating, [Hq] or [B, Hq]. Differentiable; with the other methods than "ring"
            by the reference, which stores all pairs.
        sinks: [Hq], attention sinks. Differentiable: each rank has a part of the gradient of sinks
            and slopes, and the sum over ranks is the whole.
        cu_seqlens: [N + 1], int32 or int64, the same on all ranks: packed sequences, which may
            cross ranks. Sequence n has the positions from cu_seqlens[n] to cu_seqlens[n + 1] - 1,
            and its queries attend only to its keys. The last element is the length of queries and
            keys of all ranks. All other options count positions in the packed row.
        dropout_p: the probability of dropping a weight, in [0, 1]. The draws are the same as on one
            process with the whole sequence, whatever the method, layout and number of ranks.
        generator: the source of the dropout seed; None is the default generator. Every rank draws
            a seed, and all use the seed of rank 0.
        scale: None is ``1 / sqrt(D)``.
        enable_gqa: allow Hkv < Hq: query head h uses head ``h // (Hq // Hkv)``. Heads of keys are
            never repeated.
        return_lse: also return the log-sum-exp of the scores of each query.
        check: compare options, dtypes and shapes of all ranks before anything is computed. Without
            it every rank must have the same number of rows, or ``layout`` must be a
            :class:`Layout`, and ranks that disagree wait for each other until the group's timeout.

    Returns:
        ``out`` [B, Hq, L_rank, Dv] in query's dtype; with ``return_lse`` a tuple of it and ``lse``
        [B, Hq, L_rank] in float32 (float64 for float64). Both are differentiable, once with "ring".

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a value that is not allowed; heads that the ranks of "ulysses" do not divide.
        RuntimeError: dtypes or shapes that do not match. Options that differ between ranks: all
            ranks raise and name the argument. A rank that ends or does not answer within the
            group's timeout: the others raise and name it and the step.
        NotImplementedError: a second derivative with "ring".

    Sources:
        Liu et al. 2023, https://arxiv.org/abs/2310.01889 (ring attention); Jacobs et al. 2023,
        https://arxiv.org/abs/2309.14509 (exchange of heads).
    """
    rows = {"query": (query, 2), "key": (key, 2), "value": (value, 2)}
    local, group, restore = local_parts(OP, group, rows, {})
    query, key, value = local.values()
    peers = Peers(process_group(group))

    def prepare_local() -> LocalCall[Call]:
        """Check this rank's arguments."""
        checks.check_flag(OP, "return_lse", return_lse)
        call = _check_call(
            *(query, key, value, group, method, layout, attn_mask, mask, is_causal, window),
            *(softcap, alibi_slopes, sinks, cu_seqlens, dropout_p, generator, scale, enable_gqa),
        )
        seed = 0 if call.seed is None else int(call.seed)
        numbers = (call.query.shape[2], call.key.shape[2], call.mask_columns, seed)
        return call, call.options_to_compare, numbers

    call, numbers = prepare_on_ranks(peers, check, query, prepare_local, numbers=4)
    call = _with_layouts(call, peers, numbers, check)
    if call.method == "auto":
        method = cheapest(call, peers.size)
    out, lse = _METHODS[method](call, peers)
    results = (out, lse if out.dtype is torch.float64 else lse.float())
    results = (restore(out, 2), restore(results[1], 2))
    return results if return_lse else results[0]


_check_call = with_arguments_of(attention, check_call)


def _with_layouts(call: Call, peers: Peers, numbers: list[list[int]], check: bool) -> Call:
    """Add the layouts of all rows, from the lengths, mask columns and seed of every rank."""
    device, layout = call.query.device, call.layout
    if check:
        *_, seed = numbers[0]
        call = call.with_seed(seed)
    elif call.seed is not None:
        call = call.with_seed(int(gather(peers, call.seed.view(1), [1] * peers.size)[0]))
    if isinstance(layout, Layout):
        if layout.ranks != peers.size:
            raise ValueError(
                f"{OP}: layout must be of the {peers.size} ranks of the group, got {layout.ranks}"
            )
        if not check:
            own_numbers = numbers[peers.rank]
            numbers = [[n, n, 0, 0] for n in layout.lengths]
            numbers[peers.rank] = own_numbers
    q_lengths, k_lengths, columns, _ = (list(column) for column in zip(*numbers, strict=True))
    if layout == "contiguous":
        layouts = Layout.contiguous(q_lengths), Layout.contiguous(k_lengths)
    elif layout == "zigzag":
        layouts = Layout.zigzag(q_lengths), Layout.zigzag(k_lengths)
    elif isinstance(layout, Layout):
        layouts = layout, layout
    else:
        assert isinstance(layout, Tensor)
        positions = gather(peers, layout.to(device, torch.int64), q_lengths)
        layouts = (Layout.of_positions(positions),) * 2
    lengths = layouts[0].lengths, layouts[1].lengths
    if lengths != (tuple(q_lengths), tuple(k_lengths)):
        raise ValueError(
            f"{OP}: layout must have the lengths of the ranks, {q_lengths}, got {list(lengths[0])}"
        )
    total = layouts[1].total
    for rank, n in enumerate(columns):
        if n not in (0, 1, total):
            raise RuntimeError(
                f"{OP}: attn_mask must have a column for each of the {total} keys of all ranks, "
                f"got {n} on rank {rank}"
            )
    call = call.with_layouts(*layouts)
    if call.sequences is not None and {int(call.sequences[-1])} != {x.total for x in layouts}:
        raise ValueError(
            f"{OP}: cu_seqlens must end with the number of queries and of keys of all ranks, "
            f"{layouts[0].total} and {total}, got {int(call.sequences[-1])}"
        )
    if call.mask is not None:  # on ranks without rows, too, so that all of them raise
        no_rows = Run(row=0, position=0, length=0)
        masks.check_whole(call.mask, call.mask_part(no_rows, first_key=0, k_len=0))
    return call
