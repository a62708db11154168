"""The base class of all operators of the benchmark."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

import fastattn

if TYPE_CHECKING:
    from fastattn.bench.cells import Cell
    from fastattn.bench.inputs import Draw
    from fastattn.bench.stopwatch import Stopwatch

Inputs = dict[str, Tensor]
Outputs = tuple[Tensor, ...]
Forward = Callable[[], Outputs]
Sizes = Mapping[str, "int | str"]
Prepared = tuple[Forward, Sequence[Tensor]]


class Operator:
    """An operator: its sizes, inputs and cost, its equation in plain PyTorch, and its call.

    A function of the library defines `arguments`; modules derive from `_module.Module`. The
    defaults suit an operator that is a function of its inputs, without masks and weights.
    """

    FUNCTION: ClassVar[str]  # its name in `fastattn`; "nn.Name" for a module
    ABOUT: ClassVar[str]  # the equation, for `bench list`
    # What the provider `torch` runs instead.
    TORCH: ClassVar[str] = "the equation: torch has no such function"
    SIZES: ClassVar[Sizes]  # keys of --shapes; a default is a number or another key
    MASKS: ClassVar[Sequence[str]] = ("none",)
    WEIGHTS: ClassVar[Sequence[str]] = ("none",)
    OPTIONS: ClassVar[Sequence[str]] = ("none",)
    PASSES: ClassVar[Sequence[str]] = ("fwd", "bwd", "fwd+bwd")
    # The inputs that have a gradient, in order, and the output; "B L*E" is [B, L * E].
    SHAPES: ClassVar[Mapping[str, str]]
    OUTPUT: ClassVar[str]
    # Batch and lengths of the tiny cell that loads the code; widths stay, because they select it.
    TINY: ClassVar[Mapping[str, int]] = dict.fromkeys(("B", "S"), 1) | dict.fromkeys(
        ("L", "Lq", "Lk", "N"), 16
    )
    # Measures the attention in a call that also does other work.
    stopwatch: Stopwatch | None = None

    def require(self) -> None:
        """Imports the packages of this operator; an ImportError says what to install."""

    def items(self, cell: Cell) -> tuple[float, str] | None:
        """What a call processes, such as tokens, and its unit; None if that is no measure of it."""
        return None

    def check(self, sizes: Mapping[str, int]) -> None:
        """Raises ValueError, which names the keys, for sizes that do not match."""
        for whole, part in (("H", "Hkv"), ("E", "H")):
            if {whole, part} <= sizes.keys() and sizes[whole] % sizes[part]:
                raise ValueError(
                    f"{whole}={sizes[whole]} is not a multiple of {part}={sizes[part]}"
                )

    def check_option(self, cell: Cell) -> None:
        """Raises ValueError if the option is not available for the rest of the cell."""

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        """Those of the forward and of the backward pass; `pairs`: the visible pairs of one head."""
        raise NotImplementedError

    def size(self, cell: Cell, key: str) -> int:
        """The value of a key in SHAPES and OUTPUT."""
        return cell[key]

    def shape(self, cell: Cell, sizes: str) -> list[int]:
        """The shape that an entry of SHAPES, or OUTPUT, describes."""
        return [
            math.prod(self.size(cell, key) for key in size.split("*")) for size in sizes.split()
        ]

    def scale(self, cell: Cell, name: str) -> float:
        """The standard deviation of an input of SHAPES."""
        return 1.0

    def elements(self, cell: Cell) -> tuple[int, int]:
        """The number of elements of all inputs, and of the output."""
        inputs = (math.prod(self.shape(cell, sizes)) for sizes in self.SHAPES.values())
        return sum(inputs), math.prod(self.shape(cell, self.OUTPUT))

    def unread(self, cell: Cell) -> int:
        """The number of elements of the inputs that the result does not depend on."""
        return 0

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        """All inputs by name: the leaves, `grad_out`, masks and others."""
        drawn = {
            name: draw.normal(*self.shape(cell, sizes), scale=self.scale(cell, name))
            for name, sizes in self.SHAPES.items()
        }
        grad_out = self.shape(cell, self.OUTPUT) if "bwd" in self.PASSES else (0,)
        return drawn | {"grad_out": draw.normal(*grad_out)}

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        """The equation in plain PyTorch."""
        raise NotImplementedError

    def arguments(self, cell: Cell, inputs: Inputs) -> tuple[Sequence[Any], dict[str, Any]]:
        """The arguments of the library's function."""
        raise NotImplementedError

    def ours(self, cell: Cell, inputs: Inputs) -> Prepared:
        """A call of the library, and the leaves of its gradient."""
        function = operator.attrgetter(self.FUNCTION)(fastattn)
        args, kwargs = self.arguments(cell, inputs)
        forward = returning_tuples(functools.partial(function, *args, **kwargs))
        return forward, [inputs[name] for name in self.leaf_names(cell)]

    def theirs(self, cell: Cell, inputs: Inputs) -> Prepared:
        """The same by what a user of PyTorch writes today."""
        return self.eager(cell, inputs)

    def why_not_theirs(self, cell: Cell) -> list[str]:
        """The reasons why PyTorch has nothing for this cell."""
        return []

    def eager(self, cell: Cell, inputs: Inputs) -> Prepared:
        """The same without any fused attention."""
        return lambda: self.plain(cell, inputs), [inputs[name] for name in self.leaf_names(cell)]

    def leaf_names(self, cell: Cell) -> Sequence[str]:
        """The inputs of this cell that have a gradient, in order."""
        return tuple(self.SHAPES)

    def leaves(self, inputs: Inputs) -> list[Tensor]:
        """The inputs of SHAPES."""
        return [inputs[name] for name in self.SHAPES]

    def in_double(self, inputs: Inputs) -> Inputs:
        """The inputs of `expected`."""
        return {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}

    def expected(self, cell: Cell, inputs: Inputs) -> Inputs:
        """All outputs of the cell by name, in the dtype of `inputs`, by the plain equation."""
        leaves = self.fresh_leaves(cell, inputs)
        with torch.set_grad_enabled(cell.passes != "fwd"):
            out, *weights = self.plain(cell, inputs | leaves)
        results = {"out": out.detach()}
        if weights:
            results["weights"] = weights[0].detach()
        if cell.passes != "fwd":
            out.backward(inputs["grad_out"])
        return results | gradients(leaves)

    def fresh_leaves(self, cell: Cell, inputs: Inputs) -> Inputs:
        """Copies of the leaves, which require a gradient if the cell has a backward pass."""
        wanted = cell.passes != "fwd"
        names = self.leaf_names(cell)
        return {name: inputs[name].clone().requires_grad_(wanted) for name in names}

    # The check of a long cell may compare a sample of its parts.

    def parts(self, cell: Cell, seed: int, *, few: bool = False) -> list[tuple[int, ...]]:
        """The parts to compare; with `few`, those to measure the noise on. `[()]` is everything."""
        return [()]

    def part(self, cell: Cell, name: str, x: Tensor, where: tuple[int, ...]) -> Tensor:
        """One part of an input or an output."""
        return x

    def unjudged(self, cell: Cell) -> Collection[str]:
        """Outputs that are not compared, because PyTorch computes them outside the bound."""
        return ()

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype of an output of a cell with this dtype."""
        return dtype

    def coverage(self, cell: Cell, parts: list[tuple[int, ...]]) -> str:
        """What was compared, for the result file."""
        return "all"


def gradients(leaves: Inputs) -> Inputs:
    """The gradients that a backward pass left in the leaves, by the names of the outputs."""
    return {f"grad_{name}": x.grad for name, x in leaves.items() if x.grad is not None}


def returning_tuples(call: Callable[[], Any]) -> Forward:
    def forward() -> Outputs:
        result = call()
        return result if isinstance(result, tuple) else (result,)

    return forward
