"""The first hour on a GPU, as steps that can be stopped and go on: `make gpu-day`.

Runs the steps in order of value, each below ten minutes. The folder of results keeps what is done
(state.json), the log and the results of each step, and two pages, written again after each step:
report.md, which is short, and cells.md with all that was timed. A step that is done is not run
again; one that was stopped goes on where it was. `--rehearse` runs the same script without a GPU:
the emulator and Triton's interpreter in its place, tiny shapes.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("gpu", "support", "emulator"))]

import day_build  # noqa: E402
import day_report  # noqa: E402
import recorded  # noqa: E402

from fastattn.bench.worker import end_with_parent  # noqa: E402

LIMIT = 540  # seconds of a step: a machine may end every command after ten minutes
EMULATED = ROOT / f"build/emulator/plain/_cuda{day_build.SUFFIX}"
PROVIDERS = (
    "torch,torch@flash,torch@cudnn,torch@efficient,torch@math,torch-flex,"
    "fastattn@cuda,fastattn@sm_80,fastattn@triton"
)
OTHERS = ("sinusoidal", "additive", "memory_hops", "encode_memory", "hopfield", "mha")
# Cases of every operator that take few tiles, for the sanitizers and the rehearsal.
FEW_CASES = (
    "plain or lengths-65x65-full or lengths-33x65-upper_left or interleaved-16 or 3x4x5x11x8-bow"
)
# The largest sizes of the rehearsal's benchmarks; others are at most 32.
TINY = {"B": 1, "D": 16, "H": 2, "Hkv": 1, "K": 2, "S": 16, "P": 16}


@dataclass(frozen=True)
class Step:
    """A command, its limit in seconds, and how its end is judged."""

    name: str
    about: str
    command: tuple[str, ...]
    kind: str = "command"  # or "tests", which keeps each test's result, or "speed"
    limit: int = LIMIT
    capability: str | None = None  # of the only GPUs that it is for
    needs_module: bool = True  # the CUDA module, from the step `build`


def python(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, *arguments)


def of_tests(
    name: str,
    about: str,
    *arguments: str,
    before: Sequence[str] = (),
    **others: Any,
) -> Step:
    """A step of tests. What is recorded is not run again."""
    plugins = ("-p", "no:cacheprovider", "-p", "recorded", "-p", "sample", "--complete")
    pytest = python("-m", "pytest", *plugins, "-q", "--tb=short")
    return Step(name, about, (*before, *pytest, *arguments), "tests", **others)


def steps(rehearse: bool) -> list[Step]:
    """All steps, in order of value."""
    few = ("-k", FEW_CASES)
    some = few if rehearse else ()
    cases, races = "tests/gpu/test_cases_on_gpu.py", "tests/gpu/test_races_on_gpu.py"
    again = "the same repeats, triton"
    of_races = ("--with", "cuda"), ("--with", "triton")
    if rehearse:  # the interpreter is slow
        of_races = (
            ("--with", "cuda", "-k", "attention-masked or packed or encoding-large or appending"),
            ("--with", "triton,bfloat16", "-k", "decoding or merging"),
        )
    commands = "tests/gpu/test_commands_on_gpu.py"
    quick = " and bfloat16 and (merge_states or sinusoidal)" if rehearse else ""
    large = ("-k", f"test_large_scores{' and mask' * rehearse}")
    of_torch = ("-k", f"test_attention_by_pytorch{' and lengths-65x65' * rehearse}")
    wrapped = "every PTX wrapper against the manual's tables"
    wrappers = ("tests/cuda/test_emulator.py", "--with", "emulator" if rehearse else "cuda")

    def right(backend: str, dtype: str) -> Step:
        about = f"the case tables of all operators, {backend}, {dtype}"
        name = f"cases-{backend}-{dtype}"
        chosen = ("--with", f"{backend},{dtype}", *some)
        return of_tests(name, about, cases, *chosen, needs_module=backend == "cuda")

    def sanitized(tool: str) -> Step:
        # The rehearsal runs the same tests without the tool.
        before = () if rehearse else ("compute-sanitizer", "--tool", tool)
        chosen = ("--with", "cuda,bfloat16", *few, "--test-limit", "400")
        about = f"compute-sanitizer's {tool} on the small cases"
        return of_tests(tool, about, cases, *chosen, before=before)

    def verified(backend: str) -> Step:
        about = f"fastattn verify --backend {backend}, which keeps its verdicts"
        chosen = ("--with", backend, "-k", f"test_verify{quick}", "--test-limit", "500")
        needs = backend == "cuda"
        return of_tests(f"verify-{backend}", about, commands, *chosen, needs_module=needs)

    first_use = ("-k", f"test_first_use{quick} or test_first_call")
    tuned = ("-k", f"test_tune{quick}", "--test-limit", "400")
    found = [
        Step("build", "the native module", python(__file__, "--build")),
        of_tests("first-use", "the check before the first call of a user", commands, *first_use),
        of_tests("wrappers", wrapped, *wrappers, needs_module=False),
        right("cuda", "bfloat16"),
        right("cuda", "float32"),
        of_tests("large-scores", "attention with scores of 10^8", cases, *large),
        of_tests("calls", "streams, graphs, compiled code", "tests/gpu/test_calls_on_gpu.py"),
        of_tests("repeats-cuda", "1,000 bitwise repeats, cuda", races, *of_races[0]),
        sanitized("memcheck"),
        sanitized("racecheck"),
        sanitized("synccheck"),
        speed("attention", ("sdpa",), rehearse),
        speed("decoding", ("decode", "varlen"), rehearse),
        of_tests("tune", "fastattn tune --device cuda: the order of backends", commands, *tuned),
        right("cuda", "float16"),
        of_tests(
            "without-hopper",
            "the case tables of attention, on Hopper by the kernels for sm_80",
            "tests/gpu/test_hopper_on_gpu.py",
            *some,
            capability="9.0",
        ),
        verified("cuda"),
        *(right("triton", dtype) for dtype in ("bfloat16", "float32", "float16")),
        of_tests(
            "cases-torch",
            "PyTorch's own kernels as a backend",
            cases,
            *of_torch,
            needs_module=False,
        ),
        of_tests("repeats-triton", again, races, *of_races[1], needs_module=False),
        verified("triton"),
        speed("others", OTHERS, rehearse),
    ]
    # A rehearsal takes one type of each backend.
    skipped = ("cases-cuda-float16", "cases-triton-float16", "cases-triton-float32", "synccheck")
    return [step for step in found if not (rehearse and step.name in skipped)]


def speed(name: str, ops: Sequence[str], rehearse: bool) -> Step:
    """The lines of benchmarks/gpu.txt for these operators; to rehearse, a tiny one of each."""
    lines = [line for line in lines_of_speed() if line.partition(" ")[0] in ops]
    providers, device, budget, rounds = PROVIDERS, "cuda", LIMIT - 60, 15
    if rehearse:
        first = {line.partition(" ")[0]: tiny(line) for line in reversed(lines)}
        lines, device, budget, rounds = [*first.values()], "cpu", 400, 1
        providers = "torch,fastattn@cuda" + ",fastattn@sm_80,fastattn@triton" * ("sdpa" in ops)
    command = python("-m", "fastattn", "bench", "run", "--device", device, "--quiet", "--resume")
    command += ("--providers", providers, "--time-budget", str(budget), "--rounds", str(rounds))
    for line in lines:
        command += ("--shapes", line)
    return Step(f"speed-{name}", f"speed: {', '.join(ops)}", command, "speed")


def lines_of_speed() -> list[str]:
    lines = (ROOT / "benchmarks/gpu.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def tiny(line: str) -> str:
    """The same line in one dtype and with sizes that an emulator computes in a moment."""

    def smaller(found: re.Match[str]) -> str:
        key, sizes = found[1], found[2].split("|")
        least = {str(min(int(n), TINY.get(key, 32))): None for n in sizes}
        return f"{key}={'|'.join(least)}"

    line = re.sub(r"\b([A-Z][a-z]*)=(\d+(?:\|\d+)*)", smaller, line)
    return re.sub(r"dtype=(\w+)\S*", r"dtype=\1", line)


# -- running ---------------------------------------------------------------------------------------


DONE = ("passed", "failed", "not applicable")
ALL_HAVE_RUN = (0, 1, 5)  # exit codes of pytest
# What compute-sanitizer says of an error; its details are indented. Its exit code is that of the
# tests, and a process that was stopped may not reach its summary.
FINDING = re.compile(
    r"^={9} (?! |COMPUTE-SANITIZER|Target application returned|Error: process didn't terminate"
    r"|(?:ERROR|RACECHECK) SUMMARY: 0 )(.*[^=\n])$",
    re.MULTILINE,
)


class Day:
    """The folder of results, and what of the day is done."""

    def __init__(self, folder: Path, rehearse: bool, until: float) -> None:
        self.folder, self.rehearse, self.until = folder.resolve(), rehearse, until
        self.steps = steps(rehearse)
        self.file = self.folder / "state.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.state: dict[str, Any] = {"steps": {}}
        self.lock = (self.folder / "lock").open("w")

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Refuses a second run in the folder. What a run starts holds the lock, too: nothing may be
        left of an earlier run that was killed."""
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(
                f"{self.folder} is in use: another run, or what it has started, has not ended"
            ) from None
        try:
            yield
        finally:
            fcntl.flock(self.lock, fcntl.LOCK_UN)

    def begin(self) -> None:
        """Notes the machine. Results of two machines do not go into one folder."""
        machine = machine_of(self.rehearse)
        before = self.state.setdefault("machine", machine)
        for name in ("gpu", "torch", "commit"):
            if before[name] != machine[name]:
                raise SystemExit(
                    f"{self.folder} has results of {name} {before[name]}, this is {machine[name]}: "
                    "name another folder by GPU_DAY=FOLDER"
                )
        self.save()

    def save(self) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(self.state, indent=1) + "\n")
        os.replace(new, self.file)
        for name, page in (("report", day_report.report), ("cells", day_report.cells)):
            (self.folder / f"{name}.md").write_text(page(self.folder, self.state))

    def run(self, only: Sequence[str], again: Sequence[str]) -> int:
        if self.file.exists():
            self.state = json.loads(self.file.read_text())
        for name in again:
            self.state["steps"].pop(name, None)
            for path in self.folder.glob(f"{name}.*"):
                path.unlink()
            shutil.rmtree(self.folder / name, ignore_errors=True)
        self.begin()
        for step in self.steps:
            done = self.state["steps"].get(step.name, {})
            if (only and step.name not in only) or done.get("status") in DONE:
                continue
            left = self.until - time.monotonic()
            if left < 30:
                print(f"No time left for {step.name}: run this again to go on.")
                return 3
            print(f"-- {step.name}: {step.about}", flush=True)
            start = time.monotonic()
            status, words = self.run_step(step, start + min(step.limit, left))
            seconds = done.get("seconds", 0) + time.monotonic() - start
            self.state["steps"][step.name] = {
                "status": status,
                "words": words,
                "seconds": round(seconds, 1),
                "about": step.about,
            }
            self.save()
            print(f"   {status} after {seconds:.0f} s{words and ': '}{words}", flush=True)
        statuses = {found["status"] for found in self.state["steps"].values()}
        print(f"Written: {self.folder / 'report.md'}")
        return 3 if "stopped" in statuses else 1 if statuses & {"failed", "waiting"} else 0

    def run_step(self, step: Step, end: float) -> tuple[str, str]:
        build = self.state["steps"].get("build", {})
        if step.needs_module and build.get("status") == "failed" and step.name != "build":
            return "waiting", "for the CUDA module: --again build"
        here = self.state["machine"]["capability"]
        if not self.rehearse and step.capability not in (None, here):
            words = f"only for compute capability {step.capability}, this is {here}"
            return "not applicable", words
        if step.kind == "tests":
            return self.run_tests(step, end)
        command = list(step.command)
        if step.kind == "speed":
            command += ["--out", str(self.folder / step.name)]
        code = self.call(step, command, end)
        if code is None:
            return "stopped", "reached its time limit"
        if step.kind == "speed":
            return day_report.judge_speed(self.folder / step.name, code)
        return ("passed", "") if code == 0 else ("failed", self.last_line(step))

    def run_tests(self, step: Step, end: float) -> tuple[str, str]:
        """Starts again after a crash, beyond the test that crashed. A test that ran when the step
        was stopped, or this script killed, was interrupted."""
        record = self.folder / f"{step.name}.jsonl"
        recorded.settle(record, "interrupted", "the run was killed")
        while True:
            before = recorded.results(record)
            code = self.call(step, [*step.command, "--record", str(record)], end)
            if code is None:
                recorded.settle(record, "interrupted", "the step reached its time limit")
                counts = day_report.counts(recorded.results(record).values())
                return "stopped", f"reached its time limit; {counts}"
            crashed = recorded.settle(record, "crashed", f"it ended its process: exit code {code}")
            found = recorded.results(record)
            if code in ALL_HAVE_RUN and not crashed:
                break
            if found == before:
                return "failed", f"it does not start: {self.last_line(step)}"
        counts = day_report.counts(found.values())
        bad = [one for one in found.values() if one["outcome"] in day_report.BAD]
        ran = [one for one in found.values() if one["outcome"] != "skipped"]
        reported = FINDING.search(self.log(step))  # by any run of the step
        if reported:
            return "failed", f"{counts}; the log has: {reported[1][:200]}"
        if not ran:
            return "failed", f"no test ran: {next(iter(found.values()), {}).get('reason', '')}"
        return "failed" if bad else "passed", counts

    def call(self, step: Step, command: Sequence[str], end: float) -> int | None:
        """The exit code; None for a command that was stopped at the end of its time."""
        with (self.folder / f"{step.name}.log").open("a") as log:
            print("$", *command, file=log, flush=True)
            try:
                process = subprocess.Popen(
                    command, cwd=ROOT, env=environment(self.rehearse), stdout=log, stderr=log,
                    start_new_session=True, preexec_fn=end_with_parent,
                    pass_fds=(self.lock.fileno(),),
                )  # fmt: skip
            except OSError as error:
                print(f"{command[0]}: {error.strerror}", file=log)
                return 127
            try:
                return process.wait(max(end - time.monotonic(), 1))
            except subprocess.TimeoutExpired:
                return None
            finally:
                stop(process)

    def log(self, step: Step) -> str:
        return (self.folder / f"{step.name}.log").read_text(errors="replace")

    def last_line(self, step: Step) -> str:
        lines = self.log(step).strip().splitlines()
        return lines[-1][:200] if lines else ""


def stop(process: subprocess.Popen[bytes]) -> None:
    """Lets a process write what it has, then ends it with its children."""
    for sign, seconds in ((signal.SIGINT, 15), (signal.SIGKILL, 5)):
        if process.poll() is None:
            os.killpg(process.pid, sign)
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                continue


def environment(rehearse: bool) -> dict[str, str]:
    folders = [ROOT, ROOT / "tests/support", ROOT / "tests/emulator"]
    if rehearse:
        folders.insert(0, ROOT / "tests/support/rehearsal")
    given = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    given["FASTATTN_SELFTEST"] = "0"  # the steps judge the kernels, each case for itself
    given |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONUNBUFFERED": "1"}
    given["FASTATTN_REQUIRE_NATIVE"] = "0"  # the core of the CPU may be absent
    given["PATH"] += f"{os.pathsep}/usr/local/cuda/bin"  # nvcc and compute-sanitizer
    if rehearse:
        given |= {"FASTATTN_REHEARSAL": str(EMULATED), "TRITON_INTERPRET": "1"}
        given |= {"OMP_WAIT_POLICY": "passive", "FASTATTN_CACHE_DIR": "/nonexistent"}
    return given


def machine_of(rehearse: bool) -> dict[str, Any]:
    import torch

    from fastattn.bench.environment import describe_environment

    facts = describe_environment("cpu")
    found = {"commit": facts["commit"], "torch": torch.__version__, "python": facts["python"]}
    if rehearse:
        return {"gpu": "none: a rehearsal under the emulator", "capability": None, **found}
    if not torch.cuda.is_available():
        raise SystemExit("PyTorch sees no GPU here; REHEARSE=1 rehearses without one")
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    return {"gpu": torch.cuda.get_device_name(), "capability": capability, **found}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu-day", metavar="DIR")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, in minutes")
    parser.add_argument("--minutes", type=float, default=60, help="begin no step after these")
    parser.add_argument("--only", nargs="+", default=[], metavar="STEP", help="these steps alone")
    parser.add_argument("--again", nargs="+", default=[], metavar="STEP", help="repeat these")
    parser.add_argument("--list", action="store_true", help="print the steps")
    parser.add_argument("--pack", action="store_true", help="strip the modules, count the tree")
    parser.add_argument("--build", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.build:
        return day_build.build()
    if given.pack:
        return day_build.pack()
    names = {step.name: step.about for step in steps(given.rehearse)}
    for name in (*given.only, *given.again):
        if name not in names:
            parser.error(f"there is no step {name!r}; there are {', '.join(names)}")
    if given.list:
        print(*(f"{name:<22}{about}" for name, about in names.items()), sep="\n")
        return 0
    day = Day(given.out, given.rehearse, time.monotonic() + 60 * given.minutes)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the running step, too
    with day.alone():
        return day.run(given.only, given.again)


if __name__ == "__main__":
    sys.exit(main())
