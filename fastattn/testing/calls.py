"""Calls of public functions with gradients, for the proofs of operators that run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Call", "double"]


def double(x: Any) -> Any:
    """Convert a floating tensor, or a sequence of them, to float64; return anything else as is."""
    if isinstance(x, (tuple, list)):
        return tuple(map(double, x))
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


@dataclass
class Call:
    """The arguments of a function by name, and the gradients of its results.

    The floating tensors in ``tensors`` are differentiated, those in ``options`` are not.
    """

    tensors: dict[str, Any]
    options: dict[str, Any]
    grad: Tensor
    grad_weights: Tensor | None = None
    poisoned: dict[str, Any] = field(
        default_factory=dict
    )  # replaces the same tensors for the backend

    def doubled(self) -> Call:
        tensors = {name: double(x) for name, x in self.tensors.items()}
        return Call(tensors, self.options, self.grad.double(), double(self.grad_weights))

    def watched(self) -> dict[str, Tensor | None]:
        """All tensors that the function must not modify."""
        given = self.tensors | self.options | self.poisoned
        tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
        return {**tensors, "grad": self.grad, "grad_weights": self.grad_weights}

    def primitive(self, prepare: Callable[..., Any]) -> tuple[list[Any], Any]:
        """The tensors and the options of the primitive, made by ``prepare``."""
        _, (*tensors, options) = prepare(**self.tensors, **self.options)
        return tensors, options

    def run(self, function: Callable[..., Any]) -> dict[str, Tensor]:
        """The results of ``function`` and the gradients of its arguments, by name."""
        arguments = {
            name: x.detach().requires_grad_()
            if isinstance(x, Tensor) and x.is_floating_point()
            else x
            for name, x in (self.tensors | self.poisoned).items()
        }
        leaves = {n: x for n, x in arguments.items() if isinstance(x, Tensor) and x.requires_grad}
        out = function(**arguments, **self.options)
        outs = out if isinstance(out, tuple) else (out,)
        named = dict(zip(("out", "weights"), outs, strict=False))
        given = zip(outs, (self.grad, self.grad_weights), strict=False)
        pairs = [(x, g.to(x.dtype)) for x, g in given if g is not None and x.requires_grad]
        grads = torch.autograd.grad(
            [x for x, _ in pairs],
            list(leaves.values()),
            [g for _, g in pairs],
            allow_unused=True,
            materialize_grads=True,
        )
        derived = {f"grad of {name}": g for name, g in zip(leaves, grads, strict=True)}
        return {name: x.detach() for name, x in named.items()} | derived
