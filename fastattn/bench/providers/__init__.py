"""Who can be measured. A provider is a module, imported in its own process when asked for.

    ABOUT                                one line for `bench list`
    VARIANTS                             what may follow an @ in its name; may be left out
    select(variant)                      called once, before all else, with what follows the @
    versions() -> dict[str, str]         of what it runs on; raises ImportError if not installed
    why_not(cell) -> list[str]           plain reasons why it cannot run the cell, empty if it can
    prepare(cell, inputs) -> callable    all that is not timed: layouts, modules, sessions

The callable is what is timed. It returns the arrays of `inputs.output_names(cell)` in that order,
as torch tensors or numpy arrays. Any importable module of this form is a provider: `--providers
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
ISAS = ("baseline", "avx2", "avx512", "avx512_bf16", "amx_bf16")  # decided when the process starts


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
    """The instruction set that `name` forces, or nothing."""
    provider, variant = split(name)
    return variant if provider == "fastattn" and variant in ISAS else ""


def variants(name: str) -> Sequence[str]:
    """What may follow the @. Imports the provider's module, but not what it runs on."""
    return tuple(getattr(load(split(name)[0]), "VARIANTS", ()))


def load(name: str) -> Provider:
    """The provider's module. Raises ImportError for one that is unknown or cannot be imported."""
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
    """Raises ValueError for a provider, or a variant of one, that is unknown."""
    provider, variant = split(name)
    if provider not in PROVIDERS and "." not in provider:
        raise ValueError(
            f"--providers {name!r}: known are {', '.join(PROVIDERS)}, or a.module of yours"
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
    """What a peer that is wired up for `sdpa` has against a cell."""
    reasons = []
    if cell.device not in devices:
        reasons.append(f"it runs on {' and '.join(devices)}")
    if cell.op != "sdpa":
        return [*reasons, "only sdpa is wired up"]
    if cell.dtype not in dtypes:
        reasons.append(f"it takes {', '.join(dtypes)}")
    if cell.passes not in passes:
        reasons.append("it has no backward" if passes == ("fwd",) else f"only {', '.join(passes)}")
    if cell.mask not in masks:
        reasons.append(f"no {cell.mask} mask is wired up")
    if cell.weights != "none":
        reasons.append("it returns no weights")
    if cell.option != "none":
        reasons.append(f"no {cell.option} is wired up")
    if cell["H"] != cell["Hkv"] and not grouped:
        reasons.append("it has no grouped heads")
    return reasons
