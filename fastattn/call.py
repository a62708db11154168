"""Signature, plan, run: how a repeated call reaches its kernel without being validated again.

The first call of a signature takes the complete path: all checks of the public function, the choice
of the backend, the record of options. The outcome is cached as a plan, which later calls with the
same signature run.
A signature has everything that the checks and the choice depend on: dtypes, ranks, widths, heads,
which sizes are equal, which tensors require a gradient, the options and their types, the forced
backend. It excludes lengths and batch sizes, which the native function checks on every call, so a
growing cache and batches of new sizes reuse a plan. A plan keeps no tensor alive.
"""

from __future__ import annotations

import functools
import inspect
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastattn import compat, dispatch, evidence
from fastattn._seed import draw_seed
from fastattn.compat import may_plan
from fastattn.library import Operator

_MAX_PLANS = 4096  # plans of one function; a model has far fewer signatures
_MAX_RECORDS = 64  # records of one plan, one for each value of the option that calls replace


class Plan:
    """Runs the calls of one signature: an operator on the CPU's kernels, and its options.

    A plan takes the tensors in the order of the operator's schema. Leading dimensions of size 1 may
    be missing, and where the kernel accepts it, several may stand for the first.
    """

    __slots__ = ("_operator", "_records", "_skips", "kernel", "options", "requires_grad", "viewed")

    def __init__(
        self, operator: Operator, options: Any, requires_grad: bool, viewed: bool = False
    ) -> None:
        # Whether the complete path made views of a call's tensors, which the caller must make too.
        self.viewed = viewed
        self._operator, self.options, self.requires_grad = operator, options, requires_grad
        self._records: dict[Any, Any] = {}
        self.kernel: Any = getattr(dispatch.load("cpu"), operator.name, None)
        self._skips = _skips_results(self.kernel)

    def all(self, tensors: tuple[Tensor | None, ...], options: Any = None) -> Any:
        """The results of the operator."""
        options = options or self.options
        if self.requires_grad and torch.is_grad_enabled():
            return self._operator.planned(*tensors, options)
        return self.kernel(*tensors, options=options)

    def first(self, tensors: tuple[Tensor | None, ...], options: Any = None) -> Any:
        """The first result; others are computed only if the derivative needs them."""
        options = options or self.options
        if self.requires_grad and torch.is_grad_enabled():
            return self._operator.planned_first(*tensors, options)
        if self._skips:
            return self.kernel(*tensors, options=options, only_first=True)
        return self.kernel(*tensors, options=options)[0]

    def with_option(self, name: str, value: Any) -> Any:
        """The options with one value replaced; a plan always replaces the same option."""
        record = self._records.get(value)
        if record is None:
            if len(self._records) >= _MAX_RECORDS:
                self._records.clear()
            record = self._records[value] = replace(self.options, **{name: value})
        return record


@functools.cache  # reading a native signature takes longer than the rest of a cache miss
def _skips_results(kernel: Any) -> bool:
    """Whether a kernel has the argument ``only_first``, which leaves out all other results."""
    return kernel is not None and "only_first" in inspect.signature(kernel).parameters


class _ChoosingPlan(Plan):
    """A plan that chooses the backend in each call, because PyTorch's kernel serves some values."""

    __slots__ = ()

    def all(self, tensors: tuple[Tensor | None, ...], options: Any = None) -> Any:
        return self._operator(*self._operator.lifted(tensors), options or self.options)

    def first(self, tensors: tuple[Tensor | None, ...], options: Any = None) -> Any:
        return self.all(tensors, options)[0]


class Plans:
    """The plans of one public function; all are dropped when fastattn.evidence changes.

    The signature has the heads and columns of the first ``rows`` tensors of a call. The cache has
    two generations: a plan that is used moves to the newer one, and the older one is dropped when
    the newer one is full.
    """

    def __init__(self, rows: int = 0) -> None:
        self.rows = rows
        self._plans: dict[bytes | None, Any] = {}
        self._older: dict[bytes | None, Any] = {}
        # (tensors, rows, options) -> the signature, None if the call needs the complete path.
        self._sign: Callable[..., bytes | None] = self._load_and_sign
        evidence.on_change(self._clear)

    def find(self, tensors: tuple[Any, ...], *options: Any) -> tuple[bytes | None, Any]:
        """The signature and the plan of a call; each is None if the call has none."""
        if not may_plan():
            return None, None
        signature = self._sign(tensors, self.rows, (dispatch.forced.get(), options))
        plan = self._plans.get(signature)
        if plan is None and signature in self._older:
            plan = self._older.get(signature)  # None if another thread was faster
            self.set(signature, plan)
        return signature, plan

    def keep(
        self,
        signature: bytes | None,
        operator: Operator,
        call: Sequence[Any],  # the operator's arguments
        originals: Sequence[Any],  # the tensors of the public call that they derive from
        inputs: Sequence[Any] = (),  # of the call; empty: `originals`
    ) -> Plan | None:
        """Keep and return the plan of a call that the complete path prepared.

        No plan is kept if the complete path made more than views of the tensors, or if another
        backend than the CPU's kernels serves the call. In ``originals``, None stands for a tensor
        that the caller of the plan rebuilds for each call.
        """
        *tensors, _ = call
        if signature is None or not only_viewed(tensors, originals):
            return None
        viewed = any(y is not x for y, x in zip(tensors, originals, strict=False))
        plan = plan_of(operator, call, compat.any_requires_grad(*(inputs or originals)), viewed)
        if plan is not None:
            self.set(signature, plan)
        return plan

    def set(self, signature: bytes | None, plan: Any) -> None:
        if len(self._plans) >= _MAX_PLANS // 2:
            self._older, self._plans = self._plans, {}
        self._plans[signature] = plan

    def _clear(self) -> None:
        self._plans, self._older = {}, {}

    def _load_and_sign(self, tensors: tuple[Any, ...], *args: Any) -> bytes | None:
        """Load the native ``signature`` at the first call on the CPU; later calls run it."""
        if not getattr(tensors[0], "is_cpu", False):
            return None
        cpu = dispatch.load("cpu")
        self._sign = getattr(cpu, "signature", lambda *call: None)
        return self._sign(tensors, *args)


def plan_of(
    operator: Operator, call: Sequence[Any], requires_grad: bool, viewed: bool = False
) -> Plan | None:
    """The plan of an operator's arguments; None if another backend than the CPU's serves them."""
    # Even where gradients are disabled: the plan also serves calls that compute them.
    if compat.any_requires_grad(*(call[n] for n in operator.opaque)):
        return None
    kind = Plan
    first = evidence.choose("backends", "cpu", operator.name, call[0].dtype).use[0]
    if first == "torch" and not dispatch.forced.get():  # it may decline a call by its values
        kind = _ChoosingPlan
    elif dispatch.choose(operator.name, call[:-1], call[-1]) != "cpu":
        return None
    return kind(operator, call[-1], requires_grad, viewed)


def with_seed(
    operator: Operator, call: tuple[Any, ...], generator: torch.Generator | None = None
) -> tuple[Any, ...]:
    """The arguments of an operator, with a new seed if it has dropout."""
    if call[-1].dropout_p == 0:
        return call
    place = operator.place_of("seed")
    return *call[:place], draw_seed(call[0].device, generator), *call[place + 1 :]


def with_arguments_of(
    function: Callable[..., Any], prepare: Callable[[Any], Any]
) -> Callable[..., Any]:
    """A function with the arguments of ``function`` that passes them to ``prepare`` as one record.

    The record is a named tuple. Keyword-only arguments may also be given by position.
    """
    parameters = inspect.signature(function).parameters
    defaults = [p.default for p in parameters.values() if p.default is not p.empty]
    record: Any = namedtuple("Arguments", parameters, defaults=defaults)  # type: ignore[misc]
    return lambda *args, **options: prepare(record(*args, **options))


def only_viewed(prepared: Sequence[Any], originals: Sequence[Any]) -> bool:
    """Whether the complete path made only views of these tensors; None matches any tensor."""
    return all(
        x is None or y is x or (y is not None and y.data_ptr() == x.data_ptr())
        for y, x in zip(prepared, originals, strict=False)
    )
