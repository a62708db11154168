"""Linear layers: which GEMM computes each of their three products, and its call.

    y = x Wᵀ + b          x [M, K]   W [N, K]   b [N]   y [M, N]
    dx = dy W     dW = dyᵀ x     db = Σ dy

Most of the arithmetic of a model is here, so the GEMM is chosen by measurement: ``evidence.py`` has
the rule of each kind of processor (docs/linear.md has the figures). There are four:

- ``torch``: ``torch.nn.functional.linear`` and ``torch.mm``. In float32 this is MKL, which is
  slower than oneDNN on AMD's processors; in 16 bits it is oneDNN on processors with 16-bit
  products, and scalar code on others.
- ``onednn``: its inner product, called directly, with the bias fused. A call has more overhead.
- ``ours``: reads the weight in place, without packing, so small calls cost least. Without 16-bit
  arithmetic it computes in float32 and rounds once at the end.
- ``tiles``: ours on the tiles of AMX. float32 is multiplied as three parts of bfloat16 and float16
  as two, with less error than float32's own arithmetic. Packing takes many rows to pay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn import _cpu, compat, evidence
from fastattn.backends._precision import allows_bf16_parts
from fastattn.backends.cpu.operands import DTYPES
from fastattn.backends.primitives import LinearBackwardOptions, LinearOptions

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # (x, weight, bias) -> y
_IN_16_BITS = {
    torch.bfloat16: compat.onednn_has_bfloat16,
    torch.float16: compat.onednn_has_float16,
}


@functools.cache
def rule(dtype: torch.dtype) -> evidence.Gemm:
    """The rule that chooses the GEMM of each product of this dtype on this processor."""
    gemm: evidence.Gemm = evidence.choose("gemm", "cpu", dtype=dtype).use
    if not _IN_16_BITS.get(dtype, True):  # overrides the row for this kind of processor
        return gemm._replace(y="ours", dx="ours", dw="ours", few=32, least=2**14, least_grad=2**14)
    if "tiles" in gemm and not _cpu.has_tiles(DTYPES[dtype]):  # another instruction set is chosen
        gemm = gemm._replace(y="torch", dx="torch", dw="torch")
    if dtype == torch.float32 and gemm.y == "torch" and not torch.backends.mkl.is_available():
        return gemm._replace(y="onednn", dx="onednn")
    return gemm


evidence.on_change(rule.cache_clear)


def gemm_of(product: str, dtype: torch.dtype, rows: int, work: int) -> str:
    """The name of the GEMM for a product "y", "dx" or "dw" of x [rows, K]; ``work`` is M·N·K."""
    gemm = rule(dtype)
    if work < max(gemm.least if product == "y" else gemm.least_grad, 1):
        return "torch"
    if product == "y" and rows <= gemm.few:
        min_work = gemm.min_one_row_weight if rows == 1 else rows * gemm.min_few_rows_weight
        is_ours = work >= min_work and (rows == 1 or rows >= gemm.min_few_rows)
        return "ours" if is_ours else "torch"
    if product == "y" and work <= gemm.ours_up_to:
        return "ours"
    name: str = getattr(gemm, product)
    if name == "onednn" and (compat.onednn_linear is None or not torch.backends.mkldnn.enabled):
        return "torch"
    if name == "tiles" and rows < (
        gemm.min_tile_rows if product == "dw" else gemm.min_tile_rows_alone
    ):
        return "torch"
    if dtype == torch.float32 and allows_bf16_parts():  # PyTorch then multiplies in bfloat16
        return "torch"
    return name


def faster_than_torch(dtype: torch.dtype) -> Callable[[int, int], Product | None]:
    """Return (rows, M·N·K) -> the GEMM of y, or None if PyTorch computes all three products."""
    gemm = rule(dtype)
    min_work = max(gemm.least, 1)
    if {*gemm[:3]} == {"torch"} and not gemm.few and not gemm.ours_up_to:
        min_work = 2**62  # always PyTorch's GEMM

    def choose(rows: int, work: int) -> Product | None:
        if work < min_work:
            return None
        name = gemm_of("y", dtype, rows, work)
        if name != "torch":
            return _GEMMS[name]
        own_backward = torch.is_grad_enabled() and {gemm.dx, gemm.dw} != {"torch"}
        return _by_torch if own_backward else None

    return choose


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, options: LinearOptions
) -> Tensor:
    """Return y [M, N] = x Wᵀ + b, for x [M, K], weight [N, K] and bias [N]."""
    rows = x.shape[0]
    gemm = options.gemm or gemm_of("y", x.dtype, rows, rows * weight.numel())
    return _GEMMS[gemm](x, weight, bias)


def linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    options: LinearBackwardOptions,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """grad [M, N], x [M, K], weight [N, K] -> the gradients of x, weight and bias"""
    needed, rows = options.needed, x.shape[0]
    work = rows * weight.numel()

    def multiply(name: str, a: Tensor, b: Tensor) -> Tensor:
        return _GEMMS[options.gemm or gemm_of(name, a.dtype, rows, work)](a, b, None)

    dx = dw = db = None
    if needed & 1:
        dx = multiply("dx", grad, weight.t())
    if needed & 2:
        dw = multiply("dw", grad.t(), x.t())
    if needed & 4:
        db = grad.sum(0)
    return dx, dw, db


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Any = compat.onednn_linear
    y: Tensor = product(x, weight, bias, "none", [], "")  # no operation is fused after the product
    return y


def _by_ours(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _run_native(x, weight, bias, on_tiles=False)


def _by_tiles(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _run_native(x if 1 in x.stride() else x.contiguous(), weight, bias, on_tiles=True)


def _run_native(x: Tensor, weight: Tensor, bias: Tensor | None, *, on_tiles: bool) -> Tensor:
    if x.shape[1] == 0:
        return _by_torch(x, weight, bias)
    if 1 not in weight.stride():
        weight = weight.contiguous()
    y: Tensor = _cpu.linear(x, weight, bias, on_tiles=on_tiles)
    return y


def linear_packed(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor) -> Tensor:
    """Compute y on tiles, with ``packed`` from :func:`pack_weight`."""
    x = x if 1 in x.stride() else x.contiguous()
    y: Tensor = _cpu.linear(x, weight, bias, on_tiles=True, packed=packed)
    return y


def pack_weight(weight: Tensor) -> Tensor | None:
    """Copy a weight into the layout of the tiles; None if tiles do not compute its products."""
    if rule(weight.dtype).y != "tiles" or 1 not in weight.stride() or weight.numel() == 0:
        return None
    packed: Tensor | None = _cpu.pack_weight(weight)
    return packed


def _by_torch(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


_GEMMS: dict[str, Product] = {
    "onednn": _by_onednn,
    "ours": _by_ours,
    "tiles": _by_tiles,
    "torch": _by_torch,
}


def gemms_of(dtype: torch.dtype) -> dict[str, Product]:
    """The GEMMs that can multiply this dtype on this processor, by name."""
    by_onednn = compat.onednn_linear is not None and _IN_16_BITS.get(dtype, dtype.itemsize == 4)
    by_tiles = dtype.itemsize < 8 and _cpu.has_tiles(DTYPES[dtype])
    available = {"onednn": by_onednn, "tiles": by_tiles}
    return {name: gemm for name, gemm in _GEMMS.items() if available.get(name, True)}
