"""Cases with scores of up to 10^11 in bfloat16 and 4 10^9 in float32: much larger than the
differences that a float keeps of them: the backward pass has to find the weights of the forward
pass again. A forward pass alone has scores of up to 10^31."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fastattn.testing import Case

_BASE = Case("scores", q_len=70, k_len=90, head_dim=64)
_KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal-128": {"causal": "bottom_right", "head_dim": 128},
    "grouped-lse": {"heads": 4, "kv_heads": 2, "grads": ("out", "lse")},
    "mask": {"mask": "float_inf", "mask_dims": "qk"},
    "weights": {"weights": 1},
    "weights-mask": {"weights": 1, "mask": "float_inf", "mask_dims": "qk"},
    "sinks": {"sinks": "h"},
    # Their backward passes run on the kernels with options, although the forward pass has none.
    "weights-grad": {"weights": 2, "heads": 4, "kv_heads": 2, "grads": ("out", "weights")},
    "strided-grad": {"grad_layout": "every_second"},
}


def _large_scores() -> Iterator[tuple[Case, torch.dtype]]:
    """Cases with scores from 10^3 to 10^30, for every kind of options."""
    for scale in (1e3, 1e5, 3e6, 6e7, 3e9):
        for kind, options in _KINDS.items():
            case = replace(_BASE, name=f"scores-{scale:.0e}-{kind}", scale=scale, **options)
            if (kind in ("plain", "weights") or scale == 3e6) and scale < 1e9:
                yield case, torch.float32
            if scale == 6e7:
                continue
            yield case, torch.bfloat16
            # A gradient has the factor `scale`, and float16 ends at 65504.
            if scale == 1e3 or (scale == 1e5 and kind != "grouped-lse"):
                yield case, torch.float16

    for scale in (5e5, 6e7, 1e12, 1e30):
        for kind in ("plain", "causal-128", "sinks"):
            case = replace(_BASE, k_len=300, scale=scale, **_KINDS[kind])
            case = replace(case, name=f"forward-{scale:.0e}-{kind}", grads=())
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                yield case, dtype


def large_scores(*dtypes: torch.dtype) -> list[Any]:
    """The parameters `case` and `dtype` of a test, of these dtypes."""
    return [
        pytest.param(case, dtype, id=f"{case.name}-{str(dtype)[6:]}")
        for case, dtype in _large_scores()
        if dtype in dtypes
    ]
