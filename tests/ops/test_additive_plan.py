"""Plans of additive attention, as tests/ops/test_sdpa_plan.py of dense attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from planned import count, fresh
from torch import Tensor

import fastattn
from fastattn import additive_attention as attend
from fastattn.call import Plans

pytestmark = pytest.mark.usefixtures("seeded", "native")


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> Plans:
    return fresh(monkeypatch, "additive")


def inputs(queries: int = 6, keys: int = 9, **options: Any) -> list[Tensor]:
    """query, key, value, v and bias."""
    sizes = ((2, queries, 20), (2, keys, 20), (2, keys, 7), (20,), (20,))
    return [torch.randn(size, **options) for size in sizes]


PADDING = torch.arange(18).view(2, 9) % 5 == 1
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "causal": {"is_causal": True},
    "bool-mask": {"attn_mask": torch.rand(2, 6, 9) < 0.6},
    "vector-mask": {"attn_mask": torch.randn(9)},
    "padding": {"key_padding_mask": PADDING},
    "both-bool-masks": {"attn_mask": torch.rand(6, 9) < 0.6, "key_padding_mask": PADDING},
    "learned-mask": {"attn_mask": torch.randn(2, 6, 9, requires_grad=True)},
    "learned-row": {"attn_mask": torch.randn(1, 9, requires_grad=True)},
    "learned-mask-and-padding": {
        "attn_mask": torch.randn(6, 1, requires_grad=True),
        "key_padding_mask": PADDING,
    },
    "weights": {"need_weights": True},
    "dropout": {"dropout_p": 0.3},
    "several": {"is_causal": True, "dropout_p": 0.2, "need_weights": True},
}


def all_results(tensors: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """Results, gradients and one second derivative."""
    torch.manual_seed(3)
    leaves = [x for x in (*tensors, *options.values()) if getattr(x, "requires_grad", False)]
    results = attend(*tensors, **options)
    results = list(results) if isinstance(results, tuple) else [results]
    if not leaves:
        return results
    total = sum((r.float().sin().sum() for r in results), torch.zeros(()))
    first = torch.autograd.grad(total, leaves, retain_graph=True)
    grads = torch.autograd.grad(total, leaves, create_graph=True)
    (second,) = torch.autograd.grad(sum(g.square().sum() for g in grads), leaves[:1])
    return [*results, *first, *grads, second]


def check(
    tensors: list[Tensor], options: dict[str, Any], plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    miss = all_results(tensors, options)
    assert count(plans) == 1
    hit = all_results(tensors, options)
    assert count(plans) == 1
    with monkeypatch.context() as patch:
        patch.setattr("fastattn.call.may_plan", lambda: False)
        complete = all_results(tensors, options)
    for results in (miss, hit):
        for got, want in zip(results, complete, strict=True):
            assert torch.equal(got, want)
            assert got.stride() == want.stride()
            assert got.dtype is want.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_hit_has_the_bits_of_the_complete_path(
    name: str, dtype: torch.dtype, plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(OPTIONS[name])
    given = options.get("attn_mask")
    if given is not None and given.is_floating_point():
        options["attn_mask"] = given.detach().to(dtype).requires_grad_(given.requires_grad)
    tensors = [x.requires_grad_() for x in inputs(dtype=dtype)]
    check(tensors, options, plans, monkeypatch)


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("wants", ["qkuvb", "b", "v", "k", ""])
def test_only_the_gradients_that_are_wanted(
    queries: int, biased: bool, wants: str, plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = inputs(queries)[: 5 if biased else 4]
    for name, x in zip("qkuvb", tensors, strict=False):
        x.requires_grad_(name in wants)
    check(tensors, {}, plans, monkeypatch)


@pytest.mark.parametrize("biased", [False, True])
def test_derivatives(biased: bool, plans: Plans) -> None:
    """By finite differences, twice."""
    tensors = inputs(3, dtype=torch.float64)[: 5 if biased else 4]
    leaves = [x.requires_grad_() for x in tensors]
    attend(*leaves)
    assert count(plans) == 1
    assert torch.autograd.gradcheck(attend, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(attend, leaves, fast_mode=True)


def test_sizes_share_a_plan(plans: Plans) -> None:
    for batch, queries, keys, width in ((2, 6, 9, 20), (3, 7, 10, 12), (4, 30, 200, 64)):
        query, key = torch.randn(batch, queries, width), torch.randn(batch, keys, width)
        call = (query, key, torch.randn(batch, keys, 5), torch.randn(width))
        padding = torch.rand(batch, keys) < 0.3
        out = attend(*call, key_padding_mask=padding, is_causal=True)
        with fastattn.use_backend("reference"):
            want = attend(*call, key_padding_mask=padding, is_causal=True)
        torch.testing.assert_close(out, want)
    assert count(plans) == 1


CHANGES: dict[str, Callable[[list[Tensor], dict[str, Any]], None]] = {
    "dtype": lambda t, o: t.__setitem__(slice(None), [x.double() for x in t]),
    "one-query": lambda t, o: t.__setitem__(0, t[0][:, :1]),
    "gradient": lambda t, o: t.__setitem__(3, t[3].clone().requires_grad_()),
    "bias": lambda t, o: t.pop(),
    "causal": lambda t, o: o.update(is_causal=True),
    "mask": lambda t, o: o.update(attn_mask=torch.ones(6, 9, dtype=torch.bool)),
    "mask-of-one-row": lambda t, o: o.update(attn_mask=torch.ones(1, 9, dtype=torch.bool)),
    "dtype-of-mask": lambda t, o: o.update(attn_mask=torch.ones(6, 9)),
    "padding": lambda t, o: o.update(key_padding_mask=PADDING),
    "dropout": lambda t, o: o.update(dropout_p=0.5),
    "weights": lambda t, o: o.update(need_weights=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_fact_makes_a_new_plan(change: str, plans: Plans) -> None:
    tensors, options = inputs(), {"dropout_p": 0.0}
    attend(*tensors, **options)
    assert count(plans) == 1
    CHANGES[change](tensors, options)
    attend(*tensors, **options)
    assert count(plans) == 2
    attend(*tensors, **options)
    assert count(plans) == 2


class _Own(Tensor):
    pass


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (0, lambda x: x[0]),
        (0, lambda x: x.bfloat16()),
        (0, lambda x: x.to("meta")),
        (1, lambda x: x[:1]),
        (1, lambda x: x[..., :3]),
        (1, lambda x: x.to_sparse()),
        (2, lambda x: x[:, :4]),
        (2, lambda x: x.double()),
        (3, lambda x: None),
        (3, lambda x: x[:3]),
        (3, lambda x: x.double()),
        (3, lambda x: x.detach().to("meta")),
        (4, lambda x: x[None]),
        (4, lambda x: x.double()),
        (4, lambda x: 0.0),
        (5, lambda x: torch.ones(6, 8)),
        (6, lambda x: torch.ones(2, 8, dtype=torch.bool)),
        (6, lambda x: torch.ones(2, 9)),
        (7, lambda x: 2.0),
        (8, lambda x: 1),
        (9, lambda x: 1),
    ],
)
def test_a_call_with_an_error_raises_it_again(
    place: int, wrong: Callable[[Any], Any], plans: Plans
) -> None:
    right: list[Any] = [*inputs(), None, None, 0.0, False, False]
    attend(*right)
    call = [wrong(x) if n == place else x for n, x in enumerate(right)]
    errors = []
    for _ in range(2):
        with pytest.raises((TypeError, ValueError)) as caught:
            attend(*call)
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]
    assert count(plans) == 1


@pytest.mark.parametrize(
    "special",
    [
        lambda x: x[:, :0],
        lambda x: x.as_subclass(_Own),
        lambda x: torch.complex(x, x).conj().imag,
    ],
)
def test_special_tensors_have_no_plan(special: Callable[[Tensor], Tensor], plans: Plans) -> None:
    query, *others = inputs()
    special_query = special(query)
    got = attend(special_query, *others)
    assert count(plans) == 0
    torch.testing.assert_close(got.as_subclass(Tensor), attend(special_query.clone(), *others))


def test_modes_autocast_and_other_backends_have_no_plan(plans: Plans) -> None:
    tensors = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(*tensors).dtype is torch.bfloat16
    with fastattn.use_backend("reference"):
        attend(*tensors)
    assert count(plans) == 0
    attend(*tensors)
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(*tensors).dtype is torch.bfloat16
    with fastattn.use_backend("cpu"):
        attend(*tensors)
    assert count(plans) == 2
