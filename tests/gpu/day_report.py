"""The page that `make gpu-day` writes: what is right, what is fast, what contradicts the model."""

from __future__ import annotations

import functools
import runpy
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import recorded

from fastattn.bench import results, summary

ROOT = Path(__file__).resolve().parents[2]
FAR = 0.15  # a measurement that differs from its prediction by more contradicts the model
SHOWN = 5  # failures of a step
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
    bad = [row for row in rows if row["status"] in ("WRONG", "ERROR", "CRASHED", "HUNG")]
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
    lines = [f"# A day on {machine.get('gpu', 'an unknown GPU')}", ""]
    lines += [f"torch {machine.get('torch')}, commit {machine.get('commit')}.", ""]
    if machine.get("capability") is None:
        lines += ["**A rehearsal. No time in it is one of a GPU.**", ""]
    lines += ["## What is right", "", "| step | | seconds | |", "| --- | --- | --- | --- |"]
    for name, step in steps.items():
        words = step["words"].replace("|", "\\|")
        lines.append(f"| {name} | **{step['status']}** | {step['seconds']:.0f} | {words} |")
    lines += ["", *_failures(folder, steps)]
    rows = []
    for name in steps:
        if (folder / name / "results.jsonl").exists():
            rows += rows_of(folder / name)
    measured = [row for row in rows if row["ms"] is not None]
    lines += ["## What is fast", "", *_speeds(measured), ""]
    lines += ["## What contradicts the model", ""]
    lines += [*_contradictions(measured, machine.get("capability")), "", *_wrong(rows)]
    return "\n".join(lines).rstrip() + "\n"


def _failures(folder: Path, steps: Iterable[str]) -> Iterator[str]:
    """The first failures of each step, with the first line of the message."""
    for name in steps:
        found = recorded.results(folder / f"{name}.jsonl").values()
        bad = [one for one in found if one["outcome"] in BAD]
        for one in bad[:SHOWN]:
            reason = (one["reason"].splitlines() or [""])[0][:160]
            yield f"- {name}: `{one['test'].rpartition('::')[2]}`: {one['outcome']}: {reason}"
        if len(bad) > SHOWN:
            yield f"- {name}: {len(bad) - SHOWN} more, see {name}.jsonl"
        if bad:
            yield ""


def _name(row: Row) -> str:
    words = summary.option_words(row)
    return " ".join([row["op"], row["shape"], row["dtype"], row["pass"], *words])


def _cells(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """Cell -> provider -> row."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(_name(row), {})[row["provider"]] = row
    return found


def _speeds(rows: list[Row]) -> Iterator[str]:
    """A line for each cell: our kernels beside the fastest of the others."""
    yield "TFLOP/s of visible pairs; for decoding GB/s. The rival is the fastest of PyTorch's."
    yield ""
    yield f"| cell | {' | '.join(OURS)} | rival | ours / rival |"
    yield "| --- |" + " --- |" * (len(OURS) + 2)
    for name, cell in _cells(rows).items():
        rivals = [cell[rival] for rival in RIVALS if rival in cell]
        ours = [cell[our] for our in OURS if our in cell]
        best = min(rivals, key=lambda row: row["ms"], default=None)
        ratio = ""
        if best and ours:
            ratio = f"{best['ms'] / min(row['ms'] for row in ours):.2f}"
        numbers = [_rate(cell.get(our)) for our in OURS]
        rival = f"{best['provider']} {_rate(best)}" if best else "none"
        yield f"| {name} | {' | '.join(numbers)} | {rival} | {ratio} |"


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


def _contradictions(rows: list[Row], capability: str | None) -> Iterator[str]:
    """Each measured cell of the model, marked where it is far off; then the floors."""
    if capability != "9.0":
        yield "The model of docs/hopper.md is one of compute capability 9.0 alone."
        return
    yield "| cell | measured | predicted | measured / predicted | |"
    yield "| --- | --- | --- | --- | --- |"
    for row in rows:
        expected = predicted(row) if row["provider"] == "fastattn@cuda" else None
        if expected is not None:
            tflops = row["gflops"] / 1e3
            ratio = tflops / expected
            verdict = "" if abs(ratio - 1) <= FAR else "**contradicts**"
            yield f"| {_name(row)} | {tflops:.0f} | {expected:.0f} | {ratio:.2f} | {verdict} |"
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


def _wrong(rows: list[Row]) -> Iterator[str]:
    """What the benchmark refused to time: its results exceed the bound, or it failed."""
    bad = [row for row in rows if row["status"] in ("WRONG", "ERROR", "CRASHED", "HUNG")]
    if bad:
        yield "Not timed:"
        yield ""
    for row in bad[: 4 * SHOWN]:
        yield f"- {row['provider']}: {_name(row)}: {row['status']}: {row['reason'][:160]}"
