"""The CUDA kernels of the operators beside attention, under the emulator, against the oracle.

By default some cases of an operator's table run, in one of their dtypes each; when slow all of them
do, in all dtypes. As in test_cuda.py each runs with random stalls of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from attention_cases import PROOFS
from emulated import Emulated
from fenced import EMULATED, run_cases
from torch import Tensor

import fastattn
from fastattn.testing import Proof
from fastattn.testing.around_attention import SinusoidalCase
from fastattn.testing.decode import DecodeCase

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Table:
    """The cases of an operator, and which of them are for the slow run."""

    operator: str
    long: Callable[[Any], bool]
    every: int  # one of so many is not
    fits: Callable[[Any], bool] = lambda case: True  # what the kernels can run
    more: Sequence[Any] = ()

    @property
    def check(self) -> Proof:
        return PROOFS[self.operator]

    @property
    def cases(self) -> list[Any]:
        return [*filter(self.fits, self.check.cases), *self.more]


TABLES = {
    "sinusoidal": Table(
        "sinusoidal_encoding",
        lambda case: torch.Size(case.shape).numel() > 10_000,
        every=4,
        # Enough that a thread takes several batch rows, whose heads are not adjacent in memory.
        more=[SinusoidalCase("many-rows", shape=(2, 3, 520, 257), memory="blhd")],
    ),
    "additive": Table(
        "additive_attention",
        lambda case: case.batch * case.q_len * case.k_len * case.head_dim > 40_000,
        every=2,
    ),
    "encode_memory": Table("encode_memory", lambda case: False, every=2),
    "hopfield": Table(
        "hopfield_retrieve",
        # Including the one memory that does not fit in shared memory.
        lambda case: (
            case.k_len < 1000 and case.steps * case.q_len * case.k_len * case.head_dim > 2e4
        ),
        every=1,
    ),
    "memory_hops": Table(
        "memory_hop_attention",
        lambda case: case.batch * case.hops * case.rows * case.width > 50_000,
        every=1,
    ),
    "merge_states": Table(
        "merge_states",
        lambda case: torch.Size(case.shape).numel() > 60_000,
        every=1,
        fits=lambda case: torch.float32 in case.dtypes,
    ),
    "decode": Table(
        "decode_attention",
        lambda case: case.capacity * len(case.lengths) * case.queries * case.heads > 4_000,
        every=4,
        fits=lambda case: (
            max(case.head_dim, case.value_dim or 0) <= 256 and not (case.quantised or case.leftpad)
        ),
        # Several splits, warps that share the keys of a tile, and options of each head of a group.
        more=[
            DecodeCase(
                "splits",
                (300, 64, 0),
                320,
                heads=4,
                kv_heads=2,
                page=16,
                queries=2,
                window=(-1, 0),
                sinks=True,
                alibi="bh",
                program="many",
            ),
        ],
    ),
    "append": Table(
        "append_to_cache",
        lambda case: case.rows > 20,
        every=1,
        fits=lambda case: not (case.rotary or case.quantised),
    ),
    "varlen": Table(
        "varlen_attention",
        lambda case: sum(case.q_lengths) > 220 or sum(case.k_lengths or ()) > 1000,
        every=4,
        fits=lambda case: case.terms is None,
    ),
}
WORK = [
    pytest.param(
        table,
        case,
        DTYPES[n % 3],
        n,
        id=f"{name}-{case.name}-{str(DTYPES[n % 3])[6:]}",
    )
    for name, table in TABLES.items()
    for n, case in enumerate(table.cases)
    if n % table.every == 0 and not table.long(case)
]


# Encodings that the kernel writes in whole vectors, of pairs and of single columns.
@pytest.mark.sampled(1, keep=("interleaved-16", "split_exponent-16"))
@pytest.mark.parametrize(("table", "case", "dtype", "seed"), WORK)
def test_case(adapter: ModuleType, table: Table, case: Any, dtype: torch.dtype, seed: int) -> None:
    verdict = table.check(case, dtype, Emulated(adapter, seed))
    assert not verdict.declined, verdict.declined
    assert verdict.ok, "\n".join(verdict.faults)


@pytest.mark.parametrize(
    ("table", "case"),
    [pytest.param(table, case, id=case.name) for table in TABLES.values() for case in table.more],
)
def test_more_cases(adapter: ModuleType, table: Table, case: Any) -> None:
    assert not table.check(case, torch.float32, Emulated(adapter)).faults


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", TABLES)
def test_every_case(adapter: ModuleType, name: str, dtype: torch.dtype) -> None:
    table = TABLES[name]
    faults = [
        f"{case.name} {seed}: {fault}"
        for n, case in enumerate(table.cases)
        for seed in [(n + DTYPES.index(dtype)) % 2 * (n + 1)]
        for fault in table.check(case, dtype, Emulated(adapter, seed)).faults
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("name", TABLES)
def test_same_bits_in_whatever_order_warps_run(adapter: ModuleType, name: str) -> None:
    table = TABLES[name]
    cases = [case for case in table.cases if not table.long(case)]
    made = [table.check.make(case, torch.bfloat16) for case in cases]
    largest = max(made, key=lambda x: sum(y.numel() for y in x.watched().values() if y is not None))
    first: dict[str, Tensor] = {}
    for seed in (0, 1, 2):
        target: Any = Emulated(adapter, seed)
        with target.active() as backend:
            found = target.results(backend, largest)
        first = first or found
        torch.testing.assert_close(found, first, rtol=0, atol=0, equal_nan=True)


@pytest.mark.complete
@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
@pytest.mark.parametrize("every", [79, pytest.param(2, marks=pytest.mark.slow)])
def test_nothing_past_the_end_is_read(adapter: ModuleType, every: int) -> None:
    operators = (*(table.operator for table in TABLES.values()), "scaled_dot_product_attention")
    run_cases(EMULATED, "quick", dict.fromkeys(operators, every))


@pytest.mark.parametrize("name", TABLES)
def test_float64_is_declined_with_a_reason(adapter: ModuleType, name: str) -> None:
    target: Any = Emulated(adapter)
    verdict = TABLES[name].check(TABLES[name].cases[0], torch.float64, target)
    assert "the dtype torch.float64 is not one of float32" in "; ".join(verdict.declined)


def test_a_memory_that_is_too_wide_is_declined_with_a_reason(adapter: ModuleType) -> None:
    u, m = torch.ones(1, 3000), torch.ones(1, 2, 3000)
    reason = "a memory has 3000 columns; the kernels take up to 2048"
    with (
        Emulated(adapter).active(),
        fastattn.use_backend("cuda"),
        pytest.raises(RuntimeError, match=reason),
    ):
        fastattn.memory_hop_attention(u, m, m, hops=1)


@pytest.mark.parametrize("rows", [40, 600])  # in one block of threads, and in several
def test_large_scores_do_not_overflow_the_exponential(adapter: ModuleType, rows: int) -> None:
    draw = torch.Generator().manual_seed(3)
    u, m = torch.randn(3, 8, generator=draw), torch.randn(3, rows, 8, generator=draw)
    with Emulated(adapter).active(), fastattn.use_backend("cuda"):
        got = fastattn.memory_hop_attention(u, m, m, hops=1, scale=100.0)
    with fastattn.use_backend("reference"):
        want = fastattn.memory_hop_attention(u, m, m, hops=1, scale=100.0)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("excluded_by", ["mask", "bias"])
def test_nan_in_a_hidden_pattern_reaches_nothing(adapter: ModuleType, excluded_by: str) -> None:
    draw = torch.Generator().manual_seed(1)
    state, stored = (torch.randn(2, 1, n, 8, generator=draw).requires_grad_() for n in (3, 7))
    mask = torch.rand(2, 1, 3, 7, generator=draw) < 0.6
    mask[..., 0], mask[..., 1], mask[0, 0, 0] = True, False, False
    given = (
        mask if excluded_by == "mask" else torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    )
    results = []
    for what in (0.0, torch.nan, torch.inf):
        patterns = stored.detach().clone()
        patterns[:, :, 1] = what
        patterns.requires_grad_()
        with Emulated(adapter, 5).active(), fastattn.use_backend("cuda"):
            out = fastattn.hopfield_retrieve(state, patterns, attn_mask=given, update_steps_max=3)
            grads = torch.autograd.grad(out.sin().sum(), (state, patterns))
        results.append((out.detach(), *grads))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    assert not results[0][0][0, 0, 0].any()


def test_an_unlimited_search_converges(adapter: ModuleType) -> None:
    state, stored = torch.eye(4)[:3], 3 * torch.eye(4)
    with Emulated(adapter).active(), fastattn.use_backend("cuda"):
        got = fastattn.hopfield_retrieve(state, stored, beta=2.0)
    with fastattn.use_backend("reference"):
        want = fastattn.hopfield_retrieve(state, stored, beta=2.0)
    torch.testing.assert_close(got, want)
