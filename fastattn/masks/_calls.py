"""The facts about a call of attention that masks use, and the checks of masks' arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastattn.backends._mask_program import PADDING, padded
from fastattn.backends._sequences import locate_rows
from fastattn.checks import check_device as check_same_device
from fastattn.checks import check_strided, wrong_type
from fastattn.compat import records_trace, runs_eagerly


@dataclass
class Call:
    """The facts about a call that a mask depends on."""

    op: str
    batch: int  # sequences
    rows: int  # batch entries of a tensor of queries or keys
    q_len: int
    k_len: int
    device: torch.device

    def cache_key(self) -> tuple[Any, ...] | None:
        """Return all values on which a mask's program depends; None if they cannot be read."""
        raise NotImplementedError

    def positions(self) -> Tensor:
        """Return the position of every query among the keys of its sequence, [rows|1, Lq]."""
        raise NotImplementedError

    def expand_to_queries(self, x: Tensor) -> Tensor:
        """Reshape one number per sequence, [B|1], to broadcast to the positions."""
        return x[:, None]

    def ids_of_queries(self, ids: Tensor) -> Tensor:
        """Return the ids of the queries from ``ids`` [rows|1, L] of both queries and keys."""
        return ids

    def whole_lengths(self) -> tuple[int, int]:
        """Return the numbers of queries and keys that a mask for this call must cover."""
        return self.q_len, self.k_len

    def to_local_keys(self, keys: Tensor) -> Tensor:
        """Convert bounds in all keys to indices of the keys of this call."""
        return keys.clamp(0, self.k_len)

    def select_ids(self, query_ids: Tensor, key_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Select the ids of this call's queries and keys, [rows|1, L], from the ids of all."""
        return query_ids, key_ids

    def padded(self, x: Tensor) -> Tensor:
        """Pad ids or bounds to the length that kernels read."""
        return padded(x)


@dataclass
class DenseCall(Call):
    """A call with query [B, Hq, Lq, D] and Lk keys."""

    heads: int
    offset: int

    def cache_key(self) -> tuple[Any, ...]:
        return self.q_len, self.k_len, self.offset, self.device

    def positions(self) -> Tensor:
        return (torch.arange(self.q_len, device=self.device) + self.offset)[None]


@dataclass
class PartCall(DenseCall):
    """A rectangle of a larger call, with some of its heads; ``offset`` is its first query."""

    first_key: int
    first_head: int
    outer: tuple[int, int]  # the numbers of queries and keys of the larger call
    outer_heads: int

    def cache_key(self) -> tuple[Any, ...]:
        return *super().cache_key(), self.first_key, self.first_head, self.heads, self.outer

    def whole_lengths(self) -> tuple[int, int]:
        return self.outer

    def to_local_keys(self, keys: Tensor) -> Tensor:
        return (keys - self.first_key).clamp(0, self.k_len)

    def select_ids(self, query_ids: Tensor, key_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Select the ids of the rectangle's queries and keys."""
        return (
            query_ids[:, self.offset : self.offset + self.q_len],
            key_ids[:, self.first_key : self.first_key + self.k_len],
        )


@dataclass
class PackedCall(Call):
    """A call with packed sequences: one batch entry with all queries and keys."""

    q_starts: Tensor  # [B + 1]
    k_starts: Tensor
    bottom_right: bool

    def cache_key(self) -> tuple[Any, ...] | None:
        starts = _read_values(self.q_starts, self.k_starts)
        return starts and (self.q_len, self.k_len, self.bottom_right, *starts)

    def positions(self) -> Tensor:
        """Return the position of each query, counted from the start or end of its sequence."""
        sequence, position, lengths = locate_rows(self.q_starts, self.q_len)
        if self.bottom_right:
            k_lengths = torch.nn.functional.pad(self.k_starts.diff(), (0, 1))
            position = position + (k_lengths - lengths)[sequence]
        return position[None]

    def expand_to_queries(self, x: Tensor) -> Tensor:
        """Return for each query the number of its sequence, [1, Tq]."""
        if x.shape[0] == 1:
            return x[:, None]
        sequence, _, _ = locate_rows(self.q_starts, self.q_len)
        x = fix_sizes(x, self.batch)
        return torch.nn.functional.pad(x, (0, 1))[sequence][None]

    def padded(self, x: Tensor) -> Tensor:
        return padded(torch.nn.functional.pad(x, (0, PADDING)))


@dataclass
class CacheCall(Call):
    """A call with a cache of Lk keys, the first ``filled`` valid; the last query is at the last."""

    filled: Tensor  # [B] int64

    def cache_key(self) -> tuple[Any, ...] | None:
        filled = _read_values(self.filled)
        return filled and (self.q_len, self.k_len, *filled)

    def positions(self) -> Tensor:
        return torch.arange(self.q_len, device=self.device) + (self.filled - self.q_len)[:, None]

    def ids_of_queries(self, ids: Tensor) -> Tensor:
        """Return the ids at the queries' positions, at least 0, from ``ids`` [B|1, Lk]."""
        if self.whole_lengths()[1] == 0:
            return ids.new_zeros(1, self.q_len)
        return ids.expand(self.rows, -1).gather(1, self.positions().clamp(min=0))


@dataclass
class PartOfCacheCall(CacheCall):
    """A call with the part of a cache that has some positions; ``filled`` counts all keys."""

    runs: tuple[tuple[int, int], ...]  # position and length of each run of keys, in their order
    position_count: int  # of the whole cache

    def cache_key(self) -> tuple[Any, ...] | None:
        key = super().cache_key()
        return key and (*key, self.runs, self.position_count)

    def whole_lengths(self) -> tuple[int, int]:
        return self.q_len, self.position_count

    def to_local_keys(self, keys: Tensor) -> Tensor:
        return keys_before(self.runs, keys)

    def select_ids(self, query_ids: Tensor, key_ids: Tensor) -> tuple[Tensor, Tensor]:
        spans = [key_ids[:, position : position + length] for position, length in self.runs]
        return query_ids, torch.cat(spans, 1) if spans else key_ids[:, :0]


def keys_before(runs: Sequence[tuple[int, int]], positions: Tensor) -> Tensor:
    """How many keys precede each position, where ``runs`` are the increasing positions of keys."""
    counts = torch.zeros_like(positions)
    for position, length in runs:
        counts += (positions - position).clamp(0, length)
    return counts


def _read_values(*tensors: Tensor) -> tuple[tuple[int, ...], ...] | None:
    """Return the elements of vectors; None if reading them would synchronize or be traced.

    Their versions would not do, because other libraries write to lengths without a new version.
    """
    if not all(x.is_cpu and runs_eagerly(x) for x in tensors):
        return None
    return tuple(tuple(x.tolist()) for x in tensors)


def fix_sizes(x: Tensor, *sizes: int) -> Tensor:
    """Fix the last sizes of x, so that a graph of torch.jit.trace rejects other sizes."""
    return x.view(*x.shape[: -len(sizes)], *sizes) if records_trace() else x


def check_rows(call: Call, subject: str, rows: int, batch: int) -> None:
    """Raise RuntimeError unless a mask's tensor has one entry, or one for each of the batch."""
    if rows != 1 and rows != batch:
        allowed = "1" if batch == 1 else f"1 or {batch}"
        raise RuntimeError(
            f"{call.op}: mask: {subject} must be of batch size {allowed}, got {rows}"
        )


def check_device(call: Call, subject: str, x: Tensor) -> None:
    """Raise an error unless a mask's tensor is on the device of the call."""
    check_same_device(call.op, f"mask: {subject}", x, call.device)


def check_int(function: str, name: str, value: Any, minimum: int) -> None:
    """Raise an error unless ``value`` is an integer from ``minimum`` to 2**31 - 1."""
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        raise wrong_type(function, name, value, "int")
    if value < minimum:
        raise ValueError(f"{function}: {name} must be at least {minimum}, got {value}")
    if isinstance(value, int) and value >= 2**31:
        raise ValueError(f"{function}: {name} must be below 2**31, got {value}")


def copy_as_int32(function: str, name: str, x: Any, shape: str, dims: Sequence[int]) -> Tensor:
    """Return a copy as int32, so that later changes of ``x`` cannot affect only some calls."""
    check_strided(function, name, x)
    if x.dim() not in dims:
        raise ValueError(f"{function}: {name} must be {shape}, got shape {tuple(x.shape)}")
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{function}: {name} must be int32 or int64, got {x.dtype}")
    if x.dtype is torch.int64 and x.numel() and runs_eagerly(x):
        smallest, largest = (int(n) for n in x.aminmax())
        if smallest < -(2**31) or largest >= 2**31:
            raise ValueError(f"{function}: {name} must fit int32, got {smallest} to {largest}")
    return x.to(torch.int32, copy=True)
