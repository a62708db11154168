"""The CUDA module of `make gpu-day`: which one is taken, which is built again, and what is sent."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "csrc/cuda/kernels/softmax.h"


@pytest.fixture
def day_build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tests/gpu"))
    import day_build

    monkeypatch.setattr(day_build, "_imports", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.delenv("FASTATTN_REHEARSAL", raising=False)
    return day_build


@pytest.fixture
def module(day_build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module in a tree of its own, with the real sources."""
    monkeypatch.setattr(day_build, "ROOT", tmp_path / "tree")
    monkeypatch.setattr(day_build, "tree", list)
    shutil.copytree(ROOT / "csrc", tmp_path / "tree/csrc")
    (tmp_path / "tree/fastattn").mkdir()
    shutil.copy2(ROOT / "fastattn/_version.py", tmp_path / "tree/fastattn")
    path = tmp_path / f"tree/fastattn/_cuda{day_build.SUFFIX}"
    compiled("int kernel() { return 1; }", path)
    return path


def compiled(source: str, path: Path) -> None:
    command = ["g++", "-g", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)


Built = Callable[[], list[list[str]]]


@pytest.fixture
def built(day_build: ModuleType, module: Path, monkeypatch: pytest.MonkeyPatch) -> Built:
    """Builds, and returns the commands of setup.py."""
    commands: list[list[str]] = []
    run = subprocess.run

    def recording(command: Any, **options: Any) -> Any:
        if "setup.py" not in command:
            return run(command, **options)
        commands.append(command)
        compiled("int kernel() { return 2; }", module)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(day_build.subprocess, "run", recording)

    def build() -> list[list[str]]:
        commands.clear()
        assert day_build.build() == 0
        return commands

    return build


def test_a_module_of_unknown_sources_is_built_again_and_then_taken(
    built: Built, module: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVCC", "true")
    assert len(built()) == 1
    assert f"not taken: fastattn/_build.json does not say that fastattn/{module.name}" in (
        capsys.readouterr().out
    )
    assert built() == []
    assert "taken as it is: fastattn/_cuda" in capsys.readouterr().out


@pytest.mark.parametrize("change", ["a source", "a new source", "a source less", "the module"])
def test_a_module_of_other_sources_is_built_again(
    built: Built, day_build: ModuleType, module: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVCC", "true")
    day_build.note([module])
    assert built() == []
    source = day_build.ROOT / SOURCE
    if change == "a source":
        old = source.stat()
        source.write_text(source.read_text().replace("float", "FLOAT", 1))
        os.utime(source, ns=(old.st_atime_ns, old.st_mtime_ns))
    elif change == "a new source":
        source.with_name("new.h").touch()
    elif change == "a source less":
        source.unlink()
    else:
        module.write_bytes(module.read_bytes() + b"x")
    assert len(built()) == 1
    assert built() == []


def test_a_module_of_other_sources_is_refused_where_none_can_be_built(
    day_build: ModuleType,
    module: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NVCC", "no-such-compiler")
    assert day_build.build() == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"fastattn/{module.name} is not of these sources, and cannot be built here: "
        "the compiler that NVCC names, 'no-such-compiler', was not found"
    )
    assert module.exists()


def test_a_pack_is_taken_where_it_arrives(
    built: Built, day_build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other folder, other times."""
    assert day_build.pack() == 0
    shutil.copytree(day_build.ROOT, tmp_path / "arrived", copy_function=shutil.copyfile)
    monkeypatch.setattr(day_build, "ROOT", tmp_path / "arrived")
    assert built() == []


def test_a_pack_refuses_a_module_older_than_its_sources(
    day_build: ModuleType, module: Path
) -> None:
    before = module.stat().st_size
    os.utime(day_build.ROOT / SOURCE, (2**32, 2**32))
    with pytest.raises(SystemExit, match=f"_cuda.* is older than {SOURCE}: build it again"):
        day_build.pack()
    assert module.stat().st_size == before
    assert not (day_build.ROOT / day_build.RECORD).exists()


def test_a_pack_needs_the_cuda_module(day_build: ModuleType, module: Path) -> None:
    module.rename(module.with_name("_cpu.cpython-312-x86_64-linux-gnu.so"))
    with pytest.raises(SystemExit, match="no CUDA module is built here; build it"):
        day_build.pack()


def test_a_pack_strips_names_and_keeps_the_record(
    day_build: ModuleType, module: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = module.with_name("_cpu.cpython-311-x86_64-linux-gnu.so")
    compiled("char table[1 << 20] = {1};", other)
    record = day_build.ROOT / day_build.RECORD
    record.write_text('{"version": "1", "modules": {}}')
    before = module.stat().st_size
    assert day_build.pack() == 0
    for path in (module, other):
        sections = subprocess.run(
            ["readelf", "-S", path], capture_output=True, text=True, check=True
        )
        assert ".debug" not in sections.stdout
        assert ".symtab" not in sections.stdout
    assert module.stat().st_size < before
    words = module.name.split(".")[1]
    assert capsys.readouterr().out.splitlines()[:2] == [
        "_cpu for cpython-311-x86_64-linux-gnu: 1.0 MiB",
        f"_cuda for {words}: 0.0 MiB",
    ]
    kept = json.loads(record.read_text())
    assert (kept["version"], [*kept["made_of"]]) == ("1", [module.name])


@pytest.mark.parametrize(("mebibytes", "code"), [(61, 0), (62, 1)])
def test_a_pack_fails_beyond_what_can_be_sent(
    day_build: ModuleType,
    module: Path,
    mebibytes: int,
    code: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The files of the tree and the module count together."""
    compiled("char table[2 << 20] = {1};", module)
    data = day_build.ROOT / "data"
    with data.open("w") as file:
        file.truncate(mebibytes << 20)
    monkeypatch.setattr(day_build, "tree", lambda: [data])
    assert day_build.pack() == code
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(
        f"The tree has {mebibytes + 2}.0 MiB with these and fastattn/_build.json"
    )
    assert last.endswith("; at most 64 can be sent.")


def test_the_tree_is_small_enough_to_be_sent(day_build: ModuleType) -> None:
    files = day_build.tree()
    assert ROOT / "csrc/cuda/module.cpp" in files
    # Of 64 MiB half is left for the modules that are built before.
    assert day_build.size_of(files) < day_build.TREE_LIMIT / 2
