"""Attention under the compiler and export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_calls import attention, compiled, everything, loss, qkv, rand
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.testing import assert_close

from fastattn import use_backend

forward_op = torch.ops.fastattn.scaled_dot_product_attention.default
pytestmark = pytest.mark.usefixtures("seeded", "fresh_compiler")


@pytest.mark.complete
def test_compiled_by_inductor_with_changing_lengths() -> None:
    run = compiled(everything, dynamic=True, backend="inductor")
    for q_len, k_len in ((5, 7), (9, 4)):
        inputs = [
            rand(2, 4, q_len, 8, requires_grad=True),
            rand(2, 4, k_len, 8, requires_grad=True),
            rand(2, 4, k_len, 8, requires_grad=True),
            rand(4, 1, k_len, requires_grad=True),
        ]
        expected, actual = everything(*inputs), run(*inputs)
        assert_close(actual, expected)
        assert_close(
            torch.autograd.grad(loss(actual), inputs), torch.autograd.grad(loss(expected), inputs)
        )


def test_a_compiled_causal_bias_is_no_mask() -> None:
    run, inputs = compiled(attention, dynamic=False), qkv()
    expected = attention(*inputs, is_causal=True, causal_alignment="bottom_right")
    assert_close(run(*inputs, causal_lower_right(5, 7)), expected)


def test_one_dynamic_graph_serves_all_sizes() -> None:
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    run = torch.compile(attention, fullgraph=True, dynamic=True, backend=count)
    for batch, heads, q_len, k_len, width in ((2, 3, 5, 7, 4), (3, 2, 6, 8, 5), (4, 5, 9, 3, 8)):
        q, k = rand(batch, heads, q_len, width), rand(batch, heads, k_len, width)
        assert_close(run(q, k, k, rand(q_len, k_len)).shape, q.shape)
    assert len(graphs) == 1


def test_a_length_of_one_argument_becomes_dynamic_and_of_another_not() -> None:
    run = torch.compile(attention, fullgraph=True, backend="eager")
    q = rand(2, 3, 5, 4)
    for k_len in (7, 9):
        k = rand(2, 3, k_len, 4)
        assert_close(run(q, k, k), attention(q, k, k))
    for mask in (rand(9), rand(3, 1, 9), rand(5, 1), rand(2, 3, 5, 9)):
        assert_close(run(q, k, k, mask), attention(q, k, k, mask))


@pytest.mark.parametrize("inductor", [False, True], ids=["aot_eager", "inductor"])
def test_each_call_of_a_compiled_function_draws_its_own_dropout(inductor: bool) -> None:
    query = rand(2, 2, 16, 8, requires_grad=True)
    run = compiled(
        lambda q: attention(q, q, q, dropout_p=0.5, need_weights=True),
        dynamic=False,
        backend="inductor" if inductor else "aot_eager",
    )
    first, second = run(query), run(query)
    assert not torch.equal(first[1] == 0, second[1] == 0)
    torch.manual_seed(7)
    again = run(query)[1]
    torch.manual_seed(7)
    assert torch.equal(run(query)[1], again)
    # Backward drops what forward dropped: out is linear in value, with these weights.
    out, weights = run(query)
    (gradient,) = torch.autograd.grad(weights.sum() * 0 + out.sum(), query, retain_graph=True)
    assert gradient.isfinite().all()


def test_compiled_under_autocast() -> None:
    def call(*tensors: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return attention(*tensors)

    inputs = [x.float() for x in qkv()]
    out = compiled(call, dynamic=False)(*inputs)
    assert out.dtype == torch.bfloat16
    assert_close(out, call(*inputs))


def test_a_forced_backend_is_asked_when_compiled_code_runs() -> None:
    run, inputs = compiled(attention, dynamic=False), qkv()
    expected = run(*inputs)
    with use_backend("reference"):
        assert_close(run(*inputs), expected)
        assert torch.equal(run(*inputs), attention(*inputs))


def test_compiled_errors_are_the_eager_errors() -> None:
    run = torch.compile(attention, backend="eager")
    q, k, v = qkv()
    with pytest.raises(RuntimeError, match="key and value must have the same length"):
        run(q, k, v[:, :, :3])
    with pytest.raises(Exception, match="generator must be None under"):
        compiled(attention, False)(q, k, v, dropout_p=0.5, generator=torch.Generator())


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_lengths(strict: bool) -> None:
    class Module(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
            return attention(
                query, key, key, mask, need_weights=True, causal_alignment="bottom_right"
            )

    batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", max=512)
    program = torch.export.export(
        Module(),
        (rand(2, 4, 5, 8), rand(2, 4, 7, 8), rand(2, 1, 1, 7)),
        dynamic_shapes={
            "query": {0: batch},
            "key": {0: batch, 2: length},
            "mask": {0: batch, 3: length},
        },
        strict=strict,
    )
    assert forward_op in [node.target for node in program.graph.nodes]
    inputs = rand(3, 4, 5, 8), rand(3, 4, 11, 8), rand(3, 1, 1, 11)
    assert_close(program.module()(*inputs), Module()(*inputs))
    decomposed = program.run_decompositions().module()
    assert_close(decomposed(*inputs), Module()(*inputs))
