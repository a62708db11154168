"""Plans of memory encoding, as tests/ops/test_memory_hops_plan.py of memory hops."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from planned import count, fresh
from torch import Tensor

import fastattn
from fastattn import encode_memory as encode
from fastattn.backends.primitives import EncodeMemoryBackwardOptions, EncodeMemoryOptions
from fastattn.call import Plans

pytestmark = pytest.mark.usefixtures("seeded", "native")


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> Plans:
    return fresh(monkeypatch, "encode_memory")


def complete(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> Any:
    """The results without plans."""
    with monkeypatch.context() as patch:
        patch.setattr("fastattn.call.may_plan", lambda: False)
        return run()


def all_results(tokens: Tensor, leaves: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """The memory, gradients and one second derivative."""
    weight, *temporal = leaves
    memory = encode(tokens, weight, temporal=temporal[0] if temporal else None, **options)
    learned = [x for x in leaves if x.requires_grad]
    if not learned:
        return [memory]
    total = memory.float().sin().sum()
    first = torch.autograd.grad(total, learned, retain_graph=True)
    grads = torch.autograd.grad(total, learned, create_graph=True)
    (second,) = torch.autograd.grad(sum(g.square().sum() for g in grads), learned[:1])
    return [memory, *first, *grads, second]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temporal", [False, True])
@pytest.mark.parametrize("tables", [(), (1,), (3,)])
@pytest.mark.parametrize("options", [{}, {"encoding": "centered"}, {"padding_idx": None}])
def test_a_hit_has_the_bits_of_the_complete_path(
    options: dict[str, Any],
    tables: tuple[int, ...],
    temporal: bool,
    dtype: torch.dtype,
    plans: Plans,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = torch.randint(0, 30, (2, 6, 5))[..., ::2]
    tokens[:, 1] = 0
    leaves = [torch.randn(*tables, 30, 16)[..., ::2].to(dtype)]
    if temporal:
        leaves.append(torch.randn(*tables, 8, 6).mT.to(dtype))
    for wants in ((), (0,), (1,), (0, 1)):
        if wants == (1,) and not temporal:
            continue
        for place, leaf in enumerate(leaves):
            leaf.requires_grad_(place in wants)
        kept = count(plans)
        miss, hit = (all_results(tokens, leaves, options) for _ in range(2))
        assert count(plans) - kept == (0 if wants == (0, 1) and not temporal else 1)
        want = complete(monkeypatch, lambda: all_results(tokens, leaves, options))
        for results in (miss, hit):
            for got, wanted in zip(results, want, strict=True):
                assert torch.equal(got, wanted)
                assert got.stride() == wanted.stride()
                assert got.dtype is wanted.dtype


def test_sizes_share_a_plan(plans: Plans) -> None:
    for sizes, rows in (((2, 6, 5), 30), ((3, 7, 4), 31), ((1 + 4, 9, 3), 40)):
        tokens, weight = torch.randint(0, rows, sizes), torch.randn(rows, 8)
        temporal = torch.randn(sizes[1], 8)
        memory = encode(tokens, weight, temporal=temporal)
        with fastattn.use_backend("reference"):
            torch.testing.assert_close(memory, encode(tokens, weight, temporal=temporal))
    assert count(plans) == 1


CHANGES: dict[str, Callable[[], dict[str, Any]]] = {
    "tables": lambda: {"weight": torch.randn(3, 30, 8)},
    "dtype": lambda: {"weight": torch.randn(30, 8).double()},
    "gradient": lambda: {"weight": torch.randn(30, 8, requires_grad=True)},
    "temporal": lambda: {"temporal": torch.randn(6, 8)},
    "encoding": lambda: {"encoding": "bow"},
    "padding": lambda: {"padding_idx": 1},
    "no-padding": lambda: {"padding_idx": None},
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_fact_makes_a_new_plan(change: str, plans: Plans) -> None:
    call: dict[str, Any] = {"tokens": torch.randint(0, 30, (2, 6, 5))}
    call["weight"] = torch.randn(30, 8)
    encode(**call)
    assert count(plans) == 1
    call |= CHANGES[change]()
    for _ in range(2):
        memory = encode(**call)
        assert count(plans) == 2
    with fastattn.use_backend("reference"):
        torch.testing.assert_close(memory, encode(**call))


@pytest.mark.parametrize(
    "change",
    [
        lambda call: {"tokens": call["tokens"].int()},  # converted
        lambda call: {"encoding": torch.ones(5, 8)},
        lambda call: {"sparse": True},
    ],
)
def test_calls_that_the_complete_path_changes_have_no_plan(
    change: Callable[[dict[str, Any]], dict[str, Any]], plans: Plans
) -> None:
    call = {"tokens": torch.randint(0, 30, (2, 6, 5)), "weight": torch.randn(30, 8)}
    for _ in range(2):
        encode(**{**call, **change(call)})
    assert count(plans) == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda call: {"tokens": call["tokens"] + 30},
        lambda call: {"weight": call["weight"][:20]},
        lambda call: {"temporal": call["temporal"][:5]},
        lambda call: {"temporal": call["temporal"][:, :7]},
        lambda call: {"temporal": call["temporal"].double()},
        lambda call: {"encoding": "other"},
        lambda call: {"padding_idx": 0.0},
    ],
)
def test_wrong_input_raises_the_same_error_with_plans(
    change: Callable[[dict[str, Any]], dict[str, Any]],
    plans: Plans,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = torch.full((2, 6, 5), 29)
    call = {"tokens": tokens, "weight": torch.randn(30, 8), "temporal": torch.randn(6, 8)}
    encode(**call)
    wrong = {**call, **change(call)}

    def message() -> str:
        with pytest.raises((IndexError, TypeError, ValueError)) as caught:
            encode(**wrong)
        return f"{type(caught.value)} {caught.value}"

    assert message() == message() == complete(monkeypatch, message)
    assert count(plans) == 1


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("tokens", lambda x: x.float()),
        ("tokens", lambda x: x[0]),
        ("weight", lambda x: x.int()),
        ("weight", lambda x: x[None].repeat(2, 1, 1, 1)),
        ("weight", lambda x: x[None, None]),
        ("factors", lambda x: x.double()),
        ("factors", lambda x: x[:4]),
        ("temporal", lambda x: x[:, :5]),
        ("temporal", lambda x: x[0]),
        ("grad", lambda x: x[:, :, :5]),
        ("grad", lambda x: x[..., :7]),
        ("grad", lambda x: x.tolist()),
    ],
)
def test_native_encoding_checks_every_tensor(
    name: str, wrong: Callable[[Any], Any], native: ModuleType
) -> None:
    given: dict[str, Any] = {"tokens": torch.ones(2, 6, 5, dtype=torch.int64)}
    given |= {"weight": torch.randn(3, 30, 8), "factors": torch.randn(5, 8)}
    given |= {"temporal": torch.randn(3, 6, 8), "grad": torch.randn(2, 3, 6, 8)}

    def run(tokens: Any, weight: Any, factors: Any, temporal: Any, grad: Any) -> Any:
        memory = native.encode_memory(EncodeMemoryOptions(), tokens, weight, factors, temporal)
        options = EncodeMemoryBackwardOptions(rows=30, temporal=True)
        return memory, *native.encode_memory_backward(options, grad, tokens, factors)

    assert [x.shape for x in run(**given)] == [(2, 3, 6, 8), (3, 30, 8), (3, 6, 8)]
    given[name] = wrong(given[name])
    with pytest.raises((TypeError, ValueError), match=r"is not valid|dimensions|must be a tensor"):
        run(**given)
