"""Chooses the backend of a call.

A backend is a module of ``fastattn.backends``; an operator is a function in it, with the same name
as in ``reference/``. The first backend in the order of ``fastattn.evidence`` that has the function
and no reason against a call runs it. ``why_not(op, tensors, options)`` of a backend returns its
reasons as sentences; ``tensors`` maps the names of the reference's parameters to the tensors.

The parameters of a backend's function say which tensors it takes. To add an optional tensor, add it
as the last parameter of the reference's function, and to each backend that supports it: the other
backends are called without it, and decline each call that uses it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from fastattn import builds, evidence
from fastattn._warning import warn
from fastattn.backends._precision import without_autocast

# Our backends for each device. Evidence chooses their order, with "torch" among them.
ON_GPU = ("cuda", "triton")
PRIORITY = {"cpu": ("cpu", "reference"), "cuda": (*ON_GPU, "reference")}
BACKENDS = ("torch", "cpu", "cuda", "triton", "reference")

forced: ContextVar[str] = ContextVar("fastattn_backend", default="")


class FallbackWarning(UserWarning):
    """A call ran on PyTorch's kernels or the slow reference although a native backend is built."""


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run every operator inside the ``with`` block on this backend, or raise.

    ``name`` is ``"cpu"``, ``"cuda"``, ``"triton"``, ``"reference"`` or ``"torch"``, which is
    PyTorch's own fused attention. A call that the backend cannot run raises a ``RuntimeError`` with
    the reasons; nothing falls back. The choice applies to the current thread or task, and to the
    backward of the calls made inside the block. Around code compiled by ``torch.compile`` it
    applies to every run of that code, including its backward; inside such code it causes a graph
    break.

    Raises ``ValueError`` for an unknown name, ``RuntimeError`` for a backend that is not built.

    >>> import torch, fastattn
    >>> x = torch.ones(1, 1, 2, 4)
    >>> with fastattn.use_backend("reference"):
    ...     fastattn.scaled_dot_product_attention(x, x, x).shape
    torch.Size([1, 1, 2, 4])
    """
    if name not in BACKENDS:
        raise ValueError(f"use_backend: name must be one of {', '.join(BACKENDS)}, got {name!r}")
    backend = load(name)
    if isinstance(backend, str):
        raise RuntimeError(f"use_backend: {name!r} is {backend}")
    token = forced.set(name)
    try:
        yield
    finally:
        forced.reset(token)


@functools.cache
def load(name: str) -> ModuleType | str:
    """Return the backend's module, or why it is missing; warn if it is built but unusable."""
    try:
        return importlib.import_module(f"fastattn.backends.{name}")
    except ImportError as error:
        if importlib.util.find_spec(f"fastattn._{name}") is not None:
            warn(f"the backend {name!r} is built but cannot be used: {error}", FallbackWarning)
        elif name == "cpu" and (hidden := builds.hides_installed()):
            warn(hidden, FallbackWarning)
        return f"not built: {builds.backend(name)['reason']}"


def why_not(
    name: str, op: str, device: str, tensors: Sequence[Any], options: Any, obstacles: Sequence[str]
) -> list[str]:
    """Return this backend's reasons against a call, empty if it can run."""
    backend = load(name)
    if isinstance(backend, str):
        return [backend]
    # Triton's interpreter runs on any device, and only when it is requested.
    on_device = (*PRIORITY[device], "torch") if device in PRIORITY else ("reference",)
    if name not in on_device and not getattr(backend, "INTERPRETED", False):
        return [f"does not run on {device} tensors"]
    if not hasattr(backend, op):
        return [f"has no {op}"]
    if name == "reference":
        return []
    return list(obstacles) or reasons_against(backend, op, tensors, options)


def reasons_against(backend: Any, op: str, tensors: Sequence[Any], options: Any) -> list[str]:
    """Return the reasons of a backend's module against a call; it has the function ``op``."""
    kinds = [None if x is None else x.dtype if x.is_cpu else x.device for x in tensors]
    record: Any = type(options)
    if hasattr(backend, "serves_all") and _serves_all(backend, op, record, *kinds):
        return []
    accepted = tensors_by_name(op, accepted_tensors(getattr(backend, op), tensors))
    used = [name for name, x in tensors_by_name(op, tensors).items() if x is not None]
    lacking = [f"has no {name}" for name in used if name not in accepted]
    return lacking + list(backend.why_not(op, accepted, options))


@functools.cache
def _serves_all(backend: Any, op: str, record: type, *kinds: Any) -> bool:
    """Whether the backend has no reason against any call of tensors of these kinds.

    Finding the reasons of a small call takes as long as its kernel, so the answer is cached.
    """
    accepted = accepted_tensors(getattr(backend, op), kinds)
    if any(kind is not None for kind in kinds[len(accepted) :]):
        return False
    return bool(backend.serves_all(op, tensors_by_name(op, accepted), record))


def tensors_by_name(op: str, tensors: Sequence[Any]) -> Mapping[str, Any]:
    """Return the tensors of a primitive by name; trailing optional tensors may be omitted."""
    return dict(zip(_tensors_of(getattr(load("reference"), op)) or (), tensors, strict=False))


def accepted_tensors(function: Callable[..., Any], tensors: Sequence[Any]) -> Sequence[Any]:
    """Drop trailing optional tensors that ``function`` does not accept."""
    names = _tensors_of(function)
    return tensors if names is None else tensors[: len(names)]


@functools.cache
def _tensors_of(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """The names of the tensors that a function takes; None for one with ``*tensors``."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)


def choose(
    op: str, tensors: Sequence[Any], options: Any, obstacles: Sequence[str] = (), without: str = ""
) -> str:
    """Return the name of the first backend without a reason; raise or warn if necessary.

    ``without`` names a backend that is excluded, even if it is forced.
    """
    device, only = _device(tensors), forced.get()
    only = "" if only == without else only
    refused: dict[str, Sequence[str]] = {}
    for name in (only,) if only else _order(device, op, tensors):
        if name == without:
            continue
        against = why_not(name, op, device, tensors, options, obstacles)
        if not against:
            break
        if name != "torch" and isinstance(load(name), ModuleType):  # a backend of fastattn
            refused[name] = against
    else:
        raise RuntimeError(f"the backend {only!r} cannot run {op}: {'; '.join(against)}")
    if name == "reference" and refused:
        reasons = "; ".join(f"{name}: {', '.join(against)}" for name, against in refused.items())
        _warn_once(f"{op} runs on the slow reference ({reasons})")
    if device == "cuda" and not only:
        _warn_if_unverified(_evidence(device, op, tensors))
    return name


def run_reference(op: str, tensors: Sequence[Any], options: Any) -> Any:
    """Run the reference in the dtype of its arguments, without autocast."""
    with without_autocast(_device(tensors)):
        return getattr(load("reference"), op)(*tensors, options=options)


def _order(device: str, op: str, tensors: Sequence[Any]) -> tuple[str, ...]:
    """The backends of a device in the order of preference for this call."""
    row, ours = _evidence(device, op, tensors), PRIORITY.get(device, ("reference",))
    if not {*row.use} <= {"torch", *ours}:  # the row names backends that the device lacks
        return ours
    if row.least_queries > 0 and _first(tensors).shape[-2] < row.least_queries:
        return (*(name for name in row.use if name != "torch"), "reference")
    return (*row.use, "reference")


def _evidence(device: str, op: str, tensors: Sequence[Any]) -> evidence.Row:
    first, op = _first(tensors), op.removesuffix("_backward")
    if op == "append_to_cache":  # verified and admitted together
        op = "decode_attention"
    index = first.device.index or 0  # GPUs of one machine may differ
    return evidence.choose("backends", device, op, first.dtype, index=index)


def _first(tensors: Sequence[Any]) -> Any:
    first = tensors[0]
    return first if first is not None else next(x for x in tensors if x is not None)


def _device(tensors: Sequence[Any]) -> str:
    first = _first(tensors)
    return "cpu" if first.is_cpu else first.device.type


@functools.cache
def _warn_once(message: str) -> None:
    warn(message, FallbackWarning)


evidence.on_change(_warn_once.cache_clear)


def _warn_if_unverified(row: evidence.Row) -> None:
    built = [name for name in ON_GPU if not isinstance(load(name), str)]
    if built and row.source == evidence.UNVERIFIED:
        _warn_once(
            f"fastattn's kernels for GPUs ({', '.join(built)}) are built, but unverified on this "
            "GPU, so PyTorch's kernels or the reference run. `fastattn tune` verifies, measures "
            f'and admits them; fastattn.use_backend("{built[0]}") runs them at once.'
        )
