"""Launches kernels on the tensors' device and its current stream, with the table's settings."""

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

# Triton reads the variable once, when a kernel is defined.
INTERPRETED: bool = os.environ.get("TRITON_INTERPRET", "0") == "1"


@dataclass(frozen=True)
class Recording:
    """A launch that was requested while :func:`recording`, and not executed."""

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
    """Yield a list of the launches within the block, which are recorded and not executed.

    So kernels can be compiled for an architecture without its GPU, from tensors on "meta".
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
    kernel: Any, launch_plan: Launch, programs: int, device: torch.device, **arguments: Any
) -> None:
    """Run ``programs`` programs of a kernel on the device's current stream."""
    if programs == 0:
        return
    arguments |= {"BM": launch_plan.BM, "BN": launch_plan.BN}
    recorder = _recorder.get()
    if recorder is not None:
        recorder.launches.append(Recording(kernel, arguments, launch_plan))
        return
    # Triton uses the current stream of the current device, whatever the device of the tensors is.
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _run(kernel, launch_plan, programs, device, arguments)
    else:
        _run(kernel, launch_plan, programs, device, arguments)


# The compiled kernel of a call, keyed by everything that Triton may specialise on: the numbers
# themselves, and the dtype and alignment of the tensors. Triton's own look-up takes longer.
_compiled: dict[Any, Any] = {}
_MOST_COMPILED = 4096
# The Triton versions whose compiled kernels are known to run like this.
_RUNS_DIRECTLY = not INTERPRETED and (3, 6) <= tuple(
    map(int, triton.__version__.split(".")[:2])
) <= (3, 9)


def _run(
    kernel: Any, launch_plan: Launch, programs: int, device: torch.device, arguments: dict[str, Any]
) -> None:
    """Run a compiled kernel directly where the Triton version allows it, else through Triton."""
    if not _RUNS_DIRECTLY or kernel.pre_run_hooks or _has_launch_hooks():
        kernel[(programs,)](**arguments, **options_of(launch_plan))
        return
    values = [arguments[name] for name in kernel.arg_names]
    active = triton.runtime.driver.active
    index = active.get_current_device()
    key = (kernel.__name__, index, launch_plan, *map(_specialisation, values))
    compiled = _compiled.get(key)
    if compiled is None:
        if len(_compiled) >= _MOST_COMPILED:
            _compiled.clear()
        _compiled[key] = kernel[(programs,)](**arguments, **options_of(launch_plan))
        return
    stream = active.get_current_stream(index)
    metadata = (
        compiled.packed_metadata,
        None,
        None,
        None,
    )  # None: no metadata or hooks of launches
    compiled.run(programs, 1, 1, stream, compiled.function, *metadata, *values)


def _has_launch_hooks() -> bool:
    """Whether a profiler has set hooks that Triton calls at each launch."""
    hooks = triton.knobs.runtime
    return bool(hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls)


_PLAIN = frozenset({int, float, bool, str, type(None)})


def _specialisation(x: Any) -> Any:
    """What Triton may specialise a kernel on: a number itself, a tensor's dtype and alignment."""
    kind = type(x)
    if kind in _PLAIN:
        return x
    if kind is Operand:
        return x[1:], x[0].dtype, x[0].data_ptr() & 15
    if issubclass(kind, tuple):
        return tuple([y if type(y) in _PLAIN else _specialisation(y) for y in x])
    return x.dtype, x.data_ptr() & 15


def options_of(launch_plan: Launch) -> dict[str, Any]:
    """The options of a launch for Triton, such as the number of warps."""
    options: dict[str, Any] = {
        "num_warps": launch_plan.warps,
        "num_stages": launch_plan.stages,
        # The error bounds are proven with fusion; Triton 3.10 no longer fuses by default.
        "enable_fp_fusion": True,
    }
    if launch_plan.greedy:
        options["maxnreg"] = min(255, 65536 // (32 * launch_plan.warps))
    return options


def block_of(width: int) -> int:
    """The columns of a tile for rows of this width: a power of two, at least 16 (matrix units)."""
    return 16 if width <= 16 else 1 << (width - 1).bit_length()


def operand(x: Tensor) -> Operand:
    """A tensor [B, H, L, D] as an operand; dimensions of size 1 broadcast."""
    return Operand(x, *[0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)])


def precision() -> str:
    """Whether float32 products may round to tf32: only if PyTorch's own products may."""
    return "tf32" if allows_tf32() else "ieee"
