"""The kernels give the same bits for any number of threads and any other batch entries.

Attention itself is in ``test_numerics.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import PROOFS

from fastattn.testing import Case, Target, targets
from fastattn.testing.around_attention import MergeCase, SinusoidalCase
from fastattn.testing.decode import DecodeCase
from fastattn.testing.memories import EncodeCase, HopCase, HopfieldCase
from fastattn.testing.packed import VarlenCase, make_varlen
from fastattn.testing.recurrent import AdditiveCase, LuongCase

_ENDS = (1500, 40, 513)
# Of every schedule. No tensor that all of a batch share has as many entries.
CASES: dict[str, list[Any]] = {
    "scaled_dot_product_attention": [
        Case("relative", batch=3, q_len=700, k_len=700, relative_bias="h", grads=("out", "lse")),
    ],
    "additive_attention": [
        AdditiveCase("step", batch=5, q_len=1, k_len=90, mask="padding", mask_dims="bk"),
        AdditiveCase("mixed", batch=4, q_len=70, k_len=90, spreads=(7.0, 7.0)),
        AdditiveCase("mask", batch=3, q_len=150, k_len=100, mask="float", mask_dims="k"),
    ],
    "decode_attention": [
        DecodeCase("decode", _ENDS, 1500, heads=8),
        DecodeCase("paged", _ENDS, 1500, heads=8, page=16),
        DecodeCase("panels", (300, 40, 129), 300, queries=40, window=(-1, 0)),
        DecodeCase("gathered", (300, 40, 129), 300, queries=40, page=32),
    ],
    "encode_memory": [
        EncodeCase("one-table", (40, 20, 9, 60, 50, None)),
        EncodeCase("tables", (16, 20, 9, 60, 50, 4)),
        EncodeCase("wide", (8, 20, 9, 60, 300, 2)),
    ],
    "hopfield_retrieve": [
        HopfieldCase("groups", batch=20, q_len=1, k_len=50, head_dim=20),
        HopfieldCase("panels", q_len=70, k_len=300, head_dim=33, mask="float"),
    ],
    "luong_attention": [LuongCase("windows", batch=6, q_len=90, k_len=300, head_dim=64)],
    "memory_hop_attention": [
        HopCase("rows", batch=40, rows=50, width=20, hops=3, out_memory=None, hop_proj=""),
        HopCase("masked", batch=4, rows=90, width=21, mask="BN", weights=True),
        HopCase("masked-queries", 4, 3, 90, 21, mask="BN", weights=True),
        HopCase("panels", 2, 70, 700, 33, mask="BQN", bias="BQKN", weights=True),
        HopCase("stack", 20, 9, 130, 48, in_memory="BSN", out_memory=None),
    ],
    "merge_states": [MergeCase("empty", (3, 7, 150, 40), empty=("a", "b", "both"), poison=True)],
    "sinusoidal_encoding": [
        SinusoidalCase("rows", shape=(6, 1, 700, 300)),
        SinusoidalCase("positions", shape=(64, 1, 2, 512), positions="bl"),
        SinusoidalCase("wide", shape=(5, 1, 40, 9000), offset=3),
    ],
}
# The dropout of a row depends on its place in the batch, one entry has all threads, a memory for
# all is read by the queries together, and packed sequences are no batch.
THREADS: dict[str, list[Any]] = {
    "additive_attention": [
        AdditiveCase("dropout", q_len=300, k_len=70, causal="upper_left", dropout_p=0.2),
    ],
    "hopfield_retrieve": [
        HopfieldCase("one", batch=90, heads=1, q_len=1, k_len=1100, head_dim=24, shared=True),
        HopfieldCase("chunks", batch=1, heads=1, q_len=2, k_len=2500, head_dim=40, mask="bool"),
    ],
    "memory_hop_attention": [
        HopCase("one", batch=90, rows=1100, width=24, in_memory="1N", out_memory="1N"),
        HopCase("chunks", 1, None, 2500, 40, 2, "BSN", None, mask="BN", weights=True),
    ],
    "varlen_attention": [
        VarlenCase("causal", (40, 1, 300, 7), (40, 9, 300, 80), window=(-1, 0), heads=3),
        VarlenCase("decode", (1, 2, 1, 1), (1500, 600, 30, 0), heads=8, kv_heads=2),
        VarlenCase("split", (700, 5), (1300, 40), heads=1, bottom_right=True, alibi="bh"),
        VarlenCase("window", (90, 200), (200, 90), window=(30, 9), softcap=4.0),
        VarlenCase("dropout", (90, 130), dropout_p=0.2, kv_heads=1),
        VarlenCase("relative", (40, 1, 300), (40, 9, 80), relative_bias=True, program="many"),
    ],
}


def named(*tables: dict[str, list[Any]]) -> list[Any]:
    """All cases of the tables, as parameters of a test."""
    return [
        pytest.param(op, case, id=f"{op}-{case.name}")
        for table in tables
        for op, cases in table.items()
        for case in cases
    ]


def inputs_of(op: str, case: Any, dtype: torch.dtype) -> Any:
    """The inputs of a case."""
    inputs = PROOFS[op].make(case, dtype)
    if op == "hopfield_retrieve":
        inputs.options["update_steps_eps"] = 0.3  # so that queries converge after different steps
    return inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("op", "case"), named(CASES, THREADS))
def test_any_number_of_threads(
    target: Target, op: str, case: Any, dtype: torch.dtype, same_for_any_threads: Any
) -> None:
    inputs = inputs_of(op, case, dtype)
    same_for_any_threads(lambda: target.results(target.module, inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("op", "case"), named(CASES))
def test_any_batch(target: Target, op: str, case: Any, dtype: torch.dtype) -> None:
    inputs = inputs_of(op, case, dtype)
    whole = target.results(target.module, inputs)
    batch = len(whole["out"])
    given = {n: x for n, x in inputs.watched().items() if x is not None and x.shape[:1] == (batch,)}
    for b in range(0, batch, -(-batch // 7)):
        one = inputs.changed(**{name: x[b : b + 1] for name, x in given.items()})
        for name, x in target.results(target.module, one).items():
            if len(whole[name]) == batch:
                assert torch.equal(x[0], whole[name][b]), (name, b)


# Every target with each dtype that it has kernels for.
PACKED = [
    (target, dtype)
    for target in targets(emulated=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    if target.has_own_kernel("varlen_attention", dtype)
]


@pytest.mark.parametrize(("target", "dtype"), PACKED, ids=str, indirect=["target"])
@pytest.mark.parametrize("case", THREADS["varlen_attention"], ids=lambda case: case.name)
def test_a_packed_sequence_alone(target: Target, case: VarlenCase, dtype: torch.dtype) -> None:
    inputs = make_varlen(replace(case, head_dim=40), dtype)
    expected = inputs.by_sequence(lambda alone: alone.results(target.module))
    found = inputs.results(target.module)
    for name, want in expected.items():
        assert torch.equal(found[name], want.to(found[name].dtype)), name
