"""Would the case tables see a bug? Changes random lines of kernels, one at a time.

    make mutants ARGS="--language cuda --sample 40 --minutes 60 --seed 1"

universalmutator makes the changes (an operator, a constant, a condition, a statement left out). The
changed source is compiled, and cases run until one fails (tests/support/mutant_judge.py): CPU
kernels with the commands of the build, CUDA kernels for the emulator, Triton kernels interpreted in
a changed copy of the package. A change that compiles to the same code is no mutant.

The report is one line of JSON a run, added to the file of the runs before: the score over time. It
lists the survivors, each to be read: a case is missing, or the change is harmless.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
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

ROOT = Path(__file__).resolve().parents[1]
PATHS = [ROOT / "tests" / name for name in ("support", "emulator", "cuda", "triton")]
BUILD = ROOT / "build/native/cpu"
NO_CASES = ("linear", "peak", "table", "unit")  # sources of the CPU without an operator
GRACE = 300  # seconds for the imports of a judge and its last case
# Lines without arithmetic, or whose change stops the compiler at once.
IGNORED = [r"^\s*//", r"^\s*#", r"^\s*(namespace|using|template|static_assert|inline constexpr)\b"]


class Kernels:
    """A copy of the sources and of the package, in which one line at a time is changed.

    A language lists its `units()`: what is compiled and judged at a time. `build(unit)` compiles it
    for the judge, and returns the code, or None if the compiler rejects it.
    """

    sources: str
    rules: tuple[str, ...] = ("universal.rules", "c_like.rules", "cpp.rules")

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds = folder.resolve(), seconds
        self.out = self.folder / "out"
        self.unchanged: dict[str, bytes] = {}  # unit -> its code
        self.files: dict[str, list[str]] = {}  # unit -> the files of kernels that it is made of
        ignored = shutil.ignore_patterns("__pycache__", "results")
        for name in ("csrc", "fastattn"):
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)

    def prepare(self, unit: str) -> None:
        """Build the unit without a change, which the judge must accept."""
        if unit not in self.unchanged:
            self.unchanged[unit] = self.build(unit)
            self.files[unit] = self.made_of(unit)
            found = self.judged(unit, self.seconds / 10)
            assert found == "survived", f"{unit} is wrong without a change: {found}"

    def made_of(self, unit: str) -> list[str]:
        """The files of kernels that the compiler has read."""
        folder = self.folder / self.sources
        paths = [Path(word).resolve() for word in (self.out / f"{unit}.d").read_text().split()]
        return sorted(str(path.relative_to(folder)) for path in paths if folder in path.parents)

    def verdict(self, unit: str, file: str, line: int, text: str) -> str:
        """Return "invalid", "equivalent", "survived" or "caught: why"."""
        path = self.folder / self.sources / file
        original = path.read_text()
        lines = original.splitlines(keepends=True)
        path.write_text("".join([*lines[: line - 1], text, *lines[line:]]))
        code = self.build(unit)
        if code is None or code == self.unchanged[unit]:
            verdict = "invalid" if code is None else "equivalent"
        else:
            verdict = self.judged(unit, self.seconds)
        path.write_text(original)
        return verdict

    def judged(self, unit: str, seconds: float) -> str:
        """Run the cases in a process of their own: a mutant may die, or never end."""
        paths = os.pathsep.join(map(str, [self.folder, *PATHS]))
        environment = {**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "1"}
        judge = [sys.executable, str(ROOT / "tests/support/mutant_judge.py")]
        words = [*judge, type(self).__name__, unit, str(self.folder), str(seconds)]
        limit = seconds + GRACE
        try:
            done = subprocess.run(words, env=environment, capture_output=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return "caught: it does not end"
        if done.returncode == 0:
            return "survived"
        (last,) = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it died"]
        return "invalid" if "undefined symbol" in last else f"caught: {last}"


class Cpu(Kernels):
    """Objects of the native build, compiled with the build's commands."""

    sources = "csrc/cpu"

    @staticmethod
    def ninja(*words: str) -> str:
        import ninja

        command = [str(Path(ninja.BIN_DIR, "ninja")), "-C", str(BUILD), "-t", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def units(self) -> list[str]:
        import fastattn._cpu as native

        info = native.build_info()
        isas = [*info["supported"], *info["emulated"]]
        found = re.findall(r"(?m)^((?:tiles/)?(\w+)\.(\w+)\.o):", self.ninja("targets", "all"))
        return [unit for unit, stem, isa in found if isa in isas and stem not in NO_CASES]

    def run(self, target: str, changed: dict[str, Path]) -> bool:
        """Run the command of the build that makes a file, with some words replaced."""
        words = shlex.split(self.ninja("commands", "-s", target))
        command = [str(changed.get(word, word)) for word in words]
        return subprocess.run(command, cwd=BUILD, capture_output=True).returncode == 0

    def build(self, unit: str) -> bytes | None:
        import fastattn._cpu as native

        out, library = self.out / unit, self.folder / "fastattn" / Path(native.__file__).name
        out.parent.mkdir(parents=True, exist_ok=True)
        source = f"{self.sources}/kernels/{unit.partition('.')[0]}.cpp"
        original = os.path.relpath(ROOT / source, BUILD)
        rules = out.with_suffix(".o.d")
        if not self.run(unit, {original: self.folder / source, unit: out, f"{unit}.d": rules}):
            return None
        whole = self.ninja("targets", "rule", "link")
        assert self.run(whole, {unit: out, whole: library})
        return out.read_bytes()


class Cuda(Kernels):
    """Kernels of one element type, compiled for the emulator and linked with all others."""

    sources = "csrc/cuda/kernels"

    def units(self) -> list[str]:
        import emulator

        emulator.build()
        units = [str(path.relative_to(emulator.FOLDER)) for path in emulator.FOLDER.rglob("*.o")]
        return [unit for unit in units if unit.endswith((".Bf16.o", ".F32.o"))]  # F16 is like Bf16

    def build(self, unit: str) -> bytes | None:
        import emulator

        source, element, _ = unit.rsplit(".", 2)
        try:
            emulator.build_changed(self.folder / "csrc", self.out, [source], element)
        except emulator.CannotBuild:
            return None
        return (self.out / unit).read_bytes()


class Triton(Kernels):
    """The files of the package that have kernels, which are interpreted."""

    sources, rules = "fastattn/backends/triton", ("universal.rules", "python.rules")

    def units(self) -> list[str]:
        files = (ROOT / self.sources).glob("*.py")
        return [path.name for path in files if kernel_lines(path.read_text())]

    def made_of(self, unit: str) -> list[str]:
        return [unit]

    def build(self, unit: str) -> bytes | None:
        try:
            tree = ast.parse((self.folder / self.sources / unit).read_text())
            compile(tree, unit, "exec")
        except SyntaxError:
            return None
        return ast.dump(tree).encode()


LANGUAGES = {"cpu": Cpu, "cuda": Cuda, "triton": Triton}


def kernel_lines(source: str) -> set[int]:
    """The lines in the bodies of a Triton file's kernels."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and "jit" in "".join(
            map(ast.dump, node.decorator_list)
        ):
            first = node.body[ast.get_docstring(node) is not None]
            lines |= set(range(first.lineno, (node.end_lineno or 0) + 1))
    return lines


def changes(path: Path, rules: Sequence[str]) -> dict[int, list[str]]:
    """The numbers of a file's lines, with the texts that may replace each."""
    from universalmutator import mutator

    source = path.read_text()
    lines = source.splitlines(keepends=True)
    chosen = kernel_lines(source) if path.suffix == ".py" else range(len(lines) + 1)
    texts: dict[int, list[str]] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        mutants = mutator.mutants_regexp(lines, ruleFiles=list(rules), ignorePatterns=IGNORED)
    for line, text, *_ in mutants:
        if line in chosen and may_compile(lines[line - 1], text):
            texts.setdefault(line, []).append(text)
    return texts


def may_compile(was: str, text: str) -> bool:
    """Leave out added lines, comments, and what is part of a type: brackets, references, digits."""
    pairs = zip(was, text, strict=False)
    at = next((n for n, (a, b) in enumerate(pairs) if a != b), 0)
    in_type = re.search(r"\S[<>&*]|[a-z]\d", was[max(at - 2, 0) : at + 1])
    return not in_type and text.count("\n") == 1 and not text.lstrip().startswith("/*")


def run(kernels: Kernels, options: argparse.Namespace) -> dict[str, object]:
    """Judge a sample of mutants; return the entry for the report."""
    draw, end = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    counts = {"caught": 0, "survived": 0, "equivalent": 0, "invalid": 0}
    survivors = []
    sources, units, unit = ROOT / kernels.sources, sorted(kernels.units()), ""
    while counts["caught"] + counts["survived"] < options.sample and time.monotonic() < end:
        unit = unit or draw.choice(units)
        kernels.prepare(unit)
        file = draw.choice(kernels.files[unit])
        texts = changes(sources / file, kernels.rules)
        if not texts:
            continue
        line = draw.choice(sorted(texts))
        text = draw.choice(texts[line])
        verdict = kernels.verdict(unit, file, line, text)
        counts[verdict.partition(":")[0]] += 1
        was = (sources / file).read_text().splitlines()[line - 1].strip()
        mutant = {"where": f"{file}:{line}", "in": unit, "was": was, "is": text.strip()}
        print(f"{verdict}\n    {mutant}", flush=True)
        survivors += [mutant] * (verdict == "survived")
        unit = unit if verdict in ("invalid", "equivalent") else ""
    score = counts["caught"] / max(counts["caught"] + counts["survived"], 1)
    return {"score": round(score, 3), **counts, "survivors": survivors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--language", choices=LANGUAGES, default="cpu")
    parser.add_argument("--sample", type=int, default=50, help="judge as many mutants")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no mutant after these")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--seconds", type=float, default=300.0, help="of cases for each mutant")
    parser.add_argument("--out", type=Path, default=ROOT / "build/mutants.jsonl")
    options = parser.parse_args()
    sys.path[:0] = map(str, [ROOT, ROOT / "tests/emulator"])
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    entry = {"commit": commit, "seed": options.seed, "language": options.language}
    with tempfile.TemporaryDirectory() as folder:
        kernels = LANGUAGES[options.language](Path(folder), options.seconds)
        entry |= run(kernels, options)
    with options.out.open("a") as report:
        print(json.dumps(entry), file=report)
    print(json.dumps(entry, indent=1))


if __name__ == "__main__":
    main()
