"""Plans of local attention, as tests/ops/test_sdpa_plan.py of dense attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from planned import count, fresh
from torch import Tensor

import fastattn
from fastattn import luong_attention
from fastattn.call import Plans

pytestmark = pytest.mark.usefixtures("seeded", "native")
NAMES = "qkup"


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> Plans:
    return fresh(monkeypatch, "luong")


def inputs(dtype: torch.dtype = torch.float32, value_width: int = 9) -> list[Tensor]:
    """The query has gaps between its rows, and positions lie within and beyond the keys."""
    query = torch.randn(2, 9, 50).to(dtype)[..., :20]
    key, value = (torch.randn(2, 30, n).to(dtype) for n in (20, value_width))
    positions = torch.rand(2, 9).to(torch.promote_types(dtype, torch.float32))
    return [query, key, value, 40 * positions - 5]


def attend(*tensors: Tensor, window: str = "local-p", D: int = 4, **options: Any) -> Any:
    query, key, value, positions = tensors
    return luong_attention(query, key, value, window=window, D=D, positions=positions, **options)


PADDING = torch.arange(60).view(2, 30) % 7 == 3
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "monotonic": {"window": "local-m"},
    "wide": {"D": 40},
    "padding": {"key_padding_mask": PADDING},
    "expanded-padding": {"key_padding_mask": PADDING[:1].expand(2, 30)},
    "general": {"method": "general", "weight": torch.randn(20, 20, requires_grad=True)},
    "weights": {"need_weights": True},
    "dropout": {"dropout_p": 0.3},
    "several": {"dropout_p": 0.3, "need_weights": True, "key_padding_mask": PADDING},
}


def all_results(tensors: list[Tensor], options: dict[str, Any]) -> list[Tensor | None]:
    """Results, gradients and one second derivative."""
    torch.manual_seed(3)
    leaves = [x for x in (*tensors, *options.values()) if getattr(x, "requires_grad", False)]
    results = attend(*tensors, **options)
    results = list(results) if isinstance(results, tuple) else [results]
    if not results[0].requires_grad:
        return results
    total = sum((r.float().sin().sum() for r in results), torch.zeros(()))
    first = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
    grads = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
    squares = sum(g.square().sum() for g in grads if g is not None)
    (second,) = torch.autograd.grad(squares, leaves[:1])
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
            assert (got is None) == (want is None)
            if got is not None and want is not None:
                assert torch.equal(got, want)
                assert got.stride() == want.stride()
                assert got.dtype is want.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_hit_has_the_bits_of_the_complete_path(
    name: str, dtype: torch.dtype, plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(OPTIONS[name])
    if "weight" in options:
        options["weight"] = options["weight"].detach().to(dtype).requires_grad_()
    tensors = [x.requires_grad_() for x in inputs(dtype)]
    check(tensors, options, plans, monkeypatch)


@pytest.mark.parametrize("value_width", [20, 9])
@pytest.mark.parametrize("window", ["local-p", "local-m"])
@pytest.mark.parametrize("wants", ["qkup", "p", "k", ""])
def test_only_the_gradients_that_are_wanted(
    value_width: int, window: str, wants: str, plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = inputs(value_width=value_width)
    for name, x in zip(NAMES, tensors, strict=True):
        x.requires_grad_(name in wants)
    check(tensors, {"window": window}, plans, monkeypatch)


LAYOUTS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "query-with-columns-apart": (0, lambda x: x.mT.contiguous().mT),
    "expanded-key": (1, lambda x: x[:, :1].expand_as(x)),
    "value-of-every-second-column": (2, lambda x: torch.cat([x, x], -1)[..., ::2]),
    "positions-of-one-row": (3, lambda x: x[:1]),
    "transposed-positions": (3, lambda x: x.mT.contiguous().mT),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout: str, plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    place, change = LAYOUTS[layout]
    tensors = inputs()
    tensors[place] = change(tensors[place])
    check([x.detach().requires_grad_() for x in tensors], {}, plans, monkeypatch)


def test_derivatives(plans: Plans) -> None:
    """By finite differences, twice."""
    query, key, value, _ = (x[:1].detach() for x in inputs(torch.float64, 3))
    positions = torch.tensor([[0.3, 4.6, 29.2, 7.7, 12.1, 15.4, 3.3, 20.8, 25.6]])
    leaves = [x.requires_grad_() for x in (query, key, value, positions.double())]

    def f(*tensors: Tensor) -> Any:
        return attend(*tensors, D=3)

    f(*leaves)
    assert count(plans) == 1
    assert torch.autograd.gradcheck(f, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, leaves, fast_mode=True)


def test_sizes_share_a_plan(plans: Plans) -> None:
    for batch, queries, keys, width in ((2, 6, 9, 20), (3, 7, 10, 12), (4, 30, 200, 64)):
        query, key = torch.randn(batch, queries, width), torch.randn(batch, keys, width)
        call = (query, key, torch.randn(batch, keys, 5), torch.rand(batch, queries) * keys)
        out = attend(*call)
        with fastattn.use_backend("reference"):
            torch.testing.assert_close(out, attend(*call))
    assert count(plans) == 1


CHANGES: dict[str, Callable[[list[Tensor], dict[str, Any]], None]] = {
    "dtype": lambda t, o: t.__setitem__(slice(None), [x.double() for x in t]),
    "gradient": lambda t, o: t.__setitem__(1, t[1].clone().requires_grad_()),
    "bell": lambda t, o: o.update(window="local-m"),
    "reach": lambda t, o: o.update(D=5),
    "padding": lambda t, o: o.update(key_padding_mask=PADDING),
    "method": lambda t, o: o.update(method="general", weight=torch.eye(20)),
    "dtype-of-positions": lambda t, o: t.__setitem__(3, t[3].long()),
    "weights": lambda t, o: o.update(need_weights=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_fact_makes_a_new_plan(change: str, plans: Plans) -> None:
    tensors, options = inputs(), {"dropout_p": 0.0}
    attend(*tensors, **options)
    assert count(plans) == 1
    CHANGES[change](tensors, options)
    for _ in range(2):
        got = attend(*tensors, **options)
        assert count(plans) == 2
        with fastattn.use_backend("reference"):
            torch.testing.assert_close(got, attend(*tensors, **options))


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (0, lambda x: x[0]),
        (0, lambda x: x.bfloat16()),
        (1, lambda x: x[:1]),
        (1, lambda x: x[..., :3]),
        (1, lambda x: x.to_sparse()),
        (2, lambda x: x[:, :4]),
        (2, lambda x: x.double()),
        (3, lambda x: x[:, :3]),
        (4, lambda x: PADDING[:, ::2]),
        (4, lambda x: PADDING.float()),
        (5, lambda x: 2.0),
        (6, lambda x: torch.eye(20)),
        (7, lambda x: "global"),
        (8, lambda x: 0),
    ],
)
def test_a_call_with_an_error_raises_it_again(
    place: int, wrong: Callable[[Any], Any], plans: Plans
) -> None:
    right: list[Any] = [*inputs(), None, 0.0, None, "local-p", 4]
    names = ("key_padding_mask", "dropout_p", "weight", "window", "D")
    attend(*right[:4], **dict(zip(names, right[4:], strict=True)))
    call = [wrong(x) if n == place else x for n, x in enumerate(right)]
    errors = []
    for _ in range(2):
        with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
            attend(*call[:4], **dict(zip(names, call[4:], strict=True)))
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]
    assert count(plans) == 1


class _Own(Tensor):
    pass


def test_a_subclass_and_an_empty_tensor_have_no_plan(plans: Plans) -> None:
    query, key, value, positions = inputs()
    attend(query.as_subclass(_Own), key, value, positions)
    attend(query[:, :0], key, value, positions[:, :0])
    assert count(plans) == 0


def test_modes_autocast_and_other_backends_have_no_plan(plans: Plans) -> None:
    tensors = inputs()
    with fastattn.use_backend("reference"):
        attend(*tensors)
    assert count(plans) == 0
    attend(*tensors)
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(*tensors).dtype is torch.bfloat16
    with fastattn.use_backend("cpu"):
        attend(*tensors)
    assert count(plans) == 2
