"""A driver that records the launches it receives, and tests of them.

Imported in processes of their own (test_triton_launch.py): in the tests' process Triton interprets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton_aot

from fastattn.backends import triton as backend
from fastattn.backends.primitives import SinusoidalOptions
from fastattn.backends.triton import _launch

received: list[tuple[Any, ...]] = []
by_triton: list[Any] = []  # the kernels that went through Triton's own launch


def _record(*args: Any) -> None:
    received.append(args)


driver = triton_aot.Driver(triton_aot.CHIPS["sm_90"].target, _record)
triton.runtime.driver.set_active(driver)
_launch.architecture_of = lambda device: "sm_90"
_run = triton.runtime.JITFunction.run


def _noted(self: Any, *args: Any, **kwargs: Any) -> Any:
    by_triton.append(self)
    return _run(self, *args, **kwargs)


triton.runtime.JITFunction.run = _noted


def launches(call: Callable[[], Any]) -> tuple[list[Any], bool]:
    """What the driver receives in a call, and whether it comes from Triton's own launch."""
    received.clear()
    by_triton.clear()
    call()
    return [(args[:5], _numbers(args[9:])) for args in received], bool(by_triton)


def _numbers(args: Any) -> list[Any]:
    """The arguments with each tensor replaced by its dtype: tensors differ between calls."""
    return [
        _numbers(x) if isinstance(x, tuple) else (x.dtype if isinstance(x, torch.Tensor) else x)
        for x in args
    ]


def sinusoidal(
    rows: int = 48, dtype: torch.dtype = torch.float32, offset: int = 0
) -> Callable[[], Any]:
    """A call of a small kernel, on tensors without memory."""
    x = torch.empty(2, rows, 64, dtype=dtype, device="meta")
    return lambda: backend.sinusoidal_encoding(
        x, None, options=SinusoidalOptions(offset, scale=8.0)
    )


# -- the tests ------------------------------------------------------------------------------------


def a_cached_launch_equals_tritons() -> None:
    """The second launch goes past Triton and has the same arguments."""
    first, again = launches(sinusoidal()), launches(sinusoidal())
    assert first[1], "the first launch did not go through Triton"
    assert not again[1], "the second did"
    assert first[0] == again[0], (first, again)
    for other in (sinusoidal(32), sinusoidal(dtype=torch.bfloat16), sinusoidal(offset=1)):
        assert launches(other)[1], "a kernel that was compiled for another call"
    assert not launches(sinusoidal(32))[1]


def launch_hooks_are_called() -> None:
    """A launch goes through Triton while it has a hook."""

    def hook(metadata: Any) -> None:
        pass

    launches(sinusoidal())
    triton.knobs.runtime.launch_enter_hook.add(hook)
    assert launches(sinusoidal())[1]
    triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert not launches(sinusoidal())[1]


def a_launch_is_on_the_current_stream() -> None:
    """A launch uses the stream that is current when it happens."""
    for stream in (7, 9):  # Triton's own launch, then one that is found again
        driver.stream = stream
        (found, _), *rest = launches(sinusoidal(40))[0]
        assert not rest
        assert found[3] == stream, found


def every_kernel_is_found_again() -> None:
    """The second launch of every kernel goes past Triton."""
    kernels = set()
    for work in triton_aot.work(complete=True):
        if work.width > 128 or work.dtype == torch.float32:
            continue
        first = launches(work.call)
        kernels |= {kernel.__name__ for kernel in by_triton}
        again = launches(work.call)
        assert not again[1], work
        assert first[0] == again[0], work
    assert len(kernels) > 15, kernels
