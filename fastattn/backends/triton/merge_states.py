"""Merged states of attention on Triton: lse = log(e^lse_a + e^lse_b), and the outputs by share.

Bound by memory: a program owns a tile of rows and goes through their columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.backends._states import of_any_rank, sizes
from fastattn.backends.primitives import NoOptions
from fastattn.backends.triton._core import INF, Operand
from fastattn.backends.triton._launch import launch, operand
from fastattn.backends.triton._table import Launch

_TILE = Launch(16, 64, 4, 1)  # rows, columns at a time


@triton.jit
def merge_lse(a, b):
    """Return log(e^a + e^b) of two lse [BM], and the share of each state in the output."""
    larger = tl.maximum(a, b)
    reference = tl.where(tl.abs(larger) == INF, 0.0, larger)
    # A state of inf has the whole weight: inf - inf would be NaN.
    x = tl.where(larger == INF, (a == INF).to(a.dtype), tl.exp(a - reference))
    y = tl.where(larger == INF, (b == INF).to(b.dtype), tl.exp(b - reference))
    # log(1 + e), where one of x and y is 1 and e the other one; the quotient takes back what the
    # sum has rounded off.
    e = x * y
    one_plus_e = 1.0 + e
    rounded_e = tl.where(one_plus_e == 1.0, 1.0, one_plus_e - 1.0)
    log_one_plus_e = tl.where(one_plus_e == 1.0, e, tl.log(one_plus_e) * (e / rounded_e))
    total = x + y
    total = tl.where(total == 0.0, 1.0, total)
    return larger + log_one_plus_e, x / total, y / total


@triton.jit
def row_pointers(x, row, heads, length):
    """Pointers [BM] to the rows number ``row`` of x [B, H, L, D], counted over all batches."""
    i_bh = row // length
    return x.p + i_bh // heads * x.b + i_bh % heads * x.h + row % length * x.l


@triton.jit
def merge_rows(
    out_a,  # [B, H, L, D]
    lse_a,  # [B, H, L, 1]
    out_b,
    lse_b,
    out,
    lse,
    heads,
    length,
    rows,  # B H L
    width,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Merge one tile of rows: their lse, and their outputs weighted by the shares."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    m_row = row < rows
    a = tl.load(row_pointers(lse_a, row, heads, length), mask=m_row, other=-INF)
    b = tl.load(row_pointers(lse_b, row, heads, length), mask=m_row, other=-INF)
    total, share_a, share_b = merge_lse(a, b)
    tl.store(row_pointers(lse, row, heads, length), total, mask=m_row)
    share_a = share_a.to(tl.float32)[:, None]
    share_b = share_b.to(tl.float32)[:, None]
    p_a = row_pointers(out_a, row, heads, length)[:, None]
    p_b = row_pointers(out_b, row, heads, length)[:, None]
    p_out = row_pointers(out, row, heads, length)[:, None]
    for col in range(0, width, BN):
        o_d = (col + tl.arange(0, BN)).to(tl.int64)[None, :]
        # The output of an empty state is not read: it may hold NaN.
        m_a = (a != -INF)[:, None] & (o_d < width)
        m_b = (b != -INF)[:, None] & (o_d < width)
        b_a = tl.load(p_a + o_d * out_a.d, mask=m_a, other=0.0).to(tl.float32)
        b_b = tl.load(p_b + o_d * out_b.d, mask=m_b, other=0.0).to(tl.float32)
        y = (share_a * b_a + share_b * b_b).to(out.p.dtype.element_ty)
        tl.store(p_out + o_d * out.d, y, mask=m_row[:, None] & (o_d < width))


@triton.jit
def merge_rows_backward(
    grad_out,  # [B, H, L, D], or None
    grad_lse,  # [B, H, L, 1], or None
    out_a,
    lse_a,
    out_b,
    lse_b,
    grad_out_a,
    grad_lse_a,
    grad_out_b,
    grad_lse_b,
    heads,
    length,
    rows,
    width,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """The gradients of both states, for one tile of rows.

    With p the shares, g and h the gradients of out and lse, and d = sum g (out_a - out_b):
    dout_a = p_a g, dlse_a = p_a h + p_a p_b d, dout_b = p_b g, dlse_b = p_b h - p_a p_b d.
    """
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    m_row = row < rows
    a = tl.load(row_pointers(lse_a, row, heads, length), mask=m_row, other=-INF)
    b = tl.load(row_pointers(lse_b, row, heads, length), mask=m_row, other=-INF)
    visible_a = a != -INF
    visible_b = b != -INF
    total, share_a, share_b = merge_lse(a, b)
    d = tl.zeros([BM], tl.float32)
    p_a = row_pointers(out_a, row, heads, length)[:, None]
    p_b = row_pointers(out_b, row, heads, length)[:, None]
    p_da = row_pointers(grad_out_a, row, heads, length)[:, None]
    p_db = row_pointers(grad_out_b, row, heads, length)[:, None]
    for col in range(0, width, BN):
        o_d = (col + tl.arange(0, BN)).to(tl.int64)[None, :]
        m_d = m_row[:, None] & (o_d < width)
        m_both = (visible_a & visible_b)[:, None] & (o_d < width)
        b_g = tl.zeros([BM, BN], tl.float32)
        if grad_out is not None:
            p_g = row_pointers(grad_out, row, heads, length)[:, None]
            b_g = tl.load(p_g + o_d * grad_out.d, mask=m_d, other=0.0).to(tl.float32)
        b_a = tl.load(p_a + o_d * out_a.d, mask=m_both, other=0.0).to(tl.float32)
        b_b = tl.load(p_b + o_d * out_b.d, mask=m_both, other=0.0).to(tl.float32)
        d += tl.sum(tl.where(m_both, b_g * (b_a - b_b), 0.0), axis=1)
        grad_of_a = tl.where(visible_a[:, None], share_a.to(tl.float32)[:, None] * b_g, 0.0)
        grad_of_b = tl.where(visible_b[:, None], share_b.to(tl.float32)[:, None] * b_g, 0.0)
        tl.store(p_da + o_d * grad_out_a.d, grad_of_a.to(grad_out_a.p.dtype.element_ty), mask=m_d)
        tl.store(p_db + o_d * grad_out_b.d, grad_of_b.to(grad_out_b.p.dtype.element_ty), mask=m_d)
    h = tl.zeros([BM], a.dtype)
    if grad_lse is not None:
        h = tl.load(row_pointers(grad_lse, row, heads, length), mask=m_row, other=0.0)
    shared_gradient = share_a * share_b * d
    grad_of_a = tl.where(visible_a, share_a * h + shared_gradient, 0.0)
    grad_of_b = tl.where(visible_b, share_b * h - shared_gradient, 0.0)
    tl.store(row_pointers(grad_lse_a, row, heads, length), grad_of_a, mask=m_row)
    tl.store(row_pointers(grad_lse_b, row, heads, length), grad_of_b, mask=m_row)


def _make_merge(kernel: Any, *names: str) -> Callable[..., tuple[Tensor, ...]]:
    """Make a function that launches a kernel, of the tensors ``names`` and the two states.

    It returns the gradients of both states, or without ``names`` a merged one, like the first.
    """
    states = ("out_a", "lse_a", "out_b", "lse_b")
    results = tuple(f"grad_{name}" for name in states) if names else ("out", "lse")

    def run(*tensors: Tensor | None, options: NoOptions) -> tuple[Tensor, ...]:
        """Allocate the outputs and launch the kernel."""
        inputs = dict(zip((*names, *states), tensors, strict=True))
        outputs_like = [x for name, x in inputs.items() if name in states and x is not None]
        outputs = {
            name: torch.empty_like(x) for name, x in zip(results, outputs_like, strict=False)
        }
        batch, heads, length, width = sizes(outputs_like[0])
        rows = batch * heads * length
        operands = {
            name: None if x is None else _four_dim_operand(x.unsqueeze(-1) if "lse" in name else x)
            for name, x in (inputs | outputs).items()
        }
        launch(
            kernel,
            _TILE,
            _TILE.q_tiles(rows),
            outputs_like[0].device,
            **operands,
            heads=heads,
            length=length,
            rows=rows,
            width=width,
        )
        return tuple(outputs.values())

    return run


def _four_dim_operand(x: Tensor) -> Operand:
    """Add leading dimensions until x is [B, H, L, D]."""
    return operand(x[(None,) * (4 - x.ndim)])


merge_states = of_any_rank(_make_merge(merge_rows))
merge_states_backward = of_any_rank(_make_merge(merge_rows_backward, "grad_out", "grad_lse"))
