"""The CUDA kernels for Hopper on CPU tensors, under the emulator, against the oracle.

They run calls that TMA can copy; the other kernels run the rest, and each test checks which
ran. The emulated machine has three multiprocessors, so of more than three tiles a block of threads
takes several.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import emulator
import pytest
import torch
from attention_cases import VARLEN_CASES
from emulated import Emulated
from fenced import run_fenced
from large_scores import large_scores
from test_cuda import TABLE
from test_cuda_sequences import FAR, WAYS, _far, nan_stays_in_its_sequence
from torch import Tensor

from fastattn.backends._alloc import empty_output
from fastattn.testing import Case, check
from fastattn.testing.calls import Operands
from fastattn.testing.inputs import make_inputs
from fastattn.testing.packed import (
    VarlenCase,
    check_varlen,
    make_varlen,
)

FORWARD = "attention_forward_hopper"
BACKWARD = ("attention_backward_q_hopper", "attention_backward_kv_hopper")
DTYPES = (torch.bfloat16, torch.float16)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.fixture
def adapter() -> Iterator[ModuleType]:
    """The adapter of the emulated kernels, including the kernels for Hopper."""
    adapter = emulator.load()
    adapter._cuda.allow_hopper(True)
    adapter._cuda.take_launches()
    yield adapter
    adapter._cuda.allow_hopper(False)
    adapter._cuda.set_seed(0)


def _launches(adapter: ModuleType) -> set[str]:
    """The kernels that have run since this was last asked, or since the test began."""
    return set(adapter._cuda.take_launches())


def _forward(adapter: ModuleType, inputs: Operands, seed: int = 0) -> dict[str, Tensor]:
    """Out and lse, by the kernel for Hopper."""
    adapter._cuda.set_seed(seed)
    out, lse, _ = adapter.scaled_dot_product_attention(*inputs.args, options=inputs.options)
    assert FORWARD in _launches(adapter)
    return {"out": out, "lse": lse}


def _both(adapter: ModuleType, inputs: Operands, seed: int) -> dict[str, Tensor]:
    """Out, lse and the gradients, by the kernels for Hopper."""
    adapter._cuda.set_seed(seed)
    found = inputs.results(adapter)
    assert {FORWARD, *BACKWARD} <= _launches(adapter)
    return found


def _is_for_hopper(inputs: Operands) -> bool:
    """Is there something to do, in tensors that TMA can copy?"""
    query, key, value = inputs.query, inputs.key, inputs.value
    tensors = (query, key, value, empty_output(query, value.shape[-1]))
    if any(x.numel() == 0 for x in tensors):
        return False
    for x in tensors:
        *strides, last = x.stride()
        if last != 1 or any(stride % 8 != 0 for stride in strides) or x.data_ptr() % 16 != 0:
            return False
    # A box cannot repeat itself.
    if any(x.stride(2) == 0 and x.shape[2] > 1 for x in tensors):
        return False
    group = query.shape[1] // key.shape[1]
    return group <= 128 and (query.stride(1) != 0 or group == 1)


def _faults(adapter: ModuleType, case: Case, dtype: torch.dtype, seed: int) -> list[str]:
    """What is wrong, the wrong kernel included."""
    _launches(adapter)
    target: Any = Emulated(adapter, seed)
    verdict = check(case, dtype, target)
    assert not verdict.declined, verdict.declined
    launches, takes = _launches(adapter), _is_for_hopper(make_inputs(case, dtype))
    others = {"attention_forward", "attention_backward"}
    wrong = launches & (others if takes else {FORWARD, *BACKWARD})
    faults = [f"{name} ran" for name in sorted(wrong)]
    if takes and FORWARD not in launches:
        faults.append("the kernel for Hopper did not run")
    return [*faults, *verdict.faults]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("case", "dtype"), large_scores(*DTYPES))
def test_large_scores(adapter: ModuleType, case: Case, dtype: torch.dtype) -> None:
    assert _is_for_hopper(make_inputs(case, dtype))
    faults = _faults(adapter, case, dtype, 3)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("unit", "middle"), [(1.37, 12246144), (45.6, 367922), (1e18, 8123457)])
@pytest.mark.parametrize("width", [64, 192])
def test_maxima_that_grow_through_large_numbers(
    adapter: ModuleType,
    dtype: torch.dtype,
    unit: float,
    middle: int,
    width: int,
    generator: torch.Generator,
) -> None:
    """The exponents of 2 are ``unit`` (a middle + b + c): a of the 16 rows of a warp, b of the row
    and a step of keys, c of the key. Maxima grow by little and by much, or stay, on both sides of
    2^24 and of -2^24."""
    keys = 8 * 96
    case = Case("maxima", batch=1, heads=1, q_len=80, k_len=keys, head_dim=width,
                scale=unit * math.log(2), grads=())  # fmt: skip
    inputs = make_inputs(case, dtype)
    query, key = torch.zeros_like(inputs.query), torch.zeros_like(inputs.key)
    a = torch.arange(80) // 16 % 3 - 1
    for n, byte in enumerate(middle.to_bytes(3, "little")):
        query[..., n] = a * (1, 256, 256)[n]
        key[..., n] = byte * (1, 1, 256)[n]
    query[..., 3:5] = torch.randint(-1, 2, (80, 2), generator=generator)
    query[..., 5] = 1
    little, much = (
        [-13, -13, -40, -50, -20, -30, -40, -50],
        [0, 0, -600, -600, 300, 300, 4096, 4096],
    )
    for n, b in ((3, little), (4, much)):
        key[..., n] = (torch.tensor(b) / min(unit / 1.37, 100)).round().repeat_interleave(96)
    c = torch.tensor([14, 16, 14, 16, 14, 16, 16, 14]).repeat_interleave(96)
    key[..., 5] = (c * torch.rand(keys, generator=generator)).floor()
    inputs = inputs.changed(query=query, key=key)
    found, exact = _forward(adapter, inputs), inputs.definition()
    # Dot products are exact here, which the usual bound does not know; weights and out are rounded.
    torch.testing.assert_close(found["out"].double(), exact["out"], rtol=0.0, atol=0.02)
    torch.testing.assert_close(found["lse"].double(), exact["lse"].double(), rtol=1e-7, atol=0.02)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scores_of_other_rows_change_no_bit(adapter: ModuleType, dtype: torch.dtype) -> None:
    case = Case("others", heads=1, q_len=130, k_len=200, head_dim=64, scale=128.0, grads=())
    inputs = make_inputs(case, dtype)
    small = inputs.query / 512
    large = small.clone()
    large[..., 100:, :] *= 2**22  # rows 96 to 111 belong to one warp
    found, want = (_forward(adapter, inputs.changed(query=query)) for query in (large, small))
    for name, x in found.items():
        assert torch.equal(x[:, :, :100], want[name][:, :, :100]), name
        assert not torch.equal(x[:, :, 100:], want[name][:, :, 100:]), name


# -- the case table, and what it does not have -----------------------------------------------------


def _cases() -> Iterator[Case]:
    """Cases that differ from another one in a single option are slow."""
    base = Case("base", batch=1, heads=1, q_len=140, k_len=250)
    every: dict[str, Any] = {"mask": "float_inf", "softcap": 4.0, "alibi": "bh", "dropout_p": 0.2}
    for n, (d, dv) in enumerate(((64, 64), (40, 40), (72, 96), (104, 104), (128, 128), (192, 128),
                                 (136, 192), (256, 256), (200, 24), (24, 200))):  # fmt: skip
        wide = replace(base, head_dim=d, value_dim=dv)
        yield replace(wide, name=f"width-{d}-{dv}-full", slow=n % 2 == 0 or n > 7)
        causal = replace(wide, name=f"width-{d}-{dv}-causal", causal="bottom_right")
        yield replace(causal, slow=n % 2 == 1 or n > 7)
        yield replace(
            wide, name=f"width-{d}-{dv}-options", k_len=130, slow=n not in (2, 5), **every
        )
    for group in (2, 3, 5, 8, 128, 130):
        grouped = replace(base, heads=2 * group, kv_heads=2, q_len=50, k_len=110, head_dim=64)
        if group > 8:
            grouped = replace(grouped, heads=group, kv_heads=1, q_len=2)
        for rule in ("upper_left", "bottom_right"):
            case = replace(grouped, name=f"group-{group}-{rule}", causal=rule)
            yield replace(case, slow=rule == "bottom_right" and group not in (3, 5))
            case = replace(case, name=f"{case.name}-options", mask_dims="hqk", **every)
            yield replace(case, slow=rule == "upper_left" or group > 8)
        bool_ = replace(grouped, name=f"group-{group}-bool", mask="bool_rows", mask_dims="bqk")
        yield replace(bool_, slow=group != 8)
    # Tiles of no, one, two, three ... steps, one after the other.
    steps = replace(base, name="tiles", heads=2, q_len=400, k_len=400, causal="upper_left")
    for d in (64, 128, 256):
        yield replace(steps, name=f"tiles-{d}", head_dim=d, slow=d > 64)
    steps = replace(base, q_len=600, head_dim=64)
    yield replace(steps, name="tiles-that-see-nothing", k_len=290, window=(3, 3))
    yield replace(steps, name="tiles-that-see-nothing-first", k_len=90, causal="bottom_right")
    for length in (1, 7, 64, 79, 80, 81, 95, 96, 97, 160, 161, 192, 193):
        few = replace(base, k_len=length, grads=("out", "lse"))
        yield replace(few, name=f"keys-{length}", q_len=129, head_dim=64)
        yield replace(few, name=f"keys-{length}-wide", q_len=5, head_dim=128)
    # NaN in what no query sees, in a step with keys that one sees: after these, and before.
    for d in (64, 128, 192):
        hidden = replace(base, head_dim=d, poison=True)
        yield replace(hidden, name=f"nan-after-{d}", q_len=100, causal="upper_left")
        before = replace(hidden, name=f"nan-before-{d}", q_len=20, window=(30, 0))
        yield replace(before, causal="bottom_right")
        hidden = replace(hidden, slow=d > 64)
        yield replace(hidden, name=f"nan-masked-{d}", mask="padding", mask_dims="bk")
        yield replace(hidden, name=f"nan-rows-{d}", mask="tril", q_len=100, dropout_p=0.5)
    # A sink belongs to the head, which in a group is the row's.
    with_sinks = replace(base, heads=6, kv_heads=2, q_len=60, k_len=9, head_dim=64, sinks="bh")
    yield replace(with_sinks, name="sinks", causal="bottom_right", grads=("out", "lse"))
    yield replace(with_sinks, name="sinks-options", mask_dims="hqk", k_len=110, **every)
    # So is a table of relative biases.
    with_table = replace(with_sinks, sinks=None, relative_bias="bh", weights=1)
    yield replace(with_table, name="relative", causal="bottom_right", q_len=90, k_len=130)
    yield replace(with_table, name="relative-options", mask_dims="hqk", k_len=110, **every)
    # A delta that is recomputed.
    for d, dv in ((64, 64), (72, 128), (136, 40), (200, 200)):
        delta = replace(base, head_dim=d, value_dim=dv, weights=1, grads=("out", "lse", "weights"))
        yield replace(delta, name=f"delta-{d}-{dv}", mask="float_inf", mask_grad=True, slow=d == 72)
    for layout in ("blhd", "packed", "expanded_batch", "expanded_heads", "expanded_rows",
                   "transposed", "unaligned"):  # fmt: skip
        laid = replace(base, batch=2, layouts=(layout,) * 3, head_dim=64, q_len=40, k_len=70)
        laid = replace(laid, grads=("out", "lse"))
        yield replace(laid, name=f"layout-{layout}", heads=2)
        yield replace(laid, name=f"layout-{layout}-group", heads=4, kv_heads=2, slow=True)


OWN = tuple(_cases())
CASES = [
    c
    for c in (*OWN, *TABLE)
    if max(c.head_dim, c.value_dim or 0) <= 256 and c.program is None and not any(c.first)
]
WORK = [
    pytest.param(case, DTYPES[n % 2], n, id=f"{case.name}-{_name(DTYPES[n % 2])}")
    for n, case in enumerate(CASES)
    if not case.slow and (case in OWN or (n % 16 == 5 and max(case.q_len, case.k_len) < 1000))
]


# A value of a field may also be met by a case that these kernels leave to the others.
@pytest.mark.sampled(1, keep=("layout-expanded_heads",))
@pytest.mark.parametrize(("case", "dtype", "seed"), WORK)
def test_case(adapter: ModuleType, case: Case, dtype: torch.dtype, seed: int) -> None:
    assert _faults(adapter, case, dtype, seed) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=_name)
@pytest.mark.parametrize("part", range(10))
def test_every_case(adapter: ModuleType, part: int, dtype: torch.dtype) -> None:
    """Copies arrive as late as allowed, or in random order; neighbours and dtypes take turns."""
    faults = [
        f"{case.name} {dtype} {seed}: {fault}"
        for n, case in enumerate(CASES[part::10])
        for seed in [(n + DTYPES.index(dtype)) % 2 * (n + 1)]
        for fault in _faults(adapter, case, dtype, seed)
    ]
    assert not faults, "\n".join(faults)


def test_mask_programs_run_on_the_other_kernels(adapter: ModuleType) -> None:
    inputs = make_inputs(Case("program", program="causal", head_dim=64), DTYPES[0])
    inputs.results(adapter)
    launches = _launches(adapter)
    assert {"attention_mask", "attention_forward", "attention_backward_q"} <= launches
    assert not launches & {FORWARD, *BACKWARD}


# -- packed sequences ------------------------------------------------------------------------------


def _packed() -> Iterator[VarlenCase]:
    """Packed sequences with empty ones, tails and every option."""
    lengths = (40, 1, 200, 0, 7, 30), (40, 9, 200, 3, 0, 90)
    base = VarlenCase("causal-64", *lengths, head_dim=64, window=(-1, 0))
    yield base
    yield replace(base, name="causal-64-bottom-right", bottom_right=True, kv_heads=1, heads=3)
    yield replace(base, name="window-128", head_dim=128, window=(50, 9), after=(5, 9), slow=True)
    yield replace(base, name="options-72", head_dim=72, softcap=4.0, alibi="bh", dropout_p=0.2,
                  heads=4, kv_heads=2, window=(-1, -1), slow=True)  # fmt: skip
    yield replace(
        base, name="full-192-128", head_dim=192, value_dim=128, window=(-1, -1), slow=True
    )
    yield replace(base, name="sinks-64", sinks=True, after=(20, 2), kv_heads=1, heads=3)
    yield replace(base, name="causal-256", head_dim=256, after=(90, 2), heads=1, slow=True)


PACKED = tuple(_packed())
SERVED = [c for c in VARLEN_CASES if c.program is None]
LONG = [c for c in SERVED if sum(c.q_lengths) > 220 or sum(c.k_lengths or ()) > 1000]
SHORT = [c for n, c in enumerate(SERVED) if n % 6 == 1 and c not in LONG]


def _packed_faults(
    adapter: ModuleType, case: VarlenCase, dtype: torch.dtype, seed: int
) -> list[str]:
    """The faults of a case of packed sequences; only Hopper's kernels may run."""
    _launches(adapter)
    target: Any = Emulated(adapter, seed)
    verdict = check_varlen(case, dtype, target)
    assert not verdict.declined, verdict.declined
    args: Any = make_varlen(case, dtype).args[:3]
    query, key, value = (x[None].transpose(1, 2) for x in args)
    made = make_inputs(Case("any"), dtype).changed(query=query, key=key, value=value)
    took, takes = FORWARD in _launches(adapter), _is_for_hopper(made)
    return [*verdict.faults, *([] if took == takes else [f"the kernel for Hopper ran: {took}"])]


@pytest.mark.complete
@pytest.mark.parametrize(
    ("case", "dtype", "seed"),
    [
        pytest.param(case, DTYPES[n % 2], n, id=f"{case.name}-{_name(DTYPES[n % 2])}")
        for n, case in enumerate((*(case for case in PACKED if not case.slow), *SHORT))
    ],
)
def test_packed_sequences(
    adapter: ModuleType, case: VarlenCase, dtype: torch.dtype, seed: int
) -> None:
    assert _packed_faults(adapter, case, dtype, seed) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=_name)
def test_every_case_of_packed_sequences(adapter: ModuleType, dtype: torch.dtype) -> None:
    faults = [
        f"{case.name}: {fault}"
        for n, case in enumerate((*PACKED, *SERVED))
        for fault in _packed_faults(adapter, case, dtype, (n + DTYPES.index(dtype)) % 2 * n)
    ]
    assert not faults, "\n".join(faults)


# -- edges -----------------------------------------------------------------------------------------


def _edges() -> Iterator[Case]:
    """Cases that once were the only ones to find a bug put into these kernels."""
    edge = Case("edge", heads=2, q_len=50, k_len=290, head_dim=64, poison=True)
    # One key beyond a step, or one short of it, is hidden.
    yield replace(edge, name="edge-95", causal="upper_left", q_len=95)
    yield replace(edge, name="edge-97", causal="upper_left", q_len=97)
    long = replace(edge, q_len=290)
    yield replace(long, name="edge-left", window=(60, 20))
    yield replace(long, name="edge-wide", window=(150, -1))
    yield replace(long, name="edge-128", window=(70, 30), head_dim=128)
    yield replace(long, name="edge-right-1", window=(100, 62), head_dim=128, scale=0.3)
    yield replace(long, name="edge-dropout", window=(60, 20), dropout_p=0.3)
    # A warp that is late with its part of the clearing is rare, and so is a lane.
    for n in range(12):
        grads = ("out",) if n < 4 else ()
        yield replace(edge, name=f"masked-{n}", mask="padding", mask_dims="bk", grads=grads)
    for n in range(10):
        yield replace(edge, name=f"queries-{n}", q_len=150, mask="bool_rows", poison_queries=True)
    # Gradients of more than the output, fully masked rows that hold NaN, large scores.
    yield replace(edge, name="lse", q_len=150, grads=("out", "lse"))
    yield replace(
        edge, name="mask", q_len=150, mask="float_inf", mask_grad=True, grads=("out", "lse")
    )
    yield replace(edge, name="weights", softcap=2.0, weights=2, grads=("out", "lse", "weights"))
    yield replace(long, name="queries", k_len=100, causal="bottom_right", poison_queries=True)
    yield replace(edge, name="steep", scale=1e4)
    yield replace(edge, name="steeper", scale=3e6)
    yield replace(edge, name="steepest", scale=1e12, grads=())
    # Of few keys outputs are large, and so is delta beside the products that it is subtracted from.
    yield replace(
        edge, name="few-keys", q_len=150, k_len=3, mask="float", mask_grad=True, weights=1
    )


EDGES = tuple(_edges())


@pytest.mark.parametrize(
    ("case", "dtype", "seed"),
    [
        pytest.param(case, DTYPES[n % 2], n, id=f"{case.name}-{_name(DTYPES[n % 2])}")
        for n, case in enumerate(EDGES)
    ],
)
def test_edges(adapter: ModuleType, case: Case, dtype: torch.dtype, seed: int) -> None:
    assert _faults(adapter, case, dtype, seed) == []


# -- the same bits ---------------------------------------------------------------------------------

PLAIN = Case("bits", heads=4, kv_heads=2, q_len=150, k_len=330, head_dim=128, causal="bottom_right")
OPTIONS = replace(PLAIN, mask="float_inf", k_len=170, head_dim=64, dropout_p=0.1)


@pytest.mark.complete
@pytest.mark.parametrize("case", [PLAIN, OPTIONS], ids=["plain", "options"])
def test_same_bits_in_whatever_order_warps_run(adapter: ModuleType, case: Case) -> None:
    inputs = make_inputs(case, torch.bfloat16)
    first, *others = (_both(adapter, inputs, seed) for seed in (0, 1, 2))
    for other in others:
        for name, found in first.items():
            assert torch.equal(found, other[name]), name


@pytest.mark.complete
@pytest.mark.parametrize("case", [PLAIN, replace(OPTIONS, dropout_p=0.0)], ids=["plain", "options"])
def test_same_bits_whatever_else_is_in_the_batch(adapter: ModuleType, case: Case) -> None:
    """Except for dropout, which counts the batch entries."""
    inputs = make_inputs(replace(case, batch=3), torch.float16)
    together = _both(adapter, inputs, 3)
    one = slice(2, 3)
    alone = inputs.changed(
        **{name: x[one] for name, x in inputs.watched().items() if x is not None}
    )
    for name, found in _both(adapter, alone, 4).items():
        assert torch.equal(found, together[name][one]), name


# Mask programs take the general kernels: tests/cuda/test_cuda_sequences.py.
OWN_WAYS = {name: case for name, case in WAYS.items() if case.program is None}


@pytest.mark.parametrize("case", OWN_WAYS.values(), ids=OWN_WAYS)
def test_packed_sequences_have_the_bits_of_each_alone(
    adapter: ModuleType, case: VarlenCase
) -> None:
    inputs = make_varlen(replace(case, head_dim=64), torch.bfloat16)

    def alone(single: Operands) -> dict[str, Tensor]:
        out, lse, _ = adapter.scaled_dot_product_attention(*single.args, options=single.options)
        return {"out": out, "lse": lse}

    out, lse = adapter.varlen_attention(*inputs.args, options=inputs.options)
    assert FORWARD in _launches(adapter)
    want = inputs.by_sequence(alone)
    assert FORWARD in _launches(adapter)
    assert torch.equal(out, want["out"].to(out.dtype))
    assert torch.equal(lse, want["lse"])


def test_heads_go_in_sections_that_fit_the_cache(adapter: ModuleType) -> None:
    """Long keys give the bits of their last ones alone, the only keys inside the window."""
    short = Case("sections", batch=1, heads=5, q_len=150, k_len=960, head_dim=64, window=(300, 0))
    inputs = make_inputs(replace(short, causal="bottom_right"), torch.bfloat16)
    want = _forward(adapter, inputs)
    rows = 40 * 960  # of K and V: 10 MB a head, of which three heads fit in 32 MB
    key, value = (
        torch.cat([x.new_zeros(1, 5, rows - 960, 64), x], 2) for x in (inputs.key, inputs.value)
    )
    options = replace(inputs.options, offset=rows - 150)
    found = _forward(adapter, inputs.changed(key=key, value=value, options=options))
    for name, x in found.items():
        assert torch.equal(x, want[name]), name


# -- NaN, and memory -------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("options", [{}, {"alibi": "h"}], ids=["plain", "options"])
def test_nan_reaches_only_the_tile_of_queries_that_see_it(
    adapter: ModuleType, group: int, options: dict[str, Any]
) -> None:
    """A tile has 128 rows, which heads that share keys divide among them."""
    case = Case("nan", heads=2 * group, kv_heads=2, q_len=190, k_len=190, head_dim=64,
                causal="upper_left", **options)  # fmt: skip
    inputs = make_inputs(case, torch.bfloat16)
    clean = _forward(adapter, inputs)
    inputs.key[:, :, 150] = torch.nan
    found = _forward(adapter, inputs)
    assert found["out"][:, :, 150:].isnan().all()
    for name in ("out", "lse"):
        assert torch.equal(found[name][:, :, :150], clean[name][:, :, :150]), name
    inputs = make_inputs(case, torch.bfloat16)
    inputs.value[:, :, 150] = torch.nan
    found = _forward(adapter, inputs)
    assert torch.equal(found["lse"], clean["lse"])
    assert found["out"][:, :, 150:].isnan().all()
    assert torch.equal(found["out"][:, :, :128], clean["out"][:, :, :128])


NAN_QUERY = {"plain": Case("nan-query", head_dim=64), "options": Case("nan-query", alibi="h")}


def nan_query_faults(adapter: ModuleType, name: str) -> list[str]:
    """A query that holds NaN, and what comes back to it, reach no other query, nor the tile of keys
    that it does not see, though it passes with queries that do."""
    case = replace(NAN_QUERY[name], heads=4, kv_heads=2, q_len=190, k_len=190, causal="upper_left",
                   head_dim=64 if name == "plain" else 128, grads=("out", "lse"))  # fmt: skip
    inputs = make_inputs(case, torch.bfloat16)
    clean = _both(adapter, inputs, 0)
    assert inputs.grad_out is not None
    inputs.query[:, :, 100] = inputs.grad_out[:, :, 100] = torch.nan
    found = _both(adapter, inputs, 0)
    others = torch.arange(190) != 100
    same = {"grad_query": others, "grad_key": slice(128, None), "grad_value": slice(128, None)}
    return [
        f"NaN in {name}"
        for name, rows in same.items()
        if not torch.equal(found[name][:, :, rows], clean[name][:, :, rows])
    ]


@pytest.mark.parametrize("name", NAN_QUERY)
def test_nan_in_a_query_reaches_only_the_tile_of_keys_that_it_sees(
    adapter: ModuleType, name: str
) -> None:
    assert nan_query_faults(adapter, name) == []


def test_nan_stays_in_its_sequence(adapter: ModuleType) -> None:
    for window in ((-1, -1), (-1, 0)):
        case = replace(WAYS["causal"], head_dim=64, window=window)
        nan_stays_in_its_sequence(adapter, case, torch.float16)
        assert {FORWARD, *BACKWARD} <= _launches(adapter)


# Every tensor ends where a page begins that may not be read, so this runs in a process of its own.
_FENCED = """
from test_cuda_hopper import CASES, FORWARD, OWN, PACKED
import emulator
from fastattn.testing import make_inputs
from fastattn.testing.packed import make_varlen
adapter = emulator.load()
adapter._cuda.allow_hopper(True)
every = int(sys.argv[1])
for n, case in enumerate([c for c in CASES if not c.slow][::every]):
    print(case.name, flush=True)
    make_inputs(case, torch.bfloat16).results(adapter)
for n, case in enumerate([c for c in PACKED if not c.slow or every == 1]):
    print(case.name, flush=True)
    make_varlen(case, torch.float16).results(adapter)
# Numbers that no caller should give.
for wrong in ([0, 20, 5, 10**12, -3, 70, 9], [90, 0, 0, 0, 0, 0, 0], [-(10**15)] * 7):
    print("starts", wrong, flush=True)
    inputs = make_varlen(PACKED[0], torch.bfloat16)
    for at in (3, 4):
        args = list(inputs.args)
        args[at] = torch.tensor(wrong)
        adapter.varlen_attention(*args, options=inputs.options)
assert adapter._cuda.take_launches()[FORWARD] > 5
"""


@pytest.mark.complete
@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
@pytest.mark.parametrize("every", [47, pytest.param(1, marks=pytest.mark.slow)])
def test_reads_nothing_past_the_end(adapter: ModuleType, every: int) -> None:
    run_fenced(_FENCED, every)


@pytest.mark.skipif(sys.platform != "linux", reason="needs MAP_NORESERVE")
def test_places_beyond_two_to_the_31_elements(adapter: ModuleType) -> None:
    case = Case("far", heads=4, kv_heads=2, q_len=40, k_len=90, head_dim=64)
    inputs = make_inputs(case, torch.bfloat16)
    want = _forward(adapter, inputs)
    tensors = {
        "heads": [_far(x, (FAR, 2 * FAR, 64, 1)) for x in (inputs.query, inputs.key, inputs.value)],
        "rows": [_far(x, (64, 128, FAR // 8, 1)) for x in (inputs.query, inputs.key, inputs.value)],
    }
    for query, key, value in tensors.values():
        found = _forward(adapter, inputs.changed(query=query, key=key, value=value))
        for name, x in found.items():
            assert torch.equal(x, want[name]), name


# -- what the kernels are not for ------------------------------------------------------------------


def test_other_kernels_run_unless_hoppers_are_allowed(adapter: ModuleType) -> None:
    inputs = make_inputs(Case("off", head_dim=64), torch.bfloat16)
    args = inputs.args
    adapter._cuda.allow_hopper(False)
    adapter.scaled_dot_product_attention(*args, options=inputs.options)
    assert _launches(adapter) == {"attention_forward"}
    adapter._cuda.allow_hopper(True)
    adapter.scaled_dot_product_attention(*args, options=inputs.options)
    assert _launches(adapter) == {FORWARD}


def test_float32_runs_on_the_other_kernels(adapter: ModuleType) -> None:
    inputs = make_inputs(Case("float32", head_dim=64), torch.float32)
    adapter.scaled_dot_product_attention(*inputs.args, options=inputs.options)
    assert FORWARD not in _launches(adapter)
