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
from fastattn.bench.ops._base import Inputs, Operator, Prepared, value_of
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
        self.FLOPS = (
            f"N * attention(pairs, E, E) + products({self.TOKENS} * N * ({self.LAYER}) + "
            f"{self.OTHER[1]})"
        )
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
        model.set_attn_implementation(attention)

    @contextlib.contextmanager
    def serving(self, attention: str) -> Iterator[None]:
        """The context of each call, in which the stopwatch measures attention."""
        from fastattn.integrations.transformers import register

        interface = imported("transformers").AttentionInterface
        with contextlib.ExitStack() as stack:
            if attention == "fastattn":
                stack.enter_context(register())
            if attention != "eager":  # each model has its own, which is in no registry
                replace = functools.partial(interface.register, attention)
                watch = watching(interface()[attention], replace, self.stopwatch, before=1)
                stack.enter_context(watch)
            yield

    def exactly(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """The context in which attention is PyTorch's plain equation, in the dtype of the queries.

        The function of "sdpa" gets another name, with masks of all pairs.
        """
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import eager_mask

        AttentionInterface.register(_EXACT, sdpa_attention_forward)
        AttentionMaskInterface.register(_EXACT, eager_mask)
        model.set_attn_implementation(_EXACT)
        return sdpa_kernel(SDPBackend.MATH)

    def widen(self, model: nn.Module) -> None:
        """Converts the model to float64 for one forward pass, each layer only while it runs."""
        layers = {x for stack in model.modules() if isinstance(stack, nn.ModuleList) for x in stack}
        in_layers = {parameter for layer in layers for parameter in layer.parameters()}
        widen([parameter for parameter in model.parameters() if parameter not in in_layers])
        for layer in layers:
            own = list(layer.parameters())
            layer.register_forward_pre_hook(functools.partial(widen, own))
            layer.register_forward_hook(functools.partial(_restore, own, [x.data for x in own]))

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

    def pairs(self, cell: Cell, pairs: int) -> int:
        of_layer = "B * L * (L + 1) // 2" if self.CAUSAL else self.PAIRS
        return int(value_of(of_layer, cell, pairs=pairs))

    def elements(self, cell: Cell) -> tuple[int, int]:
        weights = value_of(f"N * ({self.LAYER}) + {self.OTHER[0]}", cell)
        tokens = self.tokens(cell) * cell["E"]
        return weights + tokens, tokens

    def inputs(self, cell: Cell, draw: Draw) -> Inputs:
        """Matrices preserve the scale of their inputs, so attention has scores of about 1.

        All are slices of one pool, which is faster than drawing, and needs no extra memory.
        """
        inputs, scaled, begin = (
            self.given(cell, draw),
            functools.cache(draw.normal(_POOL).__mul__),
            0,
        )
        for name, parameter in _parameters_of(self, cell).items():
            shape, count = parameter.shape, parameter.numel()
            pool = scaled((count // shape[0]) ** -0.5 if len(shape) > 1 else 0.1)
            if count > _POOL:
                inputs[name] = pool.repeat(-(-count // _POOL))[:count].view(shape)
                continue
            begin = 0 if begin + count > _POOL else begin
            inputs[name] = pool[begin : begin + count].view(shape)
            begin += count
            if len(shape) == 1 and name.endswith("weight"):
                inputs[name] = inputs[name] + 1
        length = self.tokens(cell) // cell["B"]
        return inputs | {"grad_out": draw.normal(cell["B"], length, cell["E"])}

    def leaf_names(self, cell: Cell) -> Sequence[str]:
        return () if cell.passes == "fwd" else [*_parameters_of(self, cell)]

    def ours(self, cell: Cell, inputs: Inputs) -> Prepared:
        return self._with(cell, inputs, "fastattn")

    def theirs(self, cell: Cell, inputs: Inputs) -> Prepared:
        return self._with(cell, inputs, "sdpa")

    def eager(self, cell: Cell, inputs: Inputs) -> Prepared:
        return self._with(cell, inputs, "eager")

    def _with(self, cell: Cell, inputs: Inputs, attention: str) -> Prepared:
        """Eval mode for the forward only, else training without dropout."""
        model = self._model(cell, inputs)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # each has its own memory, as in a loaded model
        call = self.bind(cell, model, self._given(cell, inputs))
        with self.serving(attention):
            self.choose(model, attention)

        def forward() -> Tensor:
            with self.serving(attention):
                return call()

        return self.prepared(cell, dict(model.named_parameters()), forward)

    def _model(self, cell: Cell, inputs: Inputs) -> Any:
        """The model with the parameters that are in `inputs`, of their dtype."""
        with contextlib.ExitStack() as stack:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(inputs["grad_out"].dtype)
            stack.enter_context(NothingDrawn())
            model = self.make(cell)
        model.train(cell.passes != "fwd")
        for name, parameter in model.named_parameters():
            parameter.data = inputs[name]
        return model

    def _given(self, cell: Cell, inputs: Inputs) -> Inputs:
        """The arguments of the model."""
        own = {"grad_out", *_parameters_of(self, cell)}
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
        given = super().in_double(self._given(cell, inputs))
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
        summed = (nn.LayerNorm, nn.Embedding)
        modules = _on_meta(self, cell).named_modules()
        return {
            f"grad_{name}.{own}"
            for name, module in modules
            if isinstance(module, summed)
            for own, _ in module.named_parameters()
        }

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

    @contextlib.contextmanager
    def serving(self, attention: str) -> Iterator[None]:
        from fastattn.integrations.torch import activate

        caller = importlib.import_module(self.CALLER)
        with contextlib.ExitStack() as stack:
            if attention == "eager":
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            elif attention == "fastattn":
                stack.enter_context(activate())
            replace = functools.partial(setattr, caller, _FUNCTION)
            with watching(getattr(caller, _FUNCTION), replace, self.stopwatch):
                yield

    def exactly(self, model: Any) -> contextlib.AbstractContextManager[None]:
        return sdpa_kernel(SDPBackend.MATH)

    def widen(self, model: nn.Module) -> None:
        """Converts all parameters together: parts of a layer may be called on their own."""
        widen(list(model.parameters()))


@functools.lru_cache(maxsize=8)
def _on_meta(model: Model, cell: Cell) -> nn.Module:
    """The model on the meta device: its modules and the shapes of its parameters."""
    with torch.device("meta"):
        return model.make(cell)


def _parameters_of(model: Model, cell: Cell) -> dict[str, nn.Parameter]:
    return dict(_on_meta(model, cell).named_parameters())


def widen(parameters: list[nn.Parameter], *called: Any) -> None:
    for parameter in parameters:
        parameter.data = parameter.data.double()


def _restore(parameters: list[nn.Parameter], kept: list[Tensor], *called: Any) -> None:
    for parameter, data in zip(parameters, kept, strict=True):
        parameter.data = data


def imported(name: str) -> ModuleType:
    """Import a library of models.

    timm, transformers and others import torchvision for their images. The import fails if it was
    built for another PyTorch: operators that it extends do not exist then. Models call none of
    them, so they are only declared.
    """
    try:
        importlib.import_module("torchvision")
    except ImportError:
        pass  # those that need it say so
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)
    return importlib.import_module(name)
