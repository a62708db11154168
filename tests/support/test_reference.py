"""The oracle itself: windows, precision, a second implementation, dropout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import ATTENTION_CASES, PROOFS
from extended import FORWARD
from torch import Tensor

from fastattn import testing
from fastattn.backends import reference
from fastattn.backends.primitives import AttentionBackwardOptions
from fastattn.testing import Case, Target, check

pytestmark = pytest.mark.without_kernels
INF = float("inf")
PLAIN = AttentionBackwardOptions(scale=1.0, weights=1)
SEED = torch.tensor(-6148914691236517206)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    slopes: Tensor | None = None,
    seed: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The reference of attention, with less to write."""
    return reference.scaled_dot_product_attention(
        q, k, v, mask, slopes, seed, options=replace(PLAIN, **options)
    )


def normal(*shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=draw, dtype=torch.float64)


# -- windows --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "left", "right", "seen"),
    [
        (0, -1, 0, ["x....", "xx...", "xxx.."]),  # causal, upper left
        (2, -1, 0, ["xxx..", "xxxx.", "xxxxx"]),  # causal, bottom right
        (0, 1, 1, ["xx...", "xxx..", ".xxx."]),
        (0, 0, 0, ["x....", ".x...", "..x.."]),
        (1, 0, -1, [".xxxx", "..xxx", "...xx"]),
        (-2, -1, 0, [".....", ".....", "x...."]),
        (7, 2, -1, [".....", ".....", "....."]),
        (0, -1, -1, ["xxxxx", "xxxxx", "xxxxx"]),
    ],
)
def test_visible_keys_of_a_window(offset: int, left: int, right: int, seen: list[str]) -> None:
    q, k = normal(1, 1, 3, 2), normal(1, 1, 5, 2)
    out, lse, w = attend(q, k, k, offset=offset, window_left=left, window_right=right)
    expected = torch.tensor([[c == "x" for c in line] for line in seen])
    assert torch.equal(w[0, 0] > 0, expected)
    assert torch.equal(lse[0, 0] == -INF, ~expected.any(-1))
    assert torch.equal((out[0, 0] == 0).all(-1), ~expected.any(-1))


# -- precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_are_computed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in (normal(1, 2, 9, 8), normal(1, 2, 7, 8), normal(1, 2, 7, 8)))
    out, lse, w = attend(q, k, v)
    wide, wide_lse, wide_w = attend(q.float(), k.float(), v.float())
    assert out.dtype == w.dtype == dtype
    assert lse.dtype == torch.float64
    assert torch.equal(out, wide.to(dtype))
    assert torch.equal(w, wide_w.to(dtype))
    assert torch.equal(lse, wide_lse)


def test_autocast_does_not_lower_the_precision() -> None:
    q, k, v = (x.float() for x in (normal(1, 1, 9, 8), normal(1, 1, 7, 8), normal(1, 1, 7, 8)))
    expected = attend(q, k, v)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attend(q, k, v)[0], expected)


# -- the second implementation --------------------------------------------------------------------

# Every case of the table in float64, where the naive implementation judges the reference.
TABLE = ATTENTION_CASES


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "case",
    [case for case in TABLE if torch.float64 in case.dtypes and not case.slow],
    ids=lambda case: case.name,
)
def test_equals_the_naive_implementation(case: Case) -> None:
    verdict = check(case, torch.float64, Target("reference"))
    assert verdict.ok, "\n".join(verdict.faults)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name",
    ["head_dim-1024", "gqa-mask", "mask-padding-poison", "everything", "decode-float", "gqa-alibi"],
)
def test_is_within_the_bound_as_a_backend(name: str, dtype: torch.dtype) -> None:
    (case,) = [case for case in TABLE if case.name == name]
    verdict = check(case, dtype, Target("reference"))
    assert verdict.ok, "\n".join(verdict.faults)


# Cases in which a finite difference of the results is only rounding error, or a jump.
STEEP: dict[str, Callable[[Any], Any]] = {
    "mask": lambda kind: kind in ("steep", "finfo_min"),
    "spreads": lambda spreads: max(spreads) > 3,
    "spread": lambda spread: spread > 3,
    "scale": lambda scale: (scale or 0) > 3,
    "apart": bool,
    "infinite": bool,
    "partial": bool,
    "grad": lambda kind: kind == "one_step",
}


def _is_smooth(case: Any) -> bool:
    """Whether finite differences approximate the gradients of a case."""
    return not any(is_steep(getattr(case, name, 0)) for name, is_steep in STEEP.items()
                   if hasattr(case, name))  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("operator", "case"),
    [
        pytest.param(operator, case, id=f"{operator}-{case.name}")
        for operator in FORWARD
        for case in testing.PROOFS[operator].cases[:: 6 if "dot_product" in operator else 1]
        if torch.float64 in case.dtypes and _is_smooth(case)
    ],
)
def test_gradients_equal_differences_of_the_naive_implementation(operator: str, case: Any) -> None:
    """The derivative in one random direction of each tensor."""
    inputs: Any = PROOFS[operator].make(case, torch.float64).cleaned()
    exact, step = inputs.definition(), 1e-5
    given = {name: grad for name, grad in inputs.grads.items() if grad is not None}

    def terms(results: Any) -> Tensor:
        """The terms of the loss, without the -inf of fully masked rows."""
        each = [(results[n].where(results[n].isfinite(), 0.0) * g).sum() for n, g in given.items()]
        return torch.stack([torch.zeros(()).double(), *each])

    rounding = float(terms(exact).abs().sum()) * 1e-9
    for name, x in inputs.tensors.items():
        gradient = exact.get(f"grad_{name}")
        if x is None or gradient is None or not x.is_floating_point():
            continue
        direction = normal(*x.shape)
        if name == "positions":  # at a whole number the window is about to move
            direction[:, ::3] = 0
        moved = [{**inputs.tensors, name: x + at * direction} for at in (step, -step)]
        after, before = (terms(FORWARD[operator](replace(inputs, tensors=t))) for t in moved)
        want = gradient * direction
        off = (after - before).sum() / (2 * step) - want.sum()
        assert off.abs() <= 1e-6 * want.abs().sum() + rounding, name


# -- dropout --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        # Random123's published known answers of philox4x32-10
        ("00000000 00000000 00000000 00000000", "00000000 00000000",
         "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
         "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
         "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)  # fmt: skip
def test_philox_known_answers(counter: str, key: str, words: str) -> None:
    def parse(text: str) -> tuple[Tensor, ...]:
        return tuple(torch.tensor(int(word, 16)) for word in text.split())

    found = reference.philox4x32(parse(counter), parse(key))  # type: ignore[arg-type]
    assert [int(word) for word in found] == [int(word) for word in parse(words)]


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1, -1, -(2**63)])
def test_dropout_follows_the_definition(seed: int) -> None:
    shape, p = (2, 3, 4, 19), 0.3
    keep = reference.dropout_keep(shape, p, torch.tensor(seed))
    assert keep.shape == shape
    threshold = round(0.7 * 65536)
    for b, h, i, j in [(0, 0, 0, 0), (1, 2, 3, 18), (0, 1, 2, 7), (1, 0, 3, 8), (1, 1, 0, 13)]:
        words = (i, j // 8, h, b), (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
        word = reference.philox4x32(*(tuple(map(torch.tensor, each)) for each in words))  # type: ignore[arg-type]
        draw = word[j % 8 // 2] >> (16 * (j % 2)) & 0xFFFF
        assert keep[b, h, i, j].item() == (draw < threshold)


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_dropout_keeps_the_rate_and_the_mean(p: float) -> None:
    shape = (2, 4, 128, 256)
    keep = reference.dropout_keep(shape, p, torch.tensor(12345))
    count = keep.numel()
    sigma = math.sqrt(p * (1 - p) / count)
    assert abs(keep.double().mean().item() - (1 - p)) < 5 * sigma + 1 / 65536
    # no two neighbours agree more often than chance: along keys, queries, heads, batch
    for dim in range(4):
        a, b = keep.narrow(dim, 0, shape[dim] - 1), keep.narrow(dim, 1, shape[dim] - 1)
        agree = (a == b).double().mean().item()
        chance = p * p + (1 - p) * (1 - p)
        assert abs(agree - chance) < 6 * math.sqrt(chance * (1 - chance) / a.numel())
    q, k = torch.zeros(2, 4, 128, 4), torch.zeros(2, 4, 256, 4)
    v = torch.ones(2, 4, 256, 1)
    out = attend(q, k, v, dropout_p=p, seed=torch.tensor(12345))[0]
    assert abs(out.mean().item() - 1) < 5 * sigma / (1 - p) + 1e-4


def test_dropout_divides_kept_weights_by_the_keep_rate() -> None:
    q, k = normal(1, 1, 3, 2), normal(1, 1, 40, 2)
    plain = attend(q, k, k)[2]
    dropped = attend(q, k, k, dropout_p=0.3, seed=SEED)[2]
    keep = reference.dropout_keep((1, 1, 3, 40), 0.3, SEED)
    torch.testing.assert_close(dropped, torch.where(keep, plain * 65536 / 45875, 0.0))


# -- excluded pairs and infinities ----------------------------------------------------------------


def test_opposite_infinities_make_nan() -> None:
    v = torch.tensor([INF, -INF, 1.0], dtype=torch.float64).view(1, 1, 3, 1)
    q, k = normal(1, 1, 3, 2), normal(1, 1, 3, 2)
    mask = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 1, 1]], dtype=torch.bool).view(1, 1, 3, 3)
    out = attend(q, k, v, mask)[0].flatten()
    assert out[0].isnan()
    assert out[1:].tolist() == [INF, -INF]


def test_a_key_with_a_score_of_minus_inf_has_no_weight() -> None:
    """By IEEE arithmetic q . k is -inf, which is a score like any other."""
    q, v = torch.ones(1, 1, 1, 1, dtype=torch.float64), normal(1, 1, 3, 2)
    k = torch.tensor([0.0, -INF, 0.0], dtype=torch.float64).view(1, 1, 3, 1)
    for options in ({}, {"window_right": 2}):
        assert attend(q, k, v, **options)[2].flatten().tolist() == [0.5, 0.0, 0.5]


def test_backward_is_differentiable() -> None:
    q, k, v, bias = normal(1, 2, 3, 2), normal(1, 2, 4, 2), normal(1, 2, 4, 3), normal(1, 1, 3, 4)
    grads = (normal(1, 2, 3, 3), normal(1, 2, 3), normal(1, 2, 3, 4))
    leaves = [x.requires_grad_() for x in (*grads, q, k, v, bias)]
    options = replace(PLAIN, softcap=2.0, window_right=1, needs_mask_grad=True)

    def backward(*leaves: Tensor) -> tuple[Tensor, ...]:
        out, lse, _ = attend(*leaves[3:])
        found = reference.scaled_dot_product_attention_backward(
            *leaves, None, None, out, lse, options=options
        )
        assert found[3] is not None
        return found[:4]  # type: ignore[return-value]

    assert torch.autograd.gradcheck(backward, leaves)


def test_backward_with_one_tensor_in_three_roles() -> None:
    x = normal(1, 1, 4, 3).requires_grad_()
    out, lse, _ = attend(x, x, x)
    grad = normal(*out.shape)
    parts = reference.scaled_dot_product_attention_backward(
        grad, None, None, x, x, x, None, None, None, out, lse, options=PLAIN
    )
    (whole,) = torch.autograd.grad(out, x, grad)
    torch.testing.assert_close(parts[0] + parts[1] + parts[2], whole)


def test_backward_without_any_gradient_is_zero() -> None:
    q, k, bias = normal(1, 1, 4, 3), normal(1, 1, 5, 3), normal(1, 1, 4, 5)
    out, lse, _ = attend(q, k, k, bias)
    tensors = (*[None] * 3, q, k, k, bias, None, None, out, lse)
    options = replace(PLAIN, needs_mask_grad=True)
    grads = reference.scaled_dot_product_attention_backward(*tensors, options=options)
    for grad, x in zip(grads[:4], (q, k, k, bias), strict=True):
        assert grad is not None
        assert torch.equal(grad, torch.zeros_like(x))
