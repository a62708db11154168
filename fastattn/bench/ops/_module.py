"""Operators that are modules."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn, ops
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastattn.nn
from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._base import Inputs, Operator, Outputs, Prepared
from fastattn.compat import DispatchMode


class Module(Operator):
    """A module of the library. Its leaves are its arguments, SHAPES, and its parameters."""

    TORCH = "the equation: torch has no such module"

    def make(self, cell: Cell, **made: Any) -> nn.Module:
        """The module; `made` is the device and the dtype of its parameters."""
        raise NotImplementedError

    def call(self, cell: Cell, module: nn.Module, inputs: Inputs) -> Any:
        """The call that is timed."""
        return module(*self.leaves(inputs), **self.KEYWORDS)

    def leaf_names(self, cell: Cell) -> Sequence[str]:
        return (*self.SHAPES, *_parameter_shapes(self, cell))

    def elements(self, cell: Cell) -> tuple[int, int]:
        arguments, output = super().elements(cell)
        return arguments + sum(map(math.prod, _parameter_shapes(self, cell).values())), output

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        drawn = super().inputs(cell, draw)
        for name, shape in _parameter_shapes(self, cell).items():
            drawn[name] = self.parameter(name, shape, draw)
        return drawn

    def within(self, cell: Cell, name: str, x: Tensor, block: slice) -> Tensor:
        is_parameter = name in _parameter_shapes(self, cell)
        return x if is_parameter else super().within(cell, name, x, block)

    def parameter(self, name: str, shape: tuple[int, ...], draw: Draw) -> Tensor:
        """Matrices that preserve the scale of their inputs; weights of norms near 1."""
        if len(shape) > 1:
            return draw.normal(*shape, scale=shape[-1] ** -0.5)
        about_one = "norm" in name and name.endswith("weight")
        return draw.normal(*shape, scale=0.1) + (1 if about_one else 0)

    def ours(self, cell: Cell, inputs: Inputs) -> Prepared:
        return self.built(self.make, cell, inputs)

    def built(self, make: Callable[..., nn.Module], cell: Cell, inputs: Inputs) -> Prepared:
        """Eval mode for the forward only, else training; no module here has dropout."""
        like = inputs["grad_out"]
        with NothingDrawn():
            module = make(cell, dtype=like.dtype, device=like.device)
        own: dict[str, Any] = dict(module.named_parameters())
        # Not strict, because buffers are no inputs; a parameter that is none raises a KeyError.
        module.load_state_dict({name: inputs[name] for name in own}, strict=False)
        module.train(cell.passes != "fwd")
        return self.prepared(
            cell,
            inputs | own,
            lambda: self.results(self.call(cell, module, inputs), like.dtype),
        )


class Twin(Module):
    """A module that `torch.nn` has under the same name, with the same parameters.

    PyTorch's, in float64, is also the definition.
    """

    def build(self, library: Any, cell: Cell, **made: Any) -> nn.Module:
        """The module of `library`, which is `fastattn.nn` or `torch.nn`."""
        raise NotImplementedError

    def make(self, cell: Cell, **made: Any) -> nn.Module:
        return self.build(fastattn.nn, cell, **made)

    def theirs(self, cell: Cell, inputs: Inputs) -> Prepared:
        return self.built(functools.partial(self.build, nn), cell, inputs)

    def eager(self, cell: Cell, inputs: Inputs) -> Prepared:
        forward, leaves = self.theirs(cell, inputs)

        def with_scores() -> Outputs:
            with sdpa_kernel(SDPBackend.MATH):
                return forward()

        return with_scores, leaves

    def exact(self, cell: Cell, inputs: Inputs, block: slice) -> Prepared:
        """In training mode and in one step, without PyTorch's fused layers."""
        return self.eager(dataclasses.replace(cell, passes="fwd+bwd", option="none"), inputs)


@functools.lru_cache(maxsize=64)
def _parameter_shapes(module: Module, cell: Cell) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter of the cell's module, by name and in its order."""
    parameters = module.make(cell, device="meta").named_parameters()
    return {name: tuple(parameter.shape) for name, parameter in parameters}


def below(inputs: Inputs, prefix: str) -> Inputs:
    """The parameters of a submodule, by their names in it."""
    return {n.removeprefix(prefix): x for n, x in inputs.items() if n.startswith(prefix)}


class NothingDrawn(DispatchMode):
    """Fills new weights with 0 instead of random numbers, which is faster.

    Uninitialized memory does not work: `trunc_normal_` redraws until all numbers are in its range.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket in (ops.aten.normal_, ops.aten.uniform_):
            return args[0].zero_()
        return func(*args, **(kwargs or {}))
