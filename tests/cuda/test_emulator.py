"""The emulator of tests/emulator against the PTX ISA manual.

Each PTX wrapper of csrc/cuda/ptx runs alone, on the emulator and, where there is one, on a real GPU
(`make gpu-day` runs these first). The layouts below are typed from the manual's sections on
"Matrix Fragments for mma.m16n8k16" and "for mma.m16n8k8", and on ldmatrix and stmatrix: not one
helper of the kernels is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import emulator
import pytest
import torch
from torch import Tensor

Run = Callable[..., Tensor]


@pytest.fixture(scope="session")
def emulated() -> ModuleType:
    return emulator.load_conformance(emulator.build_conformance())


def _runner(module: Any, device: str) -> Run:
    """What runs a conformance kernel of a module on a device."""

    def run(name: str, words: Tensor, size: int) -> Tensor:
        given = words.to(torch.int64).to(torch.int32).contiguous().to(device)
        out = torch.full((size,), 0x5A5A5A5A, dtype=torch.int32, device=device)
        module.run(name, given.data_ptr(), out.data_ptr(), 0)
        if device == "cuda":
            torch.cuda.synchronize()
        return out.cpu()

    return run


@pytest.fixture(params=["emulator", "cuda"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Run a wrapper's kernel: run(name, words in, number of words out)."""
    if request.param == "emulator":
        yield _runner(request.getfixturevalue("emulated"), "cpu")
        return
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")
    yield _runner(emulator.load_conformance(emulator.build_conformance(cuda=True)), "cuda")


@pytest.fixture(params=["emulator", "cuda"])
def hopper_module(request: pytest.FixtureRequest) -> tuple[Any, str]:
    """The module and its device, one that has the instructions of sm_90a."""
    if request.param == "emulator":
        return request.getfixturevalue("emulated"), "cpu"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("there is no CUDA device of compute capability 9.0 here")
    return emulator.load_conformance(emulator.build_conformance(cuda=True)), "cuda"


@pytest.fixture
def hopper(hopper_module: tuple[Any, str]) -> Run:
    return _runner(*hopper_module)


def bits(x: Tensor) -> Tensor:
    """The bits of floats, as numbers."""
    width = {4: torch.int32, 2: torch.int16}[x.element_size()]
    return x.contiguous().view(width).to(torch.int64) & (1 << 8 * x.element_size()) - 1


def floats(words: Tensor) -> Tensor:
    """The floats with the given bits."""
    return words.to(torch.int32).view(torch.float32)


def numbers(count: int) -> Tensor:
    """Floats of every size, and the special ones."""
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(count, generator=draw) * 2.0 ** torch.randint(-40, 40, (count,), generator=draw)
    special = [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), 65504.0, 65519.0, 65520.0, 1e-8,
               6e-8, 3.0e38, 1.00390625, 1.01171875, 2**-14, 2**-15]  # fmt: skip
    x[: len(special)] = torch.tensor(special)
    return x


# -- one register ---------------------------------------------------------------------------------


def test_exp2_approx_is_within_two_ulp(run: Run) -> None:
    x = torch.linspace(-140, 20, 256)
    got = floats(run("exp2_approx", bits(x), 256)).double()
    want = torch.exp2(x.double())
    want[want < 2.0**-126] = 0
    assert ((got - want).abs() <= 2.0**-22 * want).all()


def test_reciprocal_approx_is_within_one_ulp(run: Run) -> None:
    x = torch.cat([torch.logspace(-37, 37, 128), -torch.linspace(1, 2, 128)])
    got = floats(run("reciprocal_approx", bits(x), 256)).double()
    want = 1 / x.double()
    assert ((got - want).abs() <= 2.0**-23 * want.abs()).all()


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_packing_rounds_to_nearest_even_and_puts_the_first_low(
    run: Run, name: str, dtype: torch.dtype
) -> None:
    x = numbers(256)
    packed = run(f"pack_{name}", bits(x), 256).to(torch.int64)
    pairs = x.view(-1, 2)
    other = torch.stack([pairs[:, 1], pairs[:, 0]], 1).flatten()
    assert torch.equal(packed & 0xFFFF, bits(x.to(dtype)))
    assert torch.equal(packed >> 16 & 0xFFFF, bits(other.to(dtype)))


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_widening_is_exact(run: Run, name: str, dtype: torch.dtype) -> None:
    x = numbers(256).to(dtype)
    assert torch.equal(floats(run(f"float_of_{name}", bits(x), 256)), x.float())


def test_tf32_keeps_ten_bits_of_fraction_and_rounds_ties_away(run: Run) -> None:
    x = numbers(256)
    x[20:22] = torch.tensor([1 + 2.0**-11, -1 - 3 * 2.0**-11])  # ties
    x = x.clamp(-1e38, 1e38)
    # The manual leaves the 13 lower bits of the result open; mma does not read them.
    got = floats(run("to_tf32", bits(x), 256).to(torch.int64) & ~0x1FFF).double()
    mantissa, exponent = torch.frexp(x.double().abs())
    want = torch.ldexp((mantissa * 2**11 + 0.5).floor(), exponent - 11) * x.double().sign()
    assert torch.equal(got, want)


# -- memory ---------------------------------------------------------------------------------------


def test_cp_async_copies_some_bytes_and_fills_with_zeros(run: Run) -> None:
    words = torch.arange(1, 129) * 0x01030507 % 2**31
    out = run("cp_async", words, 256).view(2, 32, 4).flip(1).contiguous()
    source = words.to(torch.int32).view(32, 4).view(torch.uint8)
    kept = torch.arange(16) < (torch.arange(32) % 17)[:, None]
    assert torch.equal(out[0].view(torch.uint8), torch.where(kept, source, 0))
    assert torch.equal(out[1].view(torch.uint8), source)


def halves(words: Tensor) -> Tensor:
    """[..., n] registers as [..., n, 2] elements, the low half first."""
    words = words.to(torch.int64)
    return torch.stack([words & 0xFFFF, words >> 16 & 0xFFFF], -1)


def packed(elements: Tensor) -> Tensor:
    """Pairs of 16 bits as words, the first one low."""
    return elements[..., 0] | elements[..., 1] << 16


# "Each thread holds a fragment of a row": thread T of row T / 4 elements 2 (T % 4) and the next.
THREAD = torch.arange(32)
ROW = (THREAD // 4)[:, None].expand(32, 2)
COLUMN = 2 * (THREAD % 4)[:, None] + torch.arange(2)


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_gives_thread_t_of_row_t_by_4(run: Run, transposed: bool) -> None:
    matrices = torch.arange(256).view(4, 8, 8) + 0x8000
    name = "ldmatrix_x4_transposed" if transposed else "ldmatrix_x4"
    out = halves(run(name, packed(matrices.view(4, 8, 4, 2)), 128).view(32, 4))
    for n in range(4):
        matrix = matrices[n].T if transposed else matrices[n]
        assert torch.equal(out[:, n], matrix[ROW, COLUMN])


@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix_is_the_inverse_of_ldmatrix(run: Run, transposed: bool) -> None:
    registers = torch.arange(256).view(32, 4, 2) + 0x8000
    name = "stmatrix_x4_transposed" if transposed else "stmatrix_x4"
    out = halves(run(name, packed(registers), 128)).view(4, 8, 8)
    for n in range(4):
        matrix = out[n].T if transposed else out[n]
        assert torch.equal(matrix[ROW, COLUMN], registers[:, n])


# -- mma ------------------------------------------------------------------------------------------

# Each is (row, column) of element i in thread T, with groupID = T >> 2 and tid = T % 4.
LAYOUTS: dict[str, dict[str, Callable[[int, int, int], tuple[int, int]]]] = {
    "m16n8k16": {
        "a": lambda i, group, tid: (
            group if i in (0, 1, 4, 5) else group + 8,
            tid * 2 + (i & 1) if i < 4 else tid * 2 + (i & 1) + 8,
        ),
        "b": lambda i, group, tid: (
            tid * 2 + (i & 1) if i < 2 else tid * 2 + (i & 1) + 8,
            group,
        ),
        "d": lambda i, group, tid: (group if i < 2 else group + 8, tid * 2 + (i & 1)),
    },
    "m16n8k8": {
        "a": lambda i, group, tid: (
            group if i in (0, 2) else group + 8,
            tid if i < 2 else tid + 4,
        ),
        "b": lambda i, group, tid: (tid if i == 0 else tid + 4, group),
        "d": lambda i, group, tid: (group if i < 2 else group + 8, tid * 2 + (i & 1)),
    },
}


def fragments(matrix: Tensor, layout: Callable[..., tuple[int, int]], count: int) -> Tensor:
    """[32, count]: the elements of every thread."""
    places = [[layout(i, t >> 2, t % 4) for i in range(count)] for t in range(32)]
    rows, columns = torch.tensor(places).unbind(-1)
    return matrix[rows, columns]


@pytest.mark.parametrize(
    ("name", "dtype", "depth"),
    [
        ("mma_bf16_m16n8k16", torch.bfloat16, 16),
        ("mma_f16_m16n8k16", torch.float16, 16),
        ("mma_tf32_m16n8k8", torch.float32, 8),
    ],
)
def test_mma_multiplies_fragments_as_the_manual_lays_them_out(
    run: Run, name: str, dtype: torch.dtype, depth: int
) -> None:
    draw = torch.Generator().manual_seed(7)
    # Small integers: every product and sum is exact, in any order.
    a, b, d = (
        torch.randint(-8, 9, shape, generator=draw).to(torch.float32)
        for shape in ((16, depth), (depth, 8), (16, 8))
    )
    layout = LAYOUTS[name.rpartition("_")[2]]
    elements = 8 if depth == 16 else 4
    in_a, in_b = (
        bits(fragments(x, layout[which], count).to(dtype))
        for x, which, count in ((a, "a", elements), (b, "b", elements // 2))
    )
    if depth == 16:
        in_a, in_b = packed(in_a.view(32, 4, 2)), packed(in_b.view(32, 2, 2))
    words = torch.cat([in_a, in_b, bits(fragments(d, layout["d"], 4))], 1)
    got = floats(run(name, words, 128)).view(32, 4)
    assert torch.equal(got, fragments(a @ b + d, layout["d"], 4))


def test_mma_does_not_read_the_low_bits_of_tf32(run: Run) -> None:
    words = torch.zeros(32, 10, dtype=torch.int64)
    words[:, :6] = 0x3F801FFF  # 1 and all the ignored bits
    assert (floats(run("mma_tf32_m16n8k8", words, 128)) == 8).all()


# -- sm_90 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_mbarrier_phases_hand_words_from_warp_to_warp(
    hopper: Run, emulated: ModuleType, seed: int
) -> None:
    words = torch.arange(128) + 7
    emulated.set_seed(seed)
    try:
        out = hopper("mbarrier", words, 128).view(4, 32).to(torch.int64)
    finally:
        emulated.set_seed(0)
    assert torch.equal(out, (words[:32] + 3 * words[96:]).expand(4, 32))


def test_a_named_barrier_waits_for_its_own_threads(run: Run) -> None:
    words = torch.arange(128) + 7
    out = run("named_barrier", words, 128).view(4, 32).to(torch.int64)
    assert torch.equal(out[1::2], words.view(4, 32)[::2])


def swizzled(rows: Tensor) -> Tensor:
    """Rows of 64 elements of 16 bits in shared memory, with the 128-byte swizzle.

    The manual's figure "128-byte swizzle mode": 16-byte chunk c of row r of 8 is at c xor r.
    """
    chunks = rows.view(-1, 8, 8)
    place = torch.arange(8) ^ (torch.arange(rows.shape[0]) % 8)[:, None]
    out = torch.empty_like(chunks)
    out.scatter_(1, place[..., None].expand(-1, -1, 8), chunks)
    return out.view(rows.shape)


def test_tma_swizzles_fills_with_zeros_and_adds(hopper_module: tuple[Any, str]) -> None:
    module, device = hopper_module
    draw = torch.Generator().manual_seed(3)
    tensor = torch.randn(2, 3, 8, 96, generator=draw).to(torch.bfloat16)
    given, stored = tensor.to(device), torch.zeros_like(tensor, device=device)
    added = torch.ones(8, 32, device=device)
    out = torch.zeros(256, dtype=torch.int32, device=device)
    module.run_tma(given.data_ptr(), stored.data_ptr(), added.data_ptr(), out.data_ptr(), 0)
    if device == "cuda":
        torch.cuda.synchronize()

    # At (32, -1, 1, 0), a box of 64 x 4 x 2: its first row is outside, and so are no columns.
    box = torch.zeros(2, 4, 64, dtype=torch.bfloat16)
    box[:, 1:] = tensor[0, 1:3, 0:3, 32:96]
    found = out.cpu().view(torch.bfloat16).view(8, 64)
    assert torch.equal(found, swizzled(box.view(8, 64)))
    want = torch.zeros_like(tensor)
    want[0, 1:3, 0:3, 32:96] = box[:, 1:]
    assert torch.equal(stored.cpu(), want)
    # Added were the numbers 0, 1, 2 ... as they lay in shared memory: 8 rows of 32 floats.
    row, column = torch.arange(8)[:, None], torch.arange(32)
    number = 32 * row + (column // 4 ^ row) * 4 + column % 4
    assert torch.equal(added.cpu(), 1 + number.float())


@pytest.mark.parametrize(
    ("name", "dtype", "transposed", "registers"),
    [
        ("wgmma_ss_bf16", torch.bfloat16, False, False),
        ("wgmma_ss_bf16_transposed", torch.bfloat16, True, False),
        ("wgmma_rs_f16", torch.float16, False, True),
        ("wgmma_rs_f16_transposed", torch.float16, True, True),
    ],
)
def test_wgmma_multiplies_operands_as_the_manual_lays_them_out(
    hopper: Run, name: str, dtype: torch.dtype, transposed: bool, registers: bool
) -> None:
    draw = torch.Generator().manual_seed(7)
    a = torch.randint(-8, 9, (64, 16), generator=draw).float()
    b = torch.randint(-8, 9, (16, 64), generator=draw).float()
    # K-major: a row is an m or an n, its first 16 elements are k. MN-major: a row is a k.
    rows_a, rows_b = torch.full((64, 64), 99.0), torch.full((64, 64), 99.0)
    rows_a[:, :16] = a
    if transposed:
        rows_b[:16] = b
    else:
        rows_b[:, :16] = b.T
    memory = [packed(bits(swizzled(x.to(dtype))).view(-1, 2)) for x in (rows_a, rows_b)]
    # "Register fragment for wgmma.mma_async.m64nNk16": m16n8k16's in each of four warps.
    warps = [fragments(a[16 * w : 16 * w + 16], LAYOUTS["m16n8k16"]["a"], 8) for w in range(4)]
    in_a = packed(bits(torch.cat(warps).to(dtype)).view(128, 4, 2))
    if not registers:
        in_a.zero_()
    out = floats(hopper(name, torch.cat([*memory, in_a.flatten()]), 4096)).view(128, 32)
    thread, n = torch.arange(128)[:, None], torch.arange(32)
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * (n % 4 // 2)
    column = n // 4 * 8 + thread % 4 * 2 + n % 2
    assert torch.equal(out, (a @ b)[row, column] + (thread + n))


@pytest.mark.parametrize(
    ("columns", "transposed"),
    [(80, False), (96, False), (96, True), (128, True), (192, True), (256, True)],
)
def test_wgmma_of_every_width_by_advancing_descriptors(
    hopper: Run, columns: int, transposed: bool
) -> None:
    """Four steps of 16 k: 32 bytes on where rows are m or n, 16 rows where they are k."""
    draw = torch.Generator().manual_seed(columns)
    a = torch.randint(-8, 9, (128, 64), generator=draw).to(torch.bfloat16)
    b = torch.randint(-8, 9, (64, columns), generator=draw).to(torch.bfloat16)
    rows = torch.full((256, 64), 99, dtype=torch.bfloat16)
    if transposed:  # panels of 64 columns, one after the other
        for first in range(0, columns, 64):
            panel = b[:, first : first + 64]
            rows[first : first + 64, : panel.shape[1]] = panel
    else:
        rows[:columns] = b.T
    # The pattern of the swizzle has 8 rows: panels have it as one tile has.
    words = torch.cat([packed(bits(swizzled(x)).view(-1, 2)) for x in (a, rows)]).flatten()
    steps = [
        torch.cat([fragments(a[64 + 16 * w : 80 + 16 * w, 16 * s : 16 * s + 16],
                             LAYOUTS["m16n8k16"]["a"], 8) for w in range(4)])
        for s in range(4)
    ]  # fmt: skip
    registers = packed(bits(torch.stack(steps, 1)).view(128, 4, 4, 2))
    name = f"wgmma_{columns}" + ("_transposed" if transposed else "")
    out = floats(hopper(name, torch.cat([words, registers.flatten()]), 64 * columns)).view(
        128, columns // 2
    )
    thread, n = torch.arange(128)[:, None], torch.arange(columns // 2)
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * (n % 4 // 2)
    column = n // 4 * 8 + thread % 4 * 2 + n % 2
    assert torch.equal(out, (a[64:].float() @ b.float())[row, column])


def test_setmaxnreg_gives_registers_to_the_other_warpgroups(hopper: Run) -> None:
    words = torch.arange(384) + 7
    out = hopper("setmaxnreg", words, 384).to(torch.int64)
    assert torch.equal(out, torch.where(torch.arange(384) < 128, words, 3 * words))
