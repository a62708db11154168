"""`fastattn tune` on a processor: what it measures, what it takes and leaves, where it writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processors import be

from fastattn import cli, evidence, info, tune_cpu
from fastattn.evidence import Processor
from fastattn.nn import _linear


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's file; nothing is timed for long."""
    monkeypatch.setenv("FASTATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tune_cpu, "_ROUNDS", 1)
    monkeypatch.setattr(tune_cpu, "_SECONDS", 0.0)
    monkeypatch.setattr(tune_cpu, "_SHAPE", (1, 2, 32, 16))
    monkeypatch.setattr(tune_cpu, "_LARGE", (32, 16, 48))
    monkeypatch.setattr(tune_cpu, "_FEW_ROWS", (16, 16, 16))
    evidence.forget()
    yield tmp_path / "evidence.json"
    monkeypatch.undo()
    evidence.forget()


def timed(**seconds: float) -> Any:
    """A measurement in which a candidate takes these seconds, another one second."""
    return lambda what, candidates: {name: seconds.get(name, 1.0) for name in candidates}


AMD = Processor("cpu", "AMD", "AMD EPYC", frozenset({"avx512f", "avx512_bf16"}))
AMX = Processor("cpu", "Intel", "Xeon", frozenset({"avx512f", "avx512_bf16", "amx_bf16"}))
AMX_FP16 = AMX._replace(features=AMX.features | {"amx_fp16"})


def test_it_measures_the_processor_and_can_be_undone(
    own: Path, native: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    before = native.build_info()["isa"]
    assert cli.main(["tune", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert f"written to {own}" in printed
    assert "--reset" in printed
    assert native.build_info()["isa"] == before
    entries = json.loads(own.read_text())["entries"]
    kinds = {(entry["choice"], entry["dtype"][0]) for entry in entries}
    for dtype in ("bfloat16", "float16", "float32"):
        assert {("backends", dtype), ("isa", dtype)} <= kinds
    assert "your `fastattn tune` of" in info.format_text(info.collect())
    assert cli.main(["tune", "--reset"]) == 0
    assert f"removed {own}" in capsys.readouterr().out
    assert not own.exists()
    assert "your `fastattn tune`" not in info.format_text(info.collect())
    assert cli.main(["tune", "--reset"]) == 0
    assert "nothing to remove" in capsys.readouterr().out


def test_a_small_gain_changes_nothing(native: Any) -> None:
    for processor, usual in ((AMD, ["cpu"]), (AMX_FP16, ["torch", "cpu"])):
        with be(processor):
            for times in ({"torch": 0.98}, {"torch": 1.02}):
                order, isa = tune_cpu.attention(torch.float16, timed(**times))
                assert order["use"] == usual
                assert isa["use"] in native.build_info()["supported"]


def test_what_is_clearly_faster_is_taken(own: Path) -> None:
    with be(AMD):
        order, _ = tune_cpu.attention(torch.bfloat16, timed(torch=0.9))
        assert (order["use"], order["least_queries"]) == (["torch", "cpu"], 16)
    with be(AMX_FP16):
        order, _ = tune_cpu.attention(torch.float16, timed(torch=1.1))
        assert order["use"] == ["cpu"]
        assert "least_queries" not in order
        evidence.set_own([order])
        found = evidence.choose("backends", "cpu", order["op"], torch.float16)
        assert found is not None
        assert (found.use, found.is_own) == (["cpu"], True)


def test_the_instruction_set_that_is_clearly_faster(
    native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    isas = [isa for isa in native.build_info()["supported"] if isa != "baseline"]
    if not isas:
        pytest.skip("one instruction set: nothing to choose")
    for isa in isas:
        _, entry = tune_cpu.attention(torch.float32, timed(**{isa: 0.5}))
        assert entry["use"] == isa


def test_the_gemm_that_is_clearly_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_linear, "_ONEDNN_LINEAR", lambda *_: None)
    monkeypatch.setattr(_linear, "_ONEDNN_DTYPES", {torch.float32, torch.bfloat16})
    with be(AMD):
        (usual,) = tune_cpu.gemm(torch.bfloat16, timed())
        assert evidence.Gemm(**usual["use"]) == evidence.Gemm("onednn", "torch", 2**24 - 1, 2**25)
        (slow,) = tune_cpu.gemm(torch.bfloat16, timed(ours=2.0))
        assert slow["use"]["ours_up_to"] == 0
        (mkl,) = tune_cpu.gemm(torch.float32, timed(torch=0.5))
        assert (mkl["use"]["forward"], mkl["use"]["weight_grad"]) == ("torch", "torch")
    with be(AMX):
        (ours,) = tune_cpu.gemm(torch.bfloat16, timed(ours=0.5))
        assert ours["use"]["ours_up_to"] == 2**24 - 1


def test_medians_of_calls_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_cpu, "_ROUNDS", 3)
    monkeypatch.setattr(tune_cpu, "_SECONDS", 0.0)
    made: list[str] = []
    times = tune_cpu.measure("x", {name: lambda name=name: made.append(name) for name in "ab"})
    assert set(times) == {"a", "b"}
    assert made == list("ab") * 4  # the first round warms up


@pytest.mark.parametrize(
    "option", [["--op", "decode_attention"], ["--width", "64"], ["--out", "x"]]
)
def test_options_of_the_gpu_are_refused(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tune", "--device", "cpu", *option]) == 2
    assert f"{option[0]} is for --device cuda" in capsys.readouterr().err
