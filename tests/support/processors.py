"""Other processors and GPUs in the place of this machine's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from fastattn import dispatch, evidence
from fastattn.evidence import Processor

H200 = Processor("cuda", "NVIDIA", "NVIDIA H200")


@contextlib.contextmanager
def be(processor: Processor) -> Iterator[None]:
    """Within the block this machine has another processor, or another GPU."""

    def said(device: str = "cpu", _index: int = 0) -> Processor:
        return processor if device == processor.device else Processor(device)

    try:
        with mock.patch.object(evidence, "processor", said):
            evidence.forget()
            yield
    finally:
        evidence.forget()


@contextlib.contextmanager
def on_a_gpu(
    module: Any, monkeypatch: pytest.MonkeyPatch, *names: str, **others: Any
) -> Iterator[None]:
    """Within the block CPU tensors act as tensors of a GPU with these backends: ``module`` under
    each of the names, and ``others`` under their own names."""
    load, found = dispatch.load.__wrapped__, {**dict.fromkeys(names, module), **others}
    monkeypatch.setattr(dispatch, "load", lambda n: found[n] if n in found else load(n))
    monkeypatch.setattr(dispatch, "_device", lambda tensors: "cuda")
    dispatch._warn_once.cache_clear()
    with be(H200):
        yield
    monkeypatch.undo()
