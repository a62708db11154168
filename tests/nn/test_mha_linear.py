"""``linear``, the seam between the projections and a GEMM: right for every layout and transform."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processors import be
from torch import Tensor
from torch.func import grad, vmap
from torch.utils.flop_counter import FlopCounterMode
from within_bound import assert_right

from fastattn.evidence import Processor
from fastattn.nn import _linear
from fastattn.nn._linear import linear

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def onednn_at_any_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use the GEMMs for large products at the small sizes of these tests, and those of the
    processor that has the most on every processor."""
    most = Processor("cpu", "AMD", features=frozenset({"avx512f"}))
    for name in ("_MIN_WORK", "_MIN_WORK_WEIGHT_GRAD"):
        monkeypatch.setattr(_linear, name, 0)
    with be(most):
        yield


# Memory layouts, each made from a contiguous [2M, 2K]: all are [M, K].
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x[: len(x) // 2, : x.shape[1] // 2].contiguous(),
    "columns": lambda x: x[: len(x) // 2, x.shape[1] // 2 :],
    "every other": lambda x: x[::2, ::2],
    "transposed": lambda x: x[: len(x) // 2, : x.shape[1] // 2].t().contiguous().t(),
    "flipped": lambda x: x[: len(x) // 2, : x.shape[1] // 2].flip(0),
    "one row": lambda x: x[:1, : x.shape[1] // 2].expand(len(x) // 2, -1),
    "one number": lambda x: x[:1, :1].expand(len(x) // 2, x.shape[1] // 2),
    "odd address": lambda x: x.flatten()[1 : 1 + x.numel() // 4].view(len(x) // 2, -1),
}


def gradients(y: Tensor, cotangent: Tensor, inputs: list[Tensor]) -> dict[str, Tensor]:
    grads = torch.autograd.grad(y, inputs, cotangent.to(y.dtype))
    return {"y": y} | {f"grad {n}": g for n, g in enumerate(grads)}


def compare(x: Tensor, weight: Tensor, bias: Tensor | None, cotangent: Tensor) -> None:
    """Within the bound, of what is as `F.linear` in float64."""

    def run(function: Callable[..., Tensor], wide: bool) -> dict[str, Tensor]:
        tensors = [t.double() if wide else t for t in (x, weight, bias) if t is not None]
        leaves = [t.detach().requires_grad_() for t in tensors]  # detach keeps the strides
        return gradients(function(*leaves), cotangent.to(x.dtype), leaves)

    ours = run(linear, wide=False)
    assert all(result.dtype == x.dtype for result in ours.values())
    assert_right(ours, lambda: run(F.linear, wide=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("of", ["x", "weight", "gradient"])
def test_any_layout(of: str, layout: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    m, n, k = 37, 29, 41

    def draw(rows: int, columns: int, name: str) -> Tensor:
        x = torch.randn(2 * rows, 2 * columns, generator=generator).to(dtype)
        return LAYOUTS[layout if name == of else "contiguous"](x)

    bias = torch.randn(n, generator=generator).to(dtype)
    compare(draw(m, k, "x"), draw(n, k, "weight"), bias, draw(m, n, "gradient"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [1, 2, 3, 64, 2049])
@pytest.mark.parametrize("with_bias", [True, False])
def test_any_size(m: int, with_bias: bool, dtype: torch.dtype, generator: torch.Generator) -> None:
    n, k = 48, 16
    x = torch.randn(m, k, generator=generator).to(dtype)
    weight = torch.randn(n, k, generator=generator).to(dtype)
    bias = torch.randn(n, generator=generator).to(dtype) if with_bias else None
    compare(x, weight, bias, torch.randn(m, n, generator=generator))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("m", [1, 7, 8, 64])
def test_without_native_arithmetic(
    m: int, dtype: torch.dtype, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_linear, "_ONEDNN_DTYPES", {torch.float32})
    monkeypatch.setattr(_linear, "_WIDE_DTYPES", {torch.bfloat16, torch.float16})
    x = torch.randn(m, 32, generator=generator).to(dtype)
    weight = torch.randn(24, 32, generator=generator).to(dtype)
    with be(Processor("cpu", "AMD", features=frozenset({"avx2"}))):
        assert _linear._is_for_our_gemm(x, weight, None) == (m >= 8)
        compare(x, weight, None, torch.randn(m, 24, generator=generator))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(5,), (2, 5), (2, 3, 5), (2, 1, 3, 5), (0, 5), (3, 0, 5), (4, 0)]
)
@pytest.mark.parametrize("n", [0, 1, 7])
def test_any_rank_and_sizes_of_zero(shape: tuple[int, ...], n: int, dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype).requires_grad_()
    weight = torch.randn(n, shape[-1]).to(dtype).requires_grad_()
    bias = torch.randn(n).to(dtype).requires_grad_()
    y, want = linear(x, weight, bias), F.linear(x, weight, bias)
    assert y.shape == want.shape
    assert torch.allclose(y, want, atol=1e-2)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert weight.grad.shape == weight.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("wanted", list(itertools.product([True, False], repeat=3)), ids=str)
def test_any_gradients_wanted(wanted: tuple[bool, ...], dtype: torch.dtype) -> None:
    tensors = [torch.randn(s).to(dtype) for s in ((4, 5), (3, 5), (3,))]
    for x, want in zip(tensors, wanted, strict=True):
        x.requires_grad_(want)
    y = linear(*tensors)
    assert y.requires_grad == any(wanted)
    if any(wanted):
        y.sum().backward()
    assert [x.grad is not None for x in tensors] == list(wanted)


@pytest.mark.parametrize("with_bias", [True, False])
def test_second_derivatives(with_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, through the same Function that float32 takes."""
    monkeypatch.setattr(_linear, "_is_ours", lambda *_: True)
    monkeypatch.setattr(_linear, "_ONEDNN_LINEAR", None)
    tensors = [torch.randn(s, dtype=torch.float64) for s in ((4, 5), (3, 5), (3,))]
    inputs = [x.requires_grad_() for x in tensors[: 2 + with_bias]]
    assert torch.autograd.gradcheck(linear, inputs)
    assert torch.autograd.gradgradcheck(linear, inputs)


def test_the_operator_of_onednn_is_where_it_was() -> None:
    """It is private to PyTorch. Where this fails, `linear` is F.linear, right but slow."""
    assert _linear._ONEDNN_LINEAR is not None


def test_without_the_operator_of_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = torch.randn(3, 5), torch.randn(4, 5), torch.randn(4)
    monkeypatch.setattr(_linear, "_ONEDNN_LINEAR", None)
    monkeypatch.setattr(_linear, "_WIDE_DTYPES", {torch.float16})
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    half = linear(x.half(), weight.half(), bias.half())
    assert torch.equal(
        half, F.linear(x.half().float(), weight.half().float(), bias.half().float()).half()
    )


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows when our own GEMM is taken."""
    taken: list[int] = []
    forward = _linear._forward

    def counted(*args: Any) -> Tensor:
        taken.append(1)
        return forward(*args)

    monkeypatch.setattr(_linear, "_forward", counted)
    return taken


def test_small_products_are_left_to_pytorch(
    ours: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_linear, "_MIN_WORK", 60)
    linear(torch.randn(3, 5), torch.randn(3, 5))
    assert not ours
    linear(torch.randn(3, 5), torch.randn(4, 5))
    assert ours


def test_is_ours_for_plain_tensors_only(ours: list[int]) -> None:
    x, weight = torch.randn(3, 5), torch.randn(4, 5)
    want = F.linear(x, weight)
    for dtype in _linear._ONEDNN_DTYPES | _linear._WIDE_DTYPES:
        ours.clear()
        linear(x.to(dtype), weight.to(dtype))
        assert ours
    ours.clear()

    with torch.backends.mkldnn.flags(enabled=False):
        assert torch.equal(linear(x, weight), want)
    with FlopCounterMode(display=False) as counter:
        linear(x, weight)
    assert counter.get_total_flops() == 2 * 3 * 5 * 4
    assert torch.allclose(vmap(lambda row: linear(row[None], weight)[0])(x), want, atol=1e-6)
    assert torch.allclose(
        grad(lambda w: linear(x, w).sum())(weight), x.sum(0).expand(4, -1), atol=1e-6
    )
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        tangent = torch.autograd.forward_ad.unpack_dual(linear(dual, weight)).tangent
    assert torch.allclose(tangent, want, atol=1e-6)
    assert linear(x.to("meta"), weight.to("meta")).shape == (3, 4)
    linear(x.double(), weight.double())
    assert not ours


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("native", [True, False])
def test_autocast(
    native: bool,
    given: torch.dtype,
    dtype: torch.dtype,
    ours: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Casts what PyTorch casts, gradients included, and stays on our GEMM where it serves the
    dtype: oneDNN's where it has the arithmetic, in float32 where it has not."""
    onednn = {torch.float32, torch.bfloat16} if native else {torch.float32}
    monkeypatch.setattr(_linear, "_ONEDNN_DTYPES", onednn & _linear._ONEDNN_DTYPES)
    wide = set() if native else {torch.float16, torch.bfloat16}
    monkeypatch.setattr(_linear, "_WIDE_DTYPES", wide)
    served = dtype in _linear._ONEDNN_DTYPES | _linear._WIDE_DTYPES
    results = []
    x, weight, bias = torch.randn(3, 5), torch.randn(4, 5), torch.randn(4)
    for function in (linear, F.linear):
        leaves = [x.to(given), weight.to(given), bias.to(given)]
        for leaf in leaves:
            leaf.requires_grad_()
        with torch.autocast("cpu", dtype=dtype):
            y = function(*leaves)
        y.sum().backward()
        results.append([y, *(leaf.grad for leaf in leaves)])
    assert bool(ours) == (served and given != torch.float64)
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype
        assert torch.allclose(got, want, rtol=1e-2, atol=5e-2)


def test_a_bias_of_another_dtype_is_taken() -> None:
    x, weight, bias = torch.randn(3, 5), torch.randn(4, 5), torch.randn(4, dtype=torch.float64)
    assert torch.allclose(linear(x, weight, bias), F.linear(x, weight, bias.float()))
    assert linear(x, weight, bias).dtype == torch.float32


WRONG = [
    (torch.randn(3, 5), torch.randn(4, 6), None),
    (torch.randn(3, 5), torch.randn(4, 5), torch.randn(3)),
    (torch.randn(3, 5), torch.randn(4, 5).double(), None),
    (torch.randn(3, 5).half(), torch.randn(4, 5), None),
    (torch.randn(3, 5), torch.randn(2, 4, 5), None),
]


@pytest.mark.parametrize("args", WRONG)
def test_errors_are_those_of_pytorch(args: tuple[Any, ...]) -> None:
    texts = []
    for function in (linear, F.linear):
        with pytest.raises(RuntimeError) as caught:
            function(*args)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("count", [1, 2])
def test_the_same_bits_every_time(count: int, threads: Callable[[int], None]) -> None:
    threads(count)
    x, weight = torch.randn(70, 64), torch.randn(96, 64)
    first = linear(x, weight)
    assert all(torch.equal(linear(x, weight), first) for _ in range(5))
