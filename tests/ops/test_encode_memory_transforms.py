"""encode_memory under autograd, torch.func, torch.compile and torch.export."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, stack_module_state, vmap

from fastattn import encode_memory

forward_op = torch.ops.fastattn.encode_memory.default
backward_op = torch.ops.fastattn.encode_memory_backward.default
TABLES = [None, 3]
pytestmark = pytest.mark.usefixtures("fresh_compiler")


def inputs(tables: int | None, *lead: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    table = () if tables is None else (tables,)
    tokens = torch.randint(0, 6, (*lead, 2, 3, 4), generator=draw)
    weight = torch.randn(*lead, *table, 6, 5, dtype=torch.float64, generator=draw)
    temporal = torch.randn(*lead, *table, 3, 5, dtype=torch.float64, generator=draw)
    return tokens, weight, temporal


def encode(tokens: Tensor, weight: Tensor, temporal: Tensor) -> Tensor:
    return encode_memory(tokens, weight, temporal=temporal)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tables", TABLES)
def test_gradients(backend: str, tables: int | None) -> None:
    tokens, weight, temporal = inputs(tables)
    weight.requires_grad_()
    temporal.requires_grad_()
    assert torch.autograd.gradcheck(lambda w, t: encode(tokens, w, t), (weight, temporal))
    assert torch.autograd.gradgradcheck(lambda w, t: encode(tokens, w, t), (weight, temporal))
    assert torch.autograd.gradcheck(lambda w: encode_memory(tokens, w), (weight,))


def test_only_what_is_needed_is_saved(backend: str) -> None:
    tokens, weight, temporal = inputs(2)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda s: s):  # type: ignore[arg-type, return-value]
        encode(tokens, weight.requires_grad_(), temporal)
    assert sorted(tuple(s.shape) for s in saved) == [(1, 2, 3, 4), (4, 5)]  # tokens and factors


def test_only_the_temporal_rows_are_trained(backend: str) -> None:
    tokens, weight, temporal = inputs(2)
    temporal.requires_grad_()
    encode(tokens, weight, temporal).sum().backward()
    assert weight.grad is None
    assert temporal.grad is not None
    filled = (tokens != 0).any(-1).sum(0).double()  # sentences that have a word
    assert torch.equal(temporal.grad, filled[None, :, None].expand(2, 3, 5))


@pytest.mark.parametrize("tables", TABLES)
def test_vmap_over_everything_and_over_each(backend: str, tables: int | None) -> None:
    tokens, weight, temporal = inputs(tables, 4)
    want = torch.stack([encode(*each) for each in zip(tokens, weight, temporal, strict=True)])
    torch.testing.assert_close(vmap(encode)(tokens, weight, temporal), want)
    last = [x.movedim(0, -1) for x in (tokens, weight, temporal)]
    torch.testing.assert_close(vmap(encode, in_dims=-1)(*last), want)
    args = [tokens, weight, temporal]
    for mapped in range(3):
        dims = [0 if n == mapped else None for n in range(3)]
        given = [x if n == mapped else x[0] for n, x in enumerate(args)]
        want = torch.stack(
            [encode(*(x[i] if n == mapped else x for n, x in enumerate(given))) for i in range(4)]
        )
        torch.testing.assert_close(vmap(encode, in_dims=tuple(dims))(*given), want)


def test_vmap_in_vmap(backend: str) -> None:
    tokens, weight, temporal = inputs(2, 3, 2)
    want = torch.stack(
        [
            torch.stack([encode(tokens[i, j], weight[i, j], temporal[i, j]) for j in range(2)])
            for i in range(3)
        ]
    )
    torch.testing.assert_close(vmap(vmap(encode))(tokens, weight, temporal), want)


def test_gradient_of_each_example(backend: str) -> None:
    tokens, weight, temporal = inputs(2)

    def loss(weight: Tensor, temporal: Tensor, tokens: Tensor) -> Tensor:
        return (encode(tokens[None], weight, temporal) ** 2).sum()

    each = vmap(grad(loss, argnums=(0, 1)), in_dims=(None, None, 0))(weight, temporal, tokens)
    for b in range(2):
        want = grad(loss, argnums=(0, 1))(weight, temporal, tokens[b])
        torch.testing.assert_close(tuple(g[b] for g in each), want)
    whole = grad(lambda w: (encode(tokens, w, temporal) ** 2).sum())(weight)
    torch.testing.assert_close(each[0].sum(0), whole)


def test_several_models_train_as_each_alone(backend: str) -> None:
    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(2, 6, 5, dtype=torch.float64))

        def forward(self, tokens: Tensor) -> Tensor:
            return encode_memory(tokens, self.weight)

    models = [Encoder() for _ in range(3)]
    stacked, _ = stack_module_state(models)
    tokens = inputs(2, 3)[0]

    def run(parameters: dict[str, Tensor], tokens: Tensor) -> Tensor:
        return functional_call(models[0], parameters, (tokens,))

    out = vmap(run)(stacked, tokens)
    (out**2).sum().backward()
    for r, model in enumerate(models):
        (model(tokens[r]) ** 2).sum().backward()
        assert model.weight.grad is not None
        torch.testing.assert_close(stacked["weight"].grad[r], model.weight.grad)


def test_tokens_are_checked_inside_transforms(backend: str) -> None:
    tokens, weight, temporal = inputs(2, 3)
    tokens[2, 1, 0, 0] = 6
    error = IndexError if backend == "cpu" else (IndexError, RuntimeError)
    with pytest.raises(error):
        vmap(encode)(tokens, weight, temporal)


@pytest.mark.complete
@pytest.mark.parametrize("strided", [False, True])
def test_opcheck(backend: str, strided: bool) -> None:
    tokens, weight, temporal = inputs(3, 2)
    factors = torch.randn(4, 5, dtype=torch.float64)
    if strided:
        weight, temporal = (x.mT.contiguous().mT for x in (weight, temporal))
    for rows in (None, temporal):
        weight = weight.detach().requires_grad_()
        torch.library.opcheck(forward_op, (tokens, weight, factors, rows, 0, ""))
        out = torch.randn(2, 2, 3, 3, 5, dtype=torch.float64, requires_grad=True)
        args = (out, tokens, factors, 6, rows is not None, 0, "")
        torch.library.opcheck(backward_op, args)


def test_inference_mode_leaves_nothing_behind(backend: str) -> None:
    """Cached factors are ordinary tensors, even if inference mode made them."""
    tokens = torch.ones(1, 1, 13, dtype=torch.int64)
    weight = torch.randn(3, 17, requires_grad=True)
    with torch.inference_mode():
        encode_memory(tokens, weight)
    encode_memory(tokens, weight).sum().backward()
    assert weight.grad is not None
