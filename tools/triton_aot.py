"""Compiles the Triton kernels without a GPU, and reads the resources that they need.

    python tools/triton_aot.py --complete sm_90

Prints one JSON object per kernel and line.

The backend is called with meta tensors and records its launches instead of executing them. Triton
then compiles each recorded launch as usual, with a driver that only knows the name of its target.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from fastattn.backends import triton as backend
from fastattn.backends.primitives import (
    AdditiveBackwardOptions,
    AdditiveOptions,
    AttentionBackwardOptions,
    AttentionOptions,
    DecodeOptions,
    EncodeMemoryBackwardOptions,
    EncodeMemoryOptions,
    HopfieldBackwardOptions,
    HopfieldOptions,
    MemoryHopBackwardOptions,
    MemoryHopOptions,
    NoOptions,
    SinusoidalOptions,
    VarlenOptions,
    extend_options,
)
from fastattn.backends.triton import _launch

__all__ = ["CHIPS", "Chip", "Driver", "Usage", "Work", "binary", "compiled", "recorded", "work"]


@dataclass(frozen=True)
class Chip:
    """The resources of a multiprocessor (NVIDIA) or a compute unit (AMD)."""

    target: GPUTarget
    shared: int  # bytes that one program may use
    matrix_instruction: str  # a pattern of it in the assembler text of a 16-bit product


# CUDA C++ programming guide, "Compute capabilities"; AMD CDNA 3 ISA guide.
CHIPS = {
    "sm_80": Chip(GPUTarget("cuda", 80, 32), 163 << 10, "HMMA"),
    "sm_90": Chip(GPUTarget("cuda", 90, 32), 227 << 10, "HGMMA"),
    "sm_100": Chip(GPUTarget("cuda", 100, 32), 227 << 10, "UTC.*MMA"),
    "gfx942": Chip(GPUTarget("hip", "gfx942", 64), 64 << 10, "v_mfma"),
}


@dataclass(frozen=True)
class Usage:
    """The resources that one compiled kernel needs."""

    kernel: str
    chip: str
    launch: Any
    registers: int  # per thread
    spills: int  # NVIDIA: bytes of stack; AMD: registers
    shared: int  # bytes per program
    matrix_instructions: int


class Driver:
    """The interface of a Triton driver. It knows the name of its target and launches nothing."""

    utils: Any  # the driver itself, which loads binaries and returns properties of the GPU
    stream = 0  # the current stream

    def __init__(self, target: GPUTarget, launched: Callable[..., None] | None = None) -> None:
        self.target = target
        self.utils = self
        self._launched = launched or (lambda *args: None)  # gets the arguments of each launch

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        """The key of Triton's caches."""
        return [chip.target for chip in CHIPS.values()].index(self.target)

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return self._launched

    def load_binary(self, name: str, *_: Any) -> tuple[int, ...]:
        """Module, function, registers, spills, and the maximum threads per block."""
        return 1, hash(name), 32, 0, 1024

    def unload_module(self, module: int) -> None:
        pass

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 2**20}


@contextlib.contextmanager
def _driver_of(chip: Chip) -> Iterator[None]:
    triton.runtime.driver.set_active(Driver(chip.target))
    try:
        yield
    finally:
        triton.runtime.driver.set_active(None)  # Triton searches for a driver at the next use


def recorded(work: Callable[[], Any], chip: str) -> list[_launch.Recording]:
    """Return the launches of ``work``, a call of the backend on meta tensors."""
    with _launch.recording(chip) as launches:
        work()
    return launches


def binary(recording: _launch.Recording, chip: str) -> Any:
    """Compile one launch for a chip; ``asm`` of the result has its binary."""
    options = _launch.options_of(recording.chosen)
    with _driver_of(CHIPS[chip]):
        return recording.kernel.warmup(**recording.arguments, grid=(1,), **options)


def compiled(recording: _launch.Recording, chip: str) -> Usage:
    """Compile one launch for a chip, and read what it needs."""
    kernel = binary(recording, chip)
    read = _read_amd if "amdgcn" in kernel.asm else _read_nvidia
    registers, spills, text = read(kernel)
    return Usage(
        kernel.metadata.name,
        chip,
        recording.chosen,
        registers,
        spills,
        kernel.metadata.shared,
        len(re.findall(CHIPS[chip].matrix_instruction, text)),
    )


def _read_nvidia(kernel: Any) -> tuple[int, int, str]:
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, text = (
            subprocess.run([tools / tool, option, file.name], capture_output=True, check=True)
            .stdout.decode()
            for tool, option in (("cuobjdump", "--dump-resource-usage"), ("nvdisasm", "-c"))
        )  # fmt: skip
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return found["REG"], found["STACK"] + found["LOCAL"], text


def _read_amd(kernel: Any) -> tuple[int, int, str]:
    text = kernel.asm["amdgcn"]

    def number(name: str) -> int:
        match = re.search(rf"\.{name}:\s+(\d+)", text)
        assert match is not None, name
        return int(match[1])

    # Scalar registers spill to lanes of vector registers, without memory.
    return number("vgpr_count"), number("vgpr_spill_count"), text


@dataclass(frozen=True)
class Work:
    """One call of the backend, all of whose launches are compiled."""

    name: str
    dtype: torch.dtype
    width: int
    call: Callable[[], Any]
    may_spill: tuple[str, ...] = ()  # chips for which no entry without spills was found

    def usages(self, chip: str) -> Iterator[Usage]:
        for recording in recorded(self.call, chip):
            yield compiled(recording, chip)


HALF, SINGLE = torch.bfloat16, torch.float32


def work(complete: bool) -> Iterator[Work]:
    """The calls to compile: some of each kind, or every entry of the table."""
    yield Work("forward", HALF, 64, attention(HALF, 64))
    yield Work("forward", SINGLE, 64, attention(SINGLE, 64))
    yield Work("backward", HALF, 128, attention(HALF, 128, backward=True))
    yield Work("decode", HALF, 128, decode(HALF, 128))
    yield Work("sinusoidal", HALF, 64, sinusoidal(HALF))
    if complete:
        for dtype in (HALF, SINGLE):
            for width in (64, 128, 256, 512):
                yield from _of_width(dtype, width)
        yield from _others()


def _of_width(dtype: torch.dtype, width: int) -> Iterator[Work]:
    """The calls that use an entry of the table for this dtype and width."""
    if (dtype, width) not in ((HALF, 64), (SINGLE, 64)):
        yield Work("forward", dtype, width, attention(dtype, width))
    # Four rows of 512 float32 for each of 16 queries and keys exceed the registers of gfx942.
    may_spill = ("gfx942",) if (dtype, width) == (SINGLE, 512) else ()
    if (dtype, width) != (HALF, 128):
        call = attention(dtype, width, backward=True)
        yield Work("backward", dtype, width, call, may_spill)
    mask = torch.empty(1, 16, 4096, 4096, dtype=dtype, device="meta")
    yield Work("bias", dtype, width, attention(dtype, width, mask=mask))
    call = attention(dtype, width, mask=mask, backward=True)
    yield Work("bias backward", dtype, width, call, may_spill)
    yield Work("decode", dtype, width, decode(dtype, width))
    if dtype == HALF and width >= 128:
        yield Work("decode", dtype, width, decode(dtype, width, queries=16))
    if width <= 256:
        yield Work("hops", dtype, width, hops(dtype, width))
        yield Work("hops backward", dtype, width, hops(dtype, width, backward=True))
        yield Work("retrieval", dtype, width, retrieval(dtype, width))
    if width != 128:  # no entry ends at 128
        yield Work("additive", dtype, width, additive(dtype, width))
        yield Work("additive backward", dtype, width, additive(dtype, width, backward=True))


def _others() -> Iterator[Work]:
    """Calls that share entries with others, or have none."""
    for dtype in (HALF, SINGLE):
        yield Work("weights", dtype, 128, attention(dtype, 128, weights=2))
    for backward in (False, True):
        suffix = " backward" if backward else ""
        yield Work(
            f"tf32{suffix}", SINGLE, 128, _in_tf32(attention(SINGLE, 128, backward=backward))
        )
        yield Work(f"packed{suffix}", HALF, 128, packed(HALF, 128, backward=backward))
        call = attention(
            HALF, 80, backward=backward, softcap=20.0, alibi=True, dropout_p=0.1,
            mask=torch.empty(2, 1, 1, 4096, dtype=torch.bool, device="meta"), window_left=100,
        )  # fmt: skip
        yield Work(f"every option{suffix}", HALF, 80, call)
        for bias in ("relative bias", "mask program"):
            given = {bias.replace(" ", "_"): True}
            call = attention(HALF, 128, backward=backward, **given)
            yield Work(f"{bias}{suffix}", HALF, 128, call)
            call = packed(HALF, 128, backward=backward, **given)
            yield Work(f"packed {bias}{suffix}", HALF, 128, call)
        yield Work(f"encode{suffix}", HALF, 128, encode(HALF, 128, backward=backward))
    for queries in (1, 16):
        yield Work(
            "decode relative bias", HALF, 128, decode(HALF, 128, queries, relative_bias=True)
        )
        yield Work("decode mask program", HALF, 128, decode(HALF, 128, queries, mask_program=True))
    for grad in ("unroll", "one_step"):
        yield Work("retrieval backward", HALF, 64, retrieval(HALF, 64, grad))
    yield Work("merged states", HALF, 64, merged(HALF, 64))
    yield Work("merged states backward", HALF, 64, merged(HALF, 64, backward=True))


def attention(
    dtype: torch.dtype, width: int, *, backward: bool = False, **options: Any
) -> Callable[[], Any]:
    """A call of causal attention on 2 sequences of 4096, with 16 heads and 4 key heads."""
    mask: Tensor | None = options.pop("mask", None)
    slopes = torch.empty(1, 16, device="meta") if options.pop("alibi", False) else None
    table, program = _biases(
        16, options.pop("relative_bias", False), options.pop("mask_program", False)
    )
    forward = AttentionOptions(**{"scale": 0.125, "window_right": 0, **options})
    needs_mask_grad = mask is not None and mask.dtype != torch.bool
    reverse = extend_options(AttentionBackwardOptions, forward, needs_mask_grad=needs_mask_grad)
    seed = torch.empty((), dtype=torch.int64, device="meta") if forward.dropout_p else None
    query, out = (torch.empty(2, 16, 4096, width, dtype=dtype, device="meta") for _ in range(2))
    key = torch.empty(2, 4, 4096, width, dtype=dtype, device="meta")
    lse = torch.empty(2, 16, 4096, dtype=torch.float64, device="meta")

    args = (query, key, key, mask, slopes, seed)
    last = (None, table, None, program)
    if not backward:
        return lambda: backend.scaled_dot_product_attention(*args, *last, options=forward)
    return lambda: backend.scaled_dot_product_attention_backward(
        out, None, None, *args, out, lse, *last, options=reverse
    )


def _biases(heads: int, relative_bias: bool, mask_program: bool) -> list[Tensor | None]:
    """A table of distances and a mask program, or None."""
    table = torch.empty(1, heads, 8191, device="meta") if relative_bias else None
    program = torch.empty(8200, dtype=torch.int32, device="meta") if mask_program else None
    return [table, program]


def _in_tf32(call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            call()
        finally:
            torch.set_float32_matmul_precision(before)

    return run


def packed(
    dtype: torch.dtype,
    width: int,
    *,
    backward: bool = False,
    relative_bias: bool = False,
    mask_program: bool = False,
) -> Callable[[], Any]:
    """A call of causal attention on 16 packed sequences, with 16 heads and 4 key heads."""
    options = VarlenOptions(scale=0.125, bottom_right=True, window_right=0)
    query, key = (torch.empty(8192, heads, width, dtype=dtype, device="meta") for heads in (16, 4))
    starts = torch.empty(17, dtype=torch.int64, device="meta")
    lse = torch.empty(16, 8192, dtype=torch.float64, device="meta")
    args = (query, key, key, starts, starts, None, None)
    last = (None, *_biases(16, relative_bias, mask_program))

    if not backward:
        return lambda: backend.varlen_attention(*args, *last, options=options)
    return lambda: backend.varlen_attention_backward(
        query, None, *args, query, lse, *last, options=options
    )


def decode(
    dtype: torch.dtype,
    width: int,
    queries: int = 1,
    *,
    relative_bias: bool = False,
    mask_program: bool = False,
) -> Callable[[], Any]:
    """A step of 64 sequences on pages of 64 keys, with 32 heads and 8 key heads."""
    options = DecodeOptions(scale=0.125, window_right=0)
    query = torch.empty(64, 32, queries, width, dtype=dtype, device="meta")
    pages = torch.empty(4096, 8, 64, width, dtype=dtype, device="meta")
    lengths = torch.empty(64, dtype=torch.int64, device="meta")
    table = torch.empty(64, 128, dtype=torch.int32, device="meta")
    args = (query, pages, pages, lengths, table, None, None)
    last = (None, *_biases(32, relative_bias, mask_program))
    return lambda: backend.decode_attention(*args, *last, options=options)


def additive(dtype: torch.dtype, width: int, *, backward: bool = False) -> Callable[[], Any]:
    """A call of additive attention on 8 sequences of 512, with weights."""
    x = torch.empty(8, 512, width, dtype=dtype, device="meta")
    v = torch.empty(width, dtype=dtype, device="meta")
    rest = (x, x, x, v, v, None, None)

    if not backward:
        return lambda: backend.additive_attention(*rest, options=AdditiveOptions(weights=True))
    options = AdditiveBackwardOptions(weights=True)
    return lambda: backend.additive_attention_backward(x, None, *rest, options=options)


def encode(dtype: torch.dtype, width: int, *, backward: bool = False) -> Callable[[], Any]:
    """A call of memory encoding, of 2 tables of 1000 words and 32 stories of 50 sentences."""
    tokens = torch.empty(1, 32, 50, 12, dtype=torch.int64, device="meta")
    weight = torch.empty(1, 2, 1000, width, dtype=dtype, device="meta")
    factors = torch.empty(12, width, device="meta")
    temporal = torch.empty(1, 2, 50, width, dtype=dtype, device="meta")
    grad = torch.empty(1, 32, 2, 50, width, dtype=dtype, device="meta")

    if not backward:
        args = (tokens, weight, factors, temporal)
        return lambda: backend.encode_memory(*args, options=EncodeMemoryOptions(padding_idx=0))
    options = EncodeMemoryBackwardOptions(1000, temporal=True, padding_idx=0)
    return lambda: backend.encode_memory_backward(grad, tokens, factors, options=options)


def hops(dtype: torch.dtype, width: int, *, backward: bool = False) -> Callable[[], Any]:
    """A call of 3 hops on 64 memories of 500 rows, with a mask."""
    query = torch.empty(64, width, dtype=dtype, device="meta")
    memory = torch.empty(64, 4, 500, width, dtype=dtype, device="meta")
    mask = torch.empty(64, 1, 1, 500, dtype=torch.bool, device="meta")
    trace, stats = (torch.empty(64, *rest, device="meta") for rest in ((7, width), (3, 2)))
    args = (query, memory, None, None, mask, None)

    if not backward:
        return lambda: backend.memory_hop_attention(*args, options=MemoryHopOptions(hops=3))
    options = MemoryHopBackwardOptions(hops=3, needed=2)
    return lambda: backend.memory_hop_attention_backward(
        query, None, *args, trace, stats, options=options
    )


def retrieval(dtype: torch.dtype, width: int, grad: str = "") -> Callable[[], Any]:
    """A retrieval from 1000 patterns in at most 5 steps; ``grad``: its derivative of this kind."""
    state, stored = (torch.empty(8, n, width, dtype=dtype, device="meta") for n in (100, 1000))
    taken = torch.empty(8, 100, dtype=torch.int64, device="meta")
    ends = torch.empty(8, 100, 2, width, device="meta")
    if not grad:
        options = HopfieldOptions(steps_max=5, eps=1e-4)
        return lambda: backend.hopfield_retrieve(state, stored, None, None, None, options=options)
    back = HopfieldBackwardOptions(steps_max=5, eps=1e-4, grad=grad, needed=3)
    return lambda: backend.hopfield_retrieve_backward(
        state, state, stored, None, None, None, taken, ends, options=back
    )


def sinusoidal(dtype: torch.dtype) -> Callable[[], Any]:
    x = torch.empty(8, 512, 64, dtype=dtype, device="meta")
    return lambda: backend.sinusoidal_encoding(x, None, options=SinusoidalOptions(scale=8.0))


def merged(dtype: torch.dtype, width: int, *, backward: bool = False) -> Callable[[], Any]:
    """Two states of 8 sequences of 512 and 8 heads."""
    out = torch.empty(8, 8, 512, width, dtype=dtype, device="meta")
    lse = torch.empty(8, 8, 512, device="meta")
    states = (out, lse, out, lse)

    if not backward:
        return lambda: backend.merge_states(*states, options=NoOptions())
    return lambda: backend.merge_states_backward(out, lse, *states, options=NoOptions())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chips", nargs="*", default=list(CHIPS))
    parser.add_argument("--complete", action="store_true", help="compile every entry of the table")
    arguments = parser.parse_args()
    for one in _found(arguments.chips, arguments.complete):
        print(json.dumps(one), flush=True)


def _found(chips: list[str], complete: bool) -> Iterator[dict[str, Any]]:
    for chip in chips:
        for one in work(complete):
            start = time.perf_counter()
            for usage in one.usages(chip):
                yield asdict(usage) | {
                    "call": one.name,
                    "dtype": str(one.dtype).removeprefix("torch."),
                    "width": one.width,
                    "may_spill": chip in one.may_spill,
                    "shared_limit": CHIPS[chip].shared,
                    "seconds": round(time.perf_counter() - start, 1),
                }
                start = time.perf_counter()


if __name__ == "__main__":
    main()
