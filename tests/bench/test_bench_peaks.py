"""The yardstick: what is measured as the peak of a dtype, and by which unit of the processor."""

from __future__ import annotations

from types import ModuleType

import pytest

from fastattn.bench import machine


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
        ("dot_f16", XEON | {"tile_f16": 5e3}, ["amx_fp16"], (5e3, "tile_f16", "measured")),
        ("dot_bf16", {"fma_f32": 235.0, "dot_bf16": 470.0}, [], (470.0, "dot_bf16", "measured")),
        ("dot_bf16", {"fma_f32": 118.0}, [], (118.0, "fma_f32", "measured")),
        ("dot_f16", {"fma_f32": 118.0}, [], (118.0, "fma_f32", "measured")),
        # Built by a compiler that knows no AMX: what was measured is no ceiling, and says so.
        (
            "dot_bf16",
            {"fma_f32": 446.0, "dot_bf16": 457.0},
            ["amx_bf16"],
            (457.0, "dot_bf16", "without amx_bf16, which was not built"),
        ),
    ],
)
def test_the_peak_of_a_dtype_is_that_of_its_fastest_unit(
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


def test_a_peak_is_measured_for_as_long_as_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, core = [], fake_core({}, [])
    core.__dict__["measure_peak"] = lambda *request: asked.append(request) or 100.0
    monkeypatch.setattr(machine, "native_core", lambda: core)
    for seconds in (0.02, 0.2):
        machine.measure_peak("fma_f64", 2, seconds)
    assert asked[1:] == [("fma_f64", 2, 0.02), ("fma_f64", 2, 0.2)]  # the first one chose the unit


def test_the_units_of_this_processor_are_measured() -> None:
    core = pytest.importorskip("fastattn._cpu")
    features = core.processor()["features"]
    for unit, feature in (
        ("tile_bf16", "amx_bf16"),
        ("tile_f16", "amx_fp16"),
        ("fma_f16", "avx512_fp16"),
    ):
        rate = core.measure_peak(unit, 1, 0.02)
        if feature not in features:
            assert rate == 0
        else:
            assert rate >= 0  # 0: the compiler of this build knows no such unit
    with pytest.raises(ValueError, match=r"allowed are fma_f32, .* tile_bf16, tile_f16, fma_f16"):
        core.measure_peak("fma_f128", 1, 0.02)
