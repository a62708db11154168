"""The calls that a proof runs: a primitive of a backend, or a public function with gradients."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import fastattn
from fastattn import dispatch, library
from fastattn.backends import reference
from fastattn.backends.primitives import extend_options

Results = dict[str, Tensor]

_ALWAYS = 7  # the number of leading tensors that every backend takes in every call


@functools.cache
def declared(operator: str) -> library.Operator:
    """The declaration of a primitive: its results, and the results of its backward."""
    return next(op for op in library.operators.values() if op.name == operator)


def double(x: Any) -> Any:
    """Convert a floating tensor to float64; return the rest as is."""
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


@dataclass(frozen=True)
class Operands:
    """The arguments of a primitive, and the gradients of its results."""

    operator: str
    tensors: dict[str, Tensor | None]  # by the names of the primitive's parameters
    options: Any
    grads: Mapping[str, Tensor | None] = field(default_factory=dict)  # of out, lse, weights
    of_backward: dict[str, bool] = field(default_factory=dict)  # options of the backward only
    clean: Mapping[str, Tensor | None] = field(default_factory=dict)  # without NaN and inf

    def __getattr__(self, name: str) -> Any:
        """A tensor, or the gradient of a result, by its name."""
        kind, key = ("grads", name[5:]) if name.startswith("grad_") else ("tensors", name)
        try:
            return self.__dict__[kind][key]
        except KeyError:
            raise AttributeError(name) from None

    def changed(self, **changes: Any) -> Any:
        """Return a copy with other tensors, gradients (``grad_out``) or options, unpoisoned."""
        options = changes.pop("options", self.options)
        clean = {name: x for name, x in self.clean.items() if name not in changes}
        tensors = {name: changes.pop(name, x) for name, x in self.tensors.items()}
        grads = {name: changes.pop(f"grad_{name}", x) for name, x in self.grads.items()}
        of_backward = self.of_backward | changes
        return replace(self, tensors=tensors, options=options, grads=grads, clean=clean,
                       of_backward=of_backward)  # fmt: skip

    @property
    def args(self) -> tuple[Tensor | None, ...]:
        """The tensors without trailing optional tensors, which a backend need not take."""
        tensors = list(self.tensors.values())
        while tensors[-1] is None and len(tensors) > _ALWAYS:
            tensors.pop()
        return tuple(tensors)

    def watched(self) -> dict[str, Tensor | None]:
        """All tensors, which must not be modified."""
        return self.tensors | {f"grad_{name}": grad for name, grad in self.grads.items()}

    def primitive(self) -> tuple[list[Any], Any] | None:
        """The primitive's tensors and options, for ``why_not``; None: any backend can run it."""
        return list(self.args), self.options

    def definition(self) -> Results:
        """The results in float64, by operations that have rules of rounding."""
        return self.cleaned(double).results(reference)

    def cleaned(self, convert: Callable[[Any], Any] = lambda x: x) -> Any:
        """Return a copy with finite tensors, each of them converted."""
        tensors = {name: convert(self.clean.get(name, x)) for name, x in self.tensors.items()}
        grads = {n: convert(self.clean.get(f"grad_{n}", x)) for n, x in self.grads.items()}
        return replace(self, tensors=tensors, grads=grads, clean={})

    def results(self, backend: Any) -> Results:
        """The results of a backend and the gradients, by name."""
        op = declared(self.operator)
        forward = getattr(backend, op.name)
        outputs = forward(*dispatch.accepted_tensors(forward, self.args), options=self.options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        results = dict(zip(op.results, outputs, strict=True))
        if any(grad is not None for grad in self.grads.values()):
            grads = {f"grad_{name}": grad for name, grad in self.grads.items()}
            known = grads | self.tensors | self.saved(results)
            args = [known[name] for name in op.backward.names]
            backward = getattr(backend, op.backward.name)
            options: Any = extend_options(op.backward.options, self.options, **self.of_backward)
            gradients = backward(*dispatch.accepted_tensors(backward, args), options=options)
            named = zip(op.backward.results, gradients, strict=False)
            results |= {name: grad for name, grad in named if grad is not None}
        if not getattr(self.options, "weights", True):
            del results["weights"]
        # Attention's primitives return lse in float64; the public functions round it.
        if "lse" in results and self.operator != "merge_states":
            dtype = torch.promote_types(results["out"].dtype, torch.float32)
            results["lse"] = results["lse"].to(dtype)
        return {name: result.detach() for name, result in results.items()}

    def saved(self, results: Results) -> Results:
        """The results of the forward in the form that its backward takes."""
        return results

    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes of the results that differ from the judged dtype."""
        own = {f"grad_{name}": x.dtype for name, x in self.tensors.items() if isinstance(x, Tensor)}
        wide = torch.promote_types(next(iter(own.values())), torch.float32)
        return {"lse": wide} | own

    def computed(self) -> dict[str, torch.dtype]:
        """The dtypes in which results are computed, where they differ from the judged dtype."""
        return {}


@dataclass(frozen=True)
class Call(Operands):
    """The arguments of a public function by name, and the gradients of its results.

    The floating tensors in ``tensors`` are differentiated, tensors in ``options`` are not.
    """

    plain: Callable[..., Any] | None = None  # a definition that replaces the reference

    def watched(self) -> dict[str, Tensor | None]:
        return {
            n: x for n, x in (super().watched() | self.options).items() if isinstance(x, Tensor)
        }

    def primitive(self) -> tuple[list[Any], Any] | None:
        module: Any = importlib.import_module(getattr(fastattn, self.operator).__module__)
        if not hasattr(module, "prepare"):
            return None
        _, (*tensors, options) = module.prepare(**self.tensors, **self.options)
        return tensors, options

    def results(self, backend: Any = None) -> Results:
        return self.run(getattr(fastattn, self.operator))

    def definition(self) -> Results:
        clean: Call = self.cleaned(double)
        if self.plain is not None:
            return clean.run(self.plain)
        # In forward mode a public function runs the reference as single operations of PyTorch.
        with dispatch.use_backend("reference"), torch.autograd.forward_ad.dual_level():
            return clean.results()

    def run(self, function: Callable[..., Any]) -> Results:
        """The results of ``function`` and the gradients of its arguments, by name."""
        leaves = {
            name: x.detach().requires_grad_()
            for name, x in self.tensors.items()
            if isinstance(x, Tensor) and x.is_floating_point()
        }
        out = function(**self.tensors | leaves, **self.options)
        outs = out if isinstance(out, tuple) else (out,)
        named = dict(zip(("out", "weights"), outs, strict=False))
        grads = {name: self.grads.get(name) for name, x in named.items() if x.requires_grad}
        of_results = {name: x.to(named[name].dtype) for name, x in grads.items() if x is not None}
        of_leaves = torch.autograd.grad(
            [named[name] for name in of_results],
            list(leaves.values()),
            list(of_results.values()),
            allow_unused=True,
            materialize_grads=True,
        )
        named |= {f"grad_{name}": grad for name, grad in zip(leaves, of_leaves, strict=True)}
        return {name: x.detach() for name, x in named.items()}
