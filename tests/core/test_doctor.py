"""`fastattn doctor`: every check reports its own fault, and none reports a healthy machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from child_process import run_python
from gemms import only

from fastattn import _cgroup, cli, doctor, evidence

pytestmark = pytest.mark.without_kernels

ISA = {"isa": "avx512", "supported": ["baseline", "avx2", "avx512"], "unsupported": {}}
UP_TO_AVX2 = {**ISA, "isa": "avx2", "supported": ["baseline", "avx2"]}
# As csrc/plans/cpu.py says it.
NOT_REQUESTED = "not requested (FASTATTN_CPU_ISAS=native)"
REJECTED = "g++ rejects -march=x86-64-v4: error: bad value"


def built(cuda: str = "no CUDA compiler was found", **cpu: Any) -> dict[str, Any]:
    """The backends, with the reason against the CUDA kernels."""
    of_cpu = {"built": True, "reason": None, **cpu}
    return {"cpu": of_cpu, "cuda": {"built": False, "reason": cuda}}


def healthy() -> dict[str, Any]:
    """The facts of a machine without any problem."""
    return {
        "torch": "2.13.0",
        "torch_untested": False,
        "fast_route_lacks": [],
        "cpu": {"cores": 8, "usable_cores": 8, "quota": None, "features": ["avx2", "avx512f"]},
        "threads": 8,
        "openmp": {"runtimes": ["libgomp.so.1"], "shared": "libgomp.so.1"},
        "isa": ISA,
        "backends": built(left_out={}, stale=False),
        "environment": {},
        "choices": [{"device": "cuda", "source": "your `fastattn tune` of 2026-11-22"}],
        "flushes_subnormals": False,
        "subnormal_slowdown": 1.0,
        "linear_layers": {},
    }


def without_kernels(reason: str) -> dict[str, Any]:
    """Facts of an installation without CPU kernels."""
    return {"isa": None, "backends": built(built=False, reason=reason)}


def on_cpu(**changed: Any) -> dict[str, Any]:
    """Facts of another processor."""
    return {"cpu": {**healthy()["cpu"], **changed}}


def refused(reason: str) -> dict[str, Any]:
    """Facts of a processor that cannot run AMX, for the given reason."""
    return {"isa": {**ISA, "unsupported": {"amx_bf16": reason}}}


# By level: check, difference to a healthy machine, and words of the finding and its fix.
FINDINGS = {
    "problem": [
        ("torch_version", {"fast_route_lacks": ["torch._C._x"]}, "2.13.0 lacks", "newer"),
        (
            "native_core",
            without_kernels("no C++ compiler was found"),
            "no C++ compiler was found",
            "apt-get install g++",
        ),
        (
            "native_core",
            without_kernels('ValueError: FASTATTN_CPU_ISA: "mmx" is not available here'),
            "mmx",
            "unset FASTATTN_CPU_ISA",
        ),
        ("native_core", without_kernels("there was no native build"), "no native", "pip"),
        (
            "cuda_kernels",
            {"backends": built("it was built but cannot be used: ImportError: version 0.1.0")},
            "cannot be used: ImportError: version 0.1.0",
            "pip uninstall fastattn-cuda",
        ),
        ("fresh_build", {"backends": built(stale=True)}, "csrc has changed", "make build"),
        (
            "complete_build",
            {"isa": UP_TO_AVX2, "backends": built(left_out={"avx512": NOT_REQUESTED})},
            "avx512: not requested",
            "build again without FASTATTN_CPU_ISAS=native: `pip install",
        ),
        (
            "complete_build",
            {"isa": UP_TO_AVX2, "backends": built(left_out={"avx512": REJECTED})},
            "avx512: g++ rejects",
            "build again with a newer compiler: `pip install",
        ),
        (
            "instruction_set",
            {"isa": {**ISA, "isa": "avx2"}, "environment": {"FASTATTN_CPU_ISA": "avx2"}},
            "forces avx2; the choice for this processor is avx512",
            "unset FASTATTN_CPU_ISA",
        ),
        (
            "tiles",
            refused("Linux refuses the tiles of AMX: Operation not permitted"),
            "Operation not permitted",
            "seccomp",
        ),
        ("tiles", refused("the system does not save the tiles"), "not save", "Linux 5.16"),
        (
            "one_openmp",
            {"openmp": {"runtimes": ["libgomp-1.so", "libgomp.so.1"], "shared": None}},
            "2 OpenMP runtimes are loaded: libgomp-1.so, libgomp.so.1",
            "import torch before",
        ),
        ("threads", on_cpu(usable_cores=4), "8 threads on 4 usable", "OMP_NUM_THREADS=4"),
        ("threads", {"threads": 9}, "9 threads on 8", "set_num_threads(8)"),
        ("threads", on_cpu(quota=2.5), "time of 2.5", "OMP_NUM_THREADS=2"),
        ("threads", on_cpu(quota=0.5), "time of 0.5", "OMP_NUM_THREADS=1"),
        ("subnormals", {"flushes_subnormals": True}, "-ffast-math", "set_flush_denormal"),
        (
            "interpreted_triton",
            {"environment": {"TRITON_INTERPRET": "1"}},
            "interpreted",
            "unset TRITON_INTERPRET",
        ),
    ],
    "note": [
        ("torch_version", {"torch": "2.99", "torch_untested": True}, "2.99 is newer", "verify"),
        (
            "measured_gpu",
            {"choices": [{"device": "cuda", "source": evidence.UNVERIFIED}]},
            "unverified on this GPU",
            "fastattn tune",
        ),
        (
            "native_core",
            without_kernels("the native core is built on Linux only; this is darwin"),
            "darwin",
            "use Linux",
        ),
        (
            "one_openmp",
            {"openmp": {"runtimes": ["libgomp.so.1", "libiomp5.so"], "shared": "libgomp.so.1"}},
            "share libgomp.so.1",
            "OMP_WAIT_POLICY=passive",
        ),
        (
            "idle_cores",
            {"threads": 1, "environment": {"OMP_NUM_THREADS": "1"}},
            "1 of 8 cores",
            "torchrun",
        ),
        (
            "linear_layers",
            {
                "linear_layers": {
                    "float32": {"torch": 31.0, "ours": 31.0},
                    "bfloat16": {"torch": 6.0, "ours": 46.0},
                }
            },
            "in bfloat16 at 6 GFLOP/s here, in float32 at 31",
            "accelerate(model)` makes it bfloat16 46",
        ),
        ("subnormals", {"subnormal_slowdown": 40.0}, "40 times", "set_flush_denormal(True)"),
    ],
}


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The strongest instruction set is the choice, whatever processor runs the tests."""
    row, choose = evidence.Row("isa", "cpu", "", "the strongest", "a test"), evidence.choose
    monkeypatch.setattr(
        evidence, "choose", lambda *of, **more: row if of[0] == "isa" else choose(*of, **more)
    )


@pytest.mark.parametrize(
    ("level", "check", "changed", "what", "fix"),
    [(level, *row) for level, rows in FINDINGS.items() for row in rows],
)
def test_only_the_right_check_finds_a_fault(
    level: str, check: str, changed: dict[str, Any], what: str, fix: str
) -> None:
    found = doctor.examine({**healthy(), **changed})
    (name,) = [name for name, finding in found.items() if finding]
    assert name == check
    finding = found[name]
    assert finding is not None
    assert finding.level == level
    assert what in finding.what
    assert fix in finding.fix
    text = doctor.format_text(found)
    assert f"{level}: {finding.what}\n    fix: {finding.fix}\n" in text


def test_every_check_has_a_fault() -> None:
    named = {row[0] for rows in FINDINGS.values() for row in rows}
    assert {check.__name__ for check in doctor.CHECKS} == named


@pytest.mark.parametrize(
    "changed",
    [
        {},
        on_cpu(quota=7.5),
        on_cpu(usable_cores=None),  # as on macOS
        {"threads": 8, "environment": {"OMP_NUM_THREADS": "8"}},
        {"threads": 2, "environment": {"OMP_NUM_THREADS": "2"}, **on_cpu(quota=2.0)},
        {"environment": {"FASTATTN_CPU_ISA": "avx512"}},
        refused("the processor has no AMX with bf16"),
        # The processor lacks it.
        {"backends": built(left_out={"avx512_bf16": REJECTED})},
        # FASTATTN_CPU_ISAS=native.
        {
            "isa": {**ISA, "supported": ["baseline", "avx512"]},
            "backends": built(left_out=dict.fromkeys(("avx2", "avx512_bf16"), NOT_REQUESTED)),
        },
        # The compiler is too old for one that is not the choice.
        {
            "isa": {**ISA, "supported": ["baseline", "avx512"]},
            "backends": built(left_out={"avx2": REJECTED}),
        },
    ],
)
def test_doctor_reports_nothing_on_a_healthy_machine(changed: dict[str, Any]) -> None:
    found = doctor.examine({**healthy(), **changed})
    assert not any(found.values())
    assert doctor.format_text(found) == f"{len(found)} of {len(found)} checks found nothing"


def with_tiles(left_out: dict[str, str]) -> dict[str, Any]:
    """A processor with AMX, on which the build has all other instruction sets."""
    isas = ["baseline", "avx2", "avx512", "avx512_bf16", "amx_bf16"]
    return {
        **healthy(),
        **on_cpu(features=["avx2", "avx512f", "avx512_bf16", "amx_bf16"]),
        "isa": {**ISA, "supported": [isa for isa in isas if isa not in left_out]},
        "backends": built(left_out=left_out),
    }


def test_a_complete_build_has_the_kernels_of_each_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def choose(choice: str, device: str, *, dtype: torch.dtype) -> evidence.Row:
        use = "amx_bf16" if dtype == torch.bfloat16 else "the strongest"
        return evidence.Row("isa", "cpu", "", use, "a test")

    monkeypatch.setattr(evidence, "choose", choose)
    assert doctor.complete_build(with_tiles({"avx512": NOT_REQUESTED})) is None
    without_tiles = doctor.complete_build(
        with_tiles({"avx512": NOT_REQUESTED, "amx_bf16": REJECTED})
    )
    assert without_tiles is not None
    assert "amx_bf16: g++ rejects" in without_tiles.what
    assert "avx512:" not in without_tiles.what
    assert without_tiles.fix.startswith("build again with a newer compiler: ")
    without_both = doctor.complete_build(
        with_tiles({"avx512_bf16": NOT_REQUESTED, "amx_bf16": REJECTED})
    )
    assert without_both is not None
    cure = "without FASTATTN_CPU_ISAS=native and with a newer compiler"
    assert without_both.fix.startswith(f"build again {cure}: ")


def test_the_status_is_1_for_problems_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "collect", lambda: {**healthy(), "threads": 9})
    assert cli.main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {check.__name__ for check in doctor.CHECKS}
    assert found["threads"]["level"] == "problem"
    assert found["idle_cores"] is None
    monkeypatch.setattr(doctor, "collect", lambda: {**healthy(), "torch_untested": True})
    assert cli.main(["doctor"]) == 0
    assert "note: torch 2.13.0 is newer" in capsys.readouterr().out


def test_flushed_subnormals_are_reported() -> None:
    assert not doctor.collect()["flushes_subnormals"]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor keeps subnormal numbers")
    try:
        assert doctor.collect()["flushes_subnormals"]
    finally:
        torch.set_flush_denormal(False)
    facts = doctor.collect()
    assert facts["subnormal_slowdown"] > 0
    with only("ours"):
        speeds = doctor.collect()["linear_layers"]
    assert speeds.keys() == {"float32", "bfloat16", "float16"}
    assert all(speed > 0 for gemms in speeds.values() for speed in gemms.values())


@pytest.mark.complete
def test_doctor_reports_changes_by_the_programs_modules(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import torch\ntorch.set_num_threads(1000)\n")
    command = ("-m", "fastattn", "doctor", "--import", "program")
    done = run_python(*command, cwd=tmp_path, timeout=120, status=1)
    assert "problem: torch runs 1000 threads" in done.stdout


# The quota of control groups


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        # The smallest on the way up.
        (
            {
                "proc/self/cgroup": "0::/pod/container\n",
                "sys/fs/cgroup/cpu.max": "800000 100000\n",
                "sys/fs/cgroup/pod/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/pod/container/cpu.max": "max 100000\n",
            },
            2.0,
        ),
        # Both versions beside each other: the quota is in the first.
        (
            {
                "proc/self/cgroup": "4:memory:/a\n3:cpu,cpuacct:/a\n0::/a\n",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/memory/a/cpu.max": "1 100000\n",
            },
            0.5,
        ),
        # A container that sees its own group as the root, and the host's path of it.
        (
            {
                "proc/self/cgroup": "1:cpu:/docker/0123\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
    ],
)
def test_the_quota_of_control_groups(
    files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert _cgroup.cpu_quota(tmp_path) == quota
