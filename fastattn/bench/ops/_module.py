"""What the operators that are modules share: the module knows its parameters, we draw them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fastattn.bench.ops._base import Inputs, Operator, Outputs, Prepared

if TYPE_CHECKING:
    from fastattn.bench.cells import Cell
    from fastattn.bench.inputs import Draw

Make = Callable[..., nn.Module]


class Module(Operator):
    """A module of the library, with the same parameters wherever it is computed.

    LEAVES are what it is called with, by our names, and its parameters, by their own.
    """

    def make(self, cell: Cell, **made: Any) -> nn.Module:
        """The module; `made` is the device and the dtype of its parameters."""
        raise NotImplementedError

    def given(self, cell: Cell, draw: Draw) -> Inputs:
        """What the module is called with, and `grad_out`."""
        raise NotImplementedError

    def call(self, cell: Cell, module: nn.Module, inputs: Inputs) -> Tensor:
        raise NotImplementedError

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        drawn = self.given(cell, draw)
        for name, parameter in self.make(cell, device="meta").named_parameters():
            drawn[name] = self.parameter(name, tuple(parameter.shape), draw)
        return drawn

    def parameter(self, name: str, shape: tuple[int, ...], draw: Draw) -> Tensor:
        """Weights that keep the size of what they multiply; a norm's are about 1."""
        if len(shape) > 1:
            return draw.normal(*shape, scale=shape[-1] ** -0.5)
        about_one = "norm" in name and name.endswith("weight")
        return draw.normal(*shape, scale=0.1) + (1 if about_one else 0)

    def parameters(self, cell: Cell) -> int:
        """How many numbers they are."""
        return sum(x.numel() for x in self.make(cell, device="meta").parameters())

    def ours(self, cell: Cell, inputs: Inputs) -> Prepared:
        return self.prepared(self.make, cell, inputs)

    def prepared(self, make: Make, cell: Cell, inputs: Inputs) -> Prepared:
        """Eval mode for the forward only, else training; no module here has dropout."""
        some = next(inputs[name] for name in self.LEAVES)
        module = make(cell, dtype=some.dtype, device=some.device)
        own = dict(module.named_parameters())
        # Not strict, for buffers; a parameter that is no input would be a KeyError here.
        module.load_state_dict({name: inputs[name] for name in own}, strict=False)
        module.train(cell.passes != "fwd")
        leaves = [own[name] if name in own else inputs[name] for name in self.LEAVES]

        def forward() -> Outputs:
            return (self.call(cell, module, inputs),)

        return forward, leaves
