"""Plans of the sinusoidal encoding, as tests/ops/test_sdpa_plan.py of attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from planned import count, fresh
from torch import Tensor

import fastattn
from fastattn import sinusoidal_encoding as encode
from fastattn.call import Plans

pytestmark = pytest.mark.usefixtures("seeded", "native")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
LAYOUTS = ["interleaved", "tensor2tensor", "marian", "split_exponent"]
STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "one_sequence": lambda x: x[0],
    "heads": lambda x: x.view(3, 1, 7, 33).expand(3, 2, 7, 33),
    "transposed": lambda x: x.mT.contiguous().mT,
    "sliced": lambda x: x[..., 1::2],
}
PLACES: list[dict[str, Any]] = [
    {},
    {"offset": -5, "scale": 2.5},
    {"offset": 10**9, "scale": 0.3, "padding_idx": 10**9 + 2},
    {"positions": torch.arange(7) * 3 - 4, "padding_idx": 2},
]


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> Plans:
    return fresh(monkeypatch, "sinusoidal")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", range(len(PLACES)))
@pytest.mark.parametrize("differentiable", [False, True])
def test_a_hit_has_the_bits_of_the_complete_path(
    dtype: torch.dtype,
    strides: str,
    layout: str,
    place: int,
    differentiable: bool,
    plans: Plans,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(3, 7, 33).to(dtype)

    def run() -> list[Tensor]:
        leaf = x.clone().requires_grad_(differentiable)
        out = encode(STRIDES[strides](leaf), layout=layout, **PLACES[place])
        assert out.requires_grad == differentiable
        if not differentiable:
            return [out]
        grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
        return [out.detach(), torch.autograd.grad(out, leaf, grad_out)[0]]

    miss, hit = run(), run()
    assert count(plans) == 1
    with monkeypatch.context() as patch:
        patch.setattr("fastattn.call.may_plan", lambda: False)
        complete = run()
    for results in (miss, hit):
        for got, want in zip(results, complete, strict=True):
            assert torch.equal(got, want)
            assert got.stride() == want.stride()


@pytest.mark.parametrize("rows", [1, 3000])
def test_offsets_lengths_and_widths_share_a_plan(rows: int, plans: Plans) -> None:
    for offset, length, width in ((0, rows, 8), (5, rows + 2, 16), (-(10**12), rows + 3, 33)):
        x = torch.randn(2, length, width, requires_grad=True)
        out = encode(x, offset=offset)
        with fastattn.use_backend("reference"):
            torch.testing.assert_close(out, encode(x, offset=offset))
    assert count(plans) == 1 + (rows == 1)


CHANGES: dict[str, Callable[[list[Tensor], dict[str, Any]], None]] = {
    "dtype": lambda t, o: t.__setitem__(0, t[0].double()),
    "dimensions": lambda t, o: t.__setitem__(0, t[0][0]),
    "gradient": lambda t, o: t.__setitem__(0, t[0].clone().requires_grad_()),
    "layout": lambda t, o: o.update(layout="marian"),
    "max_timescale": lambda t, o: o.update(max_timescale=100.0),
    "scale": lambda t, o: o.update(scale=2.0),
    "padding": lambda t, o: o.update(padding_idx=3),
    "positions": lambda t, o: o.update(positions=torch.arange(7)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_fact_makes_a_new_plan(change: str, plans: Plans) -> None:
    tensors: list[Tensor] = [torch.randn(3, 7, 33)]
    options: dict[str, Any] = {}
    encode(*tensors, **options)
    assert count(plans) == 1
    CHANGES[change](tensors, options)
    encode(*tensors, **options)
    assert count(plans) == 2
    encode(*tensors, **options)
    assert count(plans) == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"offset": True}, "offset must be an integer"),
        ({"offset": 2**62}, "offset must be within"),
        ({"offset": 1, "positions": torch.arange(7)}, "exclude each other"),
        ({"positions": torch.arange(6)}, "does not broadcast"),
        ({"positions": torch.arange(7.0)}, "positions must be int64 or int32"),
        ({"layout": "unknown"}, "layout must be one of"),
        ({"max_timescale": 0.5}, "max_timescale must be finite"),
        ({"max_timescale": math.nan}, "max_timescale must be finite"),
        ({"scale": "2"}, "scale must be a number"),
        ({"padding_idx": 1.0}, "padding_idx must be an integer"),
    ],
)
def test_a_call_with_an_error_raises_it_again(
    wrong: dict[str, Any], message: str, plans: Plans
) -> None:
    x = torch.randn(3, 7, 33)
    encode(x)
    encode(x, positions=torch.arange(7))
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=message):
            encode(x, **wrong)
    assert count(plans) == 2


class _Own(Tensor):
    pass


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda x: encode(x, offset=torch.tensor(1)), id="offset"),
        pytest.param(lambda x: encode(x, positions=torch.arange(3).int()), id="int32"),
        pytest.param(lambda x: encode(x.expand(1, 2, 2, 3, 6)), id="dimensions"),
        pytest.param(lambda x: encode(x[:, :0]), id="empty"),
        pytest.param(lambda x: encode(x.as_subclass(_Own)), id="subclass"),
    ],
)
def test_calls_without_a_plan(call: Callable[[Tensor], Tensor], plans: Plans) -> None:
    call(torch.randn(2, 3, 6))
    assert count(plans) == 0


def test_many_elements_that_require_a_gradient(plans: Plans) -> None:
    x = torch.randn(2, 700, 60, requires_grad=True)
    for offset in (0, 9, 2):
        out = encode(x, offset=offset, scale=3.0)
        assert torch.equal(out, encode(x.detach(), offset=offset, scale=3.0))
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(grad, torch.full_like(x, 3.0))
    assert count(plans) == 2


def test_derivatives() -> None:
    """By finite differences, twice; nothing of a result that is overwritten is read."""
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return encode(x, scale=3.0)

    run(x)
    assert "Mul" in type(run(x).grad_fn).__name__
    assert torch.autograd.gradcheck(run, x)
    assert torch.autograd.gradgradcheck(run, x)
    out = run(x)
    with torch.no_grad():
        out.fill_(math.nan)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, torch.full_like(x, 3.0))


def test_forward_mode() -> None:
    x, tangent = torch.randn(2, 3, 6), torch.randn(2, 3, 6)
    plain = encode(x, scale=3.0)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        out = torch.autograd.forward_ad.unpack_dual(encode(dual, scale=3.0))
    torch.testing.assert_close(out.primal, plain)
    torch.testing.assert_close(out.tangent, 3.0 * tangent)


def test_gradient_mode_and_backend_are_asked_by_every_call(plans: Plans) -> None:
    x = torch.randn(2, 3, 6, requires_grad=True)
    before = x.detach().clone()
    encode(x)
    with torch.no_grad():
        assert not encode(x).requires_grad
    assert encode(x).grad_fn is not None
    assert torch.equal(x, before)
    with fastattn.use_backend("reference"):
        encode(x)
    assert count(plans) == 1
