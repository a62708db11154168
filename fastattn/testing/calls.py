"""What a proof runs: a primitive of a backend, or a public function with gradients."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastattn import dispatch
from fastattn.backends import reference

__all__ = ["AnyInputs", "Call", "Operands", "Results", "double"]

Results = dict[str, Tensor]

# The results of each primitive, and the tensors whose gradients its backward returns, in order.
_NAMES = {
    "additive_attention": ("out weights", "query key value v bias mask"),
    "decode_attention": ("out lse", ""),
    "merge_states": ("out lse", "out_a lse_a out_b lse_b"),
    "scaled_dot_product_attention": (
        "out lse weights",
        "query key value mask sinks relative_bias",
    ),
    "sinusoidal_encoding": ("out", ""),
    "varlen_attention": ("out lse", "query key value sinks relative_bias"),
}
# How many tensors at the beginning a backend takes, whatever the call.
_ALWAYS = {
    "additive_attention": 7,
    "append_to_cache": 7,
    "decode_attention": 7,
    "scaled_dot_product_attention": 6,
    "sinusoidal_encoding": 2,
    "varlen_attention": 7,
}


class AnyInputs:
    """The inputs of a case."""

    def watched(self) -> dict[str, Tensor | None]:
        """All tensors, which must not be modified."""
        raise NotImplementedError

    def primitive(self) -> tuple[list[Any], Any] | None:
        """The primitive's tensors and options, for ``why_not``; None: any backend can run it."""
        return None

    def results(self, backend: Any) -> Results:
        """The results of a backend and the gradients, by name."""
        raise NotImplementedError

    def definition(self) -> Results:
        """The same in float64, by operations that have rules of rounding."""
        raise NotImplementedError

    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes of the results that are not of the judged dtype."""
        return {}

    def computed(self) -> dict[str, torch.dtype]:
        """The dtypes that results are computed in, where that is not the judged dtype."""
        return {}


def double(x: Any) -> Any:
    """Convert a floating tensor, or those of a dictionary, to float64; return the rest as is."""
    if isinstance(x, dict):
        return {name: double(value) for name, value in x.items()}
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


@dataclass(frozen=True)
class Operands(AnyInputs):
    """The arguments of a primitive, and the gradients of its results."""

    operator: str
    tensors: dict[str, Tensor | None]  # by the names of the primitive's parameters
    options: Any
    grads: dict[str, Tensor | None] = field(default_factory=dict)  # of out, lse, weights
    backward_options: Any = None  # if they are others than the options
    clean: dict[str, Tensor] = field(default_factory=dict)  # instead of what has NaN or inf

    @property
    def args(self) -> tuple[Tensor | None, ...]:
        """The tensors but for optional ones at the end, which a backend need not take."""
        found = list(self.tensors.values())
        while found[-1] is None and len(found) > _ALWAYS.get(self.operator, 0):
            found.pop()
        return tuple(found)

    def watched(self) -> dict[str, Tensor | None]:
        return self.tensors | {f"grad_{name}": grad for name, grad in self.grads.items()}

    def primitive(self) -> tuple[list[Any], Any] | None:
        return list(self.args), self.options

    def definition(self) -> Results:
        return self.cleaned(double).results(reference)

    def cleaned(self, convert: Callable[[Any], Any] = lambda x: x) -> Operands:
        """The same with finite tensors, each of them converted."""
        tensors = {name: convert(self.clean.get(name, x)) for name, x in self.tensors.items()}
        grads = {n: convert(self.clean.get(f"grad_{n}", x)) for n, x in self.grads.items()}
        return replace(self, tensors=tensors, grads=grads, clean={})

    def results(self, backend: Any) -> Results:
        names, differentiable = (part.split() for part in _NAMES[self.operator])
        forward = getattr(backend, self.operator)
        found = forward(*dispatch.taken_by(forward, self.args), options=self.options)
        found = found if isinstance(found, tuple) else (found,)
        results = dict(zip(names, found, strict=True))
        if any(grad is not None for grad in self.grads.values()):
            name = f"{self.operator}_backward"
            grads = {f"grad_{name}": grad for name, grad in self.grads.items()}
            known = grads | self.tensors | self.saved(results)
            args = [known[parameter] for parameter in _parameters_of(name)]
            backward = getattr(backend, name)
            options = self.backward_options or self.options
            gradients = backward(*dispatch.taken_by(backward, args), options=options)
            named = zip(differentiable, gradients, strict=False)
            results |= {f"grad_{name}": grad for name, grad in named if grad is not None}
        if not getattr(self.options, "weights", True):
            del results["weights"]
        # Attention's primitives return lse in float64; the public functions round it.
        if "lse" in results and self.operator != "merge_states":
            dtype = torch.promote_types(results["out"].dtype, torch.float32)
            results["lse"] = results["lse"].to(dtype)
        return {name: result.detach() for name, result in results.items()}

    def saved(self, results: Results) -> Results:
        """The results of the forward as its backward gets them."""
        return results

    def dtypes(self) -> dict[str, torch.dtype]:
        first = next(x for x in self.tensors.values() if x is not None)
        wide = torch.promote_types(first.dtype, torch.float32)
        own = {name: x.dtype for name, x in self.tensors.items() if x is not None}
        own["mask"] = own.get("attn_mask", wide)
        return {"lse": wide} | {f"grad_{name}": dtype for name, dtype in own.items()}


@functools.cache
def _parameters_of(name: str) -> list[str]:
    """The tensors that a primitive takes."""
    parameters = inspect.signature(getattr(reference, name)).parameters
    return [parameter for parameter in parameters if parameter != "options"]


@dataclass
class Call(AnyInputs):
    """The arguments of a public function by name, and the gradients of its results.

    The floating tensors in ``tensors`` are differentiated, those in ``options`` are not.
    """

    tensors: dict[str, Any]
    options: dict[str, Any]
    grad: Tensor
    grad_weights: Tensor | None = None
    poisoned: dict[str, Any] = field(default_factory=dict)  # instead, for the backend

    # The public function, that which makes the arguments of its primitive, and its definition.
    function: ClassVar[Callable[..., Any] | None] = None
    prepare: ClassVar[Callable[..., Any] | None] = None
    plain: ClassVar[Callable[..., Any] | None] = None

    def doubled(self) -> Any:
        """The same in float64, without poison."""
        tensors, weights = double(self.tensors), double(self.grad_weights)
        return type(self)(tensors, self.options, self.grad.double(), weights)

    def watched(self) -> dict[str, Tensor | None]:
        given = self.tensors | self.options | self.poisoned
        tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
        return {**tensors, "grad": self.grad, "grad_weights": self.grad_weights}

    def primitive(self) -> tuple[list[Any], Any] | None:
        if self.prepare is None:
            return None
        _, (*tensors, options) = self.prepare(**self.tensors, **self.options)
        return tensors, options

    def results(self, backend: Any = None) -> Results:
        assert self.function is not None
        return self.run(self.function)

    def definition(self) -> Results:
        found: Results = self.doubled().run(self.plain)
        return found

    def run(self, function: Callable[..., Any]) -> Results:
        """The results of ``function`` and the gradients of its arguments, by name."""
        arguments = {
            name: x.detach().requires_grad_()
            if isinstance(x, Tensor) and x.is_floating_point()
            else x
            for name, x in (self.tensors | self.poisoned).items()
        }
        leaves = {n: x for n, x in arguments.items() if isinstance(x, Tensor) and x.requires_grad}
        out = function(**arguments, **self.options)
        outs = out if isinstance(out, tuple) else (out,)
        named = dict(zip(("out", "weights"), outs, strict=False))
        given = zip(outs, (self.grad, self.grad_weights), strict=False)
        pairs = [(x, g.to(x.dtype)) for x, g in given if g is not None and x.requires_grad]
        grads = torch.autograd.grad(
            [x for x, _ in pairs],
            list(leaves.values()),
            [g for _, g in pairs],
            allow_unused=True,
            materialize_grads=True,
        )
        derived = {f"grad of {name}": g for name, g in zip(leaves, grads, strict=True)}
        return {name: x.detach() for name, x in named.items()} | derived
