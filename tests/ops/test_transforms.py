"""The operators of attention in PyTorch: tracing, `torch.func`, the compiler and export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_calls import attention, compiled, everything, loss, qkv, rand, stock
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.bias import causal_lower_right
from torch.testing import assert_close

from fastattn import use_backend

forward_op = torch.ops.fastattn.scaled_dot_product_attention.default
pytestmark = pytest.mark.usefixtures("seeded", "fresh_compiler")


# --- the registered operators ----------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {  # of a contiguous [B, H, L, D]
    "bhld": lambda x: x,
    "blhd": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "lbhd": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "rows-apart": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "last-not-innermost": lambda x: x.mT.contiguous().mT,
    "expanded": lambda x: x[:1].expand_as(x),
}


def test_fake_tensors_have_the_shapes_and_strides_of_real_ones(backend: str) -> None:
    mode = FakeTensorMode()
    for layout in LAYOUTS.values():
        real = [layout(x) for x in qkv()]
        fake = [mode.from_tensor(x) for x in real]
        with mode:
            imagined = attention(*fake, return_lse=True, need_weights=True)
        for a, b in zip(
            imagined, attention(*real, return_lse=True, need_weights=True), strict=True
        ):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_operator(backend: str, mode: str) -> None:
    tensors = qkv()
    traced = make_fx(lambda q, k, v: attention(q, k, v, is_causal=True), tracing_mode=mode)(
        *tensors
    )
    assert forward_op in [node.target for node in traced.graph.nodes]
    others = qkv()
    assert_close(traced(*others), attention(*others, is_causal=True))


# --- torch.func ------------------------------------------------------------------------------

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "full": lambda f, q, k, v: f(q, k, v),
    "causal": lambda f, q, k, v: f(q, k, v, is_causal=True),
    "mean": lambda f, q, k, v: f(q, k, v.mean(-2, keepdim=True).expand_as(v)),
}
TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "grad": lambda f: grad(lambda *x: loss(f(*x)), (0, 1, 2)),
    "vjp": lambda f: lambda *x: vjp(f, *x)[1](torch.ones(2, 4, 5, 6, dtype=torch.float64)),
    "vmap": lambda f: vmap(f),
    "vmap-of-keys": lambda f: vmap(f, (None, 0, 0)),
    "vmap-of-queries": lambda f: vmap(f, (0, None, None), 1),
    "vmap-of-heads": lambda f: vmap(f, 1, 1),
    "vmap-twice": lambda f: vmap(vmap(f)),
    "vmap-in-chunks": lambda f: vmap(f, chunk_size=1),
    "vmap-of-grad": lambda f: vmap(grad(lambda *x: loss(f(*x)), (0, 1, 2))),
    "grad-of-vmap": lambda f: grad(lambda *x: loss(vmap(f)(*x)), (0, 1, 2)),
    "jacrev": lambda f: jacrev(f, (0, 1, 2)),
    "jacrev-in-chunks": lambda f: jacrev(f, 1, chunk_size=7),
    "jacrev-one-by-one": lambda f: jacrev(f, 1, chunk_size=1),
    "grad-of-grad": lambda f: grad(
        lambda *x: loss(grad(lambda *y: loss(f(*y)), (0, 1, 2))(*x)), (0, 1, 2)
    ),
    "jvp": lambda f: lambda *x: jvp(f, x, tuple(y.cos() for y in x)),
    "jacfwd": lambda f: jacfwd(f, 1),
    "jvp-of-grad": lambda f: (
        lambda *x: jvp(grad(lambda *y: loss(f(*y)), (0, 1, 2)), x, tuple(y.cos() for y in x))
    ),
    "hessian": lambda f: hessian(lambda *x: loss(f(*(y[:1, :2, :2, :2] for y in x))), 0),
}


@pytest.mark.sampled
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_equal_pytorchs(backend: str, name: str, function: Callable[..., Any]) -> None:
    transform, inputs = TRANSFORMS[name], qkv()
    forward_mode = name in ("jvp", "jacfwd", "jvp-of-grad", "hessian")
    if forward_mode and backend != "reference":
        with pytest.raises(RuntimeError, match="forward-mode"):
            transform(lambda *x: function(attention, *x))(*inputs)
        return
    actual = transform(lambda *x: function(attention, *x))(*inputs)
    expected = transform(lambda *x: function(stock, *x))(*inputs)
    assert_close(actual, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("randomness", ["error", "same", "different"])
def test_vmap_treats_randomness_as_asked(backend: str, randomness: str) -> None:
    query = rand(1, 2, 2, 16, 4).expand(3, -1, -1, -1, -1)  # two equal sequences, three times

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        return attention(x, x, x, dropout_p=0.5, need_weights=True)

    run = vmap(call, randomness=randomness)
    if randomness == "error":
        with pytest.raises(RuntimeError, match="randomness"):
            run(query)
        return
    weights = run(query)[1]
    assert torch.equal(weights[0], weights[1]) == (randomness == "same")
    assert not torch.equal(weights[0, 0], weights[0, 1])
    if randomness == "same":
        torch.manual_seed(4)
        mapped = run(query)[1][0]
        torch.manual_seed(4)
        assert_close(mapped, call(query[0])[1])
    mean = vmap(grad(lambda x: loss(call(x))), randomness=randomness)(query)
    assert mean.isfinite().all()


# -- derivatives, up to the third, and what they keep ---------------------------------------------


def _small(*shape: int) -> Tensor:
    return rand(*shape, requires_grad=True)


def test_third_derivatives(backend: str) -> None:
    query = _small(1, 1, 2, 2)

    def nth(f: Callable[..., Tensor], order: int) -> Tensor:
        result = f(query, query, query).sin().sum()
        for _ in range(order):
            (gradient,) = torch.autograd.grad(result, query, create_graph=True)
            result = gradient.sin().sum()
        return gradient

    assert_close(nth(attention, 3), nth(stock, 3))


def test_an_unused_result_costs_no_gradient(backend: str) -> None:
    query = rand(1, 2, 3, 4, requires_grad=True)
    results = attention(query, query, query, return_lse=True, need_weights=True)
    for n in range(3):
        (alone,) = torch.autograd.grad(results[n].sin().sum(), query, retain_graph=True)
        others = [0.0 if m != n else 1.0 for m in range(3)]
        weighted = sum(w * x.sin().sum() for w, x in zip(others, results, strict=True))
        assert_close(torch.autograd.grad(weighted, query, retain_graph=True)[0], alone)


@pytest.mark.parametrize("results", [(0,), (0, 1), (0, 1, 2)])
def test_saved_memory_is_linear_in_the_length(backend: str, results: tuple[int, ...]) -> None:
    query = rand(1, 2, 64, 4, requires_grad=True)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: (saved.append(x.untyped_storage().nbytes()), x)[1], lambda x: x
    ):
        attention(query, query, query, return_lse=1 in results, need_weights=2 in results)
    assert saved
    assert max(saved) <= query.untyped_storage().nbytes()


def test_checkpointing_recomputes_the_same_dropout(backend: str) -> None:
    query = rand(1, 2, 8, 4, requires_grad=True)

    def call(x: Tensor) -> Tensor:
        return attention(x, x, x, dropout_p=0.5)

    torch.manual_seed(1)
    (expected,) = torch.autograd.grad(loss(call(query)), query)
    torch.manual_seed(1)
    out = torch.utils.checkpoint.checkpoint(call, query, use_reentrant=False)
    assert_close(torch.autograd.grad(loss(out), query)[0], expected)


# --- the compiler and export ---------------------------------------------------------------------


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


def test_each_length_becomes_dynamic_on_its_own() -> None:
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


def test_a_forced_backend_applies_when_compiled_code_runs() -> None:
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
