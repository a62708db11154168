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
from torch.distributed.tensor import Shard, distribute_tensor

import fastattn
from fastattn.distributed import Layout, attention

Pairs = list[tuple[Tensor, Tensor]]
L = 24


def drawn() -> list[Tensor]:
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
    """Those of the methods that have them; an error that says so of the ring."""
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


def compiled() -> Pairs:
    """Within a compiled function, which does not trace it."""
    tensors = drawn()
    rows = Layout.zigzag([6] * 4).positions(dist.get_rank())
    own = [x[:, :, rows].requires_grad_() for x in tensors]

    def doubled(*x: Tensor) -> Tensor:
        return attention(*(2 * each for each in x), is_causal=True, layout="zigzag")

    found = torch.compile(doubled, backend="eager")(*own)
    grads = torch.autograd.grad(found.sum(), own)
    want = torch.autograd.grad(doubled(*own).sum(), own)
    return [(found, causal(*(2 * x for x in tensors))[:, :, rows]), *zip(grads, want, strict=True)]


def run_uses() -> dict[str, Any]:
    uses = (
        two_groups,
        two_layers,
        without_check,
        other_lengths_of_keys,
        second_derivatives,
        placed,
    )
    return {use.__name__: use() for use in uses}
