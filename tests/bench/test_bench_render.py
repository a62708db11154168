"""The documentation's figures: rendered from raw results, in a folder for each processor."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from bench_results import a_result, cell_of

from fastattn.bench import breakdown, environment, summary
from fastattn.bench.results import Outcome, Result, Round, save_json


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
    result.environment |= {"utc": "now", "commit": "abc", "python": "3", "system": "Linux"}
    page = render.results_page({"a-processor": {"dropin": result}})
    assert "### a-processor/dropin.json" in page
    assert "2.00×" in page
    assert render.why_not(result, rows) == []


def test_the_table_of_peers_takes_the_best_mode_of_each() -> None:
    times = {"fastattn": 2.0, "onnx": 4.0, "onnx@mha": 3.0}
    result = a_result([Round((100.0, 100.0), times) for _ in range(5)])
    result.settings["baseline"] = "fastattn"
    result.cells[0].outcomes = {name: Outcome() for name in times}
    result.providers = {"onnx": {"status": "ok", "versions": {"onnx": "9"}}}
    block = load_render().block_of("peers", {"a-processor": result})
    assert "| 2 | 1.50× [1.50, 1.50] |" in block
    assert "onnx 9. a processor" in block


def test_a_table_has_a_column_for_each_processor() -> None:
    render = load_render()
    found = {}
    for processor, ms in (("amd", 2.0), ("intel", 8.0)):
        result = a_result([Round((1e3, 1e3), {"torch": 4.0, "fastattn": ms}) for _ in range(5)])
        result.environment["cpu"] = processor
        cell = result.cells[0]
        cell.cell = cell_of("mha", "B=2,L=6,E=16,H=2", label="A model")
        cell.outcomes = {p: Outcome(max_error=1e-7, largest=2.0) for p in ("torch", "fastattn")}
        found[processor] = result
    other = dataclasses.replace(found["intel"].cells[0])
    other.cell = cell_of("mha", "B=4,L=6,E=16,H=2", label="Another")
    found["intel"].cells.append(other)  # not measured on the first processor
    block = render.readme_block(found)
    for line in (
        "On amd (`amd`), 1 thread, with fastattn 0: ",
        "On intel (`intel`), 1 thread, with fastattn 0: ",
        "| times as fast as torch | pass | fp32<br>amd | fp32<br>intel | bf16<br>amd | ",
        "| A model | forward | 2.00× | 0.50× | – | – |",
        "| Another | forward | – | 0.50× | – | – |",
        "amd: 1 thread, fastattn",
        "intel: 1 thread, fastattn",
    ):
        assert line in block


def test_the_picture_of_the_readme_has_a_dot_for_each_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    pictures = importlib.import_module("pictures")
    forward, backward = ("attention", "forward"), ("attention", "backward")
    of_amd = {forward: {"fp32": 2.0, "bf16": 3.0}, backward: {"bf16": 4.0}}
    found = {"amd": of_amd, "intel": {forward: {"fp32": 0.5}}}
    panels = pictures.across(found, "dark").axes
    dots = [
        {line.get_label(): line.get_xydata().tolist() for line in axes.lines if line.get_marker()}
        for axes in panels
    ]
    assert dots[0]["amd"] == [[2, 0]]
    assert dots[0]["intel"] == [[0.5, 0]]
    assert dots[1]["amd"] == [[3, 0], [4, 1]]
    assert dots[1]["intel"] == []


def test_the_table_of_the_readme_is_of_the_result_that_most_processors_have() -> None:
    render = load_render()

    def of_cell(label: str, ms: float, second: float = 1e3) -> Result:
        turn = Round((1e3, second), {"torch": 4.0, "fastattn": ms})
        result = a_result([turn] * 5)
        result.cells[0].cell = cell_of("sdpa", "B=2,H=1,L=6,D=8", label=label)
        result.cells[0].outcomes = {p: Outcome() for p in ("torch", "fastattn")}
        return result

    main = {"amd": of_cell("A model", 2.0)}
    figures = {"amd": of_cell("512 tokens", 2.0), "intel": of_cell("512 tokens", 8.0)}
    table = "| attention, 8 × 512 tokens, 12 heads of 64 | forward | 2.00× | 0.50× |"
    assert table in render.readme_block(main, figures)
    assert "| A model |" not in render.readme_block(main, figures)
    main["intel"] = of_cell("A model", 1.0)
    assert "| A model | forward | 2.00× | 4.00× |" in render.readme_block(main, figures)
    # Without the cells that the first screen does not name, and without disturbed ones.
    figures["intel"].cells += of_cell("tiny", 2.0).cells
    figures["arm"] = of_cell("512 tokens", 2.0, second=500.0)
    block = render.readme_block(main, figures)
    assert table.removesuffix("|") + "| – |" in block
    assert "| tiny |" not in block


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
    here = tmp_path / "amd-epyc-zen4-avx512_bf16"
    save_json(result, [], here / "dropin.json")
    (here / "other.json").write_text('{"of": "another program"}')
    assert list(render.load_all()) == [here.name]
    assert list(render.load_all()[here.name]) == ["dropin"]
    save_json(result, [], tmp_path / "amd-epyc-zen5-avx512_bf16" / "dropin.json")
    with pytest.raises(ValueError, match=r"zen5.*was measured on amd-epyc-zen4-avx512_bf16"):
        render.load_all()
    # Older records tell no generation.
    for key in ("cpu_vendor", "cpu_family", "cpu_model"):
        del result.environment[key]
    save_json(result, [], tmp_path / "amd-epyc-zen5-avx512_bf16" / "dropin.json")
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


XEON = {"cpu_vendor": "GenuineIntel", "cpu_family": 6, "cpu_model": 143}
XEON_FLAGS = ["avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16"]


@pytest.mark.parametrize(
    ("record", "slug"),
    [
        (
            {"cpu": "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "cpu_flags": XEON_FLAGS}
            | XEON,
            "intel-xeon-platinum-8481c-sapphire-rapids-amx_bf16",
        ),
        (
            {"cpu": "Intel(R) Xeon(R) Processor @ 2.10GHz", "cpu_flags": XEON_FLAGS} | XEON,
            "intel-xeon-sapphire-rapids-amx_bf16",
        ),
        (
            {"cpu": "Intel(R) Xeon(R) Processor", "cpu_flags": ["avx2"]}
            | {**XEON, "cpu_model": 200},
            "intel-xeon-family6-model200-avx2",
        ),
        (
            {"cpu": "AMD Ryzen 9 7950X 16-Core Processor", "cpu_flags": ["avx512_bf16"]}
            | {"cpu_vendor": "AuthenticAMD", "cpu_family": 25, "cpu_model": 97},
            "amd-ryzen-9-7950x-zen4-avx512_bf16",
        ),
        ({"cpu": "aarch64", "cpu_flags": ["asimd", "bf16", "sve"]}, "aarch64-sve"),
        ({"cpu": "AMD EPYC", "cpu_flags": ["avx2"], "gpu": "NVIDIA H200"}, "nvidia-h200"),
    ],
)
def test_the_folder_of_a_processor(record: dict[str, object], slug: str) -> None:
    assert environment.processor_slug(record) == slug


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


def test_the_claim_is_of_cells_that_nothing_disturbed() -> None:
    rounds = [Round((1e3, 500.0), {"torch": 4.0, "fastattn": 1.0}) for _ in range(6)]
    result = a_result(rounds)
    result.cells[0].cell = cell_of("mha", "B=2,L=6,E=16,H=2", label="A busy model")
    result.cells[0].outcomes = {p: Outcome() for p in ("torch", "fastattn")}
    quiet = a_result([Round((1e3, 1e3), {"torch": 4.0, "fastattn": 2.0}) for _ in range(6)])
    quiet.cells[0].cell = cell_of("mha", "B=4,L=6,E=16,H=2", label="A quiet model")
    quiet.cells[0].outcomes = {p: Outcome() for p in ("torch", "fastattn")}
    result.cells += quiet.cells
    claim = load_render().claim("a-processor", result)
    assert (
        "in fp32 **2.00 to 2.00 times** as fast (1 of 2 cells; in the others the machine" in claim
    )


def test_a_page_has_the_rows_of_its_operator() -> None:
    render = load_render()
    result = a_result([Round((1e3, 1e3), {"torch": 4.0, "fastattn": 2.0}) for _ in range(5)])
    result.cells[0].cell = cell_of("additive", "B=2,L=6,A=16", label="A step")
    result.cells[0].outcomes = {"torch": Outcome(), "fastattn": Outcome()}
    other = dataclasses.replace(result.cells[0], cell=cell_of("hopfield", "B=2,H=1,L=1,N=4,D=8"))
    result.cells.append(other)
    begin, end = "<!-- operators additive: begin -->", "<!-- operators additive: end -->"
    unknown = "<!-- nothing: begin --><!-- nothing: end -->"
    page = f"above\n{begin}\nold\n{end}\nbelow\n{unknown}"
    once = render.with_tables(page, {"a-processor": {"operators": result}})
    assert "old" not in once
    assert "| A step<br>`B=2,L=6,A=16` | forward | 2 | 2.00× |" in once
    assert "N=4" not in once
    assert once.endswith(f"{end}\nbelow\n{unknown}")  # a marker without a result stays
    with pytest.raises(ValueError, match="of the operator luong"):
        render.with_tables(
            page.replace("additive", "luong"), {"a-processor": {"operators": result}}
        )


def test_an_option_costs_its_share_of_the_peak() -> None:
    render = load_render()
    result = a_result([Round((100.0, 100.0), {"fastattn": 2.0}) for _ in range(5)])
    plain = result.cells[0]
    plain.cell = cell_of("sdpa", "B=2,H=1,L=6,D=8", label="plain")
    plain.outcomes = {"fastattn": Outcome()}
    half = dataclasses.replace(plain, flops=plain.flops // 2)
    half.cell = cell_of("sdpa", "B=2,H=1,L=6,D=8", label="half the pairs", mask="causal")
    result.cells.append(half)
    block = render.block_of("options", {"a-processor": result})
    assert "| half the pairs | 2.00 | – | – | – |" in block


def test_a_loop_in_torch_is_a_column_where_it_was_measured() -> None:
    render = load_render()
    times = {"torch": 8.0, "torch@loop": 4.0, "fastattn": 2.0}
    result = a_result([Round((1e3, 1e3), times) for _ in range(5)])
    result.cells[0].cell = cell_of("varlen", "B=2,H=1,L=6,S=2,D=8")
    result.cells[0].outcomes = {name: Outcome() for name in times}
    block = render.block_of("serving", {"a-processor": result})
    assert "| as a loop in torch |" in block
    assert "| 4.00× | 2.00× |" in block
    of_one = [Round((1e3, 1e3), {"torch": 8.0, "fastattn": 2.0}) for _ in range(5)]
    result.cells[0] = dataclasses.replace(result.cells[0], rounds=of_one)
    assert "a loop" not in render.block_of("serving", {"a-processor": result})


def served(*steps: tuple[str, dict[str, Any], float]) -> str:
    """The table of a server: steps of a label and the rest of a cell, and our milliseconds."""
    result, cells = a_result([]), []
    for label, of_cell, ms in steps:
        rounds = [Round((1e3, 1e3), {"torch": 8.0, "fastattn": ms}) for _ in range(5)]
        outcomes = {name: Outcome() for name in ("torch", "fastattn")}
        cell = cell_of("decode", label=label, **of_cell)
        cells.append(
            dataclasses.replace(result.cells[0], cell=cell, rounds=rounds, outcomes=outcomes)
        )
    result = dataclasses.replace(result, cells=cells)
    return str(load_render().block_of("server", {"a-processor": result}))


def test_a_quantised_cache_stands_beside_the_one_in_bf16() -> None:
    shape = "B=2,H=4,Hkv=2,Lq=1,Lk=9,D=8"
    given = {"shape": shape, "dtype": "bf16", "passes": "fwd"}
    block = served(
        ("A model, next token", {**given, "option": "none"}, 4.0),
        ("A model, next token, int8", {**given, "option": "int8"}, 2.0),
    )
    step = f"| A model, next token | `{shape}` |"
    assert f"{step} bf16 | 500 | 250 | 2.00× | 1.00× |" in block
    assert f"{step} int8 | 1000 | 250 | 4.00× | 2.00× |" in block


def test_a_latent_cache_is_named_by_its_dtype() -> None:
    shape = "B=2,H=4,Hkv=1,Lq=1,Lk=9,D=8,Dv=6"
    given = {"shape": shape, "option": "latent"}
    block = served(
        ("A model, next token", {**given, "dtype": "fp32"}, 4.0),
        ("A model, next token", {**given, "dtype": "bf16"}, 2.0),
    )
    step = f"| A model, next token | `{shape}` |"
    assert f"{step} fp32 | 500 | 250 | 2.00× | 0.50× |" in block
    assert f"{step} bf16 | 1000 | 250 | 4.00× | 1.00× |" in block


def test_the_budget_of_a_call_stands_beside_pytorch() -> None:
    render = load_render()
    ms = dict.fromkeys(breakdown.PARTS, 0.0) | {"call": 0.08, "floor": 0.03, "torch": 0.06}
    result = a_result([Round((1e3, 1e3), ms)])
    cell = result.cells[0].cell
    result.cells[0].cell = dataclasses.replace(cell, passes="fwd+bwd")
    block = render.block_of("breakdown", {"a-processor": result})
    assert "| 80.0 | 30.0 | 60.0 | 0.75× | 2.00× |" in block
    assert render.block_of("breakdown", {"a": result, "b": result}).count("| times as fast") == 2
    result.cells[0].cell = dataclasses.replace(cell, passes="fwd")
    block = render.block_of("breakdown", {"a-processor": result})
    assert "| 0.75× | – |" in block
    del ms["torch"]  # as in older files
    assert "at most" not in render.block_of("breakdown", {"a-processor": result})


def test_what_ranks_receive_and_compute_is_what_was_planned() -> None:
    render = load_render()
    found = render.load_ranks()
    page = (render.ROOT / "docs" / "distributed.md").read_text()
    assert render.ranks_block(found) in page
    for row in (row for result in found.values() for row in result["rows"]):
        if "received_planned" in row:
            planned = row["received_planned"], row["flops_planned"]
            assert (row["received"], row["flops"]) == planned
