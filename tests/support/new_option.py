"""An option of attention that no kernel knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fastattn import dispatch
from fastattn.backends.primitives import AttentionBackwardOptions, AttentionOptions

__all__ = ["Extended", "assert_declined"]

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
    forward = dispatch.named(_OP, (x, x, x))
    given = (x, None, None, x, x, x, None, None, None, x, lse)
    backward = dispatch.named(f"{_OP}_backward", given)
    for sharpness, reasons in ((1.0, []), (2.0, ["has no sharpness"])):
        options: Any = Extended(scale=1.0, sharpness=sharpness)
        assert backend.why_not(_OP, forward, options) == reasons
        options = _ExtendedBackward(scale=1.0, sharpness=sharpness)
        assert backend.why_not(f"{_OP}_backward", backward, options) == reasons
