"""The adapters of the linear layer, and of a whole small self-attention."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn import _cpu
from fastattn.backends.cpu.operands import DTYPES


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x @ weight.T + bias``: x [M, K], weight [N, K] with rows or columns dense, K > 0."""
    rows, width = x.shape
    transposed = weight.stride(1) != 1
    out = torch.empty((rows, weight.shape[0]), dtype=x.dtype, device="cpu")
    _cpu.linear(
        DTYPES[x.dtype],
        torch.get_num_threads(),
        (rows, weight.shape[0], width),
        x.data_ptr(),
        x.stride(),
        weight.data_ptr(),
        weight.stride(1 if transposed else 0),
        transposed,
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
    )
    return out


def self_attention(
    x: Tensor,
    sizes: tuple[int, int, int, int],
    row_steps: tuple[int, int],
    w_in: int,
    w_in_stride: int,
    b_in: int,
    w_out: int,
    w_out_stride: int,
    b_out: int,
    padding: int,
    padding_stride: tuple[int, ...],
    causal: bool,
) -> Tensor:
    """Return a multi-head self-attention, projections included; see ``nn/_small.py``."""
    out = torch.empty_like(x)
    _cpu.self_attention(
        DTYPES[x.dtype],
        torch.get_num_threads(),
        sizes,
        row_steps,
        x.data_ptr(),
        w_in,
        w_in_stride,
        b_in,
        w_out,
        w_out_stride,
        b_out,
        padding,
        padding_stride,
        causal,
        out.data_ptr(),
    )
    return out
