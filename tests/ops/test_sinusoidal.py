"""sinusoidal_encoding: against 50-digit arithmetic, on every backend and instruction set."""

from __future__ import annotations

import functools
import math
from typing import Any

import mpmath
import pytest
import torch
from case_table import refuses, within_the_bound
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import fastattn
from fastattn import sinusoidal_encoding, sinusoidal_table
from fastattn.sinusoids import LAYOUTS, sinusoids
from fastattn.testing import Target

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

test_case = within_the_bound("sinusoidal_encoding", 1)
FAR = (0, 1, 2, 3, -1, -7, 511, 4095, 123_457, 1_000_001, 99_999_999, 10**8, -(10**8))


@functools.cache
def exact_row(position: int, dim: int, layout: str, timescale: float = 1e4) -> tuple[Any, ...]:
    """PE(position) by its definition, in 50 digits."""
    with mpmath.workdps(50):

        def angle(exponent: Any) -> Any:
            return position * mpmath.mpf(timescale) ** -exponent

        half = dim // 2
        if layout == "interleaved":
            exponents = [mpmath.mpf(2 * (c // 2)) / dim for c in range(dim)]
            cosines = [c % 2 == 1 for c in range(dim)]
        elif layout == "split_exponent":
            exponents = [mpmath.mpf(c) / dim for c in range(dim)]
            cosines = [c % 2 == 1 for c in range(dim)]
        elif layout == "marian":
            sines = [mpmath.mpf(2 * i) / dim for i in range(dim - half)]
            exponents = sines + sines[:half]
            cosines = [False] * (dim - half) + [True] * half
        else:
            sines = [mpmath.mpf(i) / max(half - 1, 1) for i in range(half)]
            exponents = sines + sines
            cosines = [False] * half + [True] * half
        row = [
            (mpmath.cos if cosine else mpmath.sin)(angle(exponent))
            for exponent, cosine in zip(exponents, cosines, strict=True)
        ]
        return (*row, *[mpmath.mpf(0)] * (dim - len(row)))


def exact(positions: Any, dim: int, layout: str = "interleaved", timescale: float = 1e4) -> Tensor:
    """PE of the positions [...], rounded once, to float64: [..., dim]."""
    positions = torch.as_tensor(positions)
    rows = [
        [float(value) for value in exact_row(int(p), dim, layout, timescale)]
        for p in positions.flatten()
    ]
    return torch.tensor(rows, dtype=torch.float64).view(*positions.shape, dim)


def random(*shape: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


# The layouts, by hand. 10000^(1/4) = 10, so every angle of width 4 is a power of ten.
S, C = math.sin, math.cos
BY_HAND = [
    ("interleaved", 4, [S(1), C(1), S(0.01), C(0.01)]),
    ("tensor2tensor", 4, [S(1), S(1e-4), C(1), C(1e-4)]),
    ("marian", 4, [S(1), S(0.01), C(1), C(0.01)]),
    ("split_exponent", 4, [S(1), C(0.1), S(0.01), C(0.001)]),
    ("interleaved", 3, [S(1), C(1), S(1e4 ** (-2 / 3))]),
    ("tensor2tensor", 3, [S(1), C(1), 0.0]),
    ("marian", 3, [S(1), S(1e4 ** (-2 / 3)), C(1)]),
    ("split_exponent", 3, [S(1), C(1e4 ** (-1 / 3)), S(1e4 ** (-2 / 3))]),
    ("tensor2tensor", 5, [S(1), S(1e-4), C(1), C(1e-4), 0.0]),
    ("interleaved", 2, [S(1), C(1)]),
    ("tensor2tensor", 2, [S(1), C(1)]),
    ("marian", 2, [S(1), C(1)]),
    ("split_exponent", 2, [S(1), C(0.01)]),
    ("interleaved", 1, [S(1)]),
    ("tensor2tensor", 1, [0.0]),
    ("marian", 1, [S(1)]),
    ("split_exponent", 1, [S(1)]),
]


@pytest.mark.parametrize(("layout", "dim", "row"), BY_HAND)
def test_layouts_by_hand(engine: Target, layout: str, dim: int, row: list[float]) -> None:
    table = sinusoidal_table(2, dim, layout=layout, dtype=torch.float64)
    torch.testing.assert_close(table[1], torch.tensor(row, dtype=torch.float64), rtol=0, atol=3e-16)


@pytest.mark.parametrize("dim", [1, 2, 3, 5, 8, 17, 33, 47, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_exact_at_any_position(engine: Target, layout: str, dim: int) -> None:
    positions = torch.tensor(FAR)
    want = exact(positions, dim, layout)
    for dtype in FLOATS:
        zero = torch.zeros(len(FAR), dim, dtype=dtype)
        got = sinusoidal_encoding(zero, positions=positions, layout=layout).double()
        error = (got - want).abs()
        if dtype == torch.float64:  # a frequency is off by at most 2^-65 of a turn
            allowed = 3e-16 + 2 * math.pi * 2**-65 * positions.abs()[:, None]
        else:
            unit = torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
            allowed = 1e-7 + unit / 2 * want.abs()  # 16 bits: rounded once
        assert (error <= allowed).all(), (dtype, float((error - allowed).max()))


def test_zero_is_exactly_zeros_and_ones(engine: Target) -> None:
    for dtype in FLOATS:
        row = sinusoidal_table(1, 6, dtype=dtype)[0]
        assert row.tolist() == [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]


def test_small_angles_keep_their_relative_accuracy(engine: Target) -> None:
    want = exact([1, 2, 3], 32, timescale=1e9)
    got = sinusoidal_table(3, 32, offset=1, max_timescale=1e9).double()
    assert float(((got - want) / want).abs().max()) < 3e-7


@pytest.mark.parametrize("timescale", [1.0, 2.5, 100, 1e6])
def test_max_timescale(engine: Target, timescale: float) -> None:
    want = exact(FAR, 9, "split_exponent", timescale)
    zero = torch.zeros(len(FAR), 9)
    options: dict[str, Any] = {"layout": "split_exponent", "max_timescale": timescale}
    got = sinusoidal_encoding(zero, positions=torch.tensor(FAR), **options)
    assert float((got - want).abs().max()) <= 1e-7


def test_frequencies_are_rounded_once() -> None:
    for dim, timescale in ((7, 1e4), (512, 1e4), (1024, 12345.678)):
        frequency = sinusoids(dim, "interleaved", timescale).frequency
        with mpmath.workdps(60):
            turns = mpmath.mpf(2) ** 64 / (2 * mpmath.pi)
            for column in range(0, dim, max(dim // 16, 1)):
                want = turns * mpmath.mpf(timescale) ** (-mpmath.mpf(column // 2 * 2) / dim)
                assert abs(frequency[column] - want) <= 0.5 + 1e-9
    assert not any(frequency[1024:])  # what whole vectors read beyond the columns


def test_positions_of_every_kind(engine: Target, generator: torch.Generator) -> None:
    x = random(2, 3, 4, 6, dtype=torch.float32, generator=generator)
    for shape in ((), (1,), (4,), (3, 1), (3, 4), (2, 1, 1), (1, 3, 4), (2, 3, 4), (2, 3, 1)):
        positions = torch.randint(-9, 10**8, shape, generator=generator)
        want = x.double() + exact(positions.expand(2, 3, 4), 6)
        got = sinusoidal_encoding(x, positions=positions)
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
        if shape:
            narrow = positions.clamp(max=2**31 - 1).to(torch.int32)
            assert torch.equal(sinusoidal_encoding(x, positions=narrow), got)
            strided = torch.stack([positions, -positions], -1)[..., 0]
            assert torch.equal(sinusoidal_encoding(x, positions=strided), got)


def test_offsets(engine: Target, generator: torch.Generator) -> None:
    x = random(2, 5, 12, dtype=torch.float32, generator=generator)
    rows = torch.arange(5)
    for offset in (0, 7, -3, 99_999_998):
        want = sinusoidal_encoding(x, positions=rows + offset)
        assert torch.equal(sinusoidal_encoding(x, offset=offset), want)
        assert torch.equal(sinusoidal_encoding(x, offset=torch.tensor(offset)), want)
        zero = torch.zeros(5, 12)
        table = sinusoidal_encoding(zero, positions=rows + offset)
        assert torch.equal(sinusoidal_table(5, 12, offset=offset), table)
    per_sequence = torch.tensor([3, 10**8], dtype=torch.int32)
    want = sinusoidal_encoding(x, positions=per_sequence[:, None] + rows)
    assert torch.equal(sinusoidal_encoding(x, offset=per_sequence), want)


def test_incremental_decoding_gives_the_same_bits(
    engine: Target, generator: torch.Generator
) -> None:
    x = random(3, 11, 40, dtype=torch.float32, generator=generator)
    whole = sinusoidal_encoding(x, scale=6.3)
    steps = [sinusoidal_encoding(x[:, t : t + 1], offset=t, scale=6.3) for t in range(11)]
    assert torch.equal(torch.cat(steps, 1), whole)


def test_padding_adds_nothing(engine: Target, generator: torch.Generator) -> None:
    x = random(2, 6, 10, dtype=torch.float32, generator=generator)
    positions = torch.tensor([[1, 1, 2, 3, 4, 5], [2, 3, 4, 1, 1, 1]])
    got = sinusoidal_encoding(x, positions=positions, padding_idx=1, scale=0.5)
    plain = sinusoidal_encoding(x, positions=positions, scale=0.5)
    padded = positions == 1
    assert torch.equal(got[padded], x[padded] * 0.5)
    assert torch.equal(got[~padded], plain[~padded])
    assert torch.equal(sinusoidal_table(4, 3, offset=-1, padding_idx=1)[2], torch.zeros(3))


def test_any_rank(engine: Target, generator: torch.Generator) -> None:
    for shape in ((7, 5), (2, 7, 5), (2, 3, 7, 5), (2, 1, 3, 7, 5), (2, 2, 1, 3, 7, 5)):
        x = random(*shape, dtype=torch.float32, generator=generator)
        for view in (x, x.transpose(0, 1), x.mT.contiguous().mT):
            positions = torch.randint(99, view.shape[:-1], generator=generator)
            want = view.double() + exact(positions, view.shape[-1])
            got = sinusoidal_encoding(view, positions=positions)
            assert got.stride() == torch.empty_like(view).stride()
            torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


def test_nan_and_inf_stay_in_their_elements(engine: Target) -> None:
    for dtype in FLOATS:
        x = torch.zeros(3, 20, dtype=dtype)
        x[1, 7], x[2, 19] = float("nan"), float("inf")
        got = sinusoidal_encoding(x)
        finite = torch.isfinite(x)
        assert got[1, 7].isnan()
        assert got[2, 19] == float("inf")
        assert torch.equal(got[finite], sinusoidal_table(3, 20, dtype=dtype)[finite])


@pytest.mark.parametrize("width", [1024, 1001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_outputs(
    target: Target, dtype: torch.dtype, width: int, generator: torch.Generator
) -> None:
    """Beyond 4 MiB, whole vectors of aligned rows are written past the caches."""
    x = torch.randn(3, 900, width, generator=generator).to(dtype)
    whole = sinusoidal_encoding(x, scale=2.0)
    for start in (0, 1, 450, 890):
        part = x[1, start : start + 10].contiguous()
        want = sinusoidal_encoding(part, offset=start, scale=2.0)
        assert torch.equal(whole[1, start : start + 10], want)
    assert torch.equal(whole[2], sinusoidal_encoding(x[2], scale=2.0))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [4096, 4111, 9001])
def test_wide_rows(target: Target, layout: str, width: int, generator: torch.Generator) -> None:
    """A row that fills the kernel's tile, and rows that are cut."""
    x = torch.randn(2, 3, width, generator=generator)
    got = sinusoidal_encoding(x, offset=12345, layout=layout)
    with fastattn.use_backend("reference"):
        want = sinusoidal_encoding(x, offset=12345, layout=layout)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_tables_follow_the_defaults() -> None:
    assert sinusoidal_table(0, 8).shape == (0, 8)
    assert sinusoidal_table(2, 3).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert sinusoidal_table(2, 3).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert sinusoidal_table(2, 3, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert sinusoidal_table(2, 3, device="meta").is_meta


X = torch.zeros(2, 3, 4)
BAD = [
    ((torch.zeros(3, 4, dtype=torch.int64),), {}, TypeError, "x must be float32"),
    ((torch.zeros(3, 4, dtype=torch.complex64),), {}, TypeError, "got torch.complex64"),
    (([[1.0]],), {}, TypeError, "x must be a Tensor, got list"),
    ((torch.zeros(4),), {}, ValueError, r"x must be \[..., L, d\], got shape \(4,\)"),
    ((X,), {"offset": 1.5}, TypeError, "offset must be an integer, got float"),
    ((X,), {"offset": True}, TypeError, "offset must be an integer, got bool"),
    ((X,), {"offset": 2**63}, ValueError, r"offset must be within 2\*\*62"),
    ((X,), {"offset": torch.tensor(1.5)}, TypeError, "offset must be int64 or int32"),
    ((X,), {"offset": torch.zeros(3, dtype=torch.int64)}, ValueError, r"\[:-2\] = \(2,\)"),
    ((X,), {"positions": [0, 1, 2]}, TypeError, "positions must be an int64 or int32 Tensor"),
    ((X,), {"positions": torch.zeros(3)}, TypeError, "positions must be int64 or int32"),
    ((X,), {"positions": torch.zeros(3, dtype=torch.int16)}, TypeError, "got torch.int16"),
    ((X,), {"positions": torch.zeros(2, dtype=torch.int64)}, ValueError, r"shape \(2,\), which"),
    ((X,), {"positions": torch.zeros(1, 2, 3, dtype=torch.int64)}, ValueError, "broadcast"),
    ((X,), {"positions": torch.arange(3, device="meta")}, ValueError, "is on meta, but x is on"),
    ((X,), {"positions": torch.arange(3), "offset": 1}, ValueError, "exclude each other"),
    ((X,), {"layout": "rotary"}, ValueError, "layout must be one of interleaved, tensor2tensor"),
    ((X,), {"max_timescale": 0.5}, ValueError, "max_timescale must be finite and at least 1"),
    ((X,), {"max_timescale": math.nan}, ValueError, "max_timescale must be finite"),
    ((X,), {"max_timescale": math.inf}, ValueError, "max_timescale must be finite"),
    ((X,), {"max_timescale": "1e4"}, TypeError, "max_timescale must be a number, got str"),
    ((X,), {"scale": "sqrt"}, TypeError, "scale must be a number or None, got str"),
    ((X,), {"padding_idx": 1.0}, TypeError, "padding_idx must be an integer, got float"),
]


test_errors = refuses(sinusoidal_encoding, BAD)


BAD_TABLES = [
    ((-1, 4), {}, ValueError, "length must not be negative, got -1"),
    ((2, -4), {}, ValueError, "dim must not be negative, got -4"),
    ((2.0, 4), {}, TypeError, "length must be an integer, got float"),
]
test_errors_of_tables = refuses(sinusoidal_table, BAD_TABLES)


# --- transforms ----------------------------------------------------------------------------------


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
    """Beyond the first few, a new offset or length makes no new graph."""
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
