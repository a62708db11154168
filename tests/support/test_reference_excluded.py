"""The reference of attention: excluded pairs, non-finite numbers and empty dimensions."""

from __future__ import annotations

import math

import pytest
import torch
from reference_calls import INF, NAN, SEED, attend, normal, row, with_scores
from torch import Tensor

pytestmark = pytest.mark.without_kernels


def gradients(loss: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_a_fully_masked_row(kind: str) -> None:
    q, k, v = (
        x.requires_grad_() for x in (normal(1, 1, 3, 2), normal(1, 1, 4, 2), normal(1, 1, 4, 2))
    )
    seen = torch.ones(1, 1, 3, 4, dtype=torch.bool)
    seen[0, 0, 1] = False
    mask = seen if kind == "bool" else torch.where(seen, 0.5, -INF).double().requires_grad_()
    out, lse, w = attend(q, k, v, mask)
    assert torch.equal(out[0, 0, 1], torch.zeros(2, dtype=torch.float64))
    assert torch.equal(w[0, 0, 1], torch.zeros(4, dtype=torch.float64))
    assert lse[0, 0, 1].item() == -INF
    leaves = [q, k, v] + ([mask] if kind == "additive" else [])
    # even an infinite gradient of that row must end there
    into = torch.ones_like(out)
    into[0, 0, 1] = INF
    grads = torch.autograd.grad((out, lse), leaves, (into, torch.ones_like(lse)))
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert torch.equal(grads[0][0, 0, 1], torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_what_no_query_sees_never_leaks(bad: float, softcap: float) -> None:
    q, k, v = normal(1, 2, 3, 2), normal(1, 2, 4, 2), normal(1, 2, 4, 2)
    mask = torch.tensor([True, True, False, False]).view(1, 1, 1, 4)

    def run(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        results = attend(*leaves, mask, softcap=softcap)
        loss = sum((x**2).sum() for x in results)
        return (*results, *gradients(loss, *leaves))  # type: ignore[arg-type]

    bad_k, bad_v = k.clone(), v.clone()
    bad_k[:, :, 2:], bad_v[:, :, 2:] = bad, bad
    for clean, dirty in zip(run(k, v), run(bad_k, bad_v), strict=True):
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["key", "value"])
def test_what_some_queries_see_reaches_only_those(bad: float, where: str) -> None:
    q, k, v = normal(1, 2, 5, 2), normal(1, 2, 5, 2), normal(1, 2, 5, 3)
    clean = attend(q, k, v, window_right=0)
    (k if where == "key" else v)[:, :, 3] = bad  # queries 3 and 4 see it
    leaves = [x.requires_grad_() for x in (q, k, v)]
    dirty = attend(*leaves, window_right=0)
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a[:, :, :3], b[:, :, :3])
    if where == "value":  # as IEEE has it: a visible value carries its weight
        assert torch.equal(dirty[0][:, :, 3:], torch.full_like(dirty[0][:, :, 3:], bad)) or (
            math.isnan(bad) and dirty[0][:, :, 3:].isnan().all()
        )
    loss = sum((x[:, :, :3] ** 2).sum() for x in dirty)
    assert isinstance(loss, Tensor)
    # zero gradients into rows 3 and 4 meet NaN weights there: only dq of the rows before is theirs
    assert torch.isfinite(gradients(loss, *leaves)[0][:, :, :3]).all()


def test_a_visible_nan_is_not_hidden() -> None:
    q, k, v = normal(1, 1, 2, 2), normal(1, 1, 3, 2), normal(1, 1, 3, 2)
    v[0, 0, 1, 0] = NAN
    mask = torch.tensor([[True, True, True], [True, False, True]]).view(1, 1, 2, 3)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, mask)[0]
    assert out.isnan()[0, 0].tolist() == [[True, False], [False, False]]
    grad_q = gradients(out.sum(), *leaves)[0]
    assert grad_q.isnan().any(-1)[0, 0].tolist() == [True, False]


def test_opposite_infinities_make_nan() -> None:
    v = torch.tensor([INF, -INF, 1.0], dtype=torch.float64).view(1, 1, 3, 1)
    q, k = normal(1, 1, 3, 2), normal(1, 1, 3, 2)
    mask = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 1, 1]], dtype=torch.bool).view(1, 1, 3, 3)
    out = attend(q, k, v, mask)[0].flatten()
    assert out[0].isnan()
    assert out[1:].tolist() == [INF, -INF]


def test_a_key_infinitely_far_away_gets_nothing() -> None:
    """As IEEE has it: q . k is -inf, which is a score like any other."""
    q, v = torch.ones(1, 1, 1, 1, dtype=torch.float64), normal(1, 1, 3, 2)
    k = torch.tensor([0.0, -INF, 0.0], dtype=torch.float64).view(1, 1, 3, 1)
    for options in ({}, {"window_right": 2}):
        assert attend(q, k, v, **options)[2].flatten().tolist() == [0.5, 0.0, 0.5]


def test_nan_in_a_mask_is_seen() -> None:
    _, lse, w = with_scores(row(0, 0), mask=row(0, NAN))
    assert lse.isnan().all()
    assert w.isnan().all()


@pytest.mark.parametrize(
    "shape", [(0, 2, 2, 3, 4), (2, 0, 0, 3, 4), (2, 4, 2, 0, 4), (2, 4, 2, 3, 0), (0, 0, 0, 0, 0)]
)
@pytest.mark.parametrize("weights", [0, 1, 2])
def test_empty_dimensions(shape: tuple[int, ...], weights: int) -> None:
    b, h, hkv, lq, lk = shape
    q, k, v = (
        x.requires_grad_()
        for x in (normal(b, h, lq, 3), normal(b, hkv, lk, 3), normal(b, hkv, lk, 2))
    )
    bias = normal(1, 1, lq, lk).requires_grad_()
    out, lse, w = attend(q, k, v, bias, weights=weights, window_right=0, dropout_p=0.5, seed=SEED)
    assert out.shape == (b, h, lq, 2)
    assert lse.shape == (b, h, lq)
    assert w.shape == {0: (0,), 1: (b, h, lq, lk), 2: (b, lq, lk)}[weights]
    assert (out == 0).all()
    assert (lse == -INF).all()
    total = out.sum() + lse.sum() + w.sum()
    for grad in torch.autograd.grad(total, (q, k, v, bias), allow_unused=True):
        assert grad is None or (grad == 0).all()
