"""additive_attention: against the oracle on every backend and instruction set, and its contract."""

from __future__ import annotations

import math
from typing import Any

import naive
import pytest
import torch
from case_table import refuses, within_the_bound
from torch import Tensor

import fastattn
from fastattn import additive_attention
from fastattn.backends.primitives import AdditiveOptions
from fastattn.testing import Target

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

test_case = within_the_bound("additive_attention")
NAN, INF = math.nan, math.inf


def operands(
    *sizes: int, dtype: torch.dtype = torch.float64, grad: bool = False, seed: int = 0
) -> list[Tensor]:
    """query, key, value, v and bias of (B, Tq, Tk, A, Dv)."""
    b, q, k, a, d = sizes or (2, 3, 5, 4, 2)
    draw = torch.Generator().manual_seed(seed)
    shapes = ((b, q, a), (b, k, a), (b, k, d), (a,), (a,))
    return [
        torch.randn(s, generator=draw, dtype=torch.float64).to(dtype).requires_grad_(grad)
        for s in shapes
    ]


# --- values ----------------------------------------------------------------------------------


def test_by_hand(backend: str) -> None:
    # tanh(log(3) / 2) = 1 / 2: the scores are log 2 + log 3, log 3 and log 3, so w = 2 : 1 : 1.
    half = math.log(3) / 2
    query = torch.tensor([[[half, 0.0]]], dtype=torch.float64)
    key = torch.tensor([[[0.0, half], [-half, half], [-2.0, half]]], dtype=torch.float64)
    v = torch.tensor([2 * math.log(2), 2 * math.log(3)], dtype=torch.float64)
    value = torch.tensor([[[4.0, 0.0], [0.0, 8.0], [100.0, 100.0]]], dtype=torch.float64)
    mask = torch.tensor([True, True, False])
    out, weights = additive_attention(query, key, value, v, attn_mask=mask, need_weights=True)
    torch.testing.assert_close(weights.flatten().tolist(), [2 / 3, 1 / 3, 0.0])
    torch.testing.assert_close(out.flatten().tolist(), [8 / 3, 8 / 3])
    bias = torch.tensor([-half, 0.0], dtype=torch.float64)  # now the scores are at most log 3
    _, weights = additive_attention(query, key, value, v, bias, mask, need_weights=True)
    torch.testing.assert_close(weights.flatten().tolist(), [2 / 3, 1 / 3, 0.0])


def test_additive_attention_equals_its_equation(backend: str) -> None:
    args = operands(2, 70, 90, 33, 20)
    got = additive_attention(*args, need_weights=True)
    want = naive.additive_attention(*args, options=AdditiveOptions(weights=True))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(additive_attention(*args), got[0], rtol=0, atol=0)


def test_without_a_batch(backend: str) -> None:
    args = operands(1, 3, 5, 4, 2)
    whole = additive_attention(*args, need_weights=True)
    args[:3] = [x[0] for x in args[:3]]
    for x, y in zip(additive_attention(*args, need_weights=True), whole, strict=True):
        assert torch.equal(x, y[0])
    padding = torch.tensor([False, False, True, False, True])
    mask = torch.randn(3, 5).double()
    got = additive_attention(*args, mask, padding)
    args[:3] = [x[None] for x in args[:3]]
    assert torch.equal(got, additive_attention(*args, mask, padding[None])[0])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values_of_any_size(target: Target, dtype: torch.dtype) -> None:
    """Also where e^2q, e^2k or their product overflow or vanish, and where tanh is 1."""
    large = [0.0, 1e-3, 5.0, 10.4, 10.6, 20.9, 21.1, 44.0, 89.0, 150.0, 360.0, 1e4, INF]
    one = torch.tensor([*large, *[-x for x in large]], dtype=dtype)
    query, key = one[None, :, None].expand(1, -1, 3), one[None, :, None].expand(1, -1, 3)
    v = torch.tensor([0.5, -0.25, 1.0], dtype=dtype)
    value = torch.eye(len(one), dtype=dtype)[None]
    for i in range(len(one)):  # alone, with finite values, and all at once
        rows = query[:, i : i + 1]
        for keys in (key, key[:, : len(large) - 1]):
            got = additive_attention(rows, keys, value[:, : keys.shape[1]], v)
            with fastattn.use_backend("reference"):
                want = additive_attention(rows, keys, value[:, : keys.shape[1]], v)
            torch.testing.assert_close(got, want, equal_nan=True)
    got = additive_attention(query, key, value, v)
    with fastattn.use_backend("reference"):
        torch.testing.assert_close(got, additive_attention(query, key, value, v), equal_nan=True)


@pytest.mark.parametrize("large", [1e13, 1e30, INF, NAN])
def test_a_vector_of_any_size(target: Target, large: float) -> None:
    args = operands(1, 4, 70, 5, 3, dtype=torch.float32)
    args[3][2] = large
    with fastattn.use_backend("reference"):
        want = additive_attention(*args)
    torch.testing.assert_close(additive_attention(*args), want, equal_nan=True)


# --- masks -----------------------------------------------------------------------------------


def test_every_form_of_the_same_mask(backend: str) -> None:
    args = operands(2, 4, 6, 5, 3)
    padding = torch.arange(6) >= torch.tensor([[4], [2]])
    want = additive_attention(*args, key_padding_mask=padding)
    added = torch.zeros(2, 1, 6).double().masked_fill(padding[:, None], -INF)
    for mask in (~padding[:, None], ~padding[:, None].expand(2, 4, 6), added):
        assert torch.equal(additive_attention(*args, mask), want)
    short = [args[0][1:], args[1][1:, :2], args[2][1:, :2], *args[3:]]
    torch.testing.assert_close(additive_attention(*short), want[1:])


def test_masks_add_up(backend: str) -> None:
    args = operands(2, 4, 6, 5, 3)
    padding = torch.arange(6) >= torch.tensor([[4], [2]])
    kept = torch.rand(4, 6, generator=torch.Generator().manual_seed(1)) < 0.7
    seen = kept & ~padding[:, None] & torch.ones(4, 6, dtype=torch.bool).tril()
    got = additive_attention(*args, kept, padding, is_causal=True)
    assert torch.equal(got, additive_attention(*args, seen))
    bias = torch.randn(1, 1, 6).double()
    got = additive_attention(*args, bias, padding, is_causal=True)
    both = bias.masked_fill(padding[:, None], -INF).expand(2, 4, 6)
    both = both.masked_fill(~torch.ones(4, 6, dtype=torch.bool).tril(), -INF)
    torch.testing.assert_close(got, additive_attention(*args, both))


def test_a_fully_masked_row_gives_zero_and_no_gradient(backend: str) -> None:
    for dtype in FLOATS:
        args = operands(2, 3, 5, 4, 2, dtype=dtype, grad=True)
        mask = torch.ones(2, 3, 5, dtype=torch.bool)
        mask[0, 1] = mask[1] = False
        out, weights = additive_attention(*args, mask, need_weights=True)
        assert out[0, 1].eq(0).all()
        assert out[1].eq(0).all()
        assert weights[1].eq(0).all()
        grad = torch.ones_like(out)
        grad[0, 1], grad[1] = NAN, INF
        grads = torch.autograd.grad(out, args, grad)
        assert all(g.isfinite().all() for g in grads)
        assert grads[0][0, 1].eq(0).all()
        assert all(g[1].eq(0).all() for g in grads[:3])


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_nonfinite_key_or_value_affects_only_queries_that_see_it(
    target: Target, bad: float
) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        args = operands(1, 9, 40, 6, 5, dtype=dtype, grad=True)
        mask = torch.ones(9, 40, dtype=torch.bool)
        mask[:, 7] = False
        mask[2, 7] = True
        for place in (1, 2):
            poisoned = [x.detach().clone() for x in args]
            poisoned[place][0, 7, 1:3] = bad
            for x in poisoned:
                x.requires_grad_()
            out = additive_attention(*poisoned, mask)
            with fastattn.use_backend("reference"):
                want = additive_attention(*poisoned, mask)
            torch.testing.assert_close(out, want, equal_nan=True)
            others = [0, 1, 3, 4, 5, 6, 7, 8]
            assert out[0, others].isfinite().all()
            grads = torch.autograd.grad(out.float().sum(), poisoned)
            for got, exact in zip(
                grads, torch.autograd.grad(want.float().sum(), poisoned), strict=True
            ):
                assert torch.equal(got.isfinite(), exact.isfinite())
            assert grads[0][0, others].isfinite().all()


# --- dropout ---------------------------------------------------------------------------------


def test_dropout_equals_attentions_with_one_head(backend: str) -> None:
    args = operands(2, 9, 20, 5, 3, dtype=torch.float32)
    torch.manual_seed(5)
    mine = additive_attention(*args, dropout_p=0.4, need_weights=True)[1]
    torch.manual_seed(5)
    q, k, v = (x[:, None] for x in args[:3])
    other = fastattn.scaled_dot_product_attention(q, k, v, dropout_p=0.4, need_weights=True)[1]
    assert torch.equal(mine == 0, other[:, 0] == 0)


def test_random_numbers_are_drawn_once_a_call_and_only_for_dropout(backend: str) -> None:
    args = operands()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    additive_attention(*args)
    assert torch.equal(torch.get_rng_state(), state)
    first = additive_attention(*args, dropout_p=0.5)
    assert not torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(state)
    assert torch.equal(additive_attention(*args, dropout_p=0.5), first)
    torch.set_rng_state(state)
    torch.randint(2**63 - 1, ())
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    additive_attention(*args, dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), after)


# --- memory ----------------------------------------------------------------------------------


def test_only_the_operands_are_saved(backend: str) -> None:
    args = operands(2, 6, 7, 5, 3, grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        additive_attention(*args, need_weights=True)
    assert sorted(x.data_ptr() for x in saved) == sorted(x.data_ptr() for x in args)


# --- derivatives and transforms --------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", [(2, 3, 5), (3, 5), (2, 3, 1), (1, 1, 5), (1,)])
def test_gradient_of_a_mask(backend: str, shape: tuple[int, ...]) -> None:
    args = operands(grad=True)
    mask = torch.randn(shape).double().requires_grad_()

    def f(*args: Tensor) -> Tensor:
        return additive_attention(*args, is_causal=True)

    assert torch.autograd.gradcheck(f, (*args, mask))
    assert torch.autograd.gradgradcheck(f, (*args, mask))


def test_vmap_of_masks_and_dropout(backend: str) -> None:
    args = operands()
    masks = torch.rand(3, 3, 5) < 0.7
    got = torch.vmap(lambda m: additive_attention(*args, m))(masks)
    want = torch.stack([additive_attention(*args, m) for m in masks])
    torch.testing.assert_close(got, want)
    query = torch.stack([args[0], -args[0]])
    torch.manual_seed(2)
    got = torch.vmap(lambda q: additive_attention(q, *args[1:], dropout_p=0.5), randomness="same")(
        query
    )
    torch.manual_seed(2)
    torch.testing.assert_close(got[0], additive_attention(*args, dropout_p=0.5))


# --- dtypes and errors -----------------------------------------------------------------------


Q, K, V, W = (torch.zeros(s) for s in ((2, 3, 4), (2, 5, 4), (2, 5, 6), (4,)))
BAD: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    (([1.0], K, V, W), {}, TypeError, "query must be a Tensor, got list"),
    ((Q, K, V, None), {}, TypeError, "v must be a Tensor, got NoneType"),
    ((Q.long(), K.long(), V.long(), W.long()), {}, TypeError, "query must be float32, float64"),
    ((Q, K.double(), V, W), {}, TypeError, "key must have query's dtype torch.float32"),
    ((Q, K, V, W.half()), {}, TypeError, "v must have query's dtype torch.float32, got .*16"),
    ((Q, K.to("meta"), V, W), {}, ValueError, "key must be on query's device cpu, got meta"),
    ((Q.to_sparse(), K, V, W), {}, TypeError, "query must be a dense tensor"),
    ((Q[None], K[None], V[None], W), {}, ValueError, r"query must be \[B, Tq, A\] or \[Tq, A\]"),
    ((Q[0], K, V, W), {}, ValueError, r"key must be \[Tk, A\], got \(2, 5, 4\)"),
    ((Q, K[:1], V, W), {}, ValueError, r"key must be \[B, Tk, A\], got \(1, 5, 4\)"),
    ((Q, K[..., :3], V, W), {}, ValueError, r"got \(2, 5, 3\) with a query \(2, 3, 4\)"),
    ((Q, K, V[:, :4], W), {}, ValueError, r"value must be \[B, Tk, Dv\], got \(2, 4, 6\)"),
    ((Q, K, V, W[:3]), {}, ValueError, r"v must be \[A\] = \(4,\), got \(3,\)"),
    ((Q, K, V, W, W[None]), {}, ValueError, r"bias must be \[A\] = \(4,\), got \(1, 4\)"),
    ((Q, K, V, W), {"attn_mask": [True]}, TypeError, "attn_mask must be a Tensor, got list"),
    ((Q, K, V, W), {"attn_mask": Q.long()}, TypeError, "attn_mask must be of dtype torch.bool"),
    ((Q, K, V, W), {"attn_mask": torch.ones(2, 5)}, ValueError, r"scores \(2, 3, 5\), got \(2, 5"),
    ((Q, K, V, W), {"attn_mask": Q[None, :1, :, :1]}, ValueError, "attn_mask must be broadcast"),
    ((Q, K, V, W), {"key_padding_mask": torch.ones(2, 5)}, TypeError, "must be of dtype torch.bo"),
    (
        (Q, K, V, W),
        {"key_padding_mask": torch.ones(5, dtype=torch.bool)},
        ValueError,
        r"key_padding_mask must be \[B, Tk\] = \(2, 5\), got \(5,\)",
    ),
    ((Q, K, V, W), {"dropout_p": "a"}, TypeError, "dropout_p must be a number, got str"),
    ((Q, K, V, W), {"dropout_p": 1.5}, ValueError, "between 0 and 1, got 1.5"),
    ((Q, K, V, W), {"dropout_p": NAN}, ValueError, "between 0 and 1, got nan"),
    ((Q, K, V, W), {"is_causal": 1}, TypeError, "is_causal must be a bool, got int"),
    ((Q, K, V, W), {"need_weights": None}, TypeError, "need_weights must be a bool"),
]


test_errors = refuses(additive_attention, BAD)
