"""DTensors as arguments: their local part, and results that are DTensors again."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

Restored = Callable[..., Any]  # (part of a result, the dimension that ranks share or None)


def is_dtensor(x: Any) -> bool:
    return type(x).__name__ == "DTensor"  # importing its class takes long


def refuse_dtensors(op: str, **given: Any) -> None:
    """Raise an error for DTensors in arguments that must be this rank's tensors."""
    for name, x in given.items():
        if is_dtensor(x):
            raise TypeError(f"{op}: {name} must be this rank's Tensor, pass {name}.to_local()")


def local_parts(
    op: str,
    group: Any,
    rows: Mapping[str, tuple[Any, int]],  # tensors and the dimension that ranks share, or None
    whole: Mapping[str, Any],  # tensors that all ranks have, or None
    shared: Collection[int] = (0, 1),  # batch and heads
) -> tuple[dict[str, Any], Any, Restored]:
    """Return this rank's parts, the group that shares rows, and a function to restore results.

    The rows are sharded on one dimension of the mesh. On its other dimensions all tensors have the
    same placements, of the dimensions ``shared``. Without a DTensor nothing changes.
    """
    dims = {name: dim for name, (x, dim) in rows.items() if x is not None}
    given = {name: rows[name][0] for name in dims}
    given |= {name: x for name, x in whole.items() if x is not None}
    if not any(map(is_dtensor, given.values())):
        nothing = dict.fromkeys((*rows, *whole))
        return nothing | given, group, lambda x, dim=None: x
    listed = " and ".join(", ".join(given).rsplit(", ", 1))
    for name, x in given.items():
        if not is_dtensor(x):
            raise TypeError(f"{op}: {listed} must all be DTensors, {name} is not one")
    if not dims:
        raise TypeError(f"{op}: {' and '.join(rows)} must be DTensors, got None")
    if group is not None:
        raise ValueError(f"{op}: group must be None for DTensors: their mesh has it")
    (first, dim), like = next(iter(dims.items())), next(iter((whole or given).values()))
    mesh, placements = given[first].device_mesh, given[first].placements
    at = [n for n, placement in enumerate(placements) if placement.is_shard(dim)]
    if len(at) != 1:
        raise ValueError(
            f"{op}: {first} must be Shard({dim}) on one dimension of its mesh, got {placements}"
        )
    others = [p for n, p in enumerate(placements) if n != at[0]]
    if not all(p.is_replicate() or any(map(p.is_shard, shared)) for p in others):
        allowed = " or ".join(["Replicate()", *(f"Shard({n})" for n in shared)])
        raise ValueError(
            f"{op}: {first} must be {allowed} on the other dimensions of its mesh, got {placements}"
        )
    types = importlib.import_module("torch.distributed.tensor")

    def placed(dim: int | None) -> tuple[Any, ...]:
        own = types.Replicate() if dim is None else types.Shard(dim)
        return tuple(own if n == at[0] else p for n, p in enumerate(placements))

    for name, x in given.items():
        if (x.device_mesh, x.placements) != (mesh, placed(dims.get(name))):
            raise ValueError(
                f"{op}: {name} must have the mesh {mesh} and the placements "
                f"{placed(dims.get(name))}, got {x.device_mesh} and {x.placements}"
            )
    group = mesh.get_group(at[0])
    if dist.get_rank(group) != mesh.get_local_rank(at[0]):
        raise ValueError(f"{op}: the mesh must have its ranks in ascending order, got {mesh}")
    length = given[first].shape[dim]

    def restored(x: Tensor, dim: int | None = None) -> Any:
        shape = list(x.shape)
        for n, placement in enumerate(placed(dim)):
            if placement.is_shard():
                shape[placement.dim] = length if n == at[0] else like.shape[placement.dim]
        like_whole = x.new_empty(shape, device="meta")
        return type(like).from_local(
            x,
            mesh,
            placed(dim),
            run_check=False,
            shape=like_whole.shape,
            stride=like_whole.stride(),
        )

    parts = {name: x.to_local() for name, x in given.items()}
    return dict.fromkeys((*rows, *whole)) | parts, group, restored
