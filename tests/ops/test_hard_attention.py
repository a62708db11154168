"""hard_attention: its draws, their frequencies, and the gradients of the estimators."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from case_table import refuses
from torch import Tensor
from torch.autograd import gradgradcheck
from within_bound import assert_right

from fastattn import hard_attention

ESTIMATORS = ["reinforce", "straight_through", "gumbel"]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_output_is_one_visible_value(
    backend: str, estimator: str, normal: Callable[..., Tensor], generator: torch.Generator
) -> None:
    q, k = normal(2, 3, 40, 5), normal(2, 3, 7, 5)
    value = normal(2, 3, 7, 4)
    mask = torch.rand(2, 1, 40, 7, generator=generator) < 0.5
    mask[0, 0, 0] = False
    result = hard_attention(
        q, k, value, mask, estimator=estimator, generator=generator, need_weights=True
    )
    out, weights = result[0], result[-1]
    seen = mask.any(-1).expand(2, 3, 40)
    assert ((weights == 0) | (weights == 1)).all()
    torch.testing.assert_close(weights.sum(-1), seen.double())
    assert not weights[~mask.expand_as(weights)].any()
    torch.testing.assert_close(out, weights @ value)
    assert not out[0, :, 0].any()


def test_draws_with_the_probability_of_attention(
    backend: str, normal: Callable[..., Tensor], generator: torch.Generator
) -> None:
    """The frequencies of 20000 draws, within five standard deviations."""
    q, k = normal(1, 5), normal(4, 5)
    bias = normal(1, 4)
    p = torch.softmax(q @ k.T / math.sqrt(5) + bias, -1)[0]
    n = 20_000
    _, log_prob, weights = hard_attention(
        q.expand(n, 5), k, k, bias, generator=generator, need_weights=True
    )
    limit = 5 * (p * (1 - p) / n).sqrt()
    assert ((weights.mean(0) - p).abs() < limit).all()
    torch.testing.assert_close(log_prob, torch.log(p)[weights.argmax(-1)])


def test_deterministic_takes_the_most_probable(backend: str, normal: Callable[..., Tensor]) -> None:
    q, k = normal(9, 5), normal(7, 5)
    for estimator in ("straight_through", "gumbel"):
        out = hard_attention(q, k, k, estimator=estimator, deterministic=True)
        torch.testing.assert_close(out, k[(q @ k.T).argmax(-1)])


def test_reinforce_has_the_derivative_of_the_logarithm(
    backend: str, normal: Callable[..., Tensor], generator: torch.Generator
) -> None:
    q, k = (normal(n, 5).requires_grad_() for n in (6, 4))
    bias = normal(6, 4).requires_grad_()
    value = normal(4, 3).requires_grad_()
    out, log_prob, weights = hard_attention(
        q, k, value, bias, generator=generator, need_weights=True
    )
    assert log_prob.dtype == torch.float64
    logs = torch.log_softmax(q @ k.T / math.sqrt(5) + bias, -1)
    want = (logs * weights).sum(-1)
    torch.testing.assert_close(log_prob, want)
    for got, expected in zip(
        torch.autograd.grad(log_prob.sin().sum(), (q, k, bias)),
        torch.autograd.grad(want.sin().sum(), (q, k, bias)),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)
    found = torch.autograd.grad(out.sum(), (q, value), allow_unused=True)
    assert found[0] is None
    torch.testing.assert_close(found[1], weights.sum(0)[:, None].expand(4, 3))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_gradients_of_the_estimators(
    backend: str, temperature: float, normal: Callable[..., Tensor], generator: torch.Generator
) -> None:
    """By their definitions: one_hot + y - y.detach(), with the noise that was drawn."""
    q, k = (normal(n, 5).requires_grad_() for n in (6, 4))
    value = normal(4, 3).requires_grad_()
    weight = normal(6, 3)
    for estimator in ("straight_through", "gumbel"):
        scores = q @ k.T / math.sqrt(5)
        seed = torch.Generator().manual_seed(3)
        noise = torch.empty(6, 4, dtype=torch.float64).exponential_(generator=seed)
        logits = scores
        if estimator == "gumbel":
            logits = (scores - torch.log(noise)) / temperature
        y = torch.softmax(logits, -1)
        one = torch.nn.functional.one_hot((scores - torch.log(noise)).argmax(-1), 4).double()
        want = (one + y - y.detach()) @ value
        got = hard_attention(
            q, k, value, estimator=estimator, temperature=temperature,
            generator=seed.manual_seed(3),
        )  # fmt: skip
        torch.testing.assert_close(got, want)
        pairs = (torch.autograd.grad((x * weight).sum(), (q, k, value)) for x in (got, want))
        torch.testing.assert_close(*pairs)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_second_derivatives(backend: str, estimator: str, normal: Callable[..., Tensor]) -> None:
    q, k = (normal(n, 3).requires_grad_() for n in (3, 4))
    bias = normal(3, 4).requires_grad_()
    weight = normal(3, 3)

    def run(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
        result = hard_attention(
            q, k, k, bias, estimator=estimator, deterministic=True, temperature=0.5
        )
        return result[1] if estimator == "reinforce" else (result * weight).sum()

    if estimator == "reinforce":  # its gradient is the derivative of a function
        gradgradcheck(run, (q, k, bias))
        return
    logits = (q @ k.T / math.sqrt(3) + bias) / (0.5 if estimator == "gumbel" else 1.0)
    soft = (torch.softmax(logits, -1) @ k.detach() * weight).sum()
    found = []
    for out in (run(q, k, bias), soft):
        first = torch.autograd.grad(out, (q, bias), create_graph=True)
        found.append(torch.autograd.grad(sum(x.sin().sum() for x in first), (q, k, bias)))
    torch.testing.assert_close(*found)


def test_sixteen_bits(backend: str, normal: Callable[..., Tensor]) -> None:
    """The key is chosen by the rounded inputs in float32."""
    q, k = (normal(n, 16).bfloat16() for n in (50, 300))
    out, log_prob = hard_attention(q, k, k, deterministic=True)

    def definition() -> dict[str, Tensor]:
        return {"log_prob": torch.log_softmax(q.double() @ k.double().T / 4, -1).amax(-1)}

    assert torch.equal(out, k[(q.double() @ k.double().T).argmax(-1)])
    assert_right({"log_prob": log_prob}, definition, torch.bfloat16)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_row_with_a_visible_nan_is_nan(
    backend: str, estimator: str, deterministic: bool, normal: Callable[..., Tensor]
) -> None:
    q, k, v = (x.requires_grad_() for x in (normal(4, 5), normal(7, 5), normal(7, 2)))
    k.data[3] = math.nan
    mask = torch.ones(4, 7, dtype=torch.bool)
    mask[2, 3] = False
    sees = torch.tensor([True, True, False, True])
    results = hard_attention(
        q, k, v, mask, estimator=estimator, deterministic=deterministic, need_weights=True
    )
    for x in results:
        rows = x.isnan().reshape(4, -1)
        assert torch.equal(rows.all(1), sees)
        assert torch.equal(rows.any(1), sees)
    of_value, of_query = torch.autograd.grad(sum(x.sum() for x in results), (v, q))
    assert of_value.isnan().any()
    assert torch.equal(of_query.isnan().any(1), sees)


def test_a_seed_determines_the_draw(backend: str) -> None:
    x = torch.randn(2, 9, 5)
    torch.manual_seed(1)
    first = hard_attention(x, x, x, estimator="gumbel")
    torch.manual_seed(1)
    assert torch.equal(hard_attention(x, x, x, estimator="gumbel"), first)
    assert not torch.equal(hard_attention(x, x, x, estimator="gumbel"), first)


def test_sizes_may_be_zero(backend: str) -> None:
    for batch, queries, keys in ((0, 2, 3), (2, 0, 3), (2, 2, 0)):
        q, k = torch.ones(batch, queries, 4), torch.ones(batch, keys, 4)
        for estimator in ("reinforce", "straight_through", "gumbel"):
            result = hard_attention(q, k, k, estimator=estimator, need_weights=True)
            assert result[0].shape == (batch, queries, 4)
            assert result[-1].shape == (batch, queries, keys)


X = torch.zeros(2, 3, 4)
LEARNED = torch.ones((), requires_grad=True)
BAD = [
    (([1.0], X, X), TypeError, "query must be a Tensor, got list"),
    ((X, X[:1], X), ValueError, "must have the same leading dimensions"),
    ((X, X, X[:, :2]), ValueError, "the same number of rows"),
    ((X, X, X), {"estimator": "rebar"}, ValueError, "estimator must be one of reinforce"),
    ((X, X, X), {"temperature": 0.0}, ValueError, "temperature must be positive, got 0.0"),
    ((X, X, X), {"temperature": "1"}, TypeError, "temperature must be a number, got str"),
    ((X.to_sparse(), X, X), TypeError, "query must be a dense tensor, got a sparse_coo"),
    ((X, X, X, 1), TypeError, "attn_mask must be a Tensor, got int"),
    ((X, X, X), {"scale": LEARNED}, TypeError, "scale is a constant"),
    ((X, X, X), {"deterministic": 1}, TypeError, "'deterministic' must be bool, not int"),
    ((X, X, X), {"need_weights": None}, TypeError, "'need_weights' must be bool, not NoneType"),
    ((X, X, X), {"generator": 0}, TypeError, "'generator' must be torch.Generator, not int"),
]
test_errors = refuses(hard_attention, BAD, r"hard_attention(\(\))?: (.* )?")
