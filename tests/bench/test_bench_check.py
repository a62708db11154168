"""The check before the timing: every provider against the oracle."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
from collections.abc import Iterator

import pytest
import torch
from bench_results import SMALL, TINY, answer, cell_of

from fastattn import dispatch
from fastattn.bench import ops
from fastattn.bench.cells import Cell, bytes_touched, flops, make_inputs
from fastattn.bench.providers import entered, load
from fastattn.bench.runner import Oracle

# Sizes that are 0 unless given, memories of one for all, and longer rows.
MORE = [
    ("luong", SMALL["luong"] + ",P=1"),
    ("varlen", SMALL["varlen"] + ",S=2"),
    ("decode", SMALL["decode"] + ",P=3"),
    ("decode", "B=2,H=4,Hkv=2,Lk=150,D=8,P=25"),
    ("decode", "B=2,H=4,Hkv=2,Lq=3,Lk=30,D=8,Dv=6,P=5"),
    ("decode", "B=2,H=4,Hkv=1,Lq=9,Lk=9,D=8,Dv=6"),
    ("decode", "B=2,H=16,Hkv=1,Lq=4,Lk=70,D=72,Dv=64"),
    ("sdpa", "B=2,H=4,L=40,D=8"),
    ("attention_stats", SMALL["attention_stats"] + ",K=3"),
    ("hopfield", SMALL["hopfield"] + ",S=1"),
]


def all_of(op: str) -> str:
    """The pass that computes most."""
    return "fwd+bwd" if "fwd+bwd" in ops.get(op).PASSES else "fwd"


def cells_to_check() -> list[Cell]:
    """Every operator with its masks, and its weights or options, in turn in each dtype; forward and
    backward where they have one, and options in turn in each pass.
    """
    cells, dtypes = [], itertools.cycle(("fp32", "bf16", "fp16"))
    for op, shape in (*SMALL.items(), *MORE):
        passes, kinds = itertools.cycle(ops.get(op).PASSES), ops.get(op)
        options = [{"weights": name, "passes": all_of(op)} for name in kinds.WEIGHTS]
        options += [{"option": name, "passes": next(passes)} for name in kinds.OPTIONS[1:]]
        for mask, given in itertools.product(kinds.MASKS, options):
            with contextlib.suppress(ValueError):  # a mask and an option that exclude each other
                cells.append(cell_of(op, shape, **given, mask=mask, dtype=next(dtypes)))
    return cells


@pytest.fixture(autouse=True)
def close_entered_providers() -> Iterator[None]:
    yield
    entered.close()


def test_a_variant_is_active_while_its_provider_runs() -> None:
    cell = cell_of("sdpa", SMALL["sdpa"])
    call = load("fastattn@reference").prepare(cell, make_inputs(cell, 0))
    gc.collect()
    assert dispatch.forced.get() == "reference"
    call()
    load("torch@math")
    assert dispatch.forced.get() == ""
    assert not torch.backends.cuda.flash_sdp_enabled()


def test_a_backend_is_forced_for_functions_but_not_for_modules() -> None:
    for op, forced in (("sdpa", "cpu"), ("mha", ""), ("sdpa", "cpu")):
        cell = cell_of(op, SMALL[op])
        load("fastattn").prepare(cell, make_inputs(cell, 0))
        assert dispatch.forced.get() == forced


@pytest.mark.sampled
@pytest.mark.parametrize("cell", cells_to_check(), ids=lambda cell: cell.name)
def test_providers_agree_with_the_oracle(cell: Cell) -> None:
    oracle, ran = Oracle(cell, 1), set()
    for provider in ("fastattn", "fastattn@reference", "torch", "torch-eager"):
        if not load(provider).why_not(cell):
            found = oracle.check(answer(provider, cell, seed=1))
            assert found.ok, f"{provider}: {found.reason}"
            ran.add(provider)
    assert {"fastattn@reference", "torch-eager"} <= ran
    assert flops(cell, 1) > 0
    assert bytes_touched(cell) > 0


# They repeat their layers, which takes seconds.
STACKS = ("transformer", "decoder", "encoder")


@pytest.mark.parametrize(
    "op",
    [pytest.param(op, marks=pytest.mark.complete if op in STACKS else ()) for op in ops.OPS],
)
def test_a_wrong_result_fails_the_check(op: str) -> None:
    cell = cell_of(op, SMALL[op], passes=all_of(op))
    oracle = Oracle(cell, 1)
    # The reference itself, rounded, in the layout of an answer.
    outputs = {
        name: oracle.reference[name].to(x.dtype).view_as(x)
        for name, x in answer("torch", cell, seed=1).items()
    }
    assert oracle.check(outputs).ok
    for name in [*outputs][:25]:  # the layers of a stack are alike
        wrong = outputs | {name: outputs[name].detach() * 1.1}
        found = oracle.check(wrong)
        assert (found.ok, found.worst_tensor) == (False, name)
        nan = outputs | {name: torch.full_like(outputs[name], torch.nan)}
        assert not oracle.check(nan).ok


def test_a_long_cell_is_checked_by_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastattn.bench.ops._base.PAIRS_CHECKED", 2 * 2 * 5 * 7)
    monkeypatch.setattr("fastattn.bench.ops._base.AT_ONCE", 2 * 7 * 2)  # two rows of queries
    cell = dataclasses.replace(TINY, mask="causal", passes="fwd+bwd")
    oracle = Oracle(cell, 0)
    assert oracle.compared == "2 of 4 (sequence, head)"
    outputs = answer("torch", cell)
    assert oracle.check(outputs).ok
    assert not oracle.check(outputs | {"grad_key": -outputs["grad_key"]}).ok
