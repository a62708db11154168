"""The public attention function against PyTorch's: ranks, masks, head counts, dtypes, errors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import fastattn
from fastattn import dispatch
from fastattn.backends import reference
from fastattn.ops import _sdpa_plain

attention = fastattn.scaled_dot_product_attention


def rand(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def stock(*args: Any, **kwargs: Any) -> Tensor:
    """PyTorch's own attention, by its definition instead of its kernels."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.fixture
def backend(choice: str) -> str:
    return choice


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


# --- what works in PyTorch works the same ----------------------------------------------------

SHAPES = {
    "2d": ((3, 4), (5, 4), (5, 6)),
    "3d": ((2, 3, 4), (2, 5, 4), (2, 5, 6)),
    "4d": ((2, 3, 3, 4), (2, 3, 5, 4), (2, 3, 5, 6)),
    "5d": ((2, 1, 2, 3, 4), (2, 1, 2, 5, 4), (2, 1, 2, 5, 6)),
    "6d": ((2, 1, 2, 2, 3, 4), (2, 1, 2, 2, 5, 4), (2, 1, 2, 2, 5, 6)),
    "2d-query-4d-key": ((3, 4), (2, 2, 5, 4), (2, 2, 5, 4)),
    "3d-query-4d-key": ((2, 3, 4), (3, 2, 5, 4), (3, 2, 5, 4)),
    "4d-query-3d-key": ((3, 3, 3, 4), (3, 5, 4), (3, 5, 4)),
    "4d-query-2d-value": ((3, 2, 3, 4), (3, 2, 5, 4), (5, 4)),
    "batch-1-key": ((3, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4)),
    "batch-1-query": ((1, 2, 3, 4), (3, 2, 5, 4), (3, 2, 5, 4)),
    "batch-1-value": ((3, 2, 3, 4), (3, 2, 5, 4), (1, 2, 5, 4)),
    "batches-cross": ((3, 1, 2, 3, 4), (1, 2, 2, 5, 4), (2, 2, 5, 4)),
    "head-1-key-value": ((3, 2, 3, 4), (3, 1, 5, 4), (3, 1, 5, 4)),
    "head-1-value": ((3, 2, 3, 4), (3, 2, 5, 4), (3, 1, 5, 4)),
    "head-1-query": ((3, 1, 3, 4), (3, 2, 5, 4), (3, 2, 5, 4)),
    "no-head-dim": ((2, 2, 3, 0), (2, 2, 5, 0), (2, 2, 5, 4)),
    "no-value-dim": ((2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 0)),
    "no-queries": ((2, 2, 0, 4), (2, 2, 5, 4), (2, 2, 5, 4)),
    "no-keys": ((2, 2, 3, 4), (2, 2, 0, 4), (2, 2, 0, 4)),
    "no-batch": ((0, 2, 3, 4), (0, 2, 5, 4), (0, 2, 5, 4)),
    "no-heads": ((2, 0, 3, 4), (2, 0, 5, 4), (2, 0, 5, 4)),
    "no-batch-5d": ((2, 0, 2, 3, 4), (2, 0, 2, 5, 4), (2, 0, 2, 5, 4)),
}


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_any_rank_and_broadcast_matches_pytorch(
    backend: str, shapes: tuple[tuple[int, ...], ...], is_causal: bool
) -> None:
    ours = [rand(*shape).requires_grad_() for shape in shapes]
    theirs = [x.detach().clone().requires_grad_() for x in ours]
    out, expected = attention(*ours, is_causal=is_causal), stock(*theirs, is_causal=is_causal)
    assert_same(out, expected)
    assert_same(attention(*[x.detach() for x in ours], is_causal=is_causal), expected)

    grad = rand(*expected.shape)
    out.backward(grad)
    expected.backward(grad)
    for x, y in zip(ours, theirs, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert_same(x.grad, y.grad)


GQA = {
    "4d": ((2, 6, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4)),
    "3d": ((6, 3, 4), (2, 5, 4), (2, 5, 4)),
    "5d": ((2, 2, 6, 3, 4), (2, 2, 2, 5, 4), (2, 2, 2, 5, 4)),
    "multi-query": ((2, 6, 3, 4), (2, 1, 5, 4), (2, 1, 5, 4)),
    "value-of-all-heads": ((2, 6, 3, 4), (2, 2, 5, 4), (2, 6, 5, 4)),
    "value-of-one-head": ((2, 6, 3, 4), (2, 2, 5, 4), (2, 1, 5, 4)),
    "value-of-three-heads": ((2, 6, 3, 4), (2, 2, 5, 4), (2, 3, 5, 4)),
    "batch-1-key": ((2, 6, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4)),
    "no-heads": ((2, 0, 3, 4), (2, 0, 5, 4), (2, 0, 5, 4)),
}


@pytest.mark.parametrize("shapes", GQA.values(), ids=GQA)
def test_enable_gqa_matches_pytorch(backend: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    tensors = [rand(*shape) for shape in shapes]
    assert_same(attention(*tensors, enable_gqa=True), stock(*tensors, enable_gqa=True))


MASKS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {  # leading dims of query -> mask
    "qk": ((2, 2), (3, 5)),
    "k": ((2, 2), (5,)),
    "one-q": ((2, 2), (1, 5)),
    "one-k": ((2, 2), (3, 1)),
    "one": ((2, 2), (1,)),
    "scalar": ((2, 2), ()),
    "hqk": ((2, 2), (2, 3, 5)),
    "bhqk": ((2, 2), (2, 2, 3, 5)),
    "padding": ((2, 2), (2, 1, 1, 5)),
    "heads": ((2, 2), (1, 2, 3, 5)),
    "3d-qk": ((2,), (3, 5)),
    "3d-hqk": ((2,), (2, 3, 5)),
    "3d-1qk": ((2,), (1, 3, 5)),
    "2d-qk": ((), (3, 5)),
    "2d-k": ((), (5,)),
    "5d-qk": ((3, 2, 2), (3, 5)),
    "5d-all": ((3, 2, 2), (3, 2, 2, 3, 5)),
    "5d-outer": ((3, 2, 2), (3, 1, 1, 3, 5)),
    "5d-inner": ((3, 2, 2), (2, 1, 1, 5)),
    "5d-ones": ((3, 2, 2), (1, 1, 2, 3, 5)),
}


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize(("leading", "shape"), MASKS.values(), ids=MASKS)
def test_any_mask_shape_matches_pytorch(
    backend: str, leading: tuple[int, ...], shape: tuple[int, ...], kind: str
) -> None:
    query, key, value = rand(*leading, 3, 4), rand(*leading, 5, 4), rand(*leading, 5, 6)
    if kind == "bool":
        mask = torch.rand(shape) > 0.3
        assert_same(attention(query, key, value, mask), stock(query, key, value, mask))
        return
    ours = rand(*shape).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    out, expected = attention(query, key, value, ours), stock(query, key, value, theirs)
    assert_same(out, expected)
    grad = rand(*expected.shape)
    out.backward(grad)
    expected.backward(grad)
    assert ours.grad is not None
    assert theirs.grad is not None
    assert_same(ours.grad, theirs.grad)


@pytest.mark.filterwarnings("ignore:Lower right causal bias")  # NaN, it warns; it is 0 by now
@pytest.mark.parametrize("lengths", [(4, 4), (3, 5), (5, 3)], ids=str)
@pytest.mark.parametrize("corner", [causal_upper_left, causal_lower_right])
def test_a_causal_bias_of_pytorch_is_its_triangle(
    backend: str, corner: Callable[..., Any], lengths: tuple[int, int]
) -> None:
    query, key, value = rand(2, 2, lengths[0], 4), rand(2, 2, lengths[1], 4), rand(2, 2, 5, 6)
    value, bias = value[:, :, : lengths[1]].requires_grad_(), corner(*lengths)
    out, expected = attention(query, key, value, bias), stock(query, key, value, bias)
    assert_same(out, expected)
    grads = [torch.autograd.grad(x, value, torch.ones_like(x))[0] for x in (out, expected)]
    assert_same(*grads)


def test_a_mask_without_gradient_gets_none(backend: str) -> None:
    query, mask = rand(1, 1, 3, 4).requires_grad_(), rand(3, 3)
    attention(query, query, query, mask).sum().backward()
    assert mask.grad is None
    assert query.grad is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_float32_mask_goes_with_every_dtype(backend: str, dtype: torch.dtype) -> None:
    query, mask = rand(1, 2, 3, 4, dtype=dtype), rand(3, 3, dtype=torch.float32).requires_grad_()
    out = attention(query, query, query, mask)
    assert out.dtype == dtype
    expected = stock(*[query.double()] * 3, mask.double())
    torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)
    out.sum().backward()
    assert mask.grad is not None
    assert mask.grad.dtype == torch.float32


def test_numbers_of_other_types_are_taken_as_pytorch_takes_them(backend: str) -> None:
    query = rand(1, 2, 3, 4)
    expected = stock(query, query, query, scale=2.0)
    for scale in (2, np.float32(2.0), np.float64(2.0), torch.tensor(2.0)):
        assert_same(attention(query, query, query, scale=scale), expected)
    for dropout_p in (0, False, np.float64(0.0), torch.tensor(0.0)):
        assert_same(attention(query, query, query, None, dropout_p, scale=2.0), expected)
    assert_same(attention(query, query, query, None, 0.0, False, 2.0, False), expected)


def test_a_negative_scale_with_causal_is_finite(backend: str) -> None:
    query = rand(1, 2, 3, 4)
    assert_same(
        attention(query, query, query, is_causal=True, scale=-1.0),
        stock(query, query, query, is_causal=True, scale=-1.0),
    )


def test_the_output_has_the_memory_order_of_the_query(backend: str) -> None:
    layouts: list[Callable[[], Tensor]] = [
        lambda: rand(2, 3, 5, 4),
        lambda: rand(2, 5, 3, 4).transpose(1, 2),
        lambda: rand(5, 2, 3, 4).permute(1, 2, 0, 3),
        lambda: rand(2, 5, 3, 12).transpose(1, 2)[..., 4:8],
    ]
    for layout in layouts:
        query = layout()
        out, expected = attention(query, query, query), F.scaled_dot_product_attention(*[query] * 3)
        assert_same(out, expected)
        assert out.stride() == torch.empty_like(query).stride()
        wide = attention(query, query, rand(2, 3, 5, 6))
        assert [n // 6 for n in wide.stride()[:3]] == [n // 4 for n in out.stride()[:3]]
        assert wide.is_contiguous() or wide.stride(-1) == 1


def test_a_parameter_or_another_subclass_is_a_tensor(backend: str) -> None:
    class Tagged(Tensor):
        pass

    query = rand(1, 2, 3, 4)
    expected = stock(query, query, query)
    assert_same(attention(torch.nn.Parameter(query), query, query), expected)
    tagged = attention(query.as_subclass(Tagged), query, query)
    assert type(tagged) is Tagged
    assert_same(tagged.as_subclass(Tensor), expected)


def test_a_tensor_that_outlived_its_transform_is_a_tensor(backend: str) -> None:
    leaked: list[Tensor] = []
    query = rand(1, 2, 3, 4)
    torch.func.grad(lambda x: (leaked.append(x), x.sum())[1])(query)
    expected = stock(query, query, query)
    assert_same(attention(leaked[0], query, query).detach(), expected)
    assert_same(attention(query, leaked[0], leaked[0], torch.zeros(3, 3)).detach(), expected)


def test_a_zero_without_memory_is_read_as_zero(backend: str) -> None:
    x, zero = rand(1, 2, 3, 4), torch._efficientzerotensor((1, 2, 3, 4), dtype=torch.float64)
    assert zero.data_ptr() == 0
    assert_same(attention(zero, x, x), stock(torch.zeros_like(x), x, x))
    assert_same(attention(x, zero, x), stock(x, torch.zeros_like(x), x))
    assert_same(attention(x, x, zero), torch.zeros_like(x))
    assert_same(attention(x, x, x, zero[0, 0, :, :3]), stock(x, x, x))
    memory = rand(3, 5, 4)
    zero = torch._efficientzerotensor((3, 4), dtype=torch.float64)
    hop = fastattn.memory_hop_attention
    assert_same(hop(zero, memory), hop(torch.zeros(3, 4, dtype=torch.float64), memory))
    layer = fastattn.MultiheadAttention(4, 2, dtype=torch.float64).eval().requires_grad_(False)
    zero, out = zero.unsqueeze(1), torch.zeros(3, 1, 4, dtype=torch.float64)
    assert_same(layer(zero, zero, zero)[0], layer(out, out, out)[0])


def test_a_view_that_promises_minus_x_is_read_as_minus_x(backend: str) -> None:
    x = rand(1, 2, 3, 4)
    lazy = torch._neg_view(x)
    assert lazy.is_neg()
    assert_same(attention(lazy, x, x), stock(-x, x, x))
    assert_same(attention(x, lazy, x), stock(x, -x, x))
    assert_same(attention(x, x, lazy), stock(x, x, -x))
    mask = torch._neg_view(rand(3, 3))
    assert_same(attention(x, x, x, mask), stock(x, x, x, mask.resolve_neg()))
    query = rand(1, 2, 3, 4).requires_grad_()
    out = attention(query, query, query)
    (grad,) = torch.autograd.grad(out, query, lazy, retain_graph=True)
    (expected,) = torch.autograd.grad(out, query, -x)
    assert_same(grad, expected)


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


def test_softcap_bounds_the_scores(backend: str) -> None:
    query, key = 10 * rand(1, 2, 3, 4), rand(1, 2, 5, 4)
    s = query @ key.mT / 2
    expected = (3.0 * torch.tanh(s / 3.0)).softmax(-1) @ key
    assert_same(attention(query, key, key, softcap=3), expected)


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


def test_every_backend_drops_the_same_weights(backend: str) -> None:
    query = rand(2, 3, 9, 4)

    def dropped(name: str) -> Tensor:
        with fastattn.use_backend(name):
            generator = torch.Generator().manual_seed(5)
            return attention(
                query, query, query, dropout_p=0.25, generator=generator, need_weights=True
            )[1]

    assert_same(dropped(backend), dropped("reference"))
    assert 0 < (dropped(backend) == 0).double().mean() < 0.5


def test_dropping_everything_gives_zero(backend: str) -> None:
    query = rand(1, 2, 3, 4).requires_grad_()
    out, weights = attention(query, query, query, dropout_p=1.0, need_weights=True)
    assert not out.any()
    assert not weights.any()
    (grad,) = torch.autograd.grad(out.sum(), query)
    assert not grad.any()


# --- errors ----------------------------------------------------------------------------------

Q, K, V = (2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 6)


def tensors(
    q: tuple[int, ...] = Q, k: tuple[int, ...] = K, v: tuple[int, ...] = V, **dtype: torch.dtype
) -> list[Tensor]:
    return [torch.ones(shape, **dtype) for shape in (q, k, v)]


def double_key() -> list[Tensor]:
    query, key, value = tensors()
    return [query, key.double(), value]


# name: (arguments, options, what the message must say)
PYTORCH_ERRORS: dict[str, tuple[Callable[[], list[Any]], dict[str, Any], str]] = {
    "query-none": (lambda: [None, *tensors()[1:]], {}, "'query' .position 1. must be Tensor"),
    "key-array": (lambda: [torch.ones(Q), np.ones(K), torch.ones(V)], {}, "'key' .position 2."),
    "value-list": (lambda: [*tensors()[:2], [1.0]], {}, "'value' .position 3."),
    "query-1d": (lambda: tensors(q=(4,)), {}, "query must have at least 2 dimensions"),
    "value-1d": (lambda: tensors(v=(5,)), {}, "value must have at least 2 dimensions"),
    "dtypes": (double_key, {}, "same dtype, got float32, float64 and float32"),
    "integers": (lambda: tensors(dtype=torch.int64), {}, "one of float32.* got int64"),
    "bools": (lambda: tensors(dtype=torch.bool), {}, "one of float32.* got bool"),
    "complex": (lambda: tensors(dtype=torch.complex64), {}, "one of float32.* got complex64"),
    "float8": (lambda: tensors(dtype=torch.float8_e4m3fn), {}, "one of float32.* got float8"),
    "head-dims": (lambda: tensors(k=(2, 2, 5, 7)), {}, "query and key .* last dimension"),
    "lengths": (lambda: tensors(v=(2, 2, 9, 6)), {}, "key and value .* same length"),
    "heads": (lambda: tensors(q=(2, 4, 3, 4)), {}, "numbers of heads"),
    "batches": (lambda: tensors(q=(3, 2, 3, 4)), {}, "batch dimensions"),
    "gqa-2d": (
        lambda: tensors((3, 4), (5, 4), (5, 4)),
        {"enable_gqa": True},
        "enable_gqa=True needs a head dimension",
    ),
    "gqa-few-queries": (
        lambda: tensors((2, 2, 3, 4), (2, 4, 5, 4), (2, 4, 5, 4)),
        {"enable_gqa": True},
        "heads of key must divide that of query, got 4 and 2",
    ),
    "gqa-value": (
        lambda: tensors((2, 4, 3, 4), (2, 2, 5, 4), (2, 3, 5, 4)),
        {"enable_gqa": True},
        "heads of value must divide that of query, got 3 and 4",
    ),
    "mask-list": (tensors, {"attn_mask": [1]}, "'attn_mask' must be Tensor, not list"),
    "mask-int": (tensors, {"attn_mask": torch.ones(3, 5).int()}, "attn_mask must be bool.*int32"),
    "mask-double": (tensors, {"attn_mask": torch.ones(3, 5).double()}, "attn_mask must be bool"),
    "mask-half": (tensors, {"attn_mask": torch.ones(3, 5).half()}, "attn_mask must be bool"),
    "mask-shape": (tensors, {"attn_mask": torch.ones(4, 5)}, r"attn_mask .*\(2, 2, 3, 5\)"),
    "mask-empty": (tensors, {"attn_mask": torch.ones(3, 0)}, "attn_mask must be broadcastable"),
    "mask-5d": (tensors, {"attn_mask": torch.ones(1, 2, 2, 3, 5)}, "attn_mask must be broadcast"),
    "mask-3d-on-2d": (
        lambda: tensors((3, 4), (5, 4), (5, 4)),
        {"attn_mask": torch.ones(1, 3, 5)},
        "attn_mask must be broadcastable",
    ),
    "mask-device": (
        tensors,
        {"attn_mask": torch.ones(3, 5, device="meta")},
        "attn_mask must be on query's device cpu, got meta",
    ),
    "mask-and-causal": (
        tensors,
        {"attn_mask": torch.ones(3, 5), "is_causal": True},
        "Explicit attn_mask should not be set when is_causal=True",
    ),
    "causal-bias-and-causal": (
        tensors,
        {"attn_mask": causal_upper_left(3, 5), "is_causal": True},
        "CausalBias should not be used with causal=True",
    ),
    "causal-bias-lengths": (
        tensors,
        {"attn_mask": causal_lower_right(4, 5)},
        r"a CausalBias of the lengths of query and key, \(3, 5\), got \(4, 5\)",
    ),
    "device": (
        lambda: [torch.ones(Q), torch.ones(K, device="meta"), torch.ones(V)],
        {},
        "same device, got cpu, meta and cpu",
    ),
    "dropout-large": (tensors, {"dropout_p": 1.1}, "dropout_p must be between 0 and 1, got 1.1"),
    "dropout-type": (tensors, {"dropout_p": "a"}, "'dropout_p' must be float, not str"),
    "dropout-empty": (tensors, {"dropout_p": ""}, "'dropout_p' must be float, not str"),
    "causal-int": (tensors, {"is_causal": 1}, "'is_causal' must be bool, not int"),
    "causal-none": (tensors, {"is_causal": None}, "'is_causal' must be bool, not NoneType"),
    "causal-tensor": (tensors, {"is_causal": torch.tensor(True)}, "must be bool, not Tensor"),
    "causal-numpy": (tensors, {"is_causal": np.bool_(True)}, "must be bool, not bool"),
    "gqa-int": (tensors, {"enable_gqa": 1}, "'enable_gqa' must be bool, not int"),
    "scale-type": (tensors, {"scale": "1"}, "'scale' must be float, not str"),
    "scale-type-no-head-dim": (
        lambda: tensors((2, 2, 3, 0), (2, 2, 5, 0)),
        {"scale": "1"},
        "'scale' must be float, not str",
    ),
}


def _refused(monkeypatch: pytest.MonkeyPatch, *args: Any, **kwargs: Any) -> Exception:
    """The exception of a call that must neither reach a kernel nor consume a random number."""

    class Forbidden:
        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError("a bad input reached a kernel")

    cpu = dispatch.load("cpu")
    if not isinstance(cpu, str):
        monkeypatch.setattr(cpu.sdpa, "_cpu", Forbidden())
    monkeypatch.setattr(reference, "attend", Forbidden())
    monkeypatch.setattr(_sdpa_plain, "_native", {})  # nothing known from the calls of other tests
    state = torch.get_rng_state()
    with pytest.raises(Exception) as caught:
        attention(*args, **kwargs)
    assert torch.equal(torch.get_rng_state(), state)
    return caught.value


@pytest.mark.parametrize("name", PYTORCH_ERRORS)
def test_an_error_of_pytorch_is_the_same_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, options, message = PYTORCH_ERRORS[name]
    with pytest.raises(Exception) as theirs:
        stock(*make(), **options)
    ours = _refused(monkeypatch, *make(), **options)
    assert type(ours) is theirs.type
    with pytest.raises(theirs.type, match=message):
        raise ours


def nested(layout: torch.layout) -> list[Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        return [torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=layout)] * 3


OWN_ERRORS: dict[str, tuple[Callable[[], list[Any]], dict[str, Any], type[Exception], str]] = {
    "dropout-negative": (tensors, {"dropout_p": -0.1}, RuntimeError, "dropout_p .* got -0.1"),
    "dropout-nan": (tensors, {"dropout_p": math.nan}, RuntimeError, "dropout_p .* got nan"),
    "nested": (lambda: nested(torch.strided), {}, RuntimeError, "query must be a dense .* nested"),
    "jagged-key": (
        lambda: [torch.ones(2, 3, 4), *nested(torch.jagged)[1:]],
        {},
        RuntimeError,
        "key must be a dense .* nested",
    ),
    "sparse": (
        lambda: [torch.ones(Q), torch.ones(Q).to_sparse(), torch.ones(Q)],
        {},
        RuntimeError,
        "key must be a dense tensor, got a sparse_coo one",
    ),
    "mask-sparse": (
        tensors,
        {"attn_mask": torch.ones(3, 5).to_sparse()},
        RuntimeError,
        "attn_mask must be a dense",
    ),
    "window-int": (tensors, {"window": 3}, TypeError, "window must be None or a pair of ints"),
    "window-one": (tensors, {"window": (3,)}, TypeError, "window .* got .3,."),
    "window-float": (tensors, {"window": (1.0, 2)}, TypeError, "window must be None or a pair"),
    "window-bool": (tensors, {"window": (True, 2)}, TypeError, "window must be None or a pair"),
    "window-low": (tensors, {"window": (-2, 0)}, ValueError, "window must be at least -1"),
    "softcap-zero": (tensors, {"softcap": 0.0}, ValueError, "softcap .* got 0.0"),
    "softcap-negative": (tensors, {"softcap": -1}, ValueError, "softcap .* got -1"),
    "softcap-inf": (tensors, {"softcap": math.inf}, ValueError, "softcap .* got inf"),
    "softcap-nan": (tensors, {"softcap": math.nan}, ValueError, "softcap .* got nan"),
    "softcap-type": (tensors, {"softcap": "1"}, TypeError, "'softcap' must be float"),
    "alibi-list": (tensors, {"alibi_slopes": [1.0, 2.0]}, TypeError, "'alibi_slopes' must be"),
    "alibi-int": (tensors, {"alibi_slopes": torch.ones(2).int()}, RuntimeError, "got int32"),
    "alibi-heads": (
        tensors,
        {"alibi_slopes": torch.ones(3)},
        RuntimeError,
        r"alibi_slopes must have shape \(2,\) or \(2, 2\), got \(3,\)",
    ),
    "alibi-one": (tensors, {"alibi_slopes": torch.ones(1)}, RuntimeError, "alibi_slopes must"),
    "alibi-scalar": (tensors, {"alibi_slopes": torch.ones(())}, RuntimeError, "alibi_slopes must"),
    "alibi-batch": (tensors, {"alibi_slopes": torch.ones(3, 2)}, RuntimeError, "alibi_slopes must"),
    "alibi-device": (
        tensors,
        {"alibi_slopes": torch.ones(2, device="meta")},
        RuntimeError,
        "alibi_slopes must be on query's device cpu, got meta",
    ),
    "alignment": (
        tensors,
        {"causal_alignment": "top_left"},
        ValueError,
        "causal_alignment must be 'upper_left' or 'bottom_right', got 'top_left'",
    ),
    "alignment-and-causal-bias": (
        tensors,
        {"attn_mask": causal_upper_left(3, 5), "causal_alignment": "bottom_right"},
        ValueError,
        "causal_alignment must be left out with a CausalBias",
    ),
    "causal-bias-view": (
        tensors,
        {"attn_mask": causal_upper_left(3, 5)[0]},
        RuntimeError,
        r"attn_mask must be a CausalBias of the lengths .* got \(None, None\)",
    ),
    "causal-bias-upper-lengths": (
        tensors,
        {"attn_mask": causal_upper_left(4, 5)},
        RuntimeError,
        r"attn_mask must be a CausalBias of the lengths .* got \(4, 5\)",
    ),
    "alignment-type": (tensors, {"causal_alignment": None}, ValueError, "causal_alignment must"),
    "generator": (tensors, {"generator": 7}, TypeError, "'generator' must be torch.Generator"),
    "lse-type": (tensors, {"return_lse": 1}, TypeError, "'return_lse' must be bool, not int"),
    "weights-type": (tensors, {"need_weights": None}, TypeError, "'need_weights' must be bool"),
    "average-type": (tensors, {"average_weights": 0}, TypeError, "'average_weights' must be bool"),
    "average-alone": (
        tensors,
        {"average_weights": True},
        ValueError,
        "average_weights=True needs need_weights=True",
    ),
}


@pytest.mark.parametrize("name", OWN_ERRORS)
def test_an_error_of_our_own_names_argument_and_remedy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, options, error, message = OWN_ERRORS[name]
    ours = _refused(monkeypatch, *make(), **options)
    assert type(ours) is error
    with pytest.raises(error, match=message):
        raise ours


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword"):
        attention(*tensors(), dropout=0.5)
    with pytest.raises(TypeError, match="positional"):
        attention(*tensors(), None, 0.0, False, None, False, (1, 1))


# --- autocast --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("query", "key"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
        (torch.float64, torch.float64),
        (torch.float64, torch.float32),
    ],
)
@pytest.mark.parametrize(
    "mask", [None, torch.bool, torch.float32, torch.bfloat16, torch.float16, torch.float64]
)
def test_autocast_casts_as_pytorch_does(
    backend: str,
    dtype: torch.dtype,
    query: torch.dtype,
    key: torch.dtype,
    mask: torch.dtype | None,
) -> None:
    q, k, v = (
        rand(1, 2, 3, 4, dtype=query),
        rand(1, 2, 3, 4, dtype=key),
        rand(1, 2, 3, 4, dtype=key),
    )
    m = None if mask is None else torch.ones(3, 3, dtype=mask)
    with torch.autocast("cpu", dtype):
        try:
            expected = F.scaled_dot_product_attention(q, k, v, m)
        except RuntimeError:
            # A float32 mask keeps its dtype here, and goes with float64; PyTorch casts it first.
            if not (mask == torch.float32 and query == key == torch.float64):
                with pytest.raises(RuntimeError):
                    attention(q, k, v, m)
            return
        out = attention(q, k, v, m)
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)


def test_autocast_gives_gradients_in_the_dtype_of_the_parameters(backend: str) -> None:
    query = rand(1, 2, 3, 4, dtype=torch.float32).requires_grad_()
    mask = rand(3, 3, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(query, query, query, mask)
        out.float().square().sum().backward()
    assert out.dtype == torch.bfloat16
    assert query.grad is not None
    assert mask.grad is not None
    assert query.grad.dtype == mask.grad.dtype == torch.float32


# --- documentation ---------------------------------------------------------------------------


def test_the_arguments_are_those_of_pytorch_and_more() -> None:
    names = list(attention.__annotations__)
    assert names[:8] == [
        "query",
        "key",
        "value",
        "attn_mask",
        "dropout_p",
        "is_causal",
        "scale",
        "enable_gqa",
    ]
    assert attention.__defaults__ == (None, 0.0, False, None, False)
