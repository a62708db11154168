"""What the native module calls, and the device and the stream of a call to it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fastattn import _cuda, compat
from fastattn._version import __version__
from fastattn.backends._alloc import empty_output, summed_to
from fastattn.backends._precision import allows_tf32

INFO: dict[str, Any] = _cuda.build_info()
DEVICE: str = INFO["device"]  # "cpu" under the emulator
if DEVICE == "cuda" and INFO["version"] != __version__:
    raise ImportError(
        f"the CUDA kernels have version {INFO['version']} and fastattn has {__version__}; they "
        f"must be the same: `pip install fastattn-cuda=={__version__}`, or a build in a checkout"
    )
_cuda.use_torch(torch, compat.exchange_interface, DEVICE)
_cuda.use_rules(empty_output, summed_to, allows_tf32)


def launch_on_stream(native: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a native function, to run on the device of its tensors and on its current stream."""

    @functools.wraps(native)
    def launch(*tensors: Tensor | None, **named: Any) -> Any:
        first_tensor = next(x for x in (*tensors, *named.values()) if x is not None)
        with current_device(first_tensor.device) as place:
            return native(*tensors, place=place, **named)

    return launch


@contextlib.contextmanager
def current_device(device: torch.device) -> Iterator[tuple[int, int]]:
    """Make a device current within the block; yield its number and its current stream."""
    if device.type != "cuda":  # the emulator
        yield 0, 0
        return
    with torch.cuda.device(device):
        yield device.index, torch.cuda.current_stream(device).cuda_stream
