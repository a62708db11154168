"""Memory hops and Hopfield retrieval with the rows of the memory distributed over ranks."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastattn import checks
from fastattn._seed import draw_seed
from fastattn._untraced import untraced
from fastattn.backends.primitives import AttentionOptions
from fastattn.distributed._agree import gather
from fastattn.distributed._dtensor import local_parts, refuse_dtensors
from fastattn.distributed._patterns import retrieve_over_ranks
from fastattn.distributed._peers import Peers, process_group
from fastattn.distributed._read import Reader
from fastattn.distributed._replicated import LocalCall, describe, enter, prepare_on_ranks
from fastattn.ops import hopfield, memory_hops
from fastattn.ops.hopfield import lower

_HOPS = "fastattn.distributed.memory_hop_attention"
_RETRIEVE = "fastattn.distributed.hopfield_retrieve"


@untraced
def memory_hop_attention(
    query: Tensor,
    in_memory: Tensor,
    out_memory: Tensor | None = None,
    *,
    group: Any = None,
    hops: int = 1,
    hop_proj: Tensor | None = None,
    memory_mask: Tensor | None = None,
    memory_bias: Tensor | None = None,
    activation: str | None = None,
    normalize: str = "softmax",
    scale: float = 1.0,
    need_weights: bool = False,
    check: bool = True,
) -> Any:
    r"""Read a memory whose rows are on several ranks ``hops`` times.

    .. math::
        p_k = softmax(scale \cdot M_k u_k + b_k), \quad o_k = C_k^T p_k, \quad
        u_{k+1} = \phi(H_k u_k + o_k), \qquad k = 1 \ldots K

    where M_k and C_k are the rows of all ranks. All ranks pass the same query and get the same
    result as :func:`fastattn.memory_hop_attention` on one process, up to rounding. In each hop,
    each rank sends B · Q · (D + 2) numbers of 32 bits to each other rank, however many rows there
    are; in its derivative, B · Q · D. Partial results are in float32 or wider and are merged in the
    order of ranks, so the same call gives the same bits, on all ranks.

    All ranks of the group must make the same calls in the same order, and compute gradients of the
    same calls.

    Args:
        query: [B, D] or [B, Q, D], the same on all ranks.
        in_memory, out_memory: as in :func:`fastattn.memory_hop_attention`, with the rows of this
            rank: N may differ between ranks and may be 0. The order of ranks has no meaning.
        group: a process group, a one-dimensional ``DeviceMesh``, or None for all ranks.
        hops: K, at least 1.
        hop_proj: [D, D] or [K, D, D], the same on all ranks.
        memory_mask, memory_bias: as in :func:`fastattn.memory_hop_attention`, of this rank's rows.
        activation, normalize, scale: as in :func:`fastattn.memory_hop_attention`.
        need_weights: also return the p_k of this rank's rows, which sum to 1 over all ranks.
        check: compare options, shapes, dtypes and the values of ``query`` and ``hop_proj`` before
            anything is computed. Without it, ranks that disagree may wait for each other until the
            group's timeout, or compute different results.

    Returns:
        u_{K+1} in the shape and dtype of ``query``; with ``need_weights`` a pair of it and the
        weights, [B, K, N] ([B, Q, K, N]). Both are differentiable once. All ranks must compute the
        same loss of u_{K+1}, and each rank gets its whole gradient: the gradients of query and
        ``hop_proj`` are the same on all ranks, not parts to be summed. Each rank gets the gradients
        of its own memory and bias. A loss of the weights may be a sum with one part on each rank.

    16-bit memories are converted to float32, one hop at a time.

    ``query`` and the memories may be DTensors: the memories ``Shard`` on one dimension of their
    mesh, which is then the group, in the dimension of their rows, and the query ``Replicate``
    there. Other dimensions may share the batch (``Shard(0)`` of all of them). The results are
    DTensors, too; all other tensors are local to this rank.

    Raises:
        TypeError, ValueError: as :func:`fastattn.memory_hop_attention`.
        RuntimeError: options that differ between ranks; all ranks raise and name the argument. A
            rank that ends or does not answer within the group's timeout; the others raise and name
            it and the hop.

    Sources:
        Sukhbaatar et al. 2015, https://arxiv.org/abs/1503.08895; Milakov and Gimelshein 2018,
        https://arxiv.org/abs/1805.02867 (the merge).
    """
    refuse_dtensors(_HOPS, hop_proj=hop_proj, memory_mask=memory_mask, memory_bias=memory_bias)
    rows = {
        name: (x, _row_dim(x)) for name, x in (("in_memory", in_memory), ("out_memory", out_memory))
    }
    parts, group, restore = local_parts(_HOPS, group, rows, {"query": query}, (0,))
    in_memory, out_memory, query = parts.values()
    peers = Peers(process_group(group, _HOPS), _HOPS)

    def prepare_local() -> LocalCall[tuple[Any, ...]]:
        """Check this rank's arguments, and bring them into the form of the primitive."""
        _, arguments = memory_hops.prepare(
            query,
            in_memory,
            out_memory,
            hops=hops,
            hop_proj=hop_proj,
            memory_mask=memory_mask,
            memory_bias=memory_bias,
            activation=activation,
            normalize=normalize,
            scale=scale,
            need_weights=need_weights,
        )
        *prepared_tensors, options = arguments
        names = ("query", "in_memory", "out_memory", "hop_proj", "memory_mask", "memory_bias")
        tensors = dict(zip(names, prepared_tensors, strict=True))

        def options_to_compare() -> dict[str, str]:
            values = {name: repr(x) for name, x in vars(options).items()}
            values |= describe("query", tensors["query"])
            values |= describe("hop_proj", tensors["hop_proj"])
            for name in ("in_memory", "out_memory"):
                values |= describe(name, tensors[name], rows=True)
            return values | _gradient_requirements(tensors)

        return arguments, options_to_compare, ()

    arguments, _ = prepare_on_ranks(peers, check, query, prepare_local)
    u, *other_tensors, options = arguments
    reader = Reader(peers, lambda n: f"hop {n} of {hops}", need_weights)
    read = reader.softmax if options.normalize == "softmax" else reader.linear
    # The reference's loop calls the reads. Imported late, because importing fastattn loads no
    # backend.
    reference = importlib.import_module("fastattn.backends.reference.memory_hops")
    trace, _, weights = reference.hop_states(u, *other_tensors, options, read)
    out = restore(trace[-1].to(u.dtype)[..., : query.shape[-1]])
    if not need_weights:
        return out
    p = torch.stack(weights, -2).to(u.dtype)
    return out, restore(p, p.ndim - 1)


@untraced
def hopfield_retrieve(
    state: Tensor,
    stored: Tensor,
    projection: Tensor | None = None,
    *,
    group: Any = None,
    beta: float | Tensor | None = None,
    update_steps_max: int | None = None,
    update_steps_eps: float = 1e-4,
    stop: str = "query",
    grad: str = "unroll",
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    need_weights: bool = False,
    need_steps: bool = False,
    check: bool = True,
) -> Any:
    r"""Retrieve patterns that are stored on several ranks: repeat attention until it converges.

    .. math:: \xi \leftarrow X^T softmax(\beta X \xi), \qquad out = V^T softmax(\beta X \xi)

    where X and V have the rows of all ranks. All ranks pass the same ``state`` and get the same
    result as :func:`fastattn.hopfield_retrieve` on one process, up to rounding. In each step, each
    rank sends D + 2 numbers of 32 bits for each query to each other rank.

    Args:
        state: [B, H, L, D], [B, L, D] or [L, D], the same on all ranks.
        stored, projection: as in :func:`fastattn.hopfield_retrieve`, with the rows of this rank:
            N may differ between ranks and may be 0.
        group: a process group, a one-dimensional ``DeviceMesh``, or None for all ranks.
        beta: a number or tensor as on one process, the same on all ranks.
        update_steps_max, update_steps_eps, stop: as in :func:`fastattn.hopfield_retrieve`.
        grad: as in :func:`fastattn.hopfield_retrieve`. The derivative of each step sends D more
            numbers for each query; "implicit" sends as many for each of its at most 2 D + 2
            conjugate gradients.
        attn_mask: as in :func:`fastattn.hopfield_retrieve`, for this rank's rows.
        dropout_p: as in :func:`fastattn.hopfield_retrieve`. The draws are the same as on one
            process with the rows in the order of ranks; every rank draws a seed, and all use the
            seed of rank 0.
        need_weights: also return the weights of the final reading of this rank's rows.
        need_steps: also return how many steps each query took.
        check: as in :func:`fastattn.distributed.memory_hop_attention`.

    Returns:
        As :func:`fastattn.hopfield_retrieve`. All but the steps are differentiable once; the
        gradients of ``state`` and ``beta`` are whole and the same on all ranks; all other gradients
        are of this rank's rows.

    ``state``, ``stored`` and ``projection`` may be DTensors, as in
    :func:`fastattn.distributed.memory_hop_attention`; other dimensions of the mesh may share the
    heads, too.

    Raises:
        TypeError, ValueError: as :func:`fastattn.hopfield_retrieve`.
        RuntimeError: as :func:`fastattn.distributed.memory_hop_attention`.

    Source:
        Ramsauer et al. 2021, https://arxiv.org/abs/2008.02217.
    """
    refuse_dtensors(_RETRIEVE, beta=beta, attn_mask=attn_mask)
    rows = {name: (x, _row_dim(x)) for name, x in (("stored", stored), ("projection", projection))}
    shared = range(max(getattr(state, "ndim", 2) - 2, 0))
    parts, group, restore = local_parts(_RETRIEVE, group, rows, {"state": state}, shared)
    stored, projection, state = parts.values()
    peers = Peers(process_group(group, _RETRIEVE), _RETRIEVE)

    def prepare_local() -> LocalCall[Any]:
        """Check this rank's arguments, and prepare the call as on one process."""
        whole_beta = beta
        if isinstance(beta, Tensor):
            whole_beta = enter(peers, "the gradient of beta", beta)
        limits = (update_steps_max, update_steps_eps, stop, grad)
        reading = (attn_mask, dropout_p, need_weights, need_steps)
        call = hopfield.validate_call(state, stored, projection, whole_beta, *limits, *reading)
        p = checks.check_dropout(_RETRIEVE, dropout_p)
        seed = int(draw_seed(state.device)) if p > 0 else 0

        def options_to_compare() -> dict[str, str]:
            options = (*limits, p, need_weights, need_steps)
            names = "update_steps_max update_steps_eps stop grad dropout_p need_weights need_steps"
            values = {name: repr(x) for name, x in zip(names.split(), options, strict=True)}
            if isinstance(beta, Tensor):
                values |= describe("beta", beta)
            else:
                values["beta"] = repr(call.scale)
            values |= describe("state", state) | describe("stored", stored, rows=True)
            values |= describe("projection", projection, rows=True)
            tensors = {"state": state, "stored": stored, "projection": projection, "beta": beta}
            return values | _gradient_requirements(tensors | {"attn_mask": attn_mask})

        return (call, p), options_to_compare, (call.stored.shape[2], seed)

    (call, p), numbers = prepare_on_ranks(peers, check, state, prepare_local, numbers=2)
    arguments, ungroup = hopfield.prepare_steps(call)
    xi = arguments[0]
    taken = torch.zeros(xi.shape[:-1], dtype=torch.int64, device=xi.device)
    if update_steps_max != 0:
        xi, taken = retrieve_over_ranks(peers, arguments)
    wide = torch.promote_types(call.state.dtype, torch.float32)  # of the state after autocast
    xi, keys, values, mask = call.attention_operands(ungroup(xi)[..., : state.shape[-1]])
    if mask is not None and mask.is_floating_point():
        mask = mask.to(wide)
    options, seed = AttentionOptions(call.scale), None
    if p > 0:
        options, seed = _dropout_options(peers, p, options, numbers, check, state.device)
    reader = Reader(peers, lambda n: "the final reading", need_weights)
    out, _, weights = reader.attend(
        xi.to(wide), keys.to(wide), values.to(wide), mask, options, seed
    )
    results = [restore(lower(out.to(call.state.dtype), state.ndim))]
    if weights is not None:
        own_weights = lower(weights.to(call.state.dtype), state.ndim)
        results.append(restore(own_weights, state.ndim - 1))
    if need_steps:
        results.append(restore(lower(ungroup(taken).abs(), state.ndim)))
    return tuple(results) if len(results) > 1 else results[0]


def _row_dim(x: Any) -> int:
    """The dimension of the rows of a memory."""
    return x.ndim - 2 if isinstance(x, Tensor) else 0


def _dropout_options(
    peers: Peers,
    p: float,
    options: AttentionOptions,
    numbers: list[list[int]],
    check: bool,
    device: torch.device,
) -> tuple[AttentionOptions, Tensor]:
    """Return the options and the seed with which dropout draws as on one process.

    ``numbers`` are the number of rows and the seed of each rank.
    """
    if not check:
        own_numbers = torch.tensor(numbers[peers.rank], device=device)
        gathered = gather(peers, own_numbers, [2] * peers.size, "the comparison of the seeds")
        numbers = [x.tolist() for x in gathered]
    first_key = sum(rows for rows, _ in numbers[: peers.rank])
    seed = torch.tensor(numbers[0][1], device=device)
    return replace(options, dropout_p=p, first_key=first_key), seed


def _gradient_requirements(arguments: Mapping[str, Any]) -> dict[str, str]:
    """The arguments that need a gradient, on which the messages of the backward pass depend."""
    names = [n for n, x in arguments.items() if isinstance(x, Tensor) and x.requires_grad]
    return {"requires_grad": str(names if torch.is_grad_enabled() else [])}
