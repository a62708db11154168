"""Attention with a modified score as an operator."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastattn._derivative import Derivative
from fastattn._flops import flops_of_pairs
from fastattn.backends.primitives import FlexOptions
from fastattn.checks import default_scale
from fastattn.library import Operator


def _pairs(query: Tensor, key: Tensor, *_: Any) -> int:
    """All pairs: which of them are visible depends on values."""
    return query.shape[:3].numel() * key.shape[2]


attention = Operator(
    "flex_attention",
    "query: B Hq Lq D; key: B Hkv Lk D; value: B Hkv Lk Dv; score_program: *; score_data?: *; "
    "mask_program?; Hq % Hkv",
    "out: B Hq Lq Dv; lse: B Hq Lq",
    options=FlexOptions,
    out_like="query",
    derivative=Derivative(
        grads="out lse",
        reads="query key value score_program out lse score_data mask_program",
        gives="query key value score_data",
        in_order="query key value",
        options=FlexOptions,
    ),
    flops=flops_of_pairs(_pairs),
    not_in_onnx={"": "its steps are in a tensor; export the model instead of its graph"},
    checked_by=("cpu",),
    derived={"scale": lambda query, *_: default_scale(query.shape[-1])},
)
