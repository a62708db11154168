"""The fast path of the sinusoidal encoding gives, bit for bit, what the general way gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fast_paths import check_both_ways
from torch import Tensor

import fastattn
from fastattn import sinusoidal_encoding
from fastattn.ops._sinusoidal_plain import encode_plainly

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
LAYOUTS = ["interleaved", "tensor2tensor", "marian", "split_exponent"]
STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "one_sequence": lambda x: x[0],
    "heads": lambda x: x.view(3, 1, 7, 33).expand(3, 2, 7, 33),
    "transposed": lambda x: x.mT.contiguous().mT,
    "sliced": lambda x: x[..., 1::2],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("offset", "scale"), [(0, None), (-5, 2.5), (10**9, 0.3)])
@pytest.mark.parametrize("differentiable", [False, True])
def test_both_ways_agree_to_the_bit(
    dtype: torch.dtype,
    strides: str,
    layout: str,
    offset: int,
    scale: float | None,
    differentiable: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(3, 7, 33, generator=torch.Generator().manual_seed(1)).to(dtype)

    def run() -> list[Tensor | None]:
        leaf = x.clone().requires_grad_(differentiable)
        out = sinusoidal_encoding(STRIDES[strides](leaf), offset=offset, layout=layout, scale=scale)
        assert out.requires_grad == differentiable
        if not differentiable:
            return [out]
        grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
        return [out.detach(), torch.autograd.grad(out, leaf, grad_out)[0]]

    check_both_ways(monkeypatch, "plain_sinusoidal", run)


def test_strides_are_those_of_the_general_way() -> None:
    x = torch.randn(3, 5, 4).transpose(0, 1)
    out = sinusoidal_encoding(x)
    assert out.stride() == torch.empty_like(x).stride()
    assert out.stride() == sinusoidal_encoding(x.requires_grad_()).stride()


def test_derivatives() -> None:
    """By finite differences, twice; nothing of a result that is overwritten is read."""
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)

    def encode(x: Tensor) -> Tensor:
        return sinusoidal_encoding(x, scale=3.0)

    assert "Mul" in type(encode(x).grad_fn).__name__
    assert torch.autograd.gradcheck(encode, x)
    assert torch.autograd.gradgradcheck(encode, x)
    out = encode(x)
    with torch.no_grad():
        out.fill_(math.nan)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, torch.full_like(x, 3.0))


def test_forward_mode() -> None:
    x, tangent = torch.randn(2, 3, 6), torch.randn(2, 3, 6)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        out = torch.autograd.forward_ad.unpack_dual(sinusoidal_encoding(dual, scale=3.0))
    torch.testing.assert_close(out.primal, sinusoidal_encoding(x, scale=3.0))
    torch.testing.assert_close(out.tangent, 3.0 * tangent)


def test_a_new_leaf_is_not_made_of_a_plain_tensor() -> None:
    x = torch.randn(2, 3, 6, requires_grad=True)
    before = x.detach().clone()
    with torch.no_grad():
        assert not sinusoidal_encoding(x).requires_grad
    assert sinusoidal_encoding(x).grad_fn is not None
    assert torch.equal(x, before)


class _Own(Tensor):
    pass


def test_what_the_fast_path_cannot_do_is_left_to_the_general_one() -> None:
    x = torch.randn(2, 3, 6)
    given = (x, 0, "interleaved", 10000.0, None)
    assert encode_plainly(*given) is not None
    assert encode_plainly(torch.nn.Parameter(x), 2, "marian", 1.0, 2.0) is not None
    for place, other in (
        (0, None),
        (0, x[0, 0]),
        (0, x.expand(1, 2, 2, 3, 6)),
        (0, x[:, :0]),
        (0, x.int()),
        (0, x.bool()),
        (0, x.to("meta")),
        (0, x.to_sparse()),
        (0, x.as_subclass(_Own)),
        (0, torch.randn(1, 1, 40000).requires_grad_()),  # as fast by the general path
        (1, torch.tensor(1)),
        (1, True),
        (1, 2**62),
        (2, "unknown"),
        (2, ["interleaved"]),
        (3, 0.5),
        (3, math.inf),
        (3, math.nan),
        (3, 10000),
        (4, 2),
        (4, torch.tensor(2.0)),
    ):
        args: list[Any] = list(given)
        args[place] = other
        assert encode_plainly(*args) is None, (place, other)
    with torch.autocast("cpu", torch.bfloat16):
        assert encode_plainly(*given) is None
    with fastattn.use_backend("reference"):
        assert encode_plainly(*given) is None


def test_a_result_of_another_kind_is_refused(native: Any) -> None:
    x = torch.randn(2, 3, 6)
    columns = fastattn.backends.cpu.sinusoidal._columns(6, "interleaved", 10000.0)[1]
    for out in (x[:1].clone(), x.double(), x[0].clone(), x[None].clone()):
        before = out.clone()
        with pytest.raises(TypeError, match="not a plain call"):
            native.plain_sinusoidal(x, out, 0, 1.0, columns, 1)
        assert torch.equal(out, before)
