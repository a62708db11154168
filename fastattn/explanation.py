"""Explains the choice of a backend: which one runs a call, and the reasons against the others."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastattn import dispatch, evidence


@dataclass(frozen=True)
class Explanation:
    """Which backend runs a call, and the reasons against the others."""

    op: str
    device: str
    reasons: dict[str, list[str]]  # in the order of preference; an empty list: it could run
    runs: str | None  # None: the forced backend cannot run the call
    because: str = ""  # the evidence for the order of preference
    notes: tuple[str, ...] = ()  # remarks of the public function

    @property
    def passed_over(self) -> str:
        """The backends before the one that runs, with the reasons against them, in one line."""
        preferred = list(self.reasons.items())
        if self.runs is not None:
            preferred = preferred[: list(self.reasons).index(self.runs)]
        return "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in preferred)

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
        lines += [f"  note       {note}" for note in self.notes]
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
    operator, arguments, *extras = module.prepare(*args, **kwargs)  # a list of extras is notes
    notes = tuple(extras[0]) if extras and isinstance(extras[0], list) else ()
    return replace(explain_primitive(operator, arguments), notes=notes)


def explain_primitive(operator: Any, args: Sequence[Any]) -> Explanation:
    """Explain a call of a ``fastattn.library.Operator``."""
    tensors, options = operator.backend_arguments(args)
    return explanation(operator.name, tensors, options, operator.obstacles(args))


def explanation(
    op: str, tensors: Sequence[Any], options: Any, obstacles: Sequence[str] = ()
) -> Explanation:
    """Explain a call of the operator ``op``; ``obstacles``: why only the reference can run."""
    device = dispatch._device(tensors)
    forced = dispatch.forced.get()  # "" if no backend is forced
    order = dispatch._order(device, op, tensors)
    names = dict.fromkeys((*order, forced) if forced else order)
    reasons = {
        name: dispatch.why_not(name, op, device, tensors, options, obstacles) for name in names
    }
    if device == "cuda":
        reasons |= {name: [evidence.UNVERIFIED] for name in dispatch.ON_GPU if name not in names}
    runs = next((n for n, against in reasons.items() if not against and forced in ("", n)), None)
    because = _evidence(device, op, tensors, options, order, runs)
    return Explanation(op, device, reasons, runs, because)


def _evidence(
    device: str,
    op: str,
    tensors: Sequence[Any],
    options: Any,
    order: tuple[str, ...],
    runs: str | None,
) -> str:
    """The order and its evidence, see fastattn.evidence; on the CPU also the instruction set."""
    if device not in dispatch.PRIORITY:
        return ""
    if dispatch.forced.get():
        return f"{dispatch.forced.get()} is forced"
    because = f"{', '.join(order)} ({dispatch._evidence(device, op, tensors).because})"
    if runs != "cpu":
        return because
    dtype = next(t.dtype for t in tensors if t is not None and t.is_floating_point())
    if op.startswith("linear"):
        return _gemms(dtype, op, tensors)
    tiles = _use_of_tiles(dtype, op, tensors, options)
    return f"{because}; instruction set {instruction_set(dtype)}{tiles}"


def _gemms(dtype: torch.dtype, op: str, tensors: Sequence[Any]) -> str:
    """The GEMM of each product of a linear layer, and the evidence."""
    backend = importlib.import_module("fastattn.backends.cpu")
    # A backward has the gradient of the output before them.
    x, weight = tensors[1:3] if op.endswith("_backward") else tensors[:2]
    rows, work = x.shape[0], x.shape[0] * weight.numel()
    gemms = (f"{name} by {backend.gemm_of(name, dtype, rows, work)}" for name in ("y", "dx", "dw"))
    choice = evidence.choose("gemm", "cpu", dtype=dtype)
    return f"{', '.join(gemms)} ({choice.because}); ours on {instruction_set(dtype)}"


def instruction_set(dtype: torch.dtype) -> str:
    """The instruction set that the CPU's kernels use for this dtype, and why."""
    native = importlib.import_module("fastattn._cpu").build_info()
    used = _name_of_isa(native, dtype)
    choice = evidence.choose("isa", "cpu", dtype=dtype)
    if choice.use == used:
        return f"{used} ({choice.because})"
    if used == native["supported"][-1]:
        return f"{used} (the strongest that there is)"
    return f"{used} (requested)"


def _name_of_isa(native: dict[str, Any], dtype: torch.dtype) -> str:
    """The instruction set of a dtype, by a native ``isa`` such as "avx512,bfloat16=amx_bf16"."""
    default, *exceptions = native["isa"].split(",")
    by_dtype: dict[str, str] = dict(exception.split("=") for exception in exceptions)
    return by_dtype.get(str(dtype).removeprefix("torch."), default)


def _use_of_tiles(dtype: torch.dtype, op: str, tensors: Sequence[Any], options: Any) -> str:
    """If the instruction set has tiles: whether the kernel uses them, and why not."""
    native = importlib.import_module("fastattn._cpu").build_info()
    if not _name_of_isa(native, dtype).startswith("amx_"):
        return ""
    backend = importlib.import_module("fastattn.backends.cpu")
    by_name = dispatch.tensors_by_name(op, tensors)
    if against := backend.why_not_tiles(op, by_name, options):
        return f", on vectors: {against}"
    parts = backend.parts_on_tiles(op, dtype)
    return f", on tiles{parts}{backend.beside_tiles(op, by_name, options)}"
