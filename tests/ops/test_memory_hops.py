"""memory_hop_attention: semantics, on every backend and instruction set."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import extended
import pytest
import torch
from case_table import refuses, within_the_bound
from torch import Tensor

from fastattn import memory_hop_attention
from fastattn.testing import Target
from fastattn.testing.calls import Call
from fastattn.testing.cases import FLOATS
from fastattn.testing.memories import HopCase, make_hop_inputs
from fastattn.testing.rounding import RandomRounding

test_case = within_the_bound("memory_hop_attention")


def test_one_hop_by_hand(engine: Target) -> None:
    """Scores 0 and log 3: weights 1/4 and 3/4."""
    query = torch.tensor([[math.log(3.0), 5.0]], dtype=torch.float64)
    in_memory = torch.tensor([[[0.0, 0.0], [1.0, 0.0]]], dtype=torch.float64)
    out_memory = torch.tensor([[[4.0, 0.0], [0.0, 8.0]]], dtype=torch.float64)
    u, p = memory_hop_attention(query, in_memory, out_memory, need_weights=True)
    torch.testing.assert_close(p, torch.tensor([[[0.25, 0.75]]], dtype=torch.float64))
    torch.testing.assert_close(u, query + torch.tensor([[1.0, 6.0]], dtype=torch.float64))


def test_two_linear_hops_by_hand(engine: Target) -> None:
    """u = (1, 2): p = (1, 2), o = (1, 2), u = (2, 4); p = (2, 4), o = (2, 4), u = (4, 8)."""
    eye = torch.eye(2, dtype=torch.float64)[None]
    query = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    u, p = memory_hop_attention(query, eye, hops=2, normalize="none", need_weights=True)
    assert u.tolist() == [[4.0, 8.0]]
    assert p.tolist() == [[[1.0, 2.0], [2.0, 4.0]]]


def test_hops_are_taken_in_order(engine: Target) -> None:
    """One row a memory, so p = 1: u = H2 (H1 u + c1) + c2."""
    stack = torch.tensor([[[[9.0, 9.0]], [[1.0, 0.0]], [[0.0, 10.0]]]], dtype=torch.float64)
    hop_proj = torch.tensor([[[2.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [3.0, 0.0]]])
    query = torch.tensor([[5.0, 7.0]], dtype=torch.float64)
    u = memory_hop_attention(query, stack, hops=2, hop_proj=hop_proj.double())
    assert u.tolist() == [[7.0, 43.0]]  # H1 u + c1 = (11, 7); H2 (11, 7) + c2 = (7, 33 + 10)


def test_a_stack_is_each_output_and_the_next_input(
    engine: Target, normal: Callable[..., Tensor]
) -> None:
    stack, query = normal(2, 4, 6, 5), normal(2, 5)
    grad = normal(2, 5)
    apart = {"query": query, "in_memory": stack[:, :3], "out_memory": stack[:, 1:]}
    want = extended.exact(Call("memory_hop_attention", apart, {"hops": 3}, {"out": grad}))
    whole = {"query": query, "in_memory": stack}
    got = Call("memory_hop_attention", whole, {"hops": 3}, {"out": grad}).results()
    torch.testing.assert_close(got["out"], want["out"])
    inputs, outputs = want["grad_in_memory"], want["grad_out_memory"]
    expected = torch.nn.functional.pad(inputs, (0, 0, 0, 0, 0, 1))
    expected[:, 1:] += outputs
    torch.testing.assert_close(got["grad_in_memory"], expected)


def test_rows_hidden_from_one_query_do_not_affect_it(
    engine: Target, normal: Callable[..., Tensor]
) -> None:
    query = normal(1, 2, 5)
    memory = normal(1, 4, 5)
    memory[0, 1] = math.nan
    mask = torch.ones(1, 2, 4, dtype=torch.bool)
    mask[0, 0, 1] = False
    for normalize in ("softmax", "none"):
        u = memory_hop_attention(query, memory, hops=2, memory_mask=mask, normalize=normalize)
        assert torch.isfinite(u[0, 0]).all()
        assert u[0, 1].isnan().all()


def test_one_memory_for_all(engine: Target, normal: Callable[..., Tensor]) -> None:
    """A batch size of one, an expanded memory and a repeated one are the same."""
    query = normal(4, 5)
    one = normal(1, 6, 5).requires_grad_()
    results = []
    for memory in (one, one.expand(4, 6, 5), one.repeat(4, 1, 1)):
        u = memory_hop_attention(query, memory, hops=2)
        results.append((u, *torch.autograd.grad(u.sin().sum(), one)))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


@pytest.mark.parametrize(("rows", "kept"), [(50, 50), (65, 0)])
def test_saved_memory_is_small(choice: str, rows: int, kept: int) -> None:
    """The weights of a short memory, and nothing that grows with a longer one."""
    saved: list[Tensor] = []
    query, memory = torch.randn(2, 3, requires_grad=True), torch.randn(2, rows, 3)
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda s: s):
        memory_hop_attention(query, memory, hops=4)
    own = [x for x in saved if x.data_ptr() != memory.data_ptr()]
    assert sum(x.numel() for x in own) <= 2 * (3 + 9 * 3 + 4 * 2 + 4 * kept)


Q2, Q3 = torch.zeros(2, 4), torch.zeros(2, 3, 4)
M = torch.zeros(2, 6, 4)
BAD = [
    (([1.0], M), {}, TypeError, "query must be a Tensor, got list"),
    ((Q2.long(), M), {}, TypeError, "query must be float32, float64, bfloat16 or float16"),
    ((torch.zeros(4), M), {}, ValueError, r"query must be \[B, D\] or \[B, Q, D\], got shape \(4,"),
    ((Q2, torch.zeros(6, 4)), {}, ValueError, r"in_memory must be \[B, N, D\] or \[B, K, N, D\]"),
    ((Q2, M.double()), {}, TypeError, "in_memory must have query's dtype torch.float32"),
    ((Q2, M.to("meta")), {}, ValueError, "in_memory is on meta, but query is on cpu"),
    ((Q2, torch.zeros(3, 6, 4)), {}, ValueError, "in_memory must have the batch size of query, 2"),
    ((Q2, torch.zeros(2, 6, 5)), {}, ValueError, "in_memory must have the last dimension of query"),
    ((Q2, torch.zeros(2, 2, 6, 4)), {"hops": 2}, ValueError, r"must hold 3 = hops \+ 1"),
    ((Q2, torch.zeros(2, 3, 6, 4), M), {"hops": 2}, ValueError, "must hold 2 = hops"),
    ((Q2, M, torch.zeros(2, 7, 4)), {}, ValueError, "must have the same number of rows"),
    ((Q2, M, 3), {}, TypeError, "out_memory must be a Tensor, got int"),
    ((Q2, M), {"hops": 0}, ValueError, "hops must be at least 1, got 0"),
    ((Q2, M), {"hops": 2**62}, ValueError, "hops must be at most 65536, got 4611686018427387904"),
    ((Q2, M), {"hops": 1.0}, TypeError, "hops must be an int, got float"),
    ((Q2, M), {"hops": True}, TypeError, "hops must be an int, got bool"),
    ((Q2, M), {"hop_proj": torch.zeros(3, 4)}, ValueError, r"hop_proj must be \[D, D\] = \(4, 4\)"),
    ((Q2, M), {"hop_proj": torch.zeros(2, 4, 4)}, ValueError, r"\[K, D, D\] = \(1, 4, 4\)"),
    ((Q2, M), {"memory_mask": torch.zeros(2, 6)}, TypeError, "memory_mask must be bool, got"),
    ((Q2, M), {"memory_mask": M.bool()}, ValueError, r"memory_mask must be \[N\], \[B, N\] or"),
    (
        (Q3, M),
        {"memory_mask": torch.ones(2, 2, 6).bool()},
        ValueError,
        "B = 2, Q = 3, K = 1, N = 6",
    ),
    ((Q2, M), {"memory_bias": torch.zeros(2, 6).half()}, TypeError, "memory_bias must be of query"),
    ((Q2, M), {"memory_bias": torch.zeros(5)}, ValueError, r"got shape \(5,\)"),
    ((Q2, M), {"activation": "gelu"}, ValueError, "activation must be None, 'relu', 'tanh' or"),
    ((Q2, M), {"normalize": "max"}, ValueError, "normalize must be 'softmax' or 'none', got 'max'"),
    ((Q2, M), {"scale": "1"}, TypeError, "scale must be a number, got str"),
    ((Q2, M), {"need_weights": 1}, TypeError, "need_weights must be a bool, got int"),
]


test_errors = refuses(memory_hop_attention, BAD)


# --- in hostile memory ---------------------------------------------------------------------------


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
    """All, some, none, all of one block: each query has the result that it has alone."""
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
def test_a_row_with_all_the_weight_has_no_score_gradient(
    target: Target, queries: int, dtype: torch.dtype, weighted: bool
) -> None:
    """Not even the rounding error of a difference of two equal numbers, times the scale."""
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
def test_gradients_of_a_dominant_row_are_as_exact_as_rounding(target: Target, queries: int) -> None:
    """One exponential's error dominates there, so the test takes many draws."""
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
            ours, baseline = ((x[name].double() - exact[name]).norm() for x in (got, rounded))
            of_all.append(math.log((ours + rounding) / (baseline + rounding)))
    for name, of_all in logs.items():
        assert math.exp(statistics.mean(of_all)) < 0.5, name


@pytest.mark.parametrize("queries", [1, 8])
def test_a_nan_query_affects_no_other(target: Target, queries: int) -> None:
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
