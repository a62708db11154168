"""Would the case tables see a bug? Changes random lines of CPU kernels, one at a time.

    make mutants ARGS="--minutes 60 --seed N --out build/mutants.jsonl"

universalmutator makes the changes (an operator, a constant, a condition, a statement left out). An
object is compiled again with each, and cases run until one fails. What compiles to the same machine
code is no mutant. The report has the score and the survivors, each to be read: a case is missing,
or the change is harmless. `--out` gets a line of JSON a mutant, to follow the score over time.

`make mutants` installs universalmutator and runs this.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "csrc/cpu/kernels"
BUILD = ROOT / "build/native/cpu"
RULES = ("universal.rules", "c_like.rules", "cpp.rules")
# What is no arithmetic, or ends the compiler at once.
IGNORED = (r"^\s*//", r"^\s*#", r"^\s*(namespace|using|template|static_assert|inline constexpr)\b")
ATTENTION = ("scaled_dot_product_attention", "varlen_attention", "decode_attention")
# Source: the operators whose cases run its kernels.
OPERATORS = {
    "additive": ("additive_attention",),
    "append": ("append_to_cache",),
    "encode_memory": ("encode_memory",),
    "gather": ("decode_attention",),
    "local_attention": ("luong_attention",),
    "memory_hops": ("memory_hop_attention",),
    "merge_states": ("merge_states",),
    "sdpa_backward": ATTENTION[:2],
    "sdpa_forward": (*ATTENTION, "hopfield_retrieve"),
    "sinusoidal": ("sinusoidal_encoding",),
}
_JUDGE = """
import importlib.util, sys
import torch
spec = importlib.util.spec_from_file_location("fastattn._cpu", sys.argv[1])
module = sys.modules["fastattn._cpu"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from fastattn.testing import Target
from fastattn.testing.proofs import PROOFS
target = Target("cpu", sys.argv[2])
dtypes = [getattr(torch, name) for name in sys.argv[3].split(",")]
for proof in (PROOFS[name] for name in sys.argv[4:]):
    for n, case in enumerate(proof.cases):
        dtype = dtypes[n % len(dtypes)]
        if dtype in case.dtypes and not case.slow and target.has_own_kernel(proof.operator, dtype):
            verdict = proof(case, dtype, target)
            if verdict.severity >= 2:  # a right kernel has half a bound to spare
                sys.exit(f"{proof.operator} {case.name}: {verdict.faults[0]}")
"""


def ninja(*words: str) -> str:
    import ninja

    command = [str(Path(ninja.BIN_DIR, "ninja")), "-C", str(BUILD), "-t", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def objects() -> dict[str, set[str]]:
    """Each object of a kernel, with the sources in the folder of kernels that it is made of."""
    found: dict[str, set[str]] = {}
    for block in ninja("deps").split("\n\n"):
        name, *files = (line.strip() for line in block.splitlines())
        target = name.partition(":")[0]
        if Path(target).name.partition(".")[0] not in OPERATORS:
            continue
        paths = [(BUILD / file).resolve() for file in files]
        inside = [str(path.relative_to(KERNELS)) for path in paths if path.is_relative_to(KERNELS)]
        found[target] = set(inside)
    return found


def changes(file: str) -> list[tuple[int, str]]:
    """The line numbers and texts of all mutants of a file."""
    from universalmutator import mutator

    lines = (KERNELS / file).read_text().splitlines(keepends=True)
    with contextlib.redirect_stdout(io.StringIO()):
        found = mutator.mutants_regexp(lines, ruleFiles=list(RULES), ignorePatterns=list(IGNORED))
    return [(line, text) for line, text, *_ in found]


class Trial:
    """A copy of the sources, in which one line at a time is changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unchanged: dict[str, bytes] = {}  # object -> its contents, compiled here
        shutil.copytree(ROOT / "csrc/cpu", folder / "csrc/cpu")
        for header in (ROOT / "csrc").glob("*.h"):
            shutil.copy2(header, folder / "csrc")

    def made(self, target: str, changed: dict[str, str]) -> str:
        """Run the command of the build that makes a file, with some words replaced."""
        words = [changed.get(word, word) for word in shlex.split(ninja("commands", "-s", target))]
        done = subprocess.run(words, cwd=BUILD, capture_output=True, text=True, check=False)
        return "" if done.returncode == 0 else done.stderr

    def compiled(self, target: str) -> Path | None:
        stem = target.partition(".")[0]
        out = self.folder / target
        out.parent.mkdir(parents=True, exist_ok=True)
        source = f"csrc/cpu/kernels/{stem}.cpp"
        original = os.path.relpath(ROOT / source, BUILD)
        names = {original: str(self.folder / source), target: str(out), f"{target}.d": f"{out}.d"}
        return None if self.made(target, names) else out

    def verdict(self, target: str, file: str, line: int, text: str) -> str:
        """ "invalid", "equivalent", "caught: why" or "survived"."""
        if target not in self.unchanged:
            out = self.compiled(target)
            assert out is not None, f"{target} does not compile unchanged"
            self.unchanged[target] = out.read_bytes()
        path = self.folder / "csrc/cpu/kernels" / file
        original = path.read_text()
        lines = original.splitlines(keepends=True)
        try:
            path.write_text("".join([*lines[: line - 1], text, *lines[line:]]))
            out = self.compiled(target)
        finally:
            path.write_text(original)
        if out is None:
            return "invalid"
        if out.read_bytes() == self.unchanged[target]:
            return "equivalent"
        whole, library = ninja("targets", "rule", "link"), str(self.folder / "_cpu.so")
        assert not self.made(whole, {target: str(out), whole: library})
        return self.judged(target, library)

    def judged(self, target: str, library: str) -> str:
        stem, isa = Path(target).name.split(".")[:2]
        only = re.search(r"-DFASTATTN_ONLY_DTYPE=(\w+)", ninja("commands", "-s", target))
        short = {"f32": "float32", "f64": "float64", "bf16": "bfloat16", "f16": "float16"}
        dtypes = short[only[1]] if only else "float32,bfloat16"
        command = [sys.executable, "-c", _JUDGE, library, isa, dtypes, *OPERATORS[stem]]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
        except subprocess.TimeoutExpired:
            return "caught: it does not end"
        if done.returncode == 0:
            return "survived"
        if done.returncode == 1 and "Traceback" in done.stderr:
            raise RuntimeError(done.stderr[-2000:])
        last = done.stderr.strip().splitlines()[-1:] or [f"signal {-done.returncode}"]
        return f"caught: {last[0]}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no mutant after these")
    parser.add_argument("--seed", type=int, default=datetime.date.today().toordinal())
    parser.add_argument("--out", type=Path, default=ROOT / "build/mutants.jsonl")
    given = parser.parse_args(arguments)
    native: Any = __import__("fastattn._cpu", fromlist=["_cpu"])
    info = native.build_info()
    runs = {*info["supported"], *info["emulated"]}
    of = {name: files for name, files in objects().items() if name.split(".")[1] in runs}
    draw = random.Random(given.seed)
    counts = {"caught": 0, "survived": 0, "equivalent": 0, "invalid": 0}
    survivors, end = [], time.monotonic() + 60 * given.minutes
    with tempfile.TemporaryDirectory() as folder, given.out.open("a") as log:
        trial = Trial(Path(folder))
        while time.monotonic() < end:
            target = draw.choice(sorted(of))
            file = draw.choice(sorted(of[target]))
            found = changes(file)
            if not found:
                continue
            line, text = draw.choice(found)
            verdict = trial.verdict(target, file, line, text)
            counts[verdict.partition(":")[0]] += 1
            where = f"{file}:{line} in {target}: {text.strip()}"
            entry = {"seed": given.seed, "where": where, "verdict": verdict}
            print(json.dumps(entry), file=log, flush=True)
            print(f"{verdict[:90]:90} {where}", flush=True)
            survivors += [where] * (verdict == "survived")
    judged = counts["caught"] + counts["survived"]
    print(f"\n{counts['caught']} of {judged} mutants caught; {counts['equivalent']} changed no "
          f"machine code, {counts['invalid']} did not compile. Survivors:")  # fmt: skip
    print(*survivors, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
