"""The CUDA kernels of the operators beside attention, under the emulator, against the oracle.

By default some cases of an operator's table run, in one of their dtypes each; when slow all of them
do, in all dtypes. As in test_cuda.py each runs with random stalls of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from emulator import build

from fastattn import dispatch
from fastattn.testing.additive import ADDITIVE_CASES, check_additive
from fastattn.testing.encode_memory import ENCODE_CASES, check_encoding
from fastattn.testing.memory_hop_cases import HOP_CASES, check_hops
from fastattn.testing.sinusoidal import SINUSOIDAL_CASES, check_sinusoidal
from fastattn.testing.verdict import Verdict

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Emulated:
    """A target: the CUDA adapter on CPU tensors, where the library finds it, and a seed."""

    adapter: ModuleType
    seed: int = 0
    backend: str = "cuda"

    @contextlib.contextmanager
    def active(self) -> Iterator[ModuleType]:
        self.adapter._cuda.set_seed(self.seed)
        real = dispatch.load

        def load(name: str) -> ModuleType | str:
            return self.adapter if name == "cuda" else real(name)

        order = {"cpu": ("cuda", "reference")}
        with mock.patch.object(dispatch, "load", load), mock.patch.dict(dispatch.PRIORITY, order):
            yield self.adapter


@pytest.fixture(scope="session")
def adapter() -> ModuleType:
    return build.load()


@dataclass(frozen=True)
class Table:
    """The cases of an operator, their judge, and which of them are for the slow run."""

    cases: Sequence[Any]
    check: Callable[[Any, torch.dtype, Any], Verdict]
    long: Callable[[Any], bool]
    every: int  # one of so many is not


TABLES = {
    "sinusoidal": Table(
        SINUSOIDAL_CASES,
        check_sinusoidal,
        lambda case: torch.Size(case.shape).numel() > 10_000,
        every=4,
    ),
    "additive": Table(
        ADDITIVE_CASES,
        check_additive,
        lambda case: case.batch * case.q_len * case.k_len * case.width > 40_000,
        every=2,
    ),
    "encode_memory": Table(ENCODE_CASES, check_encoding, lambda case: False, every=1),
    "memory_hops": Table(
        HOP_CASES,
        check_hops,
        lambda case: case.batch * case.hops * case.rows * case.width > 50_000,
        every=1,
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


@pytest.mark.parametrize(("table", "case", "dtype", "seed"), WORK)
def test_case(adapter: ModuleType, table: Table, case: Any, dtype: torch.dtype, seed: int) -> None:
    verdict = table.check(case, dtype, Emulated(adapter, seed))
    assert not verdict.declined, verdict.declined
    assert verdict.ok, "\n".join(verdict.faults)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", TABLES)
def test_every_case(adapter: ModuleType, name: str, dtype: torch.dtype) -> None:
    table = TABLES[name]
    faults = [
        f"{case.name} {seed}: {fault}"
        for n, case in enumerate(table.cases)
        for seed in (0, n + 1)
        for fault in table.check(case, dtype, Emulated(adapter, seed)).faults
    ]
    assert not faults, "\n".join(faults)
