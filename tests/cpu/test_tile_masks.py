"""Masks without a tensor of pairs and relative biases on the tiles of AMX: the bits are those of
the same masks and biases as tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tile_attention import attention, gradients, needs_tiles, qkv
from torch import Tensor

from fastattn import masks
from fastattn.bias import Window2d

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
QUERIES, KEYS = 300, 420
IDS = torch.arange(KEYS) // 100

MASKS: dict[str, tuple[masks.Mask, Any]] = {
    "intervals": (
        masks.causal() & ~masks.sliding_window(70, 0),
        lambda h, i, j: (j <= i) & (i - j > 70),
    ),
    "documents": (masks.document(IDS[:QUERIES], IDS), lambda h, i, j: IDS[i] == IDS[j]),
    "of-each-head": (
        masks.from_function(
            lambda b, h, i, j: (i // 150 == h) & (j // 150 == h), None, 2, QUERIES, KEYS
        ),
        lambda h, i, j: (i // 150 == h) & (j // 150 == h),
    ),
    "bits": (masks.causal() | masks.document(IDS[:QUERIES] % 2, IDS % 2),
             lambda h, i, j: (j <= i) | (IDS[i] % 2 == IDS[j] % 2)),
}  # fmt: skip


def in_dtype(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [x.to(dtype) for x in tensors]


def assert_same_bits(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for n, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(a, b), n


@DTYPES
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_without_a_tensor(tiles: str, name: str, dtype: torch.dtype) -> None:
    """Some blocks of keys, of 64 and of 128, have no visible pair; some have all."""
    needs_tiles(tiles, dtype)
    mask, pairs = MASKS[name]
    q, k, v = in_dtype(qkv(1, 2, QUERIES, KEYS, 32, kv_heads=1), dtype)
    h, i, j = torch.arange(2).view(2, 1, 1), torch.arange(QUERIES)[:, None], torch.arange(KEYS)
    seen = pairs(h, i, j).expand(2, QUERIES, KEYS)[None]
    hidden = ~seen.any(1).any(1)[0]
    k[:, :, hidden], v[:, :, hidden] = math.nan, math.inf
    options = {"enable_gqa": True, "return_lse": True}
    got = attention(q, k, v, mask=mask, **options)
    assert_same_bits(got, attention(q, k, v, attn_mask=seen, **options))
    assert got[0].isfinite().all()
    found = gradients(q, k, v, mask=mask)
    assert_same_bits(found, gradients(q, k, v, attn_mask=seen))
    assert all(x.isfinite().all() for x in found)


@DTYPES
def test_a_mask_without_a_tensor_under_a_mask_of_keys(tiles: str, dtype: torch.dtype) -> None:
    needs_tiles(tiles, dtype)
    q, k, v = in_dtype(qkv(1, 2, 100, KEYS, 32), dtype)
    padding = torch.arange(KEYS).view(1, 1, 1, KEYS) % 190 < 100
    mask, pairs = masks.document(IDS[:100], IDS % 2), IDS[:100, None] == IDS % 2
    got = gradients(q, k, v, mask=mask, attn_mask=padding)
    assert_same_bits(got, gradients(q, k, v, attn_mask=padding & pairs))


def bias_of(form: str) -> tuple[Any, Tensor, Tensor]:
    """A relative bias of two heads, its table, and the entry of each pair of 56 x 56."""
    generator = torch.Generator().manual_seed(3)
    if form == "distances":
        table = torch.randn(2, 111, generator=generator)
        return table, table, torch.arange(56)[:, None] - torch.arange(56) + 55
    table = torch.randn(13 * 15, 2, generator=generator)
    y, x = torch.arange(56) // 8, torch.arange(56) % 8
    entry = (y[:, None] - y + 6) * 15 + x[:, None] - x + 7
    return Window2d(table, (7, 8)), table, entry


@DTYPES
@pytest.mark.parametrize("form", ["distances", "window"])
def test_a_relative_bias(tiles: str, form: str, dtype: torch.dtype) -> None:
    bias, table, entry = bias_of(form)
    dense = (table[:, entry] if form == "distances" else table[entry].permute(2, 0, 1))[None]
    dense = dense.contiguous().requires_grad_()
    table.requires_grad_()
    q, k, v = in_dtype(qkv(2, 2, 56, 56, 40), dtype)
    options = {"return_lse": True, "softcap": 3.0}
    got = attention(q, k, v, relative_bias=bias, **options)
    assert_same_bits(got, attention(q, k, v, attn_mask=dense, **options))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    upstream = torch.randn(got[0].shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    out = attention(*inputs, relative_bias=bias, softcap=3.0)
    *found, of_table = torch.autograd.grad(out, [*inputs, table], upstream)
    out = attention(*inputs, attn_mask=dense, softcap=3.0)
    *expected, of_pairs = torch.autograd.grad(out, [*inputs, dense], upstream)
    assert_same_bits(tuple(found), tuple(expected))
    # The entries of the table are sums of the same gradients of pairs, in another order.
    sums = torch.zeros(2, table.numel() // 2, dtype=torch.float64)
    sums.index_add_(1, entry.flatten(), of_pairs[0].double().flatten(1))
    scale = of_pairs.abs().amax()
    of_table = of_table if form == "distances" else of_table.T
    torch.testing.assert_close(of_table.double(), sums, atol=1e-5 * float(scale), rtol=1e-5)


@DTYPES
def test_the_gradient_of_a_table_does_not_depend_on_the_threads(
    tiles: str, dtype: torch.dtype, same_for_any_threads: Any
) -> None:
    """Two chunks of keys, whose sums are added in order."""
    q, k, v = in_dtype(qkv(1, 2, 40, 1100, 32, kv_heads=1), dtype)
    table = torch.randn(2, 2199, generator=torch.Generator().manual_seed(5), requires_grad=True)

    def gradient() -> Tensor:
        out = attention(q, k, v, relative_bias=table, enable_gqa=True)
        return torch.autograd.grad(out.float().square().sum(), table)[0]

    found = same_for_any_threads(gradient)
    assert (found[:, : 1099 + 40] != 0).all()
    assert (found[:, 1099 + 40 :] == 0).all()
