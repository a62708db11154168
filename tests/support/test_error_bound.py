"""The error bound: accepted and rejected results, and equal values on every machine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mutant_judge import severity
from torch import Tensor
from within_bound import assert_right, assert_within_bound

from fastattn import testing
from fastattn.testing import Noise, Target, deviation
from fastattn.testing.judge import SAFETY, Verdict, deviations
from fastattn.testing.rounding import RandomRounding


def noise_of(x: Tensor, dtype: torch.dtype, function: str = "sum") -> float:
    """The noise of a sum, or another reduction, of x."""

    def definition() -> dict[str, Tensor]:
        return {"y": getattr(x, function)(-1)}

    return Noise(definition, definition(), dtype)["y"]


@pytest.mark.parametrize("positive", [True, False], ids=["one sign", "both signs"])
@pytest.mark.parametrize("terms", [4, 30, 250])
def test_the_noise_of_a_sum_equals_sequential_additions(terms: int, positive: bool) -> None:
    """numpy adds one term after the other, in IEEE arithmetic that is the same everywhere."""
    draws = torch.randn(400, terms, generator=torch.Generator().manual_seed(0)).double()
    draws = (draws.abs() if positive else draws).float().double()
    chain = np.zeros(400, dtype=np.float32)
    for n in range(terms):
        chain += draws[:, n].numpy().astype(np.float32)
    error = (torch.from_numpy(chain).double() - draws.sum(-1)).abs().max()
    assert 0.5 < noise_of(draws, torch.float32) / error < 4


def test_the_noise_of_a_softmax_grows_with_the_scores() -> None:
    scores = torch.randn(50, 9, generator=torch.Generator().manual_seed(0)).double()
    small = noise_of(scores, torch.float32, "softmax")
    near = 1000 + scores * 1e-3  # scores that are large and nearly equal
    assert noise_of(near - 1000, torch.float32, "softmax") < 2 * small
    scaled = Noise(lambda: {"y": (near * 1.0).softmax(-1)}, {"y": near.softmax(-1)}, torch.float32)[
        "y"
    ]
    assert scaled > 50 * small


def test_infinity_and_nan_do_not_affect_the_noise() -> None:
    x = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan, 0.0]).double()

    def definition() -> dict[str, Tensor]:
        return {"y": x * 3, "sum": x[None] @ torch.ones(5, 1).double()}

    exact = definition()
    found = Noise(definition, exact, torch.bfloat16)
    assert 0 < found["y"] < 0.1
    with RandomRounding(torch.bfloat16):
        moved = definition()
    assert torch.equal(moved["y"][1:3], exact["y"][1:3])
    assert moved["sum"].isnan().all()
    assert deviation(exact["y"].bfloat16(), exact["y"], found["y"]).ok


@pytest.mark.parametrize(
    "activation", [F.silu, F.gelu, functools.partial(F.gelu, approximate="tanh")]
)
def test_the_steps_of_an_activation_equal_its_definition(activation: Callable[..., Tensor]) -> None:
    """Where each step errs by a hundredth of the eps of float64 or less, forward and backward."""
    x = torch.linspace(-6, 6, 25, dtype=torch.float64)

    def definition() -> dict[str, Tensor]:
        leaf = x.clone().requires_grad_()
        y = activation(leaf)
        (grad,) = torch.autograd.grad(y.square().sum(), leaf)
        return {"y": y.detach(), "grad": grad}

    exact = definition()
    with RandomRounding(torch.float64, magnified=0.01):
        stepwise = definition()
    for name, wanted in exact.items():
        torch.testing.assert_close(stepwise[name], wanted, rtol=1e-13, atol=1e-15)


def test_an_operation_without_a_rule_is_refused() -> None:
    x = torch.rand(3, 3).double()
    with pytest.raises(NotImplementedError, match="no rule for its rounding error"):
        Noise(lambda: {"y": torch.linalg.eigh(x)[0]}, {"y": x[0]}, torch.float32)["y"]
    with pytest.raises(ValueError, match="the definition gives"):
        Noise(lambda: {"z": x}, {"y": x}, torch.float32)["y"]


def test_a_result_beyond_the_bound_is_wrong() -> None:
    x = torch.rand(200, generator=torch.Generator().manual_seed(0)).double() + 1

    def definition() -> dict[str, Tensor]:
        return {"y": x.exp() * 3}

    y = definition()["y"]
    assert_right({"y": y.float()}, definition)
    assert_right({"y": y}, definition, torch.float64)
    found = Noise(definition, definition(), torch.float32)["y"]
    wrong = y.clone()
    wrong[17] += 1.1 * (SAFETY * found + torch.finfo(torch.float32).eps * float(y.max()))
    with pytest.raises(AssertionError, match=r"worst at \[17\].*1 of 200 elements are off"):
        assert_within_bound(wrong.float(), y, found)
    for bad in (torch.nan, torch.inf):
        wrong[17] = bad
        with pytest.raises(AssertionError, match="max error inf"):
            assert_right({"y": wrong.float()}, definition)
    with pytest.raises(ValueError, match=r"shape \[100\], want \[200\]"):
        deviation(y[:100], y, found)
    with pytest.raises(AssertionError, match="want"):
        assert_right({"x": y}, definition)


def test_a_verdict_says_how_clearly_a_result_is_wrong() -> None:
    right, verdict = torch.ones(3).double(), Verdict()
    exact, dtypes = {"y": right}, {"y": torch.float32}
    noise = Noise(lambda: {"y": right * 1.0}, exact, torch.float32)
    verdict.add(deviations({"y": right.float()}, exact, noise, dtypes=dtypes))
    assert verdict.ok
    assert severity(verdict) == 0
    for wrong in (right, right[:2].float()):
        other = Verdict()
        other.add(deviations({"y": wrong}, exact, noise, dtypes=dtypes))
        assert severity(other) == float("inf")
        assert "want torch.float32 [3]" in other.faults[0]
    verdict.add(deviations({"y": right.float() + 1}, exact, noise, dtypes=dtypes))
    assert not verdict.ok
    assert 1e6 < severity(verdict) < 1e8
    verdict.faults.append("query was written to")
    assert severity(verdict) == float("inf")


@dataclass(frozen=True)
class Wrong(Target):
    """The reference, of which one result is slightly wrong."""

    name: str = ""

    def results(self, backend: Any, inputs: Any) -> dict[str, Tensor]:
        found = super().results(backend, inputs)
        found[self.name] = found[self.name] * 1.001
        return found


@pytest.mark.parametrize("operator", testing.PROOFS)
def test_the_judge_finds_any_wrong_result(operator: str) -> None:
    proof = testing.PROOFS[operator]
    case = next(case for case in proof.cases if torch.float32 in case.dtypes)
    _, exact, _ = proof.expected(case, torch.float32)
    for name, x in exact.items():
        if x.any():
            (fault,) = proof(case, torch.float32, Wrong("reference", name=name)).faults
            assert fault.startswith(f"{name} [")


@dataclass(frozen=True)
class Writing(Target):
    """The reference, which writes into the memory before a tensor."""

    def results(self, backend: Any, inputs: Any) -> dict[str, Tensor]:
        inputs.query.as_strided((1,), (1,), 0).zero_()
        return super().results(backend, inputs)


def test_the_judge_finds_writes_outside_tensors() -> None:
    verdict = testing.check(testing.Case("judged"), torch.float32, Writing("reference"))
    assert verdict.faults == ["query was written to"]
