"""The implementations that are compared. A provider is a module, imported in its own process.

    ABOUT                                one line for `bench list`
    VARIANTS                             the suffixes that may follow an @ in its name; optional
    select(variant)                      called first, once, if the name has an @
    THREADS_OF_TORCH = False             if its threads are not PyTorch's
    versions() -> dict[str, str]         versions of its packages; ImportError if not installed
    why_not(cell) -> list[str]           reasons why it cannot run the cell; empty if it can
    prepare(cell, inputs) -> callable    everything that is not timed: layouts, modules, sessions

The callable is timed. It returns the arrays of `inputs.output_names(cell)` in that order, as torch
tensors or numpy arrays. Any importable module of this form is a provider: `--providers
fastattn,mypackage.mykernel`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from torch import Tensor

from fastattn.bench.cells import MASKS, Cell

PROVIDERS = {
    "fastattn": "fastattn.bench.providers.fastattn_",
    "torch": "fastattn.bench.providers.torch_default",
    "torch-eager": "fastattn.bench.providers.torch_eager",
    "torch-flex": "fastattn.bench.providers.torch_flex",
    "onnxruntime": "fastattn.bench.providers.onnxruntime_",
    "openvino": "fastattn.bench.providers.openvino_",
    "jax": "fastattn.bench.providers.jax_",
    "executorch": "fastattn.bench.providers.executorch_",
    "flash-attn": "fastattn.bench.providers.flash_attn_",
    "xformers": "fastattn.bench.providers.xformers_",
}
DEFAULT = ("torch", "fastattn")
ISAS = ("baseline", "avx2", "avx512", "avx512_bf16", "amx_bf16")  # selected when the process starts


class Provider(Protocol):
    ABOUT: str

    def versions(self) -> dict[str, str]: ...
    def why_not(self, cell: Cell) -> list[str]: ...
    def prepare(self, cell: Cell, inputs: dict[str, Tensor]) -> Callable[[], Sequence[Any]]: ...


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
    """The provider's module. Raises ImportError if it is unknown or cannot be imported."""
    name, variant = split(name)
    if name not in PROVIDERS and "." not in name:
        raise ImportError(f"unknown provider {name!r}; known are {', '.join(PROVIDERS)}")
    module: Any = importlib.import_module(PROVIDERS.get(name, name))
    parts = ("ABOUT", "versions", "why_not", "prepare")
    missing = [part for part in parts if not hasattr(module, part)]
    if missing:
        raise ImportError(f"provider {name!r} has no {', '.join(missing)}")
    if variant:
        module.select(variant)
    return cast(Provider, module)


def check_name(name: str) -> None:
    """Raises ValueError for an unknown provider or variant."""
    provider, variant = split(name)
    if provider not in PROVIDERS and "." not in provider:
        raise ValueError(
            f"--providers {name!r}: known are {', '.join(PROVIDERS)}, or an importable module"
        )
    if "@" in name and provider in PROVIDERS and variant not in variants(name):
        known = ", ".join(f"{provider}@{v}" for v in variants(name)) or "none"
        raise ValueError(f"--providers {name!r}: variants of {provider} are {known}")


def sdpa_reasons(
    cell: Cell,
    *,
    dtypes: Sequence[str],
    passes: Sequence[str] = ("fwd",),
    masks: Sequence[str] = MASKS,
    grouped: bool = True,
    devices: Sequence[str] = ("cpu",),
) -> list[str]:
    """The reasons why a provider that implements `sdpa` only cannot run a cell."""
    reasons = []
    if cell.device not in devices:
        reasons.append(f"it runs on {' and '.join(devices)}")
    if cell.op != "sdpa":
        return [*reasons, "only sdpa is supported here"]
    if cell.dtype not in dtypes:
        reasons.append(f"it takes {', '.join(dtypes)}")
    if cell.passes not in passes:
        reasons.append("it has no backward" if passes == ("fwd",) else f"only {', '.join(passes)}")
    if cell.mask not in masks:
        reasons.append(f"no {cell.mask} mask is supported here")
    if cell.weights != "none":
        reasons.append("it returns no weights")
    if cell.option != "none":
        reasons.append(f"no {cell.option} is supported here")
    if cell["H"] != cell["Hkv"] and not grouped:
        reasons.append("it has no grouped heads")
    return reasons
