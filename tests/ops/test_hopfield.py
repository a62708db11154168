"""hopfield_retrieve and hopfield_energy: semantics, on every backend and instruction set."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from case_table import refuses, within_the_bound
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fastattn
from fastattn import hopfield_energy, hopfield_retrieve
from fastattn.testing import Target

pytestmark = pytest.mark.filterwarnings("ignore::fastattn.FallbackWarning")

test_case = within_the_bound("hopfield_retrieve")


def step(xi: Tensor, stored: Tensor, beta: float | Tensor, bias: float | Tensor = 0.0) -> Tensor:
    """The equation of the paper."""
    return torch.softmax(beta * (xi @ stored.mT) + bias, -1) @ stored


def test_one_step_by_hand(engine: Target) -> None:
    """Scores 0 and log 3: weights 1/4, 3/4; then 0 and 3/4 log 3."""
    stored = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    state = torch.tensor([[math.log(3.0)]], dtype=torch.float64)
    assert hopfield_retrieve(state, stored, beta=1.0, update_steps_max=0).item() == 0.75
    out = hopfield_retrieve(state, stored, beta=1.0, update_steps_max=1, update_steps_eps=0.0)
    torch.testing.assert_close(out.item(), 1 / (1 + math.exp(-0.75)))


def test_without_steps_it_is_attention(engine: Target, normal: Callable[..., Tensor]) -> None:
    x = normal(2, 3, 5, 4)
    got, weights = hopfield_retrieve(x, x, beta=0.3, update_steps_max=0, need_weights=True)
    want, expected = fastattn.scaled_dot_product_attention(x, x, x, scale=0.3, need_weights=True)
    assert torch.equal(got, want)
    assert torch.equal(weights, expected)


def test_shapes(engine: Target, normal: Callable[..., Tensor]) -> None:
    state, stored = normal(2, 3, 4, 5), normal(2, 3, 6, 5)
    value = normal(2, 3, 6, 7)
    whole = hopfield_retrieve(state, stored, value, need_weights=True, need_steps=True)
    assert [tuple(x.shape) for x in whole] == [(2, 3, 4, 7), (2, 3, 4, 6), (2, 3, 4)]
    for index in ((slice(None), 1), (1, 1)):
        part = hopfield_retrieve(
            state[index], stored[index], value[index], need_weights=True, need_steps=True
        )
        for x, y in zip(part, whole, strict=True):
            torch.testing.assert_close(x, y[index])


def test_converges_to_a_solution(engine: Target, normal: Callable[..., Tensor]) -> None:
    """Well separated patterns are solutions up to the weights of the others."""
    stored = torch.eye(8, dtype=torch.float64)
    state = stored[:3] + 0.2 * normal(3, 8)
    for eps in (1e-2, 1e-6, 0.0):
        out, steps = hopfield_retrieve(
            state, stored, beta=20.0, update_steps_eps=eps, need_steps=True
        )
        torch.testing.assert_close(out, stored[:3], rtol=0, atol=1e-5)
        assert 1 <= steps.min() <= steps.max() < 20


def test_the_number_of_steps_equals_a_loops(engine: Target, normal: Callable[..., Tensor]) -> None:
    """Like a loop that checks every step."""
    state, stored = normal(2, 9, 4), normal(2, 12, 4)
    for limit in (None, 1, 4):
        _, steps = hopfield_retrieve(
            state, stored, beta=1.5, update_steps_max=limit, update_steps_eps=1e-3, need_steps=True
        )
        for b in range(2):
            for i in range(9):
                xi, count = state[b, i], 0
                while count != limit:
                    new = step(xi, stored[b], 1.5)
                    count, by, xi = count + 1, torch.linalg.vector_norm(new - xi), new
                    if by <= 1e-3:
                        break
                assert steps[b, i] == count


@pytest.mark.parametrize("queries", [1, 6])
def test_retrieval_runs_until_convergence(engine: Target, queries: int) -> None:
    """xi <- tanh(xi) comes to 0 like 1 / sqrt(t): over a thousand steps, some of them more."""
    stored = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    state = torch.linspace(0.5, 2.0, queries, dtype=torch.float64)[:, None]
    for limit in (None, 700):
        out, steps = hopfield_retrieve(
            state, stored, beta=1.0, update_steps_max=limit, update_steps_eps=1e-5, need_steps=True
        )
        for start, xi, taken in zip(state[:, 0], out[:, 0], steps, strict=True):
            want, by, count = start.item(), 1.0, 0
            while by > 1e-5 and count != limit:
                new = math.tanh(want)
                want, by, count = new, abs(new - want), count + 1
            assert taken == count
            torch.testing.assert_close(xi.item(), math.tanh(want))
        assert steps.min() > 600


@pytest.mark.parametrize("queries", [3, 20])
def test_stop_of_a_head(engine: Target, queries: int, normal: Callable[..., Tensor]) -> None:
    """All queries of a head stop together, by the norm over the steps of that head alone."""
    state = normal(3, 2, queries, 4)
    for stored in (normal(b, 2, 12, 4) for b in (3, 1)):
        out, steps = hopfield_retrieve(
            state, stored, beta=1.5, update_steps_eps=1e-3, stop="head", need_steps=True
        )
        for b in range(3):
            for h in range(2):
                x, xi, count = stored[b % stored.shape[0], h], state[b, h], 0
                while True:
                    new = step(xi, x, 1.5)
                    count, by, xi = count + 1, torch.linalg.vector_norm(new - xi), new
                    if by <= 1e-3:
                        break
                assert (steps[b, h] == count).all()
                torch.testing.assert_close(out[b, h], step(xi, x, 1.5))


@pytest.mark.parametrize("queries", [2, 40])
def test_a_query_does_not_depend_on_the_others(
    engine: Target, queries: int, normal: Callable[..., Tensor], generator: torch.Generator
) -> None:
    state = normal(4, 2, queries, 6).float()
    stored = normal(4, 2, 30, 6).float()
    whole, steps = hopfield_retrieve(state, stored, beta=1.2, need_steps=True)
    assert steps.max() > steps.min()
    for b in range(4):
        one = hopfield_retrieve(state[b : b + 1], stored[b : b + 1], beta=1.2)
        if engine.backend == "cpu":
            assert torch.equal(one[0], whole[b])
        torch.testing.assert_close(one[0], whole[b], rtol=1e-4, atol=1e-5)
    order = torch.randperm(queries, generator=generator)
    mixed = hopfield_retrieve(state[:, :, order], stored, beta=1.2)
    if engine.backend == "cpu":
        assert torch.equal(mixed, whole[:, :, order])


def test_masks_exclude(
    engine: Target, normal: Callable[..., Tensor], generator: torch.Generator
) -> None:
    """Masked patterns are not read, even if NaN; a fully masked query gives 0."""
    for queries in (2, 9):
        clean = normal(2, 1, 7, 5)
        mask = torch.rand(2, 1, queries, 7, generator=generator) < 0.6
        mask[..., 0], mask[..., 1] = True, False
        mask[0, 0, 0] = False
        dirty = clean.clone()
        dirty[:, :, 1] = math.nan
        state = normal(2, 1, queries, 5).requires_grad_()
        results = []
        for stored in (clean, dirty):
            stored = stored.clone().requires_grad_()
            out = hopfield_retrieve(state, stored, attn_mask=mask, update_steps_max=3)
            grads = torch.autograd.grad(out.sin().sum(), (state, stored))
            results.append((out, *grads))
            assert not out[0, 0, 0].any()
            assert all(torch.isfinite(x).all() for x in results[-1])
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-13)
        seen = torch.softmax((state @ clean.mT * 5**-0.5).masked_fill(~mask, -math.inf), -1)
        got = hopfield_retrieve(state, clean, attn_mask=mask, update_steps_max=0)
        torch.testing.assert_close(got, torch.nan_to_num(seen) @ clean)


@pytest.mark.parametrize("queries", [2, 6])
def test_the_gradient_of_one_step(
    queries: int, backend: str, normal: Callable[..., Tensor]
) -> None:
    """The derivative of the last step at the state that the others reached."""
    state = 0.3 * normal(1, 1, queries, 3)
    stored = (0.5 * normal(1, 1, 4, 3)).requires_grad_()
    bias = normal(queries, 4).requires_grad_()
    beta = torch.tensor([0.6], dtype=torch.float64, requires_grad=True)
    one = functools.partial(step, stored=stored[0, 0], beta=beta, bias=bias)
    with torch.no_grad():
        before = one(one(state[0, 0]))
    last = one(one(before))  # the second reads the patterns
    options: dict[str, Any] = {"update_steps_max": 3, "update_steps_eps": 0.0, "grad": "one_step"}
    got = hopfield_retrieve(state, stored, beta=beta, attn_mask=bias, **options)[0, 0]
    torch.testing.assert_close(got, last)
    pairs = (torch.autograd.grad(y.sin().sum(), (stored, bias, beta)) for y in (got, last))
    torch.testing.assert_close(*pairs)


def test_gradient_of_the_state(engine: Target, normal: Callable[..., Tensor]) -> None:
    """The initial state changes the result of a few steps, but not the solution."""
    stored = normal(5, 4)
    state = (0.1 * normal(3, 4)).requires_grad_()
    for grad, zero in (("unroll", False), ("one_step", True), ("implicit", True)):
        out = hopfield_retrieve(state, stored, beta=0.5, grad=grad)
        (gradient,) = torch.autograd.grad(out.sum(), state)
        assert (not gradient.any()) == zero


def test_implicit_falls_back_to_unrolling(engine: Target, normal: Callable[..., Tensor]) -> None:
    """If a query has not converged, and at a saddle, where 1 - J is not positive definite."""
    stored = normal(9, 4).requires_grad_()
    state = normal(3, 4)
    results = []
    for grad in ("unroll", "implicit"):
        out = hopfield_retrieve(state, stored, beta=1.0, update_steps_max=2, grad=grad)
        results.append(torch.autograd.grad(out.sin().sum(), stored)[0])
    assert torch.equal(*results)

    saddle = torch.tensor([[1.0], [-1.0]], dtype=torch.float64, requires_grad=True)
    middle = torch.zeros(1, 1, dtype=torch.float64)
    results = []
    for grad in ("unroll", "implicit"):
        out, steps = hopfield_retrieve(middle, saddle, beta=4.0, grad=grad, need_steps=True)
        assert steps.item() == 1
        results.append(torch.autograd.grad(out.sum(), saddle)[0])
    assert results[0].abs().sum() > 0
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("dtype", "high", "close"), [(torch.float32, 500.0, 2e-3), (torch.float64, 5000.0, 1e-9)]
)
@pytest.mark.parametrize("queries", [3, 40])
def test_a_bias_common_to_all_changes_nothing(
    engine: Target,
    queries: int,
    dtype: torch.dtype,
    high: float,
    close: float,
    normal: Callable[..., Tensor],
) -> None:
    """Even if its exponential is infinite, beside queries that converge before others."""
    state = normal(2, queries, 5).to(dtype)
    stored = normal(2, 9, 5).to(dtype).requires_grad_()
    results = []
    for shape in (None, (9,), (queries, 9)):
        bias = None if shape is None else torch.full(shape, high, dtype=dtype)
        out, steps = hopfield_retrieve(
            state, stored, beta=1.5, attn_mask=bias, update_steps_eps=0.1, need_steps=True
        )
        assert steps.max() > steps.min()
        results.append((out, *torch.autograd.grad(out.sin().sum(), stored)))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=close, atol=close)


def test_nan_ends_the_search(engine: Target) -> None:
    """The search ends."""
    state, stored = torch.zeros(2, 3), torch.ones(4, 3)
    state[0] = math.nan
    out = hopfield_retrieve(state, stored, beta=1.0)
    assert out[0].isnan().all()
    assert torch.isfinite(out[1]).all()


def test_dropout_applies_to_the_final_read(engine: Target, normal: Callable[..., Tensor]) -> None:
    x = normal(1, 2, 30, 5)
    torch.manual_seed(3)
    whole, weights = hopfield_retrieve(x, x, beta=3.0, dropout_p=0.5, need_weights=True)
    kept, steady = hopfield_retrieve(x, x, beta=3.0, need_weights=True)
    assert ((weights == 0) | ((weights / steady - 2).abs() < 1e-2)).all()
    assert not torch.allclose(whole, kept)


# --- the energy ----------------------------------------------------------------------------------


def test_energy_by_hand(engine: Target) -> None:
    stored = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    state = torch.tensor([[3.0, 0.5]], dtype=torch.float64)
    lse = math.log(math.exp(0.5 * 3.0) + math.exp(0.5 * 1.0))
    want = -lse / 0.5 + (9 + 0.25) / 2 + math.log(2) / 0.5 + 4 / 2
    torch.testing.assert_close(hopfield_energy(state, stored, beta=0.5).item(), want)


def test_energy_of_a_beta_whose_inverse_overflows(engine: Target) -> None:
    state, stored = torch.ones(1, 2), torch.ones(3, 2)
    energy = hopfield_energy(state, stored, beta=1e-45)
    assert float(energy) == 0  # (|state|^2 + |stored|^2) / 2 - the mean score


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1e-4, 1.0, 30.0])
def test_energy_of_a_small_beta(
    engine: Target, normal: Callable[..., Tensor], size: float, dtype: torch.dtype
) -> None:
    """By its series in beta: the mean score is of order 0, half of the variance of order 1."""
    state, stored = ((size * normal(n, 7)).to(dtype) for n in (5, 9))
    x, y = state.double(), stored.double()
    scores = x @ y.T
    norms = x.square().sum(1) / 2 + y.square().sum(1).max() / 2
    for beta in (1e-300, 1e-40, 1e-20, 1e-10):
        expected = norms - scores.mean(1) - beta * scores.var(1, correction=0) / 2
        for same in (beta, torch.tensor(beta, dtype=torch.float64)):
            found = hopfield_energy(state, stored, beta=same)
            error = (found - expected).abs().max() / expected.abs().max()
            assert error < (1e-7 if dtype is torch.float64 else 3e-7)


def test_energy_under_autocast_takes_dtypes_that_differ(engine: Target) -> None:
    state, stored = (torch.arange(n).view(-1, 3) / 4 for n in (6.0, 15.0))
    mask = torch.zeros(2, 5)
    with torch.autocast("cpu", torch.bfloat16):
        expected = hopfield_energy(state, stored, attn_mask=mask)
        for lower in (torch.bfloat16, torch.float16):
            found = hopfield_energy(state.to(lower), stored, attn_mask=mask.to(lower))
            assert torch.equal(found, expected)


def test_energy_of_visible_patterns(engine: Target, normal: Callable[..., Tensor]) -> None:
    stored = normal(2, 6, 4)
    state = normal(2, 3, 4)
    mask = torch.ones(2, 3, 6, dtype=torch.bool)
    mask[0, 0, 4:] = False
    mask[1, 1] = False
    energy = hopfield_energy(state, stored, beta=0.8, attn_mask=mask)
    assert energy[1, 1] == math.inf
    part = hopfield_energy(state[0, :1], stored[0, :4], beta=0.8)
    torch.testing.assert_close(energy[0, :1], part)
    bias = torch.where(mask, 0.0, -math.inf).double()
    torch.testing.assert_close(hopfield_energy(state, stored, beta=0.8, attn_mask=bias), energy)


def test_a_step_descends_the_gradient(engine: Target, normal: Callable[..., Tensor]) -> None:
    """grad E = xi - f(xi), for a number and for a beta of each head."""
    state = normal(2, 3, 5, 4).requires_grad_()
    stored = normal(2, 3, 7, 4)
    for beta in (0.8, torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)):
        energy = hopfield_energy(state, stored, beta=beta)
        (gradient,) = torch.autograd.grad(energy.sum(), state)
        step = hopfield_retrieve(state, stored, beta=beta, update_steps_max=0)
        torch.testing.assert_close(gradient, state - step)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    width=st.integers(1, 20),
    rows=st.integers(1, 40),
    queries=st.integers(1, 12),
    beta=st.floats(0.05, 30.0),
    size=st.floats(0.1, 5.0),
)
def test_energy_never_increases(
    seed: int, width: int, rows: int, queries: int, beta: float, size: float
) -> None:
    draw = torch.Generator().manual_seed(seed)
    state = size * torch.randn(queries, width, dtype=torch.float64, generator=draw)
    stored = size * torch.randn(rows, width, dtype=torch.float64, generator=draw)
    before = hopfield_energy(state, stored, beta=beta)
    scale = before.abs().max() + state.square().sum(-1).max() + stored.square().sum(-1).max()
    for _ in range(6):
        state = hopfield_retrieve(state, stored, beta=beta, update_steps_max=0)
        after = hopfield_energy(state, stored, beta=beta)
        assert (after <= before + 1e-13 * (scale + 1 / beta)).all()
        assert (after >= -1e-13 * (scale + 1 / beta)).all()  # the paper's lemma A1
        before = after


# --- what is refused ---------------------------------------------------------------------------


def test_explain_names_the_backend() -> None:
    x = torch.zeros(2, 3)
    assert fastattn.explain("hopfield_retrieve", x, x).op == "hopfield_retrieve"
    attention = fastattn.explain("hopfield_retrieve", x, x, update_steps_max=0)
    assert attention.op == "scaled_dot_product_attention"


S, X = torch.zeros(2, 3, 4), torch.zeros(2, 6, 4)
BAD = [
    (([1.0], X), {}, TypeError, "state must be a Tensor, got list"),
    ((S.long(), X), {}, TypeError, "state must be float32, float64, bfloat16 or float16"),
    ((torch.zeros(4), X), {}, ValueError, r"state must be \[L, D\], \[B, L, D\] or \[B, H, L, D\]"),
    ((S, X.double()), {}, TypeError, "stored must have state's dtype torch.float32"),
    ((S, X.to("meta")), {}, ValueError, "stored is on meta, but state is on cpu"),
    ((S, X[0]), {}, ValueError, r"stored must be \[B, N, D\] \(B may be 1\), got \(6, 4\)"),
    ((S, torch.zeros(3, 6, 4)), {}, ValueError, "stored must be"),
    ((S, torch.zeros(2, 6, 5)), {}, ValueError, "stored must be"),
    ((S, X, 1.0), {}, TypeError, "projection must be a Tensor, got float"),
    ((S, X, torch.zeros(2, 5, 4)), {}, ValueError, "projection must have the shape of stored"),
    ((S, X), {"beta": "1"}, TypeError, "beta must be a number or a Tensor, got str"),
    ((S, X), {"beta": 0.0}, ValueError, "beta must be positive and at most 3.4e.38, got 0.0"),
    ((S, X), {"beta": math.nan}, ValueError, "beta must be positive and at most 3.4e.38, got nan"),
    ((S, X), {"beta": 1e39}, ValueError, "beta must be positive and at most 3.4e.38, got 1e.39"),
    ((S, X), {"beta": torch.ones(3)}, ValueError, r"beta must be \[\] or \[H\] = \(1,\)"),
    ((S, X), {"beta": torch.ones(1).long()}, TypeError, "beta must be floating"),
    ((S, X), {"update_steps_max": -1}, ValueError, "update_steps_max must not be negative, got -1"),
    ((S, X), {"update_steps_max": 1.5}, TypeError, "update_steps_max must be an int or None"),
    ((S, X), {"update_steps_eps": -1.0}, ValueError, "update_steps_eps must not be negative"),
    ((S, X), {"update_steps_eps": None}, TypeError, "update_steps_eps must be a number"),
    ((S, X), {"stop": "batch"}, ValueError, "stop must be one of query, head, got 'batch'"),
    ((S, X), {"grad": "none"}, ValueError, "grad must be one of unroll, implicit, one_step"),
    (
        (S, X),
        {"attn_mask": torch.ones(3, 6).int()},
        TypeError,
        "attn_mask must be bool, of state's",
    ),
    ((S, X), {"attn_mask": torch.ones(3, 5)}, ValueError, "attn_mask must be broadcastable"),
    ((S, X), {"need_steps": 1}, TypeError, "need_steps must be a bool, got int"),
]


test_errors = refuses(hopfield_retrieve, BAD, "hopfield_retrieve: ")


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


def test_saved_memory_does_not_grow_with_the_steps() -> None:
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
