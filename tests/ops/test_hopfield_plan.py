"""Plans of Hopfield retrieval, as tests/ops/test_sdpa_plan.py of attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from planned import count, fresh
from torch import Tensor

import fastattn
from fastattn import hopfield_retrieve as retrieve
from fastattn.call import Plans

pytestmark = pytest.mark.usefixtures("seeded", "native")


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> Plans:
    return fresh(monkeypatch, "hopfield")


def patterns(queries: int = 5, projected: bool = False, **options: Any) -> list[Tensor]:
    """Of a batch whose heads lie beside each other."""
    draw = torch.Generator().manual_seed(3)

    def some(length: int, width: int) -> Tensor:
        drawn = 0.7 * torch.randn(2, length, 3, width, generator=draw)
        return drawn.to(**options).transpose(1, 2) if options else drawn.transpose(1, 2)

    return [some(queries, 20), some(30, 20), *([some(30, 9)] if projected else [])]


DRAW = torch.Generator().manual_seed(5)
OPTIONS: dict[str, dict[str, Any]] = {
    "few-steps": {"update_steps_max": 3},
    "many-steps": {"update_steps_max": 9},
    "until-rest": {},
    "projected": {"update_steps_max": 3, "projection": True},
    "implicit": {"grad": "implicit"},
    "one-step": {"grad": "one_step", "projection": True},
    "by-head": {"stop": "head", "update_steps_max": 3},
    "bool-mask": {"attn_mask": torch.rand(30, generator=DRAW) < 0.7, "update_steps_max": 3},
    "mask-of-heads": {
        "attn_mask": torch.rand(3, 5, 30, generator=DRAW) < 0.7,
        "update_steps_max": 9,
    },
    "bias": {"attn_mask": torch.randn(2, 3, 1, 30, generator=DRAW), "update_steps_max": 3},
    "dropout": {"dropout_p": 0.3, "update_steps_max": 2},
    "everything-returned": {"need_weights": True, "need_steps": True, "update_steps_max": 3},
    "several": {
        "need_weights": True,
        "need_steps": True,
        "stop": "head",
        "dropout_p": 0.2,
        "attn_mask": torch.randn(5, 30, generator=DRAW),
        "projection": True,
    },
}


def all_results(tensors: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """Results, gradients and one second derivative. Some queries rest before the last step."""
    torch.manual_seed(3)
    results = retrieve(*tensors, beta=3.0, update_steps_eps=0.3, **options)
    results = list(results) if isinstance(results, tuple) else [results]
    leaves = [x for x in tensors if x.requires_grad]
    if not leaves:
        return results
    floating = [r.float().sin().sum() for r in results if r.is_floating_point()]
    total = sum(floating, torch.zeros(()))
    grads = torch.autograd.grad(total, leaves, retain_graph=True)
    again = torch.autograd.grad(total, leaves, create_graph=True)
    (second,) = torch.autograd.grad(sum(g.square().sum() for g in again), leaves[:1])
    return [*results, *grads, *again, second]


def check_all_ways(
    tensors: list[Tensor],
    options: dict[str, Any],
    plans: Plans,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    miss = all_results(tensors, options)
    assert count(plans) == 1
    hit = all_results(tensors, options)
    assert count(plans) == 1
    with monkeypatch.context() as patch:
        patch.setattr("fastattn.call.may_plan", lambda: False)
        complete = all_results(tensors, options)
    last = len(complete) - 1 if complete[0].requires_grad else None
    for results in (miss, hit):
        for n, (got, want) in enumerate(zip(results, complete, strict=True)):
            if n != last:
                assert torch.equal(got, want)
            elif want.dtype is torch.float64:  # autograd adds up its terms in another order
                assert (got - want).abs().max() <= 1e-10 * want.abs().max()
            assert got.stride() == want.stride()
            assert got.dtype is want.dtype
            assert got.requires_grad == want.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_hit_has_the_bits_of_the_complete_path(
    name: str, dtype: torch.dtype, plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(OPTIONS[name])
    tensors = patterns(projected=options.pop("projection", False), dtype=dtype)
    check_all_ways([x.requires_grad_() for x in tensors], options, plans, monkeypatch)


@pytest.mark.parametrize("queries", [1, 7, 40])
@pytest.mark.parametrize("wants", ["", "r", "x", "v", "rv"])
@pytest.mark.parametrize("steps", [3, 9])
def test_gradients_of_some_tensors(
    steps: int, wants: str, queries: int, plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = patterns(queries, projected=True)
    for name, x in zip("rxv", tensors, strict=True):
        x.requires_grad_(name in wants)
    check_all_ways(tensors, {"update_steps_max": steps}, plans, monkeypatch)


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_fewer_dimensions(
    masked: bool, rank: int, plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [x[(0,) * (4 - rank)].detach().requires_grad_() for x in patterns(projected=True)]
    options = {"update_steps_max": 3, "need_steps": True, "need_weights": True}
    if masked:
        options["attn_mask"] = torch.rand(5, 30) < 0.7
    check_all_ways(tensors, options, plans, monkeypatch)


def test_lengths_and_batches_share_a_plan(plans: Plans) -> None:
    for batch, queries, stored in ((2, 6, 9), (3, 6, 10), (5, 7, 11), (9, 13, 200)):
        state, rows = (torch.randn(batch, 4, n, 16) for n in (queries, stored))
        for options in ({"update_steps_max": 2}, {"stop": "head", "update_steps_max": 2}):
            out = retrieve(state, rows, **options)
            with fastattn.use_backend("reference"):
                want = retrieve(state, rows, **options)
            torch.testing.assert_close(out, want)
    assert count(plans) == 2


CHANGES: dict[str, Callable[[list[Any], dict[str, Any]], None]] = {
    "dtype": lambda t, o: t.__setitem__(slice(None), [x.double() for x in t]),
    "width": lambda t, o: t.__setitem__(slice(None), [x[..., :18] for x in t]),
    "heads": lambda t, o: t.__setitem__(slice(None), [x[:, :2] for x in t]),
    "gradient": lambda t, o: t.__setitem__(1, t[1].clone().requires_grad_()),
    "projection": lambda t, o: o.update(projection=t[1]),
    "beta": lambda t, o: o.update(beta=0.5),
    "type-of-beta": lambda t, o: o.update(beta=1),
    "steps": lambda t, o: o.update(update_steps_max=3),
    "no-limit": lambda t, o: o.update(update_steps_max=None),
    "eps": lambda t, o: o.update(update_steps_eps=0.1),
    "stop": lambda t, o: o.update(stop="head"),
    "grad": lambda t, o: o.update(grad="one_step"),
    "mask": lambda t, o: o.update(attn_mask=torch.ones(30, dtype=torch.bool)),
    "dtype-of-mask": lambda t, o: o.update(attn_mask=torch.ones(30)),
    "dropout": lambda t, o: o.update(dropout_p=0.5),
    "weights": lambda t, o: o.update(need_weights=True),
    "steps-returned": lambda t, o: o.update(need_steps=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_fact_makes_a_new_plan(change: str, plans: Plans) -> None:
    tensors, options = patterns(), {"beta": 1.0, "update_steps_max": 2}
    retrieve(*tensors, **options)
    assert count(plans) == 1
    CHANGES[change](tensors, options)
    retrieve(*tensors, **options)
    assert count(plans) == 2
    retrieve(*tensors, **options)
    assert count(plans) == 2


class _Own(Tensor):
    pass


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda t, o: t.__setitem__(1, t[1][:1]), id="patterns-of-all"),
        pytest.param(
            lambda t, o: t.__setitem__(1, t[1][:1].expand_as(t[1])), id="expanded-patterns"
        ),
        pytest.param(lambda t, o: t.__setitem__(0, t[0].as_subclass(_Own)), id="subclass"),
        pytest.param(lambda t, o: o.update(beta=torch.tensor(0.5)), id="beta"),
        pytest.param(lambda t, o: o.update(update_steps_max=0), id="no-steps"),
        pytest.param(
            lambda t, o: o.update(attn_mask=torch.randn(30, requires_grad=True)), id="learned-mask"
        ),
    ],
)
def test_calls_without_a_plan(change: Callable[..., None], plans: Plans) -> None:
    tensors, options = patterns(), {"update_steps_max": 2}
    change(tensors, options)
    for _ in range(2):
        retrieve(*tensors, **options)
        assert count(plans) == 0


def test_patterns_that_the_batch_shares_leave_the_plan(
    plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their strides are not in the signature."""
    state, stored = patterns()
    retrieve(state, stored, update_steps_max=2)
    shared = stored[:1].expand_as(stored)
    out = retrieve(state, shared, update_steps_max=2)
    assert count(plans) == 1
    with monkeypatch.context() as patch:
        patch.setattr("fastattn.call.may_plan", lambda: False)
        assert torch.equal(out, retrieve(state, shared, update_steps_max=2))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"beta": -1.0}, "beta must be positive"),
        ({"update_steps_max": True}, "update_steps_max must be an int"),
        ({"update_steps_eps": -1.0}, "update_steps_eps must not be negative"),
        ({"stop": "all"}, "stop must be one of"),
        ({"dropout_p": 2.0}, "dropout_p must be"),
        ({"need_steps": 1}, "need_steps must be a bool"),
        ({"attn_mask": torch.ones(29)}, "attn_mask must be broadcastable"),
        ({"projection": torch.randn(2, 3, 29, 9)}, "projection must have the shape"),
    ],
)
def test_a_call_with_an_error_raises_it_again(
    wrong: dict[str, Any], message: str, plans: Plans
) -> None:
    tensors = patterns()
    retrieve(*tensors)
    for _ in range(2):
        with pytest.raises((RuntimeError, TypeError, ValueError), match=message):
            retrieve(*tensors, **wrong)
    assert count(plans) == 1


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("queries", [2, 6])
def test_derivatives(queries: int, projected: bool) -> None:
    """By finite differences, twice; the steps are part of both."""
    leaves = [
        x[:1, :1, ..., :3].detach().requires_grad_()
        for x in patterns(queries, projected, dtype=torch.float64)
    ]

    def f(*leaves: Tensor) -> Tensor:
        out: Tensor = retrieve(*leaves, beta=0.5, update_steps_max=2, update_steps_eps=0.0)
        return out

    f(*leaves)
    assert "PlannedRetrieval" in str(f(*leaves).grad_fn)
    assert torch.autograd.gradcheck(f, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, leaves, fast_mode=True)


def test_gradient_mode_and_backend_are_asked_by_every_call(plans: Plans) -> None:
    tensors = [x.requires_grad_() for x in patterns()]
    retrieve(*tensors)
    with torch.no_grad():
        assert not retrieve(*tensors).requires_grad
    assert retrieve(*tensors).requires_grad
    with fastattn.use_backend("reference"):
        retrieve(*tensors)
    with torch.autocast("cpu", torch.bfloat16):
        assert retrieve(*tensors).dtype is torch.bfloat16
    assert count(plans) == 1
