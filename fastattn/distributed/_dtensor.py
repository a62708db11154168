"""DTensors as arguments: their rows on this rank, and results that are DTensors again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fastattn.distributed._peers import OP

__all__ = ["is_dtensor", "local_rows"]

_ROWS = 2  # the dimension of [B, H, L, D] that ranks share


def is_dtensor(x: Any) -> bool:
    return type(x).__name__ == "DTensor"  # importing its class takes long


def local_rows(
    query: Any, key: Any, value: Any, group: Any
) -> tuple[tuple[Tensor, Tensor, Tensor], Any, Callable[[Tensor], Tensor]]:
    """The rows of this rank, the group that shares the rows, and what makes results DTensors."""
    given = {"query": query, "key": key, "value": value}
    for name, x in given.items():
        if not is_dtensor(x):
            raise TypeError(f"{OP}: query, key and value must all be DTensors, {name} is not one")
        if (x.device_mesh, x.placements) != (query.device_mesh, query.placements):
            raise ValueError(
                f"{OP}: {name} must have query's mesh and placements, {query.device_mesh} and "
                f"{query.placements}, got {x.device_mesh} and {x.placements}"
            )
    if group is not None:
        raise ValueError(f"{OP}: group must be None for DTensors: their mesh has it")
    mesh, placements = query.device_mesh, query.placements
    of_rows = [n for n, placement in enumerate(placements) if placement.is_shard(_ROWS)]
    if len(of_rows) != 1 or any(placement.is_partial() for placement in placements):
        raise ValueError(
            f"{OP}: DTensors must be Shard({_ROWS}) on one dimension of their mesh and not Partial "
            f"on any, got {placements}"
        )
    group = mesh.get_group(of_rows[0])
    if dist.get_rank(group) != mesh.get_local_rank(of_rows[0]):
        raise ValueError(f"{OP}: the mesh must have its ranks in ascending order, got {mesh}")
    shape = tuple(query.shape[:3])

    def restored(x: Tensor) -> Tensor:
        """Rows [B, H, L_rank, ...] of results."""
        whole = x.new_empty((*shape, *x.shape[3:]), device="meta")
        return type(query).from_local(
            x, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )

    rows = (query.to_local(), key.to_local(), value.to_local())
    return rows, group, restored
