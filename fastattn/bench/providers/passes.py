"""Runs the forward, the backward or both of a forward function in PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn.bench import ops
from fastattn.bench.cells import Cell

Outputs = tuple[Tensor, ...]
_entered = contextlib.ExitStack()


def stay_in(context: contextlib.AbstractContextManager[Any]) -> None:
    """Enters `context` until the next call of this function or of `leave`, outside the timing.

    The exit stack keeps a reference; an unreferenced context manager would exit immediately.
    """
    _entered.close()
    _entered.enter_context(context)


def leave() -> None:
    _entered.close()


def run_passes(cell: Cell, forward: ops.Forward, x: ops.Inputs) -> Callable[[], Outputs]:
    """A callable that runs the cell's passes; the first output is differentiated.

    Gradients are returned, not accumulated: `torch.autograd.grad` allocates new ones in every
    call, like the first backward after `zero_grad`.
    """
    if cell.passes == "fwd":

        def run_forward() -> Outputs:
            with torch.no_grad():
                out = forward()
            return out if type(out) is tuple else (out,)

        return run_forward

    leaves, grad_out = [x[name] for name in ops.get(cell.op).leaf_names(cell)], x.grad_out
    for leaf in leaves:
        leaf.requires_grad_()
    if cell.passes == "bwd":
        kept = ops.as_tuple(forward())[0]
        return lambda: torch.autograd.grad(kept, leaves, grad_out, retain_graph=True)

    def run_both() -> Outputs:
        outputs = ops.as_tuple(forward())
        gradients = torch.autograd.grad(outputs[0], leaves, grad_out)
        return (*(output.detach() for output in outputs), *gradients)

    return run_both
