"""Options of attention that PyTorch does not have, and dropout."""

from __future__ import annotations

import math

import pytest
import torch
from attention_calls import assert_same, rand, stock
from torch import Tensor

import fastattn

attention = fastattn.scaled_dot_product_attention
pytestmark = pytest.mark.usefixtures("seeded")


@pytest.fixture
def backend(choice: str) -> str:
    return choice


# --- what PyTorch does not have --------------------------------------------------------------


def test_results_are_returned_in_order_and_only_if_asked_for(backend: str) -> None:
    query, key = rand(2, 4, 3, 8), rand(2, 2, 5, 8)
    out = attention(query, key, key, enable_gqa=True)
    assert isinstance(out, Tensor)
    scores = query @ key.repeat_interleave(2, 1).mT / math.sqrt(8)
    w = scores.softmax(-1)
    for return_lse in (False, True):
        for need_weights, average in ((False, False), (True, False), (True, True)):
            results = attention(
                query,
                key,
                key,
                enable_gqa=True,
                return_lse=return_lse,
                need_weights=need_weights,
                average_weights=average,
            )
            expected = [out]
            expected += [scores.logsumexp(-1)] if return_lse else []
            expected += [w.mean(1) if average else w] if need_weights else []
            if len(expected) == 1:
                assert_same(results, out)
                continue
            assert isinstance(results, tuple)
            assert len(results) == len(expected)
            for result, wanted in zip(results, expected, strict=True):
                assert_same(result, wanted)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3)], ids=["2d", "3d", "4d", "5d"])
def test_lse_and_weights_have_the_leading_dimensions(
    backend: str, leading: tuple[int, ...]
) -> None:
    query, key = rand(*leading, 4, 8), rand(*leading, 5, 8)
    _, lse, weights = attention(query, key, key, return_lse=True, need_weights=True)
    _, mean = attention(query, key, key, need_weights=True, average_weights=True)
    scores = query @ key.mT / math.sqrt(8)
    assert_same(lse, scores.logsumexp(-1))
    assert_same(weights, scores.softmax(-1))
    assert_same(mean, scores.softmax(-1).mean(-3) if leading else scores.softmax(-1))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_dtypes_of_the_results(backend: str, dtype: torch.dtype, expected: torch.dtype) -> None:
    query = rand(1, 2, 3, 4, dtype=dtype)
    out, lse, weights = attention(query, query, query, return_lse=True, need_weights=True)
    assert (out.dtype, lse.dtype, weights.dtype) == (dtype, expected, dtype)


def _visible(q_len: int, k_len: int, offset: int, left: int, right: int) -> Tensor:
    """Which keys each query sees in a window."""
    d = torch.arange(q_len)[:, None] + offset - torch.arange(k_len)
    return ((d <= left) | (left < 0)) & ((d >= -right) | (right < 0))


@pytest.mark.parametrize("alignment", ["upper_left", "bottom_right"])
@pytest.mark.parametrize("lengths", [(3, 7), (7, 3)])
def test_causal_window_and_alibi_share_the_diagonal(
    backend: str, lengths: tuple[int, int], alignment: str
) -> None:
    q_len, k_len = lengths
    query, key = rand(1, 2, q_len, 4), rand(1, 2, k_len, 4)
    offset = k_len - q_len if alignment == "bottom_right" else 0
    for is_causal, window in ((True, None), (False, (1, 2)), (True, (2, 3)), (True, (2, -1))):
        left, right = window or (-1, -1)
        visible = _visible(q_len, k_len, offset, left, 0 if is_causal else right)
        out = attention(
            query, key, key, is_causal=is_causal, window=window, causal_alignment=alignment
        )
        assert_same(out, stock(query, key, key, visible))
    slopes = torch.tensor([0.5, 0.25], dtype=torch.float64)
    distance = (torch.arange(q_len)[:, None] + offset - torch.arange(k_len)).abs()
    out = attention(query, key, key, alibi_slopes=slopes, causal_alignment=alignment)
    assert_same(out, stock(query, key, key, -slopes[:, None, None] * distance))


def test_a_window_of_minus_one_and_zero_is_causal_with_a_mask(backend: str) -> None:
    query, mask = rand(2, 2, 4, 8), rand(4, 4)
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    expected = stock(query, query, query, mask.masked_fill(~causal, -math.inf))
    assert_same(attention(query, query, query, mask, window=(-1, 0)), expected)
    assert_same(attention(query, query, query, mask, window=[-1, 0]), expected)


@pytest.mark.parametrize("shape", [(4,), (1, 4), (3, 4), (2, 3, 4), (2, 1, 4)])
def test_alibi_slopes_of_any_shape(backend: str, shape: tuple[int, ...]) -> None:
    batch = (3,) if len(shape) < 3 else (2, 3)
    query, slopes = rand(*batch, 4, 5, 8), torch.rand(shape, dtype=torch.float32)
    distance = (torch.arange(5)[:, None] - torch.arange(5)).abs()
    expected = stock(query, query, query, -slopes.double()[..., None, None] * distance)
    assert_same(attention(query, query, query, alibi_slopes=slopes), expected)


# --- dropout ---------------------------------------------------------------------------------


def test_without_dropout_no_random_number_is_consumed(backend: str) -> None:
    query, generator = rand(1, 2, 3, 4), torch.Generator()
    before, own = torch.get_rng_state(), generator.get_state()
    attention(query, query, query, generator=generator)
    attention(query.requires_grad_(), query, query, need_weights=True, softcap=1.0).__len__()
    fastattn.explain(attention, query, query, query, dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(generator.get_state(), own)


def test_dropout_draws_one_seed_a_call(backend: str) -> None:
    query, generator = rand(1, 2, 8, 4), torch.Generator().manual_seed(1)
    draw = torch.Generator().manual_seed(1)
    first = attention(query, query, query, dropout_p=0.5, generator=generator)
    second = attention(query, query, query, dropout_p=0.5, generator=generator)
    assert not torch.equal(first, second)
    for _ in range(2):
        torch.randint(2**63 - 1, (), dtype=torch.int64, generator=draw)
    assert torch.equal(generator.get_state(), draw.get_state())
    again = attention(query, query, query, dropout_p=0.5, generator=generator.manual_seed(1))
    assert torch.equal(again, first)
    torch.manual_seed(3)
    default = attention(query, query, query, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(attention(query, query, query, dropout_p=0.5), default)
