"""Attention with a modified score as an operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn._derivative import Derivative
from fastattn._flops import flops_of_pairs
from fastattn.autograd.sdpa import default_scale
from fastattn.backends._alloc import empty_output
from fastattn.backends.primitives import FlexOptions
from fastattn.library import Operator


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = query.new_empty(query.shape[:3], dtype=torch.float64)
    return empty_output(query, value.shape[3]), lse


def _pairs(query: Tensor, key: Tensor, *_: Any) -> int:
    """All pairs: which of them are visible depends on values."""
    return query.shape[:3].numel() * key.shape[2]


attention = Operator(
    "flex_attention(Tensor query, Tensor key, Tensor value, Tensor score_program, "
    "Tensor? score_data, Tensor? mask_program)",
    options=FlexOptions,
    results="out lse",
    fake=_fake,
    derivative=Derivative(
        grads="out lse",
        reads="query key value score_program out lse score_data mask_program",
        gives="query key value score_data",
        in_order="query key value",
        options=FlexOptions,
    ),
    flops=flops_of_pairs(_pairs),
    shapes="query: B Hq Lq D; key: B Hkv Lk D; value: B Hkv Lk Dv; score_program: *; "
    "score_data: *; Hq % Hkv; out: B Hq Lq Dv; lse: B Hq Lq",
    not_in_onnx={"": "its steps are in a tensor; export the model instead of its graph"},
    checked_by=("cpu",),
    derived={"scale": lambda query, *_: default_scale(query.shape[-1])},
)
