"""The measured peak of a dtype, and the unit of the processor that reaches it; and verdicts on a
busy machine: which rounds count.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from bench_results import TINY

from fastattn import use_backend
from fastattn.bench import machine, results
from fastattn.bench.results import CellResult, Round
from fastattn.bench.worker import Probe, times_pushed


def fake_core(rates: dict[str, float], features: list[str]) -> ModuleType:
    """A native core whose units have these rates, of a processor with these features."""
    core = ModuleType("fake_core")
    core.__dict__.update(
        build_info=lambda: {"isa": "avx2", "supported": ["baseline", "avx2"]},
        set_isa=lambda name: None,
        processor=lambda: {"features": features},
        measure_peak=lambda kind, threads, seconds: rates.get(kind, 0.0),
    )
    return core


XEON = {"fma_f32": 446.0, "dot_bf16": 457.0, "tile_bf16": 6000.0, "fma_f16": 900.0, "fma_f64": 223}


@pytest.mark.parametrize(
    ("kind", "rates", "features", "expected"),
    [
        ("dot_bf16", XEON, ["amx_bf16", "avx512_fp16"], (6000.0, "tile_bf16", "measured")),
        ("dot_f16", XEON, ["amx_bf16", "avx512_fp16"], (900.0, "fma_f16", "measured")),
        ("fma_f32", XEON, ["amx_bf16", "avx512_fp16"], (446.0, "", "measured")),
        ("dot_f16", {"fma_f32": 118.0}, [], (118.0, "fma_f32", "measured")),
        # Built by a compiler without AMX: the measured rate is marked as no ceiling.
        (
            "dot_bf16",
            {"fma_f32": 446.0, "dot_bf16": 457.0},
            ["amx_bf16"],
            (457.0, "dot_bf16", "without amx_bf16, which was not built"),
        ),
    ],
)
def test_the_peak_of_a_dtype_is_its_fastest_unit(
    kind: str,
    rates: dict[str, float],
    features: list[str],
    expected: tuple[float, str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = fake_core(rates, features)
    monkeypatch.setattr(machine, "native_core", lambda: core)
    found, _ = machine.measure_peak(kind, 2, 0.01)
    assert (found.rate, found.unit, found.method) == expected


TWO = ("torch", "ours")


def a_round(ratio: float, **changed: tuple[str, float, float, float]) -> Round:
    """A round whose samples ran alone; `changed` has a provider, its probes and its count."""
    turn = Round((1.0, 1.0), {"torch": ratio, "ours": 1.0})
    for name, before, after, pushed in [(n, 30.0, 30.0, 0.0) for n in TWO] + [*changed.values()]:
        turn.probes[name], turn.pushed[name] = [before, after], pushed
    return turn


ALONE = [a_round(2.0) for _ in range(6)]


@pytest.mark.parametrize(
    "disturbed",
    [("torch", 60, 30, 0), ("ours", 30, 60, 0), ("torch", 30, 30, 80), ("ours", 38, 39, 0)],
)
def test_a_ratio_counts_if_both_samples_ran_in_the_usual_state(
    disturbed: tuple[str, float, float, float],
) -> None:
    turns = [*ALONE, *(a_round(9.0, by=disturbed) for _ in range(8))]
    usual = results.usual_states([CellResult(TINY, 1, 1, rounds=turns)])
    assert usual == {"torch": (30, 0), "ours": (30, 0)}
    assert results.comparable_rounds(turns, TWO, usual) == ALONE
    found = results.speedup(turns, *TWO, usual)
    assert found is not None
    assert (found["speedup"], found["verdict"], found["comparable"]) == (2, "FASTER", True)


def test_a_sample_is_compared_with_the_whole_run() -> None:
    """Load that lasts a whole cell is detected by the cells before and after it."""
    busy = [a_round(2.0, a=("torch", 60, 60, 0), b=("ours", 60, 60, 80)) for _ in range(6)]
    cells = [CellResult(TINY, 1, 1, rounds=turns) for turns in (ALONE, busy)]
    assert results.comparable_rounds(busy, TWO, results.usual_states(cells)) == []
    # Load that lasts the whole run is the machine's usual state.
    assert results.comparable_rounds(busy, TWO, results.usual_states(cells[1:])) == busy


@pytest.mark.parametrize(
    ("busy", "wider"), [(("torch", 45, 45, 0), 1.5), (("ours", 200, 9000, 0), 3)]
)
def test_slow_probes_widen_the_interval(
    busy: tuple[str, float, float, float], wider: float
) -> None:
    turns = [*ALONE[:2], *(a_round(2.5, by=busy) for _ in range(7))]
    found = results.speedup(turns, *TWO, dict.fromkeys(TWO, results.Usual(30, 0)))
    assert found is not None
    assert not found["comparable"]
    assert (found["speedup_low"], found["speedup_high"]) == pytest.approx((2 / wider, 2.5 * wider))


def test_a_probe_restores_threads_and_backends() -> None:
    threads = torch.get_num_threads()
    with use_backend("torch"):
        assert 1 < Probe(threads + 1)() < 1e6
    assert torch.get_num_threads() == threads
    assert times_pushed() >= 0
