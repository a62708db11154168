"""Comparisons of results, and the documentation's figures, rendered from raw results."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from bench_results import a_result, bench, cell_of

from fastattn.bench import cli, machine, results, summary
from fastattn.bench.results import CellResult, Outcome, Peak, Result, Round

XEON = {"cpu_vendor": "GenuineIntel", "cpu_family": 6}
ZEN = {"cpu_vendor": "AuthenticAMD", "cpu_family": 25}


def two_lengths(scale: float = 1.0, lengths: tuple[int, ...] = (16, 32)) -> Result:
    """Two lengths, two providers; fastattn's times are multiplied by `scale`."""
    result = a_result([])
    times = [(4.0 + n / 99, scale * (2.0 + n / 198)) for n in range(9)]
    rounds = [Round((200.0, 200.0), {"torch": x, "fastattn": y}) for x, y in times]
    result.cells.clear()
    for length in lengths:
        right = Outcome(max_error=1e-7, largest=2.0, bound=1e-6, peak_bytes=length * 1000)
        wrong = Outcome("WRONG", "out is <i>off</i> & more")
        outcomes = {"torch": right, "fastattn": right, "broken<b>": wrong}
        cell = cell_of("sdpa", f"H=2,L={length},D=8")
        result.cells.append(CellResult(cell, 10**8, 10**6, outcomes, rounds))
    result.peaks = {
        "fma_f32": Peak(200.0, "measured", [190.0, 200.0]),
        "read_bandwidth": Peak(30.0, "measured", [30.0]),
        "copy_bandwidth": Peak(25.0, "torch copy", [25.0]),
    }
    return result


def saved(result: Result, path: Path) -> Path:
    """Write a result to a file."""
    results.save_json(result, summary.summarise(result), path)
    return path


@pytest.mark.parametrize(
    ("scale", "limit", "code", "verdict"),
    [
        (1.0, "5%", cli.OK, "SAME"),
        (1.2, "5%", cli.FAULTS, "SLOWER"),
        (1.2, "0.3", cli.OK, "SLOWER"),
    ],
)
def test_compare_fails_where_a_row_became_slower(
    scale: float,
    limit: str,
    code: int,
    verdict: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = saved(two_lengths(), tmp_path / "a.json")
    after = saved(two_lengths(scale), tmp_path / "b.json")
    assert bench("compare", str(before), str(after), "--fail-slower", limit) == code
    printed, complaints = capsys.readouterr()
    assert printed.count(f"fastattn: {verdict}") == 2
    assert printed.count("torch: SAME") == 2
    assert complaints.count("WORSE by more than 5%") == (2 if code else 0)
    # A ratio to the baseline of the same run is comparable between machines.
    assert bench("compare", str(before), str(after), "--metric", "speedup") == cli.OK
    assert verdict in capsys.readouterr().out


def test_compare_names_different_conditions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = two_lengths(lengths=(16, 64))
    other.environment["torch"], other.settings["threads"] = "3", 8
    before = saved(two_lengths(), tmp_path / "a.json")
    after = saved(other, tmp_path / "b.json")
    assert bench("compare", str(before), str(after)) == cli.OK
    printed = capsys.readouterr().out
    assert "Different conditions: torch: 2 and 3" in printed
    assert "Different conditions: threads: 1 and 8" in printed
    assert "2 rows: 0 better, 0 worse, 2 the same" in printed
    assert "4 rows are in one result alone: sdpa B=1,H=2,L=32,D=8 fp32 fwd torch" in printed
    nothing = saved(two_lengths(lengths=(8,)), tmp_path / "c.json")
    assert bench("compare", str(before), str(nothing)) == cli.USAGE
    assert bench("compare", str(before), str(after), "--fail-slower", "often") == cli.USAGE


# Documents


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_picture_is_drawn(theme: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    load_module("pictures").draw(two_lengths(), tmp_path / "p.svg", theme)
    assert "<svg" in (tmp_path / "p.svg").read_text()


def load_module(name: str = "render") -> ModuleType:
    """A script of benchmarks/ as a module."""
    path = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # where its tables are
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


@pytest.mark.parametrize(
    ("cpu", "flags", "more", "slug"),
    [
        ("Intel(R) Xeon(R) Processor @ 2.10GHz", ["avx2", "amx_bf16"], {**XEON, "cpu_model": 143},
         "intel-xeon-sapphire-rapids-amx_bf16"),
        ("AMD Ryzen 9 7950X 16-Core Processor", ["avx512_bf16"], {**ZEN, "cpu_model": 97},
         "amd-ryzen-9-7950x-zen4-avx512_bf16"),
        ("aarch64", ["asimd", "bf16", "sve"], {}, "aarch64-sve"),
        ("AMD EPYC", ["avx2"], {"gpu": "NVIDIA H200"}, "nvidia-h200"),
    ],
)  # fmt: skip
def test_the_folder_of_a_processor(
    cpu: str, flags: list[str], more: dict[str, object], slug: str
) -> None:
    assert machine.processor_slug({"cpu": cpu, "cpu_flags": flags, **more}) == slug


def test_committed_texts_match_committed_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["render.py", "--check"])
    assert load_module().main() == 0


def test_ranks_receive_and_compute_as_planned() -> None:
    found = load_module().load_ranks()
    for row in (row for result in found.values() for row in result["rows"]):
        if "received_planned" in row:
            planned = row["received_planned"], row["flops_planned"]
            assert (row["received"], row["flops"]) == planned
