"""The first-use check of the CUDA kernels, under the emulator: right ones pass, mutants do not."""

# ruff: noqa: E501  (source lines are quoted whole)
from __future__ import annotations

import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import emulator
import pytest
import torch
from check_cases import declined
from child_process import run_python
from emulated import Emulated
from mutants import Mutant
from processors import on_a_gpu

import fastattn
from fastattn import selftest
from fastattn.testing.selftest import SELFTESTS, faults

QUICK = ("append_to_cache", "encode_memory", "merge_states", "sinusoidal_encoding")


@pytest.mark.parametrize(
    "op", [op if op in QUICK else pytest.param(op, marks=pytest.mark.slow) for op in SELFTESTS]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_right_kernels_pass(op: str, dtype: torch.dtype, adapter: ModuleType) -> None:
    with Emulated(adapter).active(), selftest.switched_off():
        assert faults("cuda", op, dtype, torch.device("cpu")) == []


@pytest.mark.parametrize("op", SELFTESTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_no_case_is_declined(op: str, dtype: torch.dtype, adapter: ModuleType) -> None:
    assert declined("cuda", adapter, op, dtype) == []


@pytest.mark.slow
@pytest.mark.parametrize("op", ["scaled_dot_product_attention", "varlen_attention"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_right_kernels_for_hopper_pass(op: str, dtype: torch.dtype, adapter: ModuleType) -> None:
    adapter._cuda.allow_hopper(True)
    try:
        test_right_kernels_pass(op, dtype, adapter)
        assert "attention_backward_q_hopper" in adapter._cuda.take_launches()
    finally:
        adapter._cuda.allow_hopper(False)


def test_the_cases_are_those_of_every_operator(adapter: ModuleType) -> None:
    forward = {op for op in adapter.__all__ if not op.endswith(("_backward", "why_not"))}
    assert forward == set(SELFTESTS)


X = torch.linspace(-2, 2, 2 * 3 * 5 * 8).view(2, 3, 5, 8)


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FASTATTN_SELFTEST")


def test_the_first_call_checks_and_gives_the_bits_of_any_call(
    fresh: None, adapter: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_a_gpu(adapter, monkeypatch, "cuda"), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "first call checks cuda" in str(fastattn.explain("sinusoidal_encoding", X))
        first = fastattn.sinusoidal_encoding(X)
        assert fastattn.explain("sinusoidal_encoding", X).runs == "cuda"
        monkeypatch.setenv("FASTATTN_SELFTEST", "0")
        selftest.forget()
        assert torch.equal(fastattn.sinusoidal_encoding(X), first)


# Mistakes in an index or a barrier, of kernels that compile fast.
MUTANTS = {
    "sinusoidal": Mutant("wrong partner", "sinusoidal.h", "c0 / 2 + i", "c0 / 2 + i + 1"),
    "merge_states": Mutant(
        "half of the lanes",
        "merge_states.h",
        "for (int m = p.lanes / 2; m > 0; m /= 2) d +=",
        "for (int m = p.lanes / 2; m > 1; m /= 2) d +=",
    ),
    "encode_memory": Mutant(
        "the factor of another place",
        "encode_memory.h",
        "factors[j * p.factor_stride + c * kN + e] * x[e]",
        "factors[(j + 1) % p.J * p.factor_stride + c * kN + e] * x[e]",
    ),
}


# Of two emulated modules in one process the second may run kernels of the first.
USE = """
import sys
from pathlib import Path
import emulator, pytest, torch
from processors import on_a_gpu
import fastattn
X = torch.linspace(-2, 2, 2 * 3 * 5 * 8).view(2, 3, 5, 8)
stem = sys.argv[2]
call = {
    "sinusoidal": lambda: fastattn.sinusoidal_encoding(X),
    "merge_states": lambda: fastattn.merge_states(X, X[..., 0], X, X[..., 1])[0],
    "encode_memory": lambda: fastattn.encode_memory(X[0].long().abs(), X[0, 0]),
}[stem]
with on_a_gpu(emulator.load_from(Path(sys.argv[1])), pytest.MonkeyPatch(), "cuda"):
    with pytest.warns(fastattn.selftest.SelfTestWarning, match=f"kernels of {stem}.* in float32"):
        out = call()
    with fastattn.use_backend("cuda"), pytest.raises(RuntimeError, match="failed its check"):
        call()
    with fastattn.use_backend("reference"):
        assert torch.equal(call(), out)
"""


def copied_sources(folder: Path) -> Path:
    """A copy of csrc/ with all that the kernels include, to change it."""
    csrc = folder / "csrc"
    shutil.copytree(emulator.ROOT / "csrc/cuda", csrc / "cuda")
    for header in ("both.h", "mask_program.h", "params.h"):
        shutil.copy2(emulator.ROOT / "csrc" / header, csrc)
    return csrc


def built_with(mutant: Mutant, source: str, element: str, folder: Path) -> Path:
    """The emulated module, with the mutant in the kernels of one source and element type."""
    csrc = copied_sources(folder)
    H100.put_into(csrc / "cuda/kernels")
    mutant.put_into(csrc / "cuda/kernels")
    return emulator.build_changed(csrc, folder / "build", [source], element)


@pytest.mark.complete
@pytest.mark.parametrize(
    "stem",
    [x if x == "merge_states" else pytest.param(x, marks=pytest.mark.slow) for x in MUTANTS],
)
def test_a_mutant_is_found_and_not_used(stem: str, fresh: None, tmp_path: Path) -> None:
    library = built_with(MUTANTS[stem], stem, "F32", tmp_path)
    done = run_python("-c", USE, str(library), stem, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


@dataclass(frozen=True)
class Found(Mutant):
    """A mistake that one case of the check finds and no other."""

    op: str
    case: str  # the start of its name
    source: str  # that is compiled with it
    element: str = "F32"


# The emulator's Hopper has 3, so that a few tiles are many.
H100 = Mutant(
    "132 multiprocessors", "../launch.h", "{hopper_allowed(), 3}", "{hopper_allowed(), 132}"
)
ATTENTION, HOPS = "scaled_dot_product_attention", "memory_hop_attention"
DECODE, VARLEN = "decode_attention", "varlen_attention"
LONG_HOPS = "batch=2-rows=520-width=21-activation=sigmoid"
LONG_LINEAR_HOPS = "batch=2-rows=520-width=24-mask=BN-normalize=none"
FOUND = (
    Found("one entry", "decode.h", "int64_t entry = p.entries == nullptr ? b : p.entries[b]; if", "int64_t entry = b; if", "append_to_cache", "first-use-entries", "decode"),
    Found("one page", "decode.h", "b * p.block_table_stride + at / p.page_size]; at", "b * p.block_table_stride]; at", "append_to_cache", "first-use-pages", "decode"),
    Found("the next row of a boolean mask", "scores.h", "static_cast<const uint8_t*>(p.mask.data)[n]", "static_cast<const uint8_t*>(p.mask.data)[n + (i + 1 < p.Lq ? p.mask.stride[2] : 0)]", ATTENTION, "first-use-mask", "sdpa_forward"),
    Found("gradients of averaged weights", "sdpa_pairs.h", "g / static_cast<float>(p.Hq)", "g", ATTENTION, "first-use-mask", "sdpa_backward"),
    Found("a sum of weights", "sdpa_weights.h", "static_cast<float>(total) * p.factor", "static_cast<float>(total)", ATTENTION, "first-use-mask", "sdpa_weights"),
    Found("any operand is needed", "mask_program.h", "stack = stack >> width | (stack & ~below);", "stack = stack >> width & (stack | below);", ATTENTION, "first-use-options", "sdpa_forward"),
    Found("the blocks of the first head", "mask_program.h", "repeated(h, step.heads)", "repeated(0, step.heads)", ATTENTION, "first-use-options", "sdpa_forward"),
    Found("the bits of one key", "mask_program.h", "++m, bits += words", "++m", ATTENTION, "first-use-options", "sdpa_forward"),
    Found("ids of queries alone", "mask_program.h", "ids[k] == own", "data[j + k] == own", ATTENTION, "first-use-options", "sdpa_forward"),
    Found("splits keep their own maximum", "memory_hops_stream.h", "shrink_to(partial_of(hops, n)[width], m)", "shrink_to(m, m)", HOPS, LONG_HOPS, "memory_hops"),
    Found("weights of a split", "memory_hops_stream.h", "takes_part(w) ? w * inverse", "takes_part(w) ? w", HOPS, LONG_HOPS, "memory_hops"),
    Found("the delta of one split", "memory_hops_stream.h", "delta += partial_of(hops, n)[width]", "delta = partial_of(hops, n)[width]", HOPS, LONG_HOPS, "memory_hops"),
    Found("the slope of a sigmoid", "memory_hops.h", "y * (1.0f - y)", "y", HOPS, LONG_HOPS, "memory_hops"),
    Found("linear splits have factors", "memory_hops_stream.h", "p.normalize ? shrink_to(partial_of(hops, n)[width], m) : 1.0f", "shrink_to(partial_of(hops, n)[width], m)", HOPS, LONG_LINEAR_HOPS, "memory_hops"),
    Found("96 columns are 64", "hopper/host.h", "f(Width<96>(), Width<96>())", "f(Width<96>(), Width<64>())", ATTENTION, "first-use-width-96-96", "hopper/sdpa_forward", "Bf16"),
    Found("192 columns are 128", "hopper/host.h", "p.D <= 192 && p.Dv <= 128", "p.D <= 192", ATTENTION, "first-use-width-192-192", "hopper/sdpa_forward", "Bf16"),
    Found("256 columns are 192", "hopper/host.h", "f(Width<256>(), Width<256>())", "f(Width<256>(), Width<192>())", ATTENTION, "first-use-width-256", "hopper/sdpa_forward", "Bf16"),
    Found("keys of two consumers", "hopper/sdpa_backward_kv.h", "return Shape::kDivided ? 0 : 64 * consumer;", "return 64 * consumer;", ATTENTION, "first-use-width", "hopper/sdpa_backward", "Bf16"),
    Found("the way back is one off", "hopper/common.h", "blocks - 1 - block : block", "blocks - block : block", ATTENTION, "first-use-many-tiles", "hopper/sdpa_forward", "Bf16"),
    Found("the way back is one off", "hopper/common.h", "blocks - 1 - block : block", "blocks - block : block", VARLEN, "first-use-many-tiles", "hopper/sdpa_forward", "Bf16"),
    Found("the way back is one off, backward", "hopper/common.h", "blocks - 1 - block : block", "blocks - block : block", ATTENTION, "first-use-many-tiles", "hopper/sdpa_backward", "Bf16"),
    Found("Q of the first tile", "hopper/sdpa_forward.h", "mbarrier_wait(&kernel.shared.q_full, q_ring.parity)", "mbarrier_wait(&kernel.shared.q_full, 0)", ATTENTION, "first-use-many-tiles", "hopper/sdpa_forward", "Bf16"),
    Found("K and V are loaded too early", "hopper/sdpa_backward_kv.h", "mbarrier_wait(&shared.k_empty, k_ring.parity ^ 1);", "", ATTENTION, "first-use-many-tiles", "hopper/sdpa_backward", "Bf16"),
    Found("Q and dO of dQ are loaded too early", "hopper/sdpa_backward_q.h", "mbarrier_wait(&shared.q_empty, q_ring.parity ^ 1);", "", ATTENTION, "first-use-many-tiles", "hopper/sdpa_backward", "Bf16"),
    Found("the columns of the first warps", "decode.h", "warp / Shape::kKeyWarps * kColumns", "0", DECODE, "first-use-width-256", "decode"),
    Found("256 packed columns are 128", "choose.h", "return f(Width<256>())", "return f(Width<128>())", VARLEN, "first-use-width", "sdpa_forward"),
    Found("pairs of 128 columns have 64", "choose.h", "return f(Width<128>())", "return f(Width<64>())", ATTENTION, "first-use-width-128-biases", "sdpa_weights"),
    Found("packed pairs of 128 columns have 64", "choose.h", "return f(Width<128>())", "return f(Width<64>())", VARLEN, "first-use-width-128-biases", "sdpa_weights"),
    Found("the first element of a chunk", "merge_states.h", "if (both) d +=", "if (both && n == 0) d +=", "merge_states", "first-use-64", "merge_states"),
)  # fmt: skip

FIND = """
import sys
from pathlib import Path
import emulator, torch
from emulated import Emulated
from fastattn import selftest
from fastattn.testing.selftest import faults
library, op, element, source = sys.argv[1:]
adapter = emulator.load_from(Path(library))
adapter._cuda.allow_hopper(source.startswith("hopper/"))
dtype = {"F32": torch.float32, "Bf16": torch.bfloat16}[element]
with Emulated(adapter).active(), selftest.switched_off():
    try:
        found = faults("cuda", op, dtype, torch.device("cpu"))
    except selftest.Inconclusive as why:  # a kernel that raises
        found = [why]
    for fault in found:
        print(fault)
"""


@pytest.mark.slow
@pytest.mark.parametrize("mutant", FOUND, ids=lambda mutant: f"{mutant.op}: {mutant.name}")
def test_one_case_finds_a_mutant(mutant: Found, tmp_path: Path) -> None:
    library = built_with(mutant, mutant.source, mutant.element, tmp_path)
    call = (str(library), mutant.op, mutant.element, mutant.source)
    done = run_python("-c", FIND, *call, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    start = f"{mutant.op}, case {mutant.case}"
    assert done.stdout.startswith(start), done.stdout
    assert all(line.startswith(start) for line in done.stdout.splitlines()), done.stdout
