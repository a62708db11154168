"""The check before the timing: every provider against the oracle."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Iterator

import pytest
import torch
from bench_results import SMALL, TINY, cell_of

from fastattn import dispatch
from fastattn.bench import ops
from fastattn.bench.cells import Cell, bytes_touched, flops, make_inputs, output_names
from fastattn.bench.oracle import Oracle
from fastattn.bench.providers import leave, load

# Sizes that are 0 unless given, and memories of one for all.
MORE = [
    ("luong", SMALL["luong"] + ",P=1"),
    ("varlen", SMALL["varlen"] + ",S=2"),
    ("decode", SMALL["decode"] + ",P=3"),
    ("attention_stats", SMALL["attention_stats"] + ",K=3"),
    ("hopfield", SMALL["hopfield"] + ",S=1"),
]


def all_of(op: str) -> str:
    """The pass that computes most."""
    return "fwd+bwd" if "fwd+bwd" in ops.get(op).PASSES else "fwd"


def cells_to_check() -> list[Cell]:
    """Every operator with its masks, weights and options, in turn in each dtype; forward and
    backward where they have one.
    """
    dtypes = itertools.cycle(("fp32", "bf16", "fp16"))
    return (
        [
            cell_of(op, shape, passes=all_of(op), mask=mask, weights=weights, dtype=next(dtypes))
            for op, shape in (*SMALL.items(), *MORE)
            for mask in ops.get(op).MASKS
            for weights in ops.get(op).WEIGHTS
        ]
        + [
            cell_of("transformer", SMALL["transformer"], option="stepwise"),
            *(
                cell_of("memn2n", SMALL["memn2n"], option="layerwise", passes=passes)
                for passes in ops.get("memn2n").PASSES
            ),
            *(
                cell_of("sdpa", shape, passes=passes, mask=mask, option=option, dtype=next(dtypes))
                for option in ops.get("sdpa").OPTIONS[1:]
                for mask in ("causal", "bias" if option != "window" else "none")
                if option != "learnable" or mask == "bias"
                for passes in ("bwd", "fwd+bwd")
                for shape in (SMALL["sdpa"], "B=2,H=4,L=40,D=8")
            ),
            *(
                cell_of("sdpa", SMALL["sdpa"], passes=passes, option="relative")
                for passes in ("fwd", "fwd+bwd")  # without a mask, which PyTorch's function has too
            ),
            *(
                cell_of("varlen", SMALL["varlen"], passes=passes, mask=mask, option="relative")
                for mask in ("none", "prefix")
                for passes in ("bwd", "fwd+bwd")
            ),
            *(
                cell_of("decode", shape, mask=mask, option=option)
                for mask in ("none", "window")
                for option in ops.get("decode").OPTIONS[1:]
                for shape in (SMALL["decode"], "B=2,H=4,Hkv=2,Lk=150,D=8,P=25")
            ),
            *(
                cell_of("decode", f"B=2,H=4,Hkv={of},Lq=3,Lk=30,D=8,Dv=6", mask=mask, option=option)
                for mask in ops.get("decode").MASKS
                for of in ("1", "2,P=5")
                for option in ("none", "latent")
            ),
            cell_of("decode", "B=2,H=4,Hkv=1,Lq=9,Lk=9,D=8,Dv=6", mask="causal", option="latent"),
        ]
    )


def answer(provider: str, cell: Cell) -> dict[str, torch.Tensor]:
    arrays = load(provider).prepare(cell, make_inputs(cell, 1))()
    return dict(zip(output_names(cell), arrays, strict=True))


@pytest.fixture(autouse=True)
def leave_what_a_provider_stays_in() -> Iterator[None]:
    yield
    leave()


def test_a_variant_is_in_force_while_its_provider_runs() -> None:
    cell = cell_of("sdpa", SMALL["sdpa"])
    call = load("fastattn@reference").prepare(cell, make_inputs(cell, 0))
    gc.collect()
    assert dispatch.forced.get() == "reference"
    call()
    load("torch@math")
    gc.collect()
    assert dispatch.forced.get() == ""
    assert not torch.backends.cuda.flash_sdp_enabled()
    leave()
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.sampled
@pytest.mark.parametrize("cell", cells_to_check(), ids=lambda cell: cell.name)
def test_providers_agree_with_the_oracle(cell: Cell) -> None:
    oracle = Oracle(cell, 1)
    for provider in ("fastattn@reference", "torch", "torch-eager"):
        if not load(provider).why_not(cell):
            found = oracle.check(answer(provider, cell))
            assert found.ok, found.reason
    assert flops(cell, 1) > 0
    assert bytes_touched(cell) > 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_the_kernels_and_pytorch_agree_on_a_latent_cache(mask: str, dtype: str) -> None:
    shape = "B=2,H=16,Hkv=1,Lq=4,Lk=70,D=72,Dv=64"
    cell = cell_of("decode", shape, mask=mask, dtype=dtype, option="latent")
    oracle = Oracle(cell, 1)
    for provider in ("fastattn@cpu", "torch", "torch-eager"):
        if not load(provider).why_not(cell):
            outputs = answer(provider, cell)
            assert outputs["out"].shape == (2, 16, 4, 64)
            found = oracle.check(outputs)
            assert found.ok, f"{provider}: {found.reason}"


@pytest.mark.parametrize("option", ops.get("varlen").OPTIONS)
@pytest.mark.parametrize("mask", ops.get("varlen").MASKS)
def test_a_loop_over_packed_sequences_agrees_too(mask: str, option: str) -> None:
    loop = load("torch@loop")
    assert loop.why_not(cell_of("sdpa", SMALL["sdpa"])) == [
        "it has no packed sequences to loop over"
    ]
    cell = cell_of("varlen", SMALL["varlen"], passes="fwd+bwd", mask=mask, option=option)
    assert not loop.why_not(cell)
    found = Oracle(cell, 1).check(answer("torch@loop", cell))
    assert found.ok, found.reason


# They repeat their layers, which takes seconds.
STACKS = ("transformer", "decoder", "encoder")


@pytest.mark.parametrize(
    "op",
    [pytest.param(op, marks=pytest.mark.complete if op in STACKS else ()) for op in ops.OPS],
)
def test_a_wrong_answer_does_not(op: str) -> None:
    cell = cell_of(op, SMALL[op], passes=all_of(op))
    oracle = Oracle(cell, 1)
    # The reference itself, rounded, in the layout of an answer.
    outputs = {
        name: oracle.reference[name].to(x.dtype).view_as(x)
        for name, x in answer("torch", cell).items()
    }
    assert oracle.check(outputs).ok
    for name in [*outputs][:25]:  # the layers of a stack are alike
        wrong = outputs | {name: outputs[name].detach() * 1.1}
        found = oracle.check(wrong)
        assert (found.ok, found.worst_tensor) == (False, name)
        nan = outputs | {name: torch.full_like(outputs[name], torch.nan)}
        assert not oracle.check(nan).ok


def test_an_output_has_the_dtype_that_its_operator_gives_it() -> None:
    cell = cell_of("merge_states", SMALL["merge_states"], passes="fwd+bwd", dtype="bf16")
    oracle, outputs = Oracle(cell, 1), answer("fastattn@reference", cell)
    assert outputs["grad_out_a"].dtype == torch.bfloat16
    assert oracle.check(outputs).ok
    found = oracle.check(outputs | {"grad_lse_a": outputs["grad_lse_a"].bfloat16()})
    assert not found.ok
    assert "grad_lse_a is torch.bfloat16" in found.reason
    assert not oracle.check(outputs | {"grad_lse_a": outputs["grad_lse_a"] * 1.1}).ok


def test_a_long_cell_is_checked_by_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastattn.bench.ops._base.PAIRS_CHECKED", 2 * 2 * 5 * 7)
    monkeypatch.setattr("fastattn.bench.ops._base.AT_ONCE", 2 * 7 * 2)  # two rows of queries
    cell = dataclasses.replace(TINY, mask="causal", passes="fwd+bwd")
    oracle = Oracle(cell, 0)
    assert oracle.compared == "2 of 4 (sequence, head)"
    arrays = load("torch").prepare(cell, make_inputs(cell, 0))()
    outputs = dict(zip(output_names(cell), arrays, strict=True))
    assert oracle.check(outputs).ok
    assert not oracle.check(outputs | {"grad_key": -outputs["grad_key"]}).ok
