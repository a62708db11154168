"""DTensors as arguments: their local part, and results that are DTensors again."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

Restore = Callable[..., Any]  # (local result, the dimension of its rows or None) -> DTensor


def is_dtensor(x: Any) -> bool:
    """Whether x is a DTensor, judged by the name of its class."""
    return type(x).__name__ == "DTensor"  # importing its class takes long


def refuse_dtensors(op: str, **arguments: Any) -> None:
    """Raise an error for DTensors in arguments that must be this rank's tensors."""
    for name, x in arguments.items():
        if is_dtensor(x):
            raise TypeError(f"{op}: {name} must be this rank's Tensor, pass {name}.to_local()")


def local_parts(
    op: str,
    group: Any,
    rows: Mapping[str, tuple[Any, int]],  # tensors (or None) and the dimension of their rows
    whole: Mapping[str, Any],  # tensors (or None) that are replicated
    shared: Collection[int] = (0, 1),  # batch and heads
) -> tuple[dict[str, Any], Any, Restore]:
    """Return this rank's parts, the group that shares rows, and a function to restore results.

    The rows are sharded on one dimension of the mesh. On its other dimensions all tensors have the
    same placements, which may shard the dimensions ``shared``. Without a DTensor nothing changes.
    """
    dims = {name: dim for name, (x, dim) in rows.items() if x is not None}
    dtensors = {name: rows[name][0] for name in dims}
    dtensors |= {name: x for name, x in whole.items() if x is not None}
    if not any(map(is_dtensor, dtensors.values())):
        absent = dict.fromkeys((*rows, *whole))
        return absent | dtensors, group, lambda x, dim=None: x
    names = " and ".join(", ".join(dtensors).rsplit(", ", 1))
    for name, x in dtensors.items():
        if not is_dtensor(x):
            raise TypeError(f"{op}: {names} must all be DTensors, {name} is not one")
    if not dims:
        raise TypeError(f"{op}: {' and '.join(rows)} must be DTensors, got None")
    if group is not None:
        raise ValueError(f"{op}: group must be None for DTensors: their mesh has it")
    (first, dim), like = next(iter(dims.items())), next(iter((whole or dtensors).values()))
    mesh, placements = dtensors[first].device_mesh, dtensors[first].placements
    sharded = [n for n, placement in enumerate(placements) if placement.is_shard(dim)]
    if len(sharded) != 1:
        raise ValueError(
            f"{op}: {first} must be Shard({dim}) on one dimension of its mesh, got {placements}"
        )
    other_placements = [p for n, p in enumerate(placements) if n != sharded[0]]
    if not all(p.is_replicate() or any(map(p.is_shard, shared)) for p in other_placements):
        allowed = " or ".join(["Replicate()", *(f"Shard({n})" for n in shared)])
        raise ValueError(
            f"{op}: {first} must be {allowed} on the other dimensions of its mesh, got {placements}"
        )
    types = importlib.import_module("torch.distributed.tensor")

    def placements_of(dim: int | None) -> tuple[Any, ...]:
        """The placements of a tensor whose rows are dimension ``dim``; None: replicated."""
        placement = types.Replicate() if dim is None else types.Shard(dim)
        return tuple(placement if n == sharded[0] else p for n, p in enumerate(placements))

    for name, x in dtensors.items():
        if (x.device_mesh, x.placements) != (mesh, placements_of(dims.get(name))):
            raise ValueError(
                f"{op}: {name} must have the mesh {mesh} and the placements "
                f"{placements_of(dims.get(name))}, got {x.device_mesh} and {x.placements}"
            )
    group = mesh.get_group(sharded[0])
    if dist.get_rank(group) != mesh.get_local_rank(sharded[0]):
        raise ValueError(f"{op}: the mesh must have its ranks in ascending order, got {mesh}")
    length = dtensors[first].shape[dim]

    def restore(x: Tensor, dim: int | None = None) -> Any:
        """Make a DTensor of a local result whose rows are dimension ``dim``; None: replicated."""
        shape = list(x.shape)
        for n, placement in enumerate(placements_of(dim)):
            if placement.is_shard():
                shape[placement.dim] = length if n == sharded[0] else like.shape[placement.dim]
        like_whole = x.new_empty(shape, device="meta")
        return type(like).from_local(
            x,
            mesh,
            placements_of(dim),
            run_check=False,
            shape=like_whole.shape,
            stride=like_whole.stride(),
        )

    local_tensors = {name: x.to_local() for name, x in dtensors.items()}
    return dict.fromkeys((*rows, *whole)) | local_tensors, group, restore
