"""hopfield_retrieve: every kernel against extended precision, in hostile memory; transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fenced
import pytest
import torch
from child_process import in_fork
from torch import Tensor

import fastattn
from fastattn import hopfield_energy, hopfield_retrieve
from fastattn.testing import Target
from fastattn.testing.hopfield import (
    HOPFIELD_CASES,
    HopfieldCase,
    check_hopfield,
    make_hopfield_inputs,
)
from fastattn.testing.memory import LAYOUTS, Watch

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
pytestmark = pytest.mark.filterwarnings("ignore::fastattn.FallbackWarning")


@pytest.mark.sampled
@pytest.mark.parametrize("case", HOPFIELD_CASES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_within_the_bound(target: Target, case: HopfieldCase, dtype: torch.dtype) -> None:
    verdict = check_hopfield(case, dtype, target)
    assert verdict.deviations
    assert not verdict.faults, verdict.faults


# Groups shared among threads, chunks of one memory, panels of queries.
SCHEDULES = [
    HopfieldCase(batch=20, queries=1, rows=50, width=20),
    HopfieldCase(batch=1, heads=1, queries=2, rows=2500, width=40, mask="LN"),
    HopfieldCase(batch=90, heads=1, queries=1, rows=1100, width=24, shared=True),
    HopfieldCase(queries=70, rows=300, width=33, bias="BHLN"),
]


@pytest.mark.parametrize("case", SCHEDULES, ids=str)
def test_threads_give_the_same_bits(
    target: Target, case: HopfieldCase, same_for_any_threads: Any
) -> None:
    inputs = make_hopfield_inputs(case, torch.float32)
    inputs.options["update_steps_eps"] = 0.3  # so that some rest before others
    same_for_any_threads(lambda: inputs.results())


LAID = [
    HopfieldCase(queries=3, rows=20, width=18, bias="BHLN", projection=True),
    HopfieldCase(queries=9, rows=40, width=13, mask="BHLN"),
]


@pytest.mark.parametrize("case", LAID, ids=["stream", "panels"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if not name.startswith("expanded")])
def test_any_strides(layout: str, case: HopfieldCase) -> None:
    for dtype, close in ((torch.float32, 1e-5), (torch.float16, 4e-3)):  # attention has two kernels
        want = make_hopfield_inputs(case, dtype).results()
        inputs = make_hopfield_inputs(case, dtype, layout)
        watch = Watch(**{n: x for n, x in inputs.tensors.items() if isinstance(x, Tensor)})
        got = inputs.results()
        assert not watch.written()
        for name, x in got.items():
            torch.testing.assert_close(x, want[name], rtol=close, atol=close)


def test_nothing_is_read_past_the_end(target: Target) -> None:
    """Every tensor ends where memory ends: one read more and the child dies."""

    def child() -> bool:
        fenced.everywhere()
        torch.set_num_threads(1)
        for case in (*LAID, *SCHEDULES[2:], *HOPFIELD_CASES[:2], HOPFIELD_CASES[-1]):
            for dtype in (torch.float32, torch.float16):
                make_hopfield_inputs(case, dtype).results()
        return True

    in_fork(child, timeout=120)


GRADS = ("unroll", "one_step", "implicit")

# --- transforms ----------------------------------------------------------------------------------


@pytest.fixture
def inputs(normal: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """State and stored patterns."""
    return normal(2, 2, 3, 4), 0.6 * normal(2, 2, 5, 4)


def test_compiles_with_patterns_for_all(backend: str, inputs: tuple[Tensor, Tensor]) -> None:
    torch._dynamo.reset()

    def f(state: Tensor, stored: Tensor) -> Tensor:
        out, steps = hopfield_retrieve(state, stored, beta=0.5, stop="head", need_steps=True)
        return out * steps[..., None] + hopfield_energy(out, stored)[..., None]

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    one = inputs[1][:1]
    torch.testing.assert_close(compiled(inputs[0], one), f(inputs[0], one))


@pytest.mark.parametrize("grad", GRADS)
def test_hessian(grad: str, inputs: tuple[Tensor, Tensor]) -> None:
    state, stored = (x[:1, :1] for x in inputs)

    def loss(stored: Tensor) -> Tensor:
        out = hopfield_retrieve(state, stored, beta=0.5, grad=grad, update_steps_eps=1e-9)
        return out.sum()  # type: ignore[no-any-return]

    hessian = torch.func.jacrev(torch.func.grad(loss))(stored).view(20, 20)
    assert torch.isfinite(hessian).all()
    if grad != "one_step":  # that is the gradient of no function
        torch.testing.assert_close(hessian, hessian.mT, rtol=1e-5, atol=1e-7)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_operator_is_registered_rightly(backend: str, requires_grad: bool) -> None:
    operator = torch.ops.fastattn.hopfield_retrieve.default
    for dtype, grads in ((torch.float32, GRADS), (torch.bfloat16, GRADS[:1])):

        def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(*shape).to(dtype).requires_grad_(requires_grad)

        state, stored = draw(2, 3, 4), draw(2, 5, 4)
        mask = torch.ones(2, 1, 5, dtype=torch.bool)
        for grad in grads:
            options = (0.5, 2, 0.0, 1, False, grad, "")
            torch.library.opcheck(operator, (state, stored, None, mask, None, *options))
            if grad == "implicit":
                keys = stored.detach().clone().requires_grad_(requires_grad)
                torch.library.opcheck(
                    operator, (state, stored, keys, None, draw(1, 3, 5), *options)
                )


def test_what_is_saved_does_not_grow_with_the_steps() -> None:
    """Beyond the few steps whose states are kept."""
    state, stored = torch.randn(1, 1, 4, 3, requires_grad=True), torch.randn(1, 1, 50, 3)
    sizes = []
    for steps in (5, 40):
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda s: s):
            fastattn.hopfield_retrieve(
                state, stored, beta=0.1, update_steps_max=steps, update_steps_eps=0.0
            )
        sizes.append(sum(x.numel() for x in saved))
    assert sizes[0] == sizes[1]
