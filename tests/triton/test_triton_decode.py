"""Decoding on Triton: appended rows, and the same bits in any company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn.testing import Target
from fastattn.testing.decode import DecodeCase, make_decode

pytestmark = pytest.mark.usefixtures("triton_interpreter")

TRITON = Target("triton")


def test_a_sequence_has_the_same_bits_in_any_company() -> None:
    """Neither the batch nor the pages nor the room in the cache are of any matter."""
    case = DecodeCase("company", (600, 33), capacity=640, head_dim=16)
    inputs = make_decode(case, torch.float32)
    query, keys, values, lengths = inputs.args[:4]
    module = TRITON.module
    both = module.decode_attention(query, keys, values, lengths, options=inputs.options)
    alone = module.decode_attention(
        query[:1], keys[:1, :, :600], values[:1, :, :600], lengths[:1], options=inputs.options
    )
    order = torch.randperm(32)
    scattered = [torch.empty(32, 2, 40, 16) for _ in range(2)]
    for pages, cache in zip(scattered, (keys, values), strict=True):
        pages[order] = cache.unflatten(2, (16, 40)).transpose(1, 2).flatten(0, 1)
    table = order.view(2, 16).int()
    paged = module.decode_attention(query, *scattered, lengths, table, options=inputs.options)
    for whole, one, found in zip(both, alone, paged, strict=True):
        assert torch.equal(whole[:1], one)
        assert torch.equal(whole, found)


@pytest.mark.parametrize("paged", [False, True])
def test_new_rows_are_appended(paged: bool, generator: torch.Generator) -> None:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    query, key, value = (normal(2, heads, 3, 8) for heads in (4, 2, 2))
    lengths = torch.tensor([5, 0])
    table = torch.tensor([[3, 1, 0], [2, 5, 4]]) if paged else None
    shape = (6, 2, 4, 8) if paged else (2, 2, 12, 8)
    caches = normal(*shape), normal(*shape)
    results = []
    for name in ("triton", "reference"):
        kept = [x.clone() for x in caches]
        with fastattn.use_backend(name):
            out = fastattn.decode_attention(
                query, *kept, lengths, key=key, value=value, block_table=table, is_causal=True
            )
        results.append((*kept, out))
    for index, (found, want) in enumerate(zip(*results, strict=True)):
        assert torch.equal(found, want) if index < 2 else torch.allclose(found, want, atol=1e-5)


def test_pages_that_are_not_there_are_not_read() -> None:
    """On a GPU nothing checks the numbers in a table before the kernel reads them."""
    inputs = make_decode(DecodeCase("wild", (40, 9), page=16, kv_heads=1), torch.float32)
    args = list(inputs.args)
    assert args[4] is not None
    args[4] = torch.where(args[4] < 0, args[4], 10**6)
    out, _ = TRITON.module.decode_attention(*args, options=inputs.options)
    assert torch.isfinite(out).all()
