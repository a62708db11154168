"""The result file: one JSON document with the raw samples, and everything needed to judge them.

Format, version, environment, settings, providers (and why one is missing), the best value of each
peak, how the run ended; and the cells, each with its FLOPs, the status of each provider, and its
rounds: guards and times. `rows` are computed from these, for other programs.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastattn.bench.cells import Cell

FORMAT = "fastattn-bench"
VERSION = 2


@dataclass
class Outcome:
    """The outcome of one provider on one cell.

    status     ok, UNAVAILABLE (see reason), WRONG (not timed), ERROR, CRASHED, HUNG, SKIPPED (the
               time budget was used up)
    max_error  the error of `worst_tensor`, the tensor that is closest to its `bound`; `largest` is
               max|ref|, which the relative error refers to
    compared   how much was compared
    """

    status: str = "ok"
    reason: str = ""
    max_error: float | None = None
    bound: float | None = None
    largest: float | None = None
    worst_tensor: str = ""
    compared: str = ""
    peak_bytes: int | None = None
    inner: int | None = None

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def relative_error(self) -> float | None:
        return None if self.max_error is None or not self.largest else self.max_error / self.largest


@dataclass
class Round:
    """One sample of every provider, in random order, between two measurements of the peak.

    guard          the peaks measured before and after, in GFLOP/s
    share          the least share of its threads' time that a measurement of the peak received
    attention      the share of a whole model's time that its attention took
    read           the read bandwidth measured after it, in GB/s; 0 unless data comes from memory
    guard_seconds  the duration of the second measurement: about that of a provider's sample
    probes         microseconds of a short kernel just before and just after the sample; none on
                   a GPU and in older files
    pushed         how often a second the sample's threads lost a core to another process
    """

    guard: Sequence[float]
    ms: dict[str, float]
    share: float = 1.0
    guard_seconds: float = 0.01
    attention: dict[str, float] = field(default_factory=dict)
    read: float = 0.0
    probes: dict[str, list[float]] = field(default_factory=dict)
    pushed: dict[str, float] = field(default_factory=dict)

    @property
    def peak(self) -> float:
        """The higher guard, because disturbances only lower a peak."""
        return max(self.guard)


@dataclass
class CellResult:
    cell: Cell
    flops: int
    bytes_touched: int
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)

    def ready(self) -> list[str]:
        """The providers that can be timed."""
        return [name for name, outcome in self.outcomes.items() if outcome.ok]


@dataclass
class Peak:
    """A rate in GFLOP/s or GB/s: the best of the run, and whether it was measured or estimated.

    samples   at the start, in the middle and at the end of the run, in addition to the guards
    unit      the unit of the processor that reached it, if several compute the dtype
    """

    rate: float
    method: str
    samples: list[float] = field(default_factory=list)
    unit: str = ""


@dataclass
class Result:
    environment: dict[str, Any]
    settings: dict[str, Any]
    providers: dict[str, dict[str, Any]]
    cells: list[CellResult] = field(default_factory=list)
    peaks: dict[str, Peak] = field(default_factory=dict)
    ended: str = "complete"  # or "interrupted" by Ctrl-C, or "killed" while it was measuring


# What makes two results comparable.
_CONDITIONS = {
    "environment": ("cpu", "isa", "torch", "fastattn", "commit", "python"),
    "settings": ("threads", "cache", "seed", "baseline"),
}


def differences(before: Result, after: Result) -> list[str]:
    """The conditions that differ, in words."""
    pairs = [
        (name, *(getattr(result, where).get(name) for result in (before, after)))
        for where, names in _CONDITIONS.items()
        for name in names
    ]
    return [f"{name}: {old} and {new}" for name, old, new in pairs if old != new]


def save_json(result: Result, rows: Iterable[dict[str, Any]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(result)}
    cells = head.pop("cells")
    path.write_text(json_lines(head, rows=rows, cells=cells))


def json_lines(head: dict[str, Any], **lists: Iterable[dict[str, Any]]) -> str:
    """One JSON object, an entry a line. Fractions have five digits: clocks resolve no more."""
    lines = [f"{json.dumps(name)}: {json.dumps(_rounded(x))}" for name, x in head.items()]
    for name, entries in lists.items():
        texts = [json.dumps(_rounded(entry)) for entry in entries]
        lines.append(f"{json.dumps(name)}: [\n" + ",\n".join(texts) + "\n]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _rounded(data: Any) -> Any:
    if isinstance(data, float):
        return data if data.is_integer() else float(f"{data:.5g}")
    if isinstance(data, dict):
        return {name: _rounded(entry) for name, entry in data.items()}
    return [_rounded(entry) for entry in data] if isinstance(data, list | tuple) else data


def save_csv(rows: Sequence[dict[str, Any]], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else ["op"])
        writer.writeheader()
        writer.writerows(rows)


def load(path: Path) -> Result:
    """Reads a result. Raises ValueError, which names the file and the error."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.get("format") != FORMAT:
            raise ValueError(f"{path} is not a result of fastattn bench")
        if document["version"] != VERSION:
            raise ValueError(
                f"{path} has format version {document['version']}, this is version {VERSION}: "
                "measure again, with `fastattn bench run`"
            )
        result = Result(**_known(Result, document))
        result.cells = [_cell(**_known(CellResult, data)) for data in document["cells"]]
        result.peaks = {kind: Peak(**peak) for kind, peak in document["peaks"].items()}
        return result
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is not a result of fastattn bench ({reason})") from error


def _known(kind: type, data: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record, without those that are not known any more, such as joules."""
    return {name: data[name] for name in kind.__annotations__ if name in data}


def _cell(cell: Any, outcomes: Any, rounds: Any, **counts: int) -> CellResult:
    found = {name: Outcome(**outcome) for name, outcome in outcomes.items()}
    turns = [Round(**_known(Round, turn)) for turn in rounds]
    return CellResult(Cell.from_json(cell), outcomes=found, rounds=turns, **counts)
