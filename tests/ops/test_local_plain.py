"""The fast path of plain local attention gives, bit for bit, what the general way gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fast_paths import check_both_ways
from torch import Tensor

import fastattn
from fastattn import luong_attention
from fastattn.ops._local_plain import attend_locally

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NAMES = "qkup"


def tensors(dtype: torch.dtype, value_width: int) -> list[Tensor]:
    """The query has gaps between its rows, and positions lie within and beyond the keys."""
    draw = torch.Generator().manual_seed(3)
    query = torch.randn(2, 9, 50, generator=draw).to(dtype)[..., :20]
    key, value = (torch.randn(2, 30, n, generator=draw).to(dtype) for n in (20, value_width))
    positions = torch.rand(2, 9, generator=draw).to(torch.promote_types(dtype, torch.float32))
    return [query, key, value, 40 * positions - 5]


def run(
    dtype: torch.dtype, value_width: int, window: str, padded: bool, wants: str
) -> list[Tensor | None]:
    given = tensors(dtype, value_width)
    for name, x in zip(NAMES, given, strict=True):
        x.requires_grad_(name in wants)
    query, key, value, positions = given
    padding = torch.arange(30).expand(2, 30) % 7 == 3 if padded else None
    out = luong_attention(
        query, key, value, window=window, D=4, positions=positions, key_padding_mask=padding
    )
    if not out.requires_grad:
        return [out]
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    leaves = [x for x in given if x.requires_grad]
    grads = torch.autograd.grad(out, leaves, grad_out, allow_unused=window == "local-m")
    return [out.detach(), *grads]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value_width", [20, 9])
@pytest.mark.parametrize("window", ["local-p", "local-m"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("wants", ["qkup", "p", "k", ""])
def test_both_ways_agree_to_the_bit(
    dtype: torch.dtype,
    value_width: int,
    window: str,
    padded: bool,
    wants: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_both_ways(
        monkeypatch, "plain_local", lambda: run(dtype, value_width, window, padded, wants)
    )


def test_derivatives() -> None:
    """By finite differences, twice."""
    query, key, value, _ = (x[:1].detach() for x in tensors(torch.float64, 3))
    positions = torch.tensor([[0.3, 4.6, 29.2, 7.7, 12.1, 15.4, 3.3, 20.8, 25.6]])
    leaves = [x.requires_grad_() for x in (query, key, value, positions.double())]

    def f(query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
        return luong_attention(  # type: ignore[no-any-return]
            query, key, value, window="local-p", D=3, positions=positions
        )

    assert "plain_local" in str(f(*leaves).grad_fn)
    assert torch.autograd.gradcheck(f, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, leaves, fast_mode=True)


class _Own(Tensor):
    pass


def test_what_the_fast_path_cannot_do_is_left_to_the_general_one() -> None:
    query, key, value, positions = tensors(torch.float32, 9)
    padding = torch.zeros(2, 30, dtype=torch.bool)
    given = (query, key, value, positions, padding, 4, True)
    assert attend_locally(*given) is not None
    assert (
        attend_locally(query, torch.nn.Parameter(key), value, positions, None, 4, False) is not None
    )
    for place, other in (
        (0, query[0]),
        (0, query.bfloat16()),
        (0, query.to("meta")),
        (0, query[:, :0]),
        (0, query.mT.contiguous().mT),  # columns apart
        (0, query.as_subclass(_Own)),
        (1, key[:1]),
        (1, key[..., :3]),
        (1, key.to_sparse()),
        (2, value[:, :4]),
        (2, value.double()),
        (3, positions[:1].expand(2, 9)),
        (3, positions.double()),
        (3, positions[:, :3]),
        (3, positions.long()),
        (4, padding[:, ::2]),
        (4, padding.float()),
        (4, padding[:, :1].expand(2, 30)),
    ):
        args: list[Any] = list(given)
        args[place] = other
        assert attend_locally(*args) is None, (place, other)
    with torch.autocast("cpu", torch.bfloat16):
        assert attend_locally(*given) is None
    with fastattn.use_backend("reference"):
        assert attend_locally(*given) is None
