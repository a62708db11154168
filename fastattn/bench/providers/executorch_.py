"""ExecuTorch: the operator is exported, lowered to XNNPACK and run by ExecuTorch's runtime."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.bench.cells import Cell
from fastattn.bench.providers import sdpa_reasons
from fastattn.bench.providers.passes import torch_versions

THREADS_OF_TORCH = False
ABOUT = "ExecuTorch: scaled_dot_product_attention exported, on XNNPACK (forward, fp32)"


def versions() -> dict[str, str]:
    import executorch  # noqa: F401

    return {"executorch": metadata.version("executorch"), **torch_versions()}


def why_not(cell: Cell) -> list[str]:
    reasons = sdpa_reasons(cell, dtypes=("fp32",))
    if cell.op == "sdpa" and cell.mask == "bias" and cell["H"] != cell["Hkv"]:
        reasons.append("its program for grouped heads with an added mask does not run")
    return reasons


class _Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *mask: Tensor) -> Tensor:
        options = self.options | ({"attn_mask": mask[0]} if mask else {})
        return nn.functional.scaled_dot_product_attention(query, key, value, **options)


def prepare(cell: Cell, inputs: dict[str, Tensor]) -> Callable[[], list[Any]]:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    names = [name for name in ("query", "key", "value", "attn_mask") if name in inputs]
    given = tuple(inputs[name] for name in names)
    module = _Attention(is_causal=cell.mask == "causal", enable_gqa=cell["H"] != cell["Hkv"])
    with torch.no_grad():
        exported = torch.export.export(module.eval(), given)
    lowered = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
    program = Runtime.get().load_program(lowered.to_executorch().buffer)
    return functools.partial(_run, program, program.load_method("forward"), given)


def _run(program: Any, method: Any, given: tuple[Tensor, ...]) -> list[Any]:
    """Runs the method. `program` is kept alive, because the method points into it."""
    return list(method.execute(given))
