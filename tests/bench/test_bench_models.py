"""Whole models in the benchmark: what is computed, judged, timed and reported."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_results import a_result, answer, bench, cell_of, parse
from libraries import library

from fastattn.bench import cells as benchmark_cells
from fastattn.bench import ops, selection, summary
from fastattn.bench.cells import Cell, flops, make_inputs
from fastattn.bench.models import Model
from fastattn.bench.providers import entered, load
from fastattn.bench.results import Round
from fastattn.bench.runner import Oracle
from fastattn.bench.selection import preset_cells
from fastattn.integrations import torch as integration

transformers = pytest.importorskip("transformers")

_LAYERS = "N=1,E=16,H=4,F=24"
SMALL = {
    "bert": f"B=2,L=6,{_LAYERS},V=9",
    "vit": f"B=2,I=8,P=4,{_LAYERS}",
    "llama": f"B=2,L=6,Hkv=2,{_LAYERS},V=9",
    "llama_decode": f"B=2,L=6,Hkv=2,{_LAYERS},V=9",
}
# This width has learned embeddings of columns.
ALL = SMALL | {"tabpfn": "B=2,L=6,S=4,C=4,N=1,E=192,H=3"}
EVERY = [
    cell_of(op, ALL[op], dtype=dtype, mask=mask, passes=passes)
    for op in ALL
    for dtype in ("fp32", "bf16")
    for mask in ops.get(op).MASKS
    for passes in ops.get(op).PASSES
]
PROVIDERS = ("torch", "torch-eager", "fastattn")


@pytest.fixture(autouse=True)
def few_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark_cells, "POOL", 2**12)


def model_of(op: str) -> Model:
    """The model, whose library is installed."""
    model = ops.get(op)
    assert isinstance(model, Model)
    if op == "tabpfn":
        library(model.FUNCTION.rpartition(".")[0])
    return model


# Right, or not timed


@pytest.mark.parametrize("cell", EVERY, ids=lambda cell: cell.name)
def test_every_provider_is_right(cell: Cell) -> None:
    model_of(cell.op)
    oracle = Oracle(cell, 0)
    for provider in PROVIDERS:
        found = oracle.check(answer(provider, cell))
        assert found.ok, f"{provider}: {found.reason}"
    assert not integration._active


@pytest.mark.parametrize(
    "op", [op if op == "bert" else pytest.param(op, marks=pytest.mark.complete) for op in SMALL]
)
@pytest.mark.parametrize(
    "provider",
    ["onnxruntime", pytest.param("torch-compiled", marks=pytest.mark.slow)],
)
def test_peers_run_whole_models(provider: str, op: str) -> None:
    pytest.importorskip(provider.partition("-")[0])
    cell = cell_of(op, SMALL[op], mask=ops.get(op).MASKS[-1])
    assert load(provider).why_not(cell) == []
    assert Oracle(cell, 0).check(answer(provider, cell)).ok
    assert load("onnxruntime").why_not(cell_of(op, SMALL[op], dtype="bf16"))


@pytest.mark.complete
@pytest.mark.parametrize(
    ("op", "mask", "fault"),
    [
        ("bert", "none", lambda query, *others: (query * 1.01, *others)),
        ("bert", "padding", lambda query, key, value, mask: (query, key, value, None)),
        ("vit", "none", lambda q, k, v, mask: (q, k[:, :, :-1], v[:, :, :-1], mask)),
        ("llama_decode", "none", lambda q, k, v, mask: (q, k[:, :, :-1], v[:, :, :-1], mask)),
    ],
)
def test_wrong_attention_in_a_model_is_found(
    op: str, mask: str, fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    registered = transformers.AttentionInterface._global_mapping
    attention = registered["sdpa"]

    def wrong(module: Any, *tensors: Any, **options: Any) -> Any:
        return attention(module, *fault(*tensors), **options)

    for passes in ops.get(op).PASSES:
        cell = cell_of(op, SMALL[op], mask=mask, passes=passes)
        oracle = Oracle(cell, 0)
        with monkeypatch.context() as patch:
            patch.setitem(registered, "sdpa", wrong)
            found = answer("torch", cell)
        assert not oracle.check(found).ok


def test_the_cache_is_full_again_after_each_token() -> None:
    cell = cell_of("llama_decode", SMALL["llama_decode"])
    call = load("fastattn").prepare(cell, make_inputs(cell, 0))
    first, second = call()[0], call()[0]
    entered.close()
    assert torch.equal(first, second)


# What it costs, and what is reported


def counted(cell: Cell) -> int:
    """Multiplications and additions of the model with its attention spelled out."""
    from torch.utils.flop_counter import FlopCounterMode

    op, x = ops.get(cell.op), make_inputs(cell, 0)
    forward = op.eager(cell, x)
    with FlopCounterMode(display=False) as counter:
        out = forward()
        if leaves := [x[name] for name in op.leaf_names(cell) if cell.passes != "fwd"]:
            torch.autograd.grad(out.sum(), leaves)
    return counter.get_total_flops()


@pytest.mark.parametrize("op", ALL)
def test_flops_equal_pytorchs_without_masked_pairs(op: str) -> None:
    cell, hidden = cell_of(op, ALL[op]), 0
    if model_of(op).CAUSAL:
        hidden_pairs = cell["B"] * cell["L"] * (cell["L"] - 1) // 2
        hidden = 4 * cell["N"] * cell["E"] * hidden_pairs
    assert flops(cell) == counted(cell) - hidden


def test_rows_hold_rate_share_and_possible_gain() -> None:
    ms, shares = {"torch": 200.0, "ours": 160.0}, {"torch": 0.25, "ours": 0.1}
    result = a_result([Round((1e3, 1e3), ms, attention=shares)] * 5)
    result.cells[0].cell = cell_of("bert", SMALL["bert"])
    stock, ours = summary.summarise(result)
    assert (stock["items_per_second"], stock["item"]) == (60, "tokens")  # 2 x 6 in 0.2 s
    assert stock["speedup_limit"] == pytest.approx(4 / 3)
    assert ours["speedup"] == 1.25
    table = summary.table([stock, ours], summary.MODEL_METRICS)
    assert all(text in table for text in ("60 tokens", "25.0%", "1.33×"))


# The command line


def test_each_model_has_a_command_and_all_form_a_preset() -> None:
    cells = selection.cells_of(parse("model", "minilm,vit-b16", "--dtype", "bf16"))
    assert [(cell.op, cell.dtype) for cell in cells] == [("bert", "bf16"), ("vit", "bf16")]
    every = selection.cells_of(parse("model", "all"))
    assert every == preset_cells("models")
    assert {cell.op for cell in every} == {*ops.MODELS}
    assert not {cell.op for cell in preset_cells("all")} & {*ops.MODELS}
    with pytest.raises(ValueError, match=r"'bert': allowed are bert-base, .*, all"):
        selection.cells_of(parse("model", "bert"))
    with pytest.raises(ValueError, match="vit-b16 has no such pass"):
        selection.cells_of(parse("model", "vit-b16", "--pass", "bwd"))


def test_without_transformers_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert bench("model", "vit-b16") == 2
    assert "pip install fastattn[transformers]" in capsys.readouterr().err


@pytest.mark.complete
def test_a_missing_library_leaves_the_other_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the other processes have all random numbers
    monkeypatch.setitem(sys.modules, "tabpfn", None)
    path = tmp_path / "models.json"
    shapes = (f"--shapes=tabpfn {ALL['tabpfn']}", f"--shapes=bert {SMALL['bert']}")
    run = ("--threads", "1", "--rounds", "1", "--quiet", "--timeout", "300", "--time-budget", "300")
    run = (*run, "--json", str(path))
    assert bench("run", *shapes, *run) == 0
    document = json.loads(path.read_text())
    assert [row["provider"] for row in document["rows"]] == ["torch", "fastattn"] * 2
    for row in document["rows"][:2]:
        assert row["status"] == "UNAVAILABLE"
        assert "pip install fastattn[tabpfn]" in row["reason"]
    for row in document["rows"][2:]:
        assert row["status"] == "ok"
        assert row["items_per_second"] > 0
    # A fused layer has no attention of its own.
    assert 0 < document["rows"][2]["attention_share"] < 1
    assert "torch" in document["cells"][1]["rounds"][0]["attention"]
