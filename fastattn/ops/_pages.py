"""Packed keys and values from the pages of a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import checks
from fastattn.compat import runs_eagerly
from fastattn.ops.varlen import check_starts

_OP = "flash_attn_varlen_func"


def gather_pages(
    q: Any, k: Any, v: Any, cu_seqlens_k: Any, max_seqlen_k: Any, block_table: Any
) -> tuple[Tensor, Tensor]:
    """Validate; return the packed keys [Tk, Hkv, D] and values [Tk, Hkv, Dv] of all sequences.

    If the host cannot read the lengths, Tk is an upper bound, and the rows after the last sequence
    are copies of row 0 of page 0, which :func:`varlen_attention` ignores.
    """
    if not isinstance(q, Tensor):
        raise checks.wrong_type(_OP, "q", q, "Tensor")
    for name, x in (("k", k), ("v", v)):
        shape = "[pages, page size, Hkv, D] with a block_table"
        checks.check_tensor(_OP, name, x, shape, 4, q.device)
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(
            f"{_OP}: k and v must have the same pages and page size with a block_table, "
            f"got shapes {tuple(k.shape)} and {tuple(v.shape)}"
        )
    starts = check_starts("k", cu_seqlens_k, q.device, max_seqlen_k)
    table = checks.check_integers(_OP, "block_table", block_table, "[B, P]", 2, q.device)
    batch = starts.shape[0] - 1
    if table.shape[0] != batch:
        raise ValueError(
            f"{_OP}: block_table must have a row for each of the {batch} sequences of "
            f"cu_seqlens_k, got {table.shape[0]}"
        )
    pages, page_size = k.shape[:2]
    can_read = starts.is_cpu and runs_eagerly(starts, table)
    if can_read:
        _check_room(starts, table.shape[1], page_size)
    page, row = _locate_rows(starts, table, page_size, _count_rows(starts, table, k, max_seqlen_k))
    if can_read:
        _check_pages(page, pages)
    return _gather_rows(k, page, row), _gather_rows(v, page, row)


def _count_rows(starts: Tensor, table: Tensor, k: Tensor, longest: int | None) -> int:
    """Return the number of rows of all sequences; an upper bound if the host cannot read it."""
    if runs_eagerly(starts) and not _is_capturing(starts.device):
        return int(starts[-1])
    if k.shape[0] == 0:
        return 0
    room = table.shape[1] * k.shape[1]
    return table.shape[0] * (room if longest is None else min(room, longest))


def _is_capturing(device: torch.device) -> bool:
    """Whether the device's current stream records a CUDA graph."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _locate_rows(
    starts: Tensor, table: Tensor, page_size: int, row_count: int
) -> tuple[Tensor, Tensor]:
    """Return the page of each packed row, and the row there, both [Tk]; 0 after all sequences."""
    packed_row = torch.arange(row_count, device=starts.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), packed_row, right=True)
    in_sequence = sequence < table.shape[0]
    sequence = sequence.clamp(max=table.shape[0] - 1)
    position = torch.where(in_sequence, packed_row - starts[sequence], 0)
    page = torch.where(in_sequence, table[sequence, position // page_size], 0)
    return page, position % page_size


def _gather_rows(x: Tensor, page: Tensor, row: Tensor) -> Tensor:
    """Copy rows of a cache; gradients of pages that sequences share are added in a fixed order."""
    if x.is_cpu and x.requires_grad:  # where the backward of x[page, row] adds with atomics
        return x.flatten(0, 1).index_select(0, page * x.shape[1] + row)
    return x[page, row]  # any strides, without a copy of the other pages


def _check_room(starts: Tensor, pages_per_sequence: int, page_size: int) -> None:
    longest = max(starts.diff().tolist(), default=0)
    if longest > pages_per_sequence * page_size:
        raise ValueError(
            f"{_OP}: block_table must have room for the {longest} keys of the longest sequence, "
            f"got {pages_per_sequence} pages of {page_size} rows for each"
        )


def _check_pages(page: Tensor, pages: int) -> None:
    wrong = page[(page < 0) | (page >= pages)].tolist()
    if wrong:
        raise ValueError(f"{_OP}: block_table must name one of the {pages} pages, got {wrong[0]}")
