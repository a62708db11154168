"""Uses of ``fastattn.distributed.attention`` beyond one call for all ranks, run on four ranks.

Each returns pairs of a result and what one process computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fastattn
from fastattn.distributed import (
    Layout,
    attention,
    decode_attention,
    hopfield_retrieve,
    memory_hop_attention,
)

Pairs = list[tuple[Tensor, Tensor]]
L = 24


def drawn() -> list[Tensor]:
    """Random queries, keys and values of the whole sequence."""
    draw = torch.Generator().manual_seed(0)
    return list(torch.randn(3, 1, 4, L, 8, generator=draw, dtype=torch.float64))


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return fastattn.scaled_dot_product_attention(query, key, value, is_causal=True)


def two_groups() -> Pairs:
    """Two groups of two ranks at once, of process groups and of a mesh."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    rows = Layout.contiguous([10, 14]).positions(rank % 2)
    tensors = [x + rank // 2 for x in drawn()]  # other numbers in each group
    own, want = [x[:, :, rows] for x in tensors], causal(*tensors)[:, :, rows]
    found = [
        attention(*own, group=group, is_causal=True, method=method)
        for group in (groups[rank // 2], mesh["context"])
        for method in ("ring", "allgather", "ulysses")
    ]
    return [(x, want) for x in found]


def two_layers() -> Pairs:
    """Two calls in one step, with a weight that the ranks share."""

    def loss(attend: Callable[..., Tensor], x: Tensor, weight: Tensor) -> Tensor:
        hidden = attend(x, x @ weight, x)
        return attend(hidden, hidden @ weight, hidden).square().sum()

    x, _, _ = drawn()
    weight = x[0, 0, :8].clone().requires_grad_()
    whole = x.clone().requires_grad_()
    want, want_weight = torch.autograd.grad(loss(causal, whole, weight), (whole, weight))
    layout = Layout.zigzag([5, 0, 13, 6])
    rows = layout.positions(dist.get_rank())
    pairs = []
    for method in ("ring", "allgather", "ulysses"):
        own = x[:, :, rows].requires_grad_()

        def attend(*tensors: Tensor, method: str = method) -> Tensor:
            return attention(*tensors, is_causal=True, layout="zigzag", method=method)

        grad, grad_weight = torch.autograd.grad(loss(attend, own, weight), (own, weight))
        dist.all_reduce(grad_weight)
        pairs += [(grad, want[:, :, rows]), (grad_weight, want_weight)]
    return pairs


def without_check() -> Pairs:
    """Without the comparison of arguments, for equal lengths and for a layout of all ranks."""
    rank, tensors = dist.get_rank(), drawn()
    want = causal(*tensors)
    pairs = []
    for layout in ("zigzag", Layout.contiguous([3, 9, 0, 12])):
        given = Layout.zigzag([6] * 4) if layout == "zigzag" else layout
        rows = given.positions(rank)
        own = [x[:, :, rows] for x in tensors]
        found = attention(*own, layout=layout, is_causal=True, check=False, method="ring")
        pairs.append((found, want[:, :, rows]))
    # The rows and seeds of dropout are exchanged all the same.
    patterns = tensors[0][0, 0]
    own = patterns[Layout.contiguous([3, 9, 0, 12]).positions(rank)]
    torch.manual_seed(rank)
    found = hopfield_retrieve(patterns[:5], own, dropout_p=0.5, check=False)
    torch.manual_seed(0)
    pairs.append((found, fastattn.hopfield_retrieve(patterns[:5], patterns, dropout_p=0.5)))
    return pairs


def other_lengths_of_keys() -> Pairs:
    """More queries than keys, and ranks that have only one of them."""
    query, key, value = drawn()
    key, value = key[:, :, :17], value[:, :, :17]
    rank, want = dist.get_rank(), causal(query, key, value)
    rows = Layout.contiguous([0, 9, 15, 0]).positions(rank)
    columns = Layout.contiguous([6, 0, 4, 7]).positions(rank)
    pairs = []
    for method in ("ring", "allgather", "ulysses"):
        own = query[:, :, rows], key[:, :, columns], value[:, :, columns]
        leaves = [x.requires_grad_() for x in own]
        found = attention(*leaves, is_causal=True, method=method)
        pairs.append((found, want[:, :, rows]))
        whole = [x.detach().requires_grad_() for x in (query, key, value)]
        wanted = torch.autograd.grad(causal(*whole).square().sum(), whole)
        grads = torch.autograd.grad(found.square().sum(), leaves)
        places = (rows, columns, columns)
        pairs += [(g, w[:, :, at]) for g, w, at in zip(grads, wanted, places, strict=True)]
    return pairs


def second_derivatives() -> Pairs:
    """Second derivatives of the methods that have them; a clear error for the ring."""
    layout = Layout.zigzag([5, 0, 13, 6])
    rows = layout.positions(dist.get_rank())

    def derived(attend: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
        out = attend(*tensors).square().sum()
        grads = torch.autograd.grad(out, tensors, create_graph=True)
        return list(torch.autograd.grad(sum(g.sin().sum() for g in grads), tensors))

    wanted = derived(causal, [x.requires_grad_() for x in drawn()])
    pairs = []
    for method in ("ring", "allgather", "ulysses"):

        def attend(*tensors: Tensor, method: str = method) -> Tensor:
            return attention(*tensors, is_causal=True, layout="zigzag", method=method)

        own = [x[:, :, rows].requires_grad_() for x in drawn()]
        if method == "ring":
            with pytest.raises(NotImplementedError, match="'ring' has first derivatives only"):
                derived(attend, own)
            continue
        found = derived(attend, own)
        pairs += [(g, w[:, :, rows]) for g, w in zip(found, wanted, strict=True)]
    return pairs


def placed() -> Pairs:
    """DTensors whose rows are shared, on a mesh of one and of two dimensions."""
    pairs = []
    for dims, placements in (((4,), [Shard(2)]), ((2, 2), [Shard(1), Shard(2)])):
        mesh = init_device_mesh("cpu", dims)

        shared = [distribute_tensor(x[:, :, :23], mesh, placements) for x in drawn()]
        tensors = [x.requires_grad_() for x in shared]
        found = attention(*tensors, is_causal=True)
        out, lse = attention(*tensors, is_causal=True, return_lse=True)
        assert found.placements == out.placements == lse.placements == tuple(placements)
        grads = torch.autograd.grad(found.square().sum(), tensors)
        whole = [x[:, :, :23].clone().requires_grad_() for x in drawn()]
        want = causal(*whole)
        wanted = torch.autograd.grad(want.square().sum(), whole)
        gathered = [x.full_tensor() for x in (found, out, *grads)]
        pairs += list(zip(gathered, (want, want, *wanted), strict=True))
        assert lse.full_tensor().shape == want.shape[:3]
    return pairs


def placed_memories() -> Pairs:
    """DTensors of memories and caches, whose batch is shared on another dimension of the mesh."""
    draw = torch.Generator().manual_seed(0)
    u, rows = (torch.randn(2, n, 8, generator=draw, dtype=torch.float64) for n in (3, 11))
    pairs = []
    for dims, of_rows, of_query in (
        ((4,), [Shard(1)], [Replicate()]),
        ((2, 2), [Shard(0), Shard(1)], [Shard(0), Replicate()]),
    ):
        mesh = init_device_mesh("cpu", dims)

        def on(x: Tensor, placements: Any, mesh: Any = mesh) -> Tensor:
            return distribute_tensor(x, mesh, placements).requires_grad_()

        for ours, stock, options in (
            (memory_hop_attention, fastattn.memory_hop_attention, {"hops": 2}),
            (hopfield_retrieve, fastattn.hopfield_retrieve, {"update_steps_max": 2}),
        ):
            given = on(u, of_query), on(rows, of_rows)
            out, p = ours(*given, **options, need_weights=True)
            assert out.placements == tuple(of_query)
            grads = torch.autograd.grad(out.square().sum(), given)
            assert [g.placements for g in grads] == [tuple(of_query), tuple(of_rows)]
            whole = u.clone().requires_grad_(), rows.clone().requires_grad_()
            want, want_p = stock(*whole, **options, need_weights=True)
            wanted = torch.autograd.grad(want.square().sum(), whole)
            gathered = [x.full_tensor() for x in (out, p, *grads)]
            pairs += list(zip(gathered, (want, want_p, *wanted), strict=True))
        # [B, Hq, Lq, D] and [B, H, N, D].
        query, cache = u.view(2, 3, 1, 8), rows[:, :10].reshape(2, 1, 10, 8)
        of_cache = [Shard(2) if x == Shard(1) else x for x in of_rows]
        with torch.no_grad():
            given = on(query, of_query), *(on(cache, of_cache) for _ in range(2))
            out, lse = decode_attention(*given, return_lse=True)
        assert out.placements == lse.placements == tuple(of_query)
        wanted = fastattn.decode_attention(query, cache, cache.clone(), return_lse=True)
        pairs += list(zip((out.full_tensor(), lse.full_tensor()), wanted, strict=True))
    return pairs


def compiled(backend: str = "eager") -> Pairs:
    """Within a compiled function, which does not trace it."""
    tensors, rank = drawn(), dist.get_rank()
    rows = Layout.zigzag([6] * 4).positions(rank)
    own = [x[:, :, rows].requires_grad_() for x in tensors]
    u, memory = tensors[0][0, 0, :3], tensors[1][0, :, 6 * rank : 6 * rank + 6].flatten(0, 1)
    memories = [u.clone().requires_grad_(), memory.clone().requires_grad_()]
    cache = [x[:, :, 6 * rank : 6 * rank + 6].clone() for x in tensors[1:]]

    def attended(*x: Tensor) -> Tensor:
        return attention(*(2 * each for each in x), is_causal=True, layout="zigzag")

    def hopped(query: Tensor, memory: Tensor) -> Tensor:
        return memory_hop_attention(2 * query, memory[None], hops=2) / 2

    def retrieved(query: Tensor, memory: Tensor) -> Tensor:
        limits = {"update_steps_max": 2, "update_steps_eps": 0.0, "grad": "implicit"}
        return hopfield_retrieve(2 * query, memory, **limits) / 2

    def decoded(query: Tensor, *caches: Tensor) -> Tensor:
        return decode_attention(2 * query, *caches, 20, window=(9, 0)) / 2

    pairs = [(attended(*own), causal(*(2 * x for x in tensors))[:, :, rows])]
    for function, given in ((attended, own), (hopped, memories), (retrieved, memories)):
        traced = torch.compile(function, backend=backend)
        for _ in range(2):
            found, want = traced(*given), function(*given)
            grads, wanted = (torch.autograd.grad(x.sum(), given) for x in (found, want))
            pairs += [(found, want), *zip(grads, wanted, strict=True)]
    query = tensors[0][:, :, :1]
    traced = torch.compile(decoded, backend=backend)
    return [*pairs, *((traced(query, *cache), decoded(query, *cache)) for _ in range(2))]


def inductor() -> Pairs:
    return compiled("inductor")


def run_uses() -> dict[str, Any]:
    """The results of all uses on this rank, by name."""
    uses = (two_groups, two_layers, without_check, other_lengths_of_keys, second_derivatives)
    return {use.__name__: use() for use in (*uses, placed, placed_memories)}
