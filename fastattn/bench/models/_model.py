"""The base class of whole models: random weights, the choice of attention, exact results."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastattn
from fastattn.bench.ops._base import Cell, Draw, Forward, Inputs, Module, Part, Stopwatch, value_of


class Model(Module):
    """A model of transformers. `torch` runs it with attention "sdpa", fastattn by `accelerate`.

    The inputs are the arguments of the model, and its parameters by their names. The output is
    `last_hidden_state` unless `bind` selects another. All parameters have gradients.
    """

    TORCH = 'attn_implementation="sdpa", the same parameters'
    PACKAGE = "transformers"
    INSTALL = "pip install fastattn[transformers]"
    PASSES: Sequence[str] = ("fwd", "fwd+bwd")
    # The name of the class if it differs from FUNCTION, and the fields of its configuration: a
    # size, a number (the minimum of a field that limits the length), or another argument.
    CLASS, CONFIG = "", ""
    BUILD: Mapping[str, Any] = {}
    CAUSAL = False
    exactly: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    # Formulas of the sizes: the weights of a layer that multiply each token; outside of the layers,
    # the weights and the products with them; the tokens of a sequence; and the pairs of one layer
    # and head (`pairs` only counts the pairs of the mask).
    LAYER = "4 * E**2 + 2 * E * F"
    OTHER = ("0", "0")
    LENGTH = "L"
    PAIRS = "pairs"
    ITEMS = ("B * L", "tokens")  # the items that a call processes
    SHAPES: Mapping[str, str] = {}
    stopwatch: Stopwatch

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        # Padding is not counted: its rows have no visible pairs.
        tokens = "pairs // L" if "padding" in self.MASKS else f"B * {self.LENGTH}"
        products = f"{tokens} * N * ({self.LAYER}) + {self.OTHER[1]}"
        pairs = "B * L * (L + 1) // 2" if self.CAUSAL else self.PAIRS
        self.FLOPS = f"N * attention({pairs}, E, E) + products({products})"
        self.OUTPUT, self.stopwatch = f"B {self.LENGTH} E", Stopwatch()

    # Defined by each model

    def build(self, cell: Cell) -> nn.Module:
        """The model without dropout; its parameters are replaced."""
        name = self.CLASS or self.FUNCTION.partition(".")[2]
        kind = operator.attrgetter(name)(importlib.import_module(self.PACKAGE))
        values = {name: 0.0 for name in vars(kind.config_class()) if "drop" in name}
        for name, size in (field.split("=") for field in self.CONFIG.split()):
            values[name] = cell[size] if size.isalpha() else max(int(size), cell["L"])
        model: nn.Module = kind(kind.config_class(**values), **self.BUILD)
        return model

    def others(self, cell: Cell, draw: Draw) -> dict[str, Tensor]:
        """The arguments of the model: random tokens, and which of them are not padding."""
        inputs = {"input_ids": draw.integers(0, cell["V"], cell["B"], cell["L"])}
        if cell.mask == "padding":
            inputs["attention_mask"] = draw.valid(cell["B"], cell["L"]).long()
        return inputs

    def bind(self, cell: Cell, model: Any, given: Inputs) -> Forward:
        """The call that is timed. The rows of padding, which nothing reads, are 0."""
        if "attention_mask" not in given:
            return lambda: model(**given).last_hidden_state
        kept = given.attention_mask[..., None]
        return lambda: model(**given).last_hidden_state * kept

    def serving(self, attention: str) -> contextlib.AbstractContextManager[Any]:
        """The context of each call, in which the stopwatch measures attention."""
        if attention == "eager":  # each model has its own function, outside of the registry
            return contextlib.nullcontext()
        functions = importlib.import_module(self.PACKAGE).AttentionInterface._global_mapping
        watched = _watched(functions[attention], self.stopwatch, before=1)
        return mock.patch.dict(functions, {attention: watched})

    # Derived

    def require(self) -> None:
        try:
            importlib.import_module(self.PACKAGE)
        except (ImportError, RuntimeError) as error:  # RuntimeError: built for another PyTorch
            raise ImportError(f"{self.FUNCTION} needs {self.INSTALL} ({error})") from error

    def elements(self, cell: Cell, **read: int) -> tuple[int, int]:
        weights = value_of(f"N * ({self.LAYER}) + {self.OTHER[0]}", cell)
        tokens = value_of(f"B * {self.LENGTH} * E", cell)
        return weights + tokens, tokens

    def parameter(self, name: str, shape: tuple[int, ...], draw: Draw) -> Tensor:
        """Matrices preserve the scale of their inputs, so attention has scores of about 1."""
        if len(shape) > 1:
            return draw.pooled(*shape, scale=math.prod(shape[1:]) ** -0.5)
        return draw.pooled(*shape, scale=0.1) + name.endswith("weight")

    def make(self, cell: Cell, **made: Any) -> nn.Module:
        with contextlib.ExitStack() as stack:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(made.get("dtype", torch.float32))
            stack.enter_context(torch.device(made["device"]))
            return self.build(cell)

    def ours(self, cell: Cell, x: Inputs, library: Any = None) -> Forward:
        return self._with(cell, x, "fastattn")

    def theirs(self, cell: Cell, x: Inputs) -> Forward:
        return self._with(cell, x, "sdpa")

    def eager(self, cell: Cell, x: Inputs) -> Forward:
        return self._with(cell, x, "eager")

    def _with(self, cell: Cell, x: Inputs, attention: str) -> Forward:
        model, call = self._bound(cell, x)
        if attention == "fastattn":
            fastattn.accelerate(model)
        elif attention == "eager" and hasattr(model, "set_attn_implementation"):
            model.set_attn_implementation(attention)

        def forward() -> Tensor:
            with self.serving(attention):
                return call()

        return forward

    def _bound(self, cell: Cell, x: Inputs) -> tuple[Any, Forward]:
        model, given = self.with_arguments(cell, x)
        return model, self.bind(cell, model, given)

    def with_arguments(self, cell: Cell, x: Inputs) -> tuple[Any, Inputs]:
        """The model with its parameters, and its arguments."""
        own = self.parameters(cell)
        given = {name: t for name, t in x.items() if name not in own and name != "grad_out"}
        return self.loaded(self.make, cell, x), Inputs(given)

    # The reference

    def exact(self, cell: Cell, x: Inputs) -> Forward:
        """The model in float64, with attention by its definition.

        Parts that the model always computes in float32, such as rotary angles, stay in float32,
        unless `exactly` converts them. "eager" would compute its softmax in float32, too.
        """
        _, call = self._bound(cell, x)

        def forward() -> Tensor:
            with sdpa_kernel(SDPBackend.MATH), self.exactly():
                return call()

        return forward

    def parts(self, cell: Cell, seed: int, *, few: bool = False) -> list[Part]:
        """The parts; the noise of a forward pass needs one sequence, or a causal model's start."""
        if not few or cell.passes != "fwd":
            return [{}]
        last = {"B": range(cell["B"] - 1, cell["B"])}
        return [last | {"L": range(min(cell["L"], 64))} if self.CAUSAL else last]

    def dims(self, cell: Cell, name: str, x: Tensor) -> list[str]:
        is_whole = name.removeprefix("grad_") in self.parameters(cell)
        return [] if is_whole else ["B", "L", *["_"] * x.dim()][: x.dim()]

    def unjudged(self, cell: Cell) -> Collection[str]:
        """The gradients of layer norms and embeddings, which PyTorch sums in 16 bits."""
        if cell.dtype == "fp32":
            return ()
        summed = (nn.LayerNorm, nn.Embedding)
        return {
            f"grad_{name}.{own}"
            for name, module in self.make(cell, device="meta").named_modules()
            if isinstance(module, summed)
            for own, _ in module.named_parameters()
        }

    def coverage(self, cell: Cell, parts: Sequence[Part]) -> str:
        skipped = cell.passes != "fwd" and self.unjudged(cell)
        return "all but the gradients of layer norms and embeddings" if skipped else "all"


class LibraryModel(Model):
    """`torch` runs the unchanged model, fastattn the model after `accelerate`."""

    TORCH = "the unchanged model, the same parameters"
    CALLER = "torch.nn.functional"  # the module in which layers find the function

    @contextlib.contextmanager
    def serving(self, attention: str) -> Iterator[None]:
        caller = importlib.import_module(self.CALLER)
        function = _watched(caller.scaled_dot_product_attention, self.stopwatch)
        with contextlib.ExitStack() as stack:
            if attention == "eager":
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(mock.patch.object(caller, function.__name__, function))
            yield


def _watched(function: Any, watch: Stopwatch, before: int = 0) -> Any:
    """A function, with `before` arguments before query, key and value, whose calls are timed."""

    @functools.wraps(function)
    def watched(*args: Any, **options: Any) -> Any:
        watch.start()
        result = function(*args, **options)
        watch.stop()
        tensors = args[before : before + 3]
        if torch.is_grad_enabled() and tensors[0].requires_grad:
            out = result[0] if isinstance(result, tuple) else result
            out.register_hook(lambda _: watch.start())
            register_multi_grad_hook(tensors, lambda _: watch.stop())
        return result

    return watched
