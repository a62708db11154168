"""Installation: with and without a compiler, isolated, editable; and what the libraries contain.

Every build happens in a copy of the source tree. The quick tests build a small stand-in for
csrc/cpu, the slow ones the real thing.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import sass
from installation import (
    EXT_SUFFIX,
    ROOT,
    copy_source,
    printed_by,
    run,
    source_files,
    symbols,
)

import fastattn

ISAS = ("baseline", "avx2", "avx512", "avx512_bf16")


def build(
    source: Path, fails: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Build a copy of the source with `setup.py build`."""
    command = [sys.executable, "setup.py", "build", "--build-lib", "out"]
    return run(command, source, unset=("CXX", "CXXFLAGS", "LDFLAGS"), fails=fails, **environment)


def modules_of(folder: Path) -> dict[str, Any]:
    """The records of all modules in a build's `_build.json`."""
    return json.loads((folder / "fastattn/_build.json").read_text())["modules"]


def record_of(folder: Path) -> Any:
    """The record of the CPU module."""
    return modules_of(folder)["cpu"]


def compiled_in(folder: Path) -> list[str]:
    """The instruction sets that the stand-in library was compiled for."""
    return printed_by(folder / f"fastattn/_cpu{EXT_SUFFIX}", "module.compiled").split()


# Metadata


def test_the_version_is_written_once() -> None:
    assert fastattn.__version__ == metadata.version("fastattn")
    written = f'"{fastattn.__version__}"'
    places = [f for f in source_files() if f.endswith(".py") and written in (ROOT / f).read_text()]
    assert places == ["fastattn/_version.py"]
    assert written not in (ROOT / "pyproject.toml").read_text()
    # But for readers that cannot run Python.
    assert f"\nversion: {fastattn.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    changes = (ROOT / "CHANGELOG.md").read_text()
    (released, *_) = re.findall(r"^## \[(\d.*)\] - (\S+)$", changes, re.MULTILINE)
    assert released[0] == fastattn.__version__
    assert f"\ndate-released: {released[1]}\n" in (ROOT / "CITATION.cff").read_text()


def test_torch_is_required_at_run_time_and_not_to_build() -> None:
    required = metadata.requires("fastattn") or []
    assert [r for r in required if "extra ==" not in r] == ["torch<3,>=2.6"]
    build_system = (ROOT / "pyproject.toml").read_text().split("[project]")[0]
    assert re.findall(r'^  "(\w+)', build_system, re.MULTILINE) == [
        "setuptools",
        "pybind11",
        "ninja",
    ]


def test_the_sdist_has_every_source_and_nothing_built(tmp_path: Path) -> None:
    source = copy_source(tmp_path / "source")
    (source / f"fastattn/_cpu{EXT_SUFFIX}").write_bytes(b"built")
    (source / "fastattn/_build.json").write_text("{}")
    run([sys.executable, "setup.py", "-q", "sdist", "-d", tmp_path], source)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    top = {"setup.py", "pyproject.toml", "README.md", "LICENSE", "Makefile"}
    assert {*source_files(), *top} <= names
    assert not [n for n in names if n.endswith((".so", ".o", ".pyc", "_build.json"))]


# Building


def test_every_instruction_set_is_built_and_recorded(small_source: Path) -> None:
    build(small_source, FASTATTN_REQUIRE_NATIVE="1", MAX_JOBS="1")
    record = record_of(small_source / "out")
    assert record["built"] is True
    assert record["left_out"] == {}
    assert list(record["isas"]) == compiled_in(small_source / "out")
    assert "-ffast-math" not in record["flags"]
    assert str(small_source) not in json.dumps(record)
    # A file newer than the record would mark the kernels as stale.
    assert not list((small_source / "csrc").rglob("*.pyc"))


def test_an_unknown_choice_of_instruction_sets_is_named(small_source: Path) -> None:
    done = build(small_source, True, FASTATTN_CPU_ISAS="avx9", FASTATTN_REQUIRE_NATIVE="1")
    assert "FASTATTN_CPU_ISAS must be 'all' or 'native', got 'avx9'" in done.stderr


@pytest.mark.complete
@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere there is one set only")
def test_an_instruction_set_that_the_compiler_refuses_is_left_out(small_source: Path) -> None:
    compiler = small_source / "old-compiler"
    compiler.write_text(
        "#!/bin/sh\n"
        'case "$*" in *-mavx512bf16*) echo "error: unknown -mavx512bf16" >&2; exit 1;; esac\n'
        'exec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    done = build(small_source, CXX=str(compiler), FASTATTN_REQUIRE_NATIVE="1")
    record = record_of(small_source / "out")
    assert list(record["left_out"]) == ["avx512_bf16"]
    assert " rejects " in record["left_out"]["avx512_bf16"]
    assert "unknown -mavx512bf16" in record["left_out"]["avx512_bf16"]
    assert "built without avx512_bf16" in done.stderr
    assert compiled_in(small_source / "out") == ["baseline", "avx2", "avx512"]


@pytest.mark.complete
def test_a_second_build_compiles_only_what_changed(small_source: Path) -> None:
    build(small_source)
    assert "no work to do" in build(small_source).stdout
    kernel = small_source / "csrc/cpu/kernels/table.cpp"
    kernel.write_text(kernel.read_text() + "// changed\n")
    again = build(small_source).stdout
    assert "compile table.avx2.o" in again
    assert "/isa.o" not in again


@pytest.mark.complete
def test_a_build_without_a_compiler_warns_and_works(small_source: Path, elsewhere: Path) -> None:
    done = build(small_source, PATH="/nowhere")
    reason = "no C++ compiler was found"
    assert reason in done.stderr
    assert reason in record_of(small_source / "out")["reason"]
    assert not list(small_source.rglob("*.so"))

    python, out = elsewhere / "bin/python", str(small_source / "out")
    shown = run([python, "-m", "fastattn", "info"], elsewhere, PYTHONPATH=out)
    assert f"not built: {reason}" in shown.stdout
    script = """if True:
        import torch, fastattn
        x = torch.randn(1, 2, 5, 4)
        expected = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        torch.testing.assert_close(fastattn.scaled_dot_product_attention(x, x, x), expected)
        print(fastattn.__file__)
    """
    used = run([python, "-c", script], elsewhere, PYTHONPATH=out)
    assert used.stdout.startswith(out)


# setuptools and sysconfig read files of this system, so they are loaded before its name changes.
BUILD_ELSEWHERE = """if True:
    import runpy, sys, sysconfig
    import setuptools.command.bdist_wheel, setuptools.command.build_ext
    sysconfig.get_config_vars()
    sys.platform = sys.argv.pop(1)
    sys.modules["fcntl"] = None  # Windows has none
    runpy.run_path("setup.py", run_name="__main__")
"""


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_a_build_on_another_system_warns(small_source: Path, system: str) -> None:
    command = [sys.executable, "-c", BUILD_ELSEWHERE, system, "build", "--build-lib", "out"]
    # Without tools, but macOS always has a cc, which offers to install the real one.
    there = {"PATH": "/nowhere", "CC": "cc", "NVCC": sys.executable, "FASTATTN_CUDA": "1"}
    done = run(command, small_source, **there)
    reason = f"is built on Linux only; this is {system}"
    for name, module in modules_of(small_source / "out").items():
        assert module["built"] is False
        assert reason in module["reason"]
        assert f"fastattn._{name} was not built: {module['reason']}" in done.stderr
    assert (small_source / "out/fastattn/__init__.py").exists()
    assert not list(small_source.rglob("*.so"))

    required = run(command, small_source, fails=True, FASTATTN_REQUIRE_NATIVE="1", **there)
    assert reason in required.stderr
    assert "Traceback" not in required.stderr


@pytest.mark.complete
@pytest.mark.parametrize("native", ["0", "1"])
def test_a_wheel_has_a_bill_of_materials(small_source: Path, native: str) -> None:
    settings = {"FASTATTN_NATIVE": native, "FASTATTN_CPU_ISAS": "native"}
    # pip asks for the metadata before it builds.
    command = [sys.executable, *"-m pip wheel --no-deps --no-build-isolation -w dist .".split()]
    run(command, small_source, LDFLAGS="-static-libstdc++", **settings)
    (wheel,) = (small_source / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if ".dist-info/sboms/" in name]
        bill = json.loads(archive.read(name))
        assert name in archive.read(name.replace("sboms/fastattn.cdx.json", "RECORD")).decode()
    assert name.endswith("/sboms/fastattn.cdx.json")
    assert bill["metadata"]["component"]["purl"] == f"pkg:pypi/fastattn@{fastattn.__version__}"
    parts = {part["name"]: part["version"] for part in bill["components"]}
    if native == "0":
        assert parts == {}
    else:
        assert parts.keys() == {"pybind11", "libstdc++"}
        assert parts["pybind11"] == metadata.version("pybind11")
        assert re.fullmatch(r"[0-9.]+", parts["libstdc++"])


def test_a_broken_kernel_is_named(small_source: Path) -> None:
    (small_source / "csrc/cpu/kernels/table.cpp").write_text("int broken = ;\n")
    build(small_source)
    assert "table.cpp:1:14: error:" in record_of(small_source / "out")["reason"]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PATH": "/nowhere"}, "no C++ compiler was found"),
        ({"CXX": "no-such-compiler"}, "'no-such-compiler', was not found"),
        ({"FASTATTN_SANITIZE": "address,memory"}, "allowed are address, undefined, thread"),
        ({"FASTATTN_NATIVE": "0"}, "FASTATTN_NATIVE=0 was set"),
    ],
)
def test_a_required_build_that_fails_is_an_error(
    small_source: Path, environment: dict[str, str], message: str
) -> None:
    done = build(small_source, True, FASTATTN_REQUIRE_NATIVE="1", **environment)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.complete
def test_a_library_of_an_earlier_build_is_removed(small_source: Path) -> None:
    library = small_source / f"fastattn/_cpu{EXT_SUFFIX}"
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    run(command, small_source)
    assert library.exists()
    run(command, small_source, FASTATTN_NATIVE="0")
    assert not library.exists()
    assert record_of(small_source)["built"] is False


# The library in use


def test_the_library_does_not_link_to_torch(native: ModuleType) -> None:
    undefined = symbols("-D", "--undefined-only", native.__file__)
    assert undefined
    assert not [s for s in undefined if re.search(r"\b(at|c10|torch|caffe2)::", s)]


@pytest.mark.complete
def test_one_openmp_runtime_serves_torch_and_us(native: ModuleType) -> None:
    script = """if True:
        import torch, fastattn._cpu
        from fastattn import info
        torch.ones(1000, 1000) @ torch.ones(1000, 1000)
        print(info.collect()["openmp"])
    """
    done = run([sys.executable, "-c", script], ROOT)
    assert done.stdout.strip() == "{'runtimes': ['libgomp.so.1'], 'shared': 'libgomp.so.1'}"


# The real thing


@pytest.fixture(scope="module")
def built_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, unpacked and built as a wheel in isolation, without torch."""
    folder = tmp_path_factory.mktemp("isolated")
    source = copy_source(folder / "source")
    run([sys.executable, "setup.py", "-q", "sdist", "-d", folder], source)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    unpacked = next(path for path in folder.glob("fastattn-*") if path.is_dir())
    script = (unpacked / "setup.py").read_text()
    check = "import importlib.util\nassert importlib.util.find_spec('torch') is None\n"
    future = "from __future__ import annotations\n"
    (unpacked / "setup.py").write_text(script.replace(future, future + check))
    if (ROOT / "build/native/cpu").exists():  # reuse objects with the same flags
        shutil.copytree(ROOT / "build/native/cpu", unpacked / "build/native/cpu")
    wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", folder, unpacked]
    run(wheel, folder, FASTATTN_REQUIRE_NATIVE="1")
    return unpacked


@pytest.mark.slow
def test_an_isolated_wheel_is_complete_and_runs(built_source: Path, elsewhere: Path) -> None:
    wheel = zipfile.ZipFile(next(built_source.parent.glob("*.whl")))
    names = set(wheel.namelist())
    assert {f for f in source_files() if f.startswith("fastattn/")} <= names
    assert {f"fastattn/_cpu{EXT_SUFFIX}", "fastattn/_build.json", "fastattn/py.typed"} <= names
    assert not [name for name in names if name.startswith(("csrc/", "tests/"))]

    installed = elsewhere / "installed"
    wheel.extractall(installed)
    script = """if True:
        import torch, fastattn
        x = torch.randn(1, 2, 5, 4)
        with fastattn.use_backend("cpu"):
            ours = fastattn.scaled_dot_product_attention(x, x, x)
        torch.testing.assert_close(ours, torch.nn.functional.scaled_dot_product_attention(x, x, x))
        print(fastattn.__file__)
    """
    used = run([elsewhere / "bin/python", "-c", script], elsewhere, PYTHONPATH=str(installed))
    assert used.stdout.startswith(str(installed))


@pytest.mark.slow
def test_instruction_sets_share_no_weak_symbol(built_source: Path) -> None:
    """A weak symbol outside of the instruction set's own namespace, such as an inline function of
    the standard library, is merged by the linker with symbols of the same name: a processor without
    AVX-512 could then run the copy that needs it."""
    objects = sorted(built_source.glob("build/native/cpu/*.o"))
    kernels = [o for o in objects if o.stem.rpartition(".")[2] in ISAS]
    assert {o.stem.rpartition(".")[2] for o in kernels} >= {"baseline"}
    for file in kernels:
        own = f"fastattn::{file.stem.rpartition('.')[2]}::"
        for line in symbols("--defined-only", "--extern-only", file):
            _, kind, name = line.split(maxsplit=2)
            # The hidden pointer to the routine that unwinds C++ frames: data, the same in all.
            if name.startswith("DW.ref."):
                continue
            assert own in name, f"{file.name} exports {name!r} (nm: {kind}) outside of {own}"


@pytest.mark.slow
def test_an_editable_install_runs_from_the_source(small_source: Path, elsewhere: Path) -> None:
    python = elsewhere / "bin/python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps"]
    options = ["--no-build-isolation", "--force-reinstall", "-e", small_source]
    run([*install, *options], elsewhere)
    assert (small_source / f"fastattn/_cpu{EXT_SUFFIX}").exists()
    assert record_of(small_source)["built"] is True
    again = run([python, "setup.py", "build_ext", "--inplace"], small_source)
    assert "compile" not in again.stdout  # the install and later builds share their objects

    shown = run([elsewhere / "bin/fastattn", "info"], elsewhere)
    assert re.search(rf"^fastattn +{fastattn.__version__}$", shown.stdout, re.MULTILINE)
    where = run([python, "-c", "import fastattn; print(fastattn.__file__)"], elsewhere)
    assert where.stdout.startswith(str(small_source)), where.stdout + where.stderr


# The CUDA module


@pytest.mark.complete
@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"CUDA_HOME": "/nowhere", "FASTATTN_CUDA": "1"}, "no CUDA compiler was found"),
        ({"FASTATTN_CUDA": "0", "NVCC": "/nowhere"}, "FASTATTN_CUDA=0 was set at installation"),
        (
            {"FASTATTN_CUDA": "separate", "NVCC": "/nowhere"},
            "a package of their own, fastattn-cuda, which is not installed",
        ),
    ],
)
def test_the_record_has_the_reason_without_cuda(
    small_source: Path, environment: dict[str, str], reason: str
) -> None:
    path = f"{small_source}:/usr/bin:/bin"
    done = build(small_source, FASTATTN_REQUIRE_NATIVE="1", PATH=path, **environment)
    assert not re.search("CUDA|nvcc", done.stderr)
    modules = modules_of(small_source / "out")
    assert modules["cpu"]["built"] is True
    assert modules["cuda"]["built"] is False
    assert reason in modules["cuda"]["reason"]


@pytest.mark.parametrize(("given", "passed"), [("0", "separate"), ("1", "1")])
def test_make_wheel_sets_cuda_to_separate(given: str, passed: str, tmp_path: Path) -> None:
    for tool in ("python", "auditwheel"):
        (tmp_path / tool).write_text('#!/bin/sh\necho "FASTATTN_CUDA=$FASTATTN_CUDA"\n')
        (tmp_path / tool).chmod(0o755)
    settings = [f"TOOLS={tmp_path}", f"WHEELS={tmp_path}", "WHEEL_PYTHONS=python3"]
    command = ["make", "wheel", "--silent", "--assume-old=sdist", *settings]
    for done in (
        run([*command, f"FASTATTN_CUDA={given}"], ROOT),
        run(command, ROOT, FASTATTN_CUDA=given),
    ):
        assert set(done.stdout.split()) == {f"FASTATTN_CUDA={passed}"}


@pytest.mark.complete
def test_a_broken_nvcc_keeps_the_cpu_kernels(small_source: Path) -> None:
    nvcc = small_source / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'nvcc fatal error: broken' >&2\nexit 1\n")
    nvcc.chmod(0o755)
    done = build(small_source, NVCC=str(nvcc), FASTATTN_CUDA="1")
    modules = modules_of(small_source / "out")
    assert modules["cpu"]["built"] is True
    assert modules["cuda"]["built"] is False
    assert "fastattn._cuda was not built" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc here")
def test_the_cuda_module_is_built_and_imports_without_a_driver(small_source: Path) -> None:
    build(small_source, FASTATTN_CUDA="1", FASTATTN_REQUIRE_NATIVE="1")
    record = modules_of(small_source / "out")["cuda"]
    assert record["architectures"] == "80;90a"
    assert "-gencode=arch=compute_80,code=[compute_80,sm_80,sm_90]" in str(record["flags"])
    library = small_source / f"out/fastattn/_cuda{EXT_SUFFIX}"
    info = "module.build_info()['device'], module.build_info()['version']"
    assert printed_by(library, info).split() == ["cuda", fastattn.__version__]
    sass.check_library(library)
    needed = run(["ldd", library], ROOT).stdout
    assert "libcuda" not in needed
    undefined = symbols("-D", "--undefined-only", library)
    assert not [s for s in undefined if re.search(r"\b(at|c10|torch|caffe2)::", s)]
