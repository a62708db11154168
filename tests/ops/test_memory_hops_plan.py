"""Plans of memory hops: their results are those of the complete path, and nothing reuses a plan
that was made for another call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from planned import count, fresh
from torch import Tensor

import fastattn
from fastattn import memory_hop_attention as hop
from fastattn.call import Plans

pytestmark = pytest.mark.usefixtures("seeded", "native")

HOPS = 3


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> Plans:
    return fresh(monkeypatch, "memory_hops")


def complete(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> Any:
    """The results without plans."""
    with monkeypatch.context() as patch:
        patch.setattr("fastattn.call.may_plan", lambda: False)
        return run()


def memory(*sizes: int, rows: int = 50) -> Tensor:
    return torch.randn(*sizes, rows, 20)


MEMORIES: dict[str, Callable[[], tuple[Tensor, Tensor | None]]] = {
    "two": lambda: (memory(4), memory(4)),
    "stack": lambda: (memory(4, HOPS + 1), None),
    "same": lambda: (memory(4), None),
    "each": lambda: (memory(4, HOPS), memory(4, HOPS)),
    "of-many-rows": lambda: (memory(4, rows=100), memory(4, rows=100)),
    "rows-apart": lambda: (memory(4, HOPS)[:, 1], memory(4).repeat(1, 1, 2)[..., 20:]),
    "columns-apart": lambda: (memory(4).mT.contiguous().mT, memory(4, HOPS).mT.contiguous().mT),
    "one-for-all": lambda: (memory(1), memory(1)),
    "one-expanded": lambda: (memory(1).expand(4, -1, -1), memory(1).expand(4, -1, -1)),
    "one-of-two": lambda: (memory(1), memory(4)),
    "one-with-columns-apart": lambda: (memory(1).mT.contiguous().mT.expand(4, -1, -1), None),
}
OPTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "default": lambda rows: {},
    "scale": lambda rows: {"scale": 0.5},
    "relu": lambda rows: {"activation": "relu"},
    "linear": lambda rows: {"normalize": "none", "scale": 0.1},
    "weights": lambda rows: {"need_weights": True},
    "projection": lambda rows: {"hop_proj": torch.randn(20, 20) / 5},
    "projections": lambda rows: {"hop_proj": (torch.randn(HOPS, 20, 20) / 5).mT},
    "mask": lambda rows: {"memory_mask": torch.arange(rows) < torch.tensor([[50], [3], [0], [17]])},
    "scattered-mask": lambda rows: {"memory_mask": torch.rand(rows) < 0.6},
    "bias": lambda rows: {"memory_bias": torch.randn(4, rows)},
    "biases": lambda rows: {"memory_bias": torch.randn(4, HOPS, 1)},
    "several": lambda rows: {
        "memory_bias": torch.randn(1, rows),
        "memory_mask": torch.rand(4, 1, rows) < 0.6,
        "hop_proj": torch.randn(20, 20) / 5,
        "activation": "tanh",
        "need_weights": True,
    },
}


def all_results(
    query: Tensor, in_memory: Tensor, out_memory: Tensor | None, options: dict[str, Any]
) -> list[Tensor]:
    """Results, gradients and one second derivative."""
    tensors = (query, in_memory, out_memory, *options.values())
    leaves = [x for x in tensors if isinstance(x, Tensor) and x.requires_grad]
    results = hop(query, in_memory, out_memory, hops=HOPS, **options)
    results = list(results) if isinstance(results, tuple) else [results]
    if not leaves:
        return results
    total = sum((r.float().sin().sum() for r in results), torch.zeros(()))
    first = torch.autograd.grad(total, leaves, retain_graph=True)
    grads = torch.autograd.grad(total, leaves, create_graph=True)
    (second,) = torch.autograd.grad(sum(g.square().sum() for g in grads), leaves[:1])
    return [*results, *first, *grads, second]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", MEMORIES)
@pytest.mark.sampled
def test_a_hit_has_the_bits_of_the_complete_path(
    kind: str, option: str, dtype: torch.dtype, plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = [x if x is None else x.to(dtype) for x in MEMORIES[kind]()]
    assert shown[0] is not None
    options = OPTIONS[option](shown[0].shape[-2])
    for name in options.keys() & {"hop_proj", "memory_bias"}:
        options[name] = options[name].to(dtype)
    several = kind != "stack" and option in ("default", "weights")
    query = torch.randn(*((4, 2, 20) if several else (4, 20))).to(dtype)
    learned = [query, *shown, options.get("hop_proj"), options.get("memory_bias")]
    for wants in ((), (0,), (1,), (0, 1, 2, 3, 4)):
        for place, x in enumerate(learned):
            if x is not None:
                x.requires_grad_(place in wants)

        def run() -> list[Tensor]:
            return all_results(query, *shown, options)

        kept = count(plans)
        miss, hit = run(), run()
        assert count(plans) == kept + 1
        for results in (miss, hit):
            for got, want in zip(results, complete(monkeypatch, run), strict=True):
                assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))  # fp16 may overflow
                assert got.stride() == want.stride()
                assert got.dtype is want.dtype


@pytest.mark.parametrize("dims", [1, 2, 3, 4])
@pytest.mark.parametrize("queries", [False, True])
def test_masks_and_biases_of_all_ranks(
    dims: int, queries: bool, plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = (4, 2, HOPS, 50) if queries else (4, HOPS, 50)
    if dims > len(sizes):
        pytest.skip("a query [B, D] has no such mask")
    by_rank = {1: (50,), 2: (4, 50), 3: (4, 2, 50) if queries else sizes, 4: sizes}
    query, m = torch.randn(*sizes[:-2], 20, requires_grad=True), memory(4)
    for shape in (by_rank[dims], (1,) * dims):
        options = {"memory_mask": torch.rand(shape) < 0.7}
        options["memory_bias"] = torch.randn(shape, requires_grad=True)
        want = complete(monkeypatch, lambda: all_results(query, m, m, options))  # noqa: B023
        all_results(query, m, m, options)
        for got, wanted in zip(all_results(query, m, m, options), want, strict=True):
            assert torch.equal(got, wanted)
    assert count(plans) == 2


def test_sizes_share_a_plan(plans: Plans) -> None:
    for batch, rows in ((4, 50), (5, 51), (9, 130), (2, 3)):
        query, m, c = torch.randn(batch, 20), memory(batch, rows=rows), memory(batch, rows=rows)
        mask = torch.rand(batch, rows) < 0.7
        out = hop(query, m, c, hops=2, memory_mask=mask)
        with fastattn.use_backend("reference"):
            torch.testing.assert_close(out, hop(query, m, c, hops=2, memory_mask=mask))
    assert count(plans) == 1


CHANGES: dict[str, Callable[[list[Tensor], dict[str, Any]], None]] = {
    "dtype": lambda t, o: t.__setitem__(slice(None), [x.double() for x in t]),
    "gradient": lambda t, o: t.__setitem__(1, t[1].clone().requires_grad_()),
    "one-memory": lambda t, o: t.__setitem__(1, t[1][:1]),
    "expanded-memory": lambda t, o: t.__setitem__(1, t[1][:1].expand(4, -1, -1)),
    "one-a-hop": lambda t, o: t.__setitem__(1, memory(4, 1)),
    "queries": lambda t, o: t.__setitem__(0, torch.randn(4, 2, 20)),
    "no-output": lambda t, o: t.pop(),
    "hops": lambda t, o: o.update(hops=2),
    "projection": lambda t, o: o.update(hop_proj=torch.randn(20, 20)),
    "mask": lambda t, o: o.update(memory_mask=torch.ones(50, dtype=torch.bool)),
    "bias": lambda t, o: o.update(memory_bias=torch.ones(50)),
    "activation": lambda t, o: o.update(activation="relu"),
    "normalize": lambda t, o: o.update(normalize="none"),
    "scale": lambda t, o: o.update(scale=0.5),
    "type-of-scale": lambda t, o: o.update(scale=1),
    "weights": lambda t, o: o.update(need_weights=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_fact_makes_a_new_plan(change: str, plans: Plans) -> None:
    tensors, options = [torch.randn(4, 20), memory(4), memory(4)], {"hops": 1}
    hop(*tensors, **options)
    assert count(plans) == 1
    CHANGES[change](tensors, options)
    for _ in range(2):
        results = hop(*tensors, **options)
        assert count(plans) == 2
    with fastattn.use_backend("reference"):
        torch.testing.assert_close(results, hop(*tensors, **options), rtol=1e-5, atol=1e-5)


ERRORS: dict[str, Callable[[list[Tensor]], dict[str, Any]]] = {
    "width": lambda t: t.__setitem__(1, memory(4)[..., :19]) or {},
    "rows": lambda t: t.__setitem__(1, memory(4, rows=49)) or {},
    "dtype": lambda t: t.__setitem__(1, memory(4).double()) or {},
    "batch": lambda t: t.__setitem__(1, memory(3)) or {},
    "memories": lambda t: t.__setitem__(1, memory(4, HOPS + 2)) or {},
    "mask": lambda t: {"memory_mask": torch.ones(4, 49, dtype=torch.bool)},
    "mask-of-hops": lambda t: {"memory_mask": torch.ones(4, 7, 50, dtype=torch.bool)},
    "projections": lambda t: {"hop_proj": torch.randn(HOPS + 2, 20, 20)},
    "hops": lambda t: {"hops": 0},
    "scale": lambda t: {"scale": None},
    "weights": lambda t: {"need_weights": 1},
}


@pytest.mark.parametrize("error", ERRORS)
def test_wrong_input_raises_the_same_error_with_plans(
    error: str, plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those whose numbers of hops alone are wrong have the signature of a valid call."""
    query = torch.randn(4, 20)
    right = [query, memory(4, HOPS), memory(4, HOPS)]
    for given in (
        {},
        {"memory_mask": torch.ones(4, HOPS, 50, dtype=torch.bool)},
        {"hop_proj": torch.randn(HOPS, 20, 20)},
    ):
        hop(*right, hops=HOPS, **given)
    kept, wrong = count(plans), list(right)
    options = {"hops": HOPS, **ERRORS[error](wrong)}

    def message() -> str:
        with pytest.raises((TypeError, ValueError)) as caught:
            hop(*wrong, **options)
        return f"{type(caught.value)} {caught.value}"

    assert message() == message() == complete(monkeypatch, message)
    assert count(plans) == kept == 3


def test_gradient_mode_and_backends_are_asked_by_every_call(plans: Plans) -> None:
    query, m = torch.randn(4, 20, requires_grad=True), memory(4)
    with torch.no_grad():
        assert not hop(query, m).requires_grad
    assert hop(query, m).requires_grad
    assert count(plans) == 1
    with fastattn.use_backend("reference"):
        hop(query, m)
    assert count(plans) == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert hop(query, m).dtype is torch.bfloat16
    assert count(plans) == 1
