"""``linear``: right on every GEMM, for every layout, size and transform."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gemms import gemms, only
from processors import be
from torch import Tensor
from torch.func import grad, vmap
from torch.utils.flop_counter import FlopCounterMode
from within_bound import assert_right

import fastattn
from fastattn import compat, dispatch
from fastattn.evidence import Processor
from fastattn.nn.functional import linear
from fastattn.testing.cases import place
from fastattn.testing.targets import Target, targets

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
EVERY = [(dtype, name) for dtype in DTYPES for name in gemms.gemms_of(dtype)]


@pytest.fixture
def use() -> Iterator[Callable[..., list[str]]]:
    """Makes one GEMM compute all products; returns the names of the called GEMMs."""
    with contextlib.ExitStack() as stack:
        yield lambda name, least=0: stack.enter_context(only(name, least))


# Of `fastattn.testing.cases`; poison lies around them.
LAYOUTS = ["contiguous", "unaligned", "transposed", "every_second", "sliced"]
LAYOUTS += ["expanded_rows", "expanded_all"]


def gradients(y: Tensor, cotangent: Tensor, inputs: list[Tensor]) -> dict[str, Tensor]:
    """The output and the gradients of the inputs, by name."""
    grads = torch.autograd.grad(y, inputs, cotangent.to(y.dtype))
    return {"y": y} | {f"grad {n}": g for n, g in enumerate(grads)}


def compare(x: Tensor, weight: Tensor, bias: Tensor | None, cotangent: Tensor) -> None:
    """Assert results and gradients within the bound of `F.linear` in float64."""

    def run(function: Callable[..., Tensor], wide: bool) -> dict[str, Tensor]:
        tensors = [t.double() if wide else t for t in (x, weight, bias) if t is not None]
        leaves = [t.detach().requires_grad_() for t in tensors]  # detach keeps the strides
        return gradients(function(*leaves), cotangent.to(x.dtype), leaves)

    ours = run(linear, wide=False)
    assert all(result.dtype == x.dtype for result in ours.values())
    assert_right(ours, lambda: run(F.linear, wide=True))


@functools.cache
def reads_beyond_rows(dtype: torch.dtype) -> bool:
    """Whether PyTorch multiplies what follows a row by zero, as oneDNN in bfloat16 on AMX does."""
    x = torch.full((37, 48), math.nan, dtype=dtype)
    x[:, :41] = 1
    return bool(F.linear(x[:, :41], x[:29, :41].contiguous()).isnan().any())


@pytest.mark.parametrize(("dtype", "gemm"), EVERY, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("of", ["x", "weight", "gradient"])
def test_any_layout(
    of: str,
    layout: str,
    dtype: torch.dtype,
    gemm: str,
    use: Callable[[str], list[str]],
    generator: torch.Generator,
) -> None:
    m, n, k = 37, 29, 41
    if gemm == "torch" and layout == "sliced" and reads_beyond_rows(dtype):
        pytest.skip("PyTorch's own product is NaN where NaN follows a row")
    called = use(gemm)

    def draw(rows: int, columns: int, name: str) -> Tensor:
        x = torch.randn(rows, columns, generator=generator).to(dtype)
        return place(x, layout if name == of else "contiguous")

    bias = torch.randn(n, generator=generator).to(dtype)
    compare(draw(m, k, "x"), draw(n, k, "weight"), bias, draw(m, n, "gradient"))
    assert called == ([gemm] * 3 if gemm != "torch" else [])


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("target", targets(), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS[:5])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (1, 1, 1),
        (3, 5, 2),
        (17, 13, 31),
        (33, 100, 64),
        (65, 97, 515),
        (40, 29, 1024),
        (300, 12, 33),
    ],
)
def test_any_size_on_every_instruction_set(
    m: int,
    n: int,
    k: int,
    layout: str,
    target: Target,
    dtype: torch.dtype,
    use: Callable[[str], list[str]],
    generator: torch.Generator,
) -> None:
    use("ours")
    x, weight, bias = (
        place(torch.randn(size, generator=generator).to(dtype), how)
        for size, how in (((m, k), layout), ((n, k), layout), ((n,), "contiguous"))
    )
    with target.active():
        compare(x, weight, bias if n % 2 else None, torch.randn(m, n, generator=generator))


@pytest.mark.parametrize(("dtype", "gemm"), EVERY, ids=str)
@pytest.mark.parametrize("m", [1, 7, 8, 64, 2049])
@pytest.mark.parametrize("with_bias", [True, False])
def test_any_number_of_rows(
    m: int,
    with_bias: bool,
    dtype: torch.dtype,
    gemm: str,
    use: Callable[[str], list[str]],
    generator: torch.Generator,
) -> None:
    use(gemm)
    n, k = 48, 16
    x = torch.randn(m, k, generator=generator).to(dtype)
    weight = torch.randn(n, k, generator=generator).to(dtype)
    bias = torch.randn(n, generator=generator).to(dtype) if with_bias else None
    compare(x, weight, bias, torch.randn(m, n, generator=generator))


@pytest.mark.parametrize(("dtype", "gemm"), EVERY, ids=str)
@pytest.mark.parametrize(
    "shape", [(5,), (2, 5), (2, 3, 5), (2, 1, 3, 5), (0, 5), (3, 0, 5), (4, 0)]
)
@pytest.mark.parametrize("n", [0, 1, 7])
def test_any_rank_and_sizes_of_zero(
    shape: tuple[int, ...],
    n: int,
    dtype: torch.dtype,
    gemm: str,
    use: Callable[[str], list[str]],
) -> None:
    use(gemm)
    x = torch.randn(shape).to(dtype).requires_grad_()
    weight = torch.randn(n, shape[-1]).to(dtype).requires_grad_()
    bias = torch.randn(n).to(dtype).requires_grad_()
    y, want = linear(x, weight, bias), F.linear(x, weight, bias)
    assert y.shape == want.shape
    assert torch.allclose(y, want, atol=1e-2)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert weight.grad.shape == weight.shape


@pytest.mark.parametrize("wanted", list(itertools.product([True, False], repeat=3)), ids=str)
def test_any_set_of_gradients(wanted: tuple[bool, ...], use: Callable[[str], list[str]]) -> None:
    use("ours")
    tensors = [torch.randn(s) for s in ((4, 5), (3, 5), (3,))]
    for x, want in zip(tensors, wanted, strict=True):
        x.requires_grad_(want)
    y = linear(*tensors)
    assert y.requires_grad == any(wanted)
    if any(wanted):
        y.sum().backward()
    assert [x.grad is not None for x in tensors] == list(wanted)


@pytest.mark.parametrize("with_bias", [True, False])
def test_second_derivatives(with_bias: bool, use: Callable[[str], list[str]]) -> None:
    called = use("ours")
    tensors = [torch.randn(s, dtype=torch.float64) for s in ((4, 5), (3, 5), (3,))]
    inputs = [x.requires_grad_() for x in tensors[: 2 + with_bias]]
    assert torch.autograd.gradcheck(linear, inputs)
    assert torch.autograd.gradgradcheck(linear, inputs)
    assert called


def test_pytorchs_private_operator_of_onednn_exists() -> None:
    """It is private to PyTorch. If this fails, `linear` falls back to F.linear, right but slow."""
    assert compat.onednn_linear is not None


def test_without_the_operator_of_onednn(
    use: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    called = use("onednn")
    monkeypatch.setattr(compat, "onednn_linear", None)
    x, weight, bias = torch.randn(9, 5), torch.randn(4, 5), torch.randn(4)
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    assert "onednn" not in called


def test_pytorchs_switch_of_onednn(use: Callable[[str], list[str]]) -> None:
    called = use("onednn")
    x, weight = torch.randn(9, 5), torch.randn(4, 5)
    with torch.backends.mkldnn.flags(enabled=False):
        assert torch.equal(linear(x, weight), F.linear(x, weight))
    assert "onednn" not in called
    linear(x, weight)
    assert called[-1] == "onednn"


def test_small_products_are_left_to_pytorch(
    use: Callable[..., list[str]],
) -> None:
    called = use("ours", least=180)
    linear(torch.randn(9, 5), torch.randn(3, 5))
    assert not called
    linear(torch.randn(9, 5), torch.randn(4, 5))
    assert called == ["ours"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [700, 1024])
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_threads(
    k: int, dtype: torch.dtype, use: Callable[[str], list[str]], same_for_any_threads: Any
) -> None:
    use("ours")
    x, weight = torch.randn(700, k).to(dtype), torch.randn(500, k).to(dtype)
    whole = same_for_any_threads(lambda: linear(x, weight))
    for rows in (slice(0, 1), slice(0, 7), slice(3, 40), slice(150, 250), slice(690, 700)):
        assert torch.equal(linear(x[rows], weight), whole[rows])


def test_a_forced_backend(use: Callable[[str], list[str]]) -> None:
    called = use("onednn")
    x, weight = torch.randn(9, 5), torch.randn(4, 5)
    with fastattn.use_backend("cpu"):
        linear(x, weight)
    assert called == ["ours"]
    with fastattn.use_backend("torch"):
        assert torch.equal(linear(x, weight), F.linear(x, weight))
    with fastattn.use_backend("reference"):
        assert torch.equal(linear(x, weight), F.linear(x, weight))
    assert called == ["ours"]


def test_tensors_under_transforms_and_modes(use: Callable[[str], list[str]]) -> None:
    called = use("onednn")
    x, weight = torch.randn(9, 5), torch.randn(4, 5)
    want = F.linear(x, weight)
    with FlopCounterMode(display=False) as counter:
        linear(x, weight)
    assert counter.get_total_flops() == 2 * 9 * 5 * 4
    assert torch.allclose(vmap(lambda row: linear(row[None], weight)[0])(x), want, atol=1e-6)
    assert torch.allclose(
        grad(lambda w: linear(x, w).sum())(weight), x.sum(0).expand(4, -1), atol=1e-6
    )
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        tangent = torch.autograd.forward_ad.unpack_dual(linear(dual, weight)).tangent
    assert torch.allclose(tangent, want, atol=1e-6)
    assert linear(x.to("meta"), weight.to("meta")).shape == (9, 4)
    assert not called


def test_transforms_where_pytorchs_products_are_scalar(use: Callable[[str], list[str]]) -> None:
    """Our operator runs them, with its own derivatives, batches and FLOPs."""
    called = use("ours")
    x, weight = torch.randn(9, 5).bfloat16(), torch.randn(4, 5).bfloat16()
    want = linear(x, weight)
    each = vmap(lambda w: grad(lambda w: linear(x, w).float().sum())(w))(torch.stack([weight] * 2))
    assert torch.allclose(each[1].float(), x.float().sum(0).expand(4, -1), atol=0.1)
    assert torch.equal(vmap(lambda row: linear(row[None], weight)[0])(x), want)
    with FlopCounterMode(display=False) as counter:
        linear(x.requires_grad_(), weight).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 9 * 5 * 4
    with fastattn.trace() as calls:
        linear(x, weight)
    assert [(call.operator, call.backend) for call in calls] == [("linear", "cpu")]
    torch.library.opcheck(torch.ops.fastattn.linear.default, (x, weight, None, "", ""))
    assert set(called) == {"ours"}


@pytest.mark.parametrize(
    ("dtype", "gemm"),
    [(torch.float32, "ours"), (torch.bfloat16, "ours"), (torch.float32, "tiles")],
    ids=str,
)
def test_compiled(dtype: torch.dtype, gemm: str, use: Callable[[str], list[str]]) -> None:
    called = use(gemm)
    torch.compiler.reset()  # a graph that was compiled under another rule

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight).relu().float().square().sum()

    def gradients_of(function: Any) -> list[Tensor]:
        leaves = [torch.ones(3, 9, 5), torch.ones(4, 5)]
        leaves = [x.to(dtype).requires_grad_() for x in leaves]
        return list(torch.autograd.grad(function(*leaves), leaves))

    found = gradients_of(torch.compile(run, backend="aot_eager", fullgraph=True))
    in_graph = dtype == torch.bfloat16 or gemm == "tiles"  # else the compiler's own
    assert bool(called) == in_graph
    for got, want in zip(found, gradients_of(run), strict=True):
        assert torch.equal(got, want)


def test_an_exported_graph_runs_without_fastattn(use: Callable[[str], list[str]]) -> None:
    use("tiles")
    layer = fastattn.nn.Linear(5, 4)
    graph = str(torch.export.export(layer, (torch.randn(9, 5),), strict=True).graph)
    assert "aten.linear" in graph
    assert "fastattn" not in graph


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gemm", ["ours", "onednn"])
def test_autocast(
    gemm: str, given: torch.dtype, dtype: torch.dtype, use: Callable[[str], list[str]]
) -> None:
    """Casts what PyTorch casts, gradients included; ours only where PyTorch's are scalar."""
    called = use(gemm)
    results = []
    x, weight, bias = torch.randn(9, 5), torch.randn(4, 5), torch.randn(4)
    for function in (linear, F.linear):
        leaves = [x.to(given), weight.to(given), bias.to(given)]
        for leaf in leaves:
            leaf.requires_grad_()
        with torch.autocast("cpu", dtype=dtype):
            y = function(*leaves)
        y.sum().backward()
        results.append([y, *(leaf.grad for leaf in leaves)])
    assert bool(called) == (gemm == "ours" and given != torch.float64)
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype
        assert torch.allclose(got, want, rtol=1e-2, atol=5e-2)


def test_explain_names_the_gemms(use: Callable[[str], list[str]]) -> None:
    use("onednn")
    x, weight = torch.randn(9, 5), torch.randn(4, 5)
    assert "y by onednn, dx by onednn, dw by onednn" in fastattn.explain(linear, x, weight).because


WRONG = [
    (torch.randn(3, 5), torch.randn(4, 6), None),
    (torch.randn(3, 5), torch.randn(4, 5), torch.randn(3)),
    (torch.randn(3, 5), torch.randn(4, 5).double(), None),
    (torch.randn(3, 5).half(), torch.randn(4, 5), None),
    (torch.randn(3, 5), torch.randn(2, 4, 5), None),
    (torch.tensor(1.0), torch.randn(4, 5), None),
    (torch.randn(3, 5), [1.0], None),
    (None, torch.randn(4, 5), None),
    (torch.randn(9, 5), torch.randn(4, 5), "bias"),
]


@pytest.mark.parametrize("gemm", ["torch", "onednn", "ours"])
@pytest.mark.parametrize("args", WRONG)
def test_errors_equal_pytorchs(
    args: tuple[Any, ...], gemm: str, use: Callable[[str], list[str]]
) -> None:
    use(gemm)
    texts = []
    for function in (linear, F.linear, lambda *args: fastattn.explain(linear, *args)):
        with pytest.raises((RuntimeError, TypeError)) as caught:
            function(*args)
        texts.append((caught.type, str(caught.value)))
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("gemm", ["onednn", "ours"])
def test_results_are_bitwise_reproducible(
    count: int, gemm: str, use: Callable[[str], list[str]], threads: Callable[[int], None]
) -> None:
    use(gemm)
    threads(count)
    x, weight = torch.randn(70, 64), torch.randn(96, 64)
    first = linear(x, weight)
    assert all(torch.equal(linear(x, weight), first) for _ in range(5))


AMD, AMX, XEON = (
    Processor("cpu", *rest)
    for rest in (
        ("AMD", "", frozenset({"avx512f", "avx512_bf16"})),
        ("Intel", "", frozenset({"avx512f", "avx512_bf16", "amx_bf16"})),
        ("Intel", "", frozenset({"avx512f"})),
    )
)
OLD = Processor("cpu", "AMD", "", frozenset({"avx2"}))


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="without MKL oneDNN serves")
def test_the_rule_of_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemms, "_IN_16_BITS", {})
    monkeypatch.setattr(compat, "onednn_linear", object())
    large, small, few = (512, 2**30), (16, 2**22), (4, 2**22)
    with be(AMD):
        assert [gemms.gemm_of("y", torch.float32, *at) for at in (large, small, few)] == [
            "onednn",
            "ours",
            "ours",
        ]
        assert gemms.gemm_of("dw", torch.float32, *large) == "torch"
        one = [gemms.gemm_of("y", torch.float32, 1, work) for work in (2**20, 2**21)]
        assert one == ["torch", "ours"]
    monkeypatch.setattr(gemms._cpu, "has_tiles", lambda dtype: True)
    with be(AMX):
        of_rows = {"y": ("tiles", "torch", "torch", "ours"), "dx": ("tiles",), "dw": ("tiles",) * 3}
        for product in ("y", "dx", "dw"):
            rows = (1024, 1023, 96, 95, 3)
            chosen = [gemms.gemm_of(product, torch.float32, n, 2**26) for n in rows]
            assert chosen == [*of_rows[product], *["torch"] * (5 - len(of_rows[product]))]
        assert gemms.gemm_of("y", torch.bfloat16, *small) == "onednn"
        with torch.backends.mkldnn.flags(enabled=False):
            assert gemms.gemm_of("y", torch.bfloat16, *small) == "torch"
    with be(XEON):
        weight = 2**21
        for rows, elements, name in (
            (1, 4 * weight, "torch"),
            (7, 4 * weight, "torch"),
            (8, weight, "ours"),
            (32, weight, "ours"),
            (32, weight - 1, "torch"),
            (33, weight, "torch"),
        ):
            work = rows * elements
            assert gemms.gemm_of("y", torch.float32, rows, work) == name
            chosen = gemms.faster_than_torch(torch.float32)(rows, work)
            assert (chosen is not None) == (name == "ours")
    with be(OLD):
        sizes = (large, (129, 2**30), (128, 2**30), few, (1, 2**22))
        chosen = [gemms.gemm_of("y", torch.float32, *at) for at in sizes]
        assert chosen == ["torch", "torch", "ours", "ours", "torch"]
        for product in ("y", "dx", "dw"):
            assert gemms.gemm_of(product, torch.bfloat16, *large) == "ours"
    assert dispatch.forced.get() == ""
