"""The features of the processor, and which of them the system lets a program use."""

import errno
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

_cpu = pytest.importorskip("fastattn._cpu")
X86 = platform.machine() in ("x86_64", "AMD64")
CPUINFO = Path("/proc/cpuinfo")

# XCR0: whose registers the system saves.
SSE, AVX = 1 << 0 | 1 << 1, 1 << 2
AVX512 = 0b111 << 5
TILES = 0b11 << 17

# The bits read here, as an Intel Xeon of the generation "Sapphire Rapids" has them.
XEON = {
    "leaf1_ecx": 1 << 12 | 1 << 27 | 1 << 28 | 1 << 29,
    "leaf7_ebx": 1 << 5 | 1 << 8 | 1 << 16 | 1 << 17 | 1 << 28 | 1 << 30 | 1 << 31,
    "leaf7_ecx": 1 << 1 | 1 << 11,
    "leaf7_edx": 1 << 22 | 1 << 23 | 1 << 24 | 1 << 25,
    "leaf7_1_eax": 1 << 4 | 1 << 5,
    "xcr0": SSE | AVX | AVX512 | TILES,
    "tiles_allowed": True,
}
AVX2_NAMES = {"fma", "f16c", "bmi2", "avx2", "avx_vnni"}
AVX512_NAMES = {f"avx512{part}" for part in ("f", "dq", "cd", "bw", "vl", "vbmi")}
AVX512_NAMES |= {"avx512_vnni", "avx512_bf16", "avx512_fp16"}
TILE_NAMES = {"amx_tile", "amx_bf16", "amx_int8"}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, AVX2_NAMES | AVX512_NAMES | TILE_NAMES),
        ({"leaf7_1_eax": 1 << 21}, (AVX2_NAMES | AVX512_NAMES | TILE_NAMES | {"amx_fp16"})
         - {"avx_vnni", "avx512_bf16"}),
        ({"leaf7_edx": 0}, AVX2_NAMES | AVX512_NAMES - {"avx512_fp16"}),
        ({"tiles_allowed": False}, AVX2_NAMES | AVX512_NAMES),
        ({"xcr0": SSE | AVX | AVX512 | 1 << 17}, AVX2_NAMES | AVX512_NAMES),
        ({"xcr0": SSE | AVX | AVX512 | 1 << 18}, AVX2_NAMES | AVX512_NAMES),
        ({"xcr0": SSE | AVX | 0b011 << 5}, AVX2_NAMES),
        ({"xcr0": SSE}, {"bmi2"}),
        ({"xcr0": 0}, {"bmi2"}),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_feature_counts_where_the_system_saves_its_registers(changed, expected):
    assert set(_cpu.usable_features(**{**XEON, **changed})) == expected


@pytest.mark.skipif(
    not (X86 and CPUINFO.exists()), reason="reads the /proc/cpuinfo of x86-64 Linux"
)
def test_detected_features_equal_linuxs():
    shown = {}
    for line in CPUINFO.read_text().splitlines():
        key, _, value = line.partition(":")
        shown.setdefault(key.strip(), value.strip())
    found = _cpu.processor()
    assert found["vendor"] == shown["vendor_id"]
    assert found["family"] == int(shown["cpu family"])
    assert found["model"] == int(shown["model"])
    assert found["brand"] == shown["model name"]
    known = AVX2_NAMES | AVX512_NAMES | TILE_NAMES | {"amx_fp16"}
    flags = known & set(shown["flags"].split())
    tiles = {name for name in flags if name.startswith("amx_")}
    # A sandbox may refuse the tiles of a processor that has them.
    assert set(found["features"]) in (flags, flags - tiles)


def test_every_supported_instruction_set_has_its_features():
    features = set(_cpu.processor()["features"])
    needs = {
        "baseline": set(),
        "avx2": AVX2_NAMES - {"avx_vnni"},
        "avx512": {"avx2", "avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl"},
        "avx512_bf16": {"avx512_bf16"},
        "amx_bf16": {"amx_tile", "amx_bf16"},
    }
    info = _cpu.build_info()
    for isa in info["compiled"]:
        assert (isa in info["supported"]) == (needs[isa] <= features), isa
        assert (isa in info["supported"]) == (isa not in info["unsupported"]), isa
        assert info["unsupported"].get(isa, "a reason"), isa


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, ""),
        ({"leaf7_edx": 1 << 22}, "no AMX"),
        ({"leaf7_edx": 1 << 24}, "no AMX"),  # tiles without products of bf16
        ({"leaf7_edx": 0, "error": errno.ENOSYS}, "no AMX"),
        ({"xcr0": SSE | AVX | AVX512}, "does not save"),
        ({"xcr0": SSE | AVX | AVX512 | 1 << 17}, "does not save"),
        ({"error": errno.ENOSPC}, "alternate signal stack is too small"),
        ({"error": errno.EINVAL}, "5.16 or later"),
        ({"error": errno.ENOSYS}, "5.16 or later"),
        ({"error": errno.EPERM}, os.strerror(errno.EPERM)),
    ],
    ids=str,
)
def test_missing_tiles_have_a_reason(changed, expected):
    registers = {name: XEON[name] for name in ("leaf7_edx", "leaf7_1_eax", "xcr0")}
    reason = _cpu.why_no_tiles("bf16", **{**registers, "error": 0, **changed})
    assert expected in reason
    assert bool(expected) == bool(reason)
    fp16 = {**registers, "leaf7_edx": 1 << 24, "leaf7_1_eax": 1 << 21, "error": 0}
    if "leaf7_edx" not in changed:
        assert _cpu.why_no_tiles("fp16", **{**fp16, **changed}) == reason
        without = _cpu.why_no_tiles("fp16", **{**registers, "error": 0, **changed})
        assert without == "the processor has no AMX with fp16"


def test_no_code_of_an_instruction_set_runs_when_the_module_is_loaded() -> None:
    """It would be illegal on other processors: only these files may have initialisers."""
    for_every_processor = {
        path.name for path in (Path(__file__).resolve().parents[2] / "csrc/cpu").glob("*.cpp")
    }
    symbols = subprocess.run(["nm", _cpu.__file__], capture_output=True, text=True, check=True)
    initialisers = set(re.findall(r"_GLOBAL__sub_I_(\S+?\.cpp)", symbols.stdout))
    assert initialisers
    assert initialisers <= for_every_processor


_SMALL_STACK = """
import ctypes, importlib.util, json, sys
class Stack(ctypes.Structure):
    _fields_ = [("memory", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(8192)  # a frame with AVX-512 fits, one with tiles does not
stack = Stack(ctypes.addressof(memory), 0, len(memory))
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
spec = importlib.util.spec_from_file_location("_cpu", sys.argv[1])
core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)
print(json.dumps(core.build_info()["unsupported"]))
"""


@pytest.mark.skipif(not CPUINFO.exists(), reason="a signal stack of Linux")
def test_a_small_signal_stack_disables_only_the_tiles() -> None:
    command = [sys.executable, "-c", _SMALL_STACK, _cpu.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    unsupported, usual = json.loads(done.stdout), _cpu.build_info()["unsupported"]
    if "amx_bf16" in _cpu.build_info()["supported"]:
        assert "alternate signal stack is too small" in unsupported.pop("amx_bf16")
    assert unsupported == usual
