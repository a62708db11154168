"""The base class of whole models: random weights, the choice of attention, exact results."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastattn.bench.cells import Cell
from fastattn.bench.gauges import Stopwatch
from fastattn.bench.inputs import Draw
from fastattn.bench.models._watching import watching
from fastattn.bench.ops._base import Inputs, Operator, Outputs, Prepared, value_of
from fastattn.bench.ops._module import NothingDrawn

Call = Callable[[], Tensor]
_EXACT = "fastattn-bench-exact"  # registered with transformers for the reference
_FUNCTION = "scaled_dot_product_attention"
_POOL = 2**24  # random numbers; drawing a billion would take longer than running the model
_declared: list[torch.library.Library] = []  # declarations end with their last reference


class Model(Operator):
    """A model of transformers. `torch` runs it with attention "sdpa", fastattn with "fastattn".
    `LibraryModel` is one of another library.

    The inputs are the arguments of the model, and its parameters by their names. The output is
    `last_hidden_state` unless `bind` selects another. All parameters have gradients.
    """

    TORCH = 'attn_implementation="sdpa", the same parameters'
    PACKAGE = "transformers"
    INSTALL = "pip install fastattn[transformers]"
    PASSES: Sequence[str] = ("fwd", "fwd+bwd")
    TINY: Mapping[str, int] = {"B": 1, "L": 16, "N": 1, "V": 64}
    CAUSAL = False
    # Formulas of the sizes: the weights of a layer that multiply each token; outside of the layers,
    # the weights and the products with them; the tokens; and the pairs of one layer and head, of
    # which `pairs` counts the mask only.
    LAYER = "4 * E**2 + 2 * E * F"
    OTHER = ("0", "0")
    TOKENS = "B * L"
    PAIRS = "pairs"
    ITEMS = ("B * L", "tokens")  # what a call processes
    stopwatch: Stopwatch

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.stopwatch = Stopwatch()

    # Defined by each model

    def make(self, cell: Cell) -> nn.Module:
        """The model; its parameters are replaced."""
        raise NotImplementedError

    def given(self, cell: Cell, draw: Draw) -> Inputs:
        """The arguments of the model: random tokens, and which of them are not padding."""
        inputs = {"input_ids": draw.integers(0, cell["V"], cell["B"], cell["L"])}
        if cell.mask == "padding":
            inputs["attention_mask"] = draw.valid(cell["B"], cell["L"]).long()
        return inputs

    def bind(self, cell: Cell, model: Any, given: Inputs) -> Call:
        """The call that is timed."""
        return lambda: model(**given).last_hidden_state

    # The choice of attention, "sdpa", "fastattn" or "eager"; another library defines its own

    def choose(self, model: Any, attention: str) -> None:
        """Prepares the model for its calls."""
        with self.serving(attention):
            model.set_attn_implementation(attention)

    def serving(self, attention: str) -> contextlib.AbstractContextManager[Any]:
        """The context of each call."""
        from fastattn.integrations.transformers import register

        return register() if attention == "fastattn" else contextlib.nullcontext()

    def watching(self, attention: str) -> contextlib.AbstractContextManager[None]:
        """The context in which the stopwatch measures attention."""
        if attention == "eager":  # each model has its own, which is in no registry
            return contextlib.nullcontext()
        interface = imported("transformers").AttentionInterface
        register = functools.partial(interface.register, attention)
        return watching(interface()[attention], register, self.stopwatch, before=1)

    def exactly(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """The context in which attention is spelled out, in the dtype of the queries."""
        _use_plain_attention(model)
        return contextlib.nullcontext()

    def widen(self, model: nn.Module) -> None:
        """Converts the model to float64 for one forward pass."""
        _double_in_turn(model)

    # Derived

    def require(self) -> None:
        try:
            imported(self.PACKAGE)
        except ImportError as error:
            raise ImportError(f"{self.FUNCTION} needs {self.INSTALL} ({error})") from error

    def items(self, cell: Cell) -> tuple[float, str]:
        return value_of(self.ITEMS[0], cell), self.ITEMS[1]

    def tokens(self, cell: Cell) -> int:
        return int(value_of(self.TOKENS, cell))

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        pairs = value_of("B * L * (L + 1) // 2" if self.CAUSAL else self.PAIRS, cell, pairs=pairs)
        attention = cell["N"] * pairs * cell["E"]
        weights = cell["N"] * value_of(self.LAYER, cell)
        products = 2 * (self.tokens(cell) * weights + value_of(self.OTHER[1], cell))
        return products + 4 * attention, 2 * products + 10 * attention

    def elements(self, cell: Cell) -> tuple[int, int]:
        weights = cell["N"] * value_of(self.LAYER, cell) + value_of(self.OTHER[0], cell)
        tokens = self.tokens(cell) * cell["E"]
        return weights + tokens, tokens

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        """Matrices preserve the scale of their inputs, so attention has scores of about 1."""
        inputs = self.given(cell, draw)
        window = _windows(draw)
        for name, parameter in _on_meta(self, cell).named_parameters():
            shape, count = parameter.shape, parameter.numel()
            if len(shape) > 1:
                inputs[name] = window(count, (count // shape[0]) ** -0.5).view(shape)
            else:
                inputs[name] = window(count, 0.1) + (1 if name.endswith("weight") else 0)
        length = self.tokens(cell) // cell["B"]
        return inputs | {"grad_out": draw.normal(cell["B"], length, cell["E"])}

    def leaf_names(self, cell: Cell) -> Sequence[str]:
        if cell.passes == "fwd":
            return ()
        return [name for name, _ in _on_meta(self, cell).named_parameters()]

    def ours(self, cell: Cell, inputs: Inputs) -> Prepared:
        return self._prepared(cell, inputs, "fastattn")

    def theirs(self, cell: Cell, inputs: Inputs) -> Prepared:
        return self._prepared(cell, inputs, "sdpa")

    def eager(self, cell: Cell, inputs: Inputs) -> Prepared:
        return self._prepared(cell, inputs, "eager")

    def _prepared(self, cell: Cell, inputs: Inputs, attention: str) -> Prepared:
        """Eval mode for the forward only, else training without dropout."""
        model = self._model(cell, inputs)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # each has its own memory, as in a loaded model
        call = self.bind(cell, model, self._given(cell, inputs))
        self.choose(model, attention)

        def forward() -> Outputs:
            with self.serving(attention), self.watching(attention):
                return (call(),)

        own = dict(model.named_parameters())
        return forward, [own[name] for name in self.leaf_names(cell)]

    def _model(self, cell: Cell, inputs: Inputs) -> Any:
        """The model with the parameters that are in `inputs`, of their dtype."""
        dtype = inputs[next(iter(_on_meta(self, cell).named_parameters()))[0]].dtype
        with _default_dtype(dtype), NothingDrawn():
            model = self.make(cell)
        model.train(cell.passes != "fwd")
        for name, parameter in model.named_parameters():
            parameter.data = inputs[name]
        return model

    def _given(self, cell: Cell, inputs: Inputs) -> Inputs:
        """The arguments of the model."""
        own = {"grad_out", *(name for name, _ in _on_meta(self, cell).named_parameters())}
        return {name: x for name, x in inputs.items() if name not in own}

    # The reference

    def in_double(self, inputs: Inputs) -> Inputs:
        """Unchanged: all weights in float64 may not fit into memory, so `expected` converts."""
        return inputs

    def expected(self, cell: Cell, inputs: Inputs) -> Inputs:
        """The model in float64, with plain attention.

        Parts that the model always computes in float32, such as rotary angles, stay in float32.
        """
        model = self._model(cell, inputs)
        given = {n: _double(x) for n, x in self._given(cell, inputs).items()}
        wanted = self.leaf_names(cell)
        with torch.set_grad_enabled(bool(wanted)), self.exactly(model):
            if not wanted:
                self.widen(model)
                return {"out": self.bind(cell, model, given)()}
            own = dict(model.named_parameters())
            widen(list(own.values()))
            out = self.bind(cell, model, given)()
            leaves = [own[name] for name in wanted]
            gradients = torch.autograd.grad(out, leaves, inputs["grad_out"].double())
        names = (f"grad_{name}" for name in wanted)
        return {"out": out.detach(), **dict(zip(names, gradients, strict=True))}

    def parts(self, cell: Cell, seed: int, *, few: bool = False) -> list[tuple[int, ...]]:
        """The noise of a forward pass is measured on one sequence, or on the start of one.

        The start is enough in a causal model, whose tokens do not depend on later ones.
        """
        if not few or cell.passes != "fwd":
            return [()]
        last = cell["B"] - 1
        return [(last, min(cell["L"], 64)) if self.CAUSAL else (last,)]

    def unjudged(self, cell: Cell) -> Collection[str]:
        """In 16 bits, gradients of layer norms and embeddings, which PyTorch sums in 16 bits."""
        if cell.dtype == "fp32":
            return ()
        return {f"grad_{name}" for name in _summed_in_16_bits(_on_meta(self, cell))}

    def coverage(self, cell: Cell, parts: list[tuple[int, ...]]) -> str:
        skipped = cell.passes != "fwd" and self.unjudged(cell)
        return "all but the gradients of layer norms and embeddings" if skipped else "all"

    def part(self, cell: Cell, name: str, x: Tensor, where: tuple[int, ...]) -> Tensor:
        if not where or (name != "out" and name not in self._given(cell, {name: x})):
            return x
        x = x[where[0] : where[0] + 1]
        return x[:, : where[1]] if len(where) > 1 else x


class LibraryModel(Model):
    """`torch` runs the model as it is, fastattn within `activate`."""

    TORCH = "the model as it is, the same parameters"
    CALLER = "torch.nn.functional"  # the module in which layers find the function

    def choose(self, model: Any, attention: str) -> None:
        pass

    def serving(self, attention: str) -> contextlib.AbstractContextManager[Any]:
        from fastattn.integrations.torch import activate

        if attention == "eager":
            return sdpa_kernel(SDPBackend.MATH)
        return activate() if attention == "fastattn" else contextlib.nullcontext()

    def watching(self, attention: str) -> contextlib.AbstractContextManager[None]:
        caller = importlib.import_module(self.CALLER)
        function = getattr(caller, _FUNCTION)
        return watching(function, functools.partial(setattr, caller, _FUNCTION), self.stopwatch)

    def exactly(self, model: Any) -> contextlib.AbstractContextManager[None]:
        return sdpa_kernel(SDPBackend.MATH)

    def widen(self, model: nn.Module) -> None:
        """Converts all parameters together: parts of a layer may be called on their own."""
        widen(list(model.parameters()))


def _summed_in_16_bits(model: nn.Module) -> list[str]:
    """The parameters whose gradients PyTorch sums over the tokens in their own dtype."""
    return [
        f"{name}.{own}"
        for name, module in model.named_modules()
        if isinstance(module, (nn.LayerNorm, nn.Embedding))
        for own, _ in module.named_parameters()
    ]


def _windows(draw: Draw) -> Callable[[int, float], Tensor]:
    """Returns a function (count, scale) -> random numbers, which are slices of one pool.

    Slicing is faster than drawing, and needs no extra memory.
    """
    pool = draw.normal(_POOL)
    scaled = functools.cache(pool.__mul__)
    start = 0

    def window(count: int, scale: float) -> Tensor:
        nonlocal start
        if count > _POOL:
            return scaled(scale).repeat(-(-count // _POOL))[:count]
        start = 0 if start + count > _POOL else start
        found = scaled(scale)[start : start + count]
        start += count
        return found

    return window


@functools.lru_cache(maxsize=8)
def _on_meta(model: Model, cell: Cell) -> nn.Module:
    """The model on the meta device: its modules and the shapes of its parameters."""
    with torch.device("meta"):
        return model.make(cell)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def _double_in_turn(model: nn.Module) -> None:
    """Converts the model to float64, but each layer only while it runs."""
    layers = {x for stack in model.modules() if isinstance(stack, nn.ModuleList) for x in stack}
    in_layers = {parameter for layer in layers for parameter in layer.parameters()}
    for parameter in model.parameters():
        if parameter not in in_layers:
            parameter.data = parameter.data.double()
    for layer in layers:
        own = list(layer.parameters())
        layer.register_forward_pre_hook(functools.partial(widen, own))
        layer.register_forward_hook(functools.partial(_restore, own, [x.data for x in own]))


def widen(parameters: list[nn.Parameter], *called: Any) -> None:
    for parameter in parameters:
        parameter.data = parameter.data.double()


def _restore(parameters: list[nn.Parameter], kept: list[Tensor], *called: Any) -> None:
    for parameter, data in zip(parameters, kept, strict=True):
        parameter.data = data


def _use_plain_attention(model: Any) -> None:
    """Makes the model use plain attention in the dtype of the queries, and the masks of "eager"."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(_EXACT, _exact)
    AttentionMaskInterface.register(_EXACT, eager_mask)
    model.set_attn_implementation(_EXACT)


def _exact(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query @ key.mT * scale
    weights = (scores if attention_mask is None else scores + attention_mask).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


def imported(name: str) -> ModuleType:
    """Import a library of models."""
    _declare_operators()
    return importlib.import_module(name)


def _declare_operators() -> None:
    """Make torchvision importable, which timm, transformers and others import for their images.

    The import fails if torchvision was built for another PyTorch: operators that it extends do not
    exist then. Models call none of them, so they are only declared.
    """
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return  # those that need it say so
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)
