"""A compiled backward drops the forward's weights, even if it recomputes the draws."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config as partitioner
from attention_calls import attention, compiled, rand
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import fastattn

pytestmark = pytest.mark.usefixtures("seeded", "fresh_compiler")

STARTS = torch.tensor([0, 4, 4, 11])
MHA = fastattn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True, dtype=torch.float64)


def packed(q: Tensor, v: Tensor) -> Tensor:
    """Dropout in packed sequences."""
    q, v = (x.permute(3, 0, 1, 2).flatten(1, 2) for x in (q, v))  # [11, 6, 8]
    return fastattn.varlen_attention(q, q, v, STARTS, STARTS, dropout_p=0.5)


def jagged(q: Tensor, v: Tensor) -> Tensor:
    """Dropout in a jagged tensor of the same sequences."""

    def rows(x: Tensor) -> Any:
        x = x.permute(3, 0, 1, 2).flatten(1, 2)
        nested = torch.nested.nested_tensor_from_jagged(x, STARTS, min_seqlen=0, max_seqlen=7)
        return nested.transpose(1, 2)

    nested = rows(q)
    out = attention(nested, nested, rows(v), dropout_p=0.5)
    return out.transpose(1, 2).values()


def mixed(q: Tensor, v: Tensor) -> Tensor:
    """The query is computed too, so a recomputed forward is more than one operator."""
    return attention(q.sin(), q.cos(), attention(q, q, v, dropout_p=0.5), dropout_p=0.5)


# Each is linear in its last argument, [2, 3, 8, 11] as the first.
CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "attention": lambda q, v: attention(q, q, v, dropout_p=0.5),
    "weights": lambda q, v: attention(q, q, v, dropout_p=0.5, need_weights=True)[0],
    "twice": lambda q, v: attention(q, q, attention(q, q, v, dropout_p=0.5), dropout_p=0.5),
    "mixed": mixed,
    "varlen": packed,
    "jagged": jagged,
    "additive": lambda q, v: fastattn.additive_attention(
        q[0], q[0], v[0], q[0, 0, 0], dropout_p=0.5
    ),
    "module": lambda q, v: MHA(q[0].mT, q[0].mT, v[0].mT, need_weights=False)[0],
    "checkpointed": lambda q, v: checkpoint(mixed, q, v, use_reentrant=False),
}


@contextlib.contextmanager
def budget_of(share: float) -> Iterator[None]:
    """Compile with a budget: which share of the activations may be saved."""
    # Without the cache: its key is the graph before the draws are split into their parts.
    with partitioner.patch(activation_memory_budget=share, enable_autograd_cache=False):
        yield


def assert_same_weights(run: Callable[[Tensor, Tensor], Tensor]) -> None:
    """The output is W v, so a backward with the same W satisfies <g, W v> = <W' g, v>."""
    query, value = rand(2, 3, 8, 11), rand(2, 3, 8, 11, requires_grad=True)
    for _ in range(2):
        out = run(query, value)
        grad = torch.randn_like(out)
        (found,) = torch.autograd.grad(out, value, grad)
        assert_close((found * value).sum(), (grad * out).sum())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("budget", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", CALLS)
def test_a_backward_on_a_budget_has_the_forwards_dropout(name: str, budget: float) -> None:
    with budget_of(budget):
        assert_same_weights(compiled(CALLS[name], dynamic=False))


# Inductor compiles the sines and cosines of the others, for half a minute.
@pytest.mark.parametrize(
    "name",
    ["twice", *(pytest.param(x, marks=pytest.mark.complete) for x in ("mixed", "checkpointed"))],
)
def test_inductors_backward_has_the_forwards_dropout(name: str) -> None:
    with budget_of(0.0):
        assert_same_weights(compiled(CALLS[name], dynamic=False, backend="inductor"))


def test_aggressive_recomputation_has_the_forwards_dropout() -> None:
    with partitioner.patch(aggressive_recomputation=True):
        assert_same_weights(compiled(mixed, dynamic=False))


def test_the_budget_of_a_region() -> None:
    region = getattr(torch.autograd.graph, "region_activation_memory_budget", None)
    if region is None:
        pytest.skip("this PyTorch has no budgets of regions")

    def call(q: Tensor, v: Tensor) -> Tensor:
        with region(0.0):
            return mixed(q, v)

    assert_same_weights(compiled(call, dynamic=False))


def test_a_budget_does_not_change_gradients() -> None:
    query, value = (rand(2, 3, 8, 11, requires_grad=True) for _ in range(2))
    grads = []
    for budget in (1.0, 0.5, 0.0):
        torch.compiler.reset()
        with budget_of(budget):
            run = compiled(mixed, dynamic=False)
            torch.manual_seed(3)
            out = run(query, value)
            after_forward = torch.get_rng_state()
            grads.append([out, *torch.autograd.grad(out.sin().sum(), (query, value))])
            assert torch.equal(torch.get_rng_state(), after_forward)
    torch.manual_seed(3)
    out = mixed(query, value)
    eager = [out, *torch.autograd.grad(out.sin().sum(), (query, value))]
    for found in grads:
        assert_close(found, eager)


def test_each_call_of_a_graph_draws_its_own_seed() -> None:
    def twice(q: Tensor) -> tuple[Tensor, ...]:
        return tuple(attention(q, q, q, dropout_p=0.5, need_weights=True)[1] for _ in range(2))

    with budget_of(0.0):
        run, query = compiled(twice, dynamic=False), rand(2, 2, 16, 8)
        first, second = run(query), run(query.requires_grad_())
    kept = [weights != 0 for weights in (*first, *second)]
    assert not any(torch.equal(a, b) for n, a in enumerate(kept) for b in kept[:n])
