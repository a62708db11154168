"""Whole models of timm, diffusers and Whisper in the benchmark; tests/bench has transformers'."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from bench_results import bench, cell_of
from libraries import library
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fastattn.bench import ops
from fastattn.bench.cells import Cell, flops, make_inputs, output_names
from fastattn.bench.models import _model
from fastattn.bench.models._model import LibraryModel
from fastattn.bench.oracle import Oracle
from fastattn.bench.providers import leave, load
from fastattn.integrations import torch as integration

SMALL = {
    "timm_vit": "B=2,I=8,P=4,N=1,E=16,H=4,F=24",
    "diffusers_dit": "B=2,I=8,P=2,N=2,E=16,H=2",
    "openai_whisper": "B=2,L=6,M=5,N=1,E=16,H=4,F=64",
}
EVERY = [
    cell_of(op, SMALL[op], dtype=dtype, passes=passes)
    for op in SMALL
    for dtype in ("fp32", "bf16")
    for passes in ops.get(op).PASSES
    if (op, dtype) != ("openai_whisper", "bf16")  # its norms are in float32
]
PROVIDERS = ("torch", "torch-eager", "fastattn")


def model_of(op: str) -> LibraryModel:
    model = ops.get(op)
    assert isinstance(model, LibraryModel)
    library(model.PACKAGE)
    return model


@pytest.fixture(autouse=True)
def few_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_model, "_POOL", 2**12)


def answer(provider: str, cell: Cell) -> dict[str, Tensor]:
    arrays = load(provider).prepare(cell, make_inputs(cell, 0))()
    leave()
    return dict(zip(output_names(cell), arrays, strict=True))


def test_all_are_tested() -> None:
    assert {op for op in ops.MODELS if isinstance(ops.get(op), LibraryModel)} == {*SMALL}


@pytest.mark.parametrize("cell", EVERY, ids=lambda cell: cell.name)
def test_every_provider_is_right(cell: Cell) -> None:
    model_of(cell.op)
    oracle = Oracle(cell, 0)
    for provider in PROVIDERS:
        found = oracle.check(answer(provider, cell))
        assert found.ok, f"{provider}: {found.reason}"
    assert not integration._active


@pytest.mark.parametrize("op", SMALL)
def test_the_share_of_attention_is_measured(op: str) -> None:
    model = model_of(op)
    for provider in PROVIDERS:
        model.stopwatch.seconds = 0.0
        answer(provider, cell_of(op, SMALL[op], passes=model.PASSES[-1]))
        assert model.stopwatch.seconds > 0


@pytest.mark.parametrize("op", SMALL)
def test_operations_are_counted_as_pytorch_counts_them(op: str) -> None:
    cell = cell_of(op, SMALL[op])
    forward = model_of(op).eager(cell, make_inputs(cell, 0))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        forward()
    assert flops(cell) == counter.get_total_flops()


@pytest.mark.complete
def test_a_missing_library_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    path = tmp_path / "models.json"
    shapes = ("--shapes", f"timm_vit {SMALL['timm_vit']}", "--shapes", "sdpa B=1,H=1,L=4,D=8")
    run = ("--threads", "1", "--rounds", "1", "--quiet", "--json", str(path))
    assert bench("run", *shapes, *run) == 0
    rows = json.loads(path.read_text())["rows"]
    found = {(row["op"], row["provider"]): (row["status"], row["reason"]) for row in rows}
    for provider in ("torch", "fastattn"):
        status, reason = found["timm_vit", provider]
        assert status == "UNAVAILABLE"
        assert "pip install fastattn[timm]" in reason
        assert found["sdpa", provider][0] == "ok"
