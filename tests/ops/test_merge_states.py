"""merge_states: two partial results are the result over all keys, in value and derivative."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from case_table import refuses, within_the_bound
from torch import Tensor
from within_bound import assert_right

import fastattn
from fastattn import merge_states, scaled_dot_product_attention
from fastattn.backends import reference
from fastattn.backends.primitives import AttentionOptions, NoOptions
from fastattn.testing import Target, targets

test_case = within_the_bound("merge_states")

INF = float("inf")


def partial(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention over some keys: the output and the log-sum-exp."""
    return scaled_dot_product_attention(q, k, v, mask, return_lse=True)


def states(dtype: torch.dtype, normal: Callable[..., Tensor]) -> list[Tensor]:
    """Two partial results: out_a, lse_a, out_b, lse_b."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    shape = (2, 3, 5)
    made = [normal(*shape, 4).to(dtype) for _ in range(2)]
    lses = [2 * normal(*shape).to(wide) for _ in range(2)]
    return [made[0], lses[0], made[1], lses[1]]


def with_gradients(
    names: tuple[str, ...], results: Any, leaves: list[Tensor], grads: list[Tensor]
) -> dict[str, Tensor]:
    """The results and the gradients of the leaves, by name."""
    found = torch.autograd.grad(results, leaves, grads, allow_unused=True)
    return dict(zip(names, (*results, *found), strict=True))


def exactly(leaves: list[Tensor]) -> list[Tensor]:
    """The leaves in float64."""
    return [x.detach().double().requires_grad_() for x in leaves]


@pytest.mark.parametrize("target", targets(), ids=str)
def test_a_result_beyond_the_caches(target: Target, normal: Callable[..., Tensor]) -> None:
    """Aligned whole vectors of it are streamed; here some are unaligned."""
    size = (1200, 1000)
    given = [normal(*size).float(), normal(size[0])]
    given = [*given, given[0].flip(0), given[1].flip(0)]
    halves = [[x[n] for x in given] for n in (slice(0, 600), slice(600, 1200))]
    with target.active() as backend:
        forward = functools.partial(backend.merge_states, options=NoOptions())
        backward = functools.partial(backend.merge_states_backward, options=NoOptions())
        whole = (*forward(*given), *backward(*given[:2], *given))
        parts = [(*forward(*half), *backward(*half[:2], *half)) for half in halves]
    for x, *y in zip(whole, *parts, strict=True):
        assert torch.equal(x, torch.cat(y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cut", [0, 1, 40, 90])
def test_merged_states_equal_attention_over_all_keys(
    dtype: torch.dtype, cut: int, normal: Callable[..., Tensor], generator: torch.Generator
) -> None:
    sizes = ((2, 3, 7, 8), (2, 3, 90, 8), (2, 3, 90, 4))
    leaves = [normal(*size).to(dtype).requires_grad_() for size in sizes]
    mask = torch.rand(7, 90, generator=generator) < 0.5
    mask[0] = False  # masked in both sets
    mask[1, :cut] = False  # masked in the first
    grads = [normal(2, 3, 7, 4).to(dtype), torch.randn(2, 3, 7)]
    grads[1][:, :, 0] = 0  # of a constant, -inf
    names = ("out", "lse", "grad_query", "grad_key", "grad_value")

    q, k, v = leaves
    first = partial(q, k[:, :, :cut], v[:, :, :cut], mask[:, :cut])
    second = partial(q, k[:, :, cut:], v[:, :, cut:], mask[:, cut:])
    out, lse = merge_states(*first, *second)
    assert out.dtype == dtype
    assert lse.dtype == first[1].dtype
    assert not out[:, :, 0].any()
    assert (lse[:, :, 0] == -INF).all()
    found = with_gradients(names, (out, lse), leaves, grads)
    assert not found["grad_query"][:, :, 0].any()

    def definition() -> dict[str, Tensor]:
        exact = exactly(leaves)
        options = AttentionOptions(scale=8**-0.5)
        whole = reference.scaled_dot_product_attention(*exact, mask[None, None], options=options)
        return with_gradients(names, whole[:2], exact, [x.double() for x in grads])

    # -inf is compared above: an error has no size there.
    finite = lambda x: {**x, "lse": x["lse"][:, :, 1:]}  # noqa: E731
    assert_right(finite(found), lambda: finite(definition()), dtype)


@pytest.mark.parametrize("needed", list(itertools.product([False, True], repeat=4)), ids=str)
def test_any_of_the_states_may_need_a_gradient(
    engine: Target, needed: tuple[bool, ...], normal: Callable[..., Tensor]
) -> None:
    given = states(torch.float64, normal)
    whole = [x.clone().requires_grad_() for x in given]
    loss = lambda out, lse: out.sin().sum() + lse.cos().sum()  # noqa: E731
    want = torch.autograd.grad(loss(*merge_states(*whole)), whole)
    leaves = [x.requires_grad_(n) for x, n in zip(given, needed, strict=True)]
    results = merge_states(*leaves)
    assert results[0].requires_grad == any(needed)
    if any(needed):
        loss(*results).backward()
    for x, n, grad in zip(leaves, needed, want, strict=True):
        assert x.grad is None if not n else torch.equal(x.grad, grad)  # type: ignore[arg-type]


def test_gradients_of_two_empty_states_are_zero(
    engine: Target, normal: Callable[..., Tensor]
) -> None:
    given = states(torch.float64, normal)
    for lse in given[1::2]:
        lse.fill_(-INF)
    leaves = [x.requires_grad_() for x in given]
    results = merge_states(*leaves)
    grads = torch.autograd.grad(results, leaves, [torch.full_like(x, INF) for x in results])
    assert not any(grad.any() for grad in grads)


def test_two_infinite_states_share_the_weight(
    engine: Target, normal: Callable[..., Tensor]
) -> None:
    out_a, lse, out_b, _ = states(torch.float32, normal)
    lse.fill_(INF)
    out, merged = merge_states(out_a, lse, out_b, lse)
    torch.testing.assert_close(out, (out_a + out_b) / 2)
    assert torch.equal(merged, lse)


def test_packed_sequences(normal: Callable[..., Tensor]) -> None:
    q, k, v = (normal(9, 2, 4) for _ in range(3))
    starts, empty = torch.tensor([0, 4, 9]), torch.tensor([0, 0, 0])
    out, lse = fastattn.varlen_attention(q, k, v, starts, starts, return_lse=True)
    nothing = fastattn.varlen_attention(q, k[:0], v[:0], starts, empty, return_lse=True)
    merged = merge_states(out, lse.mT, nothing[0], nothing[1].mT)
    assert torch.equal(merged[0], out)
    assert torch.equal(merged[1], lse.mT)


def test_results_have_the_memory_order_of_the_first_state(
    backend: str, normal: Callable[..., Tensor]
) -> None:
    out = normal(2, 5, 3, 4).transpose(1, 2)
    lse = normal(2, 5, 3).transpose(1, 2)
    for results in (
        merge_states(out, lse, out, lse),
        torch.compile(merge_states)(out, lse, out, lse),
    ):
        assert results[0].stride() == out.stride()
        assert results[1].stride() == lse.stride()


OUT, LSE = torch.zeros(2, 3, 4), torch.zeros(2, 3)
BAD = [
    ((None, LSE, OUT, LSE), TypeError, "argument 'out_a' must be Tensor, not NoneType"),
    ((OUT, LSE, OUT, 1.0), TypeError, "argument 'lse_b' must be Tensor, not float"),
    ((OUT.to_sparse(), LSE, OUT, LSE), RuntimeError, "out_a must be a dense tensor"),
    ((OUT.int(), LSE, OUT, LSE), RuntimeError, "out_a must be one of float32.*got int32"),
    (
        (OUT, LSE.half(), OUT, LSE),
        RuntimeError,
        "lse_a must be float32 or float64, got float16",
    ),
    (
        (OUT[0, 0], LSE, OUT, LSE),
        RuntimeError,
        r"out_a must be \[..., L, Dv\], got shape \(4,\)",
    ),
    ((OUT, LSE.T, OUT, LSE), RuntimeError, r"lse_a must have shape \(2, 3\), got \(3, 2\)"),
    ((OUT, LSE, OUT[:1], LSE), RuntimeError, r"out_b must have shape \(2, 3, 4\)"),
    ((OUT, LSE, OUT, LSE[:1]), RuntimeError, r"lse_b must have shape \(2, 3\)"),
    ((OUT, LSE, OUT.double(), LSE), RuntimeError, "out_b must be of out_a's dtype float32"),
    ((OUT, LSE, OUT, LSE.double()), RuntimeError, "lse_b must be of lse_a's dtype float32"),
    ((OUT, LSE, OUT.to("meta"), LSE), RuntimeError, "out_b must be on out_a's device cpu"),
]
test_errors = refuses(merge_states, BAD, r"merge_states(\(\))?: ")
