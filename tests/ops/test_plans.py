"""Plans of every operator: their results equal the complete path's, and no call reuses the plan of
another signature. The calls are in tests/support/plan_cases.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plan_cases import OPERATORS
from plan_cases_of_memory import MEMORY_HOPS
from planned import Call, Planned, assert_same, changed, check, count, fresh, without_plans
from torch import Tensor

import fastattn
from fastattn.call import Plans

pytestmark = pytest.mark.usefixtures("seeded", "native")


@pytest.fixture
def plans(op: Planned, monkeypatch: pytest.MonkeyPatch) -> Plans:
    """The plans of the operator, empty at first."""
    return fresh(monkeypatch, op.function)


def each(entries: Callable[[Planned], Any]) -> Any:
    """Each operator with each of its entries, which begin with their names."""
    rows = [(op, *entry) for op in OPERATORS for entry in entries(op)]
    return pytest.mark.parametrize(
        ("op", "name", "entry"), rows, ids=[f"{op}-{name}" for op, name, _ in rows]
    )


# --- the same bits --------------------------------------------------------------------------------


@each(lambda op: op.cases() if op is not MEMORY_HOPS else ())
def test_a_hit_has_the_bits_of_the_complete_path(
    op: Planned, name: str, entry: tuple[str, str, torch.dtype], plans: Plans
) -> None:
    form, option, dtype = entry

    def make() -> Call:
        torch.manual_seed(5)
        return changed(changed(op.make(), op.forms[form]), op.options[option])

    learned = op.learned(make())
    for names in learned if op.crossed or form else learned[:1]:
        check(op, lambda: op.cast(make(), dtype, names), plans, op.keeps(form, option))  # noqa: B023


@pytest.mark.parametrize("dtype", MEMORY_HOPS.dtypes, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("option", MEMORY_HOPS.options)
@pytest.mark.parametrize("form", MEMORY_HOPS.forms)
@pytest.mark.parametrize("op", [MEMORY_HOPS], ids=str)
@pytest.mark.sampled
def test_a_hit_of_memory_hops_has_the_bits_of_the_complete_path(
    op: Planned, form: str, option: str, dtype: torch.dtype, plans: Plans
) -> None:
    test_a_hit_has_the_bits_of_the_complete_path(op, "", (form, option, dtype), plans)


@pytest.mark.parametrize("op", OPERATORS, ids=str)
def test_sizes_share_a_plan(op: Planned, plans: Plans) -> None:
    for calls in op.sizes():
        plans._plans.clear()
        for call in calls:
            results = op.function(**call)
            with fastattn.use_backend("reference"):
                torch.testing.assert_close(results, op.function(**call))
        assert count(plans) == 1


@each(Planned.facts)
def test_each_fact_makes_a_new_plan(op: Planned, name: str, entry: Any, plans: Plans) -> None:
    right = {**op.make(), **op.base}
    op.function(**right)
    assert count(plans) == 1
    call = changed(right, entry)

    def run() -> Any:
        torch.manual_seed(3)
        return op.function(**call)

    for _ in range(2):
        results = run()
        assert count(plans) == 2
    assert_same(results, without_plans(run))


@each(lambda op: op.leaving.items())
def test_calls_without_a_plan(op: Planned, name: str, entry: Any, plans: Plans) -> None:
    """They have no plan, and use no other call's, which may differ by strides alone."""
    right = {**op.make(), **op.base}
    call = changed(right, entry)
    for kept in (0, 1):
        for has_gradient in (True, False, True):
            with torch.set_grad_enabled(has_gradient):
                results = op.function(**call)
                assert_same(results, without_plans(lambda: op.function(**call)))
                assert count(plans) == kept
        op.function(**right)


@each(Planned.errors)
def test_an_error_is_raised_by_every_call(op: Planned, name: str, entry: Any, plans: Plans) -> None:
    call = op.make()
    for given in op.valid:
        right = {**call, **given}
        op.function(**right)
    kept, wrong = count(plans), changed(right, entry)
    before = [wrong[name].clone() for name in op.written if name in wrong]

    def error() -> tuple[type[BaseException], str]:
        with pytest.raises((IndexError, RuntimeError, TypeError, ValueError)) as caught:
            op.function(**wrong)
        return caught.type, str(caught.value)

    assert error() == error() == without_plans(error)
    assert name.split("-")[1] in error()[1]
    assert count(plans) == kept == len(op.valid)
    assert_same([wrong[name] for name in op.written if name in wrong], before)


MODES: dict[str, tuple[Callable[[], Any], int]] = {  # with their new plans
    "no-gradient": (torch.no_grad, 0),
    "inference": (torch.inference_mode, 0),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), 0),
    "reference": (lambda: fastattn.use_backend("reference"), 0),
    "cpu": (lambda: fastattn.use_backend("cpu"), 1),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", OPERATORS, ids=str)
def test_every_call_checks_modes_and_backends(op: Planned, mode: str, plans: Plans) -> None:
    """Whether the plan was made within the mode or outside."""
    inside, kept = MODES[mode]
    call = op.cast({**op.make(), **op.base}, torch.float32, {*op.wants[0].split()})
    before = {name: x.clone() for name, x in call.items() if isinstance(x, Tensor)}

    def run(within: Callable[[], Any]) -> tuple[Tensor, list[Any]]:
        with within():
            results = op.function(**call)
        out = results[0] if isinstance(results, tuple) else results
        return out.detach(), [out.dtype, out.requires_grad, out.is_inference()]

    want = {}
    for within in (torch.enable_grad, inside):
        plans._plans.clear()
        want[within] = run(within)
    first = count(plans)
    for within in (torch.enable_grad, inside, torch.enable_grad, inside):
        out, facts = run(within)
        assert torch.equal(out, want[within][0])
        assert facts == want[within][1]
    assert count(plans) == 1 + kept
    assert first == (mode not in ("autocast", "reference"))
    for name, x in before.items():
        assert torch.equal(x, call[name])
