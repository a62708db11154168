"""The case tables of all operators on Triton, interpreted on the CPU where there is no GPU.

By default some cases of each table run, in one dtype each; when slow all that the interpreter can
run in minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from attention_cases import PROOFS

from fastattn.testing import Proof, Target

pytestmark = pytest.mark.usefixtures("triton_interpreter")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ATTENTION, ADDITIVE = "scaled_dot_product_attention", "additive_attention"
OPERATORS = [name for name in PROOFS if name != "luong_attention"]  # its windows have no kernel
TILE = 32  # of the interpreter's launches


def _tiles(case: Any) -> int:
    """Tiles of pairs; the interpreter takes some 15 ms for each, forward and backward."""
    return case.batch * -(-case.q_len // TILE) * -(-case.k_len // TILE)


# The cases that Triton's kernels can run, where these are not all. `varlen_attention` has a slow
# one, which the interpreter cannot.
FITS: dict[str, Callable[[Any], bool]] = {
    ATTENTION: lambda case: (
        max(case.head_dim, case.value_dim or 0) <= 512
        and not any(case.first)
        and case.terms is None
        and case.image is None
    ),
    ADDITIVE: lambda case: case.value_dim <= 512,
    "append_to_cache": lambda case: not (case.rotary or case.quantised),
    "decode_attention": lambda case: (
        max(case.head_dim, case.value_dim or 0) <= 512 and not (case.quantised or case.leftpad)
    ),
    "varlen_attention": lambda case: not case.slow and case.terms is None,
}
TABLES = {
    name: [
        case
        for case in PROOFS[name].cases
        if set(DTYPES) & set(case.dtypes) and (name not in FITS or FITS[name](case))
    ]
    for name in OPERATORS
}

# What runs by default, where it is not the whole table.
FEW: dict[str, Callable[[list[Any]], Sequence[Any]]] = {
    ATTENTION: lambda cases: [
        case
        for case in cases
        if not case.slow and _tiles(case) * case.heads <= 24
        if case.relative_bias is None and case.program is None  # these are in OF_ATTENTION
    ][::13],
    "encode_memory": lambda cases: cases[::6],
    "hopfield_retrieve": lambda cases: [
        case for case in cases if case.k_len * case.q_len < 300 and case.batch < 5
    ],
    "memory_hop_attention": lambda cases: [
        case for case in cases if case.rows * case.batch * (case.queries or 1) < 1000
    ],
}
NAMED = {
    ADDITIVE: """plain mask-bool_rows mask-nothing poison-padding causal-mask dropout-mask
        mask-float32 no-key saturated""",
    "decode_attention": """plain paged entries page-7 paged-heads-40-2 head_dim-100-33
        paged-queries-5-causal paged-window softcap-alibi paged-alibi long paged-layout-transposed
        no-sequences relative paged-relative-everything relative-no-sequences program-causal
        paged-program-prefix program-not_prefix paged-program-documents program-many tree-3
        paged-tree-12 window many-chunks program-documents relative-gathered""",
    "varlen_attention": """plain window-bottom-right alibi-upper-left lengths-none
        lengths-all-empty after-causal dropout-0.5 head_dim-33-48 layout-transposed grads-lse
        relative-bottom-right relative-no-sequences program-documents causal-bottom-right
        program-prefix relative-cross""",
}


def _few(name: str) -> Sequence[Any]:
    """The cases of a table that run in every suite."""
    if name in NAMED:
        return [case for case in TABLES[name] if case.name in NAMED[name].split()]
    return FEW[name](TABLES[name]) if name in FEW else TABLES[name]


# Cases in order, with dtypes in turn.
WORK = [
    (name, case, DTYPES[n % 3])
    for name in OPERATORS
    for n, case in enumerate(_few(name))
    if DTYPES[n % 3] in case.dtypes
]
# Always included: combinations of options that no other case has.
OF_ATTENTION = {
    name: dtype
    for dtype, names in {
        torch.float16: """empty-heads mask-finfo-min relative-65x16
            program-documents_b-40x1 heads-4-2""",
        torch.float32: """gqa-mask-heads alibi-bh-window mask-padding-poison
            mask-nan-queries mask-float-one window-3-5-65x65-full window-sees-nothing
            layout-expanded_rows-causal-wide
            dropout-0.5-mask head_dim-512 relative-3x0 relative-any-decode program-sinks
            results-0-out-lse lengths-33x33-upper_left lengths-33x65-bottom_right
            results-0-out-lse-causal mask-bool-qk alibi-h-window softcap-0.5 dropout-0.5
            results-1-out-weights mask-float-bqk relative-softcap program-window program-causal
            program-documents_b program-function program-block_mask program-not_window
            program-chunks program-many program-sinks-nan-queries results-2-out-weights
            sinks-1x1 sinks-nan-queries sinks-40x1-causal""",
        torch.bfloat16: """mask-one_key-poison mask-float32-hq window-3--1-40x130-bottom_right
            relative-bh relative-grid-decode program-function-40x1""",
    }.items()
    for name in names.split()
}
WORK += [
    (ATTENTION, case, OF_ATTENTION[case.name])
    for case in TABLES[ATTENTION]
    if case.name in OF_ATTENTION
]

# The interpreter is slow, so `make test` has only these: each once was the only case to find a bug
# put into the kernels.
QUICK = {
    "scaled_dot_product_attention": """dropout-0.5 mask-finfo-min mask-float-bqk
        mask-padding-poison program-sinks-nan-queries relative-65x16 relative-grid-decode
        relative-softcap results-2-out-weights window-3-5-65x65-full""",
    "additive_attention": "dropout-mask",
    "append_to_cache": "plain mixed-32",
    "decode_attention": """long many-chunks page-7 program-causal program-many relative
        softcap-alibi""",
    "encode_memory": "3x4x5x11x8-position",
    "hopfield_retrieve": "bias",
    "memory_hop_attention": "shared linear plain relu sigmoid per-hop",
    "merge_states": "empty plain",
    "sinusoidal_encoding": "plain negative",
    "varlen_attention": "plain program-documents",
}


@pytest.mark.parametrize(
    ("proof", "case", "dtype"),
    [
        pytest.param(
            PROOFS[name],
            case,
            dtype,
            id=f"{name}-{case.name}-{str(dtype)[6:]}",
            marks=() if case.name in QUICK.get(name, "").split() else pytest.mark.complete,
        )
        for name, case, dtype in WORK
    ],
)
def test_case(proof: Proof, case: Any, dtype: torch.dtype) -> None:
    verdict = proof(case, dtype, Target("triton"))
    assert not verdict.declined, verdict.declined
    assert verdict.ok, "\n".join(verdict.faults)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("proof", "case"),
    [
        pytest.param(PROOFS[name], case, id=f"{name}-{case.name}")
        for name in OPERATORS
        if name != ATTENTION  # of which there are too many
        for case in TABLES[name]
    ],
)
def test_case_in_every_dtype(proof: Proof, case: Any) -> None:
    if proof.operator == ADDITIVE and _tiles(case) * case.head_dim > 4000:
        pytest.skip("takes the interpreter many minutes")
    for dtype in DTYPES:
        if dtype in case.dtypes:
            verdict = proof(case, dtype, Target("triton"))
            assert verdict.ok, f"{dtype}: {verdict.faults}"


def _dtype(n: int, case: Any) -> torch.dtype:
    """The dtypes take turns: neighbours in the table differ in one option, and each meets all."""
    known = [dtype for dtype in DTYPES if dtype in case.dtypes]
    return known[n % len(known)]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_every_case_of_attention(part: int) -> None:
    """In one dtype each; on a GPU in every dtype, even cases that take the interpreter minutes."""
    faults = [
        f"{case.name} {dtype}: {fault}"
        for n, case in list(enumerate(TABLES[ATTENTION]))[part::20]
        for dtype in [_dtype(n, case)]
        if _tiles(case) * case.heads <= 1000
        for fault in PROOFS[ATTENTION](case, dtype, Target("triton")).faults
    ]
    assert not faults, "\n".join(faults)


def test_every_named_case_is_there() -> None:
    assert {case.name for case in TABLES[ATTENTION]} >= set(OF_ATTENTION)
    for name, named in NAMED.items():
        assert {case.name for case in TABLES[name]} >= set(named.split())
