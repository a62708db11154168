"""Empty plans for a test (``fastattn.call``), calls without plans, and the description of an
operator for the tests of plans.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
from torch import Tensor

from fastattn.call import Plans

Result = TypeVar("Result")
assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)
Call = dict[str, Any]  # the arguments of a public function, by name
Change = Mapping[str, Any] | Callable[[Call], Mapping[str, Any]]  # of the arguments of a call
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def fresh(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> Plans:
    """Empty plans for a public function."""
    owner = importlib.import_module(function.__module__)
    plans = Plans(owner.plans.rows)
    monkeypatch.setattr(owner, "plans", plans)
    return plans


def count(plans: Plans) -> int:
    return len(plans._plans)


def without_plans(run: Callable[[], Result]) -> Result:
    """The results of the complete path."""
    with mock.patch("fastattn.call.may_plan", return_value=False):
        return run()


# --- changes of a call ----------------------------------------------------------------------------


def changed(call: Call, change: Change) -> Call:
    """The call with a change."""
    return {**call, **(change(call) if callable(change) else change)}


def at(name: str, change: Callable[[Any], Any]) -> Change:
    """A change of one argument."""
    return lambda call: {name: change(call[name])}


def as_double(call: Call) -> Call:
    """The floating tensors of a call in float64."""
    floating = {n for n, x in call.items() if isinstance(x, Tensor) and x.is_floating_point()}
    return {name: call[name].double() for name in floating}


class _Own(Tensor):
    pass


def on_meta(x: Tensor) -> Tensor:
    return x.detach().to("meta")


def of_subclass(name: str) -> Change:
    """A change: the tensor becomes one of a subclass."""
    return at(name, lambda x: x.as_subclass(_Own))


_draws = torch.Generator().manual_seed(1)


def normal(*sizes: int) -> Tensor:
    """Normal numbers of a table, in float32."""
    return torch.randn(sizes, generator=_draws)


# --- operators ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """A public function that has plans, and calls that differ in the facts of a plan."""

    function: Callable[..., Any]
    make: Callable[..., Call]  # a valid call, of any sizes
    options: Mapping[str, Change]
    dtypes: Sequence[torch.dtype] = DTYPES
    # Arguments that are float32 in calls of 16 bits, and arguments with a fixed dtype.
    wide: Sequence[str] = ()
    fixed: Sequence[str] = ()
    forms: Mapping[str, Change] = field(default_factory=lambda: {"": {}})
    crossed: bool = True  # each form with each option, or with the first one alone
    wants: Sequence[str] = ("",)  # which arguments require a gradient
    second: bool = True  # the second derivative of a plan has the bits of the complete path
    written: Sequence[str] = ()  # arguments that a call writes to, where it has them
    without: tuple[str, ...] = ()  # ends of the names of the cases that have no plan
    base: Mapping[str, Any] = field(default_factory=dict)  # of the changes
    changes: Mapping[str, Change] = field(default_factory=dict)  # each, as each option: a new plan
    leaving: Mapping[str, Change] = field(default_factory=dict)  # each makes a call without a plan
    valid: Sequence[Mapping[str, Any]] = ({},)  # the calls before a wrong one, like the last
    # Wrong values of each argument, or how a valid one becomes wrong.
    wrong: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    sizes: Callable[[], list[list[Call]]] = list  # lists of calls of one plan

    def __str__(self) -> str:
        return self.function.__module__.rpartition(".")[2]

    def learned(self, call: Call) -> list[set[str]]:
        """The sets of arguments of this call that require a gradient, each once."""
        given = {name for name, x in call.items() if isinstance(x, Tensor)}
        return [*map(set, dict.fromkeys(frozenset(given & {*n.split()}) for n in self.wants))]

    def keeps(self, form: str, option: str) -> bool:
        """Whether such a call has a plan."""
        return not (self.without and f"{form}-{option}".endswith(self.without))

    # Names and values of the tests in test_plans.py.

    def cases(self) -> Iterator[tuple[str, Any]]:
        """Form, option and dtype."""
        first, *_ = self.options
        for form, option, dtype in product(self.forms, self.options, self.dtypes):
            if self.crossed or not form or (option == first and dtype is torch.float32):
                name = "-".join(filter(None, (form, option, str(dtype)[6:])))
                yield name, (form, option, dtype)

    def facts(self) -> Iterator[tuple[str, Change]]:
        """Changes that make a new plan."""
        yield "dtype", as_double
        for name in self.wants[0].split():
            if name in self.make():
                yield f"gradient-of-{name}", at(name, lambda x: x.clone().requires_grad_())
        yield from self.changes.items()
        yield from ((n, x) for n, x in [*self.options.items()][1:] if self.keeps("", n))

    def errors(self) -> Iterator[tuple[str, Change]]:
        """Each wrong value of a call, by name."""
        for name, values in self.wrong.items():
            for n, value in enumerate(values):
                change = at(name, value) if callable(value) else {name: value}
                yield f"wrong-{name}-{n}", value if isinstance(value, dict) else change

    def cast(self, call: Call, dtype: torch.dtype, learned: set[str] | None = None) -> Call:
        """The call in this dtype, with new leaves."""
        wide = torch.promote_types(dtype, torch.float32)

        def cast(name: str, x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.is_floating_point():
                return x
            of = x.dtype if name in self.fixed else wide if name in self.wide else dtype
            # With the same strides and gaps.
            flat = x.detach().as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
            memory = flat.to(of).as_strided(x.shape, x.stride(), x.storage_offset())
            return memory.requires_grad_(x.requires_grad or name in (learned or ()))

        return {name: cast(name, x) for name, x in call.items()}

    def results(self, call: Call) -> list[Any]:
        """Results, gradients and one second derivative."""
        torch.manual_seed(3)
        results = _listed(self.function(**call))
        if self.written:
            written = [call[name] for name in self.written if name in call]
            return [*results, *((x, x._version) for x in written)]
        if not results[0].requires_grad:
            return results
        leaves = [x for x in call.values() if isinstance(x, Tensor) and x.requires_grad]
        finite = [r.float().nan_to_num(0.0, 0.0, 0.0) for r in results if r.is_floating_point()]
        total = sum((r.sin().sum() for r in finite), torch.zeros(()))
        first = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
        grads = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
        squares = sum(g.square().sum() for g in grads if g is not None)
        return [*results, *first, *grads, *torch.autograd.grad(squares, leaves[:1])]


def _listed(results: Any) -> list[Tensor]:
    return list(results) if isinstance(results, tuple) else [results]


def check(op: Planned, make: Callable[[], Call], plans: Plans, kept: int = 1) -> None:
    """A call makes a plan, and the next one runs it: both have the bits of the complete path."""
    kept += count(plans)
    miss = op.results(make())
    assert count(plans) == kept
    hit = op.results(make())
    assert count(plans) == kept
    complete = without_plans(lambda: op.results(make()))
    needs_grad = [getattr(x, "requires_grad", None) for x in complete]
    for results in (miss, hit):
        assert [getattr(x, "requires_grad", None) for x in results] == needs_grad
        if True in needs_grad and not op.second:
            # Autograd adds up its terms in another order, and the first one decides the strides.
            got, want = results.pop(), complete[-1]
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            if want.dtype is torch.float64:
                assert (got - want).abs().max() <= 1e-10 * want.abs().max()
        overflows = complete[0].dtype is torch.float16
        assert_same(results, complete[: len(results)], equal_nan=overflows, check_stride=True)
