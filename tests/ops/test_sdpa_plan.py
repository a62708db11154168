"""Plans of attention: their results are those of the complete path, and nothing reuses a plan that
was made for another call.
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from planned import count, fresh
from torch import Tensor

import fastattn
from fastattn import evidence, masks
from fastattn import scaled_dot_product_attention as attend
from fastattn.bias import T5
from fastattn.call import Plans

pytestmark = pytest.mark.usefixtures("seeded", "native")


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> Plans:
    return fresh(monkeypatch, "sdpa")


def qkv(k_len: int = 9, kv_heads: int = 4, width: int = 8, **options: Any) -> list[Tensor]:
    sizes = ((4, 6, 8), (kv_heads, k_len, 8), (kv_heads, k_len, width))
    return [torch.randn(2, *size, **options) for size in sizes]


SLOPES, SINKS = torch.rand(4), torch.randn(4)
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "causal": {"is_causal": True},
    "bottom-right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "scale": {"scale": 0.3},
    "window": {"window": (2, 1)},
    "softcap": {"softcap": 2.0},
    "slopes": {"alibi_slopes": SLOPES},
    "slopes-of-entries": {"alibi_slopes": torch.rand(2, 4)},
    "sinks": {"sinks": SINKS},
    "bool-mask": {"attn_mask": torch.rand(6, 9) < 0.6},
    "vector-mask": {"attn_mask": torch.randn(9)},
    "learned-mask": {"attn_mask": torch.randn(4, 6, 9, requires_grad=True)},
    "learned-sinks": {"sinks": torch.randn(4, requires_grad=True)},
    "document": {"mask": masks.sliding_window(3, 1)},
    "relative-bias": {"relative_bias": torch.randn(4, 21, requires_grad=True)},
    "t5": {"relative_bias": T5(torch.randn(8, 4), False, 6), "causal_alignment": "bottom_right"},
    "lse": {"return_lse": True},
    "weights": {"need_weights": True},
    "everything-returned": {"return_lse": True, "need_weights": True, "average_weights": True},
    "dropout": {"dropout_p": 0.3},
    "several": {"window": (4, 0), "softcap": 3.0, "alibi_slopes": SLOPES, "sinks": SINKS},
}


def all_results(tensors: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """Results, gradients and one second derivative."""
    torch.manual_seed(3)
    leaves = [*tensors, *(x for x in options.values() if getattr(x, "requires_grad", False))]
    results = attend(*tensors, **options)
    results = list(results) if isinstance(results, tuple) else [results]
    total = sum((r.float().sin().sum() for r in results), torch.zeros(()))
    grads = torch.autograd.grad(total, leaves, create_graph=True)
    (second,) = torch.autograd.grad(sum(g.square().sum() for g in grads), tensors[:1])
    return [*results, *grads, second]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_hit_has_the_bits_of_the_complete_path(
    name: str, dtype: torch.dtype, plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(OPTIONS[name])
    wide = torch.promote_types(dtype, torch.float32)
    for key in ("alibi_slopes", "sinks"):
        if key in options:
            options[key] = options[key].detach().to(wide).requires_grad_(options[key].requires_grad)
    if name.startswith(("vector", "learned-mask")):
        given = options["attn_mask"]
        options["attn_mask"] = given.detach().to(dtype).requires_grad_(given.requires_grad)
    for grouped in (False, True):
        tensors = qkv(kv_heads=2 if grouped else 4, dtype=dtype)
        tensors = [x.requires_grad_() for x in tensors]
        arguments = {**options, "enable_gqa": grouped}
        miss = all_results(tensors, arguments)
        kept = count(plans)
        hit = all_results(tensors, arguments)
        assert count(plans) == kept > 0
        with monkeypatch.context() as patch:
            patch.setattr("fastattn.call.may_plan", lambda: False)
            complete = all_results(tensors, arguments)
        for results in (miss, hit):
            for got, want in zip(results, complete, strict=True):
                assert torch.equal(got, want)
                assert got.stride() == want.stride()
                assert got.dtype is want.dtype


def test_lengths_and_batches_share_a_plan(plans: Plans) -> None:
    """Unless sizes that may differ are equal by chance, such as batch and heads."""
    for batch, q_len, k_len in ((2, 6, 9), (3, 6, 10), (5, 7, 11), (9, 13, 200)):
        q, k, v = (torch.randn(batch, 4, n, 16) for n in (q_len, k_len, k_len))
        out = attend(q, k, v, is_causal=True, causal_alignment="bottom_right")
        with fastattn.use_backend("reference"):
            want = attend(q, k, v, is_causal=True, causal_alignment="bottom_right")
        torch.testing.assert_close(out, want)
    assert count(plans) == 1


def test_a_growing_cache_of_one_query_shares_a_plan(plans: Plans) -> None:
    k, v = torch.randn(2, 1, 4, 300, 16)
    q = torch.randn(1, 4, 1, 16)
    for n in range(20, 300):
        attend(q, k[:, :, :n], v[:, :, :n], enable_gqa=True)
    assert count(plans) == 1


CHANGES: dict[str, Callable[[list[Tensor], dict[str, Any]], None]] = {
    "dtype": lambda t, o: t.__setitem__(slice(None), [x.double() for x in t]),
    "width": lambda t, o: t.__setitem__(slice(None), qkv(width=16)),
    "heads": lambda t, o: t.__setitem__(slice(None), [x[:, :2] for x in t]),
    "gradient": lambda t, o: t.__setitem__(1, t[1].clone().requires_grad_()),
    "scale": lambda t, o: o.update(scale=0.5),
    "type-of-scale": lambda t, o: o.update(scale=1),
    "causal": lambda t, o: o.update(is_causal=True),
    "window": lambda t, o: o.update(window=(1, 2)),
    "softcap": lambda t, o: o.update(softcap=1.0),
    "slopes": lambda t, o: o.update(alibi_slopes=SLOPES),
    "sinks": lambda t, o: o.update(sinks=SINKS),
    "mask": lambda t, o: o.update(attn_mask=torch.ones(6, 9, dtype=torch.bool)),
    "mask-of-one-row": lambda t, o: o.update(attn_mask=torch.ones(1, 9, dtype=torch.bool)),
    "dtype-of-mask": lambda t, o: o.update(attn_mask=torch.ones(6, 9)),
    "document": lambda t, o: o.update(mask=masks.causal()),
    "dropout": lambda t, o: o.update(dropout_p=0.5),
    "lse": lambda t, o: o.update(return_lse=True),
    "weights": lambda t, o: o.update(need_weights=True),
    "gqa": lambda t, o: o.update(enable_gqa=True),
    "relative-bias": lambda t, o: o.update(relative_bias=torch.randn(4, 21)),
    "t5": lambda t, o: o.update(relative_bias=T5(torch.randn(8, 4))),
    "alignment": lambda t, o: o.update(causal_alignment="bottom_right"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_fact_makes_a_new_plan(change: str, plans: Plans) -> None:
    tensors, options = qkv(), {"scale": 1.0}
    attend(*tensors, **options)
    assert count(plans) == 1
    CHANGES[change](tensors, options)
    attend(*tensors, **options)
    assert count(plans) == 2
    attend(*tensors, **options)
    assert count(plans) == 2


def test_another_size_of_a_mask_is_refused_by_the_complete_path() -> None:
    tensors = qkv()
    attend(*tensors, torch.randn(4, 6, 9))
    for wrong in ((3, 6, 9), (4, 5, 9), (4, 6, 8)):
        with pytest.raises(RuntimeError, match="attn_mask must be broadcastable"):
            attend(*tensors, torch.randn(wrong))


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": 1},
        {"window": (-2, 0)},
        {"softcap": float("nan")},
        {"dropout_p": 2.0},
        {"attn_mask": torch.ones(6, 8)},
        {"sinks": torch.ones(3)},
        {"causal_alignment": "lower"},
        {"need_weights": False, "average_weights": True},
    ],
)
def test_a_call_with_an_error_raises_it_again(options: dict[str, Any], plans: Plans) -> None:
    tensors = qkv()
    errors = []
    for _ in range(2):
        with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
            attend(*tensors, **options)
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]
    assert count(plans) == 0


def test_slopes_that_require_a_gradient_have_no_plan(plans: Plans) -> None:
    slopes = SLOPES.clone().requires_grad_()
    with torch.no_grad():
        attend(*qkv(), alibi_slopes=slopes)
    assert count(plans) == 0
    attend(*qkv(), alibi_slopes=slopes).sum().backward()
    assert slopes.grad is not None


def test_gradient_mode_is_asked_by_every_call() -> None:
    tensors = [x.requires_grad_() for x in qkv()]
    with torch.no_grad():
        assert not attend(*tensors).requires_grad
    assert attend(*tensors).requires_grad
    with torch.inference_mode():
        assert attend(*tensors).is_inference()


def test_a_forced_backend_is_obeyed(plans: Plans) -> None:
    tensors = qkv()
    attend(*tensors)
    with fastattn.use_backend("reference"):
        attend(*tensors)
    assert count(plans) == 1
    with fastattn.use_backend("cpu"):
        attend(*tensors)
    assert count(plans) == 2


def test_new_evidence_drops_the_plans(plans: Plans) -> None:
    attend(*qkv())
    assert count(plans) == 1
    evidence.forget()
    assert count(plans) == 0


def test_plans_are_bounded_and_keep_no_tensor(
    plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastattn.call._MOST", 16)
    for n in range(1, 101):
        x = torch.randn(1, 1, 2, n)
        attend(x, x, x)
        assert count(plans) <= 16
    tensors = qkv()
    gone = [weakref.ref(tensor) for tensor in tensors]
    attend(*tensors, sinks=SINKS.clone())
    del tensors, x
    gc.collect()
    assert all(ref() is None for ref in gone)


def test_threads_share_plans(plans: Plans) -> None:
    tensors = [[x.requires_grad_() for x in qkv(k_len=n)] for n in (9, 10, 11, 12)]
    wanted = [all_results(t, {"is_causal": True}) for t in tensors]
    wrong = []

    def work(n: int) -> None:
        for step in range(40):
            if step % 10 == n % 10:
                plans._plans.clear()
            out = attend(*tensors[(n + step) % 4], is_causal=True)
            if not torch.equal(out, wanted[(n + step) % 4][0]):
                wrong.append((n, step))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_compiled_after_eager_and_eager_after_compiled(plans: Plans) -> None:
    tensors = qkv()
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
