"""The fast path of plain additive attention gives, bit for bit, what the general way gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fast_paths import check_both_ways
from torch import Tensor

import fastattn
from fastattn import additive_attention
from fastattn.ops._additive_plain import attend_additively

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NAMES = "qkuvb"


def tensors(queries: int, dtype: torch.dtype, biased: bool) -> list[Tensor | None]:
    draw = torch.Generator().manual_seed(3)
    shapes = ((2, queries, 20), (2, 30, 20), (2, 30, 9), (20,), (20,))
    found: list[Tensor | None] = [torch.randn(x, generator=draw).to(dtype) for x in shapes]
    return found if biased else [*found[:4], None]


def run(
    queries: int, dtype: torch.dtype, causal: bool, biased: bool, wants: str
) -> list[Tensor | None]:
    given = tensors(queries, dtype, biased)
    for name, x in zip(NAMES, given, strict=True):
        if x is not None:
            x.requires_grad_(name in wants)
    out = additive_attention(*given, is_causal=causal)
    if not out.requires_grad:
        return [out]
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(dtype))
    return [out.detach(), *(None if x is None else x.grad for x in given)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("biased", "wants"),
    [(True, "qkuvb"), (False, "qkuv"), (True, "b"), (True, "v"), (False, "k"), (True, "")],
)
def test_both_ways_agree_to_the_bit(
    dtype: torch.dtype,
    queries: int,
    causal: bool,
    biased: bool,
    wants: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_both_ways(
        monkeypatch, "plain_additive", lambda: run(queries, dtype, causal, biased, wants)
    )


@pytest.mark.parametrize("biased", [False, True])
def test_derivatives(biased: bool) -> None:
    """By finite differences, twice."""
    given = tensors(3, torch.float64, biased)
    leaves = [x.detach().requires_grad_() for x in given if x is not None]
    assert "plain_additive" in str(additive_attention(*leaves).grad_fn)
    assert torch.autograd.gradcheck(additive_attention, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(additive_attention, leaves, fast_mode=True)


class _Own(Tensor):
    pass


def test_what_the_fast_path_cannot_do_is_left_to_the_general_one() -> None:
    q, k, u = torch.randn(2, 3, 4), torch.randn(2, 5, 4), torch.randn(2, 5, 6)
    v, bias = torch.nn.Parameter(torch.randn(4)), torch.randn(4)
    given = (q, k, u, v, bias, False)
    assert attend_additively(*given) is not None
    assert attend_additively(q, k, u, v, None, True) is not None
    for place, other in (
        (0, q[0]),
        (0, q.bfloat16()),
        (0, q.to("meta")),
        (0, q[:, :0]),
        (0, q.as_subclass(_Own)),
        (1, k[:1]),
        (1, k[..., :3]),
        (1, k.to_sparse()),
        (2, u[:, :4]),
        (2, u.double()),
        (3, None),
        (3, v[:3]),
        (3, v.double()),
        (3, v.detach().to("meta")),
        (4, bias[None]),
        (4, bias.double()),
        (4, 0.0),
        (5, 1),
    ):
        args: list[Any] = list(given)
        args[place] = other
        assert attend_additively(*args) is None, (place, other)
    assert attend_additively(q, k, u, None, None, False) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert attend_additively(*given) is None
    with fastattn.use_backend("reference"):
        assert attend_additively(*given) is None
