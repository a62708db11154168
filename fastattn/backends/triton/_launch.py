"""How a kernel is launched: on the tensors' own device and its current stream, by the table."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from fastattn.backends.triton._core import Operand
from fastattn.backends.triton._table import Launch, choose

__all__ = [
    "INTERPRETED",
    "Recording",
    "block_of",
    "launch",
    "operand",
    "options_of",
    "plan",
    "precision",
    "recording",
]

# Triton reads the variable once, when a kernel is defined.
INTERPRETED: bool = os.environ.get("TRITON_INTERPRET", "0") == "1"


@dataclass(frozen=True)
class Recording:
    """A launch that was asked for while :func:`recording`, and did not happen."""

    kernel: Any
    arguments: dict[str, Any]
    chosen: Launch


@dataclass
class _Recorder:
    architecture: str
    launches: list[Recording]


_recorder: ContextVar[_Recorder | None] = ContextVar("fastattn_triton_recorder", default=None)


@contextlib.contextmanager
def recording(architecture: str) -> Iterator[list[Recording]]:
    """Within the block nothing is launched: the list gets what would be, on that architecture.

    So the kernels can be compiled where no GPU is, from tensors of the device "meta".
    """
    launches: list[Recording] = []
    token = _recorder.set(_Recorder(architecture, launches))
    try:
        yield launches
    finally:
        _recorder.reset(token)


def architecture_of(device: torch.device) -> str:
    """The name of a device's architecture in the table: sm_90, gfx942, or "interpreter"."""
    recorder = _recorder.get()
    if recorder is not None:
        return recorder.architecture
    if INTERPRETED:
        return "interpreter"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def plan(kernel: str, like: Tensor, *widths: int) -> Launch:
    """Return the table's launch of a kernel for rows of these widths, on ``like``'s device."""
    return choose(architecture_of(like.device), kernel, 8 * like.element_size(), max(widths))


def launch(
    kernel: Any, planned: Launch, programs: int, device: torch.device, **arguments: Any
) -> None:
    """Run ``programs`` programs of a kernel on the device's current stream."""
    if programs == 0:
        return
    arguments |= {"BM": planned.BM, "BN": planned.BN}
    recorder = _recorder.get()
    if recorder is not None:
        recorder.launches.append(Recording(kernel, arguments, planned))
        return
    # Triton takes the current device's current stream, whatever the tensors' own device is.
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[(programs,)](**arguments, **options_of(planned))


def options_of(planned: Launch) -> dict[str, Any]:
    # Fused multiply-adds are what the bounds are proven with; Triton 3.10 stops being so by itself.
    return {
        "num_warps": planned.warps,
        "num_stages": planned.stages,
        "enable_fp_fusion": True,
    }


def block_of(width: int) -> int:
    """The columns of a tile: a power of two, and what a matrix unit takes at least."""
    return max(16, triton.next_power_of_2(width))


def operand(x: Tensor) -> Operand:
    """[B, H, L, D]; a dimension of size 1 is one that may be repeated."""
    return Operand(x, *(0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)))


def precision() -> str:
    """Whether products of float32 may be rounded to tf32: only if PyTorch's own may."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
