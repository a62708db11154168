"""Plans of attention over packed sequences, as tests/ops/test_sdpa_plan.py of dense attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planned import count, fresh
from torch import Tensor

import fastattn
from fastattn import masks
from fastattn import varlen_attention as attend
from fastattn.bias import T5
from fastattn.call import Plans

pytestmark = pytest.mark.usefixtures("seeded", "native")
STARTS = torch.tensor([0, 5, 5, 12]), torch.tensor([0, 9, 13, 13])


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> Plans:
    return fresh(monkeypatch, "varlen")


def packed(q_rows: int = 14, k_rows: int = 15, width: int = 8, **options: Any) -> list[Tensor]:
    sizes = ((q_rows, 4, 8), (k_rows, 2, 8), (k_rows, 2, width))
    return [torch.randn(size, **options) for size in sizes]


SLOPES, SINKS = torch.rand(4), torch.randn(4)
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "bottom-right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "lengths": {"max_seqlen_q": 7, "max_seqlen_k": 9},
    "several": {"window": (4, 0), "softcap": 3.0, "alibi_slopes": SLOPES, "sinks": SINKS},
    "learned-sinks": {"sinks": torch.randn(4, requires_grad=True)},
    "lse": {"return_lse": True, "sinks": torch.randn(4, requires_grad=True)},
    "slopes-of-entries": {"alibi_slopes": torch.rand(3, 4)},
    "dropout": {"dropout_p": 0.3},
    "relative-bias": {"relative_bias": torch.randn(4, 25, requires_grad=True)},
    "t5": {"relative_bias": T5(torch.randn(8, 4))},
    "mask": {"mask": masks.sliding_window(3, 1)},
}


def all_results(
    tensors: list[Tensor], starts: tuple[Tensor, Tensor], options: dict[str, Any]
) -> list[Tensor]:
    """Results, gradients and one second derivative."""
    torch.manual_seed(3)
    leaves = [*tensors, *(x for x in options.values() if getattr(x, "requires_grad", False))]
    results = attend(*tensors, *starts, **options)
    results = list(results) if isinstance(results, tuple) else [results]
    total = sum((r.float().exp().sin().sum() for r in results), torch.zeros(()))
    grads = torch.autograd.grad(total, leaves, create_graph=True)
    (second,) = torch.autograd.grad(sum(g.square().sum() for g in grads), tensors[:1])
    return [*results, *grads, second]


@pytest.mark.parametrize("indices", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_hit_has_the_bits_of_the_complete_path(
    name: str,
    dtype: torch.dtype,
    indices: torch.dtype,
    plans: Plans,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = dict(OPTIONS[name])
    wide = torch.promote_types(dtype, torch.float32)
    for key in ("alibi_slopes", "sinks"):
        if key in options:
            options[key] = options[key].detach().to(wide).requires_grad_(options[key].requires_grad)
    q_starts, k_starts = (x.to(indices) for x in STARTS)
    tensors = [x.requires_grad_() for x in packed(dtype=dtype)]
    call = tensors, (q_starts, k_starts), options
    miss = all_results(*call)
    assert count(plans) == 1
    hit = all_results(*call)
    assert count(plans) == 1
    with monkeypatch.context() as patch:
        patch.setattr("fastattn.call.may_plan", lambda: False)
        complete = all_results(*call)
    for results in (miss, hit):
        for got, want in zip(results, complete, strict=True):
            assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
            assert got.stride() == want.stride()


def test_new_lengths_share_a_plan(plans: Plans) -> None:
    for lengths in ([3, 9], [5, 2, 7, 1], [20, 1, 1, 1, 1], [2] * 6):
        starts = torch.tensor([0, *lengths]).cumsum(0)
        query, key, value = packed(sum(lengths) + 3, sum(lengths) + 2)
        call = (query, key, value, starts, starts, max(lengths), max(lengths))
        out = attend(*call, is_causal=True)
        with fastattn.use_backend("reference"):
            torch.testing.assert_close(out, attend(*call, is_causal=True))
    assert count(plans) == 1


@pytest.mark.parametrize(
    ("starts", "longest", "message"),
    [
        ([1, 5, 12], None, "must begin with 0, got 1"),
        ([0, 9, 5], None, "must not decrease, got"),
        ([0, 5, 99], None, "must not end beyond the 14 rows, got 99"),
        ([0, 5, 12], 6, "must be at least the longest sequence, 7, got 6"),
        ([0, 5, 12], 6.0, "int or None"),
    ],
)
def test_wrong_values_are_named_by_every_call(
    starts: list[int], longest: Any, message: str, plans: Plans
) -> None:
    query, key, value = packed(14, 14)
    right = torch.tensor([0, 5, 12])
    attend(query, key, value, right, right)
    assert count(plans) == 1
    with pytest.raises((TypeError, ValueError), match=f"varlen_attention.*{message}"):
        attend(query, key, value, torch.tensor(starts), right, longest)


def test_gradients_of_rows_outside_all_sequences_are_zero() -> None:
    tensors = [x.requires_grad_() for x in packed()]
    attend(*tensors, *STARTS, window=(3, 3)).square().sum().backward()
    query, key, value = (x.grad for x in tensors)
    assert query is not None
    assert key is not None
    assert value is not None
    assert not query[5:].any()  # the third sequence has no keys
    assert query[:5].any()
    assert not key[9:].any()
    assert not value[13:].any()
