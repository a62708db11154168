"""`make gpu-day`: its steps, how it goes on after a stop, and its report."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import emulator
import pytest
import recorded
from bench_results import parse
from child_process import run_python

from fastattn.bench.cells import Cell
from fastattn.bench.results import CellResult, Journal, Outcome, Peak, Result, Round
from fastattn.bench.selection import cells_of
from fastattn.testing.proofs import PROOFS
from fastattn.testing.selftest import SELFTESTS

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.complete


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.setattr(sys, "path", [str(ROOT / "tests/gpu"), *sys.path])
    import day

    yield day
    for name in ("day", "day_build", "day_report"):
        del sys.modules[name]


def of_tests(day: ModuleType, folder: Path, source: str) -> Any:
    """A day of one step: tests of this source."""
    (folder / "test_it.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\n")
    arguments = (str(folder / "test_it.py"), "-c", str(folder / "pytest.ini"))
    step = day.of_tests("step", "some tests", *arguments)
    return day_of(day, folder, step)


def day_of(day: ModuleType, folder: Path, *steps: Any) -> Any:
    one = day.Day(folder / "out", True, time.monotonic() + 600)
    one.steps = list(steps)
    return one


def status(one: Any) -> tuple[str, str]:
    (found,) = one.state["steps"].values()
    return found["status"], found["words"]


def test_the_steps_are_those_of_the_makefile_and_below_ten_minutes(day: ModuleType) -> None:
    for rehearse in (False, True):
        steps = day.steps(rehearse)
        names = [step.name for step in steps]
        assert len(set(names)) == len(names)
        assert all(step.limit < 600 for step in steps)
    makefile = (ROOT / "Makefile").read_text()
    assert "tests/gpu/day.py" in makefile


def test_each_line_of_the_benchmark_is_one_and_has_a_step(day: ModuleType) -> None:
    lines = day.lines_of_speed()
    assert len(lines) > 20
    for line in lines:
        for text in (line, day.tiny(line)):
            assert cells_of(parse("run", "--shapes", text)), text
        (tiny,) = {cell.dtype for cell in cells_of(parse("run", "--shapes", day.tiny(line)))}
        assert tiny in ("bf16", "fp32")
    for rehearse in (False, True):
        commands = [step.command for step in day.steps(rehearse) if step.kind == "speed"]
        taken = [word for command in commands for word in command]
        ops = {line.split()[0] for line in lines}
        assert {word.split()[0] for word in taken if word.split()[0] in ops} == ops
        if not rehearse:
            assert set(lines) <= set(taken)
        for command in commands:
            bench = parse(*command[command.index("run") :])
            assert bench.resume


def test_the_few_cases_are_some_of_every_operator(day: ModuleType) -> None:
    words = [word for word in re.findall(r"[\w-]+", day.FEW_CASES) if len(word) > 3]
    for name, proof in PROOFS.items():
        if name in SELFTESTS:  # those with a kernel for GPUs
            assert any(word in case.name for case in proof.cases for word in words), name


def test_each_step_of_tests_finds_its_tests(day: ModuleType) -> None:
    """Each selects from what one process collects, without most cases of the tables."""
    source = (
        "import sys, json, pytest, day_skeleton\n"
        "day_skeleton.keep_few_cases()\n"
        "class Found:\n"
        "    def pytest_collection_finish(self, session): print('FOUND', len(session.items))\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    pytest.main(['--collect-only', '-qq', *words], plugins=[Found()])\n"
    )
    commands = [step.command for step in day.steps(False) if step.kind == "tests"]
    wanted = [list(words[words.index("-p") :]) for words in commands]
    # Without a GPU tests/gpu is there for a rehearsal alone, with the emulated module.
    emulator.build()
    environment = day.environment(True)
    environment["PYTHONPATH"] += f":{ROOT / 'tests/gpu'}"
    done = run_python("-c", source, json.dumps(wanted), cwd=ROOT, **environment)
    found = [int(line.split()[1]) for line in done.stdout.splitlines() if "FOUND" in line]
    assert len(found) == len(wanted), done.stdout[-2000:] + done.stderr[-2000:]
    assert all(found), list(zip(found, wanted, strict=True))
    few = [n for n, words in zip(found, wanted, strict=True) if day.FEW_CASES in words]
    assert few
    assert max(few) < 20


def test_a_step_that_is_done_is_not_run_again(day: ModuleType, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    add = f"open({str(marks)!r}, 'a').write('x')"
    step = day.Step("step", "a mark", day.python("-c", add))
    for _ in range(2):
        assert day_of(day, tmp_path, step).run([], []) == 0
    assert marks.read_text() == "x"
    assert day_of(day, tmp_path, step).run([], ["step"]) == 0
    assert marks.read_text() == "xx"
    assert "Passed: step (" in (tmp_path / "out/report.md").read_text()


def test_a_failure_is_told_and_the_next_step_runs(day: ModuleType, tmp_path: Path) -> None:
    steps = [day.Step("bad", "fails", day.python("-c", "raise SystemExit('no such thing')"))]
    steps += [day.Step("absent", "is not there", ("no-such-command",))]
    steps += [day.Step("good", "passes", day.python("-c", ""))]
    one = day_of(day, tmp_path, *steps)
    assert one.run([], []) == 1
    statuses = {name: step["status"] for name, step in one.state["steps"].items()}
    assert statuses == {"bad": "failed", "absent": "failed", "good": "passed"}
    report = (tmp_path / "out/report.md").read_text()
    assert "no such thing" in report
    assert "No such file or directory" in report


@contextlib.contextmanager
def ends_during(one: Any, test: str) -> Iterator[None]:
    """The time of the step is over as soon as this test has begun."""
    record = one.folder / "step.jsonl"

    def runs() -> bool:
        found = recorded.results(record).items()
        return any(name.endswith(test) and x["outcome"] == "begun" for name, x in found)

    class Process(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if timeout is None or timeout < 60:  # those of `stop`
                return super().wait(timeout)
            until(runs)
            raise subprocess.TimeoutExpired(self.args, timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", Process)
        yield


def test_a_step_beyond_its_time_is_stopped_and_goes_on(day: ModuleType, tmp_path: Path) -> None:
    source = (
        "import time, pathlib\n"
        "def test_one(): pass\n"
        f"now = pathlib.Path({str(tmp_path / 'now')!r})\n"
        "def test_two(): time.sleep(0 if now.exists() else 60)\n"
        "def test_three(): pass\n"
    )
    one = of_tests(day, tmp_path, source)
    with ends_during(one, "test_two"):
        stopped = one.run_tests(one.steps[0], one.until)
    assert stopped == ("stopped", "reached its time limit; 1 passed, 1 interrupted")
    (tmp_path / "now").touch()
    assert one.run([], []) == 0
    assert status(one) == ("passed", "3 passed")


def test_a_test_that_was_interrupted_twice_is_not_run_again(
    day: ModuleType, tmp_path: Path
) -> None:
    source = "import time\ndef test_one(): time.sleep(60)\ndef test_two(): pass\n"
    one = of_tests(day, tmp_path, source)
    for _ in range(2):
        with ends_during(one, "test_one"):
            stopped = one.run_tests(one.steps[0], one.until)
        assert stopped == ("stopped", "reached its time limit; 1 interrupted")
    assert one.run([], []) == 1
    assert status(one) == ("failed", "1 passed, 1 interrupted")
    assert "test_one`: interrupted: the step reached" in (tmp_path / "out/report.md").read_text()


def test_a_test_beyond_its_own_time_has_crashed_and_the_rest_runs(
    day: ModuleType, tmp_path: Path
) -> None:
    source = "import time\ndef test_one(): time.sleep(60)\ndef test_two(): pass\n"
    one = of_tests(day, tmp_path, source)
    (step,) = one.steps
    one.steps = [replace(step, command=(*step.command, "--test-limit", "1"))]
    assert one.run([], []) == 1
    assert status(one) == ("failed", "1 passed, 1 crashed")


@pytest.mark.skipif(sys.platform != "linux", reason="a child ends with its parent on Linux alone")
def test_what_a_killed_run_has_started_ends_and_its_test_was_interrupted(
    day: ModuleType, tmp_path: Path
) -> None:
    source = (
        "import os, pathlib, time\n"
        f"mark = pathlib.Path({str(tmp_path / 'pid')!r})\n"
        "def test_one():\n"
        "    if not mark.exists():\n"
        "        mark.with_suffix('.new').write_text(str(os.getpid()))\n"
        "        mark.with_suffix('.new').rename(mark)\n"
        "        time.sleep(60)\n"
    )
    one = of_tests(day, tmp_path, source)

    def run() -> None:
        with one.alone():
            one.run([], [])

    killed = multiprocessing.get_context("fork").Process(target=run, daemon=True)
    killed.start()
    one.lock.close()  # or this process would hold it, too
    until(lambda: (tmp_path / "pid").exists())
    again = day_of(day, tmp_path, *one.steps)
    with pytest.raises(SystemExit, match="is in use"), again.alone():
        pass
    killed.kill()
    killed.join()
    until(lambda: is_free(again))  # or what it has started would go on
    record = tmp_path / "out/step.jsonl"
    assert [x["outcome"] for x in recorded.results(record).values()] == ["begun"]
    with again.alone():
        assert again.run([], []) == 0
    assert status(again) == ("passed", "1 passed")
    assert '"interrupted"' in record.read_text()


def is_free(one: Any) -> bool:
    try:
        with one.alone():
            return True
    except SystemExit:
        return False


def until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_step_for_another_gpu_is_left_out_with_the_reason(
    day: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = day.machine_of(True) | {"gpu": "NVIDIA A100", "capability": "8.0"}
    monkeypatch.setattr(day, "machine_of", lambda rehearse: found)
    (step,) = (step for step in day.steps(False) if step.name == "without-hopper")
    one = day_of(day, tmp_path, step)
    one.rehearse = False
    assert one.run([], []) == 0
    reason = "only for compute capability 9.0, this is 8.0"
    assert status(one) == ("not applicable", reason)
    assert reason in (tmp_path / "out/report.md").read_text()


def test_a_run_goes_on_after_a_crash_and_a_broken_context(day: ModuleType, tmp_path: Path) -> None:
    source = (
        "import os\n"
        "def test_one(): pass\n"
        "def test_two(): os.abort()\n"
        "def test_three(): raise RuntimeError('CUDA error: an illegal memory access')\n"
        "def test_four(): assert os.environ['PYTEST_DISABLE_PLUGIN_AUTOLOAD']\n"
        "def test_five(): assert 1 == 2, 'not | equal'\n"
    )
    one = of_tests(day, tmp_path, source)
    assert one.run([], []) == 1
    assert status(one) == ("failed", "2 passed, 2 failed, 1 crashed")
    report = (tmp_path / "out/report.md").read_text()
    assert "test_two`: crashed" in report
    assert "illegal memory access" in report


SANITIZER = f"""#!{sys.executable}
import pathlib, signal, subprocess, sys
signal.signal(signal.SIGINT, lambda *_: None)  # its child ends, then it sums up
finding = pathlib.Path(__file__).with_name("finding")
new = finding.read_text()
finding.write_text("")
print("========= COMPUTE-SANITIZER", flush=True)
if new:
    print("========= " + new + "\\n=========     at a_kernel()", flush=True)
code = subprocess.call(sys.argv[sys.argv.index(sys.executable):])
if code:
    print("========= Target application returned an error")
print(f"========= ERROR SUMMARY: {{int(bool(new))}} errors")
if new and "--error-exitcode" in sys.argv:
    code = int(sys.argv[sys.argv.index("--error-exitcode") + 1])
sys.exit(code)
"""


def sanitized(
    day: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, finding: str, source: str
) -> Any:
    """A day of one step under a sanitizer that reports this in its first run."""
    (folder / "bin").mkdir()
    tool = folder / "bin/compute-sanitizer"
    tool.write_text(SANITIZER)
    tool.with_name("finding").write_text(finding)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    (command,) = (step.command for step in day.steps(False) if step.name == "racecheck")
    one = of_tests(day, folder, source)
    before = command[: command.index(sys.executable)]
    assert before
    one.steps = [replace(step, command=(*before, *step.command)) for step in one.steps]
    return one


@pytest.mark.parametrize(
    ("finding", "judged"),
    [
        ("", ("passed", "2 passed")),
        ("Error: Race reported", ("failed", "2 passed; the log has: Error: Race reported")),
    ],
)
def test_a_finding_before_a_stop_is_not_forgotten(
    day: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    finding: str,
    judged: tuple[str, str],
) -> None:
    now = tmp_path / "now"
    source = (
        "import time, pathlib\n"
        "def test_one(): pass\n"
        f"def test_two(): time.sleep(0 if pathlib.Path({str(now)!r}).exists() else 60)\n"
    )
    one = sanitized(day, tmp_path, monkeypatch, finding, source)
    with ends_during(one, "test_two"):
        stopped = one.run_tests(one.steps[0], one.until)
    assert stopped == ("stopped", "reached its time limit; 1 passed, 1 interrupted")
    now.touch()
    one.run([], [])
    assert status(one) == judged


def test_the_tests_after_an_error_of_memory_run(
    day: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "def test_one(): raise RuntimeError('CUDA error: an illegal memory access')\n"
        "def test_two(): pass\n"
    )
    finding = "Invalid __global__ read of size 4 bytes"
    one = sanitized(day, tmp_path, monkeypatch, finding, source)
    assert one.run([], []) == 1
    assert status(one) == ("failed", f"1 passed, 1 failed; the log has: {finding}")


@pytest.mark.parametrize(
    ("line", "is_one"),
    [
        ("========= Warning: Race reported between Read access at kernel+0x100", True),
        ("========= Barrier error detected. Invalid arguments.", True),
        ("========= Internal Sanitizer Error: it did not track the launch.", True),
        ("========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)", True),
        ("========= ERROR SUMMARY: 10 errors", True),
        ("========= ERROR SUMMARY: 0 errors", False),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", False),
        ("========= Error: process didn't terminate successfully", False),
        ("========= ", False),
        ("========= 1 failed, 2 passed in 3.00s =========", False),  # a line of pytest
    ],
)
def test_the_findings_of_a_sanitizer(day: ModuleType, line: str, is_one: bool) -> None:
    log = f"$ compute-sanitizer\n========= COMPUTE-SANITIZER\n{line}\n1 passed\n"
    assert bool(day.FINDING.search(log)) == is_one


def test_a_step_whose_tests_are_all_skipped_has_failed(day: ModuleType, tmp_path: Path) -> None:
    one = of_tests(day, tmp_path, "import pytest\ndef test_it(): pytest.skip('there is no GPU')\n")
    assert one.run([], []) == 1
    assert status(one) == ("failed", "no test ran: Skipped: there is no GPU")


def test_results_of_two_machines_do_not_mix(
    day: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = day.Step("step", "nothing", day.python("-c", ""))
    day_of(day, tmp_path, step).run([], [])
    found = day.machine_of(True) | {"gpu": "another"}
    monkeypatch.setattr(day, "machine_of", lambda rehearse: found)
    with pytest.raises(SystemExit, match="this is another: name another folder by GPU_DAY"):
        day_of(day, tmp_path, step).run([], [])


def test_after_a_failed_build_only_steps_without_the_module_run(
    day: ModuleType, tmp_path: Path
) -> None:
    """What is there may be of other sources."""
    mended = tmp_path / "mended"
    source = f"import os, sys; sys.exit(not os.path.exists({str(mended)!r}))"
    steps = [day.Step("build", "the module", day.python("-c", source))]
    steps += [day.Step("cuda", "needs it", day.python("-c", ""))]
    steps += [day.Step("triton", "does not", day.python("-c", ""), needs_module=False)]
    one = day_of(day, tmp_path, *steps)

    def statuses() -> list[str]:
        return [step["status"] for step in one.state["steps"].values()]

    assert one.run([], []) == 1
    assert statuses() == ["failed", "waiting", "passed"]
    assert "| cuda | **waiting** |" in (tmp_path / "out/report.md").read_text()
    mended.touch()
    assert one.run([], ["build"]) == 0
    assert sorted(statuses()) == ["passed"] * 3


def test_only_what_runs_a_cuda_kernel_needs_the_module(day: ModuleType) -> None:
    steps = day.steps(False)
    without = {step.name for step in steps if not step.needs_module}
    of_triton = {step.name for step in steps if "triton" in step.name}
    assert without == {"wrappers", "cases-torch"} | of_triton


@pytest.mark.parametrize("arguments", [["--list"], ["--only", "no-such-step"]])
def test_what_runs_nothing_leaves_no_folder(
    day: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with contextlib.suppress(SystemExit):
        day.main([*arguments, "--out", str(tmp_path / "out")])
    said = capsys.readouterr()
    assert "first-use" in said.out + said.err
    assert not (tmp_path / "out").exists()


def test_no_step_begins_without_time(day: ModuleType, tmp_path: Path) -> None:
    step = day.Step("step", "nothing", day.python("-c", ""))
    one = day_of(day, tmp_path, step)
    one.until = time.monotonic() + 10
    assert one.run([], []) == 3
    assert not one.state["steps"]


def test_the_record_keeps_the_last_outcome_of_a_test(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    lines = [{"test": "a", "outcome": "crashed"}, {"test": "a", "outcome": "passed"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"test": "b", "out')
    assert recorded.results(path) == {"a": lines[1]}
    assert recorded.parts_of("test_case[cuda-head_dim-64-bfloat16]") >= {"cuda", "bfloat16"}
    assert recorded.parts_of("test_case") == {""}


# -- the report ------------------------------------------------------------------------------------


def cell(op: str, sizes: dict[str, int], passes: str, tflops: dict[str, float]) -> CellResult:
    """A cell in which each provider has this speed."""
    flops = 10**12
    rounds = [
        Round((9e5, 9e5), {name: flops / x / 1e9 for name, x in tflops.items()}) for _ in range(5)
    ]
    named = Cell(op, sizes, dtype="bf16", passes=passes, device="cuda")
    outcomes = {name: Outcome() for name in tflops}
    return CellResult(named, flops, 10**9, outcomes, rounds)


def write(folder: Path, cells: list[CellResult]) -> None:
    environment = {"cpu": "a processor", "cpu_flags": [], "isa": None, "last_cache": 1 << 20}
    settings = {"baseline": "torch", "threads": 1, "cache": "warm", "seed": 0}
    peaks = {"dot_bf16": Peak(9e5, "a product", [])}
    result = Result(environment, settings, {}, cells, peaks)
    journal = Journal(folder / "results.jsonl")
    journal.write("header", result.header())
    for one in cells:
        journal.write("cell", one.to_json())
    journal.write("end", result.end())
    journal.close()


def test_the_report_says_what_is_fast_and_what_contradicts_the_model(
    day: ModuleType, tmp_path: Path
) -> None:
    sizes = {"B": 2, "H": 16, "Hkv": 16, "Lq": 8192, "Lk": 8192, "D": 128, "Dv": 128}
    forward = {"torch": 400.0, "torch@cudnn": 600.0, "torch@flash": 370.0, "fastattn@cuda": 590.0}
    backward = {"torch@cudnn": 594.0, "torch@flash": 320.0, "fastattn@cuda": 300.0}
    bad = cell("sdpa", sizes | {"D": 64, "Dv": 64}, "fwd", {})
    bad.outcomes["fastattn@triton"] = Outcome("WRONG", "out is off")
    write(
        tmp_path / "speed",
        [cell("sdpa", sizes, "fwd", forward), cell("sdpa", sizes, "bwd", backward), bad],
    )
    steps = {"speed": {"status": "failed", "words": "", "seconds": 1.0}}
    machine = {"gpu": "NVIDIA H200", "capability": "9.0", "torch": "2", "commit": "abc"}
    state = {"machine": machine, "steps": steps}
    page, cells = day.day_report.report(tmp_path, state), day.day_report.cells(tmp_path, state)
    assert "rehearsal" not in page
    shape = "sdpa B=2,H=16,L=8192,D=128 bf16"
    for text in (page, cells):
        assert f"| {shape} fwd | 590 |  |  | torch@cudnn 600 | 0.98 |" in text
    assert "| sdpa | 2 | 0.51 | 0.74 | 0.98 | 0 |" in page
    # The numbers of docs/hopper.md: 598 and 382.
    assert f"| {shape} fwd | 590 | 598 | 0.99 |  |" in cells
    assert "1 of 2 predicted cells are more than 15% off" in page
    assert f"| {shape} bwd | 300 | 382 | 0.79 | **contradicts** |" in page
    assert "8k, full: TFLOP/s: at least 500, measured 590: met" in page
    assert "8k, causal: TFLOP/s: at least 480: not measured" in page
    assert "of cuDNN: at least 0.6, measured 0.505: **missed** by" in page
    assert "of FlashAttention-2: at least 1, measured 0.938: **missed** by" in page
    assert "- not timed: fastattn@triton: sdpa B=2,H=16,L=8192,D=64 bf16 fwd: WRONG: out is" in page
    assert day.day_report.judge_speed(tmp_path / "speed", 1) == (
        "failed",
        "7 rows measured, 1 failed, 1 of them ours",
    )


def verdict(op: str, *faults: str) -> dict[str, Any]:
    return {"backend": "cuda", "op": op, "dtype": "float16", "faults": [*faults]}


def order(op: str, *use: str) -> dict[str, Any]:
    return {"op": op, "dtype": ["float16"], "use": [*use], "source": f"{use[0]} 1 ms"}


def keep(folder: Path, verdicts: list[dict[str, Any]], orders: list[dict[str, Any]]) -> None:
    """What the steps of the library's commands leave."""
    for name, entries in (("first-use/selftest", verdicts), ("tune/evidence", orders)):
        (folder / name).parent.mkdir()
        (folder / f"{name}.json").write_text(json.dumps({"format": 1, "entries": entries}))
    (folder / "verify-cuda").mkdir()
    for n in range(2):
        suite = '<testsuite tests="20" failures="1" skipped="3" />'
        (folder / f"verify-cuda/{n}.xml").write_text(suite)


def test_the_report_says_what_is_kept_for_the_gpu(day: ModuleType, tmp_path: Path) -> None:
    verdicts = [verdict("merge_states"), verdict("encode_memory", "out is 2")]
    keep(tmp_path, verdicts, [order("b", "torch", "cuda"), order("c", "cuda"), order("a", "cuda")])
    state = {"machine": {}, "steps": {}}
    page, cells = day.day_report.report(tmp_path, state), day.day_report.cells(tmp_path, state)
    assert (
        "Kept for this GPU: first use: 2 kernels checked, 1 wrong (cuda encode_memory float16); "
        "verify-cuda: 40 checks, 2 failed, 6 declined.\n"
    ) in page
    assert "cells.md: torch > cuda: b float16; cuda: a float16, c float16.\n" in page
    assert "- tune: b float16: torch > cuda: torch 1 ms" in cells


def test_the_report_is_one_page_whatever_was_found(day: ModuleType, tmp_path: Path) -> None:
    """Half of the steps failed, each in many tests, and every cell is far off its prediction."""
    steps: dict[str, Any] = {}
    for n, step in enumerate(day.steps(False)):
        failed = n % 2 == 0
        steps[step.name] = {"status": "failed" if failed else "passed", "words": "", "seconds": 1.0}
        line = {"test": f"test_{n}", "outcome": "failed" if failed else "passed", "reason": "off"}
        lines = (json.dumps(line | {"test": f"test_{n}[{m}]"}) + "\n" for m in range(50))
        (tmp_path / f"{step.name}.jsonl").write_text("".join(lines))
    sizes = {"B": 2, "H": 16, "Hkv": 16, "Lq": 8192, "Lk": 8192, "D": 128, "Dv": 128}
    cells = []
    for n in range(108):
        speeds = {"torch": 400.0, "fastattn@cuda": 200.0 + n}
        cells.append(cell("sdpa", sizes | {"B": n + 1}, "fwd", speeds))
        cells[-1].outcomes["fastattn@triton"] = Outcome("WRONG", "out is off")
    write(tmp_path / "speed-attention", cells)
    uses = itertools.permutations(("torch", "cuda", "triton"))
    orders = [order(f"op{n}", *use) for n, use in enumerate(uses)]
    keep(tmp_path, [verdict(f"op{n}", "off") for n in range(50)], orders)
    machine = {"gpu": "NVIDIA H200", "capability": "9.0", "torch": "2", "commit": "abc"}
    state = {"machine": machine, "steps": steps}
    page = day.day_report.report(tmp_path, state)
    assert len(page.splitlines()) <= 82
    for words in ("594 more: see", "105 more: see", "108 of 108 predicted", "cells.md"):
        assert words in page, words
    # Each cell with its speed, its prediction and what was not timed.
    assert len(day.day_report.cells(tmp_path, state).splitlines()) > 3 * 108


def test_a_run_of_the_benchmark_without_time_for_all_goes_on(
    day: ModuleType, tmp_path: Path
) -> None:
    sizes = {"B": 2, "H": 16, "Hkv": 16, "Lq": 64, "Lk": 64, "D": 128, "Dv": 128}
    found = cell("sdpa", sizes, "fwd", {"torch": 1.0, "fastattn@cuda": 2.0})
    left = cell("sdpa", sizes, "bwd", {})
    left.outcomes["torch"] = Outcome("SKIPPED", "the time budget was used up")
    write(tmp_path / "speed", [found, left])
    judged = day.day_report.judge_speed(tmp_path / "speed", 0)
    assert judged == ("stopped", "its time was used up before 1 cells")
    assert day.day_report.judge_speed(tmp_path / "none", 2)[0] == "failed"


def test_the_skeleton_of_the_rehearsal_passes(
    day: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All commands of all steps, with a test of each; then there is nothing left to do."""
    names = [step.name for step in day.steps(True)]
    arguments = (str(ROOT / "tests/gpu/day_skeleton.py"), "--out", str(tmp_path))
    done = run_python(*arguments, cwd=ROOT, **day.environment(True))
    state = json.loads((tmp_path / "state.json").read_text())
    statuses = {name: step["status"] for name, step in state["steps"].items()}
    assert statuses == dict.fromkeys(names, "passed"), done.stdout[-3000:] + done.stderr[-3000:]
    for step in day.steps(True):
        assert (tmp_path / f"{step.name}.log").stat().st_size > 0
        if step.kind == "tests":
            found = recorded.results(tmp_path / f"{step.name}.jsonl").values()
            assert [one["outcome"] for one in found] == ["passed"], step.name
        elif step.kind == "speed":
            assert (tmp_path / step.name / "results.jsonl").exists()
    for name in ("tune/evidence.json", "tune/said.txt", "verify-triton/selftest.json", "cells.md"):
        assert (tmp_path / name).exists(), name
    capsys.readouterr()
    handler = signal.getsignal(signal.SIGTERM)
    assert day.main(["--rehearse", "--out", str(tmp_path)]) == 0
    signal.signal(signal.SIGTERM, handler)
    assert capsys.readouterr().out == f"Written: {tmp_path / 'report.md'}\n"


@pytest.mark.slow
def test_the_rehearsal_passes(day: ModuleType, tmp_path: Path) -> None:
    """The whole script, under the emulator and Triton's interpreter."""
    done = run_python(
        str(ROOT / "tests/gpu/day.py"), "--rehearse", "--out", str(tmp_path), cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    state = json.loads((tmp_path / "state.json").read_text())
    assert list(state["steps"]) == [step.name for step in day.steps(True)]
    assert {step["status"] for step in state["steps"].values()} == {"passed"}
