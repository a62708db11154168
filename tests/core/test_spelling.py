"""One spelling of dtypes and operators: every command takes all their names, and lists of them."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from fastattn import cli, spelling, verify
from fastattn.bench import cli as bench_cli
from fastattn.bench import ops, selection

SHORT = ("fp32", "bf16", "fp16", "fp64")
LONG = ("float32", "bfloat16", "float16", "float64")


@pytest.mark.parametrize(
    ("given", "short"),
    [
        *(("fp32", "fp32"), ("float32", "fp32"), ("float", "fp32"), ("torch.float32", "fp32")),
        *(("bf16", "bf16"), ("bfloat16", "bf16"), ("BF16", "bf16")),
        *(("fp16", "fp16"), ("float16", "fp16"), ("half", "fp16")),
        *(("fp64", "fp64"), ("float64", "fp64"), ("double", "fp64")),
    ],
)
def test_a_dtype_is_found_in_every_spelling(given: str, short: str) -> None:
    assert spelling.dtypes([given], SHORT) == [short]
    assert spelling.dtypes([given], LONG) == [LONG[SHORT.index(short)]]


@pytest.mark.parametrize("op", ops.OPS)
def test_an_operator_is_found_by_each_of_its_names(op: str) -> None:
    function = ops.get(op).FUNCTION
    for name in {op, function, function.removeprefix("nn."), f"fastattn.{function}"}:
        assert spelling.operators([name], ops.OPS) == [op]
        assert spelling.operators([name], [function]) == [function]


def test_a_list_keeps_its_order_and_has_each_once() -> None:
    assert spelling.dtypes(["half", "fp32", "float16"], SHORT) == ["fp16", "fp32"]
    assert spelling.dtypes([], SHORT) == []
    assert spelling.name_list(" fp32, ,bf16 ") == ["fp32", "bf16"]
    with pytest.raises(argparse.ArgumentTypeError, match="names nothing"):
        spelling.name_list(" , ")


def test_errors_name_argument_value_and_choices() -> None:
    with pytest.raises(ValueError, match=r"^--dtype 'int8': allowed are float32 \(fp32\), "):
        spelling.dtypes(["fp32", "int8"], LONG)
    with pytest.raises(ValueError, match=r"^dtype= 'fp64': allowed are fp32 \(float32\), bf16"):
        spelling.dtypes(["fp64"], SHORT[:3], "dtype=")
    with pytest.raises(ValueError, match=r"^--op 'abacus': allowed are .*_attention \(sdpa\)"):
        spelling.operators(["abacus"], verify.PROOFS)


def parsed(module: Any, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args(arguments)


def test_a_line_of_a_file_of_shapes(tmp_path: Any) -> None:
    path = tmp_path / "shapes.txt"
    path.write_text("scaled_dot_product_attention L=4,D=8 dtype=float16,double\n")
    with pytest.raises(ValueError, match="dtype= 'double': allowed are fp32"):
        selection.cells_of(parsed(bench_cli, "run", "--shapes", f"@{path}"))
    path.write_text("scaled_dot_product_attention L=4,D=8 dtype=float16,single\n")
    cells = selection.cells_of(parsed(bench_cli, "run", "--shapes", f"@{path}"))
    assert [(cell.op, cell.dtype) for cell in cells] == [("sdpa", "fp16"), ("sdpa", "fp32")]


@pytest.mark.parametrize("command", ["verify", "explain", "tune", "bench run"])
@pytest.mark.parametrize(("flag", "value"), [("--dtype", "fp32,int8"), ("--op", "sdpa,abacus")])
def test_every_command_rejects_unknown_names(
    command: str, flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = cli.main([*command.split(), flag, value])
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    printed = capsys.readouterr().err
    assert flag in printed
    assert repr(value.partition(",")[2]) in printed
    assert "fp32" in printed if flag == "--dtype" else "sdpa" in printed
