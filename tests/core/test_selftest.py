"""The first-use check of a GPU's kernels: when it runs, what it finds, and what it leaves alone.

There is no GPU: ``on_a_gpu`` takes CPU tensors for those of one, and the backend "triton" is a
recorder that computes with the reference. ``tests/cuda`` and ``tests/triton`` check real kernels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from processors import H200, be, on_a_gpu

import fastattn
from fastattn import cli, dispatch, evidence, explain, info, selftest, use_backend, verify
from fastattn.backends import reference
from fastattn.selftest import SelfTestWarning
from fastattn.testing import OnGpu, Proof, Target
from fastattn.testing.proofs import PROOFS
from fastattn.testing.selftest import SELFTESTS, faults

OP = "sinusoidal_encoding"
X = torch.linspace(-1, 1, 2 * 5 * 8).view(2, 5, 8)


class Kernels(ModuleType):
    """A backend whose kernel of the sinusoids may be wrong; the calls of the user are counted."""

    __all__ = (OP,)

    def __init__(self) -> None:
        super().__init__("kernels")
        self.wrong = 0.0
        self.error: Exception | None = None
        self.threads: list[str] = []
        self.modes: list[tuple[bool, bool]] = []

    def why_not(self, *args: Any, **kwargs: Any) -> list[str]:
        return []

    def sinusoidal_encoding(self, x: Any, positions: Any, *, options: Any) -> Any:
        self.threads.append(threading.current_thread().name)
        self.modes.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        if self.error is not None:
            raise self.error
        out = reference.sinusoidal_encoding(x, positions, options=options)
        out[..., -1:, -1] += self.wrong
        return out

    @property
    def checks(self) -> int:
        return self.threads.count("fastattn-selftest")

    @property
    def calls(self) -> int:
        return len(self.threads) - self.checks


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FASTATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FASTATTN_SELFTEST")
    return tmp_path / "cache"


@pytest.fixture
def kernels(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    module = Kernels()
    with on_a_gpu(module, monkeypatch, "triton"):
        yield module


def encode() -> torch.Tensor:
    return fastattn.sinusoidal_encoding(X)


def entries(cache: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((cache / "selftest.json").read_text())["entries"]
    return found


CASES = len(SELFTESTS[OP])


@pytest.mark.parametrize("op", SELFTESTS)
def test_the_cases_are_right(op: str) -> None:
    with selftest.switched_off():
        assert faults("reference", op, torch.float32, torch.device("cpu")) == []


# -- a right kernel -------------------------------------------------------------------------------


def test_the_first_call_alone_checks(kernels: Kernels, cache: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = encode(), encode()
    assert (kernels.checks, kernels.calls) == (CASES, 2)
    (entry,) = entries(cache)
    assert (entry["backend"], entry["op"], entry["dtype"]) == ("triton", OP, "float32")
    assert (entry["device"], entry["faults"]) == ("NVIDIA NVIDIA H200", [])
    assert entry["torch"] == torch.__version__
    assert torch.equal(first, second)
    assert [path.name for path in cache.iterdir()] == ["selftest.json"]


def test_the_check_changes_no_bit_and_no_random_number(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    checked, drawn = encode(), torch.randn(3)
    monkeypatch.setenv("FASTATTN_SELFTEST", "0")
    selftest.forget()
    torch.manual_seed(0)
    assert torch.equal(encode(), checked)
    assert torch.equal(torch.randn(3), drawn)
    assert kernels.checks == CASES


def test_another_process_takes_the_verdict_from_the_file(kernels: Kernels, cache: Path) -> None:
    encode()
    selftest.forget()  # as in another process
    encode()
    assert (kernels.checks, kernels.calls) == (CASES, 2)
    torch_version = torch.__version__
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(torch, "__version__", "9.0")
        selftest.forget()
        encode()
    assert kernels.checks == 2 * CASES
    assert {entry["torch"] for entry in entries(cache)} == {torch_version, "9.0"}


@pytest.mark.parametrize("other", ["device", "kernels", "dtype"])
def test_another_gpu_build_or_dtype_has_a_check_of_its_own(
    other: str, kernels: Kernels, tmp_path: Path
) -> None:
    encode()
    if other == "device":
        with be(H200._replace(name="NVIDIA A100")):
            encode()
    elif other == "kernels":
        kernels.__file__ = str(tmp_path / "kernels.py")
        Path(kernels.__file__).touch()
        selftest.forget()
        encode()
    else:
        fastattn.sinusoidal_encoding(X.bfloat16())
    assert kernels.checks == 2 * CASES


def test_kernels_that_round_to_tf32_have_a_check_of_their_own(
    kernels: Kernels, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are other kernels than those of float32, and the setting may change at any time."""
    allowed = False
    monkeypatch.setattr(selftest, "allows_tf32", lambda: allowed)
    encode()
    fastattn.sinusoidal_encoding(X.bfloat16())
    allowed = True
    assert "the first call checks triton" in str(explain(OP, X))
    assert "the first call checks" not in str(explain(OP, X.bfloat16()))
    for _ in range(2):
        encode()
    allowed = False
    encode()
    assert (kernels.checks, kernels.calls) == (3 * CASES, 5)
    assert [entry["tf32"] for entry in entries(cache)] == [True, False, False]


@pytest.mark.parametrize("broken", ["{", "[]", '{"format": 1, "entries": [3]}', '{"format": 7}'])
def test_a_broken_file_only_means_a_check(broken: str, kernels: Kernels, cache: Path) -> None:
    cache.mkdir()
    (cache / "selftest.json").write_text(broken)
    encode()
    assert kernels.checks == CASES
    assert len(entries(cache)) == 1


def test_where_nothing_can_be_written_it_runs_once_for_each_process(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FASTATTN_CACHE_DIR", str(tmp_path / "file"))  # no folder can be there
    encode()
    encode()
    assert (kernels.checks, kernels.calls) == (CASES, 2)
    assert "the first call checks" not in str(explain(OP, X))
    selftest.forget()
    kernels.wrong = 0.5
    with pytest.warns(SelfTestWarning, match="are not used"):
        encode()
    assert kernels.checks == 2 * CASES
    assert "failed its check" in explain(OP, X).reasons["triton"][0]


# -- where no check is needed ---------------------------------------------------------------------


def test_it_can_be_switched_off(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTN_SELFTEST", "0")
    kernels.wrong = 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not torch.equal(encode(), encode_by_reference())
    assert (kernels.checks, kernels.calls) == (0, 1)


@pytest.mark.parametrize("value", ["", "1"])
def test_it_stays_on(value: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTN_SELFTEST", value)
    encode()
    assert kernels.checks == CASES


@pytest.mark.parametrize("value", ["off", "false", "00", "2"])
def test_another_value_is_an_error(
    value: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would check although the user may have meant to switch it off."""
    monkeypatch.setenv("FASTATTN_SELFTEST", value)
    with pytest.raises(ValueError, match=f"FASTATTN_SELFTEST must be 0 .*or 1 .*got '{value}'"):
        encode()
    assert (kernels.checks, kernels.calls) == (0, 0)


def encode_by_reference() -> torch.Tensor:
    with use_backend("reference"):
        return encode()


RECORD = {"choice": "backends", "device": "cuda", "op": OP, "use": ["triton"], "source": "here"}


@pytest.mark.parametrize("name", [["NVIDIA H200"], ["NVIDIA A100"], None])
def test_a_gpu_with_a_record_is_not_checked(
    name: list[str] | None, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = RECORD if name is None else {**RECORD, "name": name}
    monkeypatch.setattr(evidence, "_shipped", lambda: [entry])
    evidence.forget()
    encode()
    assert kernels.checks == (0 if name == [H200.name] else CASES)


def test_the_users_own_record_does_not_replace_the_check(kernels: Kernels) -> None:
    """It may be of another version, whose kernels were others."""
    evidence.set_own([{**RECORD, "name": [H200.name], "version": "0.1.0"}])
    found = evidence.choose("backends", "cuda", OP, X.dtype)
    assert found is not None
    assert found.source.endswith("of unknown date, measured with version 0.1.0")
    assert "the first call checks triton" in str(explain(OP, X))
    encode()
    assert kernels.checks == CASES


def test_cpu_tensors_are_not_checked(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert selftest.gpu(torch.device("cpu")) is None
    load = dispatch.load.__wrapped__
    monkeypatch.setattr(dispatch, "load", lambda n: kernels if n == "triton" else load(n))
    monkeypatch.setitem(dispatch.PRIORITY, "cpu", ("triton", "reference"))
    encode()
    assert (kernels.checks, kernels.calls) == (0, 1)


def test_the_gpu_of_a_tensor_is_that_of_the_record() -> None:
    with be(H200):
        assert selftest.gpu(torch.device("cuda:0")) == H200


def test_explain_runs_no_check_and_says_that_one_is_due(kernels: Kernels) -> None:
    found = explain(OP, X)
    assert found.runs == "triton"
    assert "the first call checks triton against the reference" in str(found)
    assert kernels.threads == []
    encode()
    assert "the first call checks" not in str(explain(OP, X))


# -- a wrong kernel -------------------------------------------------------------------------------


def test_a_mismatch_disables_the_backend_and_is_reported(kernels: Kernels, cache: Path) -> None:
    kernels.wrong = 0.5
    with pytest.warns() as caught:
        out = encode()
    messages = {w.category: w for w in caught}
    message = str(messages[SelfTestWarning].message)
    assert f"the triton kernels of {OP} in float32 gave a wrong result on this GPU" in message
    assert "case first-use, x" in message or "case first-use" in message
    assert messages[SelfTestWarning].filename == __file__
    assert "failed its check on this GPU" in str(messages[fastattn.FallbackWarning].message)
    assert torch.equal(out, encode_by_reference())
    assert kernels.calls == 0
    report = cache / f"selftest-triton-{OP}-float32.txt"
    assert str(report) in message
    text = report.read_text()
    for part in ("NVIDIA H200", torch.__version__, "max error", "fastattn verify --backend triton"):
        assert part in text
    assert "failed its check on this GPU" in explain(OP, X).reasons["triton"][0]


def test_a_kept_mismatch_is_said_again_in_the_next_process(kernels: Kernels) -> None:
    kernels.wrong = 0.5
    with pytest.warns(SelfTestWarning):
        encode()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encode()
    checks = kernels.checks
    selftest.forget()
    dispatch._warn_once.cache_clear()
    assert "failed its check" in explain(OP, X).reasons["triton"][0]
    with pytest.warns(SelfTestWarning, match="are not used"):
        encode()
    assert (kernels.checks, kernels.calls) == (checks, 0)


def test_a_mismatch_is_of_one_dtype(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.wrong = 0.5
    with pytest.warns(SelfTestWarning):
        encode()
    kernels.wrong = 0.0
    fastattn.sinusoidal_encoding(X.bfloat16())
    assert kernels.calls == 1


def test_a_forced_backend_raises(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.wrong = 0.5
    with use_backend("triton"):
        with pytest.warns(SelfTestWarning), pytest.raises(RuntimeError, match="failed its check"):
            encode()
        monkeypatch.setenv("FASTATTN_SELFTEST", "0")
        selftest.forget()
        encode()
    assert kernels.calls == 1


@pytest.mark.parametrize("raises_first", [True, False])
def test_an_exception_after_a_mismatch_hides_nothing(
    raises_first: bool, kernels: Kernels, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one before it leaves the verdict open."""
    real = Kernels.sinusoidal_encoding

    def unsteady(self: Kernels, *args: Any, **options: Any) -> Any:
        self.error = ValueError("no") if bool(self.threads) != raises_first else None
        return real(self, *args, **options)

    kernels.wrong = 0.5
    monkeypatch.setattr(Kernels, "sinusoidal_encoding", unsteady)
    with pytest.warns(SelfTestWarning, match="ValueError: no" if raises_first else "wrong result"):
        encode()
    assert kernels.calls == 0
    assert bool(selftest.stored()) != raises_first


def test_info_and_doctor_show_it(kernels: Kernels, capsys: pytest.CaptureFixture[str]) -> None:
    assert "none has run yet" in info.format_text(info.collect())
    fastattn.sinusoidal_encoding(X.bfloat16())
    assert "1 passed" in info.format_text(info.collect())
    kernels.wrong = 0.5
    with pytest.warns(SelfTestWarning):
        encode()
    text = info.format_text(info.collect())
    assert "1 passed" in text
    assert f"triton {OP} float32: failed, see " in text
    cli.main(["doctor"])
    assert f"the triton kernels of {OP} in float32 failed" in capsys.readouterr().out


# -- where a check cannot run ---------------------------------------------------------------------


def test_a_graph_capture_has_no_check_and_no_unchecked_kernel(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    capturing = True
    monkeypatch.setattr(selftest, "is_capturing", lambda device: capturing)
    with pytest.warns(SelfTestWarning, match="graph is being captured. Call it once before"):
        encode()
    with use_backend("triton"), pytest.raises(RuntimeError, match="not checked yet on this GPU"):
        encode()
    assert kernels.threads == []
    capturing = False
    encode()
    assert (kernels.checks, kernels.calls) == (CASES, 1)
    capturing = True  # it has had its check
    encode()
    assert kernels.calls == 2


def test_a_lack_of_memory_is_no_mismatch(kernels: Kernels, cache: Path) -> None:
    kernels.error = torch.OutOfMemoryError("of the GPU")
    with pytest.warns(SelfTestWarning, match="not enough memory: of the GPU"):
        encode()
    assert not cache.exists()
    kernels.error = None
    encode()
    assert kernels.calls == 1


def test_an_exception_is_no_mismatch(kernels: Kernels, cache: Path) -> None:
    """The next process checks again: the error may be one of the program or of its environment."""
    kernels.error = ValueError("an illegal instruction\nand more")
    with pytest.warns(SelfTestWarning, match=r"not checked yet.*case.*ValueError") as said:
        encode()
    message = str(said.list[0].message)
    assert "an illegal instruction" in message
    assert "and more" not in message
    kernels.error = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encode()
    assert "ValueError: an illegal instruction" in explain(OP, X).reasons["triton"][0]
    assert (kernels.calls, kernels.checks) == (0, 1)
    assert not cache.exists()
    selftest.forget()
    encode()
    assert kernels.calls == 1


def test_an_earlier_error_of_the_gpu_is_not_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    with pytest.raises(
        selftest.Inconclusive, match="reports an error, from before the check: CUDA"
    ) as stopped:
        faults("triton", OP, torch.float32, torch.device("cuda"))
    assert stopped.value.lasts


@pytest.mark.parametrize("breaks", [True, False])
def test_a_kernel_that_ends_the_context_is_a_mismatch(
    breaks: bool, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def synchronize(device: torch.device) -> None:
        if breaks and kernels.threads:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")

    def raises(*_: Any) -> None:
        kernels.threads.append("")
        raise RuntimeError("CUDA error: illegal")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(Proof, "__call__", raises)
    found = functools.partial(faults, "triton", OP, torch.float32, torch.device("cuda"))
    if breaks:
        assert [fault.rpartition(", ")[2] for fault in found()] == [
            "RuntimeError: CUDA error: illegal"
        ]
    else:
        with pytest.raises(selftest.Inconclusive, match="CUDA error: illegal"):
            found()


def test_a_long_check_is_told(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(selftest, "_LONG", 0.0)
    encode()
    assert f"triton kernels of {OP} in float32 has taken 0 s" in caplog.text
    assert kernels.calls == 1


def test_whether_a_graph_is_captured_is_asked_of_the_tensors_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current = [torch.device("cuda:0")]

    @contextlib.contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1].index == 1)
    assert not selftest.is_capturing(torch.device("cuda:0"))
    assert selftest.is_capturing(torch.device("cuda:1"))
    assert not selftest.is_capturing(torch.device("cpu"))


def test_a_check_that_breaks_itself_keeps_the_program_running(
    kernels: Kernels, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SELFTESTS, OP, None)  # type: ignore[arg-type]
    with pytest.warns(SelfTestWarning, match="the check stopped: TypeError"):
        encode()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encode()
    assert kernels.calls == 0
    assert not cache.exists()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("of the GPU"), "not checked, not enough memory: of the GPU"),
        (RuntimeError("no compiler"), "RuntimeError: no compiler"),
    ],
)
def test_verify_keeps_no_error_as_a_mismatch(
    error: Exception,
    said: str,
    kernels: Kernels,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(verify, "OnGpu", functools.partial(OnGpu, device="cpu"))
    monkeypatch.setattr(Target, "module", property(lambda _: kernels))
    few = dataclasses.replace(PROOFS[OP], cases=PROOFS[OP].cases[:3])
    monkeypatch.setitem(PROOFS, OP, few)
    command = ["verify", "--backend", "triton", "--op", OP, "--dtype", "float32"]
    kernels.error = error
    assert cli.main(command) == 1
    printed = capsys.readouterr().out
    assert said in printed
    assert f"no verdict is kept of triton {OP} float32" in printed
    assert "kept for this GPU in" not in printed
    assert selftest.stored() == []
    kernels.error = None
    assert cli.main(command) == 0
    assert "kept for this GPU in" in capsys.readouterr().out
    assert [entry["faults"] for entry in selftest.stored()] == [[]]


# -- modes, threads, processes, the compiler ------------------------------------------------------


def test_no_mode_of_the_caller_reaches_the_check(kernels: Kernels) -> None:
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        encode()
    assert kernels.modes[:CASES] == [(True, False)] * CASES


def test_a_device_mode_and_a_default_dtype_of_the_caller(kernels: Kernels) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("error")
            encode()
    finally:
        torch.set_default_dtype(torch.float32)
    assert (kernels.checks, kernels.calls) == (CASES, 1)


def test_threads_share_one_check(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Kernels.sinusoidal_encoding

    def slow(self: Kernels, *args: Any, **options: Any) -> Any:
        time.sleep(0.02)
        return real(self, *args, **options)

    monkeypatch.setattr(Kernels, "sinusoidal_encoding", slow)
    threads = [threading.Thread(target=encode) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert (kernels.checks, kernels.calls) == (CASES, 8)


def test_a_fork_while_another_thread_checks(kernels: Kernels) -> None:
    """The child has no such thread, so nothing would ever release its lock."""
    inside, leave = threading.Event(), threading.Event()

    def check() -> None:
        with selftest._lock:
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=check)
    thread.start()
    assert inside.wait(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks in programs with threads
        child = os.fork()
    if child == 0:
        free = selftest._lock.acquire(timeout=10)
        os._exit(0 if free else 1)
    leave.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_compiled_code_checks_when_it_runs(kernels: Kernels, fresh_compiler: None) -> None:
    compiled = torch.compile(fastattn.sinusoidal_encoding, backend="eager", fullgraph=True)
    out = compiled(X)
    assert (kernels.checks, kernels.calls) == (CASES, 1)
    assert torch.equal(out, encode())


def test_fake_tensors_are_not_checked(kernels: Kernels) -> None:
    with torch._subclasses.FakeTensorMode():
        fastattn.sinusoidal_encoding(torch.empty(2, 5, 8))
    assert kernels.threads == []


def test_the_check_of_attention_does_not_check_itself(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operators whose check calls the public function come through the dispatcher again."""
    counted: list[str] = []

    class Whole(ModuleType):
        __all__ = ("encode_memory", "encode_memory_backward")

        def why_not(self, *args: Any, **kwargs: Any) -> list[str]:
            return []

        def encode_memory(self, *args: Any, **options: Any) -> Any:
            counted.append(threading.current_thread().name)
            return reference.encode_memory(*args, **options)

        def encode_memory_backward(self, *args: Any, **options: Any) -> Any:
            counted.append(threading.current_thread().name)
            return reference.encode_memory_backward(*args, **options)

    tokens, weight = torch.tensor([[[1, 2, 0]]]), torch.ones(4, 5, requires_grad=True)
    with on_a_gpu(Whole("whole"), monkeypatch, "triton"):
        fastattn.encode_memory(tokens, weight).sum().backward()
    cases = len(SELFTESTS["encode_memory"])
    assert counted[: 2 * cases] == ["fastattn-selftest"] * 2 * cases
    assert len(counted) == 2 * cases + 2


def test_after_the_first_call_it_costs_a_look_up(kernels: Kernels) -> None:
    encode()
    tensors = (X, None)
    rounds = 20_000
    start = time.perf_counter()
    for _ in range(rounds):
        selftest.why_not("triton", OP, tensors, dispatch.load)
    assert (time.perf_counter() - start) / rounds < 20e-6  # about 0.5 us
