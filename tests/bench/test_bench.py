"""The benchmark's grammar: shapes, arguments, presets; and its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bench_results import SMALL, bench, parse

import fastattn
from fastattn.bench import cli, ops, selection
from fastattn.bench.cells import shape_text
from fastattn.bench.providers import PROVIDERS
from fastattn.bench.selection import PRESETS, parse_shapes, preset_cells

# Shapes

SDPA, MHA = (ops.get(name).SIZES for name in ("sdpa", "mha"))


def test_shape_fills_in_defaults() -> None:
    assert parse_shapes("B=2,H=4,Lq=3,D=16", SDPA) == [
        {"B": 2, "H": 4, "Hkv": 4, "Lq": 3, "Lk": 3, "D": 16, "Dv": 16}
    ]
    assert parse_shapes("E=768,H=12,L=128", SDPA)[0]["D"] == 64
    assert parse_shapes("H=12,D=64,L=128", MHA) == [{"B": 1, "L": 128, "E": 768, "H": 12}]


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("Lq=128:1024:x2", "Lq", [128, 256, 512, 1024]),
        ("Lq=100:250:+50", "Lq", [100, 150, 200, 250]),
        ("Lq=1|3,Lk=Lq", "Lk", [1, 3]),
        ("B=1|2,L=8:16:x2", "B", [1, 1, 2, 2]),
        ("B=1|2,L=8:16:x2", "Lk", [8, 16, 8, 16]),
    ],
)
def test_ranges_lists_and_references(text: str, key: str, values: list[int]) -> None:
    assert [shape[key] for shape in parse_shapes(text, SDPA)] == values


@pytest.mark.parametrize("op", ops.OPS)
def test_a_formatted_shape_parses_to_itself(op: str) -> None:
    sizes = ops.get(op).SIZES
    shape = parse_shapes(SMALL[op], sizes)[0]
    assert parse_shapes(shape_text(shape, sizes), sizes) == [shape]


def test_shapes_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "shapes.txt"
    path.write_text("""# recorded
mha B=2,L=8|16,E=8,H=2 dtype=bf16 pass=fwd+bwd mask=padding weights=average  # layer 1

sdpa L=4
sdpa L=4 mask=causal option=softcap
""")
    cells = selection.cells_of(parse("run", "--shapes", f"@{path}", "--shapes", "additive L=3"))
    assert [c.name for c in cells] == [
        "mha B=2,L=8,E=8,H=2 bf16 fwd+bwd padding, average weights",
        "mha B=2,L=16,E=8,H=2 bf16 fwd+bwd padding, average weights",
        "sdpa B=1,H=8,L=4,D=64 fp32 fwd",
        "sdpa B=1,H=8,L=4,D=64 fp32 fwd causal, softcap",
        "additive B=8,L=3,A=256 fp32 fwd",
    ]
    assert cells[0].label == "layer 1"
    only = selection.cells_of(
        parse("run", "--shapes", f"@{path}", "--op", "sdpa", "--dtype", "fp16")
    )
    assert [c.name for c in only] == [
        "sdpa B=1,H=8,L=4,D=64 fp16 fwd",
        "sdpa B=1,H=8,L=4,D=64 fp16 fwd causal, softcap",
    ]
    path.write_text("sdpa L=4\nmha L=4 mask\n")
    with pytest.raises(ValueError, match=r"shapes\.txt, line 2: .*'mask' does not belong"):
        selection.cells_of(parse("run", "--shapes", f"@{path}"))


# Grammar


@pytest.mark.parametrize("op", ops.OPS)
def test_every_operator_has_a_preset_and_both_its_names(op: str) -> None:
    cells = selection.cells_of(parse("run", "--op", op))
    assert cells
    assert {c.op for c in cells} == {op}
    assert ops.resolve(ops.get(op).FUNCTION) == op


def test_every_operator_and_module_of_the_library_can_be_measured() -> None:
    tools = {"FallbackWarning", "__version__", "accelerate", "capture", "explain", "nn", "plot"}
    tools |= {"replace_mha", "restore", "restore_mha", "trace", "use_backend"}
    tools |= {"bias", "masks", "RelativeBias", "T5RelativeBias", "WindowRelativeBias"}  # arguments
    tools |= {"DisentangledBias", "insert_empty_memories"}  # the latter changes stories
    tools |= {"distributed"}  # of several processes
    public = {*fastattn.__all__, *fastattn.nn.__all__} - tools
    assert {ops.get(op).FUNCTION.removeprefix("nn.") for op in ops.OPS} == public


@pytest.mark.parametrize("name", [*PRESETS, "all"])
def test_preset_cells_have_unique_names(name: str) -> None:
    cells = preset_cells(name)
    assert len({c.name for c in cells}) == len(cells) > 0
    assert all(c.label for c in cells)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--pass", "sideways"], "'sideways'"),
        (["--preset", "gpt", "--op", "mha"], "no cell"),
        (["--preset", "gpt", "--shapes", "L=4"], "either"),
        (["--shapes", "Q=3"], "'Q'"),
        (["--shapes", "B=0"], "B=0"),
        (["--shapes", "B=1,B=2"], "B is given twice"),
        (["--shapes", "L=8,Lq=8"], "either L or"),
        (["--shapes", "L=64:8:x2"], "upwards"),
        (["--shapes", "Lk=Lq"], "Lq is not given"),
        (["--shapes", "E=10,H=4"], "E=10"),
        (["--shapes", "E=64,H=4,D=8"], "E=64"),
        (["--shapes", "B=1:1000:+1,L=1:1000:+1"], "1000000 combinations"),
        (["--shapes", "@/no/such/file"], "/no/such/file"),
        (["--shapes", "dtype=fp32"], "no KEY=VALUE"),
        (["--shapes", "decode", "--pass", "bwd"], "decode has fwd"),
        (["--shapes", "hopfield B=4,S=2"], "S=2 must be 1 or B=4"),
        (["--shapes", "mha option=alibi"], "allowed for mha are none"),
        (["--shapes", "sdpa option=window mask=bias"], "option=window: with a bias mask"),
        (["--shapes", "transformer option=stepwise pass=fwd+bwd"], "no backward"),
        (["--providers", "abacus"], "'abacus'"),
        (["--providers", "torch@avx2"], "variants of torch are torch@math"),
        (["--providers", "fastattn", "--baseline", "torch"], "'torch'"),
        (["--threads", "0"], "--threads 0"),
        (["--time-budget", "nan"], "--time-budget nan"),
        (["--rounds", "0"], "--rounds 0"),
        (["--metric", "luck"], "'luck'"),
        (["--out", "/dev/null/out"], "Not a directory: '/dev/null/out'"),
        (["--resume"], "give the --out DIR"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("run", *arguments) == cli.USAGE
    assert named in capsys.readouterr().err


def test_commands_providers_and_the_environment_are_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench() == cli.USAGE
    printed = capsys.readouterr().err
    assert all(name in printed for name in ("run", "compare", "record", "list"))
    assert bench("list") == cli.OK
    printed = capsys.readouterr().out
    assert all(name in printed for name in [*PROVIDERS, *PRESETS])
    assert bench("env") == cli.OK
    environment = json.loads(capsys.readouterr().out)
    assert environment["torch"] == torch.__version__
    assert environment["cpu"]


# Files


VERSIONED = '{"format": "fastattn-bench", "version": %d}'


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{}", "not a result"),
        (VERSIONED % 2, "not a result"),
        (VERSIONED % 1, "version 1, this is version 2: measure again"),
        ("\x89PNG", "not a result of fastattn bench (UnicodeDecodeError"),
    ],
)
def test_a_file_that_is_no_result_is_named(
    text: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "strange.json"
    path.write_text(text, encoding="latin-1")
    assert bench("compare", str(path), str(path)) == cli.USAGE
    printed = capsys.readouterr().err
    assert "strange.json" in printed
    assert named in printed
