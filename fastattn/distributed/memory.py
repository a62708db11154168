"""Memory hops and Hopfield retrieval over ranks that share out the rows of the memory."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fastattn import checks
from fastattn.distributed._peers import Peers, process_group
from fastattn.distributed._read import Reader
from fastattn.distributed._replicated import agreed, described, enter
from fastattn.ops import hopfield, memory_hops

__all__ = ["hopfield_retrieve", "memory_hop_attention"]

_HOPS = "fastattn.distributed.memory_hop_attention"
_RETRIEVE = "fastattn.distributed.hopfield_retrieve"


def _reference(name: str) -> Any:
    """A module of the reference, whose loops call the reads. Late: import loads no backend."""
    return importlib.import_module(f"fastattn.backends.reference.{name}")


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
    result, that of :func:`fastattn.memory_hop_attention` on one process up to rounding. Each hop
    sends B · Q · (D + 2) numbers of 32 bits from each rank to each other, however many rows there
    are; its derivative, B · Q · D. Partial results are in float32 or wider and are merged in the
    order of ranks, so the same call gives the same bits, on all ranks.

    All ranks of the group make the same calls in the same order, and where one of them computes
    gradients, all do.

    Args:
        query: [B, D] or [B, Q, D], the same on all ranks.
        in_memory, out_memory: as in :func:`fastattn.memory_hop_attention`, with the rows of this
            rank: N may differ between ranks and may be 0. The order of ranks has no meaning.
        group: a process group, a one-dimensional ``DeviceMesh``, or None for all ranks.
        hops: K, at least 1.
        hop_proj: [D, D] or [K, D, D], the same on all ranks.
        memory_mask, memory_bias: as in :func:`fastattn.memory_hop_attention`, of this rank's rows.
        activation, normalize, scale: as there.
        need_weights: also return the p_k of this rank's rows. Those of all ranks add up to 1.
        check: compare options, shapes, dtypes and the values of ``query`` and ``hop_proj`` before
            anything is computed. Without it, ranks that disagree may wait for each other until the
            group's timeout, or compute different results.

    Returns:
        u_{K+1} in the shape and dtype of ``query``; with ``need_weights`` a pair of it and the
        weights, [B, K, N] ([B, Q, K, N]). Both are differentiable once. All ranks must compute the
        same loss of u_{K+1}, and each gets its whole gradient: that of query and ``hop_proj`` is
        the same on all ranks, not a part to be summed. Each rank gets the gradients of its own
        memory and bias. A loss may have one part of the weights on each rank.

    16-bit memories are converted to float32, one hop at a time.

    Raises:
        TypeError, ValueError: as :func:`fastattn.memory_hop_attention`.
        RuntimeError: options that differ between ranks; all ranks raise and name the argument. A
            rank that ends or does not answer within the group's timeout; the others raise and name
            it and the hop.

    Sources:
        Sukhbaatar et al. 2015, https://arxiv.org/abs/1503.08895; Milakov and Gimelshein 2018,
        https://arxiv.org/abs/1805.02867 (the merge).
    """
    peers = Peers(process_group(group, _HOPS), _HOPS)

    def prepare() -> tuple[tuple[Any, ...], Callable[[], Mapping[str, str]], tuple[int, ...]]:
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
        names = ("query", "in_memory", "out_memory", "hop_proj", "memory_mask", "memory_bias")
        given = dict(zip(names, arguments, strict=False))

        def compared() -> dict[str, str]:
            found = {name: repr(x) for name, x in vars(arguments[-1]).items()}
            found |= described("query", given["query"]) | described("hop_proj", given["hop_proj"])
            for name in ("in_memory", "out_memory"):
                found |= described(name, given[name], rows=True)
            return found | _differentiated(given)

        return arguments, compared, ()

    (u, in_rows, out_rows, proj, mask, bias, options), _ = agreed(peers, check, query, prepare)
    reader = Reader(peers, lambda n: f"hop {n} of {hops}", need_weights)
    read = reader.softmax if options.normalize == "softmax" else reader.linear
    tensors = (u, in_rows, out_rows, proj, mask, bias)
    trace, _, weights = _reference("memory_hops").hop_states(*tensors, options, read)
    out = trace[-1].to(u.dtype)[..., : query.shape[-1]]
    return (out, torch.stack(weights, -2).to(u.dtype)) if need_weights else out


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

    where the rows of X and V are those of all ranks. All ranks pass the same ``state`` and get the
    same result, that of :func:`fastattn.hopfield_retrieve` on one process up to rounding. Each step
    sends D + 2 numbers of 32 bits for each query from each rank to each other.

    Args:
        state: [B, H, L, D], [B, L, D] or [L, D], the same on all ranks.
        stored, projection: as in :func:`fastattn.hopfield_retrieve`, with the rows of this rank:
            N may differ between ranks and may be 0.
        group: a process group, a one-dimensional ``DeviceMesh``, or None for all ranks.
        beta: as there, the same on all ranks.
        update_steps_max, update_steps_eps, stop: as there.
        grad: "unroll" or "one_step", as there. "unroll" keeps what it has read in each step.
        attn_mask: as there, of this rank's rows.
        dropout_p: must be 0.
        need_weights: also return the weights of the final reading of this rank's rows.
        need_steps: also return how many steps each query took.
        check: as in :func:`fastattn.distributed.memory_hop_attention`.

    Returns:
        As :func:`fastattn.hopfield_retrieve`. All but the steps are differentiable once; the
        gradients of ``state`` and ``beta`` are whole and the same on all ranks, those of the
        others are of this rank's rows.

    Raises:
        TypeError, ValueError: as :func:`fastattn.hopfield_retrieve`.
        RuntimeError: as :func:`fastattn.distributed.memory_hop_attention`.
        NotImplementedError: ``grad="implicit"``; ``dropout_p`` above 0.

    Source:
        Ramsauer et al. 2021, https://arxiv.org/abs/2008.02217.
    """
    peers = Peers(process_group(group, _RETRIEVE), _RETRIEVE)

    def prepare() -> tuple[Any, Callable[[], Mapping[str, str]], tuple[int, ...]]:
        whole_beta = beta
        if isinstance(beta, Tensor):
            whole_beta = enter(peers, "the gradient of beta", beta)
        limits = (update_steps_max, update_steps_eps, stop, grad)
        flags = (attn_mask, need_weights, need_steps)
        call = hopfield.prepared(state, stored, projection, whole_beta, *limits, *flags)
        if grad == "implicit":
            raise NotImplementedError(
                f"{_RETRIEVE}: grad must be 'unroll' or 'one_step', got 'implicit', whose equations"
                " need the weights of all ranks"
            )
        if checks.check_dropout(_RETRIEVE, dropout_p):
            raise NotImplementedError(f"{_RETRIEVE}: dropout_p must be 0, got {dropout_p}")

        def compared() -> dict[str, str]:
            limits_and_flags = (*limits, need_weights, need_steps)
            names = "update_steps_max update_steps_eps stop grad need_weights need_steps".split()
            found = {n: repr(x) for n, x in zip(names, limits_and_flags, strict=True)}
            if isinstance(beta, Tensor):
                found |= described("beta", beta)
            else:
                found["beta"] = repr(call.scale)
            found |= described("state", state) | described("stored", stored, rows=True)
            found |= described("projection", projection, rows=True)
            given = {"state": state, "stored": stored, "projection": projection, "beta": beta}
            return found | _differentiated(given | {"attn_mask": attn_mask})

        return call, compared, ()

    call, _ = agreed(peers, check, state, prepare)
    (xi, stored_rows, keys, mask, bias, options), back = hopfield.primitive(call)
    reader = Reader(peers, lambda n: f"step {n} of the retrieval", False)
    taken = torch.zeros(xi.shape[:-1], dtype=torch.int64, device=xi.device)
    if update_steps_max != 0:
        given = (xi, stored_rows, keys, mask, bias, options)
        xi, taken, _ = _reference("hopfield").hopfield_states(*given, read=reader.softmax)
    final = Reader(peers, lambda n: "the final reading", need_weights)
    dtype = call.state.dtype  # as autocast casts it
    wide = torch.promote_types(dtype, torch.float32)
    rows = stored_rows if call.projection is None else call.projection.flatten(0, 1)
    compared_rows = stored_rows if keys is None else keys
    read = (xi.to(wide), compared_rows.to(wide), rows.to(wide), mask, bias, options.scale)
    out, _, weights = final.softmax(*read)
    if call.projection is None:
        out = out[..., : state.shape[-1]]
    results = [out.to(dtype)]
    if weights is not None:
        results.append(weights.to(dtype))
    if need_steps:
        results.append(taken.abs())
    results = [hopfield.lowered(back(x), state.ndim) for x in results]
    return tuple(results) if len(results) > 1 else results[0]


def _differentiated(given: Mapping[str, Any]) -> dict[str, str]:
    """The arguments with a gradient: messages of the backward depend on them."""
    found = [n for n, x in given.items() if isinstance(x, Tensor) and x.requires_grad]
    return {"requires_grad": str(found if torch.is_grad_enabled() else [])}
