"""An option and a tensor of attention that no kernel knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from fastattn import dispatch
from fastattn.backends.primitives import AttentionBackwardOptions, AttentionOptions
from fastattn.ops.sdpa import attention

_OP = "scaled_dot_product_attention"


@dataclass(frozen=True)
class Extended(AttentionOptions):
    sharpness: float = 1.0


@dataclass(frozen=True)
class _ExtendedBackward(AttentionBackwardOptions):
    sharpness: float = 1.0


def assert_declined(backend: Any, dtype: torch.dtype) -> None:
    """Assert that a call runs on the backend exactly if it leaves the option at its default."""
    x, lse = torch.ones(1, 2, 16, 8, dtype=dtype), torch.ones(1, 2, 16, dtype=torch.float64)
    forward = dispatch.tensors_by_name(_OP, (x, x, x))
    given = (x, None, None, x, x, x, None, None, None, x, lse)
    backward = dispatch.tensors_by_name(f"{_OP}_backward", given)
    for sharpness, reasons in ((1.0, []), (2.0, ["has no sharpness"])):
        options: Any = Extended(scale=1.0, sharpness=sharpness)
        assert backend.why_not(_OP, forward, options) == reasons
        options = _ExtendedBackward(scale=1.0, sharpness=sharpness)
        assert backend.why_not(f"{_OP}_backward", backward, options) == reasons


def assert_tensor_declined(backend: Any, dtype: torch.dtype) -> None:
    """Assert that a call runs on the backend, without the tensor, exactly if it is None."""
    x = torch.ones(1, 2, 16, 8, dtype=dtype)
    known = [x if name in ("query", "key", "value") else None for name in attention.names]
    options = AttentionOptions(scale=1.0)
    names = (*dispatch.tensors_by_name(_OP, known), "tilt")
    with mock.patch.object(
        dispatch, "tensors_by_name", lambda op, tensors: dict(zip(names, tensors, strict=False))
    ):
        for tilt, reasons in ((None, []), (x, ["has no tilt"])):
            assert dispatch.reasons_against(backend, _OP, (*known, tilt), options) == reasons
    function = getattr(backend, _OP)
    out, *_ = function(*dispatch.accepted_tensors(function, (*known, None)), options=options)
    assert out.shape == x.shape
