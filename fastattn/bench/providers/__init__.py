"""The implementations that are compared. Each is imported in its own process.

A provider is a module, or an object, with

    ABOUT                                one line for `bench list`
    VARIANTS                             the suffixes that may follow an @ in its name; optional
    select(variant)                      called first, once, if the name has an @
    THREADS_OF_TORCH = False             if its threads are not PyTorch's
    versions() -> dict[str, str]         versions of its packages; ImportError if not installed
    why_not(cell) -> list[str]           reasons why it cannot run the cell; empty if it can
    prepare(cell, inputs) -> callable    everything that is not timed: layouts, modules, sessions

The callable is timed. It returns the arrays of `cells.output_names(cell)` in that order, as torch
tensors or numpy arrays.

Any importable module is a provider: `--providers fastattn,mypackage.mykernel`. If it has no
`prepare`, its functions and modules are called: those with the names that they have in this
library, such as `scaled_dot_product_attention(query, key, value, is_causal=True)`, with the
arguments of this library's. Options that are None or False are left out.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from fastattn.bench import ops
from fastattn.bench.cells import Cell

Outputs = tuple[Tensor, ...]
_entered = contextlib.ExitStack()


def stay_in(context: contextlib.AbstractContextManager[Any]) -> None:
    """Enters `context` until the next call of this function or of `leave`, outside the timing.

    The exit stack keeps a reference; an unreferenced context manager would exit immediately.
    """
    _entered.close()
    _entered.enter_context(context)


def leave() -> None:
    _entered.close()


def run_passes(cell: Cell, forward: ops.Forward, x: ops.Inputs) -> Callable[[], Outputs]:
    """A callable that runs the cell's passes; the first output is differentiated.

    Gradients are returned, not accumulated: `torch.autograd.grad` allocates new ones in every
    call, like the first backward after `zero_grad`.
    """
    if cell.passes == "fwd":

        def run_forward() -> Outputs:
            with torch.no_grad():
                out = forward()
            return out if type(out) is tuple else (out,)

        return run_forward

    leaves, grad_out = [x[name] for name in ops.get(cell.op).leaf_names(cell)], x.grad_out
    for leaf in leaves:
        leaf.requires_grad_()
    if cell.passes == "bwd":
        kept = ops.as_tuple(forward())[0]
        return lambda: torch.autograd.grad(kept, leaves, grad_out, retain_graph=True)

    def run_both() -> Outputs:
        outputs = ops.as_tuple(forward())
        gradients = torch.autograd.grad(outputs[0], leaves, grad_out)
        return (*(output.detach() for output in outputs), *gradients)

    return run_both


PROVIDERS = {
    "fastattn": "pytorch.Fastattn",
    "torch": "pytorch.Torch",
    "torch-eager": "pytorch.Eager",
    "torch-flex": "peers.Flex",
    "torch-compiled": "pytorch.Compiled",
    "onnxruntime": "peers.OnnxRuntime",
    "openvino": "peers.OpenVino",
}
DEFAULT = ("torch", "fastattn")
ISAS = ("baseline", "avx2", "avx512", "avx512_bf16", "amx_bf16")  # selected when the process starts


class Provider(Protocol):
    ABOUT: str

    def versions(self) -> dict[str, str]: ...
    def why_not(self, cell: Cell) -> list[str]: ...
    def prepare(self, cell: Cell, inputs: ops.Inputs) -> Callable[[], Sequence[Any]]: ...


class Functions:
    """A module whose functions and modules have the names and arguments of this library's."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.ABOUT = (module.__doc__ or module.__name__).strip().splitlines()[0]

    def versions(self) -> dict[str, str]:
        package = importlib.import_module(self.module.__name__.partition(".")[0])
        return {package.__name__: str(getattr(package, "__version__", "of no version"))}

    def why_not(self, cell: Cell) -> list[str]:
        op = ops.get(cell.op)
        name = op.FUNCTION.removeprefix("nn.")
        if op.FUNCTION.startswith("nn.") and not isinstance(op, ops.Twin):
            return [f"{op.FUNCTION} has no counterpart whose parameters could be set"]
        return [] if hasattr(self.module, name) else [f"{self.module.__name__} has no {name}"]

    def prepare(self, cell: Cell, inputs: ops.Inputs) -> Callable[[], Outputs]:
        op = ops.get(cell.op)
        if isinstance(op, ops.Twin):
            forward = op.built(functools.partial(op.build, self.module), cell, inputs)
        else:
            args, options = op.arguments(cell, inputs)
            used = {name: x for name, x in options.items() if x is not None and x is not False}
            function = getattr(self.module, op.FUNCTION)
            forward = op.calling(functools.partial(function, *args, **used), inputs)
        return run_passes(cell, forward, inputs)


def split(name: str) -> tuple[str, str]:
    """`torch@math` is the provider `torch` and its variant `math`."""
    provider, _, variant = name.partition("@")
    return provider, variant


def isa_of(name: str) -> str:
    """The instruction set that `name` forces, or an empty string."""
    provider, variant = split(name)
    return variant if provider == "fastattn" and variant in ISAS else ""


def variants(name: str) -> Sequence[str]:
    """The variants of a provider. Imports its module, but not its packages."""
    return tuple(getattr(load(split(name)[0]), "VARIANTS", ()))


def load(name: str) -> Provider:
    """The provider. Raises ImportError if it is unknown or cannot be imported."""
    name, variant = split(name)
    check_name(name)
    if name in PROVIDERS:
        file, _, kind = PROVIDERS[name].partition(".")
        provider = getattr(importlib.import_module(f"{__name__}.{file}"), kind)()
    else:
        provider = importlib.import_module(name)
        if not hasattr(provider, "prepare"):
            provider = Functions(provider)
    if variant:
        provider.select(variant)
    return cast(Provider, provider)


def check_name(name: str) -> None:
    """Raises ValueError for an unknown provider or variant."""
    provider, variant = split(name)
    if provider not in PROVIDERS and "." not in provider and find_spec(provider) is None:
        raise ValueError(
            f"--providers {name!r}: known are {', '.join(PROVIDERS)}, or an importable module"
        )
    if "@" in name and provider in PROVIDERS and variant not in variants(name):
        known = ", ".join(f"{provider}@{v}" for v in variants(name)) or "none"
        raise ValueError(f"--providers {name!r}: variants of {provider} are {known}")
