"""The fast path of plain memory hops gives, bit for bit, what the general way gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fast_paths import check_both_ways
from torch import Tensor

import fastattn
from fastattn.ops._memory_hops_plain import hop_plainly

HOPS = 3


def memories(kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    draw = torch.Generator().manual_seed(2)
    single, stack, each = (4, 50, 20), (4, HOPS + 1, 50, 20), (4, HOPS, 50, 20)

    def memory(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    if kind == "stack":
        return memory(stack), None
    if kind == "same":
        return memory(single), None
    if kind == "each":
        return memory(each), memory(each)
    if kind == "strided":
        return memory(each).transpose(1, 2)[:, :, 0], memory((4, 50, 40))[..., 20:]
    return memory(single), memory(single)


def run(kind: str, dtype: torch.dtype, masked: bool, **wants: bool) -> list[Tensor | None]:
    query = torch.randn(4, 20, generator=torch.Generator().manual_seed(1)).to(dtype)
    in_memory, out_memory = memories(kind, dtype)
    leaves = [x for x in (query, in_memory, out_memory) if x is not None]
    for leaf, want in zip(leaves, wants.values(), strict=False):
        leaf.requires_grad_(want)
    rows, lengths = torch.arange(50), torch.tensor([50, 3, 0, 17])[:, None]
    mask = (rows < lengths) & ((lengths == 50) | (rows % 3 != 1)) if masked else None
    out = fastattn.memory_hop_attention(
        query, in_memory, out_memory, hops=HOPS, memory_mask=mask, scale=0.5
    )
    if not out.requires_grad:
        return [out]
    out.backward(torch.randn(4, 20, generator=torch.Generator().manual_seed(3)).to(dtype))
    return [out, *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["two", "stack", "same", "each", "strided"])
@pytest.mark.parametrize(
    "wants",
    [
        {"q": True, "m": True, "c": True},
        {"q": True, "m": False, "c": False},
        {"q": False, "m": True, "c": False},
        {"q": False, "m": False, "c": False},
    ],
    ids=["all", "query", "in", "none"],
)
def test_both_ways_agree_to_the_bit(
    dtype: torch.dtype, masked: bool, kind: str, wants: dict[str, bool], monkeypatch: Any
) -> None:
    check_both_ways(monkeypatch, "plain_hops", lambda: run(kind, dtype, masked, **wants))


@pytest.mark.parametrize("kind", ["two", "stack"])
def test_a_second_derivative_passes(kind: str) -> None:
    def second(backend: str | None) -> Tensor:
        query = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4).requires_grad_()
        shape = (2, 2, 5, 4) if kind == "stack" else (2, 5, 4)
        size = torch.Size(shape).numel()
        m = torch.linspace(-1, 2, size, dtype=torch.float64).sin().reshape(shape)
        c = None if kind == "stack" else m.cos()
        hop = lambda: fastattn.memory_hop_attention(query, m, c, hops=1)  # noqa: E731
        if backend is None:
            out = hop()
        else:
            with fastattn.use_backend(backend):
                out = hop()
        (first,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
        return torch.autograd.grad(first.square().sum(), query)[0]

    torch.testing.assert_close(second(None), second("reference"), rtol=1e-12, atol=1e-12)


class _Own(Tensor):
    pass


def test_what_the_fast_path_cannot_do_is_left_to_the_general_one() -> None:
    q, m = torch.randn(3, 4), torch.randn(3, 5, 4)
    given = (q, m, m, None, 2, 1.0)
    assert hop_plainly(*given) is not None
    for place, other in (
        (0, q.to("meta")),
        (0, q.as_subclass(_Own)),
        (0, q[:, None].expand(3, 2, 4)),
        (0, q.bfloat16()),
        (1, m[:1].expand(3, 5, 4)),  # one memory for all
        (1, m[:1]),
        (1, m.transpose(1, 2).contiguous().transpose(1, 2)),  # rows apart
        (1, m[..., :3]),
        (1, m.to_sparse()),
        (2, m[:, :4]),
        (2, m.double()),
        (3, torch.ones(5, dtype=torch.bool)),
        (3, torch.ones(3, 5)),
        (4, 0),
        (4, True),
        (5, 1),
    ):
        args = list(given)
        args[place] = other
        assert hop_plainly(*args) is None, (place, other)
    with torch.autocast("cpu", torch.bfloat16):
        assert hop_plainly(*given) is None
    with fastattn.use_backend("reference"):
        assert hop_plainly(*given) is None
    with fastattn.use_backend("cpu"):
        assert hop_plainly(*given) is not None
