"""The tiles of AMX: the emulation against an independent judge, real tiles against both, and the
parts of floats."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

np = pytest.importorskip("numpy")

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shlex.split(os.environ.get("CXX", "g++"))
SHAPES = [(16, 16, 16), (7, 16, 16), (16, 5, 16), (16, 16, 3), (1, 1, 1), (13, 11, 9)]

pytestmark = pytest.mark.skipif(not shutil.which(COMPILER[0]), reason="it is compiled here")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The emulated tiles as a shared library."""
    built = tmp_path_factory.mktemp("tiles") / "tile_products.so"
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    if "avx2" in Path("/proc/cpuinfo").read_text():
        flags.append("-mfma")  # else fused multiply-adds are calls of libm
    source = str(ROOT / "tests/support/tile_products.cpp")
    command = [*COMPILER, *flags, "-ffp-contract=off", source, "-o", str(built)]
    subprocess.run(command, check=True)
    return built


# -- random operands ------------------------------------------------------------------------------

MANTISSA = {"bf16": 7, "f16": 10}  # bits


def random_halves(rng: Any, bits: int, shape: tuple[int, ...], low: int, high: int) -> Any:
    """Of 16 bits, with biased exponents in [low, high]; 0 is zero or subnormal."""
    exponent, mantissa = rng.integers(low, high + 1, shape), rng.integers(0, 1 << bits, shape)
    return (rng.integers(0, 2, shape) << 15 | exponent << bits | mantissa).astype(np.uint16)


def random_f32(rng: Any, shape: tuple[int, ...], low: int, high: int) -> Any:
    """Random float32 with exponents from `low` to `high`."""
    exponent = rng.integers(low, high + 1, shape)
    bits = rng.integers(0, 2, shape) << 31 | exponent << 23 | rng.integers(0, 1 << 23, shape)
    return bits.astype(np.uint32).view(np.float32)


# Exponents of a, b and c. Products of 2^-63 are near the least normal, 2^-126.
RANGES = {
    "bf16": {
        "normal": ((120, 130), (120, 130), (120, 130)),
        "wide": ((40, 200), (40, 200), (1, 254)),
        "tiny": ((0, 70), (0, 70), (0, 20)),
        "near the least normal": ((60, 68), (60, 66), (0, 4)),
        "subnormal": ((0, 1), (120, 250), (0, 1)),
        "infinite": ((200, 255), (200, 255), (200, 255)),
    },
    "f16": {
        "normal": ((12, 18), (12, 18), (120, 130)),
        "wide": ((0, 30), (0, 30), (70, 160)),
        "subnormal": ((0, 0), (0, 30), (80, 120)),
        "a subnormal sum": ((0, 0), (0, 1), (0, 1)),
        "infinite": ((28, 31), (28, 31), (240, 255)),
    },
}
KINDS = [(of, kind) for of, ranges in RANGES.items() for kind in ranges]


def operands(of: str, kind: str, count: int) -> tuple[Any, Any, Any]:
    """a [count, 16, 32], b [count, 32, 16] as bits of a type, and c [count, 16, 16] in fp32."""
    rng = np.random.default_rng(list(RANGES[of]).index(kind))
    of_a, of_b, of_c = RANGES[of][kind]
    a = random_halves(rng, MANTISSA[of], (count, 16, 32), *of_a)
    b = random_halves(rng, MANTISSA[of], (count, 32, 16), *of_b)
    c = random_f32(rng, (count, 16, 16), *of_c)
    # Half of them sparse, so that single products, not only sums of many, decide.
    a[::2] *= rng.random((len(a[::2]), 16, 32)) < 0.05
    return a, b, c


# -- the judge ------------------------------------------------------------------------------------


def flushed(x: Any) -> Any:
    """Numbers with subnormals replaced by zero."""
    return np.where(np.abs(x) < np.float32(2**-126), np.copysign(np.float32(0), x), x)


def widened(of: str, bits: Any) -> Any:
    """16-bit numbers as the tiles read them."""
    if of == "f16":
        return bits.view(np.float16).astype(np.float32)
    return flushed((bits.astype(np.uint32) << 16).view(np.float32))


def fused(a: Any, b: Any, c: Any) -> Any:
    """a b + c rounded once: exact in float64 but for the last bits, which are rounded to odd."""
    product = a.astype(np.float64) * b.astype(np.float64)  # exact: at most 11 bits times 11
    wide = c.astype(np.float64)
    total = product + wide
    part = total - product
    error = (product - (total - part)) + (wide - part)
    bits = total.view(np.int64)
    toward = np.where((error > 0) == (total > 0), 1, -1)
    inexact = (error != 0) & np.isfinite(error) & (bits & 1 == 0)
    return np.where(inexact, (bits + toward).view(np.float64), total).astype(np.float32)


def judged(of: str, a: Any, b: Any, c: Any) -> Any:
    """TDPBF16PS and TDPFP16PS, after Intel's manual and, in bf16, what the processor does: even and
    odd elements in two chains, subnormal floats flushed in and out, except fp16 inputs."""
    a, b = widened(of, a), widened(of, b)
    chains = []
    for first in (0, 1):
        chain = np.zeros(c.shape, np.float32)
        for k in range(first, a.shape[2], 2):
            chain = flushed(fused(a[:, :, k, None], b[:, k, None, :], chain))
        chains.append(chain)
    return flushed(flushed(c) + flushed(chains[0] + chains[1]))


# -- the two sides --------------------------------------------------------------------------------


def tile_products(
    library: Path, name: str, of: str, shape: tuple[int, int, int], a: Any, b: Any, c: Any
) -> Any:
    """c + a b by the emulated tiles."""
    pairs = np.ascontiguousarray(b.reshape(-1, 16, 2, 16).swapaxes(2, 3))
    a, c = np.ascontiguousarray(a), c.copy()
    pointers = [x.ctypes.data_as(ctypes.c_char_p) for x in (a, pairs, c)]
    getattr(ctypes.CDLL(str(library)), name)(int(of == "f16"), *shape, *pointers, len(a))
    return c


def assert_same(got: Any, expected: Any) -> None:
    """Bit for bit, and NaN where NaN is: its payload is not compared."""
    nan = np.isnan(expected)
    assert (np.isnan(got) == nan).all()
    same = got.view(np.uint32) == expected.view(np.uint32)
    assert (same | nan).all(), f"{(~(same | nan)).sum()} of {same.size} differ"


def shaped(of: str, shape: tuple[int, int, int], a: Any, b: Any, c: Any) -> Any:
    """The expected tiles of m rows, n columns and k pairs: the rest of c is unchanged."""
    m, n, k = shape
    expected = c.copy()
    expected[:, :m, :n] = judged(of, a[:, :m, : 2 * k], b[:, : 2 * k, :n], c[:, :m, :n])
    return expected


FULL = (16, 16, 16)


@pytest.mark.filterwarnings("ignore:.*(invalid value|overflow) encountered")
@pytest.mark.parametrize(("of", "kind"), KINDS)
def test_emulated_products(library: Path, of: str, kind: str) -> None:
    a, b, c = operands(of, kind, 200)
    assert_same(tile_products(library, "emulated", of, FULL, a, b, c), judged(of, a, b, c))


@pytest.mark.parametrize("of", RANGES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_emulated_shapes(library: Path, shape: tuple[int, int, int], of: str) -> None:
    a, b, c = operands(of, "normal", 20)
    assert_same(tile_products(library, "emulated", of, shape, a, b, c), shaped(of, shape, a, b, c))


def skip_without_tiles(native: ModuleType, of: str) -> None:
    """Importing the core has requested the tiles from Linux."""
    if {"bf16": "amx_bf16", "f16": "amx_fp16"}[of] not in native.processor()["features"]:
        info = native.build_info()
        reasons = {"bf16": info["unsupported"].get("amx_bf16"), "f16": info["no_float16_on_tiles"]}
        pytest.skip(str(reasons[of] or "the build has no such tiles"))


@pytest.mark.parametrize(("of", "kind"), KINDS)
def test_real_products_equal_the_emulations(
    native: ModuleType, library: Path, of: str, kind: str
) -> None:
    skip_without_tiles(native, of)
    a, b, c = operands(of, kind, 3000)
    emulated = tile_products(library, "emulated", of, FULL, a, b, c)
    assert_same(tile_products(library, "real", of, FULL, a, b, c), emulated)


@pytest.mark.parametrize("of", RANGES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_real_shapes_equal_the_emulations(
    native: ModuleType, library: Path, shape: tuple[int, int, int], of: str
) -> None:
    skip_without_tiles(native, of)
    a, b, c = operands(of, "normal", 100)
    emulated = tile_products(library, "emulated", of, shape, a, b, c)
    assert_same(tile_products(library, "real", of, shape, a, b, c), emulated)


# -- the parts of floats --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parts_library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The splitting into parts as a shared library."""
    features = Path("/proc/cpuinfo").read_text()
    if "avx2" not in features:
        pytest.skip("needs AVX2")
    vectors = ["-march=x86-64-v4", "-mprefer-vector-width=512"]
    if "avx512bw" not in features:
        vectors = ["-march=x86-64-v3", "-DFASTATTN_EMULATED_AVX512=1"]
    built = tmp_path_factory.mktemp("tiles") / "tile_parts.so"
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Wno-psabi", "-fPIC", "-shared"]
    source = str(ROOT / "tests/support/tile_parts.cpp")
    subprocess.run([*COMPILER, *flags, *vectors, source, "-o", str(built)], check=True)
    return ctypes.CDLL(str(built))


def cut(x: Any) -> Any:
    """The upper 8 of the significant bits, which are a bf16."""
    return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def nearest(x: Any) -> Any:
    """Rounded to bf16, ties away from zero."""
    return cut((x.view(np.uint32) + np.uint32(0x8000)).view(np.float32))


def parts_of(x: Any, count: int) -> list[Any]:
    """x as a sum of parts in bf16, the largest first."""
    if count == 1:
        return [nearest(x)]
    first = cut(x)
    if count == 2:
        return [first, nearest(x - first)]
    return [first, cut(x - first), x - first - cut(x - first)]


def as_floats(bits: Any) -> Any:
    """Floats from the bits of bf16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def split(library: Any, count: int, pairs: bool, a: Any, b: Any) -> Any:
    """[count, 2, 16]: the parts of a and of b."""
    out = np.zeros((count, 32), np.uint16)
    library.parts(count, int(pairs), *(x.ctypes.data_as(ctypes.c_char_p) for x in (a, b, out)))
    found = as_floats(out)
    return found.reshape(count, 16, 2).swapaxes(1, 2) if pairs else found.reshape(count, 2, 16)


@pytest.mark.parametrize("pairs", [True, False], ids=["pairs", "joined"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_parts_of_floats(parts_library: Any, count: int, pairs: bool) -> None:
    rng = np.random.default_rng(count)
    for exponents in ((100, 150), (30, 250), (67, 67)):  # 2^-60: the third part is not subnormal
        for _ in range(50):
            x = random_f32(rng, (2, 16), *exponents)
            x[0, :4] = (0.0, -0.0, 1.0, np.float32(2) - np.float32(2**-23))  # 24 ones
            found = split(parts_library, count, pairs, *x)
            for part, expected in zip(found, parts_of(x, count), strict=True):
                assert_same(part, expected)
            total = found.astype(np.float64).sum(0)
            if count == 3:
                assert (total == x).all()
            assert (np.abs(total - x) <= np.abs(x) * 2.0 ** (-8 * count)).all()


def test_pairs_in_f16(parts_library: Any) -> None:
    """Rounded to nearest, ties to even; subnormals too."""
    rng = np.random.default_rng(0)
    for exponents in ((100, 141), (102, 113)):
        x = random_f32(rng, (2, 16), *exponents)
        x[0, :5] = (0.0, -0.0, 1 + 2**-11, 1 + 3 * 2**-11, np.inf)
        out = np.zeros(32, np.uint16)
        parts_library.pairs_of_f16(*(y.ctypes.data_as(ctypes.c_char_p) for y in (*x, out)))
        found = out.reshape(16, 2).T
        assert (found == x.astype(np.float16).view(np.uint16)).all()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_products_of_parts_are_the_significant_ones(parts_library: Any, count: int) -> None:
    left, right = (np.full(9, -1, np.int32) for _ in range(2))
    found = parts_library.products(
        count, *(x.ctypes.data_as(ctypes.c_char_p) for x in (left, right))
    )
    pairs = list(zip(left[:found].tolist(), right[:found].tolist(), strict=True))
    expected = {(i, j) for i in range(count) for j in range(count) if i + j < count}
    assert set(pairs) == expected
    assert len(pairs) == len(expected)
    assert pairs[-1] == (0, 0)  # the largest is added last


@pytest.mark.parametrize("col_stride", [1, 3])
@pytest.mark.parametrize("channels", [1, 16, 37])
def test_rows_that_have_no_parts(parts_library: Any, channels: int, col_stride: int) -> None:
    rng = np.random.default_rng(channels)
    rows = np.ones((32, channels, col_stride), np.float32)
    x = rows[:, :, 0]
    x[:] = rng.standard_normal((32, channels))
    x[:, 0] = 1
    # The row's largest element decides; NaN is larger than all.
    some = {1: 2.0**56, 2: -(2.0**56) * 1.5, 3: np.nan, 4: -np.inf, 5: 3e38}
    for row, value in some.items():
        x[row, -1] = value
    x[[10, 11, 12, 13, 14]] = 0
    x[11, -1], x[12, -1], x[13, -1], x[14, 0] = 2.0**-40, -(2.0**-41), 1e-45, -0.0
    found = parts_library.rows_that_are_apart(
        rows.ctypes.data_as(ctypes.c_char_p), ctypes.c_int64(channels), ctypes.c_int64(col_stride)
    )
    assert [row for row in range(32) if found >> row & 1] == [2, 3, 4, 5, 12, 13]
