"""How tests/models runs a model of a library, on stock attention and on ours."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from transformers_runs import InDouble, assert_same, gradients

import fastattn


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
    """Compare the outputs and all gradients of a model with what they are within ``served``.

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
