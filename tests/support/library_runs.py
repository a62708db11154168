"""Runs a model of a library on stock attention and on ours, for tests/models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from transformers_runs import InDouble, assert_same, gradients

import fastattn
from fastattn.integrations import torch as integration


class Adapted(nn.Module):
    """A model whose output is a dictionary."""

    def __init__(self, model: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.run = run

    def forward(self, **inputs: Any) -> dict[str, Any]:
        return {"out": self.run(self.model, **inputs)}


def initialized(model: nn.Module) -> None:
    """Random weights in float64, none of which is 0: libraries initialize many layers with 0."""
    model.double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            size = 1.0 / max(parameter[0].numel(), 1) ** 0.5 if parameter.ndim > 1 else 0.1
            shift = parameter if parameter.ndim == 1 else 0
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.copy_(shift + size * noise)


def compared(model: nn.Module, inputs: dict[str, Any], served: AbstractContextManager[Any]) -> None:
    """Compare the outputs and all gradients of a model outside and inside ``served``.

    All its attention must run on our kernels there.
    """
    want = gradients(model, inputs)
    with served:
        got = gradients(model, inputs)
        with InDouble(), fastattn.trace() as seen, torch.no_grad():
            model(**inputs)
    assert_same(got, want)
    assert seen, "no attention was called"
    assert all(call.backend for call in seen), seen


@contextlib.contextmanager
def accelerated(model: nn.Module, *calls: str) -> Iterator[None]:
    """Within, the model is accelerated, and all parts of the report have one of these calls."""
    report = fastattn.accelerate(model)
    try:
        assert not report.unserved, report
        assert {part.calls for part in report.served} == set(calls)
        yield
    finally:
        fastattn.restore(model)
    assert not integration._active
