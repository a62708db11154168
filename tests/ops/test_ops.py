"""The public attention function against PyTorch's: ranks, masks, head counts, dtypes, autocast."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attention_calls import assert_same, rand, stock
from torch import Tensor

import fastattn

attention = fastattn.scaled_dot_product_attention
pytestmark = pytest.mark.usefixtures("seeded")


@pytest.fixture
def backend(choice: str) -> str:
    return choice


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
    copies = [x.detach().clone().requires_grad_() for x in ours]
    out, expected = attention(*ours, is_causal=is_causal), stock(*copies, is_causal=is_causal)
    assert_same(out, expected)
    assert_same(attention(*[x.detach() for x in ours], is_causal=is_causal), expected)

    grad = rand(*expected.shape)
    out.backward(grad)
    expected.backward(grad)
    for x, y in zip(ours, copies, strict=True):
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
    copy = ours.detach().clone().requires_grad_()
    out, expected = attention(query, key, value, ours), stock(query, key, value, copy)
    assert_same(out, expected)
    grad = rand(*expected.shape)
    out.backward(grad)
    expected.backward(grad)
    assert ours.grad is not None
    assert copy.grad is not None
    assert_same(ours.grad, copy.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_float32_mask_is_accepted_with_every_dtype(backend: str, dtype: torch.dtype) -> None:
    query, mask = rand(1, 2, 3, 4, dtype=dtype), rand(3, 3, dtype=torch.float32).requires_grad_()
    out = attention(query, query, query, mask)
    assert out.dtype == dtype
    expected = stock(*[query.double()] * 3, mask.double())
    torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)
    out.sum().backward()
    assert mask.grad is not None
    assert mask.grad.dtype == torch.float32


def test_numeric_types_are_accepted_as_in_pytorch(backend: str) -> None:
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


def test_parameters_and_other_subclasses_are_accepted(backend: str) -> None:
    class Tagged(Tensor):
        pass

    query = rand(1, 2, 3, 4)
    expected = stock(query, query, query)
    assert_same(attention(torch.nn.Parameter(query), query, query), expected)
    tagged = attention(query.as_subclass(Tagged), query, query)
    assert type(tagged) is Tagged
    assert_same(tagged.as_subclass(Tensor), expected)


def test_a_tensor_that_outlived_its_transform_is_accepted(backend: str) -> None:
    leaked: list[Tensor] = []
    query = rand(1, 2, 3, 4)
    torch.func.grad(lambda x: (leaked.append(x), x.sum())[1])(query)
    expected = stock(query, query, query)
    assert_same(attention(leaked[0], query, query).detach(), expected)
    assert_same(attention(query, leaked[0], leaked[0], torch.zeros(3, 3)).detach(), expected)


def test_an_efficient_zero_tensor_is_read_as_zero(backend: str) -> None:
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


def test_a_lazily_negated_view_is_read_negated(backend: str) -> None:
    x = rand(1, 2, 3, 4)
    lazy = torch._neg_view(x)
    assert_same(attention(x, lazy, x), stock(x, -x, x))
    mask = torch._neg_view(rand(3, 3))
    assert_same(attention(x, x, x, mask), stock(x, x, x, mask.resolve_neg()))
    query = rand(1, 2, 3, 4).requires_grad_()
    out = attention(query, query, query)
    (grad,) = torch.autograd.grad(out, query, lazy, retain_graph=True)
    (expected,) = torch.autograd.grad(out, query, -x)
    assert_same(grad, expected)


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


def test_the_arguments_begin_with_pytorchs() -> None:
    pytorchs = "query key value attn_mask dropout_p is_causal scale enable_gqa".split()
    assert list(attention.__annotations__)[:8] == pytorchs
    assert attention.__defaults__ == (None, 0.0, False, None, False)
