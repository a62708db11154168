"""The instructions of AVX-512, emulated and, where the processor has them, real, against NumPy."""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy")

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shlex.split(os.environ.get("CXX", "g++"))
FEATURES = set(re.findall(r"\w+", Path("/proc/cpuinfo").read_text()))
MORE = {"avx512_bf16": "-mavx512bf16", "avx512_vnni": "-mavx512vnni"}
FLAGS = {
    "emulated": ["-march=x86-64-v3", "-DFASTATTN_EMULATED_AVX512=1"],
    "real": ["-march=x86-64-v4", *(flag for name, flag in MORE.items() if name in FEATURES)],
}
NEEDED = {"emulated": "avx2", "real": "avx512bw"}

pytestmark = pytest.mark.skipif(not shutil.which(COMPILER[0]), reason="it is compiled here")


@pytest.fixture(scope="module", params=FLAGS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if NEEDED[request.param] not in FEATURES:
        pytest.skip(f"needs {NEEDED[request.param]}")
    built = tmp_path_factory.mktemp("avx512") / "instructions.so"
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Wno-psabi", "-fPIC", "-shared"]
    source = str(ROOT / "tests/support/avx512_instructions.cpp")
    subprocess.run([*COMPILER, *flags, *FLAGS[request.param], source, "-o", str(built)], check=True)
    return ctypes.CDLL(str(built))


# -- the judges: what an instruction makes of 64 bytes each of a, b and c, and of a mask ----------

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
F32, F64 = np.float32, np.float64


def bits(mask: int, count: int) -> Any:
    return np.array([mask >> i & 1 for i in range(count)], bool)


def chosen(of: Any) -> Callable[..., Any]:
    """The lanes of the first operand whose bit of the mask is 1; else 0."""
    return lambda a, b, c, m: np.where(bits(m, len(a.view(of))), a.view(of), of(0))


def shuffled(a: Any, b: Any, c: Any, m: int) -> Any:
    moved = np.where(c & 0x80, 0, a[np.arange(64) // 16 * 16 + (c & 15)])
    return np.where(bits(m, 64), moved, b).astype(U8)


def unpacked(half: int, of: Any) -> Callable[..., Any]:
    def elements(x: Any) -> Any:
        return x.view(of).reshape(4, 2, -1)[:, half]

    return lambda a, b, c, m: np.stack([elements(a), elements(b)], -1).ravel()


def packed(of: Any) -> Any:
    return np.packbits(of, bitorder="little")


def greater(of: Any) -> Callable[..., Any]:
    """The second operand where either is NaN."""
    return lambda a, b, c, m: np.where(a.view(of) > b.view(of), a.view(of), b.view(of))


def fused(a: Any, b: Any, c: Any, sign: int, of: Any) -> Any:
    """In the extended precision of x86, which holds a product of floats but not one of doubles."""
    wide = np.longdouble
    return (a.view(of).astype(wide) * b.view(of) + sign * c.view(of).astype(wide)).astype(of)


def rest(rounded: Callable[..., Any]) -> Callable[..., Any]:
    """x - rounded(x), which itself is rounded in the same direction."""

    def of_one(x: Any) -> Any:
        if not np.isfinite(x):
            return F32(0) if np.isinf(x) else x
        exact, nearest = Fraction(float(x)) - Fraction(float(rounded(x))), x - rounded(x)
        if rounded is np.floor and exact < Fraction(float(nearest)):
            return np.nextafter(nearest, F32(-np.inf))
        return nearest

    return lambda a, b, c, m: np.array([of_one(x) for x in a.view(F32)], F32)


def scaled(of: Any) -> Callable[..., Any]:
    def judge(a: Any, b: Any, c: Any, m: int) -> Any:
        power = np.floor(np.clip(b.view(of), -3000, 3000))
        whole = np.where(np.isnan(power), 0, power).astype(int)
        return np.where(np.isnan(power), of(np.nan), np.ldexp(a.view(of), whole))

    return judge


def to_bf16(x: Any) -> Any:
    u = x.view(U32)
    nearest = (u + 0x7FFF + (u >> 16 & 1)) >> 16
    tiny = np.where((u & 0x7F800000) == 0, u >> 16 & 0x8000, nearest)
    return np.where(np.isnan(x), u >> 16 | 0x40, tiny).astype(U16)


def of_pairs(x: Any, odd: int) -> Any:
    return (x.view(U16)[odd::2].astype(U32) << 16).view(F32)


def pair_products(a: Any, b: Any, c: Any, m: int) -> Any:
    total = c.view(F32)
    for odd in (1, 0):
        product = of_pairs(a, odd).astype(F64) * of_pairs(b, odd)
        total = (product + total).astype(F32)
    return total


JUDGES: dict[str, Callable[..., Any]] = {
    "maskz_loadu_ps": chosen(F32),
    "maskz_loadu_pd": chosen(F64),
    "maskz_loadu_epi16": chosen(U16),
    "256_maskz_loadu_epi16": lambda a, b, c, m: chosen(U16)(a[:32], b, c, m),
    "maskz_loadu_epi8": chosen(U8),
    "128_maskz_loadu_epi8": lambda a, b, c, m: chosen(U8)(a[:16], b, c, m),
    "128_maskz_loadu_ps": lambda a, b, c, m: chosen(F32)(a[:16], b, c, m),
    "zextps128_ps512": lambda a, b, c, m: np.r_[a[:16], np.zeros(48, U8)],
    "zextpd128_pd512": lambda a, b, c, m: np.r_[a[:16], np.zeros(48, U8)],
    "mask_storeu_ps": chosen(F32),
    "mask_storeu_pd": chosen(F64),
    "256_mask_storeu_epi16": lambda a, b, c, m: chosen(U16)(a[:32], b, c, m),
    "set1_epi16": lambda a, b, c, m: np.tile(a[:2], 32),
    "set1_epi32": lambda a, b, c, m: np.tile(a[:4], 16),
    "set1_ps": lambda a, b, c, m: np.tile(a[:4], 16),
    "set1_pd": lambda a, b, c, m: np.tile(a[:8], 8),
    "set4_epi32": lambda a, b, c, m: np.tile(np.array([1, 2, 3, 4], U32), 4),
    "setr_epi64": lambda a, b, c, m: np.array([0, 1, 8, 9, 2, 3, 10, 11], U64),
    "set_epi16": lambda a, b, c, m: np.arange(32, dtype=U16),
    "permutex2var_epi16": lambda a, b, c, m: np.r_[a.view(U16), b.view(U16)][c.view(U16) & 63],
    "permutexvar_epi16": lambda a, b, c, m: a.view(U16)[c.view(U16) & 31],
    "permutex2var_epi64": lambda a, b, c, m: np.r_[a.view(U64), b.view(U64)][c.view(U64) & U64(15)],
    "unpacklo_epi8": unpacked(0, U8),
    "unpackhi_epi8": unpacked(1, U8),
    "unpacklo_epi16": unpacked(0, U16),
    "unpackhi_epi16": unpacked(1, U16),
    "mask_shuffle_epi8": shuffled,
    "maskz_mov_ps": chosen(F32),
    "mask_blend_epi32": lambda a, b, c, m: np.where(bits(m, 16), b.view(U32), a.view(U32)),
    "mask_blend_epi16": lambda a, b, c, m: np.where(bits(m, 32), b.view(U16), a.view(U16)),
    "movm_epi16": lambda a, b, c, m: np.where(bits(m, 32), U16(0xFFFF), U16(0)),
    "cmple_epu16_mask": lambda a, b, c, m: packed(a.view(U16) <= b.view(U16)),
    "cmp_ps_mask": lambda a, b, c, m: packed(a.view(F32) != b.view(F32)),
    "128_mask_testn_epi8_mask": lambda a, b, c, m: packed((a & b)[:16] == 0) & packed(bits(m, 16)),
    "or_si512": lambda a, b, c, m: a | b,
    "add_epi16": lambda a, b, c, m: a.view(U16) + b.view(U16),
    "slli_epi32": lambda a, b, c, m: a.view(U32) << U32(16),
    "slli_epi64": lambda a, b, c, m: a.view(U64) << U64(32),
    "srli_epi64": lambda a, b, c, m: a.view(U64) >> U64(32),
    "mul_epu32": lambda a, b, c, m: a.view(U32)[::2].astype(U64) * b.view(U32)[::2],
    "reduce_max_epi32": lambda a, b, c, m: a.view(np.int32).max(keepdims=True),
    "cvtepu16_epi32": lambda a, b, c, m: a.view(U16)[:16].astype(U32),
    "cvtepi8_epi32": lambda a, b, c, m: a.view(np.int8)[:16].astype(np.int32),
    "cvtepi32_ps": lambda a, b, c, m: a.view(np.int32).astype(F32),
    "cvtepi32_epi16": lambda a, b, c, m: a.view(U32).astype(U16),
    "cvtph_ps": lambda a, b, c, m: a.view(np.float16)[:16].astype(F32),
    "cvtps_ph": lambda a, b, c, m: a.view(F32).astype(np.float16),
    "max_ps": greater(F32),
    "max_pd": greater(F64),
    "fmadd_ps": lambda a, b, c, m: fused(a, b, c, 1, F32),
    "fmsub_pd": lambda a, b, c, m: fused(a, b, c, -1, F64),
    "reduce_ps nearest": rest(np.rint),
    "reduce_ps down": rest(np.floor),
    "roundscale_pd": lambda a, b, c, m: np.rint(a.view(F64)),
    "scalef_ps": scaled(F32),
    "scalef_pd": scaled(F64),
    "dpbusd_epi32": lambda a, b, c, m: (
        c.view(np.int32) + (a.astype(np.int32) * b.view(np.int8)).reshape(16, 4).sum(1, np.int32)
    ),
    "dpbf16_ps": pair_products,
    "cvtne2ps_pbh": lambda a, b, c, m: np.r_[to_bf16(b.view(F32)), to_bf16(a.view(F32))],
}


# -- operands -------------------------------------------------------------------------------------

SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 0.5, -0.5, 1.5, 2.5, 1e-40, -1e-40, 65504.0, 65520.0]


def operands(name: str, seed: int) -> tuple[Any, Any, Any, int]:
    rng = np.random.default_rng(seed)
    mask = int(rng.integers(0, 1 << 63))
    if name == "dpbf16_ps":  # normal numbers and results: subnormals differ
        pairs = [to_bf16(rng.standard_normal(32).astype(F32)) for _ in range(2)]
        return (*(x.view(U8) for x in pairs), rng.standard_normal(16).astype(F32).view(U8), mask)
    of = F64 if "_pd" in name else F32 if "_ps" in name or "ps_" in name else None
    if of is None:
        return (*rng.integers(0, 256, (3, 64), U8), mask)
    width = 64 // of(0).itemsize
    numbers = rng.standard_normal((3, width)) * 2.0 ** rng.integers(-20, 20, (3, width))
    if name.startswith("f"):  # sums that need one rounding, in what NumPy can represent
        numbers = rng.integers(-(2**20), 2**20, (3, width)) / 1024
    elif name.startswith("scalef"):
        numbers[0], numbers[1] = rng.uniform(0.5, 2, width), rng.uniform(-1200, 3, width)
        numbers[1, ::2] = rng.uniform(-150, 140, width // 2)
    with np.errstate(over="ignore"):
        numbers = numbers.astype(of)
    if not name.startswith(("f", "scalef")):
        numbers[:2][rng.random((2, width)) < 0.3] = rng.choice(np.array(SPECIAL, of))
    return (*numbers.view(U8), mask)


def result(library: Any, name: str, a: Any, b: Any, c: Any, mask: int) -> Any:
    out = np.zeros(64, U8)
    pointers = [x.ctypes.data_as(ctypes.c_void_p) for x in (a, b, c)]
    to = out.ctypes.data_as(ctypes.c_void_p)
    if not library.run_instruction(name.encode(), *pointers, ctypes.c_uint64(mask), to):
        pytest.skip("the processor lacks it")
    return out


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", JUDGES)
def test_an_instruction(library: Any, name: str) -> None:
    for seed in range(200):
        given = operands(name, seed)
        with np.errstate(all="ignore"):
            expected = np.ascontiguousarray(JUDGES[name](*given))
        got = result(library, name, *given)[: expected.nbytes].view(expected.dtype)
        if expected.dtype.kind == "f":  # equal, or both NaN; -0 is not 0, but in a difference
            same = got == expected
            if not name.startswith("reduce"):
                same &= np.signbit(got) == np.signbit(expected)
            assert np.all(same | (np.isnan(got) & np.isnan(expected))), (got, expected)
        else:
            assert np.array_equal(got, expected), (got, expected)


def test_a_reciprocal_has_14_bits(library: Any) -> None:
    rng = np.random.default_rng(0)
    for exponent in range(-100, 100, 7):
        x = (rng.uniform(1, 2, 16) * 2.0**exponent).astype(F32)
        a = x.view(U8)
        got = result(library, "rcp14_ps", a, a, a, 0).view(F32)
        error = np.abs(got.astype(F64) * x - 1)
        assert error.max() <= 2**-14
