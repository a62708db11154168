"""Rows of caches, gathered and widened by the native core for kernels that read neither pages nor
quantised rows.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fastattn.backends.cpu.operands import DTYPES

LENGTHS = torch.tensor([150, 0, 1, 64])
BEGINS = torch.tensor([70, 0, 0, 3])
B, HKV, N = 4, 3, 160
WIDTHS = 37, 16  # of keys and values


@pytest.fixture
def gathered(native: ModuleType) -> Any:
    """Without scales, the dtype is that of the caches."""

    def gather(dtype: torch.dtype, *tensors: Tensor | None) -> Any:
        return native.gather_rows(*tensors, dtype=DTYPES[dtype])

    return gather


def quantised(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scales = torch.rand(shape[:3]) + 0.5
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, dtype=dtype), scales
    return (500 * torch.randn(shape)).clamp(-448, 448).to(dtype), scales


def rows_of(cache: Tensor, b: int, table: Tensor | None, entries: Tensor | None) -> Tensor:
    """Those of sequence b, [Hkv, N, ...]."""
    if table is None:
        return cache[b if entries is None else entries[b]]
    return cache[table[b].long()].transpose(0, 1).flatten(1, 2)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("place", ["entries", "chosen", "pages", "strided"])
@pytest.mark.parametrize(
    ("cached", "dtype"),
    [
        (torch.int8, torch.bfloat16),
        (torch.int8, torch.float32),
        (torch.int8, torch.float64),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.float8_e4m3fn, torch.float32),
        (torch.float8_e4m3fn, torch.float64),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_they_are_those_of_each_sequence(
    cached: torch.dtype, dtype: torch.dtype, place: str, padded: bool, gathered: Any
) -> None:
    draw = torch.manual_seed(3)
    size = 16 if place == "pages" else N
    count = 60 if place == "pages" else 6
    table = entries = None
    if place == "pages":
        table = torch.randperm(count, generator=draw)[: B * N // size].int().view(B, -1)
    elif place == "chosen":
        entries = torch.tensor([5, 0, 3, 1])
    caches, scales = [], []
    for width in WIDTHS:
        shape = (count, HKV, size, width * (2 if place == "strided" else 1))
        if cached in (torch.int8, torch.float8_e4m3fn):
            cache, scale = quantised(shape, cached)
            scales.append(scale)
        else:
            cache = torch.randn(shape).to(cached)
        caches.append(cache[..., ::2] if place == "strided" else cache)
    if not scales:
        scales = [None, None]
    begins = BEGINS if padded else None
    found = gathered(dtype, *caches, *scales, LENGTHS, table, entries, begins)
    for rows, cache, scale, width in zip(found, caches, scales, WIDTHS, strict=True):
        assert rows.shape == (B, HKV, 150, width)
        assert rows.dtype == dtype
        for b in range(B):
            inside = slice(int(BEGINS[b]) if padded else 0, int(LENGTHS[b]))
            expected = rows_of(cache, b, table, entries)[:, inside]
            if scale is not None:
                wide = torch.promote_types(dtype, torch.float32)
                factor = rows_of(scale[..., None], b, table, entries)[:, inside]
                expected = expected.to(wide) * factor.to(wide)
            assert torch.equal(rows[b, :, inside], expected.to(dtype))


@pytest.mark.parametrize("name", ["key_scales", "value_scales"])
@pytest.mark.parametrize(
    ("cached", "wrong"),
    [(torch.int8, 0.0), (torch.int8, float("nan")), (torch.float8_e4m3fn, 2e36)],
    ids=str,
)
def test_a_scale_of_a_row_is_checked_and_others_are_not_read(
    name: str, cached: torch.dtype, wrong: float, gathered: Any
) -> None:
    torch.manual_seed(4)
    keys, key_scales = quantised((B, HKV, N, WIDTHS[0]), cached)
    values, value_scales = quantised((B, HKV, N, WIDTHS[1]), cached)
    call = torch.bfloat16, keys, values, key_scales, value_scales, LENGTHS, None, None, BEGINS
    scales = key_scales if name == "key_scales" else value_scales
    for row in range(N):
        if not BEGINS[0] <= row < LENGTHS[0]:
            scales[0, 1, row] = wrong
    gathered(*call)
    scales[0, 1, 149] = wrong
    with pytest.raises(ValueError, match=f"{name} must be positive .* row 149 of sequence 0"):
        gathered(*call)


def test_lengths_pages_and_entries_are_checked_first(gathered: Any) -> None:
    cache = torch.randn(4, HKV, 16, 8)
    table = torch.tensor([[0, 1], [2, 4]], dtype=torch.int32)
    call = torch.float32, cache, cache, None, None
    for rest, match in (
        ((torch.tensor([32, 32]), table, None, None), "one of the 4 pages, got 4"),
        ((torch.tensor([33, 16]), table, None, None), "between 0 and the 32 keys .* got 33"),
        ((torch.tensor([-1, 16]), table, None, None), "between 0 and the 32 keys .* got -1"),
        ((torch.tensor([16, 16]), None, torch.tensor([0, 4]), None), "4 entries .* got 4"),
        ((torch.tensor([16, 16]), None, None, torch.tensor([0, 17])), "cache_leftpad .* got 17"),
    ):
        with pytest.raises(ValueError, match=match):
            gathered(*call, *rest)
    gathered(*call, torch.tensor([32, 16]), table, None, None)  # the page beyond is not read
