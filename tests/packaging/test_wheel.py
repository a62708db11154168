"""The wheels of `make wheel`: contents, supported systems, reproducible bytes.

All slow: they need a package index. The real kernels are compiled for this machine alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from installation import EXT_SUFFIX, ROOT, copy_source, printed_by, run, source_files, symbols

pytestmark = [pytest.mark.slow, pytest.mark.without_kernels]

MANYLINUX = re.compile(r"manylinux_2_(?:1[0-9]|2[0-8])_(?:x86_64|aarch64)\.whl$")
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"


def interpreter(name: str) -> str | None:
    """The Python of this name that `make wheel` takes: on PATH, or of any version of pyenv."""
    candidates = [name] if shutil.which(name) else []
    if shutil.which("pyenv"):
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=True).stdout
        # What pyenv puts on PATH runs only the versions that it has selected.
        found = sorted(Path(root.strip(), "versions").glob(f"*/bin/{name}"))
        candidates += [str(path) for path in found]
    for python in candidates:
        if subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
            return python
    return None


NAMES = [f"python3.{minor}" for minor in range(10, 15) if minor != sys.version_info.minor]
OTHERS = {name: python for name in NAMES if (python := interpreter(name))}


@pytest.fixture(scope="session")
def tools() -> Path:
    """The tools of `make wheel`, in the versions that it pins."""
    run(["make", "build/wheels/.stamp-tools", f"PYTHON={sys.executable}"], ROOT)
    return ROOT / "build/wheels/tools"


def make_wheel(source: Path, tools: Path, *variables: str, **environment: str) -> list[Path]:
    """The files that `make wheel` makes of a source tree, the sdist first."""
    folder = source / "build/wheels"
    folder.mkdir(parents=True)
    folder.joinpath("tools").symlink_to(tools)
    os.utime(source / ".ci/requirements/wheel.txt", (0, 0))
    (folder / ".stamp-tools").touch()
    settings = {"SOURCE_DATE_EPOCH": "1700000000", "FASTATTN_CPU_ISAS": "native"}
    run(["make", "wheel", *variables], source, timeout=1800, **settings, **environment)
    return sorted((source / "dist").iterdir(), key=lambda path: path.suffix == ".whl")


@pytest.fixture(scope="session")
def wheels(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The sdist, the wheel for this Python and, if there is another Python, its wheel."""
    pythons = " ".join([PYTHON, *list(OTHERS)[-1:]])
    source = copy_source(tmp_path_factory.mktemp("wheels") / "source")
    return make_wheel(source, tools, f"WHEEL_PYTHONS={pythons}")


def wheel_for(python: str, wheels: list[Path]) -> Path:
    """The wheel of a Python version."""
    tag = "cp" + python.removeprefix("python").replace(".", "")
    (found,) = [path for path in wheels if f"-{tag}-{tag}-" in path.name]
    return found


def test_a_wheel_has_only_the_package_and_the_kernels(wheels: list[Path]) -> None:
    wheel = wheel_for(PYTHON, wheels)
    assert MANYLINUX.search(wheel.name), wheel.name
    assert wheel.stat().st_size < 15e6
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    package = {name for name in names if name.startswith("fastattn/")}
    built = {f"fastattn/_cpu{EXT_SUFFIX}", "fastattn/_build.json"}
    assert package == {f for f in source_files() if f.startswith("fastattn/")} | built
    # No bundled library: `auditwheel` would put one into fastattn.libs.
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"fastattn"}
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    record = json.loads(zipfile.ZipFile(wheel).read("fastattn/_build.json"))
    assert "fastattn-cuda, which is not installed" in record["modules"]["cuda"]["reason"]


def test_a_wheel_needs_only_libc_and_the_openmp_runtime(wheels: list[Path], tmp_path: Path) -> None:
    zipfile.ZipFile(wheel_for(PYTHON, wheels)).extractall(tmp_path)
    library = tmp_path / f"fastattn/_cpu{EXT_SUFFIX}"
    shown = run(["readelf", "--dynamic", library], tmp_path).stdout
    needed = set(re.findall(r"NEEDED.*\[(.*?)\.so", shown))
    assert needed <= {"libgomp", "libgcc_s", "libc", "libm", "libpthread", "ld-linux-x86-64"}
    assert "libgomp" in needed
    # Only the entry point is visible: the C++ library inside serves this module alone.
    defined = symbols("-D", "--defined-only", library)
    assert [line.split()[-1] for line in defined] == ["PyInit__cpu"]


def test_a_wheel_installs_and_runs_without_a_compiler(wheels: list[Path], elsewhere: Path) -> None:
    python = elsewhere / "bin/python"
    wheel = wheel_for(PYTHON, wheels)
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel]
    run(install, elsewhere)
    bare = {"PATH": "/nowhere", "FASTATTN_CACHE_DIR": "/nonexistent"}
    run([elsewhere / "bin/fastattn", "verify", "--quick"], elsewhere, **bare)
    doctor = [elsewhere / "bin/fastattn", "doctor", "--json"]
    examined = run(doctor, elsewhere, fails=None, **bare)
    found = json.loads(examined.stdout)
    assert found["native_core"] is found["fresh_build"] is None, examined.stdout
    bench = [elsewhere / "bin/fastattn", "bench", "run", "--shapes", "sdpa B=1,H=2,L=64,D=32"]
    run([*bench, "--time-budget", "5", "--out", "results"], elsewhere, **bare)
    assert (elsewhere / "results/results.json").exists()
    script = "import fastattn._cpu as c; print(c.__file__)"
    where = run([python, "-c", script], elsewhere, **bare)
    assert where.stdout.startswith(str(elsewhere)), where.stderr


def promised_torch() -> list[str]:
    """The oldest and the newest version that `make test-torch` takes."""
    line = re.search(r"^TORCH_VERSIONS \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert line is not None
    oldest, *_, newest = line[1].split()
    return [oldest, newest]


@pytest.mark.parametrize("version", promised_torch())
def test_a_wheel_runs_with_this_torch(version: str, wheels: list[Path], tmp_path: Path) -> None:
    """By pip into an empty environment; gigabytes if there is no CPU build of PyTorch."""
    environment = tmp_path / "environment"
    run([sys.executable, "-m", "venv", "--without-pip", environment], tmp_path)
    pages = os.environ.get("TORCH_WHEELS", "https://download.pytorch.org/whl/cpu/torch/")
    install = [sys.executable, "-m", "pip", "--python", environment / "bin/python", "install"]
    links = [f"--find-links={page}" for page in pages.split()]
    wanted = [f"torch=={version}", wheel_for(PYTHON, wheels)]
    run([*install, *links, *wanted], tmp_path, timeout=3600)
    bare = {"PATH": "/nowhere", "FASTATTN_CACHE_DIR": "/nonexistent"}
    for command in (["verify", "--quick"], ["info"]):
        shown = run([environment / "bin/fastattn", *command], tmp_path, **bare)
    assert re.search(rf"^torch +{re.escape(version)}", shown.stdout, re.MULTILINE), shown.stdout


@pytest.mark.skipif(not OTHERS, reason="there is no other Python here")
def test_the_wheel_of_another_python_loads_in_it(wheels: list[Path], tmp_path: Path) -> None:
    other = list(OTHERS)[-1]
    zipfile.ZipFile(wheel_for(other, wheels)).extractall(tmp_path)
    library = next(tmp_path.glob("fastattn/_cpu*.so"))
    # The loader finds libgomp where torch is not: in the system.
    assert printed_by(library, "module.build_info()['isa']", OTHERS[other])


def test_the_kernels_are_compiled_once_for_all_pythons(wheels: list[Path]) -> None:
    objects = wheels[0].parents[1].glob("build/wheels/source/*/build/native/cpu/**/*.o")
    folders = {path.parent.name for path in objects if path.name == "module.o"}
    assert len(folders) == len(wheels) - 1
    assert all(folder.startswith("cpython-") for folder in folders)


def test_builds_are_reproducible(small_source: Path, tools: Path, tmp_path: Path) -> None:
    def digests(source: Path) -> dict[str, str]:
        made = make_wheel(source, tools, f"WHEEL_PYTHONS={PYTHON}")
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in made}

    other = tmp_path / "elsewhere/source"
    shutil.copytree(small_source, other)
    for path in other.rglob("*.py"):
        os.utime(path, (1, 1))
        path.chmod(0o600)
    first = digests(small_source)
    assert len(first) == 2
    assert first == digests(other)


def test_the_cuda_kernels_are_a_wheel_of_their_own(
    small_source: Path, elsewhere: Path, tools: Path
) -> None:
    """A file stands in for the library."""
    line = "Cuda compilation tools, release 13.0, V13.0.48"
    command = [sys.executable, "setup.py", "--quiet", "bdist_wheel", "--dist-dir", "without"]
    run(command, small_source, FASTATTN_NATIVE="0")
    (without,) = (small_source / "without").iterdir()
    (small_source / "raw").mkdir()
    with (
        zipfile.ZipFile(without) as before,
        zipfile.ZipFile(small_source / "raw" / without.name, "w") as after,
    ):
        for item in before.infolist():
            data = before.read(item)
            if item.filename == "fastattn/_build.json":
                record = json.loads(data)
                record["modules"]["cuda"] = {"built": True, "compiler": line}
                data = json.dumps(record).encode()
            after.writestr(item, data)
        after.writestr(f"fastattn/_cuda{EXT_SUFFIX}", "kernels")
    run([tools / "bin/python", ROOT / ".ci/split_wheel.py", "raw"], small_source)
    base, cuda = sorted((small_source / "raw").iterdir())
    assert cuda.name == base.name.replace("fastattn-", "fastattn_cuda-")
    names = zipfile.ZipFile(cuda).namelist()
    in_cuda = [name for name in names if not name.endswith("/") and ".dist-info/" not in name]
    assert in_cuda == [f"fastattn/_cuda{EXT_SUFFIX}"]
    bill = json.loads(zipfile.ZipFile(cuda).read(bill_of(cuda)))
    parts = [(part["name"], part["version"]) for part in bill["components"]]
    assert parts == [("cudart_static", "13.0.48")]

    def pip(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pip", "--python", elsewhere / "bin/python"]
        return run([*command, *arguments], elsewhere)

    script = "import fastattn, fastattn.builds as b; print(b.backend('cuda')['reason'])"
    pip("install", "--no-deps", base)
    used = run([elsewhere / "bin/python", "-c", script], elsewhere)
    assert "fastattn-cuda, which is not installed" in used.stdout, used.stderr
    pip("install", "--no-index", "--no-deps", cuda)
    (installed,) = elsewhere.glob("lib/python*/site-packages/fastattn/_cuda.*.so")
    pip("uninstall", "--yes", "fastattn-cuda")
    assert not installed.exists()
    assert (installed.parent / "__init__.py").exists()


def bill_of(wheel: Path) -> str:
    """The name of the bill of materials in a wheel."""
    (name,) = [n for n in zipfile.ZipFile(wheel).namelist() if n.endswith(".cdx.json")]
    return name


def test_the_sdist_names_neither_a_user_nor_the_time_of_its_build(wheels: list[Path]) -> None:
    with tarfile.open(wheels[0]) as archive:
        assert {(m.uid, m.gid, m.mtime) for m in archive} == {(0, 0, 1700000000)}


def test_a_release_has_these_wheels(tools: Path) -> None:
    # It only lists them. Building them takes a container engine: not run here.
    command = [tools / "bin/cibuildwheel", "--platform", "linux", "--print-build-identifiers"]
    done = run([*command, ROOT], ROOT)
    pythons = ("cp310", "cp311", "cp312", "cp313", "cp314", "cp314t")
    assert set(done.stdout.split()) == {
        f"{python}-manylinux_{arch}" for python in pythons for arch in ("x86_64", "aarch64")
    }
