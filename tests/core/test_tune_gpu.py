"""`fastattn tune` on a GPU, without one: the order of the backends that it measures and writes.

``on_a_gpu`` takes CPU tensors for those of a GPU; the backends compute with the reference.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from processors import H200, be, on_a_gpu

import fastattn
from fastattn import cli, dispatch, evidence, selftest, tune_gpu
from fastattn.backends import reference

OP = "sinusoidal_encoding"
X = torch.linspace(-1, 1, 2 * 5 * 8).view(2, 5, 8)


class Backend(ModuleType):
    __all__ = (OP,)

    def __init__(self, wrong: float = 0.0) -> None:
        super().__init__("backend")
        self.wrong = wrong
        self.calls = 0

    def why_not(self, *args: Any, **options: Any) -> list[str]:
        return []

    def sinusoidal_encoding(self, *args: Any, **options: Any) -> torch.Tensor:
        self.calls += 1
        return reference.sinusoidal_encoding(*args, **options) + self.wrong


def timed(**seconds: float) -> Any:
    """A measurement in which a candidate takes these seconds; each call runs once."""

    def measure(what: str, candidates: dict[str, Any]) -> dict[str, float]:
        for call in candidates.values():
            call()
        return {name: seconds[name] for name in candidates}

    return measure


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FASTATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("FASTATTN_SELFTEST")
    monkeypatch.setitem(tune_gpu.MEASURED, OP, ("sinusoidal", "B=1,L=5,E=8", "none"))
    return tmp_path / "evidence.json"


def order(**seconds: float) -> dict[str, Any] | None:
    return tune_gpu.order(OP, torch.float32, timed(**seconds), torch.device("cpu"))


def test_the_faster_backend_goes_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with on_a_gpu(Backend(), monkeypatch, "cuda", "triton"):
        explained = str(fastattn.explain(OP, X))
        assert "the first call checks cuda against the reference" in explained
        entry = order(cuda=2.0, triton=1.0)
        assert entry is not None
        assert (entry["name"], entry["use"]) == (["NVIDIA H200"], ["triton", "cuda"])
        assert "triton 1e+03 ms" in entry["source"]
        assert "-> triton, cuda\n" in capsys.readouterr().out
        evidence.set_own([entry])
        assert dispatch._order("cuda", OP, (X,)) == ("triton", "cuda", "reference")
        with be(H200._replace(name="NVIDIA A100")):  # a home folder may be shared
            assert dispatch._order("cuda", OP, (X,)) == ("cuda", "triton", "reference")


def test_a_gain_within_the_noise_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_a_gpu(Backend(), monkeypatch, "cuda", "triton"):
        entry = order(cuda=1.0, triton=0.99)
    assert entry is not None
    assert entry["use"] == ["cuda", "triton"]


def test_a_wrong_backend_is_not_measured_and_the_verdict_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right, wrong = Backend(), Backend(wrong=0.5)
    with on_a_gpu(right, monkeypatch, "triton", cuda=wrong):
        entry = order(cuda=1.0, triton=2.0)
        assert entry is not None
        assert entry["use"] == ["triton"]
        assert "FAIL cuda: sinusoidal_encoding, case first-use" in capsys.readouterr().out
        evidence.set_own([entry])
        verdicts = {e["backend"]: bool(e["faults"]) for e in selftest.stored()}
        assert verdicts == {"cuda": True, "triton": False}
        assert "failed its check" in fastattn.explain(OP, X).reasons["cuda"][0]


def test_the_verdict_spares_the_check_but_not_a_failure_found_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = Backend()
    with on_a_gpu(module, monkeypatch, "cuda", triton="not built"):
        entry = order(cuda=1.0)
        assert entry is not None
        evidence.set_own([entry])
        calls = module.calls
        fastattn.sinusoidal_encoding(X)
        assert module.calls == calls + 1
        about = selftest.identity("cuda", OP, torch.float32, H200, module)
        selftest.record(about, ["of fastattn verify"])
        with pytest.warns(selftest.SelfTestWarning, match="of fastattn verify"):
            fastattn.sinusoidal_encoding(X)
        assert module.calls == calls + 1


SMALL = "merge_states", "B=1,H=1,L=4,D=8", "none"


class Halves(ModuleType):
    """A backend of merge_states whose derivative raises an error, if it is given one."""

    __all__ = ("merge_states", "merge_states_backward")

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__("backend")
        self.error = error

    def why_not(self, *args: Any, **options: Any) -> list[str]:
        return []

    def merge_states(self, *args: Any, **options: Any) -> Any:
        return reference.merge_states(*args, **options)

    def merge_states_backward(self, *args: Any, **options: Any) -> Any:
        if self.error is not None:
            raise self.error
        return reference.merge_states_backward(*args, **options)


@pytest.mark.parametrize("error", [RuntimeError("too much shared memory"), KeyError("num_warps")])
def test_a_backend_whose_derivative_fails_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    monkeypatch.setitem(tune_gpu.MEASURED, "merge_states", SMALL)
    monkeypatch.setattr(tune_gpu, "_is_right", lambda name, *_: name != "torch")
    measure = timed(cuda=2.0, triton=1.0)
    call = "merge_states", torch.float32, measure, torch.device("cpu")
    with on_a_gpu(Halves(), monkeypatch, "cuda", triton=Halves(error)):
        entry = tune_gpu.order(*call)
    assert entry is not None
    assert entry["use"] == ["cuda"]
    assert f"triton does not run: {type(error).__name__}" in capsys.readouterr().out


def test_no_backend_with_a_derivative_is_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tune_gpu.MEASURED, "merge_states", SMALL)
    monkeypatch.setattr(tune_gpu, "_is_right", lambda name, *_: name == "cuda")
    with on_a_gpu(Halves(RuntimeError("no")), monkeypatch, "cuda"):
        # The real measurement, which needs at least one call.
        call = "merge_states", torch.float32, tune_gpu.measure, torch.device("cpu")
        assert tune_gpu.order(*call) is None


def test_a_check_that_cannot_run_says_nothing_of_the_backend(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def faults(*_: Any) -> list[str]:
        raise selftest.Inconclusive("out of memory")

    monkeypatch.setattr(tune_gpu, "faults", faults)
    with on_a_gpu(Backend(), monkeypatch, "cuda"):
        assert order(cuda=1.0) is None
        assert selftest.stored() == []
    assert "its check could not run: out of memory" in capsys.readouterr().out


def test_what_was_measured_stays_if_a_later_operator_fails(
    monkeypatch: pytest.MonkeyPatch, own: Path
) -> None:
    entry = {
        "choice": "backends",
        "device": "cuda",
        "name": ["NVIDIA H200"],
        "op": OP,
        "dtype": ["float32"],
        "use": ["cuda"],
        "source": "1 ms",
    }

    def orders(op: str, *_: Any) -> dict[str, Any]:
        if op != OP:
            raise KeyboardInterrupt
        return entry

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tune_gpu, "order", orders)
    with be(H200), pytest.raises(KeyboardInterrupt):
        tune_gpu.run([OP, "merge_states"], [torch.float32])
    assert "NVIDIA H200" in own.read_text()


def test_nothing_measured_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tune_gpu, "order", lambda *_: None)
    with be(H200):
        assert tune_gpu.run([OP], [torch.float32]) == 1
    assert not own.exists()
    assert "nothing is written" in capsys.readouterr().out


def test_without_any_backend_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with on_a_gpu("not built", monkeypatch, "cuda", "triton"):
        assert order() is None
    assert "none of torch, cuda, triton runs it here" in capsys.readouterr().out


def test_pytorchs_kernel_takes_part_in_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    op = "scaled_dot_product_attention"
    monkeypatch.setitem(tune_gpu.MEASURED, op, ("sdpa", "B=1,H=2,L=32,D=16", "causal"))
    with on_a_gpu("not built", monkeypatch, "cuda", "triton"):
        seconds = timed(torch=1.0)
        entry = tune_gpu.order(op, torch.bfloat16, seconds, torch.device("cpu"))
    if isinstance(dispatch.load("torch"), str) or entry is None:
        pytest.fail("PyTorch's fused kernel did not run")
    assert entry["use"] == ["torch"]


def test_every_measured_operator_can_be_called(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"sdpa": "B=1,H=2,L=8,D=8", "varlen": "B=2,H=2,L=8,D=8", "additive": "B=1,Lq=4,A=8",
             "decode": "B=1,H=2,Hkv=1,Lk=8,D=8", "memory_hops": "B=2", "hopfield": "B=1,L=4,N=4",
             "encode_memory": "B=1", "merge_states": "B=1,H=1,L=4,D=8",
             "sinusoidal": "B=1,L=4,E=8"}  # fmt: skip
    for op, (stem, _, mask) in list(tune_gpu.MEASURED.items()):
        monkeypatch.setitem(tune_gpu.MEASURED, op, (stem, small[stem], mask))
        passes = tune_gpu._passes(op, torch.float32, torch.device("cpu"), ["reference"])
        assert all(list(calls) == ["reference"] for calls in passes.values()), op
        assert ("with backward" in passes) == (op != "decode_attention")


@pytest.mark.parametrize("argument", [["--width", "64"], ["--out", "x.json"]])
def test_arguments_of_launches_need_it(
    argument: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cli.main(["tune", "--device", "cuda", *argument]) == 2
    assert f"{argument[0]} is for --launches" in capsys.readouterr().err


def test_reset_removes_the_verdicts_too(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = selftest.own_file()
    file.write_text("{}")
    assert cli.main(["tune", "--reset"]) == 0
    assert capsys.readouterr().out == f"removed {file}\n"
    assert not file.exists()
