"""memory_hop_attention: every kernel against the float64 oracle, in hostile memory."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from case_table import within_the_bound

from fastattn import memory_hop_attention
from fastattn.testing import Target
from fastattn.testing.memories import (
    HopCase,
    make_hop_inputs,
)
from fastattn.testing.rounding import RandomRounding

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

test_case = within_the_bound("memory_hop_attention")


@pytest.mark.parametrize("queries", [1, 8])
def test_two_views_of_a_tensor_that_begin_together_are_two_memories(
    target: Target, queries: int
) -> None:
    rows, query = torch.randn(2, 40, 6), torch.randn(2, queries, 6)
    m, c = rows[:, ::2], rows[:, :20]
    want = memory_hop_attention(query, m.clone(), c.clone(), hops=2)
    assert torch.equal(memory_hop_attention(query, m, c, hops=2), want)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_queries_of_one_memory_see_different_rows(target: Target, dtype: torch.dtype) -> None:
    """All, some, none, all of one block: each query gets what it gets alone."""
    m, c = torch.randn(2, 1, 20, 7, dtype=dtype)
    query = torch.randn(1, 4, 7, dtype=dtype, requires_grad=True)
    mask = torch.ones(1, 4, 20, dtype=torch.bool)
    mask[:, 1, ::3], mask[:, 2] = False, False
    together = memory_hop_attention(query, m, c, hops=2, memory_mask=mask)
    (grad,) = torch.autograd.grad(together.sum(), query)
    for q in range(4):
        own = slice(q, q + 1)
        alone = memory_hop_attention(query[:, own], m, c, hops=2, memory_mask=mask[:, own])
        (grad_alone,) = torch.autograd.grad(alone.sum(), query)
        assert torch.equal(alone[:, 0], together[:, q])
        assert torch.equal(grad_alone[:, q], grad[:, q])


@pytest.mark.parametrize("queries", [1, 8])
def test_huge_biases_are_uniform(target: Target, queries: int) -> None:
    """A row of finfo.min sees every row alike, and finite gradients come back."""
    bias = torch.full((1, 10), torch.finfo(torch.float32).min)
    query = torch.randn(1, queries, 6, requires_grad=True)
    m, c = torch.randn(1, 10, 6), torch.randn(1, 10, 6, requires_grad=True)
    u, p = memory_hop_attention(query, m, c, memory_bias=bias, need_weights=True)
    torch.testing.assert_close(p, torch.full_like(p, 0.1))
    (grad,) = torch.autograd.grad(u.sum(), c)
    torch.testing.assert_close(grad, torch.full_like(grad, queries / 10))


@pytest.mark.parametrize("queries", [1, 8])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weights"])
def test_where_one_row_has_all_the_weight_no_score_has_a_gradient(
    target: Target, queries: int, dtype: torch.dtype, weighted: bool
) -> None:
    """Not even what rounding leaves of a difference of two equal numbers, times the scale."""
    query = torch.randn(2, queries, 300).to(dtype).requires_grad_()
    m, c = torch.randn(2, 2, 70, 300).to(dtype).unbind()
    m[:, 33 : 33 + queries], c[:, 33 : 33 + queries] = 2 * query.detach(), query.detach()
    u, p = memory_hop_attention(query, m.requires_grad_(), c, hops=2, scale=60, need_weights=True)
    torch.testing.assert_close(u, 3 * query)
    loss = [u, p] if weighted else [u]
    grads = [torch.randn_like(x) for x in loss]
    grad_query, grad_m = torch.autograd.grad(loss, (query, m), grads)
    assert torch.equal(grad_query, grads[0])
    assert not grad_m.any()


@pytest.mark.complete
@pytest.mark.parametrize("queries", [3, 8], ids=["stream", "panels"])
def test_where_one_row_has_most_of_the_weight_gradients_are_as_exact_as_rounding_allows(
    target: Target, queries: int
) -> None:
    """There nearly all of an error is that of one exponential, so it takes many draws."""
    logs: dict[str, list[float]] = {"grad_query": [], "grad_in_memory": []}
    for number in range(120):
        scale = (20, 60)[number % 2] + 1e-3 * number
        case = HopCase(f"one-{scale}", 2, queries, rows=50, width=20, hops=1, scale=scale)
        inputs = make_hop_inputs(case, torch.float32)
        got, exact = inputs.results(), inputs.definition()
        with RandomRounding(torch.float32, number):
            rounded = inputs.definition()
        for name, of_all in logs.items():
            rounding = 2**-24 * exact[name].norm()
            ours, theirs = ((x[name].double() - exact[name]).norm() for x in (got, rounded))
            of_all.append(math.log((ours + rounding) / (theirs + rounding)))
    for name, of_all in logs.items():
        assert math.exp(statistics.mean(of_all)) < 0.5, name


@pytest.mark.parametrize("queries", [1, 8])
def test_a_query_of_nan_stays_alone(target: Target, queries: int) -> None:
    """A fully masked query passes no gradient, and no query passes any to a masked row."""
    query = torch.randn(2, queries, 6)
    query[0] = float("nan")
    query.requires_grad_()
    memory = torch.randn(2, 9, 6, requires_grad=True)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0] = False
    out = memory_hop_attention(query, memory, hops=2, memory_mask=mask)
    (grad,) = torch.autograd.grad(out[1].sum() + out[0].nansum(), memory)
    assert not grad[0].any()
    assert torch.isfinite(grad[1]).all()


@pytest.mark.parametrize(
    ("name", "reached"),
    [
        ("query", {"in_memory", "out_memory"}),
        ("in_memory", {"query", "out_memory", "memory_bias"}),
        ("out_memory", {"query", "in_memory", "memory_bias"}),
        ("memory_bias", {"in_memory", "out_memory"}),
    ],
)
def test_linear_hops_pass_nan_to_gradients(engine: Target, name: str, reached: set[str]) -> None:
    """The excluded rows of linear hops are selected: neither result nor gradient loses NaN."""
    sizes = {
        "query": (2, 6),
        "in_memory": (2, 9, 6),
        "out_memory": (2, 9, 6),
        "memory_bias": (2, 9),
    }
    leaves = {n: torch.randn(size) for n, size in sizes.items()}
    leaves[name][0, 4] = float("nan")
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[:, 0] = False
    for x in leaves.values():
        x.requires_grad_()
    out = memory_hop_attention(**leaves, memory_mask=mask, hops=2, normalize="none")
    assert torch.equal(out.isnan().all(1), torch.tensor([True, False]))
    grads = torch.autograd.grad(out.sum(), tuple(leaves.values()))
    for other, grad in zip(leaves, grads, strict=True):
        assert not grad[1].isnan().any()
        if other in reached:
            assert grad[0].isnan().any()
        if other != "query":
            assert not grad[0, 0].isnan().any()
