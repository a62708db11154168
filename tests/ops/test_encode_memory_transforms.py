"""encode_memory under autograd, torch.func, torch.compile and torch.export."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from fastattn import encode_memory

forward_op = torch.ops.fastattn.encode_memory.default
backward_op = torch.ops.fastattn.encode_memory_backward.default
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
