"""The case table of attention on every native backend and instruction set, against the oracle.

Each case runs forward and backward through the backend's primitive, in poisoned memory, and is
judged by the one error bound. The complete run takes every case in every dtype on the instruction
set in use, in one dtype on each of the others, a third of these on emulated vectors, and in
bfloat16 on emulated tiles, with one case in twenty-four in float32 and float16; the default run a
sample of these in which any two options, dtypes and instruction sets meet; the slow run takes all
of them everywhere.
"""

from __future__ import annotations

import pytest
import torch
from attention_cases import ATTENTION_CASES

from fastattn.testing import Case, Target, check, targets
from fastattn.testing.cases import LAYOUTS, place
from fastattn.testing.inputs import make_inputs

OP = "scaled_dot_product_attention"
TABLE = ATTENTION_CASES


def _param(case: Case, dtype: torch.dtype, target: Target) -> object:
    """A case on a target as a parameter of a test; large ones only run in the complete suite."""
    name = f"{case.name}-{str(dtype).removeprefix('torch.')}-{target}"
    fastest = target in CURRENT and dtype == torch.bfloat16
    takes_long = case.q_len * case.k_len > 2**20 and not fastest
    return pytest.param(case, dtype, target, id=name, marks=[pytest.mark.complete] * takes_long)


EMULATED = [target for target in targets(emulated=True) if target not in targets()]
CURRENT = [target for target in targets(emulated=True) if target.is_current()]
TILES = [target for target in EMULATED if target.isa == "amx_bf16_emulated"]
# The emulated tiles go through the table in the dtype of their instructions, unless real ones do.
OF_TILES = None if "amx_bf16" in [target.isa for target in targets()] else torch.bfloat16

# Targets innermost: the oracle's results are kept for as long as they are needed.
WORK = [
    _param(case, dtype, target)
    for n, case in enumerate(TABLE)
    for m, dtype in enumerate(case.dtypes)
    for k, target in enumerate([*targets(), *EMULATED])
    if not case.slow and target.has_own_kernel(OP, dtype)
    if target in CURRENT or (n + k) % len(case.dtypes) == m or target in TILES
    if target not in TILES or dtype is OF_TILES or n % 24 == 0
    if target not in EMULATED or target in TILES or n % 3 == 0
]


# Each is the only one that finds some mutant of the kernels.
NEEDED = (
    *("long-5x4099-heads-2-2", "sinks-nan-queries"),
    *("relative-grid-decode", "program-documents_b-1x700", "terms-both-every-long"),
)


@pytest.mark.sampled(keep=NEEDED)
@pytest.mark.parametrize(("case", "dtype", "target"), WORK)
def test_case(case: Case, dtype: torch.dtype, target: Target) -> None:
    verdict = check(case, dtype, target)
    assert not verdict.declined, verdict.declined
    assert verdict.ok, "\n".join(verdict.faults)


def test_pairs_of_keys_begin_at_an_even_key() -> None:
    """Products of bf16 take two keys at a time. Padding on the left may end between them."""
    case = next(case for case in TABLE if case.name == "mask-left_padding-poison")
    for target in targets(emulated=True):
        assert not check(case, torch.bfloat16, target).faults, target


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_every_case_everywhere(part: int) -> None:
    """Not a test each: collecting tens of thousands would slow every run down."""
    faults = [
        f"{case.name} {dtype} {target}: {fault}"
        for case in TABLE[part::20]
        for dtype in case.dtypes
        for target in targets(emulated=True)
        if target.has_own_kernel(OP, dtype)
        for fault in check(case, dtype, target).faults
    ]
    assert not faults, "\n".join(faults)


# -- the table's own tools ------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_placed_values_are_the_values_in_poisoned_memory(layout: str, dtype: torch.dtype) -> None:
    values = (torch.arange(2 * 3 * 5 * 7).view(2, 3, 5, 7) % 3 == 0).to(dtype)
    placed = place(values, layout)
    assert placed.shape == values.shape
    if not layout.startswith("expanded"):
        assert torch.equal(placed, values)
    memory = torch.tensor([], dtype=dtype).set_(placed.untyped_storage())  # type: ignore[call-overload]
    wrong = memory if dtype == torch.bool else memory.isnan()
    assert wrong[:2000].all()
    assert wrong[-2000:].all()
    assert (placed == placed).all()  # no poison is inside


def test_poison_is_exactly_in_keys_hidden_from_all_queries() -> None:
    (case,) = [case for case in TABLE if case.name == "mask-padding-upper_left"]
    inputs = make_inputs(case, torch.float32)
    poisoned = ~torch.isfinite(inputs.key).all(-1)  # [B, H, Lk]
    assert inputs.attn_mask is not None
    causal = torch.ones(case.q_len, case.k_len, dtype=torch.bool).tril()
    assert torch.equal(poisoned, ~(inputs.attn_mask & causal).any(2).expand_as(poisoned))
    assert poisoned.any()
    assert torch.equal(inputs.key[~poisoned], inputs.clean["key"][~poisoned])
    assert torch.isfinite(inputs.clean["key"]).all()
