"""Launches of kernels: cached, on the right stream and device, and without synchronisation."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from child_process import run_python
from required import REQUIRE_NATIVE


@pytest.fixture(autouse=True)
def _needs_triton() -> None:
    if importlib.util.find_spec("triton") is None and not REQUIRE_NATIVE:
        pytest.skip("triton is not installed")


def _in_a_process_of_its_own(*names: str) -> None:
    """Functions of tests/support/triton_launches.py; here Triton interprets."""
    calls = "; ".join(f"triton_launches.{name}()" for name in names)
    run_python("-c", f"import triton_launches; {calls}", TRITON_INTERPRET="0")


@pytest.mark.complete
def test_a_cached_launch_equals_tritons_on_the_current_stream() -> None:
    _in_a_process_of_its_own(
        "a_cached_launch_equals_tritons",
        "launch_hooks_are_called",
        "a_launch_is_on_the_current_stream",
    )


@pytest.mark.slow
def test_every_compiled_kernel_is_reused() -> None:
    _in_a_process_of_its_own("every_kernel_is_found_again")


def test_a_launch_is_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton takes the current device, whatever the tensors' own one is."""
    _launch: Any = importlib.import_module("fastattn.backends.triton._launch")
    current, launched_on = [0], []

    @contextlib.contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        before, current[0] = current[0], wanted.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(_launch, "_run", lambda *_: launched_on.append(current[0]))
    for index in (0, 1, 0):
        planned = _launch.Launch(16, 16, 4, 1)
        _launch.launch(None, planned, 1, torch.device("cuda", index))
    assert launched_on == [0, 1, 0]
    assert current == [0]


def _launches() -> Iterator[tuple[str, dict[str, Any]]]:
    """The calls that test_triton_aot.py compiles, and the arguments of each launch."""
    triton_aot: Any = importlib.import_module("triton_aot")
    for work in triton_aot.work(complete=True):
        if "tf32" not in work.name:  # these allow it themselves
            for recording in triton_aot.recorded(work.call, "sm_90"):
                yield work.name, recording.arguments


def test_no_call_reads_a_value_back_from_the_gpu() -> None:
    """Tensors without memory have no values, so no call waits, and a graph can be captured."""
    calls = {name for name, _ in _launches()}
    assert calls >= {"forward", "backward", "bias backward", "relative bias backward",
                     "mask program backward", "packed backward", "decode", "weights",
                     "packed relative bias backward", "packed mask program backward",
                     "decode relative bias", "decode mask program",
                     "hops backward", "retrieval", "retrieval backward", "additive backward",
                     "encode backward", "sinusoidal"}  # fmt: skip


@pytest.fixture
def _as_before() -> Iterator[None]:
    """Reset PyTorch's precision of products after a test."""
    # PyTorch's own testing module, which another test imports, freezes its flags.
    with torch.backends.__allow_nonbracketed_mutation():
        yield
        if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
            torch.backends.cuda.matmul.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("_as_before")
def test_tf32_is_used_only_where_pytorch_may_use_it() -> None:
    def precisions() -> set[str]:
        return {arguments["PRECISION"] for _, arguments in _launches() if "PRECISION" in arguments}

    matmul = torch.backends.cuda.matmul
    assert precisions() == {"ieee"}
    torch.set_float32_matmul_precision("high")
    assert precisions() == {"tf32"}
    torch.set_float32_matmul_precision("highest")
    assert precisions() == {"ieee"}
    matmul.allow_tf32 = True
    assert precisions() == {"tf32"}
    matmul.allow_tf32 = False
    assert precisions() == {"ieee"}
    if hasattr(matmul, "fp32_precision"):  # since PyTorch 2.9
        matmul.fp32_precision = "tf32"
        assert precisions() == {"tf32"}
        matmul.fp32_precision = "ieee"
        assert precisions() == {"ieee"}
