"""The verify command: its cases, its output, and its failure on a wrong result."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from child_process import run_python

from fastattn import cli
from fastattn.backends import reference
from fastattn.testing import Target, targets

OP = "scaled_dot_product_attention"
ONE = ["verify", "--backend", "reference", "--op", OP, "--case", "plain"]


def replace_backend(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """Put the reference with other functions in the place of every backend."""
    module = SimpleNamespace(**{**vars(reference), **functions})
    monkeypatch.setattr(Target, "module", property(lambda _: module))


def test_verify_passes_and_reports_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(ONE) == 0
    printed = capsys.readouterr().out
    assert "all 4 checks passed" in printed
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        assert dtype in printed


WITHOUT_NUMPY = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "numpy" else found(name, *rest)
sys.modules["numpy"] = None
from fastattn import cli
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.complete
def test_verify_needs_no_numpy() -> None:
    done = run_python("-W", "ignore", "-c", WITHOUT_NUMPY, *ONE)
    assert "all 4 checks passed" in done.stdout


def test_a_wrong_result_fails_verify(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = reference.scaled_dot_product_attention_backward

    def wrong(*args: Any, **options: Any) -> Any:
        dq, dk, dv, *others = right(*args, **options)
        return dq, dk, dv * 1.01, *others

    replace_backend(monkeypatch, scaled_dot_product_attention_backward=wrong)
    assert cli.main([*ONE, "--dtype", "float32"]) == 1
    printed = capsys.readouterr().out
    assert "FAIL plain float32 reference: grad_value" in printed
    assert "--dtype float32 --case plain" in printed


@pytest.mark.complete
def test_an_exception_is_a_failure_of_its_case_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no such kernel")

    replace_backend(monkeypatch, scaled_dot_product_attention=broken)
    arguments = ("--backend", "reference", "--op", f"{OP},sinusoidal_encoding", "--quick")
    assert cli.main(["verify", *arguments, "--dtype", "float64"]) == 1
    printed = capsys.readouterr().out
    assert "RuntimeError: no such kernel" in printed
    (table_row,) = [line for line in printed.splitlines() if line.startswith("sinusoidal")]
    assert table_row.split()[4] == "0"


def test_declined_cases_are_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_backend(monkeypatch, why_not=lambda *args, **options: ["not today"])
    assert cli.main(ONE) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(OP)]
    assert [row[3:6] for row in rows] == [["1", "0", "1"]] * 4  # checks, failed, declined


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "cuda"], "allowed here are"),
        (["--case", "there is no such case"], "select no case"),
        (["--isa", "sparc"], "allowed here are all, current"),
    ],
)
def test_wrong_usage(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    if "--isa" in arguments and not targets():
        pytest.skip("no native core")
    assert cli.main(["verify", *arguments]) == 2
    assert message in capsys.readouterr().err
