"""`fastattn explain`: which backend would run a call, and why not the others."""

from __future__ import annotations

import argparse
import warnings

import torch

from fastattn import compat, dispatch
from fastattn.bench import ops
from fastattn.bench.cells import DTYPE_BYTES, Cell
from fastattn.bench.inputs import make_inputs
from fastattn.bench.recording import Calls
from fastattn.bench.selection import add_what, cells_of


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
    for cell in cells_of(args, tuple(DTYPE_BYTES)):
        print(f"{cell.name}:")
        found = explanations(cell, device)
        print(*found, sep="\n") if found else print("plain PyTorch: it calls no kernel of fastattn")
    return 0


def explanations(cell: Cell, device: torch.device) -> list[dispatch.Explanation]:
    """Return one explanation per kernel that the cell calls; a module may call several, or none.

    The library runs on tensors without memory, as under the compiler: nothing is computed.
    """
    found: list[dispatch.Explanation] = []
    with compat.tensors_without_memory(), warnings.catch_warnings():
        # PyTorch's stacks copy their layers, and copying fake tensors makes PyTorch warn.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        # Not `to`, which a PyTorch that was built without this kind of device refuses.
        inputs = {
            name: torch.empty_like(x, device=device) for name, x in make_inputs(cell, 0).items()
        }
        with Calls(lambda *call: found.append(dispatch.explanation(*call))):
            forward, leaves = ops.get(cell.op).ours(cell, inputs)
            for leaf in leaves:
                leaf.requires_grad_(cell.passes != "fwd")
            forward()
    return found
