"""Copies of the source tree to build and install, and commands that run beside this environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXT_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")

STAND_IN_KERNEL = """
#define STRING_(x) #x
#define STRING(x) STRING_(x)
namespace fastattn { namespace FASTATTN_ISA {
extern const char* const isa;
const char* const isa = STRING(FASTATTN_ISA);
}}
"""
# Python's own interface: pybind11's headers would take most of the time of a build.
STAND_IN_MODULE = """
#include <Python.h>
#include <string>
namespace fastattn {
namespace baseline { extern const char* const isa; }
#if FASTATTN_HAVE_AVX2
namespace avx2 { extern const char* const isa; }
#endif
#if FASTATTN_HAVE_AVX512
namespace avx512 { extern const char* const isa; }
#endif
#if FASTATTN_HAVE_AVX512_BF16
namespace avx512_bf16 { extern const char* const isa; }
#endif
}
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_cpu", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit__cpu() {
  std::string compiled = fastattn::baseline::isa;
#if FASTATTN_HAVE_AVX2
  compiled += std::string(" ") + fastattn::avx2::isa;
#endif
#if FASTATTN_HAVE_AVX512
  compiled += std::string(" ") + fastattn::avx512::isa;
#endif
#if FASTATTN_HAVE_AVX512_BF16
  compiled += std::string(" ") + fastattn::avx512_bf16::isa;
#endif
  PyObject* module = PyModule_Create(&definition);
  if (module != nullptr) PyModule_AddStringConstant(module, "compiled", compiled.c_str());
  return module;
}
"""


def run(
    command: list[str | Path],
    cwd: Path,
    unset: tuple[str, ...] = (),
    timeout: float = 600,
    fails: bool | None = False,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run to the end, without an error unless it ``fails`` (None: it may).

    The environment is this process's, without what steers a build or Triton.
    """
    steering = ("FASTATTN_REQUIRE_NATIVE", "FASTATTN_NATIVE", "FASTATTN_SANITIZE", "PYTHONPATH")
    steering += ("MAKEFLAGS", "MAKELEVEL", "ARGS", "TRITON_INTERPRET")
    kept = {k: v for k, v in os.environ.items() if k not in (*steering, *unset)}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={"FASTATTN_CUDA": "0", **kept, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert fails in (None, done.returncode != 0), done.stdout + done.stderr
    return done


def source_files() -> list[str]:
    """Everything that belongs to the package's source, relative to the root."""
    trees = [p for tree in ("csrc", "fastattn") for p in (ROOT / tree).rglob("*") if p.is_file()]
    built = {".so", ".pyc", ".o"}
    return sorted(
        str(path.relative_to(ROOT))
        for path in trees
        if path.suffix not in built
        and path.name != "_build.json"
        and "__pycache__" not in path.parts
    )


def copy_source(folder: Path) -> Path:
    """Copy everything that a build needs."""
    top = "setup.py pyproject.toml MANIFEST.in README.md LICENSE Makefile CHANGELOG.md "
    top += "CONTRIBUTING.md SECURITY.md licenses/pybind11.txt "
    top += ".ci/run .ci/split_wheel.py .ci/requirements/wheel.txt"
    for name in [*top.split(), *source_files()]:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    return folder


def printed_by(library: Path, expression: str, python: str = sys.executable) -> str:
    """Print an expression of a native ``module`` that is loaded alone."""
    name = library.name.partition(".")[0]
    script = f"""if True:
        import importlib.util
        spec = importlib.util.spec_from_file_location({name!r}, {str(library)!r})
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        print({expression})
    """
    return run([python, "-c", script], ROOT).stdout


def symbols(*arguments: str | Path) -> list[str]:
    """The symbols of a library, by nm."""
    return run(["nm", "-C", *arguments], ROOT).stdout.splitlines()
