"""Runs and compares models for test_transformers*.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastattn.integrations.transformers import register

Results = dict[str, Tensor]
Calls = list[dict[str, Any]]  # the keyword arguments of each call of the attention function

NAME = "fastattn"

# Both run in float64. Measured on the quick models: results differ by at most 6e-15 of the largest
# one, and by 7e-2 or more where a window is one key too wide or one padded key is seen.
STRUCTURE = 1e-12


class InDouble(TorchFunctionMode):
    """Inside, float32 means float64, but not in our own functions.

    Models convert to float32 by name in norms, rotary embeddings and the softmax of their eager
    attention. In a model of float64 that costs digits; here nothing is rounded further.
    """

    entered: ClassVar[list[InDouble]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(_doubled(x) for x in args)
        return func(*args, **{k: _doubled(x) for k, x in (kwargs or {}).items()})

    def __enter__(self) -> InDouble:
        self.entered.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.entered.pop()

    @classmethod
    @contextlib.contextmanager
    def left(cls) -> Iterator[None]:
        """Suspend the mode within the block."""
        if not cls.entered:
            yield
            return
        mode = cls.entered[-1]
        mode.__exit__(None, None, None)
        try:
            yield
        finally:
            mode.__enter__()


def _doubled(x: Any) -> Any:
    return torch.float64 if x is torch.float32 else x


@contextlib.contextmanager
def fused(model: Any) -> Iterator[Calls]:
    """Within, the model runs on our attention and must call it. Yields the calls' arguments."""
    calls: Calls = []

    def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        with InDouble.left():
            return attention(module, *args, **kwargs)

    def mask(*args: Any, **kwargs: Any) -> Any:
        with InDouble.left():
            return attention_mask(*args, **kwargs)

    with register():
        attention, attention_mask = (
            ALL_ATTENTION_FUNCTIONS[NAME],
            ALL_MASK_ATTENTION_FUNCTIONS[NAME],
        )
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, mask)
        model.set_attn_implementation(NAME)
        try:
            yield calls
        finally:
            model.set_attn_implementation("eager")
            AttentionInterface.register(NAME, attention)
            AttentionMaskInterface.register(NAME, attention_mask)
    assert calls, "the model did not ask the registry for its attention"


def tensors(result: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Each floating-point tensor in nested outputs, with its path. Caches have no part."""
    if isinstance(result, Tensor):
        if result.is_floating_point():
            yield name, result
    elif isinstance(result, dict):
        for key, part in result.items():
            yield from tensors(part, f"{name}.{key}" if name else key)
    elif isinstance(result, (tuple, list)):
        for i, part in enumerate(result):
            yield from tensors(part, f"{name}[{i}]")


def outputs(model: nn.Module, inputs: dict[str, Any]) -> Results:
    """The outputs in float64."""
    with InDouble(), torch.no_grad():
        return dict(tensors(model(**inputs)))


def gradients(model: nn.Module, inputs: dict[str, Any], real: Tensor | None = None) -> Results:
    """The outputs, and the gradients of all parameters by a sum over them with random weights.

    ``real`` [B, L] leaves the rows of real tokens of the first output, and nothing of the others.
    """
    with InDouble():
        return with_gradients(model, inputs, real)


def with_gradients(model: nn.Module, inputs: dict[str, Any], real: Tensor | None = None) -> Results:
    """:func:`gradients` in the precision of the model."""
    found = dict(tensors(model(**inputs)))
    if real is not None:
        name, first = next(iter(found.items()))
        found = {name: first[real] if first.shape[:2] == real.shape else first}
    model.zero_grad()
    weighted_sum(found).backward()
    result = {name: x.detach() for name, x in found.items()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            result[f"gradient of {name}"] = parameter.grad.clone()
    return result


def weighted_sum(found: Results) -> Tensor:
    """A sum of all results with random weights, so that each element matters."""
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros((), dtype=torch.float64)
    for x in found.values():
        if x.requires_grad:
            weights = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            total = total + (x.double() * weights).sum()
    return total


def assert_same(got: Results, want: Results, tolerance: float = STRUCTURE) -> None:
    """The same names and shapes; numbers up to ``tolerance`` times the largest of their kind."""
    assert list(got) == list(want)
    largest: dict[bool, float] = {}
    for name, x in want.items():
        kind = name.startswith("gradient of")
        largest[kind] = max(largest.get(kind, 0.0), float(x.abs().max()) if x.numel() else 0.0)
    wrong = []
    for name, x in want.items():
        assert got[name].shape == x.shape, name
        error = float((got[name] - x).abs().max()) if x.numel() else 0.0
        bound = tolerance * largest[name.startswith("gradient of")]
        if not error <= bound:  # NaN is wrong, too
            wrong.append(f"{name}: off by {error:.3g}, which may be {bound:.3g}")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(want)} are wrong:", *wrong[:4]])


def compared(model: nn.Module, run: Callable[[nn.Module], Results]) -> Calls:
    """Compare ``run`` on our attention with ``run`` on eager. Returns the calls of our function."""
    want = run(model)
    with fused(model) as calls:
        got = run(model)
    assert_same(got, want)
    return calls
