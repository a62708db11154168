"""The record of an operator of the benchmark: its sizes, inputs, cost and calls."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import operator
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import fastattn
from fastattn import _flops, compat
from fastattn.backends import reference
from fastattn.library import operators

if TYPE_CHECKING:
    from fastattn.bench.cells import Cell as Cell
    from fastattn.bench.cells import Draw as Draw
else:  # only for annotations, because that module imports the operators
    Cell = Draw = Any

Forward = Callable[[], Any]  # returns the output, or a tuple that begins with it
Part = Mapping[str, range]  # of a cell: the places along some of its sizes

AT_ONCE = 1 << 23  # elements of the largest intermediate tensor of the float64 reference: 64 MB
PAIRS_CHECKED = 1 << 26
PAIRS_OF_FEW = 1 << 22
_MULTIPLES = (("H", "Hkv"), ("E", "H"), ("Lk", "P"), ("I", "P"))
# The names that a formula may use besides the sizes of a cell.
_WORDS = ("dtype", "mask", "weights", "option", "passes", "device")
_RULES: dict[str, Callable[..., int]] = {
    "attention": _flops.attention_flops,
    "additive": _flops.additive_flops,
    "products": _flops.product_flops,
}


class Stopwatch:
    """The total seconds between `start` and `stop`: measures a part of a call."""

    seconds = began = 0.0
    is_running = False

    def start(self) -> None:
        self.is_running = True
        self.began = time.perf_counter()

    def stop(self) -> None:
        self.seconds += time.perf_counter() - self.began
        self.is_running = False


class Inputs(dict[str, Tensor]):
    """Tensors by name, also as attributes."""

    def __getattr__(self, name: str) -> Tensor:
        if name in self:
            return self[name]
        raise AttributeError(name)


class Operator:
    """An operator: its sizes, inputs and cost, its call, and the equivalent code in PyTorch.

    A simple operator is an instance, whose keyword arguments replace the attributes and methods
    below; an operator with further methods is a class, of which `ops` makes the instance:

        OP = Operator(FUNCTION="learned_scale", SIZES={"B": 1, "E": 512}, ...,
                      arguments=lambda cell, x: ([x.query], {}))

    The defaults suit a function of `fastattn` without masks and weights; modules are instances of
    `Module`. The exact result is the library's call with the definitions of
    `fastattn.backends.reference` in place of kernels, in float64. A baseline is an `equation`: the
    definitions also handle NaN, inf and fully masked rows, and take several times as long.
    """

    FUNCTION: str  # its name in `fastattn`; "nn.Name" for a module
    ABOUT: str  # the equation, for `bench list`
    SIZES: Mapping[str, int | str]  # keys of --shapes; a default is a number or another key
    # Formulas, each with a message: for wrong cells, and for cells that PyTorch does not support.
    REFUSED: Mapping[str, str] = {}
    NOT_IN_TORCH: Mapping[str, str] = {}
    MASKS: Sequence[str] = ("none",)
    WEIGHTS: Sequence[str] = ("none",)
    OPTIONS: Sequence[str] = ("none",)
    PASSES: Sequence[str] = ("fwd", "bwd", "fwd+bwd")
    # The inputs that have a gradient, in order, and "out", if it is not like the first input: names
    # with formulas of the sizes and of DERIVED ones, such as "query: B Lq D; out: B Lq".
    SHAPES = ""
    LEARNED: Mapping[str, str] = {}  # the input that has a gradient only with an option
    DERIVED: Mapping[str, Callable[[Cell], int]] = {}
    # Further arguments of the call, besides inputs, masks and weights; or functions of the cell.
    KEYWORDS: Mapping[str, Any] = {}
    ITEMS: tuple[str, str] | None = None  # a formula of the processed items, and their unit
    # Formulas of the sizes, of `option` and of `pairs`, the visible pairs of one head over the
    # batch. The operations of a pass, by the rules of `fastattn._flops`; `backward` is 0 or 1.
    FLOPS: str
    READ: Mapping[str, str] = {}  # for a size of inputs, the number of rows that are read
    # Whether `equation` is the definition, because the reference's needs far more work (all pairs
    # of packed sequences, pages, gathered windows), or its rounding says little about other forms.
    BY_EQUATION = False
    SCALES: Mapping[str, str | float] = {}  # standard deviations of inputs, or formulas; default: 1
    # The sizes along which parts are independent; whether only a sample of the parts of a long cell
    # is checked; and options with an input that all parts share, which are not sampled. `OTHERS`
    # are the sizes of tensors that SHAPES does not list.
    PARTED: Sequence[str] = ("B",)
    SAMPLED = False
    JOINT: Sequence[str] = ()
    OTHERS: Mapping[str, str] = {}
    stopwatch: Stopwatch | None = None  # measures the attention in a call that does other work too
    # Selects the compared outputs of a call's result, given the dtype of the cell.
    results: Any = None
    # (cell, x) -> the result as a user of PyTorch computes it who has no such function.
    equation: Any = None

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    # Sizes and cost

    @functools.cached_property
    def shapes(self) -> dict[str, str]:
        """The entries of SHAPES, and "out"."""
        shapes = dict(entry.split(": ") for entry in self.SHAPES.split("; ") if entry)
        return {**shapes, "out": shapes.get("out", next(iter(shapes.values()), ""))}

    @property
    def leaf_shapes(self) -> dict[str, str]:
        return {name: sizes for name, sizes in self.shapes.items() if name != "out"}

    def missing(self) -> str:
        """What to install before this operator can be measured; "" if it has all that it needs."""
        return ""

    def items(self, cell: Cell) -> tuple[float, str] | None:
        """The number of items that a call processes, such as tokens, and their unit; or None."""
        return self.ITEMS and (value_of(self.ITEMS[0], cell), self.ITEMS[1])

    def check(self, cell: Cell) -> None:
        """Raises ValueError, which names the keys, for sizes and options that do not match."""
        for whole, part in _MULTIPLES:
            if cell.sizes.get(part) and cell.sizes.get(whole, 0) % cell[part]:
                raise ValueError(f"{whole}={cell[whole]} is not a multiple of {part}={cell[part]}")
        for message in messages(self.REFUSED, cell):
            raise ValueError(message)

    def sequences(self, cell: Cell) -> Sequence[tuple[Tensor, int]]:
        """The positions of the queries and the number of keys, for each sequence."""
        queries, keys = cell.lengths
        padded = cell.mask == "padding"
        counts = cell.padded(keys) if padded else [keys] * cell.sizes.get("B", 1)
        return [(torch.arange(queries), count) for count in counts]

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        """The operations of the forward and of the backward pass."""
        counts = []
        for backward in (0, 1):
            rules = {n: functools.partial(f, backward=bool(backward)) for n, f in _RULES.items()}
            counts.append(int(value_of(self.FLOPS, cell, pairs=pairs, backward=backward, **rules)))
        return counts[0], counts[1]

    def shape(self, cell: Cell, sizes: str, **read: int) -> list[int]:
        """The shape that an entry of SHAPES describes; `read` replaces sizes."""
        derived = {name: size(cell) for name, size in self.DERIVED.items()}
        return [value_of(size, cell, **derived | read) for size in sizes.split()]

    def elements(self, cell: Cell, **read: int) -> tuple[int, int]:
        """The number of elements of all inputs, and of the output."""
        inputs = (math.prod(self.shape(cell, sizes, **read)) for sizes in self.leaf_shapes.values())
        return sum(inputs), math.prod(self.shape(cell, self.shapes["out"]))

    # Inputs and calls

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        """All inputs by name: the leaves, `grad_out`, masks and others."""
        drawn = {}
        for name, sizes in self.leaf_shapes.items():
            scale = float(value_of(str(self.SCALES.get(name, 1.0)), cell))
            drawn[name] = draw.normal(*self.shape(cell, sizes), scale=scale)
        grad_out = self.shape(cell, self.shapes["out"]) if len(self.PASSES) > 1 else (0,)
        return Inputs(self.others(cell, draw) | drawn | {"grad_out": draw.normal(*grad_out)})

    def others(self, cell: Cell, draw: Draw) -> dict[str, Tensor]:
        """Inputs without a gradient, such as tokens and masks."""
        return {}

    def arguments(self, cell: Cell, x: Inputs) -> tuple[Sequence[Any], dict[str, Any]]:
        """The arguments of the library's function, from the cell and the inputs."""
        parameters = inspect.signature(getattr(fastattn, self.FUNCTION)).parameters
        placed = [name for name, of in parameters.items() if of.default is of.empty]
        heads = cell.sizes.get("H")
        known: dict[str, Any] = {
            "is_causal": cell.mask == "causal",
            "enable_gqa": cell.sizes.get("Hkv", heads) != heads,
            "need_weights": cell.weights != "none",
            **x,
        }
        options = {name: known[name] for name in parameters if name in known.keys() - set(placed)}
        own = {name: of(cell) if callable(of) else of for name, of in self.KEYWORDS.items()}
        return [x[name] for name in placed], options | own

    def ours(self, cell: Cell, x: Inputs, library: Any = fastattn) -> Forward:
        """The library's call; a module replaces its parameters by the inputs of the same names.

        Another `library` has the same names and arguments, without options that are None or False.
        """
        args, options = self.arguments(cell, x)
        used = {name: x for name, x in options.items() if x is not None and x is not False}
        function = operator.attrgetter(self.FUNCTION)(library)
        return self.calling(functools.partial(function, *args, **used), x)

    def calling(self, function: Forward, x: Inputs) -> Forward:
        """A call of the library's function, or of another function with the same results."""
        results, dtype = self.results, x.grad_out.dtype
        return function if results is None else lambda: results(function(), dtype)

    def eager(self, cell: Cell, x: Inputs) -> Forward:
        """The call of `torch-eager`: the equation, our reference, or PyTorch's unfused kernel."""
        if self.equation is not None:
            return lambda: self.equation(cell, x)
        if self.why_not_stock(cell):
            return within(functools.partial(fastattn.use_backend, "reference"), self.ours(cell, x))
        return within(functools.partial(sdpa_kernel, SDPBackend.MATH), self.stock(cell, x))

    def stock(self, cell: Cell, x: Inputs) -> Forward:
        """The call of the provider `torch`: the best that PyTorch has."""
        return self.eager(cell, x)

    def why_not_stock(self, cell: Cell) -> list[str]:
        """The reasons why PyTorch does not support this cell."""
        return messages(self.NOT_IN_TORCH, cell)

    def leaf_names(self, cell: Cell) -> Sequence[str]:
        """The inputs of this cell that have a gradient, in order."""
        learned = self.LEARNED.get(cell.option)
        return [*self.leaf_shapes, *([learned] if learned else [])]

    def parameters(self, cell: Cell) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the parameters of a module, by name and in its order."""
        return {}

    def leaves(self, x: Inputs) -> list[Tensor]:
        """The inputs of SHAPES."""
        return [x[name] for name in self.leaf_shapes]

    # The exact result

    def exact(self, cell: Cell, x: Inputs) -> Forward:
        """The definition of the call in float64."""
        if self.BY_EQUATION:
            return self.eager(cell, x)
        defining = functools.partial(Intercepting, defined)
        return within(compat.through_the_dispatcher, within(defining, self.ours(cell, x)))

    def expected(self, cell: Cell, x: Inputs, parts: Sequence[Part]) -> dict[str, Tensor]:
        """All outputs by name in float64, a part at a time, to bound the memory."""
        of_parts = [self._expected(cell, Inputs(self.part_of(cell, x, part))) for part in parts]
        return self._joined(cell, of_parts, functools.partial(functools.reduce, torch.add))

    def _expected(self, cell: Cell, x: Inputs) -> dict[str, Tensor]:
        own = self.parameters(cell)  # the module converts them
        for name in x.keys() - own:
            x[name] = x[name].double() if x[name].is_floating_point() else x[name]
        names = self.leaf_names(cell) if cell.passes != "fwd" else ()
        for name in {*names} - own.keys():
            x[name].requires_grad_()
        with torch.set_grad_enabled(bool(names)):
            outputs = as_tuple(self.exact(cell, x)())
            leaves = [x[name] for name in names]
            gradients = torch.autograd.grad(outputs[0], leaves, x.grad_out) if names else ()
        named = dict(zip(("out", "weights"), (y.detach() for y in outputs), strict=False))
        return named | {f"grad_{name}": x for name, x in zip(names, gradients, strict=True)}

    def parts(self, cell: Cell, seed: int, *, few: bool = False) -> list[Part]:
        """The parts to compare, or with `few` the parts for the noise; `[{}]` is everything.

        In a large cell a part is a sequence, or one key head of it; a long cell has a sample.
        """
        joint = cell.option in self.JOINT
        keys = [k for k in self.PARTED if k == "B" or not (joint or cell.weights == "average")]
        pairs = math.prod(cell.sizes.get(size, 1) for size in ("B", "H", "Lq", "Lk", "A"))
        is_sampled = self.SAMPLED and not joint
        if pairs <= (PAIRS_OF_FEW if few and is_sampled else AT_ONCE):
            return [{}]
        units = [*itertools.product(*(range(cell[key]) for key in keys))]
        most = PAIRS_OF_FEW if few else PAIRS_CHECKED
        if is_sampled and pairs > most:
            count = max(1, most * len(units) // pairs)
            units = sorted(random.Random(seed).sample(units, count))
        return [{k: range(n, n + 1) for k, n in zip(keys, unit, strict=True)} for unit in units]

    def coverage(self, cell: Cell, parts: Sequence[Part]) -> str:
        """Describe what was compared, for the result file."""
        count = math.prod(cell[key] for key in parts[0])
        what = "(sequence, head)" if "Hkv" in parts[0] else "sequences"
        return "all" if len(parts) == count else f"{len(parts)} of {count} {what}"

    def dims(self, cell: Cell, name: str, x: Tensor) -> list[str]:
        """The names of the sizes of an input or an output; a mask has the last names."""
        name = name.removeprefix("grad_")
        known = {**self.OTHERS, **self.shapes}
        known["weights"] = "B H Lq Lk" if x.dim() == 4 else "B Lq Lk"
        return known.get(name, "").split()[-x.dim() :]

    def part_of(self, cell: Cell, x: Mapping[str, Tensor], part: Part) -> dict[str, Tensor]:
        """The part of each input or output; a key head includes the queries of its group."""
        narrowed = {}
        for name, whole in x.items():
            for axis, size in enumerate(reversed(self.dims(cell, name, whole)), 1):
                key = "Hkv" if size == "H" and "Hkv" in part else size
                if key in part and whole.shape[-axis] > 1:
                    each = cell[size] // cell[key]
                    whole = whole.narrow(-axis, part[key].start * each, len(part[key]) * each)
            narrowed[name] = whole
        return narrowed

    def selected(
        self, cell: Cell, outputs: Mapping[str, Tensor], parts: Sequence[Part]
    ) -> dict[str, Tensor]:
        """The parts of outputs, in the layout of `expected`."""
        of_parts = [self.part_of(cell, outputs, part) for part in parts]
        return self._joined(cell, of_parts, operator.itemgetter(0))

    def _joined(
        self, cell: Cell, of_parts: Sequence[dict[str, Tensor]], shared: Callable[..., Tensor]
    ) -> dict[str, Tensor]:
        """Concatenate the outputs of parts; `shared` joins outputs that all parts share."""
        if len(of_parts) == 1:
            return of_parts[0]
        joined = {}
        for name, x in of_parts[0].items():
            tensors = [outputs[name] for outputs in of_parts]
            is_parted = "B" in self.dims(cell, name, x)
            joined[name] = torch.cat(tensors) if is_parted else shared(tensors)
        return joined

    def unjudged(self, cell: Cell) -> Collection[str]:
        """Outputs that are not compared, because PyTorch computes them outside the bound."""
        return ()


class Module(Operator):
    """A module of the library. Its leaves are its arguments, SHAPES, and its parameters."""

    def make(self, cell: Cell, **made: Any) -> nn.Module:
        """Create the module; `made` has the device and the dtype of its parameters."""
        raise NotImplementedError

    def call(self, cell: Cell, module: nn.Module, x: Inputs) -> Any:
        """The call that is timed."""
        return module(*self.leaves(x), **self.KEYWORDS)

    def leaf_names(self, cell: Cell) -> Sequence[str]:
        return (*self.leaf_shapes, *self.parameters(cell))

    def elements(self, cell: Cell, **read: int) -> tuple[int, int]:
        arguments, output = super().elements(cell, **read)
        return arguments + sum(map(math.prod, self.parameters(cell).values())), output

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        drawn = super().inputs(cell, draw)
        for name, shape in self.parameters(cell).items():
            drawn[name] = self.draw_parameter(name, shape, draw)
        return drawn

    @functools.lru_cache(maxsize=64)  # noqa: B019 (operators live as long as the process)
    def parameters(self, cell: Cell) -> dict[str, tuple[int, ...]]:
        named = self.make(cell, device="meta").named_parameters()
        return {name: tuple(parameter.shape) for name, parameter in named}

    def draw_parameter(self, name: str, shape: tuple[int, ...], draw: Draw) -> Tensor:
        """A matrix keeps the scale of its inputs; vectors are near 0, of a norm's weight near 1."""
        if len(shape) > 1:
            return draw.normal(*shape, scale=shape[-1] ** -0.5)
        is_norm_weight = "norm" in name and name.endswith("weight")
        return draw.normal(*shape, scale=0.1) + (1 if is_norm_weight else 0)

    def ours(self, cell: Cell, x: Inputs, library: Any = fastattn) -> Forward:
        return self.built(self.make, cell, x)

    def built(self, make: Callable[..., nn.Module], cell: Cell, x: Inputs) -> Forward:
        module = self.loaded(make, cell, x)
        return self.calling(lambda: self.call(cell, module, x), x)

    def loaded(self, make: Callable[..., nn.Module], cell: Cell, x: Inputs) -> nn.Module:
        """The module with the parameters of `x`, which then refers to the module's parameters."""
        with NothingDrawn():
            module = make(cell, dtype=x.grad_out.dtype, device=x.grad_out.device)
        own: dict[str, Any] = dict(module.named_parameters())
        # Not strict, because buffers are no inputs; a parameter missing in x raises a KeyError.
        module.load_state_dict({name: x[name] for name in own}, strict=False)
        module.train(cell.passes != "fwd")
        x.update(own)
        return module


def within(context: Callable[[], AbstractContextManager[Any]], forward: Forward) -> Forward:
    """A call in a context, which is made for each call."""

    def call() -> Any:
        with context():
            return forward()

    return call


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    """The result of a call that returns the output, or a tuple that begins with it."""
    return result if isinstance(result, tuple) else (result,)


def value_of(formula: str, cell: Cell, **names: Any) -> Any:
    """The value of a formula in an operator's declaration."""
    return eval(formula, {"__builtins__": {}}, {"min": min, "max": max, **_names(cell), **names})


def messages(formulas: Mapping[str, str], cell: Cell) -> list[str]:
    """The messages of the formulas that hold for the cell."""
    holding = (message for formula, message in formulas.items() if value_of(formula, cell))
    return [message.format(**_names(cell)) for message in holding]


def _names(cell: Cell) -> dict[str, Any]:
    return {**{name: getattr(cell, name) for name in _WORDS}, **cell.sizes}


# Contexts that intercept what runs inside them


class Intercepting(TorchFunctionMode):
    """Calls `run(func, args, kwargs)` for a function of PyTorch or a dispatched one of fastattn."""

    def __init__(self, run: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})


def defined(func: Any, args: Any, kwargs: Any) -> Any:
    """Run the definition of a primitive, which PyTorch differentiates, in place of a kernel."""
    if (primitive := operators.get(func)) is None:
        return func(*args, **kwargs)
    tensors, options = primitive.split(args)
    return getattr(reference, primitive.name)(*tensors, options=options)


class NothingDrawn(compat.DispatchMode):
    """Fills new weights with 0 instead of random numbers, which is faster.

    Uninitialized memory does not work: `trunc_normal_` redraws until all numbers are in its range.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.normal_, torch.ops.aten.uniform_):
            return args[0].zero_()
        return func(*args, **(kwargs or {}))
