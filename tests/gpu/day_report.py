"""The page that `make gpu-day` writes: what is right, what is fast, what contradicts the model.

`report` has one page whatever was found: the worst of each. `cells` has everything that was timed.
"""

from __future__ import annotations

import functools
import json
import runpy
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import recorded

from fastattn.bench import results, summary

ROOT = Path(__file__).resolve().parents[2]
FAR = 0.15  # a measurement that differs from its prediction by more contradicts the model
FAILURES, SHOWN = 6, 3  # lines of the page for failed tests, and for cells of a kind
NOT_TIMED = ("WRONG", "ERROR", "CRASHED", "HUNG")
BAD = ("failed", "crashed", "interrupted")  # outcomes of a test
RIVALS = ("torch@cudnn", "torch@flash", "torch@efficient", "torch-flex", "torch@math", "torch")
OURS = ("fastattn@cuda", "fastattn@sm_80", "fastattn@triton")
Row = dict[str, Any]


def counts(found: Iterable[Mapping[str, Any]]) -> str:
    """How many tests have which outcome."""
    outcomes = [one["outcome"] for one in found]
    kinds = ("passed", *BAD, "skipped")
    return ", ".join(f"{outcomes.count(k)} {k}" for k in kinds if k in outcomes) or "no test"


def judge_speed(folder: Path, code: int) -> tuple[str, str]:
    """The status of a run of the benchmark, and why."""
    try:
        rows = rows_of(folder)
    except (OSError, results.ResultFileError) as error:
        return "failed", f"exit code {code}: {error}"
    by_status = {row["status"]: row for row in rows}
    if "SKIPPED" in by_status:
        left = len({_name(row) for row in rows if row["status"] == "SKIPPED"})
        return "stopped", f"its time was used up before {left} cells"
    bad = [row for row in rows if row["status"] in NOT_TIMED]
    ours = [row for row in bad if row["provider"] in OURS]
    words = f"{sum(row['ms'] is not None for row in rows)} rows measured"
    if bad:
        words += f", {len(bad)} failed, {len(ours)} of them ours"
    measured = any(row["ms"] is not None for row in rows if row["provider"] in OURS)
    return ("failed" if ours or not measured else "passed"), words


def rows_of(folder: Path) -> list[Row]:
    """The rows that a run has measured, also one that was killed."""
    return summary.summarise(results.load(folder / "results.jsonl"))


def report(folder: Path, state: Mapping[str, Any]) -> str:
    machine, steps = state.get("machine", {}), state["steps"]
    rows = _all_rows(folder, steps)
    measured = [row for row in rows if row["ms"] is not None]
    lines = [*_title("A day", machine), "## What is right", "", *_steps(steps)]
    lines += [*_failures(folder, steps), *_verdicts(folder)]
    lines += ["## What is fast", "", *_fast(measured), "", *_orders(folder)]
    lines += ["## What contradicts the model", ""]
    lines += [*_contradictions(measured, machine.get("capability")), ""]
    lines += _short(_not_timed(rows), "cells.md")
    return "\n".join(lines).rstrip() + "\n"


def cells(folder: Path, state: Mapping[str, Any]) -> str:
    """Every cell, with its prediction, and all that was not timed."""
    machine = state.get("machine", {})
    rows = _all_rows(folder, state["steps"])
    measured = [row for row in rows if row["ms"] is not None]
    lines = [*_title("All cells of a day", machine), UNITS, "", *TABLE]
    lines += [line for _, _, line in _compared(measured)]
    if machine.get("capability") == MODELLED:
        lines += ["", *MODEL_TABLE, *(line for _, line in _modelled(measured))]
    lines += ["", *_not_timed(rows), "", *_measured_orders(folder)]
    return "\n".join(lines).rstrip() + "\n"


def _title(words: str, machine: Mapping[str, Any]) -> Iterator[str]:
    yield f"# {words} on {machine.get('gpu', 'an unknown GPU')}"
    yield ""
    yield f"torch {machine.get('torch')}, commit {machine.get('commit')}."
    yield ""
    if machine.get("capability") is None:
        yield "**A rehearsal. No time in it is one of a GPU.**"
        yield ""


def _all_rows(folder: Path, steps: Iterable[str]) -> list[Row]:
    with_results = [name for name in steps if (folder / name / "results.jsonl").exists()]
    return [row for name in with_results for row in rows_of(folder / name)]


def _steps(steps: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for the steps that passed, a row for each of the others."""
    passed = [
        f"{name} ({step['words']}{step['words'] and ', '}{step['seconds']:.0f} s)"
        for name, step in steps.items()
        if step["status"] == "passed"
    ]
    yield f"Passed: {'; '.join(passed) or 'nothing'}."
    yield ""
    if len(passed) == len(steps):
        return
    yield "| step | | seconds | |"
    yield "| --- | --- | --- | --- |"
    for name, step in steps.items():
        if step["status"] != "passed":
            words = step["words"].replace("|", "\\|")
            yield f"| {name} | **{step['status']}** | {step['seconds']:.0f} | {words} |"
    yield ""


def _failures(folder: Path, steps: Iterable[str]) -> Iterator[str]:
    """The first failures, one of each step before the second of any, with their messages."""
    found = []
    for name in steps:
        tests = recorded.results(folder / f"{name}.jsonl").values()
        for n, one in enumerate(test for test in tests if test["outcome"] in BAD):
            reason = (one["reason"].splitlines() or [""])[0][:160]
            test = one["test"].rpartition("::")[2]
            found.append((n, f"- {name}: `{test}`: {one['outcome']}: {reason}"))
    found.sort(key=lambda failure: failure[0])
    yield from _short([line for _, line in found], "the .jsonl of each step", FAILURES)
    if found:
        yield ""


def _verdicts(folder: Path) -> Iterator[str]:
    """What is kept for this GPU: the verdicts of the first-use check, and those of verify."""
    found = []
    if entries := _entries(folder / "first-use/selftest.json"):
        wrong = [" ".join(e[k] for k in ("backend", "op", "dtype")) for e in entries if e["faults"]]
        names = f" ({', '.join(wrong[:SHOWN])}{', ...' * (len(wrong) > SHOWN)})" if wrong else ""
        found.append(f"first use: {len(entries)} kernels checked, {len(wrong)} wrong{names}")
    for step in sorted(folder.glob("verify-*/")):
        suites = [ElementTree.parse(path).getroot() for path in step.glob("*.xml")]
        tests, failures, skipped = (
            sum(int(suite.get(kind, 0)) for suite in suites)
            for kind in ("tests", "failures", "skipped")
        )
        found.append(f"{step.name}: {tests} checks, {failures} failed, {skipped} declined")
    if found:
        yield f"Kept for this GPU: {'; '.join(found)}."
        yield ""


def _orders(folder: Path) -> Iterator[str]:
    """The orders of backends that tune has measured, and the operators of each."""
    found: dict[str, list[str]] = {}
    for entry in _entries(folder / "tune/evidence.json"):
        words = f"{entry['op']} {'/'.join(entry['dtype'])}"
        found.setdefault(" > ".join(entry["use"]), []).append(words)
    if found:
        orders = (f"{order}: {', '.join(sorted(words))}" for order, words in found.items())
        yield f"The order of backends by tune, whose times are in cells.md: {'; '.join(orders)}."
        yield ""


def _measured_orders(folder: Path) -> Iterator[str]:
    for entry in _entries(folder / "tune/evidence.json"):
        about = f"{entry['op']} {'/'.join(entry['dtype'])}"
        yield f"- tune: {about}: {' > '.join(entry['use'])}: {entry['source']}"


def _entries(path: Path) -> list[dict[str, Any]]:
    """The entries of a file that the library keeps for a GPU; none where there is no file."""
    try:
        found: list[dict[str, Any]] = json.loads(path.read_text())["entries"]
    except OSError:
        return []
    return found


def _short(lines: Iterable[str], where: str, limit: int = SHOWN) -> Iterator[str]:
    """The first items of a list, and where the others are."""
    lines = list(lines)
    yield from lines[:limit]
    if len(lines) > limit:
        yield f"- {len(lines) - limit} more: see {where}"


def _name(row: Row) -> str:
    words = summary.option_words(row)
    return " ".join([row["op"], row["shape"], row["dtype"], row["pass"], *words])


def _cells(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """Cell -> provider -> row."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(_name(row), {})[row["provider"]] = row
    return found


UNITS = "TFLOP/s of visible pairs; for decoding GB/s. The rival is the fastest of PyTorch's."
TABLE = (
    f"| cell | {' | '.join(OURS)} | rival | ours / rival |",
    "| --- |" + " --- |" * (len(OURS) + 2),
)


def _compared(rows: list[Row]) -> Iterator[tuple[str, float | None, str]]:
    """The operator of each cell, our speed as a multiple of the fastest rival's, and its row."""
    for name, cell in _cells(rows).items():
        rivals = [cell[rival] for rival in RIVALS if rival in cell]
        ours = [cell[our] for our in OURS if our in cell]
        best = min(rivals, key=lambda row: row["ms"], default=None)
        ratio = best["ms"] / min(row["ms"] for row in ours) if best and ours else None
        numbers = [_rate(cell.get(our)) for our in OURS]
        rival = f"{best['provider']} {_rate(best)}" if best else "none"
        words = "" if ratio is None else f"{ratio:.2f}"
        line = f"| {name} | {' | '.join(numbers)} | {rival} | {words} |"
        yield next(iter(cell.values()))["op"], ratio, line


def _fast(rows: list[Row]) -> Iterator[str]:
    """Each operator beside the fastest rival, then the best and the worst cells."""
    compared = list(_compared(rows))
    found = [(op, ratio, line) for op, ratio, line in compared if ratio is not None]
    yield f"Ours / rival, in {len(found)} of {len(compared)} cells, all of which are in cells.md:"
    yield ""
    yield "| operator | cells | least | median | greatest | ours is faster in |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for op in dict.fromkeys(op for op, _, _ in found):
        ratios = [ratio for other, ratio, _ in found if other == op]
        numbers = (min(ratios), statistics.median(ratios), max(ratios))
        words = " | ".join(f"{x:.2f}" for x in numbers)
        yield f"| {op} | {len(ratios)} | {words} | {sum(ratio > 1 for ratio in ratios)} |"
    yield ""
    yield f"The worst and the best cells. {UNITS}"
    yield ""
    yield from TABLE
    found.sort(key=lambda cell: cell[1])
    ends = found if len(found) <= 2 * SHOWN else found[:SHOWN] + found[-SHOWN:]
    yield from (line for _, _, line in ends)


def _rate(row: Row | None) -> str:
    if row is None:
        return ""
    if row["op"] == "decode":
        return f"{row['gbs']:.0f}"
    tflops = row["gflops"] / 1e3
    return f"{tflops:.3g}" if tflops >= 0.01 else f"{row['ms']:.3g} ms"


@functools.cache
def _model() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs/make_hopper_picture.py"))


def predicted(row: Row) -> float | None:
    """TFLOP/s that the model of docs/hopper.md predicts for a row of ours; None if it has none."""
    sizes = dict(part.split("=") for part in row["shape"].split(","))
    width, length = (int(sizes.get(key, 0)) for key in ("D", "L"))
    plain = row["weights"] == row["option"] == "none" and row["mask"] in ("none", "causal")
    if not plain or (row["op"], row["dtype"]) != ("sdpa", "bf16") or not length or "Dv" in sizes:
        return None
    if (width, width) not in _model()["WIDTHS"]:
        return None
    causal = row["mask"] == "causal"
    if row["pass"] == "fwd":
        return float(_model()["Shape"](width, width).tflops(length, causal))
    if row["pass"] == "bwd":
        return float(_model()["backward_tflops"](width, width, length, causal))
    return None


MODELLED = "9.0"  # the compute capability of the model
MODEL_TABLE = (
    "| cell | measured | predicted | measured / predicted | |",
    "| --- | --- | --- | --- | --- |",
)


def _modelled(rows: list[Row]) -> Iterator[tuple[float, str]]:
    """Measured / predicted of each measured cell of the model, and its row."""
    for row in rows:
        expected = predicted(row) if row["provider"] == "fastattn@cuda" else None
        if expected is not None:
            tflops = row["gflops"] / 1e3
            ratio = tflops / expected
            verdict = "**contradicts**" if _is_far(ratio) else ""
            numbers = f"{tflops:.0f} | {expected:.0f} | {ratio:.2f} | {verdict}"
            yield ratio, f"| {_name(row)} | {numbers} |"


def _is_far(ratio: float) -> bool:
    return abs(ratio - 1) > FAR


def _contradictions(rows: list[Row], capability: str | None) -> Iterator[str]:
    """The cells that are farthest off the model; then the floors."""
    if capability != MODELLED:
        yield f"The model of docs/hopper.md is one of compute capability {MODELLED} alone."
        return
    found = list(_modelled(rows))
    far = sorted((x for x in found if _is_far(x[0])), key=lambda x: -abs(x[0] - 1))
    yield f"{len(far)} of {len(found)} predicted cells are more than {FAR:.0%} off. The farthest:"
    yield ""
    yield from (*MODEL_TABLE, *(line for _, line in far[: 2 * SHOWN]))
    yield ""
    yield "Floors:"
    yield ""
    yield from _floors(_cells(rows))


# Of a floor: the words of its cells, the measured number, and the least that it may be.
FLOORS: list[tuple[str, Callable[[Row], bool], Callable[[dict[str, Row]], float | None], float]] = [
    ("forward, 128 columns, 8k, full: TFLOP/s", lambda row: _is(row, "fwd", "none"),
     lambda cell: _tflops(cell), 500),
    ("forward, 128 columns, 8k, causal: TFLOP/s", lambda row: _is(row, "fwd", "causal"),
     lambda cell: _tflops(cell), 480),
    ("backward, 128 columns, 8k, full: of cuDNN", lambda row: _is(row, "bwd", "none"),
     lambda cell: _times(cell, "torch@cudnn"), 0.6),
    ("attention in bf16: of FlashAttention-2", lambda row: row["op"] == "sdpa",
     lambda cell: _times(cell, "torch@flash"), 1.0),
    ("decoding: of the bandwidth of a copy", lambda row: row["op"] == "decode",
     lambda cell: _bandwidth(cell), 0.85),
    ("additive attention: times PyTorch", lambda row: row["op"] == "additive",
     lambda cell: _times(cell, "torch"), 15),
    ("memory hops of bAbI's size: times PyTorch",
     lambda row: row["op"] == "memory_hops" and "N=50" in row["shape"],
     lambda cell: _times(cell, "torch"), 10),
]  # fmt: skip


def _is(row: Row, passes: str, mask: str) -> bool:
    sizes = row["shape"].split(",")
    same = (row["op"], row["pass"], row["mask"], row["dtype"]) == ("sdpa", passes, mask, "bf16")
    return same and row["option"] == "none" and "L=8192" in sizes and "D=128" in sizes


def _tflops(cell: dict[str, Row]) -> float | None:
    return cell["fastattn@cuda"]["gflops"] / 1e3 if "fastattn@cuda" in cell else None


def _times(cell: dict[str, Row], rival: str) -> float | None:
    """How many times as fast as a rival."""
    if "fastattn@cuda" not in cell or rival not in cell:
        return None
    return cell[rival]["ms"] / cell["fastattn@cuda"]["ms"]


def _bandwidth(cell: dict[str, Row]) -> float | None:
    share = cell.get("fastattn@cuda", {}).get("percent_of_bandwidth")
    return None if share is None else share / 100


def _floors(cells: dict[str, dict[str, Row]]) -> Iterator[str]:
    """The least of the measured cells that a floor speaks of."""
    for words, of_it, number, least in FLOORS:
        found = [
            (value, name)
            for name, cell in cells.items()
            if of_it(next(iter(cell.values()))) and (value := number(cell)) is not None
        ]
        if not found:
            yield f"- {words}: at least {least:g}: not measured"
            continue
        value, name = min(found)
        verdict = "met" if value >= least else f"**missed** by {name}"
        yield f"- {words}: at least {least:g}, measured {value:.3g}: {verdict}"


def _not_timed(rows: list[Row]) -> Iterator[str]:
    """What the benchmark refused to time: its results exceed the bound, or it failed."""
    for row in rows:
        if row["status"] in NOT_TIMED:
            words = f"{row['status']}: {row['reason'][:160]}"
            yield f"- not timed: {row['provider']}: {_name(row)}: {words}"
