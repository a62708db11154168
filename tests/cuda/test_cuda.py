"""The CUDA kernels on CPU tensors, under the emulator of tests/emulator, against the oracle.

The same adapter, bindings and kernels as on a GPU; only the machine is another. Each case runs with
random stalls and completions of its own.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from attention_cases import GPU_CASES
from emulated import Emulated
from fenced import run_fenced
from large_scores import large_scores
from naive._mask_program import visible_by_program
from new_option import assert_declined, assert_tensor_declined
from torch import Tensor

import fastattn
from fastattn import compat, dispatch, info
from fastattn.testing import Case, Deviation, Verdict, check
from fastattn.testing.inputs import PROGRAMS, make_inputs

TABLE = GPU_CASES
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TILE = 64  # rows and keys of a tile, computed whole whatever part of it there is


def _declined(case: Case) -> str | None:
    """The reason that the kernels must give against a case, None if they are to run it."""
    if max(case.head_dim, case.value_dim or 0) > 256:
        return "the kernels take up to 256"
    if any(case.first):
        return "has no first_"
    return None


def _is_for_the_slow_run(n: int, case: Case) -> bool:
    """Seconds under the emulator, or every second one of the many that differ in one thing."""
    tiles = case.batch * case.heads * -(-case.q_len // TILE) * -(-case.k_len // TILE)
    newer = any(x is not None for x in (case.sinks, case.relative_bias, case.program))
    many = tiles > (60 if newer else 170)
    alike = case.name.startswith(("lengths-", "partial-", "relative-", "program-"))
    return case.slow or many or (alike and n // 3 % 2 == 1)


# Beyond scores of 4e9 the float32 kernels sum a row's maximum again, in another order. The case
# keeps its bound in 16 bits.
BEYOND = pytest.mark.xfail(reason="a limit of float32: Limits in docs/gpu-kernels.md")

# Between them these meet every part of the kernels: tools/mutate.py judges by them.
NAMES = """head_dim-64 gqa-causal gqa-mask everything window-3-5-65x65-full mask-padding-poison
mask-tril-poison mask-nothing softcap-0.5-mask alibi-bh-causal dropout-0.5-causal mask-steep
window-narrow-long mask-finfo-min mask-float-qk mask-float-k mask-float-one layout-transposed
dropout-long results-1-out-lse-weights-mask gqa-decode lengths-128x129-upper_left
lengths-64x300-upper_left window-1000-1000-40x130-bottom_right head_dim-256 head_dim-7-value-200
mask-nan-queries window-3-5-130x40-bottom_right results-2-out-lse-weights
decode-1x63-group-8-head_dim-129-value-136 sinks-40x1 sinks-bh sinks-nan-queries relative-bh
relative-130x130-causal relative-65x16-causal relative-mask-float_inf relative-grid relative-any
program-causal program-documents_b program-groups program-function program-not_function
program-block_mask program-heads program-many program-dropout-weights-1 program-sinks-nan-queries
program-mask-finfo-min program-gap-1x700""".split()


def _is_chosen(n: int, case: Case) -> bool:
    """For `make test`: of the options whose cases for the mutants take long, others as well."""
    others = ("relative-", "program-", "sinks-", "head_dim-")
    return case.name in NAMES or (case.name.startswith(others) and n // 3 % 6 == 0)


WORK = [
    pytest.param(
        case,
        dtype,
        n,
        id=f"{case.name}-{str(dtype).removeprefix('torch.')}",
        marks=[
            *([BEYOND] if (case.name, dtype) == ("scale-1e+09", torch.float32) else []),
            *([] if _is_chosen(n, case) else [pytest.mark.complete]),
        ],
    )
    for n, case in enumerate(TABLE)
    for m, dtype in enumerate(DTYPES)
    if (n % len(DTYPES) == m and (case.name in NAMES or not _is_for_the_slow_run(n, case)))
    # The gradient of a mask that is wider than the rest must be within the eps of the mask.
    or (case.name.startswith("mask-float32-") and dtype == torch.bfloat16)
    # In float16 no hidden pair has a score that a row with finfo.min would add.
    or (case.name == "program-mask-finfo-min" and dtype == torch.bfloat16)
]


def test_every_named_case_is_there() -> None:
    assert {case.name for case in TABLE} >= set(NAMES)


@pytest.mark.parametrize(("case", "dtype", "seed"), WORK)
def test_case(adapter: ModuleType, case: Case, dtype: torch.dtype, seed: int) -> None:
    verdict = check(case, dtype, Emulated(adapter, seed))  # type: ignore[arg-type]
    reason = _declined(case)
    if reason is not None:
        assert reason in "; ".join(verdict.declined)
        return
    assert not verdict.declined, verdict.declined
    assert verdict.ok, "\n".join(verdict.faults)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("case", "dtype"), large_scores(*DTYPES))
def test_large_scores(adapter: ModuleType, case: Case, dtype: torch.dtype) -> None:
    verdict = check(case, dtype, Emulated(adapter, 3))  # type: ignore[arg-type]
    assert not verdict.declined, verdict.declined
    assert verdict.ok, "\n".join(verdict.faults)


# A query that sees one key gives it the weight 1 whatever its score is, and has no gradient: in
# float32 these are exact, in scores of hundreds and with a scale that no float is.
ONE_KEY = [
    Case("one-key-window", window=(0, 0), scale=33.3, head_dim=40, q_len=65),
    Case("one-key-mask", mask="one_key", scale=33.3, head_dim=40, q_len=65),
]


def inexact_gradients(verdict: Verdict) -> list[Deviation]:
    """Gradients of queries and keys of a ONE_KEY case that are not exactly 0."""
    gradients = ("grad_query", "grad_key")
    return [d for d in verdict.deviations if d.name in gradients and d.error != 0]


@pytest.mark.parametrize("case", ONE_KEY, ids=lambda case: case.name)
def test_a_single_visible_key_has_weight_one(adapter: ModuleType, case: Case) -> None:
    verdict = check(case, torch.float32, Emulated(adapter, 3))  # type: ignore[arg-type]
    assert verdict.ok, verdict.faults
    assert {"grad_query", "grad_key"} <= {d.name for d in verdict.deviations}
    assert not inexact_gradients(verdict)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("part", range(10))
def test_every_case(adapter: ModuleType, part: int, dtype: torch.dtype) -> None:
    """Copies arrive as late as allowed, or in random order; neighbours and dtypes take turns."""
    faults = [
        f"{case.name} {dtype} {seed}: {fault}"
        for n, case in enumerate(TABLE[part::10])
        if _declined(case) is None
        for seed in [(n + DTYPES.index(dtype)) % 2 * (n + 1)]
        for fault in check(case, dtype, Emulated(adapter, seed)).faults
    ]
    assert not faults, "\n".join(faults)


# -- the same bits --------------------------------------------------------------------------------

SAME = Case("same", heads=4, kv_heads=2, q_len=150, k_len=170, head_dim=64, causal="bottom_right",
            mask="float_inf", mask_grad=True, dropout_p=0.1)  # fmt: skip
SAME_TABLE = Case("same-table", heads=2, q_len=90, k_len=150, relative_bias="h")
SAME_PROGRAM = Case("same-program", heads=2, q_len=90, k_len=150, program="many", sinks="h")


@pytest.mark.complete
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((SAME, dtype) for dtype in DTYPES),
        (SAME_TABLE, torch.float32),
        (SAME_PROGRAM, torch.float16),
    ],
    ids=["bfloat16", "float16", "float32", "table-float32", "program-float16"],
)
def test_same_bits_in_whatever_order_warps_run(
    adapter: ModuleType, case: Case, dtype: torch.dtype
) -> None:
    inputs = make_inputs(case, dtype)
    results = []
    for seed in (0, 1, 2):
        adapter._cuda.set_seed(seed)
        results.append(inputs.results(adapter))
    for other in results[1:]:
        for name, found in results[0].items():
            assert torch.equal(found, other[name]), name


# -- NaN and inf ----------------------------------------------------------------------------------

CAUSAL = Case("nan", q_len=190, k_len=190, causal="upper_left")
TRIANGLE = Case("nan-mask", q_len=190, k_len=190, mask="tril", mask_dims="qk")


@pytest.mark.complete
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(CAUSAL, torch.bfloat16), (TRIANGLE, torch.float32)],
    ids=["causal-bfloat16", "mask-float32"],
)
def test_nan_reaches_only_the_queries_that_see_it(
    adapter: ModuleType, case: Case, dtype: torch.dtype
) -> None:
    """Some queries see the key; the table's poisoned cases hide it from all queries.

    NaN in a key goes into scores, which are selected. NaN in a value, and whatever comes back, is
    multiplied by weights of 0: as docs/gpu-kernels.md says, that ends with the block of 128 rows.
    """
    inputs = make_inputs(case, dtype)
    clean = inputs.results(adapter)
    first = 150 if case is CAUSAL else 147  # of the queries that see key 150
    before = inputs.key[:, :, 150].clone()
    inputs.key[:, :, 150] = torch.nan
    found = inputs.results(adapter)
    assert found["out"][:, :, first:].isnan().all()
    for name in ("out", "lse"):
        assert torch.equal(found[name][:, :, :first], clean[name][:, :, :first]), name
    inputs.key[:, :, 150] = before
    inputs.value[:, :, 150] = torch.inf
    found = inputs.results(adapter)
    assert torch.equal(found["lse"], clean["lse"])
    assert not found["out"][:, :, first:].isfinite().any()
    for name in ("out", "grad_query"):
        assert torch.equal(found[name][:, :, :128], clean[name][:, :, :128]), name


# -- sinks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("is_hopper", [False, True], ids=["sm_80", "hopper"])
def test_sinks_of_any_size(adapter: ModuleType, is_hopper: bool, dtype: torch.dtype) -> None:
    """None, one that has all the weight, and one next to which a double loses the sum of a row."""
    large = 1e7
    sinks = torch.tensor([-math.inf, math.inf, 0.3, large], requires_grad=True)
    draw = torch.Generator().manual_seed(2)
    sizes = (2, 4, 6, 8), (2, 2, 9, 8), (2, 2, 9, 8)
    tensors = [torch.randn(size, generator=draw).to(dtype) for size in sizes]
    grad_out = torch.randn(sizes[0], generator=draw).to(dtype)
    grad_lse = torch.randn(sizes[0][:3], generator=draw)
    tensors[0][:, :, 3] = 0
    mask = torch.zeros(6, 9)
    mask[2], mask[3], mask[4, 3:] = -math.inf, large, -math.inf
    grad_out[:, :, 2] = math.nan  # of fully masked rows

    def run(backend: str) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (*tensors, sinks)]
        with Emulated(adapter, 3).active(), fastattn.use_backend(backend):
            out, lse = fastattn.scaled_dot_product_attention(
                *leaves[:3], mask, sinks=leaves[3], enable_gqa=True, return_lse=True
            )
            grads = torch.autograd.grad((out, lse), leaves, (grad_out, grad_lse))
        return [out.detach(), lse.detach(), *grads]

    adapter._cuda.allow_hopper(is_hopper)
    try:
        found = run("cuda")
    finally:
        adapter._cuda.allow_hopper(False)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found, run("reference"), rtol=tolerance, atol=tolerance)
    out, lse, *_, grad_sinks = found
    assert not out[:, 1].any()
    assert torch.equal(lse[:, 2:, 2], sinks.detach()[2:].expand(2, 2))
    assert grad_sinks[0] == 0


# -- relative biases ------------------------------------------------------------------------------


def _with_gradients(
    adapter: ModuleType, backend: str, tensors: tuple[Tensor, ...], cotangent: Tensor, bias: Any
) -> list[Tensor]:
    """Out, lse, and the gradients of query, key, value and the table, by autograd."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    with Emulated(adapter, 3).active(), fastattn.use_backend(backend):
        out, lse = fastattn.scaled_dot_product_attention(
            *leaves[:3], relative_bias=bias(leaves[3]), return_lse=True
        )
        grads = torch.autograd.grad(out, leaves, cotangent)
    return [out.detach(), lse.detach(), *grads]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("is_hopper", [False, True], ids=["sm_80", "hopper"])
def test_an_entry_of_minus_infinity_hides_its_pairs(
    adapter: ModuleType, is_hopper: bool, dtype: torch.dtype
) -> None:
    """With NaN in keys that are hidden from all queries, and in fully masked rows."""
    draw = torch.Generator().manual_seed(4)
    sizes = (1, 2, 90, 16), (1, 2, 100, 16), (1, 2, 100, 16)
    query, key, value = (torch.randn(size, generator=draw).to(dtype) for size in sizes)
    grad_out = torch.randn(sizes[0], generator=draw).to(dtype)
    table = torch.randn(2, 2 * 100 - 1, generator=draw)
    distance = torch.arange(-99, 100)
    table[:, (distance < 10) | (distance > 20)] = -math.inf  # query i sees keys i - 20 ... i - 10
    for x, row in ((query, 3), (grad_out, 3), (key, 85), (value, 85)):
        x[:, :, row] = math.nan
    tensors = (query, key, value, table)
    adapter._cuda.allow_hopper(is_hopper)
    try:
        found = _with_gradients(adapter, "cuda", tensors, grad_out, lambda table: table)
    finally:
        adapter._cuda.allow_hopper(False)
    wanted = _with_gradients(adapter, "reference", tensors, grad_out, lambda table: table)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    assert not found[0][:, :, :10].any()
    assert found[0][:, :, 10:].isfinite().all()


# The host does not read positions. Every tensor ends where a page begins that may not be read, so
# this runs in a process of its own.
_WILD = """
import emulator
from fastattn.testing import Case, make_inputs
adapter = emulator.load()
case = Case("wild", heads=2, q_len=20, k_len=30, relative_bias="h", positions="any", head_dim=8)
for wild in (10**9, -(10**9)):
    inputs = make_inputs(case, torch.float32)
    inputs.positions[::3] += wild
    inputs.results(adapter)
"""


@pytest.mark.complete
@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
def test_positions_read_nothing_outside_the_table(adapter: ModuleType) -> None:
    run_fenced(_WILD)


# -- mask programs --------------------------------------------------------------------------------

_SOME, _ALL = 1, 2  # Seen in csrc/cuda/params.h


@contextlib.contextmanager
def allocates_by(adapter: ModuleType, empty: Callable[..., Tensor]) -> Iterator[None]:
    """The native module gets its memory from this function, instead of ``torch.empty``."""
    module = ModuleType("torch")
    vars(module).update(vars(torch))
    module.empty = empty  # type: ignore[attr-defined]
    adapter._cuda.use_torch(module, None, "cpu")
    try:
        yield
    finally:
        adapter._cuda.use_torch(torch, compat.exchange_interface, "cpu")


def _tiles(adapter: ModuleType, case: Case) -> tuple[Tensor, Tensor]:
    """The kernel's class of each tile of 64 x 64 pairs, and the share of its visible pairs."""
    inputs = make_inputs(case, torch.float32)
    kept: list[Tensor] = []

    def empty(sizes: tuple[int, ...], **options: Any) -> Tensor:
        made = torch.empty(sizes, **options)
        if made.dtype is torch.int8:  # the workspace of the program
            kept.append(made.view(torch.uint8).fill_(255))
        return made

    with allocates_by(adapter, empty):
        adapter.scaled_dot_product_attention(*inputs.args, options=inputs.options)
    shape = (case.batch, case.heads, case.q_len, case.k_len)
    size = (*shape[:2], -(-case.q_len // TILE), -(-case.k_len // TILE))
    found = kept[0][-torch.Size(size).numel() :].view(size)
    assert inputs.mask_program is not None
    pairs = torch.from_numpy(visible_by_program(inputs.mask_program, shape).copy()).double()
    share = torch.nn.functional.avg_pool2d(
        pairs.expand(shape), TILE, ceil_mode=True, count_include_pad=False
    )
    return found, share


@pytest.mark.complete
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_tiles_of_a_program(adapter: ModuleType, name: str) -> None:
    case = Case("tiles", heads=2, q_len=100, k_len=200, program=name, head_dim=8, grads=())
    found, share = _tiles(adapter, case)
    # Batch entries and heads with the same tiles have them once, as the first ones.
    found = torch.where(found <= _ALL, found, found[:, :1])
    found = torch.where(found <= _ALL, found, found[:1])
    assert not share[found == 0].any()
    assert (share[found == _ALL] == 1).all()
    if name in ("causal", "window", "documents_b", "groups", "not_documents", "not_window"):
        some = (share > 0) & (share < 1)
        assert torch.equal(found == _SOME, some)


# Keys and values from row 64 on cannot be read.
_HIDDEN = """
import ctypes
import emulator
from fastattn import masks
from fastattn.backends.primitives import AttentionOptions
from fastattn.testing.cases import place
adapter = emulator.load()
query, long = torch.randn(2, 1, 1, 128, 8)
short = place(long[:, :, :64])
ids = torch.zeros(128, dtype=torch.int32)
mask = masks.document(ids, (torch.arange(128) >= 64).int())
program = masks.program("test", mask, query, 128, 0)
memory = (ctypes.c_char * long.nbytes).from_address(short.data_ptr())
hidden = torch.frombuffer(memory, dtype=torch.float32).view(long.shape)
found, want = (
    adapter.scaled_dot_product_attention(
        query, keys, keys, mask_program=given, options=AttentionOptions(scale=1.0)
    )[0]
    for keys, given in ((hidden, program), (short, None))
)
torch.testing.assert_close(found, want)
"""


@pytest.mark.complete
@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
def test_reads_no_tile_that_a_program_hides(adapter: ModuleType) -> None:
    run_fenced(_HIDDEN)


# A program that is not valid makes no pair visible, or others, but a kernel reads nothing past its
# end. In a process of its own, as above.
_INVALID = """
import emulator
from fastattn.testing import Case, make_inputs
adapter = emulator.load()
case = Case("invalid", batch=2, heads=2, q_len=20, k_len=30, program="many", head_dim=8)
inputs = make_inputs(case, torch.float32)
program = inputs.mask_program
count = 1 + 7 * int(program[0])
for at in (*range(count), *range(count, len(program), 997)):
    for wrong in (-1, 1 << 20)[at % 2 :]:
        print(at, wrong, flush=True)
        before = int(program[at])
        program[at] = wrong
        out, *_ = adapter.scaled_dot_product_attention(
            *inputs.args, options=inputs.options
        )
        assert out.isfinite().all()
        program[at] = before
program[0] = 0
out, *_ = adapter.scaled_dot_product_attention(*inputs.args, options=inputs.options)
assert not out.any()
"""


@pytest.mark.complete
@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
def test_reads_nothing_past_the_end_of_a_program_that_is_not_valid(adapter: ModuleType) -> None:
    run_fenced(_INVALID)


def test_a_program_must_be_an_array_of_integers(adapter: ModuleType) -> None:
    inputs = make_inputs(Case("program", program="causal"), torch.float32)
    assert inputs.mask_program is not None
    wrong = inputs.changed(mask_program=inputs.mask_program.long())
    with pytest.raises(ValueError, match="mask_program is not valid: it must be"):
        wrong.results(adapter)


# -- what is refused, and why ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"relative_bias": torch.zeros(1, 2, 15)}, "odd number of columns, at least 17, got 15"),
        ({"relative_bias": torch.zeros(1, 2, 18)}, "odd number of columns, at least 17, got 18"),
        (
            {"relative_bias": torch.zeros(1, 2, 17, dtype=torch.float16)},
            "relative_bias is not valid: it must be float32, got float16",
        ),
        (
            {"positions": torch.arange(8, dtype=torch.int32)},
            "an element for each of 6 queries and 9 keys, got 8",
        ),
        ({"positions": torch.arange(9)}, "positions is not valid: it must be contiguous, of int32"),
    ],
)
def test_a_table_that_does_not_fit_is_not_read(
    adapter: ModuleType, changes: dict[str, Tensor], message: str
) -> None:
    case = Case("table", heads=2, q_len=6, k_len=9, relative_bias="h")
    inputs = make_inputs(case, torch.float32)
    inputs.results(adapter)
    with pytest.raises(ValueError, match=message):
        inputs.changed(**changes).results(adapter)


def _why_not(adapter: ModuleType, **changes: Any) -> list[str]:
    """The reasons of the emulated backend against a call with changed options."""
    inputs = make_inputs(Case("plain"), changes.pop("dtype", torch.float16))
    op = "scaled_dot_product_attention"
    tensors = {**dispatch.tensors_by_name(op, inputs.args)}
    if "mask" in changes:
        tensors["attn_mask"] = changes.pop("mask")
    return adapter.why_not(op, tensors, replace(inputs.options, **changes))


def test_reasons_against_a_call_are_plain_sentences(adapter: ModuleType) -> None:
    assert _why_not(adapter) == []
    assert _why_not(adapter, dtype=torch.float64) == [
        "the dtype torch.float64 is not one of float32, bfloat16, float16"
    ]
    mask = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    assert _why_not(adapter, mask=mask) == [
        "the mask's dtype torch.float64 is not bool, float32, bfloat16 or float16"
    ]
    assert _why_not(adapter, mask=mask.to("meta")) == ["a tensor is on meta"]


def test_declines_an_option_that_it_does_not_know(adapter: ModuleType) -> None:
    assert_declined(adapter, torch.float16)
    assert_tensor_declined(adapter, torch.float16)


def test_a_cpu_tensor_says_why_there_are_no_cuda_kernels() -> None:
    x = torch.ones(1, 1, 2, 4)
    reasons = fastattn.explain("scaled_dot_product_attention", x, x, x).reasons
    assert "cuda" not in reasons  # not a backend of the CPU
    facts = info.collect()["backends"]["cuda"]
    assert facts["built"] or facts["reason"]
