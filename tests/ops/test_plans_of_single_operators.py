"""Properties of plans of single operators, beyond tests/ops/test_plans.py."""

from __future__ import annotations

import copy
import gc
import math
import threading
import weakref
from unittest import mock

import pytest
import torch
from plan_cases import LENGTHS, SDPA, SINKS, cached, packed, qkv
from plan_cases_of_memory import HOPFIELD, HOPS, MEMORY_HOPS
from planned import check, count, fresh

import fastattn
from fastattn import (
    decode_attention,
    evidence,
    hopfield_retrieve,
    sinusoidal_encoding,
    varlen_attention,
)
from fastattn import scaled_dot_product_attention as attend
from fastattn.backends._hopfield import Patterns
from fastattn.call import Plans

pytestmark = pytest.mark.usefixtures("seeded", "native")


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> Plans:
    return fresh(monkeypatch, attend)


def test_new_evidence_drops_the_plans(plans: Plans) -> None:
    attend(**qkv())
    assert count(plans) == 1
    evidence.forget()
    assert count(plans) == 0


def test_plans_are_bounded_and_keep_no_tensor(
    plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastattn.call._MAX_PLANS", 16)
    for n in range(1, 101):
        x = torch.randn(1, 1, 2, n)
        attend(x, x, x)
        assert count(plans) <= 16
    call = qkv()
    gone = [weakref.ref(tensor) for tensor in call.values()]
    attend(**call, sinks=SINKS.clone())
    del call, x
    gc.collect()
    assert all(ref() is None for ref in gone)


def test_threads_share_plans(plans: Plans) -> None:
    calls = [
        SDPA.cast(qkv(k_len=n), torch.float32, {"query", "key", "value"}) | {"is_causal": True}
        for n in (9, 10, 11, 12)
    ]
    wanted = [attend(**call) for call in calls]
    wrong = []

    def work(n: int) -> None:
        for step in range(40):
            if step % 10 == n % 10:
                plans._plans.clear()
            if not torch.equal(attend(**calls[(n + step) % 4]), wanted[(n + step) % 4]):
                wrong.append((n, step))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_compiled_after_eager_and_eager_after_compiled(plans: Plans) -> None:
    tensors = tuple(qkv().values())
    eager = attend(*tensors, window=(2, 1))
    compiled = torch.compile(lambda *t: attend(*t, window=(2, 1)), backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), eager)
    assert torch.equal(attend(*tensors, window=(2, 1)), eager)
    assert count(plans) == 1


def test_a_module_with_plans_is_copied() -> None:
    module = fastattn.nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 70, 16)
    out = module(x, x, x, need_weights=False)[0]
    torch.testing.assert_close(copy.deepcopy(module)(x, x, x, need_weights=False)[0], out)


def test_gradients_of_rows_outside_all_sequences_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = fresh(monkeypatch, varlen_attention)
    call = packed()
    leaves = [call[name].requires_grad_() for name in ("query", "key", "value")]
    for _ in range(2):  # by the complete path, and by the plan
        out = varlen_attention(**call, window=(3, 3))
        query, key, value = torch.autograd.grad(out.square().sum(), leaves)
        assert count(plans) == 1
        assert not query[5:].any()  # the third sequence has no keys
        assert query[:5].any()
        assert not key[9:].any()
        assert not value[13:].any()


def test_a_gradient_is_refused_by_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    plans, call = fresh(monkeypatch, decode_attention), cached()
    call["query"].requires_grad_()
    with torch.no_grad():
        decode_attention(**call, cache_seqlens=LENGTHS)
    assert count(plans) == 0
    with pytest.raises(RuntimeError, match="requires a gradient"):
        decode_attention(**call, cache_seqlens=LENGTHS)


@pytest.mark.parametrize("steps", [4, 5])
def test_a_planned_retrieval_keeps_at_most_four_steps(steps: int) -> None:
    call = HOPFIELD.make() | {"update_steps_max": steps}
    call["state"].requires_grad_()
    outs = hopfield_retrieve(**call), hopfield_retrieve(**call)
    through_steps = Patterns.backward_through_steps
    with mock.patch.object(
        Patterns, "backward_through_steps", autospec=True, side_effect=through_steps
    ) as repeat:
        for out in outs:
            torch.autograd.grad(out.sum(), call["state"])
        assert repeat.call_count == (0 if steps == 4 else 2)


@pytest.mark.parametrize("is_one", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [(), (2,)], ids=["query", "queries"])
def test_masks_and_biases_of_all_ranks(
    dims: int, rows: tuple[int, ...], is_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = (4, *rows, HOPS, 50)
    if dims > len(sizes):
        pytest.skip("a query [B, D] has no such mask")
    shape = {1: (50,), 2: (4, 50), 3: (4, 2, 50) if rows else sizes, 4: sizes}[dims]
    shape = (1,) * dims if is_one else shape
    call = MEMORY_HOPS.make() | {"query": torch.randn(4, *rows, 20, requires_grad=True)}
    call |= {"memory_mask": torch.rand(shape) < 0.7}
    call |= {"memory_bias": torch.randn(shape, requires_grad=True)}
    check(MEMORY_HOPS, lambda: call, fresh(monkeypatch, MEMORY_HOPS.function))


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> Plans:
    return fresh(monkeypatch, sinusoidal_encoding)


def test_many_elements_that_require_a_gradient(encodings: Plans) -> None:
    x = torch.randn(2, 700, 60, requires_grad=True)
    for offset in (0, 9, 2):
        out = sinusoidal_encoding(x, offset=offset, scale=3.0)
        assert torch.equal(out, sinusoidal_encoding(x.detach(), offset=offset, scale=3.0))
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(grad, torch.full_like(x, 3.0))
    assert count(encodings) == 2


def test_an_overwritten_result_does_not_change_the_derivative() -> None:
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    sinusoidal_encoding(x, scale=3.0)
    out = sinusoidal_encoding(x, scale=3.0)
    assert "Mul" in type(out.grad_fn).__name__
    with torch.no_grad():
        out.fill_(math.nan)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, torch.full_like(x, 3.0))
