"""`fastattn tune`: its measurements, its choices, and the file it writes.

No test needs a GPU: ``on_a_gpu`` treats CPU tensors as GPU tensors.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from processors import H200, be, on_a_gpu

from fastattn import __version__, cli, dispatch, evidence, info, tune
from fastattn.backends import reference
from fastattn.evidence import Gemm, Processor, Row

OP = "sinusoidal_encoding"
X = torch.linspace(-1, 1, 2 * 5 * 8).view(2, 5, 8)
AMD = Processor("cpu", "AMD", "AMD EPYC", frozenset({"avx512f", "avx512_bf16"}))
AMX = Processor("cpu", "Intel", "Xeon", frozenset({"avx512f", "avx512_bf16", "amx_bf16"}))
AMX_FP16 = AMX._replace(features=AMX.features | {"amx_fp16"})
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's file; nothing is timed for long, and shapes are small."""
    monkeypatch.setenv("FASTATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tune, "_ROUNDS", 1)
    monkeypatch.setattr(tune, "_SECONDS", 0.0)
    monkeypatch.setattr(tune, "ON_CPU", "sdpa B=1,H=2,L=32,D=16")
    monkeypatch.setattr(tune, "_LARGE", (32, 16, 48))
    monkeypatch.setattr(tune, "_SMALL", (16, 16, 16))
    monkeypatch.setattr(tune, "_FEW_ROWS", (4, 16, 16))
    monkeypatch.setitem(tune.MEASURED, OP, "sinusoidal B=1,L=5,E=8")
    evidence.forget()
    yield tmp_path / "evidence.json"
    monkeypatch.undo()
    evidence.forget()


def times(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Candidates take these seconds, by default one; each call runs once, if it can."""

    def race(what: str, candidates: dict[str, Any]) -> dict[str, float]:
        runs = [name for name, call in candidates.items() if tune._runs(name, call)]
        return {name: seconds.get(name, 1.0) for name in runs}

    monkeypatch.setattr(tune, "race", race)


# -- a CPU -----------------------------------------------------------------------------------------


def test_tune_measures_the_processor_and_can_be_undone(
    own: Path, native: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    before = native.build_info()["isa"]
    assert cli.main(["tune", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert f"written to {own}" in printed
    assert "--reset" in printed
    assert native.build_info()["isa"] == before
    kinds = {(row["choice"], row["dtypes"]) for row in json.loads(own.read_text())["rows"]}
    for dtype in ("bfloat16", "float16", "float32"):
        assert {("backends", dtype), ("isa", dtype)} <= kinds
    assert "your `fastattn tune`, with version" in info.format_text(info.collect())
    assert cli.main(["tune", "--reset"]) == 0
    assert f"removed {own}" in capsys.readouterr().out
    assert not own.exists()
    assert "your `fastattn tune`" not in info.format_text(info.collect())
    assert cli.main(["tune", "--reset"]) == 0
    assert "nothing to remove" in capsys.readouterr().out


def test_a_small_gain_changes_nothing(native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for processor, usual in ((AMD, ["cpu"]), (AMX_FP16, ["torch", "cpu"])):
        for by_torch in (0.98, 1.02):
            times(monkeypatch, torch=by_torch)
            with be(processor):
                order, isa = tune.attention(torch.float16)
                assert order.use == usual
                assert isa.use in native.build_info()["supported"]


def test_a_clearly_faster_candidate_is_chosen(native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    times(monkeypatch, torch=0.9)
    with be(AMD):
        order, _ = tune.attention(torch.bfloat16)
        assert (order.use, order.least_queries) == (["torch", "cpu"], 16)
    times(monkeypatch, torch=1.1)
    with be(AMX_FP16):
        order, _ = tune.attention(torch.float16)
        assert (order.use, order.least_queries) == (["cpu"], 0)
        evidence.set_own([order])
        found = evidence.choose("backends", "cpu", order.op, torch.float16)
        assert (found.use, found.version) == (["cpu"], __version__)
    for isa in [isa for isa in native.build_info()["supported"] if isa != "baseline"]:
        times(monkeypatch, **{isa: 0.5})
        assert tune.attention(torch.float32)[1].use == isa


def test_a_clearly_faster_gemm_is_chosen(native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    named = dict.fromkeys(evidence.GEMMS, lambda *_: None)
    monkeypatch.setattr(dispatch.load("cpu"), "gemms_of", lambda dtype: named)

    def chosen(dtype: torch.dtype, **seconds: float) -> Gemm:
        times(monkeypatch, **seconds)
        return tune.linear_layers(dtype).use

    with be(AMD):
        usual = evidence.choose("gemm", "cpu", dtype=torch.bfloat16).use
        assert chosen(torch.bfloat16) == usual
        assert chosen(torch.bfloat16, ours=2.0).ours_up_to == 0
        assert chosen(torch.float32, torch=0.5)[:4] == ("torch", "torch", "torch", 0)
        assert chosen(torch.float32, ours=0.5)[:4] == ("ours", "ours", "ours", 32)
    with be(AMX):
        assert chosen(torch.bfloat16, onednn=0.5).y == "onednn"


def test_medians_of_calls_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_ROUNDS", 3)
    made: list[str] = []
    found = tune.race("x", {name: lambda name=name: made.append(name) for name in "ab"})
    assert set(found) == {"a", "b"}
    assert made == list("ab") * 4  # the first round warms up


# -- a GPU -----------------------------------------------------------------------------------------


class Backend(ModuleType):
    def __init__(self, wrong: float = 0.0, error: Exception | None = None) -> None:
        super().__init__("backend")
        self.wrong, self.error = wrong, error

    def why_not(self, *args: Any, **options: Any) -> list[str]:
        return []

    def sinusoidal_encoding(self, *args: Any, **options: Any) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return reference.sinusoidal_encoding(*args, **options) + self.wrong


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend is right if it gives the results of the reference for X."""

    def is_right(name: str, *_: Any) -> bool:
        module = dispatch.load(name)
        return isinstance(module, Backend) and module.wrong == 0

    monkeypatch.setattr(tune, "is_right", is_right)


def order() -> Row | None:
    """The order that tune chooses for the operator."""
    return tune.order(OP, torch.float32, CPU)


def test_the_faster_backend_goes_first(judged: None, monkeypatch: pytest.MonkeyPatch) -> None:
    times(monkeypatch, cuda=2.0, triton=1.0)
    with on_a_gpu(Backend(), monkeypatch, "cuda", "triton"):
        row = order()
        assert row is not None
        assert row.use == ["triton", "cuda"]
        assert "triton 1e+03 ms" in row.source


@pytest.mark.usefixtures("judged")
def test_a_wrong_backend_is_not_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_a_gpu(Backend(), monkeypatch, "triton", cuda=Backend(wrong=0.5)):
        row = order()
    assert row is not None
    assert row.use == ["triton"]


@pytest.mark.usefixtures("judged")
@pytest.mark.parametrize("error", [RuntimeError("too much shared memory"), KeyError("num_warps")])
def test_a_backend_that_fails_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    with on_a_gpu(Backend(), monkeypatch, "cuda", triton=Backend(error=error)):
        row = order()
    assert row is not None
    assert row.use == ["cuda"]
    assert f"triton does not run: {type(error).__name__}" in capsys.readouterr().out


def test_without_a_backend_no_row_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with on_a_gpu("not built", monkeypatch, "cuda", "triton"):
        assert order() is None
    assert "no backend runs it here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("backend", "printed"),
    [
        (Backend(), ""),
        (Backend(wrong=0.5), "FAIL sinusoidal_encoding"),
        (
            Backend(error=torch.OutOfMemoryError("no memory left")),
            "not checked, not enough memory: no memory left",
        ),
    ],
)
def test_the_case_table_judges(
    backend: Backend,
    printed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    load = dispatch.load
    monkeypatch.setitem(sys.modules, "fastattn.backends.triton", backend)
    monkeypatch.setattr(dispatch, "load", lambda n: backend if n == "triton" else load(n))
    assert tune.is_right("triton", OP, torch.float32, CPU) == (not printed)
    assert printed in capsys.readouterr().out


def test_earlier_rows_stay_if_a_later_operator_fails(
    monkeypatch: pytest.MonkeyPatch, own: Path
) -> None:
    def orders(op: str, *_: Any) -> Row:
        if op != OP:
            raise KeyboardInterrupt
        return Row("backends", H200.key, "float32", ["cuda"], "1 ms", OP)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune, "order", orders)
    arguments = ["--op", f"{OP},merge_states", "--dtype", "float32"]
    with be(H200):
        assert cli.main(["tune", "--device", "cuda", *arguments]) == 130
    assert "NVIDIA H200" in own.read_text()


def test_measuring_nothing_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune, "on_gpu", lambda *_: [])
    assert cli.main(["tune", "--device", "cuda"]) == 1
    assert not own.exists()
    assert "nothing is written" in capsys.readouterr().out


def test_every_measured_operator_can_be_called() -> None:
    small = {"sdpa": "B=1,H=2,L=8,D=8", "varlen": "B=2,H=2,L=8,D=8", "additive": "B=1,Lq=4,A=8",
             "decode": "B=1,H=2,Hkv=1,Lk=8,D=8", "memory_hops": "B=2", "hopfield": "B=1,L=4,N=4",
             "encode_memory": "B=1", "merge_states": "B=1,H=1,L=4,D=8",
             "sinusoidal": "B=1,L=4,E=8"}  # fmt: skip
    for op, line in tune.MEASURED.items():
        stem, shape = line.split()[:2]
        on = {"reference": lambda: dispatch.use_backend("reference")}
        assert tune.seconds(op, line.replace(shape, small[stem]), torch.float32, CPU, on), op


# -- arguments -------------------------------------------------------------------------------------


def test_tune_without_a_gpu_is_a_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert cli.main(["tune", "--device", "cuda"]) == 2
    assert "PyTorch sees no GPU here" in capsys.readouterr().err


def test_an_argument_of_another_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--device", "cpu", "--op", "decode_attention"]) == 2
    assert "--op is for --device cuda" in capsys.readouterr().err
