"""On compute capability 9.0 attention in 16 bits has two kernels for a call: those for Hopper, and
those for sm_80, which run where the others are not allowed. For benchmarks/gpu.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

import fastattn

SM_80 = "sm_80 kernels"  # in the name of a candidate


def is_hopper(backend: str) -> bool:
    return (
        backend == "cuda"
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability() == (9, 0)
    )


@contextmanager
def kernels_of(name: str) -> Iterator[None]:
    """Within it a candidate of this name has the kernels that it is named after."""
    if SM_80 not in name:
        yield
        return
    from fastattn import _cuda

    _cuda.allow_hopper(False)
    try:
        yield
    finally:
        _cuda.allow_hopper(True)


def _ran(name: str) -> list[str]:
    """The kernels that a call of attention launches, as the profiler names them."""
    q = torch.randn(1, 2, 300, 128, device="cuda", dtype=torch.bfloat16)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with kernels_of(name), fastattn.use_backend("cuda"):
        fastattn.scaled_dot_product_attention(q, q, q)  # the first call may set things up
        with torch.profiler.profile(activities=activities) as profile:
            fastattn.scaled_dot_product_attention(q, q, q)
            torch.cuda.synchronize()
    return [event.key for event in profile.key_averages() if "attention_forward" in event.key]


def faults_of_choice() -> list[str]:
    """Do the kernels run that are meant to?"""
    faults = []
    for name, wanted in (("fastattn", True), (SM_80, False)):
        ran = _ran(name)
        if [("hopper" in kernel) for kernel in ran] != [wanted]:
            faults.append(f"{name}: {ran or 'no kernel'} ran")
    return faults
