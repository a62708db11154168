"""Chooses the backend of a call. No other module does.

A backend is a module of ``fastattn.backends``; an operator is a function in it, with the same name
as in ``reference/``. The first backend in the order without a reason against a call runs it; the
order comes from evidence, see ``fastattn.evidence``. A backend gives its reasons, in plain
sentences, by ``why_not(op, tensors, options)``, where ``tensors`` maps the names of the reference's
parameters to tensors. A module that cannot be imported is not built. A missing function falls
through to the next backend.

The parameters of a backend's function say which tensors it takes. To add an optional one, add it
as the last parameter of the reference's function, and to each backend that supports it: the others
are called without it, and decline each call that uses it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from fastattn import builds, evidence, selftest
from fastattn._warning import warn

__all__ = ["Explanation", "FallbackWarning", "explain", "use_backend"]

# The usual order of each device. Evidence may put "torch" before, or change the order.
PRIORITY = {"cpu": ("cpu", "reference"), "cuda": ("cuda", "triton", "reference")}
BACKENDS = ("torch", "cpu", "cuda", "triton", "reference")

forced: ContextVar[str] = ContextVar("fastattn_backend", default="")


class FallbackWarning(UserWarning):
    """A call ran on the slow reference although a native backend is built."""


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


@dataclass(frozen=True)
class Explanation:
    """Which backend runs a call, and the reasons against the others."""

    op: str
    device: str
    reasons: dict[str, list[str]]  # in the order of preference; empty: could run
    runs: str | None  # None: a forced backend cannot
    because: str = ""  # why the order is this one

    @property
    def passed_over(self) -> str:
        """The backends before the one that runs, with their reasons, in one line."""
        refused = list(self.reasons.items())
        if self.runs is not None:
            refused = refused[: list(self.reasons).index(self.runs)]
        return "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in refused)

    def __str__(self) -> str:
        lines = [f"{self.op} on {self.device}"]
        for name, reasons in self.reasons.items():
            if name == self.runs:
                verdict = "runs"
            else:
                verdict = "; ".join(reasons) or "could run"
            lines.append(f"  {name:<10} {verdict}")
        if self.runs is None:
            lines.append("  nothing runs: the call raises")
        if self.because:
            lines.append(f"  order      {self.because}")
        return "\n".join(lines)

    __repr__ = __str__


def explain(op: Any, *args: Any, **kwargs: Any) -> Explanation:
    """Say which backend would run ``op(*args, **kwargs)``, and why not the others; run nothing.

    ``op`` is a public function of fastattn or its name, with that function's arguments. They are
    validated in the same way and raise the same errors.

    >>> import torch, fastattn
    >>> x = torch.ones(1, 1, 2, 4)
    >>> with fastattn.use_backend("reference"):
    ...     fastattn.explain("scaled_dot_product_attention", x, x, x).runs
    'reference'
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    function = getattr(importlib.import_module("fastattn.ops"), name, None)
    module = importlib.import_module(function.__module__) if callable(function) else None
    if module is None or not hasattr(module, "prepare"):
        raise ValueError(f"explain: op must be a function of fastattn.ops or its name, got {op!r}")
    inspect.signature(getattr(module, name)).bind(*args, **kwargs)  # refuses unknown arguments
    operator, arguments = module.prepare(*args, **kwargs)[:2]
    return operator.explain(arguments)


@functools.cache
def load(name: str) -> ModuleType | str:
    """Return the backend's module, or why there is none; warn if there should be one."""
    try:
        return importlib.import_module(f"fastattn.backends.{name}")
    except ImportError as error:
        if importlib.util.find_spec(f"fastattn._{name}") is not None:
            warn(f"the backend {name!r} is built but cannot be used: {error}", FallbackWarning)
        return f"not built: {builds.backend(name)['reason']}"


def why_not(
    name: str,
    op: str,
    device: str,
    tensors: Sequence[Any],
    options: Any,
    obstacles: Sequence[str],
) -> list[str]:
    """Return this backend's reasons against a call, empty if it can run."""
    backend = load(name)
    if isinstance(backend, str):
        return [backend]
    # Triton's interpreter runs on any device, and only when it is requested.
    usual = PRIORITY.get(device, ("reference",))
    on_device = name in usual or (name == "torch" and device in PRIORITY)
    if not on_device and not getattr(backend, "INTERPRETED", False):
        return [f"does not run on {device} tensors"]
    if not hasattr(backend, op):
        return [f"has no {op}"]
    if name == "reference":
        return []
    return list(obstacles) or reasons_of(backend, op, tensors, options)


def reasons_of(backend: Any, op: str, tensors: Sequence[Any], options: Any) -> list[str]:
    """Return the reasons of a backend's module, which has the function ``op``."""
    kinds = [None if x is None else x.dtype if x.is_cpu else x.device for x in tensors]
    record: Any = type(options)
    if hasattr(backend, "serves_all") and _serves_all(backend, op, record, *kinds):
        return []
    given = named(op, tensors)
    taken = taken_by(getattr(backend, op), tensors)
    lacking = [f"has no {name}" for name in list(given)[len(taken) :] if given[name] is not None]
    return lacking + list(backend.why_not(op, named(op, taken), options))


@functools.cache
def _serves_all(backend: Any, op: str, record: type, *kinds: Any) -> bool:
    """Whether the backend has no reason against any call of tensors of these kinds.

    A kind is a dtype, the device of a tensor that is not on the CPU, or None for no tensor. To find
    the reasons of a small call takes as long as its kernel, so the answer is kept.
    """
    taken = taken_by(getattr(backend, op), kinds)
    if any(kind is not None for kind in kinds[len(taken) :]):
        return False
    return bool(backend.serves_all(op, named(op, taken), record))


def named(op: str, tensors: Sequence[Any]) -> Mapping[str, Any]:
    """Return the tensors of a primitive by name; optional ones at the end may be left out."""
    return dict(zip(_names(getattr(load("reference"), op)), tensors, strict=False))


def taken_by(function: Callable[..., Any], tensors: Sequence[Any]) -> Sequence[Any]:
    """Return the tensors that a function takes, without those at the end that it does not."""
    return tensors[: _most_tensors(function)]


@functools.cache
def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)


@functools.cache
def _most_tensors(function: Callable[..., Any]) -> int | None:
    """How many tensors a function takes; None for one with ``*tensors``, which takes any."""
    kinds = [p.kind for p in inspect.signature(function).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return None
    return kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)


def explanation(
    op: str, tensors: Sequence[Any], options: Any, obstacles: Sequence[str] = ()
) -> Explanation:
    device = _device(tensors)
    only = forced.get()
    order = _order(device, op, tensors)
    names = dict.fromkeys((*order, only) if only else order)
    reasons = {
        name: why_not(name, op, device, tensors, options, obstacles)
        or selftest.known(name, op, tensors, load)
        or []
        for name in names
    }
    runs = next((n for n, against in reasons.items() if not against and only in ("", n)), None)
    because = _because(device, op, tensors, options, order, runs)
    return Explanation(op, device, reasons, runs, because)


def choose(
    op: str,
    tensors: Sequence[Any],
    options: Any,
    obstacles: Sequence[str] = (),
    without: str = "",
) -> str:
    """Return the name of the first backend without a reason; raise or warn if necessary.

    ``without`` names one that is left out, even if it is forced.
    """
    device = _device(tensors)
    only = forced.get()
    if only == without:
        only = ""
    refused: dict[str, tuple[str, ...]] = {}
    for name in (only,) if only else _order(device, op, tensors):
        if name == without:
            continue
        against = why_not(name, op, device, tensors, options, obstacles)
        if not against and name in selftest.CHECKED:
            against = selftest.why_not(name, op, tensors, load)
        if not against:
            break
        if name != "torch" and isinstance(load(name), ModuleType):  # of ours, that is
            refused[name] = tuple(against)
    else:
        raise RuntimeError(f"the backend {only!r} cannot run {op}: {'; '.join(against)}")
    if name == "reference" and refused:
        _warn_once(op, tuple(refused.items()))
    return name


def run_reference(op: str, tensors: Sequence[Any], options: Any) -> Any:
    """Run the reference in the dtype of its arguments, without autocast."""
    with _without_autocast(_device(tensors)):
        return getattr(load("reference"), op)(*tensors, options=options)


def _order(device: str, op: str, tensors: Sequence[Any]) -> tuple[str, ...]:
    """The backends of a device in the order of preference for this call."""
    usual = PRIORITY.get(device, ("reference",))
    found = _evidence(device, op, tensors)
    return usual if found is None else _preferring(tuple(found.use), usual)


@functools.cache
def _preferring(use: tuple[str, ...], usual: tuple[str, ...]) -> tuple[str, ...]:
    # A table of other backends than the device has is not for it.
    if not {*use} <= {"torch", *usual}:
        return usual
    return (*use, *(name for name in usual if name not in use))


def _evidence(device: str, op: str, tensors: Sequence[Any]) -> evidence.Choice | None:
    first = tensors[0]
    if first is None:
        first = next(tensor for tensor in tensors if tensor is not None)
    found = evidence.choose(
        "backends",
        device,
        op.removesuffix("_backward"),
        first.dtype,
        index=first.device.index or 0,  # GPUs of one machine may differ
    )
    if found is not None and found.least_queries > 0 and first.shape[-2] < found.least_queries:
        return None
    return found


def _because(
    device: str,
    op: str,
    tensors: Sequence[Any],
    options: Any,
    order: tuple[str, ...],
    runs: str | None,
) -> str:
    """The order and its evidence; for the CPU's kernels also those of the instruction set."""
    if device not in PRIORITY:
        return ""
    if forced.get():
        return f"{forced.get()} is forced"
    found = _evidence(device, op, tensors)
    source = evidence.unmeasured(device) if found is None else found.source
    because = f"{', '.join(order)} ({source})"
    if runs is not None and selftest.known(runs, op, tensors, load) is None:
        because += f"; the first call checks {runs} against the reference"
    if runs != "cpu":
        return because
    dtype = next(t.dtype for t in tensors if t is not None and t.is_floating_point())
    unit = _unit(dtype, op, tensors, options)
    return f"{because}; instruction set {instruction_set(dtype)}{unit}"


def instruction_set(dtype: torch.dtype) -> str:
    """The instruction set that the CPU's kernels use for this dtype, and why."""
    native = importlib.import_module("fastattn._cpu").build_info()
    used = _instruction_set(native, dtype)
    found = evidence.choose("isa", "cpu", dtype=dtype)
    if found is not None and found.use == used:
        return f"{used} ({found.source})"
    if used == native["supported"][-1]:
        return f"{used} (the strongest that there is)"
    return f"{used} (requested)"


def _instruction_set(native: dict[str, Any], dtype: torch.dtype) -> str:
    most, *others = native["isa"].split(",")
    used: dict[str, str] = dict(other.split("=") for other in others)
    return used.get(str(dtype).removeprefix("torch."), most)


def _unit(dtype: torch.dtype, op: str, tensors: Sequence[Any], options: Any) -> str:
    """Where the instruction set has tiles: whether the kernel uses them, and why not."""
    native = importlib.import_module("fastattn._cpu").build_info()
    if not evidence.has_tiles(_instruction_set(native, dtype)):
        return ""
    backend = importlib.import_module("fastattn.backends.cpu")
    given = named(op, tensors)
    against = backend.why_not_tiles(op, given, options)
    if against:
        return f", on vectors: {against}"
    parts = backend.parts_on_tiles(op, dtype)
    return f", on tiles{parts}{backend.beside_tiles(op, given, options)}"


def _device(tensors: Sequence[Any]) -> str:
    for tensor in tensors:
        if tensor is not None:
            return "cpu" if tensor.is_cpu else tensor.device.type
    raise AssertionError("a primitive without a tensor")


@functools.cache
def _warn_once(op: str, refused: tuple[tuple[str, tuple[str, ...]], ...]) -> None:
    reasons = "; ".join(f"{name}: {', '.join(against)}" for name, against in refused)
    warn(f"{op} runs on the slow reference ({reasons})", FallbackWarning)


def _without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)
