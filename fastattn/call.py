"""Signature, plan, run: how a call reaches its kernel without being examined again.

The first call of a signature takes the complete path: all checks, the choice of the backend, the
record of options. What it found is kept as a plan; later calls with the same signature run it. A
signature has everything that the checks and the choice depend on: dtypes, ranks, widths, heads,
which sizes are equal, which tensors require a gradient, the options and their types, the forced
backend. Lengths and batch sizes are not in it: the native function checks them on every call, so
a growing cache and batches of new sizes reuse a plan. A plan keeps no tensor alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastattn import dispatch, evidence
from fastattn.compat import nothing_intercepts as may_plan

__all__ = ["Plans", "may_plan", "only_viewed"]

_MOST = 4096  # plans of one function


def only_viewed(prepared: Sequence[Any], tensors: Sequence[Any]) -> bool:
    """Whether the complete path made nothing but views of these tensors, or None."""
    pairs = zip(prepared, tensors, strict=True)
    return all(x is None or y.data_ptr() == x.data_ptr() for y, x in pairs)


class Plans:
    """The plans of one public function; all are dropped when the evidence changes.

    A function asks :func:`may_plan` before anything else.
    """

    def __init__(self) -> None:
        self._plans: dict[bytes | None, Any] = {}
        self.get: Callable[[bytes | None], Any] = self._plans.get
        # The signature of (tensors, rows, options), None if the call needs the general path.
        self.sign: Callable[..., bytes | None] = self._load
        evidence.on_change(self._plans.clear)

    def keep(self, signature: bytes, plan: Any) -> None:
        while len(self._plans) >= _MOST:  # the oldest: a model has far fewer signatures
            self._plans.pop(next(iter(self._plans), None), None)
        self._plans[signature] = plan

    def _load(self, tensors: tuple[Any, ...], *args: Any) -> bytes | None:
        if not getattr(tensors[0], "is_cpu", False):  # loads nothing
            return None
        cpu = dispatch.load("cpu")
        self.sign = getattr(cpu, "signature", lambda *call: None)
        return self.sign(tensors, *args)
