"""sinusoidal_encoding under autograd, torch.func, torch.compile and torch.export."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from fastattn import sinusoidal_encoding, sinusoidal_table


@pytest.fixture
def x(generator: torch.Generator) -> Tensor:
    return torch.randn(2, 3, 5, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradient_is_the_scaled_gradient(backend: str, dtype: torch.dtype) -> None:
    x = torch.zeros(2, 3, 5, dtype=dtype, requires_grad=True)
    grad = torch.randn(2, 3, 5).to(dtype)
    sinusoidal_encoding(x, scale=1.7).backward(grad)
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert torch.equal(x.grad, grad * 1.7)


def test_nothing_is_saved_for_the_gradient(backend: str) -> None:
    saved = []
    x = torch.zeros(2, 3, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda s: s):
        sinusoidal_encoding(x, scale=2.0)
    assert saved == []


def test_vmap_over_positions(backend: str, x: Tensor) -> None:
    def f(x: Tensor, positions: Tensor) -> Tensor:
        return sinusoidal_encoding(x, positions=positions)

    for shape in ((4, 2, 3), (4, 1, 3), (4, 3), (4, 1), (4,)):
        positions = torch.randint(1000, shape)
        want = torch.stack([f(x, p) for p in positions])
        torch.testing.assert_close(torch.vmap(f, in_dims=(None, 0))(x, positions), want)
        last = positions.movedim(0, -1)
        torch.testing.assert_close(torch.vmap(f, in_dims=(None, -1))(x, last), want)
        both = torch.vmap(f)(x.expand(4, *x.shape), positions)
        torch.testing.assert_close(both, want)


def test_vmap_in_vmap_and_over_offsets(backend: str, x: Tensor) -> None:
    offsets = torch.arange(6).view(2, 3)

    def f(x: Tensor, offset: Tensor) -> Tensor:
        return sinusoidal_encoding(x, offset=offset, scale=2.0)

    got = torch.vmap(torch.vmap(f, in_dims=(None, 0)), in_dims=(None, 0))(x, offsets)
    want = torch.stack([torch.stack([f(x, o) for o in row]) for row in offsets])
    torch.testing.assert_close(got, want)


def test_decoding_does_not_recompile(backend: str) -> None:
    """Neither a new offset nor a new length makes a new graph, beyond the first few."""
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    step = torch.compile(sinusoidal_encoding, fullgraph=True, backend=counter)
    for offset in range(12):
        x = torch.zeros(2, 1, 8)
        assert torch.equal(step(x, offset=offset), sinusoidal_encoding(x, offset=offset))
    assert counter.frame_count <= 3  # 0 and 1 may be constants of their own
    counter.clear()
    for length in range(2, 12):
        x = torch.zeros(2, length, 8)
        assert torch.equal(step(x, offset=20), sinusoidal_encoding(x, offset=20))
    assert counter.frame_count <= 2
    counter.clear()
    for offset in range(12):  # a tensor is one graph
        x, where = torch.zeros(2, 1, 8), torch.tensor(offset)
        assert torch.equal(step(x, offset=where), sinusoidal_encoding(x, offset=offset))
    assert counter.frame_count <= 1


def test_compiled_table(backend: str) -> None:
    compiled = torch.compile(sinusoidal_table, fullgraph=True, backend="aot_eager")
    for length in (3, 5, 8):
        assert torch.equal(compiled(length, 6, offset=2), sinusoidal_table(length, 6, offset=2))


def test_exports_with_a_dynamic_length(backend: str) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            x = sinusoidal_encoding(x, scale=2.0, layout="tensor2tensor")
            return sinusoidal_encoding(x, positions=positions)

    batch, length = torch.export.Dim("batch", min=2), torch.export.Dim("length", min=2)
    shapes = ({0: batch, 1: length}, {0: batch, 1: length})
    example = (torch.zeros(2, 3, 8), torch.zeros(2, 3, dtype=torch.int64))
    exported = torch.export.export(Model(), example, dynamic_shapes=shapes).module()
    args = (torch.randn(5, 11, 8), torch.randint(100, (5, 11)))
    torch.testing.assert_close(exported(*args), Model()(*args))


def test_fake_tensors(backend: str) -> None:
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(2, 3, 8).transpose(0, 1)
        out = sinusoidal_encoding(x, offset=3)
        assert out.shape == (3, 2, 8)
        assert out.stride() == torch.empty_like(x).stride()
    # The frequencies that a later call reads are real ones.
    assert torch.equal(sinusoidal_table(1, 8)[0, ::2], torch.zeros(4))


def test_autocast_leaves_the_dtype_alone(backend: str) -> None:
    x = torch.zeros(2, 3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = sinusoidal_encoding(x, offset=9)
    assert out.dtype == torch.float32
    assert torch.equal(out, sinusoidal_encoding(x, offset=9))
