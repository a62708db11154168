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

from fastattn.backends._precision import allows_tf32
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
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _run(kernel, planned, programs, device, arguments)
    else:
        _run(kernel, planned, programs, device, arguments)


# What Triton compiled for a call, by all that it may have looked at: the numbers themselves, and
# dtype and alignment of the tensors. To find it again from the arguments takes Triton longer.
_compiled: dict[Any, Any] = {}
_MOST_COMPILED = 4096
# The versions of which a compiled kernel is known to be run like this.
_KNOWN = not INTERPRETED and (3, 6) <= tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 9)


def _run(
    kernel: Any, planned: Launch, programs: int, device: torch.device, arguments: dict[str, Any]
) -> None:
    if not _KNOWN or kernel.pre_run_hooks or _hooked():
        kernel[(programs,)](**arguments, **options_of(planned))
        return
    values = [arguments[name] for name in kernel.arg_names]
    active = triton.runtime.driver.active
    index = active.get_current_device()
    key = (kernel.__name__, index, planned, *map(_looked_at, values))
    found = _compiled.get(key)
    if found is None:
        if len(_compiled) >= _MOST_COMPILED:
            _compiled.clear()
        _compiled[key] = kernel[(programs,)](**arguments, **options_of(planned))
        return
    stream = active.get_current_stream(index)
    found.run(
        programs, 1, 1, stream, found.function, found.packed_metadata, None, None, None, *values
    )


def _hooked() -> bool:
    """Whether a profiler wants to be told of launches."""
    hooks = triton.knobs.runtime
    return bool(hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls)


_PLAIN = frozenset({int, float, bool, str, type(None)})


def _looked_at(x: Any) -> Any:
    kind = type(x)
    if kind in _PLAIN:
        return x
    if kind is Operand:
        return x[1:], x[0].dtype, x[0].data_ptr() & 15
    if issubclass(kind, tuple):
        return tuple([y if type(y) in _PLAIN else _looked_at(y) for y in x])
    return x.dtype, x.data_ptr() & 15


def options_of(planned: Launch) -> dict[str, Any]:
    """What Triton is told of a launch beside its arguments."""
    options: dict[str, Any] = {
        "num_warps": planned.warps,
        "num_stages": planned.stages,
        # What the bounds are proven with; Triton 3.10 stops fusing by itself.
        "enable_fp_fusion": True,
    }
    if planned.greedy:
        options["maxnreg"] = min(255, 65536 // (32 * planned.warps))
    return options


def block_of(width: int) -> int:
    """The columns of a tile: a power of two, and what a matrix unit takes at least."""
    return 16 if width <= 16 else 1 << (width - 1).bit_length()


def operand(x: Tensor) -> Operand:
    """[B, H, L, D]; a dimension of size 1 is one that may be repeated."""
    return Operand(x, *[0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)])


def precision() -> str:
    """Whether products of float32 may be rounded to tf32: only if PyTorch's own may."""
    return "tf32" if allows_tf32() else "ieee"
