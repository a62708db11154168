"""memory_hop_attention under torch.func, torch.compile, torch.export and autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn import memory_hop_attention

pytestmark = pytest.mark.filterwarnings("ignore::fastattn.FallbackWarning")


@pytest.fixture(params=[False, True], ids=["chosen", "reference"])
def forced(request: pytest.FixtureRequest) -> Any:
    """The backend that is chosen, and the reference."""
    if not request.param:
        yield
        return
    with fastattn.use_backend("reference"):
        yield


def normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


@pytest.fixture
def inputs(generator: torch.Generator) -> tuple[Tensor, ...]:
    """query, in_memory, out_memory, hop_proj, bias of two hops."""
    shapes = ((2, 3), (2, 4, 3), (2, 2, 4, 3), (3, 3), (2, 2, 4))
    return tuple(0.7 * normal(*shape, generator=generator) for shape in shapes)


def hops(query: Tensor, m: Tensor, c: Tensor, hop_proj: Tensor, bias: Tensor) -> Tensor:
    return memory_hop_attention(  # type: ignore[no-any-return]
        query, m, c, hops=2, hop_proj=hop_proj, memory_bias=bias, activation="tanh"
    )


def test_compiles_without_a_break(forced: None, inputs: tuple[Tensor, ...]) -> None:
    torch._dynamo.reset()
    leaves = [x.clone().requires_grad_() for x in inputs]
    compiled = torch.compile(hops, fullgraph=True, backend="aot_eager")
    got, want = compiled(*leaves), hops(*leaves)
    torch.testing.assert_close(got, want)
    weight = torch.arange(6.0).view(2, 3).double()
    grads = torch.autograd.grad((got * weight).sum(), leaves)
    expected = torch.autograd.grad((want * weight).sum(), leaves)
    for grad, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, other)


def test_compiles_with_one_memory_for_all(forced: None, inputs: tuple[Tensor, ...]) -> None:
    torch._dynamo.reset()
    one = inputs[1][:1].clone().requires_grad_()

    def f(query: Tensor, memory: Tensor) -> Tensor:
        return memory_hop_attention(query, memory.expand(2, 4, 3), hops=2).sin().sum()

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    (got,) = torch.autograd.grad(compiled(inputs[0], one), one)
    (want,) = torch.autograd.grad(f(inputs[0], one), one)
    torch.testing.assert_close(got, want)


def test_exports(forced: None, inputs: tuple[Tensor, ...]) -> None:
    class Model(torch.nn.Module):
        def forward(self, *args: Tensor) -> Tensor:
            return hops(*args)

    exported = torch.export.export(Model(), inputs).module()
    torch.testing.assert_close(exported(*inputs), hops(*inputs))


@pytest.mark.parametrize(
    "mapped", [(0, 0, 0, 0, 0), (0, None, None, None, None), (1, None, 0, 2, 1)]
)
def test_vmap(forced: None, inputs: tuple[Tensor, ...], mapped: tuple[int | None, ...]) -> None:
    many = [
        x if dim is None else torch.stack([x, 2 * x, -x], dim)
        for x, dim in zip(inputs, mapped, strict=True)
    ]
    got = torch.vmap(hops, in_dims=mapped)(*many)
    for i in range(3):
        one = [x if dim is None else x.select(dim, i) for x, dim in zip(many, mapped, strict=True)]
        torch.testing.assert_close(got[i], hops(*one))


def test_per_sample_gradients(forced: None, inputs: tuple[Tensor, ...]) -> None:
    """A memory and a projection that all examples share have a gradient in each."""
    query, _, c, hop_proj, bias = inputs
    examples = torch.stack([query, -query, query + 1])

    def loss(shared: Tensor, hop_proj: Tensor, query: Tensor) -> Tensor:
        return hops(query, shared, c, hop_proj, bias).sin().sum()

    one = inputs[1][:1]
    gradient = torch.func.grad(loss, argnums=(0, 1))
    got = torch.vmap(gradient, in_dims=(None, None, 0))(one, hop_proj, examples)
    for i in range(3):
        want = gradient(one, hop_proj, examples[i])
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a[i], b)


def test_hessian(forced: None, inputs: tuple[Tensor, ...]) -> None:
    def loss(query: Tensor) -> Tensor:
        return hops(query, *inputs[1:]).sum()

    hessian = torch.func.jacrev(torch.func.grad(loss))(inputs[0]).view(6, 6)
    torch.testing.assert_close(hessian, hessian.mT)
    torch.testing.assert_close(hessian, torch.func.hessian(loss)(inputs[0]).view(6, 6))


def test_forward_mode(inputs: tuple[Tensor, ...]) -> None:
    tangent = torch.ones_like(inputs[0])
    out, derivative = torch.func.jvp(lambda q: hops(q, *inputs[1:]), (inputs[0],), (tangent,))
    torch.testing.assert_close(out, hops(*inputs))
    jacobian = torch.func.jacrev(lambda q: hops(q, *inputs[1:]))(inputs[0])
    torch.testing.assert_close(derivative, jacobian.sum((-1, -2)))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_operator_is_registered_rightly(forced: None, requires_grad: bool) -> None:
    operator = torch.ops.fastattn.memory_hop_attention.default
    for dtype in (torch.float32, torch.bfloat16):

        def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(*shape).to(dtype).requires_grad_(requires_grad)

        tensors = draw(2, 2, 3), draw(2, 4, 3), draw(2, 2, 4, 3), draw(3, 3)
        mask = torch.ones(2, 1, 1, 4, dtype=torch.bool)
        for weights in (False, True):
            options = (2, "relu", "softmax", 0.5, weights, "")
            torch.library.opcheck(operator, (*tensors, mask, draw(1, 1, 2, 4), *options))
        stack = draw(2, 3, 4, 3)
        linear = (2, "none", "none", 1.0, False, "")
        torch.library.opcheck(operator, (tensors[0], stack, None, None, None, None, *linear))


def test_autocast(forced: None) -> None:
    query, memory = torch.randn(2, 3), torch.randn(2, 4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        out = memory_hop_attention(query, memory, hops=2)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, memory_hop_attention(query.bfloat16(), memory.bfloat16(), hops=2))


def test_no_gradient_no_graph(forced: None) -> None:
    query, memory = torch.randn(2, 3, requires_grad=True), torch.randn(2, 4, 3)
    with torch.no_grad():
        assert not memory_hop_attention(query, memory).requires_grad
    assert not memory_hop_attention(query.detach(), memory).requires_grad


def test_what_is_saved_does_not_grow_with_the_memory(forced: None) -> None:
    saved: list[Tensor] = []
    query, memory = torch.randn(2, 3, requires_grad=True), torch.randn(2, 50, 3)
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda s: s):
        memory_hop_attention(query, memory, hops=4)
    own = [x for x in saved if x.data_ptr() != memory.data_ptr()]
    assert sum(x.numel() for x in own) <= 2 * (3 + 9 * 3 + 4 * 2)
