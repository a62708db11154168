"""The command line: what each command prints, its exit code, and one clear line for a mistake."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from child_process import run_python

import fastattn
from fastattn import builds, cli, evidence, info
from fastattn.bench import ops

pytestmark = pytest.mark.without_kernels


def fastattn_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "fastattn", *arguments, timeout=120, **environment)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A command `probe` whose `run` a test gives; `--status N` is its only argument."""
    module = ModuleType("fastattn._probe")
    module.add_arguments = lambda parser: parser.add_argument("--status", type=int, default=0)
    module.run = lambda args: args.status
    monkeypatch.setitem(sys.modules, "fastattn._probe", module)
    monkeypatch.setitem(cli.COMMANDS, "probe", ("fastattn._probe", "a command of the tests"))
    return module


def test_help_names_every_command_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for word in (*cli.COMMANDS, "exit codes"):
        assert word in text


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    assert f"usage: fastattn {name}" in capsys.readouterr().out


def test_version_is_the_packages_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"fastattn {fastattn.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["no-such-command"], "invalid choice: 'no-such-command'"),
        (["info", "--no-such-option"], "unrecognized arguments: --no-such-option"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_why(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_exit_code_is_what_the_command_returns(command: ModuleType) -> None:
    assert cli.main(["probe"]) == 0
    assert cli.main(["probe", "--status", "1"]) == 1


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, TypeError, FileNotFoundError])
def test_an_error_is_one_line(
    command: ModuleType, kind: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise kind("--lengths must be positive, got -1")

    command.run = run
    assert cli.main(["probe"]) == 2
    expected = "fastattn probe: error: --lengths must be positive, got -1\n"
    assert capsys.readouterr().err == expected
    with pytest.raises(kind):
        cli.main(["--traceback", "probe"])


def test_a_missing_package_is_named(
    command: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        importlib.import_module("no_such_package")
        return 0

    command.run = run
    assert cli.main(["probe"]) == 2
    expected = "fastattn probe: error: it needs no_such_package, which is not installed\n"
    assert capsys.readouterr().err == expected


def test_a_defect_keeps_its_traceback(command: ModuleType) -> None:
    def run(args: argparse.Namespace) -> int:
        raise AssertionError("a defect, not a user's mistake")

    command.run = run
    with pytest.raises(AssertionError):
        cli.main(["probe"])


def test_interruption_exits_with_130(command: ModuleType) -> None:
    def run(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    command.run = run
    assert cli.main(["probe"]) == 130


@pytest.mark.complete
def test_a_closed_pipe_is_no_error() -> None:
    script = "import sys; from fastattn.cli import main; sys.exit(main(['info', '--json']))"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", script],
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=120,
        check=False,
    )
    os.close(writer)
    assert done.returncode == 0
    assert done.stderr == b""


@pytest.mark.complete
def test_a_command_loads_no_other_command() -> None:
    script = """if True:
        import sys
        from fastattn.cli import main
        main(["info"])
        others = ("fastattn.bench", "fastattn.verify", "fastattn._explain")
        print([name for name in sys.modules if name.startswith(others)])
    """
    done = run_python("-c", script, timeout=120)
    assert done.stdout.splitlines()[-1] == "[]"


# info


def test_info_json_carries_every_fact() -> None:
    done = fastattn_command("info", "--json", FASTATTN_ANYTHING="here")
    facts = json.loads(done.stdout)
    assert facts["fastattn"] == fastattn.__version__
    assert facts["torch"] == torch.__version__
    assert facts["environment"]["FASTATTN_ANYTHING"] == "here"
    assert facts["cpu"]["model"]
    assert facts["threads"] >= 1
    assert list(facts["backends"]) == ["torch", "cpu", "cuda", "triton", "reference"]
    for backend in facts["backends"].values():
        assert backend["built"] == (backend["reason"] is None)


def test_info_has_the_fields_of_the_chosen_gemms(monkeypatch: pytest.MonkeyPatch) -> None:
    use = evidence.Gemm("onednn", "torch", "ours", 32, least_grad=2**20, layer_up_to=evidence.ANY)
    chosen = evidence.Row("gemm", "cpu", "", use, "a measurement")
    monkeypatch.setattr(evidence, "choose", lambda *args, **kwargs: chosen)
    (text,) = {made["use"] for made in info.collect()["choices"] if made["choice"] == "gemm"}
    fields = "y=onednn, dx=torch, dw=ours, few=32, least_grad=1048576, layer_up_to=∞"
    assert text == f"{fields}, min_tile_rows=96, min_tile_rows_alone=96"


def test_info_text_has_the_facts_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    facts = info.collect()
    for fact in (
        facts["fastattn"],
        facts["torch"],
        facts["cpu"]["model"],
        *facts["cpu"]["features"],
    ):
        assert fact in text
    for name in facts["backends"]:
        assert f"backend {name}" in text
    for backend in facts["backends"].values():
        assert backend["built"] or f"not built: {backend['reason']}" in text


def test_info_names_the_instruction_sets(native: ModuleType) -> None:
    facts = info.collect()
    build = native.build_info()
    assert facts["isa"] == build
    # The one of float32, then the dtypes that have another.
    used = [name.rpartition("=")[2] for name in build["isa"].split(",")]
    assert set(used) <= set(build["supported"])
    assert set(build["supported"]) <= set(build["compiled"])
    assert set(facts["backends"]["cpu"]["isas"]) == set(build["compiled"])
    text = info.format_text(facts)
    assert f"{build['isa']} in use" in text
    assert facts["backends"]["cpu"]["compiler"] in text


@pytest.mark.complete
def test_info_follows_a_forced_instruction_set(native: ModuleType) -> None:
    done = fastattn_command("info", "--json", FASTATTN_CPU_ISA="baseline")
    assert json.loads(done.stdout)["isa"]["isa"] == "baseline"


@pytest.mark.complete
def test_info_survives_a_wrong_instruction_set(native: ModuleType) -> None:
    done = fastattn_command("info", FASTATTN_CPU_ISA="mmx")
    assert "built but cannot be used" in done.stdout
    assert "mmx" in done.stdout
    assert "Traceback" not in done.stderr


def test_info_says_that_sources_hide_an_installed_fastattn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "fastattn"
    installed.mkdir()
    (installed / "_build.json").write_text("{}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(builds, "native_module", lambda name: {"error": "ImportError"})
    monkeypatch.setattr(builds, "build_record", dict)
    assert f"hides {installed}: start Python" in builds.backend("cpu")["reason"]


def test_info_without_a_native_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastattn._cpu", None)
    record = {"modules": {"cpu": {"built": False, "reason": "no C++ compiler was found"}}}
    monkeypatch.setattr(builds, "build_record", lambda: record)
    text = info.format_text(info.collect())
    assert re.search(r"^ISA +none: there is no native core", text, re.MULTILINE)
    assert re.search(r"^backend cpu +not built: no C\+\+ compiler was found$", text, re.MULTILINE)


def test_info_reports_kernels_that_changed_since_they_were_built(
    native: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "fastattn"
    kernel = tmp_path / "csrc/cpu/kernel.cpp"
    for file, changed in ((kernel, 1000), (package / "_build.json", 2000)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
        os.utime(file, (changed, changed))
    monkeypatch.setattr(builds, "__file__", str(package / "builds.py"))
    assert "csrc has changed since" not in info.format_text(info.collect())
    os.utime(kernel, (3000, 3000))
    assert "csrc has changed since: `make build`" in info.format_text(info.collect())


# explain


@pytest.mark.complete
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("op", ops.OPS)
def test_explain_takes_every_operator(
    op: str, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a device that PyTorch was built without, too."""
    name, passes = ops.get(op).FUNCTION, ops.get(op).PASSES
    arguments = ["--op", name, "--pass", ",".join(passes), "--dtype", "fp64,bf16"]
    assert cli.main(["explain", "--device", device, *arguments]) == 0
    printed = capsys.readouterr().out
    assert op in printed
    found = printed.count(f" on {device}\n") + printed.count("calls no kernel")
    assert found >= 2 * len(passes)
    assert printed.count(" runs\n") == printed.count(f" on {device}\n")


@pytest.mark.parametrize(
    ("shapes", "operator"),
    [
        ("sdpa mask=documents", "scaled_dot_product_attention"),
        ("varlen mask=documents", "varlen_attention"),
        ("decode P=64", "decode_attention"),
        ("luong W=4,P=1", "scaled_dot_product_attention"),  # on the CPU it is local_attention
    ],
)
def test_explain_takes_options_on_any_device(
    shapes: str, operator: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", "--device", "cuda", "--shapes", shapes, "--dtype", "bf16"]) == 0
    assert f"{operator} on cuda\n" in capsys.readouterr().out


def test_explain_agrees_with_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.ones(2, 4, 8, 16, dtype=torch.bfloat16)
    want = fastattn.explain(
        fastattn.scaled_dot_product_attention, x, x, x, is_causal=True, need_weights=True
    )
    arguments = ["--shapes", "B=2,H=4,L=8,D=16", "--dtype", "bf16", "--mask", "causal"]
    assert cli.main(["explain", *arguments, "--weights", "per-head"]) == 0
    assert str(want) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "Q=8"], "unknown key 'Q'"),
        (["--shapes", "H=6,Hkv=4"], "4"),
        (["--op", "sinusoidal_encoding", "--mask", "causal"], "causal"),
        (["--device", "abacus"], "abacus"),
        (["--dtype", "int8"], "--dtype 'int8'"),
    ],
)
def test_explain_refuses_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fastattn explain: error: ")
    assert message in error
    assert len(error.splitlines()) == 1
