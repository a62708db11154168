"""The record of an operator of the benchmark: its sizes, inputs, cost and calls."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import fastattn
from fastattn import _flops, compat
from fastattn.backends import reference
from fastattn.library import operators

if TYPE_CHECKING:
    from fastattn.bench.cells import Cell
    from fastattn.bench.gauges import Stopwatch
    from fastattn.bench.inputs import Draw

Inputs = dict[str, Tensor]
Outputs = tuple[Tensor, ...]
Forward = Callable[[], Outputs]
Prepared = tuple[Forward, Sequence[Tensor]]  # a call, and the leaves of its gradient

_AT_ONCE = 1 << 25  # elements of the largest intermediate tensor of the float64 reference: 256 MB
_MULTIPLES = (("H", "Hkv"), ("E", "H"), ("Lk", "P"), ("I", "P"))
_RULES: dict[str, Callable[..., int]] = {
    "attention": _flops.attention_flops,
    "additive": _flops.additive_flops,
    "products": _flops.product_flops,
}


class Operator:
    """An operator: its sizes, inputs and cost, its call, and what PyTorch's users write instead.

    A simple one is an instance, whose keyword arguments replace the attributes and methods below:

        OP = Operator(FUNCTION="learned_scale", SIZES={"B": 1, "E": 512}, ...,
                      arguments=lambda cell, inputs: ([inputs["x"]], {}))

    The defaults suit a function of `fastattn` without masks and weights; modules are instances of
    `_module.Module`. The exact result is the library's call with the definitions of
    `fastattn.backends.reference` in place of kernels, in float64. A baseline is an `equation`: the
    definitions also handle NaN, inf and fully masked rows, and take several times as long.
    """

    FUNCTION: str  # its name in `fastattn`; "nn.Name" for a module
    ABOUT: str  # the equation, for `bench list`
    TORCH: str = "the equation: torch has no such function"  # what the provider `torch` runs
    SIZES: Mapping[str, int | str]  # keys of --shapes; a default is a number or another key
    LIMITS: Mapping[str, int | str] = {}  # key: the number or the other key that it may not exceed
    MASKS: Sequence[str] = ("none",)
    WEIGHTS: Sequence[str] = ("none",)
    OPTIONS: Sequence[str] = ("none",)
    PASSES: Sequence[str] = ("fwd", "bwd", "fwd+bwd")
    # The inputs that have a gradient, in order, and the output, which may be like the first input;
    # "B L*E" is [B, L * E].
    SHAPES: Mapping[str, str]
    OUTPUT = ""
    KEYWORDS: Mapping[str, Any] = {}  # arguments of the call that all cells have
    # Formulas of the sizes, of `option` and of `pairs`, the visible pairs of one head over the
    # batch. The operations of a pass, by the rules of `fastattn._flops`; `backward` is 0 or 1. The
    # elements of the largest intermediate tensor of the definition.
    FLOPS: str
    HIDDEN: str = "0"
    # Whether `equation` is the definition, because the reference's needs far more work (all pairs
    # of packed sequences, pages, gathered windows), or its rounding says little about other forms.
    BY_EQUATION = False
    # Batch and lengths of the tiny cell that loads the code; widths stay, because they select it.
    TINY: Mapping[str, int] = dict.fromkeys(("B", "S", "K", "P"), 1) | dict.fromkeys(
        ("L", "Lq", "Lk", "N"), 16
    )
    SCALES: Mapping[str, str | float] = {}  # standard deviations of inputs, or formulas; default: 1
    # Measures the attention in a call that also does other work.
    stopwatch: Stopwatch | None = None

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    # Sizes and cost

    def require(self) -> None:
        """Imports the packages of this operator; an ImportError says what to install."""

    def items(self, cell: Cell) -> tuple[float, str] | None:
        """What a call processes, such as tokens, and its unit; None if that is no measure of it."""
        return None

    def check(self, cell: Cell) -> None:
        """Raises ValueError, which names the keys, for sizes and options that do not match."""
        for key, most in self.LIMITS.items():
            if cell[key] > (limit := value_of(str(most), cell)):
                at_most = most if isinstance(most, int) else f"{most}={limit}"
                raise ValueError(f"{key}={cell[key]} is more than {at_most}")
        for whole, part in _MULTIPLES:
            if cell.sizes.get(part) and cell.sizes.get(whole, 0) % cell[part]:
                raise ValueError(f"{whole}={cell[whole]} is not a multiple of {part}={cell[part]}")

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        """The operations of the forward and of the backward pass."""
        counts = []
        for backward in (0, 1):
            rules = {n: functools.partial(f, backward=bool(backward)) for n, f in _RULES.items()}
            names = {"pairs": self.pairs(cell, pairs), "backward": backward, **rules}
            counts.append(int(value_of(self.FLOPS, cell, **names)))
        return counts[0], counts[1]

    def pairs(self, cell: Cell, pairs: int) -> int:
        """The visible pairs of one head over the batch, unless the mask alone decides them."""
        return pairs

    def size(self, cell: Cell, key: str) -> int:
        """The value of a key in SHAPES and OUTPUT."""
        return cell[key]

    def shape(self, cell: Cell, sizes: str) -> list[int]:
        """The shape that an entry of SHAPES, or OUTPUT, describes."""
        sizes = sizes or next(iter(self.SHAPES.values()))
        return [
            math.prod(self.size(cell, key) for key in size.split("*")) for size in sizes.split()
        ]

    def elements(self, cell: Cell) -> tuple[int, int]:
        """The number of elements of all inputs, and of the output."""
        inputs = (math.prod(self.shape(cell, sizes)) for sizes in self.SHAPES.values())
        return sum(inputs), math.prod(self.shape(cell, self.OUTPUT))

    def unread(self, cell: Cell) -> int:
        """The number of elements of the inputs that the result does not depend on."""
        return 0

    # Inputs and calls

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        """All inputs by name: the leaves, `grad_out`, masks and others."""
        drawn = {}
        for name, sizes in self.SHAPES.items():
            scale = float(value_of(str(self.SCALES.get(name, 1.0)), cell))
            drawn[name] = draw.normal(*self.shape(cell, sizes), scale=scale)
        grad_out = self.shape(cell, self.OUTPUT) if "bwd" in self.PASSES else (0,)
        return self.others(cell, draw) | drawn | {"grad_out": draw.normal(*grad_out)}

    def others(self, cell: Cell, draw: Draw) -> Inputs:
        """Inputs without a gradient, such as tokens and masks."""
        return {}

    def arguments(self, cell: Cell, inputs: Inputs) -> tuple[Sequence[Any], dict[str, Any]]:
        """The arguments of the library's function."""
        return self.leaves(inputs), dict(self.KEYWORDS)

    def results(self, found: Any, dtype: torch.dtype) -> Any:
        """The compared outputs among the results of a call whose inputs have this dtype."""
        return found

    def ours(self, cell: Cell, inputs: Inputs) -> Prepared:
        """The library's call."""
        args, options = self.arguments(cell, inputs)
        function = operator.attrgetter(self.FUNCTION)(fastattn)
        return self.calling(functools.partial(function, *args, **options), cell, inputs)

    def calling(self, function: Callable[[], Any], cell: Cell, inputs: Inputs) -> Prepared:
        """A call of the library's function, or of another with the same results."""
        dtype = inputs["grad_out"].dtype
        return self.prepared(cell, inputs, lambda: self.results(function(), dtype))

    def equation(self, cell: Cell, inputs: Inputs) -> Any:
        """The result as a user of PyTorch computes it, without any fused attention."""
        raise NotImplementedError

    def eager(self, cell: Cell, inputs: Inputs) -> Prepared:
        """The call of the provider `torch-eager`."""
        return self.prepared(cell, inputs, lambda: self.equation(cell, inputs))

    def theirs(self, cell: Cell, inputs: Inputs) -> Prepared:
        """The call of the provider `torch`: the best that PyTorch has."""
        return self.eager(cell, inputs)

    def why_not_theirs(self, cell: Cell) -> list[str]:
        """The reasons why PyTorch has nothing for this cell."""
        return []

    def prepared(self, cell: Cell, inputs: Inputs, call: Callable[[], Any]) -> Prepared:
        """A call, whose result becomes a tuple, with the leaves among the inputs."""

        def forward() -> Outputs:
            result = call()
            return result if isinstance(result, tuple) else (result,)

        return forward, [inputs[name] for name in self.leaf_names(cell)]

    def leaf_names(self, cell: Cell) -> Sequence[str]:
        """The inputs of this cell that have a gradient, in order."""
        return tuple(self.SHAPES)

    def leaves(self, inputs: Inputs) -> list[Tensor]:
        """The inputs of SHAPES."""
        return [inputs[name] for name in self.SHAPES]

    # The exact result

    def in_double(self, inputs: Inputs) -> Inputs:
        """The inputs of `expected`."""
        return {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}

    def exact(self, cell: Cell, inputs: Inputs, block: slice) -> Prepared:
        """The definition of a block of the call, on inputs in float64."""
        if self.BY_EQUATION:
            return self.eager(cell, inputs)
        forward, leaves = self.ours(cell, inputs)

        def defined() -> Outputs:
            with compat.through_the_dispatcher(), _Definitions():
                return forward()

        return defined, leaves

    def expected(self, cell: Cell, inputs: Inputs) -> Inputs:
        """All outputs of the cell by name, a block at a time, to bound the memory."""
        names, wanted = self.leaf_names(cell), cell.passes != "fwd"
        whole = inputs | {
            name: inputs[name].clone().requires_grad_(wanted) for name in names if name in inputs
        }
        outputs: list[Outputs] = []
        gradients: list[Outputs] = []
        with torch.set_grad_enabled(wanted):
            for block in self.blocks(cell, inputs):
                taken = {name: self.within(cell, name, x, block) for name, x in whole.items()}
                forward, leaves = self.exact(cell, taken, block)
                results = forward()
                if wanted:
                    # A parameter of a module has its gradient; the others, that of the whole input.
                    pairs = zip(names, leaves, strict=True)
                    by = [whole[n] if x is taken.get(n) else x for n, x in pairs]
                    gradients.append(torch.autograd.grad(results[0], by, taken["grad_out"]))
                outputs.append(tuple(x.detach() for x in results))
        found = {
            name: torch.cat(parts, self.BLOCKED) if len(parts) > 1 else parts[0]
            for name, parts in zip(("out", "weights"), zip(*outputs, strict=True), strict=False)
        }
        sums = (functools.reduce(torch.add, parts) for parts in zip(*gradients, strict=True))
        return found | {f"grad_{name}": x for name, x in zip(names, sums, strict=False)}

    BLOCKED = 0  # the dimension of the outputs that is divided into blocks

    def blocks(self, cell: Cell, inputs: Inputs) -> Sequence[slice]:
        """Blocks of sequences whose intermediate tensors are not too large together."""
        batch = cell.sizes.get("B", 1)
        step = max(1, batch * _AT_ONCE // max(int(value_of(self.HIDDEN, cell)), 1))
        return [slice(n, n + step) for n in range(0, batch, step)]

    def within(self, cell: Cell, name: str, x: Tensor, block: slice) -> Tensor:
        """The part of an input that belongs to a block."""
        has_batch = name not in self.SHAPES or self.SHAPES[name].startswith("B ")
        if self.HIDDEN == "0" or not has_batch or (name == "attn_mask" and x.dim() < 3):
            return x
        return x[block]

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


def value_of(formula: str, cell: Cell, **names: Any) -> Any:
    """The value of a formula in an operator's declaration."""
    known = {"min": min, "max": max, "option": cell.option, **cell.sizes, **names}
    return eval(formula, {"__builtins__": {}}, known)


class _Definitions(TorchFunctionMode):
    """Runs the definition of each primitive, which PyTorch differentiates, in place of a kernel."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if (primitive := operators.get(func)) is None:
            return func(*args, **(kwargs or {}))
        tensors, options = primitive.split(args)
        return getattr(reference, primitive.name)(*tensors, options=options)
