"""Every promised version of PyTorch: its private names in one list, and the route without them.

`make test-torch` runs this file with one version after the other; `make test` with the pinned one.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
from pathlib import Path
from types import ModuleType

import compat_without
import pytest
import torch
from child_process import run_python

import fastattn
from fastattn import _openmp, compat, info

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(fastattn.__file__).parent
SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "compat.py"]


# --- private names stand in one file --------------------------------------------------------------


@functools.cache
def _own_names() -> frozenset[str]:
    """The private names that the package itself defines, or that another library than PyTorch
    does: the standard library, transformers, diffusers, sentence-transformers."""
    found = {"_replace", "_asdict", "_fields", "_getframe", "_exit", "_ActionsContainer"}
    found |= {"_global_mapping", "_supports_sdpa", "_supports_flex_attn", "_attn_implementation"}
    found |= {"_experts_implementation_internal", "_apply_gate"}
    # Of diffusers, of sentence-transformers, and of the enumerations of the standard library.
    found |= {"_AttentionBackendRegistry", "_active_backend", "_attention_backend"}
    found |= {"_infer_flatten_position_offset", "_should_flatten_inputs"}
    found |= {"_name_", "_value_", "_member_map_", "_member_names_", "_value2member_map_"}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                    found.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    found.add(name)
                case ast.Constant(value="_fastattn_stock_class"):  # set by type(...)
                    found.add("_fastattn_stock_class")
    return frozenset(found | {path.stem for path in PACKAGE.rglob("_*")})


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _private_names_of_torch(source: str, own: frozenset[str]) -> list[str]:
    """The lines and names with which a source reaches into PyTorch."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        match node:
            case ast.Import(names=aliases):
                names = [a.name for a in aliases if a.name.split(".")[0] == "torch"]
            case ast.ImportFrom(module=str(module), names=aliases) if module.startswith("torch"):
                names = [f"{module}.{a.name}" for a in aliases]
            case ast.Attribute(attr=name) if _is_private(name) and name not in own:
                names = [name]
            case ast.Constant(value=str(text)) if re.fullmatch(r"\w+", text):
                names = [text] if text in _LAST_PARTS else []
        found += [
            f"{getattr(node, 'lineno', 0)}: {name}"
            for name in names
            if any(map(_is_private, name.split("."))) or name in _LAST_PARTS
        ]
    return found


_ALL_NAMES = (*compat.NAMES, *compat.OPTIONAL)
_LAST_PARTS = {path.removesuffix(".default").rpartition(".")[2] for path in _ALL_NAMES} - {
    "FakeTensorMode",
    "TorchDispatchMode",
}


def test_no_other_file_has_a_private_name() -> None:
    own = _own_names()
    found = {path: _private_names_of_torch(path.read_text(), own) for path in SOURCES}
    assert not {path: names for path, names in found.items() if names}


# --- each name taken away -------------------------------------------------------------------------


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # A fork of a process with an OpenMP pool would wait for its threads.
    return run_python(*arguments, cwd=ROOT, OMP_NUM_THREADS="1", **environment)


_NAMES = [name for name in _ALL_NAMES if name not in compat.LACKING]
_PARTS = [_NAMES[n::16] for n in range(16)]  # each imports PyTorch once, which takes a while


@pytest.mark.parametrize(
    "names", [_PARTS[0], *(pytest.param(part, marks=pytest.mark.complete) for part in _PARTS[1:])]
)
def test_calls_without_a_name(names: list[str]) -> None:
    _run(compat_without.__file__, *names)


@pytest.mark.complete
@pytest.mark.parametrize(
    ("tests", "selected"),
    [
        ("operators", "functional_derivatives or checkpoint"),
        # Without what the fast route alone does or says.
        ("batched_gradients", "not a_batch_is_one and not sparse_gradients"),
    ],
)
def test_derivatives_without_a_name(tests: str, selected: str) -> None:
    arguments = ("-q", "-k", selected, f"tests/core/test_{tests}.py")
    _run(compat_without.__file__, "torch._C._len_torch_dispatch_stack", "--", *arguments)


def test_a_missing_dispatch_mode_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mode(compat._NoDispatchMode):
        pass

    with pytest.raises(RuntimeError, match="lacks the modes that this needs"):
        Mode("argument")
    monkeypatch.setitem(compat._objects, "torch._subclasses.fake_tensor.FakeTensorMode", None)
    with pytest.raises(RuntimeError, match="lacks the modes that this needs"):
        compat.tensors_without_memory()


# --- the range ------------------------------------------------------------------------------------


_REFUSED, _TAKEN = (
    ("2.5.1+cu124", "1.13.1", "3.0.0", "3.1.0a0+git1234"),
    ("2.6.0a0+git1234", "2.99.0.dev20270101+cpu", "of-my-own"),
)

# Each in a fork of its own: PyTorch is imported once for all of them.
_IMPORT_AS = """if True:
    import json, os, sys, torch, traceback
    for version in sys.argv[1:]:
        if os.fork():
            os.wait()
            continue
        torch.__version__, error = version, ""
        try:
            import fastattn
        except BaseException:
            error = traceback.format_exc()
        print(json.dumps([version, error]), flush=True)
        os._exit(0)
"""


@pytest.fixture(scope="module")
def errors() -> dict[str, str]:
    """The traceback of the import with each version of PyTorch; empty if it is accepted."""
    done = _run("-c", _IMPORT_AS, *_REFUSED, *_TAKEN)
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.mark.complete
@pytest.mark.parametrize("version", _REFUSED)
def test_a_version_out_of_range_is_refused_by_name(version: str, errors: dict[str, str]) -> None:
    last = errors[version].splitlines()[-1]
    assert last.startswith("ImportError: fastattn needs torch>=2.6,<3")
    assert f"torch {version} is installed" in last
    assert "AttributeError" not in errors[version]


@pytest.mark.complete
@pytest.mark.parametrize("version", _TAKEN)
def test_a_version_in_range_is_accepted(version: str, errors: dict[str, str]) -> None:
    assert errors[version] == ""


def test_a_checked_version_lacks_no_name() -> None:
    assert compat.is_untested() or not compat.MISSING


def test_the_range_equals_pyprojects() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert f'dependencies = ["torch{compat.RANGE}"]' in project
    newest = "{}.{}".format(*compat.NEWEST_TESTED)
    versions = re.search(r"TORCH_VERSIONS .?= (.+)", (ROOT / "Makefile").read_text())
    assert versions is not None
    tested = versions[1].split()
    assert tested[0].startswith("{}.{}.".format(*compat.OLDEST))
    assert tested[-1].startswith(f"{newest}.")


@pytest.mark.parametrize(("version", "untested"), [("2.6.0", False), ("2.99.1", True)])
def test_info_names_untested_versions(
    version: str, untested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert ("untested version" in info.format_text(info.collect())) is untested


def test_info_names_what_pytorch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "lacks" not in info.format_text({**info.collect(), "torch_lacks": []})
    monkeypatch.setattr(compat, "LACKING", ["torch._C._any_requires_grad"])
    assert "lacks torch._C._any_requires_grad" in info.format_text(info.collect())


# --- the OpenMP runtime ---------------------------------------------------------------------------


@pytest.fixture
def hashed_runtime(tmp_path: Path) -> Path:
    """A copy of the OpenMP runtime under a name of its own, as PyTorch's arm64 wheels have it."""
    (own,) = _openmp.runtimes()
    copy = tmp_path / "torch.libs/libgomp-0123.so.1.0.0"
    copy.parent.mkdir()
    name, other = b"libgomp.so.1\0", b"libgomq.so.1\0"  # what the loader goes by
    content = Path(own).read_bytes()
    assert name in content
    copy.write_bytes(content.replace(name, other))
    return copy


_LOAD_THE_NATIVE_MODULE = """if True:
    import ctypes, importlib.util, sys
    from pathlib import Path

    def load(name, path):
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    _, openmp, native, runtime, shared = sys.argv
    openmp = load("_openmp", openmp)
    ctypes.CDLL(runtime)  # as libtorch_cpu does: its symbols stay out of the global scope
    assert openmp.in_use() is None
    if shared == "shared":
        openmp.share([Path(runtime).parent])
        assert openmp.in_use() == runtime
    load("_cpu", native)
"""


@pytest.mark.parametrize("shared", ["shared", "alone"])
def test_the_native_module_takes_the_runtime_of_torch(
    shared: str, native: ModuleType, hashed_runtime: Path
) -> None:
    arguments = (_openmp.__file__, native.__file__, str(hashed_runtime), shared)
    done = _run("-c", _LOAD_THE_NATIVE_MODULE, *map(str, arguments), LD_DEBUG="bindings")
    lines = [line for line in done.stderr.splitlines() if "symbol `GOMP_parallel'" in line]
    (bound,) = [line.partition(" to ")[2] for line in lines if "_cpu." in line]
    assert (str(hashed_runtime) in bound) is (shared == "shared")


def test_info_warns_of_a_second_runtime() -> None:
    def described(runtimes: list[str], shared: str | None) -> str:
        openmp = {"runtimes": runtimes, "shared": shared}
        return info.format_text({**info.collect(), "openmp": openmp})

    hashed, own = "libgomp-0123.so.1.0.0", "libgomp.so.1"
    assert "WARNING" not in described([own], own)
    assert "WARNING: 2 runtimes: libgomp-0123.so.1.0.0, libgomp.so.1" in described(
        [hashed, own], None
    )
    assert "libgomp.so.1 is loaded too" in described([hashed, own], hashed)


@pytest.mark.complete
def test_info_sees_a_second_runtime(hashed_runtime: Path) -> None:
    script = f"""if True:
        import ctypes
        from fastattn import info
        import fastattn._cpu
        ctypes.CDLL({str(hashed_runtime)!r})
        print(info.collect()["openmp"]["runtimes"])
        print(info.format_text(info.collect()))
    """
    done = _run("-c", script)
    assert hashed_runtime.name in done.stdout.splitlines()[0]
    assert f"{hashed_runtime.name} is loaded too" in done.stdout
