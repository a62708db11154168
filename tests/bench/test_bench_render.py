"""The documentation's figures: rendered from raw results, in a folder for each processor."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from bench_results import a_result, cell_of

from fastattn.bench import machine, summary
from fastattn.bench.results import Outcome, Round, save_json


def load_render() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "render.py"
    spec = importlib.util.spec_from_file_location("render", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # where its tables are
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def test_the_readme_is_rendered_from_raw_results() -> None:
    rounds = [Round((1e3, 1e3), {"torch": 4.0, "fastattn": 2.0}) for _ in range(5)]
    result = a_result(rounds)
    cell = result.cells[0]
    cell.cell = cell_of("mha", "B=2,L=6,E=16,H=2", label="A model")
    cell.outcomes = {p: Outcome(max_error=1e-7, largest=2.0) for p in ("torch", "fastattn")}
    render = load_render()
    rows = summary.summarise(result)
    block = render.readme_block({"a-processor": result})
    assert "in fp32 **2.00 to 2.00 times** as fast" in block
    assert "| A model | forward | 2.00× | – |" in block
    text = f"above\n{render.BEGIN}\nold\n{render.END}\nbelow"
    once = render.replaced(text, block)
    assert once.startswith("above\n")
    assert once.endswith("\nbelow")
    assert "old" not in once
    assert render.replaced(once, block) == once
    with pytest.raises(ValueError, match="README"):
        render.replaced("no markers", block)
    page = render.results_page({"a-processor": {"dropin": result}})
    assert "### a-processor/dropin.json" in page
    assert "2.00×" in page
    assert render.why_not(result, rows) == []


def test_a_result_is_in_the_folder_of_its_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    render = load_render()
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    result = a_result([Round((1e3, 1e3), {"torch": 4.0, "ours": 2.0})])
    result.environment |= {
        "cpu": "AMD EPYC",
        "cpu_flags": ["avx2", "avx512f", "avx512_bf16"],
        "cpu_vendor": "AuthenticAMD",
        "cpu_family": 25,
        "cpu_model": 17,
    }
    zen4, zen5 = (tmp_path / f"amd-epyc-zen{n}-avx512_bf16" for n in (4, 5))
    save_json(result, [], zen4 / "dropin.json")
    (zen4 / "other.json").write_text('{"of": "another program"}')
    assert {name: [*found] for name, found in render.load_all().items()} == {zen4.name: ["dropin"]}
    save_json(result, [], zen5 / "dropin.json")
    with pytest.raises(ValueError, match=r"zen5.*was measured on amd-epyc-zen4-avx512_bf16"):
        render.load_all()
    for key in ("cpu_vendor", "cpu_family", "cpu_model"):  # older records tell no generation
        del result.environment[key]
    save_json(result, [], zen5 / "dropin.json")
    assert len(render.load_all()) == 2
    save_json(result, [], tmp_path / "amd-epyc-zen5-avx2" / "dropin.json")
    with pytest.raises(ValueError, match=r"zen5-avx2.*was measured on amd-epyc-avx512_bf16"):
        render.load_all()


def test_a_result_beyond_the_peak_is_not_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    render = load_render()
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["render.py", "--check"])
    right = a_result([Round((1e3, 1e3), {"torch": 4.0, "ours": 2.0}) for _ in range(3)])
    wrong = a_result([Round((100.0, 100.0), {"torch": 4.0, "ours": 2.0}) for _ in range(3)])
    for name, result in (("dropin", right), ("others", wrong)):
        result.environment |= {"cpu": "a processor", "cpu_flags": ["avx2"]}
        save_json(result, [], tmp_path / "a-fast-avx2" / f"{name}.json")
    assert render.main() == 1
    printed = capsys.readouterr().out
    assert "a-fast-avx2/others.json has 2 rows beyond the peak: measure again" in printed


XEON = {"cpu_vendor": "GenuineIntel", "cpu_family": 6}
TILES = ["avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16"]
ZEN = {"cpu_vendor": "AuthenticAMD", "cpu_family": 25}


@pytest.mark.parametrize(
    ("cpu", "flags", "more", "slug"),
    [
        ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", TILES, {**XEON, "cpu_model": 143},
         "intel-xeon-platinum-8481c-sapphire-rapids-amx_bf16"),
        ("Intel(R) Xeon(R) Processor @ 2.10GHz", TILES, {**XEON, "cpu_model": 143},
         "intel-xeon-sapphire-rapids-amx_bf16"),
        ("Intel(R) Xeon(R) Processor", ["avx2"], {**XEON, "cpu_model": 200},
         "intel-xeon-family6-model200-avx2"),
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


def test_the_committed_texts_are_those_of_the_committed_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    render = load_render()
    if not list(render.RESULTS.glob(f"*/{render.MAIN}.json")):
        assert "No measurement is committed yet" in (render.ROOT / "README.md").read_text()
        return
    monkeypatch.setattr("sys.argv", ["render.py", "--check"])
    assert render.main() == 0


def test_an_interrupted_or_wrong_run_is_no_evidence() -> None:
    result = a_result([Round((1e3, 1e3), {"torch": 4.0, "ours": 2.0}) for _ in range(6)])
    result.ended = "interrupted"
    result.cells[0].outcomes["ours"].status = "WRONG"
    assert load_render().why_not(result, summary.summarise(result)) == [
        "the run was interrupted",
        "1 of 2 rows are wrong or failed",
    ]


def test_what_ranks_receive_and_compute_is_what_was_planned() -> None:
    render = load_render()
    found = render.load_ranks()
    page = (render.ROOT / "docs" / "distributed.md").read_text()
    assert render.ranks_block(found) in page
    for row in (row for result in found.values() for row in result["rows"]):
        if "received_planned" in row:
            planned = row["received_planned"], row["flops_planned"]
            assert (row["received"], row["flops"]) == planned
