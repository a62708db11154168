"""The result file with all raw samples, and the statistics, such as its computed `rows`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from statistics import median as median
from typing import Any, NamedTuple

import torch

from fastattn.bench import ops
from fastattn.bench.cells import Cell, with_defaults

FORMAT = "fastattn-bench"
VERSION = 2


@dataclass
class Outcome:
    """The outcome of one provider on one cell.

    status     ok, UNAVAILABLE (see reason), WRONG (not timed), ERROR, CRASHED, HUNG, SKIPPED (the
               time budget was used up)
    max_error  the error of `worst_tensor`, the tensor that is closest to its `bound`; `largest` is
               max|ref|, which the relative error refers to
    compared   how much of the output was compared
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
    probes         microseconds of a short kernel just before and just after the sample; none on
                   a GPU and in older files
    pushed         how often a second the sample's threads lost a core to another process
    """

    guard: Sequence[float]
    ms: dict[str, float]
    share: float = 1.0
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


def differences(before: Result, after: Result) -> list[str]:
    """The conditions that differ, in words."""
    words = []
    for where, names in (
        ("environment", ("cpu", "isa", "torch", "fastattn", "commit", "python")),
        ("settings", ("threads", "seed", "baseline")),
    ):
        old, new = getattr(before, where), getattr(after, where)
        changed = (name for name in names if old.get(name) != new.get(name))
        words += [f"{name}: {old.get(name)} and {new.get(name)}" for name in changed]
    return words


def save_json(result: Result, rows: Iterable[dict[str, Any]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(result)}
    cells = head.pop("cells")
    path.write_text(json_lines(head, rows=rows, cells=cells))


def json_lines(head: dict[str, Any], **lists: Iterable[dict[str, Any]]) -> str:
    """One JSON object, one entry per line. Fractions have five digits: clocks resolve no more."""

    def text(data: Any) -> str:
        whole = json.dumps(data)
        return json.dumps(json.loads(whole, parse_float=lambda x: float(f"{float(x):.5g}")))

    lines = [f"{json.dumps(name)}: {text(x)}" for name, x in head.items()]
    for name, entries in lists.items():
        lines.append(f"{json.dumps(name)}: [\n" + ",\n".join(map(text, entries)) + "\n]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


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
    """The fields of a record, without obsolete fields such as joules."""
    return {name: data[name] for name in kind.__annotations__ if name in data}


def _cell(cell: Any, outcomes: Any, rounds: Any, **counts: int) -> CellResult:
    # In a result from before a size was added, the size has its default.
    cell["sizes"] = with_defaults(cell["sizes"], ops.get(cell["op"]).SIZES)
    by_provider = {name: Outcome(**outcome) for name, outcome in outcomes.items()}
    turns = [Round(**_known(Round, turn)) for turn in rounds]
    return CellResult(Cell(**_known(Cell, cell)), outcomes=by_provider, rounds=turns, **counts)


# Statistics

CONFIDENCE = 0.95
MIN_KEPT = 3  # with fewer samples there is no interval
# Quantiles of Student's t for intervals of 95 % of three to five samples.
_STUDENT = {3: 4.303, 4: 3.182, 5: 2.776}
# Times within this ratio are called the same, however narrow their interval is.
SAME_WITHIN = 0.02


def quantile(samples: Sequence[float], share: float) -> float:
    """Linear interpolation between the order statistics."""
    return float(torch.tensor(samples, dtype=torch.float64).quantile(share))


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """An interval that contains the median of positive times or ratios with at least 95 %.

    From six samples on, its ends are two of them: n samples are all above the median with
    probability 2^-n, and so on. For three to five samples it is Student's interval of the
    logarithms; for fewer, the extremes.
    """
    ordered, count = sorted(samples), len(samples)
    if count in _STUDENT and ordered[0] > 0:
        logs = [math.log(x) for x in ordered]
        half = _STUDENT[count] * stdev(logs) / math.sqrt(count)
        return math.exp(fmean(logs) - half), math.exp(fmean(logs) + half)
    cut, below = 0, 1  # samples cut off at either end, and 2^n times the probability beyond
    while 2 * (below + math.comb(count, cut + 1)) <= (1 - CONFIDENCE) * 2**count:
        cut += 1
        below += math.comb(count, cut)
    return ordered[cut], ordered[-1 - cut]


def verdict(low: float, high: float) -> str:
    """FASTER, SLOWER or SAME if it holds for the whole interval of a speed-up, else UNSURE."""
    if low > 1 + SAME_WITHIN:
        return "FASTER"
    if high < 1 / (1 + SAME_WITHIN):
        return "SLOWER"
    if low >= 1 / (1 + SAME_WITHIN) and high <= 1 + SAME_WITHIN:
        return "SAME"
    return "UNSURE"


# A round counts if the lower of the peaks before and after it is at least this share of the higher.
# Slow changes between cells do not disqualify a round: the clock depends on the load.
QUIET = 0.9
# A round counts only if its higher peak is at least this share of the best peak in the same cell.
STEADY = 0.75
# A round counts only if its threads received this share of their cores: sharing one of two cores
# with another process leaves three quarters, and waking the threads takes up to a tenth of a short
# measurement.
QUIET_SHARE = 0.8
# Samples are compared if their probes took at most this many times as long as usual in the run, and
# if their threads lost a core at most as many times as often, or at most once in a sample of 20 ms.
COMPARABLE = 1.25
PUSHED = 50.0
# The limit of the slowness of a sample: the most that a neighbour on a Xeon with AMX slows kernels
# on tiles down.
SLOWEST = 3.0


def quiet_rounds(rounds: list[Round]) -> list[Round]:
    """The rounds of a cell that were undisturbed, according to the guards."""
    floor = STEADY * max((turn.peak for turn in rounds), default=0.0)
    quiet = (turn for turn in rounds if min(turn.guard) >= QUIET * turn.peak)
    return [turn for turn in quiet if turn.peak >= floor and turn.share >= QUIET_SHARE]


class Usual(NamedTuple):
    """The usual state of a provider's cores: the lower quartile of a run."""

    probe: float  # microseconds
    pushed: float  # how often a second a core is lost


def usual_states(cells: Iterable[CellResult]) -> dict[str, Usual]:
    """The usual state of each provider in the whole run; none without probes."""
    rounds = [turn for cell in cells for turn in cell.rounds if turn.probes]
    usual = {}
    for name in dict.fromkeys(name for turn in rounds for name in turn.probes):
        beside = [probe for turn in rounds for probe in turn.probes.get(name, ())]
        pushed = [turn.pushed[name] for turn in rounds if name in turn.probes]
        usual[name] = Usual(quantile(beside, 0.25), quantile(pushed, 0.25))
    return usual


def slowness(turn: Round, names: Collection[str], usual: Mapping[str, Usual]) -> float:
    """By which factor the cores were slower than usual during a sample, at most `SLOWEST`."""
    slowest = 0.0
    for name in usual.keys() & set(names):
        is_pushed = turn.pushed[name] > PUSHED + COMPARABLE * usual[name].pushed
        probe = sum(turn.probes[name]) / 2 / usual[name].probe
        slowest = max(slowest, SLOWEST if is_pushed else probe)
    return min(SLOWEST, slowest)


def comparable_rounds(
    rounds: list[Round], names: Collection[str], usual: Mapping[str, Usual]
) -> list[Round]:
    """The rounds in which the samples of these providers ran in the usual state.

    Without probes, the guards beside the round decide.
    """
    chosen = rounds if usual else quiet_rounds(rounds)
    both = [turn for turn in chosen if turn.ms.keys() >= set(names)]
    return [turn for turn in both if slowness(turn, names, usual) <= COMPARABLE]


def speedup(
    rounds: list[Round], baseline: str, provider: str, usual: Mapping[str, Usual]
) -> dict[str, Any] | None:
    """The ratio of two providers, from the ratios within rounds; None without a common round.

    If too few rounds are comparable, all of them count. A disturbance that slowed the probes may
    have slowed only one of the providers, so the interval is widened by the same factor.
    """
    names, wider = (baseline, provider), 1.0
    chosen = comparable_rounds(rounds, names, usual)
    if not (comparable := len(chosen) >= MIN_KEPT):
        chosen = [turn for turn in rounds if turn.ms.keys() >= set(names)]
        if not chosen:
            return None
        wider = max(1.0, median([slowness(turn, names, usual) for turn in chosen]))
    ratios = [turn.ms[baseline] / turn.ms[provider] for turn in chosen]
    low, high = median_interval(ratios)
    low, high = low / wider, high * wider
    return {
        "speedup": median(ratios),
        "speedup_low": low,
        "speedup_high": high,
        "comparable": comparable,
        "verdict": verdict(low, high) if len(ratios) >= MIN_KEPT else "UNSURE",
    }
