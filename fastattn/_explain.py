"""`fastattn explain`: which backend would run a call, and why not the others."""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch
from torch import Tensor

from fastattn import compat, dispatch, explanation
from fastattn.bench import ops
from fastattn.bench.cells import TORCH_DTYPES, Cell, make_inputs
from fastattn.bench.ops._base import Intercepting
from fastattn.bench.selection import add_what, cells_of
from fastattn.library import operators


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_what(parser)
    parser.add_argument(
        "--device", default="cpu", help="the device of the tensors (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    try:
        device = torch.device(args.device)
    except RuntimeError as error:
        known = ", ".join(dispatch.PRIORITY)
        raise ValueError(
            f"--device {args.device!r}: must be {known}, or another device of PyTorch"
        ) from error
    if not (args.shapes or args.preset):
        args.shapes = args.op or ["sdpa"]
    for cell in cells_of(args, tuple(TORCH_DTYPES)):
        print(f"{cell.name}:")
        lines = [*map(str, explanations(cell, device))]
        print(*lines or ["plain PyTorch: it calls no kernel of fastattn"], sep="\n")
    return 0


def explanations(cell: Cell, device: torch.device) -> list[explanation.Explanation]:
    """Return one explanation per kernel that the cell calls; a module may call several, or none.

    The library runs on fake tensors, as under the compiler: nothing is computed. They are on the
    CPU, because PyTorch's autograd aborts on tensors of a device that it was built without. Only
    the tensors that the backends examine are on ``device``.
    """
    results: list[explanation.Explanation] = []

    def explain(func: Any, args: Any, kwargs: Any) -> Any:
        if func == _IS_CPU.__get__:  # by which some functions choose their operators
            return device.type == "cpu"
        if (operator := operators.get(func)) is not None:
            tensors, options = operator.split(args)
            placed = [_placed_on(device, x) for x in tensors]
            with torch.no_grad():
                results.append(explanation.explanation(operator.name, placed, options))
        return func(*args, **kwargs)

    with compat.tensors_without_memory(), warnings.catch_warnings():
        # PyTorch's stacks copy their layers, and copying fake tensors makes PyTorch warn.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        inputs = make_inputs(cell, 0)
        with Intercepting(explain):
            op = ops.get(cell.op)
            forward = op.ours(cell, inputs)
            for name in op.leaf_names(cell):
                inputs[name].requires_grad_(cell.passes != "fwd")
            forward()
    return results


def _placed_on(device: torch.device, x: Tensor | None) -> Tensor | None:
    """A tensor on this device with all properties of ``x`` that a backend examines."""
    if x is None or x.device == device:
        return x
    # Not `to`, which a PyTorch that was built without this kind of device refuses.
    like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return like.requires_grad_(x.requires_grad)


_IS_CPU: Any = Tensor.is_cpu
