"""Calls of attention on the tiles of AMX, emulated and, if available, real."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn.testing import targets

attention = fastattn.scaled_dot_product_attention
EMULATED, REAL = "amx_bf16_emulated", "amx_bf16"
HERE = [target.isa for target in targets(emulated=True)]


def on(isa: str) -> Any:
    """An instruction set as a parameter, skipped where it cannot run."""
    reason = "needs AVX2" if isa == EMULATED else "needs AMX"
    return pytest.param(isa, marks=pytest.mark.skipif(isa not in HERE, reason=reason), id=isa)


def needs_tiles(isa: str, dtype: torch.dtype) -> None:
    """Skips a test of bits where this dtype runs on vectors beside the real tiles."""
    reason = importlib.import_module("fastattn._cpu").build_info()["no_float16_on_tiles"]
    if dtype == torch.float16 and isa == REAL and reason:
        pytest.skip(reason)


def qkv(
    batch: int, heads: int, queries: int, keys: int, dim: int, dim_v: int = 0, kv_heads: int = 0
) -> list[Tensor]:
    """Random queries, keys and values in bfloat16."""
    generator = torch.Generator().manual_seed(queries * keys + dim)
    shapes = (
        (batch, heads, queries, dim),
        (batch, kv_heads or heads, keys, dim),
        (batch, kv_heads or heads, keys, dim_v or dim),
    )
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def in_double(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores = scores if bias is None else scores + bias
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def assert_close(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Compare the output and the log-sum-exp, by the tolerances of the dtype."""
    tolerances = (1e-3, 1e-3), (1e-4, 1e-6)
    if got[0].dtype != torch.float16:
        tolerances = (8e-3, 8e-3), (2e-3, 1e-5)
    for x, want, (atol, rtol) in zip(got, expected, tolerances, strict=True):
        torch.testing.assert_close(x.double(), want, atol=atol, rtol=rtol)


def grows(factor: float, query: int, keys: int) -> Tensor:
    """A bias that makes each block of keys outweigh the one before by far, for one query."""
    bias = torch.zeros(64, keys)
    bias[query] = torch.arange(keys) // 64 * factor
    return bias


def gradients(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """The gradients of query, key, value, and of a mask that requires one."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    mask = options.get("attn_mask")
    wanted = [q, k, v, *([mask] if mask is not None and mask.requires_grad else [])]
    out = attention(q, k, v, enable_gqa=True, **options)
    generator = torch.Generator().manual_seed(out.numel())
    return torch.autograd.grad(out, wanted, torch.randn(out.shape, generator=generator).to(out))
