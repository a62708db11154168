"""The operators of attention in PyTorch: their registration, tracing, and `torch.func`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_calls import attention, loss, qkv, rand, stock
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from fastattn.library import operators

forward_op = torch.ops.fastattn.scaled_dot_product_attention.default
backward_op = torch.ops.fastattn.scaled_dot_product_attention_backward.default
pytestmark = pytest.mark.usefixtures("seeded", "fresh_compiler")


def forward_tensors(query: Tensor, key: Tensor, value: Tensor, **others: Tensor) -> list[Any]:
    given = {"query": query, "key": key, "value": value, **others}
    return [given.get(name) for name in operators[forward_op].names]


def backward_tensors(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, **others: Tensor
) -> list[Any]:
    given = {"grad_out": grad_out, "query": query, "key": key, "value": value, **others}
    return [given.get(name) for name in operators[backward_op].names]


# --- the registered operators ----------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {  # of a contiguous [B, H, L, D]
    "bhld": lambda x: x,
    "blhd": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "lbhd": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "rows-apart": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "last-not-innermost": lambda x: x.mT.contiguous().mT,
    "expanded": lambda x: x[:1].expand_as(x),
}
# scale, offset, window left and right, softcap, dropout_p; and first query, key and head
PLAIN = (0.5, 0, -1, -1, 0.0, 0.0, 0, 0, 0)


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


def test_meta_tensors_give_meta_tensors() -> None:
    out = attention(*(x.to("meta") for x in qkv()))
    assert out.is_meta
    assert out.shape == (2, 4, 5, 6)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_operator(backend: str, mode: str) -> None:
    tensors = qkv()
    traced = make_fx(lambda q, k, v: attention(q, k, v, is_causal=True), tracing_mode=mode)(
        *tensors
    )
    assert forward_op in [node.target for node in traced.graph.nodes]
    others = qkv()
    assert_close(traced(*others), attention(*others, is_causal=True))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_jit_trace_records_the_operator(backend: str) -> None:
    traced = torch.jit.trace(lambda q, k, v: attention(q, k, v, is_causal=True), qkv())
    assert "fastattn::scaled_dot_product_attention" in str(traced.graph)
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
def test_a_transform_of_ours_equals_that_of_pytorch(
    backend: str, name: str, function: Callable[..., Any]
) -> None:
    transform, inputs = TRANSFORMS[name], qkv()
    forward_mode = name in ("jvp", "jacfwd", "jvp-of-grad", "hessian")
    if forward_mode and backend != "reference":
        with pytest.raises(RuntimeError, match="forward-mode"):
            transform(lambda *x: function(attention, *x))(*inputs)
        return
    actual = transform(lambda *x: function(attention, *x))(*inputs)
    expected = transform(lambda *x: function(stock, *x))(*inputs)
    assert_close(actual, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("mapped", [False, True])
def test_vmap_of_the_backward_operator_keeps_the_shape_of_the_mask(mapped: bool) -> None:
    n, tensors = 3, qkv()
    mask = rand(n, 1, 4, 1, 7) if mapped else rand(1, 4, 1, 7)
    out, lse, _ = forward_op(*forward_tensors(*tensors), *PLAIN, 0, "")
    grads = torch.stack([torch.randn_like(out) for _ in range(n)])

    def backward(grad_out: Tensor, attn_mask: Tensor) -> tuple[Tensor, ...]:
        given = backward_tensors(grad_out, *tensors, attn_mask=attn_mask, out=out, lse=lse)
        return backward_op(*given, *PLAIN, 0, True, False, "")

    together = vmap(backward, (0, 0 if mapped else None))(grads, mask)
    alone = [backward(grads[i], mask[i] if mapped else mask) for i in range(n)]
    for result, examples in zip(together, zip(*alone, strict=True), strict=True):
        assert_close(result, torch.stack(examples))


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
