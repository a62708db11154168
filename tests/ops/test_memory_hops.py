"""memory_hop_attention: what it means, on every backend and instruction set."""

from __future__ import annotations

import math
from collections.abc import Callable

import extended
import pytest
import torch
from case_table import refuses
from torch import Tensor

from fastattn import memory_hop_attention
from fastattn.testing import Target
from fastattn.testing.calls import Call


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


def test_what_one_query_may_not_see_stays_from_it(
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
    for u, grad in results[1:]:
        torch.testing.assert_close(u, results[0][0])
        torch.testing.assert_close(grad, results[0][1])


@pytest.mark.parametrize(("rows", "kept"), [(50, 50), (65, 0)])
def test_what_is_saved_is_small(choice: str, rows: int, kept: int) -> None:
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
