"""Whole models as operators of the benchmark, with random weights: nothing is downloaded.

A library is imported when a model is built. `presets.txt` has the sizes of real models.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastattn
from fastattn.bench.ops import _base
from fastattn.bench.ops._base import Cell, Draw, Forward, Inputs, Intercepting, Module, Part, within


class Model(Module):
    """A model of transformers. `torch` runs it with attention "sdpa", fastattn by `accelerate`.

    The inputs are the arguments of the model, and its parameters by their names. The output is
    `last_hidden_state` unless `bind` selects another. All parameters have gradients.
    """

    PACKAGE = "transformers"  # also the extra of fastattn that installs it
    PASSES: Sequence[str] = ("fwd", "fwd+bwd")
    # Fields of the configuration: a size, a number (the minimum of a field that limits the length),
    # or another argument.
    CONFIG = ""
    BUILD: Mapping[str, Any] = {}
    CAUSAL = False
    # Formulas of the sizes: the weights of a layer that multiply each token; outside of the layers,
    # the weights and the products with them; the tokens of a sequence; and the pairs of one layer
    # and head (`pairs` only counts the pairs of the mask).
    LAYER = "4 * E**2 + 2 * E * F"
    OTHER = ("0", "0")
    LENGTH = "L"
    PAIRS = "pairs"
    ITEMS = ("B * L", "tokens")  # the items that a call processes
    stopwatch: _base.Stopwatch

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        # Padding is not counted: its rows have no visible pairs.
        tokens = "pairs // L" if "padding" in self.MASKS else f"B * {self.LENGTH}"
        products = f"{tokens} * N * ({self.LAYER}) + {self.OTHER[1]}"
        pairs = "B * L * (L + 1) // 2" if self.CAUSAL else self.PAIRS
        self.FLOPS = f"N * attention({pairs}, E, E) + products({products})"
        self.SHAPES, self.stopwatch = f"out: B {self.LENGTH} E", _base.Stopwatch()

    # Defined by each model

    def build(self, cell: Cell) -> nn.Module:
        """The model without dropout; its parameters are replaced."""
        kind = getattr(import_module(self.PACKAGE), self.FUNCTION.partition(".")[2])
        values = {name: 0.0 for name in vars(kind.config_class()) if "drop" in name}
        for name, size in (field.split("=") for field in self.CONFIG.split()):
            values[name] = cell[size] if size.isalpha() else max(int(size), cell["L"])
        return kind(kind.config_class(**values), **self.BUILD)

    def others(self, cell: Cell, draw: Draw) -> dict[str, Tensor]:
        """The arguments of the model: random tokens, and which of them are not padding."""
        inputs = {"input_ids": draw.integers(0, cell["V"], cell["B"], cell["L"])}
        if cell.mask == "padding":
            inputs["attention_mask"] = draw.valid(cell, cell["L"]).long()
        return inputs

    def bind(self, cell: Cell, model: Any, arguments: Inputs) -> Forward:
        """The call that is timed. The rows of padding, which nothing reads, are 0."""
        if "attention_mask" not in arguments:
            return lambda: model(**arguments).last_hidden_state
        kept = arguments.attention_mask[..., None]
        return lambda: model(**arguments).last_hidden_state * kept

    def serving(self, attention: str) -> contextlib.AbstractContextManager[Any]:
        """The context of each call, in which the stopwatch measures attention."""
        if attention == "eager":  # each model has its own function, outside of the registry
            return contextlib.nullcontext()
        functions = import_module(self.PACKAGE).AttentionInterface._global_mapping
        watched = _watched(functions[attention], self.stopwatch, before=1)
        return mock.patch.dict(functions, {attention: watched})

    # Derived

    def missing(self) -> str:
        try:
            import_module(self.PACKAGE)
        except (ImportError, RuntimeError) as error:  # RuntimeError: built for another PyTorch
            return f"{self.FUNCTION} needs pip install fastattn[{self.PACKAGE}] ({error})"
        return ""

    def elements(self, cell: Cell, **read: int) -> tuple[int, int]:
        weights = _base.value_of(f"N * ({self.LAYER}) + {self.OTHER[0]}", cell)
        tokens = _base.value_of(f"B * {self.LENGTH} * E", cell)
        return weights + tokens, tokens

    def draw_parameter(self, name: str, shape: tuple[int, ...], draw: Draw) -> Tensor:
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

    def stock(self, cell: Cell, x: Inputs) -> Forward:
        return self._with(cell, x, "sdpa")

    def eager(self, cell: Cell, x: Inputs) -> Forward:
        return self._with(cell, x, "eager")

    def _with(self, cell: Cell, x: Inputs, attention: str) -> Forward:
        model, arguments = self.with_arguments(cell, x)
        call = self.bind(cell, model, arguments)
        if attention == "fastattn":
            fastattn.accelerate(model)
        elif attention == "eager" and hasattr(model, "set_attn_implementation"):
            model.set_attn_implementation(attention)
        return within(functools.partial(self.serving, attention), call)

    def with_arguments(self, cell: Cell, x: Inputs) -> tuple[Any, Inputs]:
        """The model with its parameters, and its arguments."""
        own = self.parameters(cell)
        arguments = {name: t for name, t in x.items() if name not in own and name != "grad_out"}
        return self.loaded(self.make, cell, x), Inputs(arguments)

    # The reference

    def exact(self, cell: Cell, x: Inputs) -> Forward:
        """The model in float64, with attention by its definition.

        Parts that the model always computes in float32, such as rotary angles, stay in float32.
        "eager" would compute its softmax in float32, too.
        """
        call = self.bind(cell, *self.with_arguments(cell, x))
        defining = functools.partial(Intercepting, _by_definition)
        return within(functools.partial(sdpa_kernel, SDPBackend.MATH), within(defining, call))

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


def _by_definition(func: Any, args: Any, kwargs: Any) -> Any:
    """TabPFN chooses the kernels of PyTorch's attention in each call."""
    choice = sdpa_kernel(SDPBackend.MATH) if func is F.scaled_dot_product_attention else None
    with choice or contextlib.nullcontext():
        return func(*args, **kwargs)


def _watched(function: Any, watch: _base.Stopwatch, before: int = 0) -> Any:
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


_COMMON = "num_hidden_layers=N num_attention_heads=H intermediate_size=F hidden_size=E"

# Devlin et al. 2019, https://arxiv.org/abs/1810.04805
BERT = Model(
    FUNCTION="transformers.BertModel",
    ABOUT="N layers of width E, H heads, F hidden units, V words, on B sentences of L tokens",
    MASKS=("none", "padding"),
    SIZES={"B": 8, "L": 128, "N": 12, "E": 768, "H": 12, "F": 3072, "V": 30522},
    CONFIG=f"vocab_size=V {_COMMON} max_position_embeddings=512",
    BUILD={"add_pooling_layer": False},
)

# Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929: images, a class token, no pooler
VIT = Model(
    FUNCTION="transformers.ViTModel",
    ABOUT="N layers of width E, H heads, F hidden units, on B images of I x I, patches of P x P",
    SIZES={"B": 8, "I": 224, "P": 16, "N": 12, "E": 768, "H": 12, "F": 3072},
    PASSES=("fwd",),
    CONFIG=f"image_size=I patch_size=P {_COMMON}",
    BUILD={"add_pooling_layer": False},
    LENGTH="((I//P)**2+1)",
    PAIRS="B * ((I // P)**2 + 1)**2",
    OTHER=("3 * P**2 * E", "B * (I // P)**2 * 3 * P**2 * E"),
    ITEMS=("B", "images"),
    others=lambda cell, draw: {"pixel_values": draw.normal(cell["B"], 3, cell["I"], cell["I"])},
)

# Touvron et al. 2023, https://arxiv.org/abs/2302.13971
_LLAMA: dict[str, Any] = {
    "PASSES": ("fwd",),
    "LAYER": "2 * E * (E + E // H * Hkv) + 3 * E * F",
    "CONFIG": f"vocab_size=V {_COMMON} num_key_value_heads=Hkv max_position_embeddings=2048",
}
LLAMA = Model(
    FUNCTION="transformers.LlamaModel",
    ABOUT="N layers of width E, H heads on Hkv key heads, F hidden units, on prompts of L tokens",
    SIZES={"B": 1, "L": 512, "N": 22, "E": 2048, "H": 32, "Hkv": 4, "F": 5632, "V": 32000},
    CAUSAL=True,
    **_LLAMA,
)


class _LlamaDecode(Model):
    """One token per sequence with a full cache, up to the scores of all words."""

    LENGTH, PAIRS, ITEMS = "1", "B * (L + 1)", ("B", "tokens")
    OTHER = ("E * V", "B * E * V")

    def others(self, cell: Cell, draw: Draw) -> dict[str, Tensor]:
        """One token, and the keys and values of all layers [B, N, Hkv, L, D]."""
        shape = (*(cell[key] for key in ("B", "N", "Hkv", "L")), cell["E"] // cell["H"])
        token = draw.integers(0, cell["V"], cell["B"], 1)
        return {"input_ids": token, "keys": draw.normal(*shape), "values": draw.normal(*shape)}

    def bind(self, cell: Cell, model: Any, arguments: Inputs) -> Forward:
        """The cache grows by one token, as in `generate`, and is cropped again."""
        cache = import_module("transformers").DynamicCache()
        for layer in range(cell["N"]):
            cache.update(arguments["keys"][:, layer], arguments["values"][:, layer], layer)

        def call() -> Tensor:
            scores: Tensor = model(arguments["input_ids"], past_key_values=cache).logits
            cache.crop(-1)
            return scores

        return call

    def elements(self, cell: Cell, **read: int) -> tuple[int, int]:
        cached = f"2 * B*N*Hkv*L * E // H + N * ({self.LAYER}) + {self.OTHER[0]}"
        return _base.value_of(cached, cell), cell["B"] * cell["V"]


LLAMA_DECODE = _LlamaDecode(
    FUNCTION="transformers.LlamaForCausalLM",
    ABOUT="the next token of N layers of width E, H heads on Hkv key heads, a cache of L tokens",
    SIZES={**LLAMA.SIZES, "L": 2048},
    **_LLAMA,
)


@functools.cache
def _column_embeddings() -> Any:
    """Numbers of the package, whose file cannot be read while errors of rounding are simulated."""
    return import_module("tabpfn.architectures.shared.column_embeddings").load_column_embeddings()


class _TabPFN(Model):
    """A cell of the table is one token; attention is within rows, and then within columns."""

    PACKAGE, ARCHITECTURE = "tabpfn", "tabpfn.architectures.tabpfn_v2_6"

    @contextlib.contextmanager
    def serving(self, attention: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if attention == "eager":
                stack.enter_context(Intercepting(_by_definition))
            caller = import_module(self.ARCHITECTURE)
            function = _watched(caller.scaled_dot_product_attention, self.stopwatch)
            stack.enter_context(mock.patch.object(caller, function.__name__, function))
            yield

    def build(self, cell: Cell) -> Any:
        architecture = import_module(self.ARCHITECTURE)
        config = architecture.TabPFNV2p6Config(
            max_num_classes=10, emsize=cell["E"], nlayers=cell["N"], nhead=cell["H"]
        )
        with mock.patch.object(architecture, "load_column_embeddings", _column_embeddings):
            return architecture.get_architecture(config)

    def others(self, cell: Cell, draw: Draw) -> dict[str, Tensor]:
        known = draw.normal(cell["L"], cell["B"], cell["C"])
        new = draw.normal(cell["S"], cell["B"], cell["C"])
        return {"known": known, "new": new, "classes": draw.integers(0, 10, cell["L"], cell["B"])}

    def bind(self, cell: Cell, model: Any, arguments: Inputs) -> Forward:
        """The reference computes one column at a time, because all scores may not fit."""
        rows = torch.cat((arguments["known"], arguments["new"]))
        chunks = _base.value_of(f"B * {_COLUMNS}", cell) if rows.dtype == torch.float64 else None
        options = import_module("tabpfn.architectures.interface").PerformanceOptions(chunks)
        classes = arguments["classes"].to(rows.dtype)
        return lambda: model(rows, classes, performance_options=options)

    def parts(self, cell: Cell, seed: int, *, few: bool = False) -> list[Part]:
        """Everything; the noise is that of the first 64 rows with classes and without."""
        return [{key: range(min(cell[key], 64)) for key in "LS"}] if few else [{}]

    def dims(self, cell: Cell, name: str, x: Tensor) -> list[str]:
        names = {"known": "LBC", "new": "SBC", "classes": "LB", "out": "SB_"}
        return [*names.get(name, "_" * x.dim())]


# Hollmann et al. 2025, https://doi.org/10.1038/s41586-024-08328-6, in version 2.6: 64 learned rows
# before all others; three features are one column, the classes another. Keys are the L rows with
# classes and the learned ones.
_ROWS, _COLUMNS = "(L + S + 64)", "((C + 2) // 3 + 1)"
_OF_CELL = "(L + S) * (6 * E * ((C + 2) // 3) + 2 * E)"
_OF_KEY = "N * 2 * E**2"
TABPFN = _TabPFN(
    FUNCTION="tabpfn.architectures.tabpfn_v2_6.TabPFNV2p6",
    ABOUT="N layers of width E, H heads; L rows with classes, S without, C features",
    SIZES={"B": 1, "L": 1000, "S": 100, "C": 20, "N": 24, "E": 192, "H": 3},
    PASSES=("fwd",),
    LENGTH=f"{_ROWS} * {_COLUMNS}",
    LAYER="10 * E**2",
    PAIRS=f"B * {_COLUMNS} * {_ROWS} * ({_COLUMNS} + L + 64)",
    OTHER=(
        f"{_OF_KEY} + 8*E + E**2 // 4 + 2*E * (E + 10)",
        f"B * (L + 64) * {_COLUMNS} * {_OF_KEY} + B * {_OF_CELL}"
        " + (C + 2) // 3 * (E // 4) * E + B * S * 2*E * (E + 10)",
    ),
    ITEMS=("B * (L + S)", "rows"),
)
