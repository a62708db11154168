"""Decoding on one rank's part of a cache, and on one process."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from distributed_runs import run_twice
from torch import Tensor

import fastattn
from fastattn import bias, masks
from fastattn.backends import reference
from fastattn.distributed import Layout
from fastattn.ops import decode

B, N, PAGE = 3, 24, 4
CAPACITIES = {1: [24], 2: [16, 8], 3: [8, 0, 16]}


@dataclass(frozen=True, eq=False)
class Case:
    name: str
    queries: int = 1
    added: int = 0
    lengths: tuple[int, ...] | int | None = (0, 7, 17)
    heads: tuple[int, int] = (4, 2)
    widths: tuple[int, int] = (8, 6)
    options: dict[str, Any] = field(default_factory=dict)
    slopes: bool | str = False  # "each": of each sequence
    sinks: bool | str = False
    paged: bool = False
    entries: bool = False  # cache_batch_idx
    round_robin: bool = False  # blocks of 3 positions
    layout: str = "bhnd"
    dtype: torch.dtype = torch.float32
    relative: str = ""  # "table" or "t5"
    mask: str = ""  # of MASKS


MASKS: dict[str, Callable[[], Any]] = {
    "chunked": lambda: masks.chunked(5) & masks.causal(),
    "not-window": lambda: ~masks.sliding_window(4, 0) | masks.prefix_lm(torch.tensor([0, 2, 9])),
    "documents": lambda: masks.document(torch.stack([torch.arange(N) // n for n in (3, 5, 9)])),
}
CAUSAL = {"is_causal": True}
CASES = (
    Case("plain"),
    Case("full", lengths=None),
    Case("append", added=1, round_robin=True),
    Case("append-bf16", added=1, dtype=torch.bfloat16, sinks=True),
    Case("append-number", 2, 2, lengths=8, options={"softcap": 2.0, "scale": 0.4}),
    Case("causal-append", 4, 4, options=CAUSAL),
    Case("causal-round-robin", 4, 4, options=CAUSAL, round_robin=True, layout="bnhd"),
    Case("causal-long", 9, 2, lengths=(0, 1, 22), options=CAUSAL),
    Case("window", 1, 1, options={"window": (5, 0)}),
    Case("window-causal", 4, 4, options={"window": (6, 0)}, layout="bnhd"),
    Case("window-both", 5, options={"window": (3, 1)}),
    Case("slopes", 1, 1, slopes=True),
    Case("slopes-sinks", 1, 1, slopes=True, sinks=True),
    Case("slopes-causal-window", 3, 3, slopes=True, options={"window": (9, 0)}),
    Case("sinks", 3, 3, sinks=True, options=CAUSAL),
    Case("sinks-infinite", lengths=(0, 9, 24), sinks="infinite"),
    Case("paged", 2, 2, paged=True, options=CAUSAL),
    Case("window-round-robin", 3, 3, options={"window": (6, 1)}, round_robin=True),
    Case("slopes-both-sides", 4, 4, slopes=True),
    Case("slopes-of-each", 3, slopes="each", options=CAUSAL, dtype=torch.float64),
    Case("relative", 1, 1, relative="table"),
    Case("relative-causal", 4, 2, relative="table", sinks=True, options=CAUSAL, layout="bnhd"),
    Case("relative-paged", 3, relative="t5", slopes=True, paged=True, dtype=torch.bfloat16),
    Case("mask", 3, 3, mask="chunked", round_robin=True),
    Case("mask-window", 2, 1, mask="not-window", options={"window": (12, -1)}, slopes=True),
    Case("mask-documents", 4, 4, mask="documents", options=CAUSAL, round_robin=True),
    Case("mask-relative", 2, 2, mask="documents", relative="table", paged=True),
    Case("entries", 1, 1, entries=True, options={"window": (8, 0)}),
)


@functools.cache
def whole(case: Case) -> dict[str, Tensor]:
    """The tensors of one process, as bhnd."""
    draw = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(case.dtype)

    (heads, kv_heads), (width, value_width) = case.heads, case.widths
    found = {
        "query": normal(B, heads, case.queries, width),
        "key_cache": normal(B, kv_heads, N, width),
        "value_cache": normal(B, kv_heads, N, value_width),
    }
    if case.added:
        found["key"] = normal(B, kv_heads, case.added, width)
        found["value"] = normal(B, kv_heads, case.added, value_width)
    if isinstance(case.lengths, tuple):
        found["cache_seqlens"] = torch.tensor(case.lengths).clamp(max=N - case.added)
    if case.slopes:
        shape = (B, heads) if case.slopes == "each" else (heads,)
        found["alibi_slopes"] = torch.rand(shape, generator=draw)
    if case.relative:
        shape = (heads, 2 * N + 3) if case.relative == "table" else (8, heads)
        found["relative_bias"] = normal(*shape).to(torch.promote_types(case.dtype, torch.float32))
    if case.sinks:
        found["sinks"] = normal(heads).float()
        if case.sinks == "infinite":
            found["sinks"][:2] = torch.tensor([torch.inf, -torch.inf])
    if case.entries:
        found["cache_batch_idx"] = torch.tensor([2, 0, 1])
    return found


def positions_of(case: Case, ranks: int) -> Layout:
    """Which positions of the cache each rank holds."""
    if not case.round_robin:
        return Layout.contiguous(CAPACITIES[ranks])
    blocks = torch.arange(N).split(3)
    return Layout.of_positions([torch.cat(blocks[rank::ranks]) for rank in range(ranks)])


def arguments(case: Case, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The arguments of a call on all ranks."""
    given: dict[str, Any] = tensors | case.options | {"layout": case.layout, "return_lse": True}
    if case.lengths is None or isinstance(case.lengths, int):
        given["cache_seqlens"] = case.lengths
    if case.relative == "t5":
        given["relative_bias"] = bias.T5(given["relative_bias"], True, 16)
    if case.mask:
        given["mask"] = MASKS[case.mask]()
    if case.layout == "bnhd":
        for name in ("query", "key_cache", "value_cache", "key", "value"):
            if name in given:
                given[name] = given[name].transpose(1, 2)
    return given


def call(case: Case, rank: int, ranks: int) -> dict[str, Tensor]:
    """The results of one rank, and its caches afterwards."""
    tensors = {name: x.clone() for name, x in whole(case).items()}
    positions = positions_of(case, ranks)
    for name in ("key_cache", "value_cache"):
        # Rows beyond the sequences are not read.
        own = tensors[name][:, :, positions.positions(rank)]
        if isinstance(case.lengths, tuple) and not case.entries:
            beyond = positions.positions(rank) >= tensors["cache_seqlens"][:, None]
            own.masked_fill_(beyond[:, None, :, None], torch.nan)
        tensors[name] = own
    if case.paged:
        pages = CAPACITIES[ranks][rank] // PAGE
        order = torch.randperm(B * pages, generator=torch.Generator().manual_seed(rank))
        for name in ("key_cache", "value_cache"):
            paged = tensors[name].unflatten(2, (pages, PAGE)).transpose(1, 2).flatten(0, 1)
            tensors[name] = torch.empty_like(paged).index_copy(0, order, paged)
        tensors["block_table"] = order.view(B, pages)
    given = arguments(case, tensors)
    if case.round_robin:
        given["positions"] = positions
    out, lse = fastattn.distributed.decode_attention(**given)
    found = {"out": out, "lse": lse}
    if case.added and not case.paged and not case.entries:
        found |= {name: tensors[name] for name in ("key_cache", "value_cache")}
    return found


def definition(case: Case) -> dict[str, Tensor]:
    """One process, in float64, by operations of PyTorch."""
    tensors = {
        n: x.double() if x.is_floating_point() else x.clone() for n, x in whole(case).items()
    }
    _, (*call, options), new = decode.prepare(**arguments(case, tensors))
    if new is not None:
        tensors, append = new
        reference.append_to_cache(*tensors, options=append)
    out, lse = reference.decode_attention(*call, options=options)
    return {"out": out.transpose(1, 2) if case.layout == "bnhd" else out, "lse": lse}


def appended(case: Case) -> dict[str, Tensor]:
    """The caches afterwards, NaN beyond the sequences."""
    tensors = {n: x.clone() for n, x in whole(case).items()}
    fastattn.decode_attention(**arguments(case, tensors))
    found = {name: tensors[name] for name in ("key_cache", "value_cache")}
    if isinstance(case.lengths, tuple):
        beyond = torch.arange(N) >= tensors["cache_seqlens"][:, None] + case.added
        for x in found.values():
            x.masked_fill_(beyond[:, None, :, None], torch.nan)
    return found


def joined(case: Case, parts: Sequence[dict[str, Tensor]]) -> tuple[dict[str, Tensor], ...]:
    """The results, which are the same on all ranks, and the caches of all ranks."""
    results = {name: parts[0][name] for name in ("out", "lse")}
    for part in parts:
        assert all(torch.equal(part[name], x) for name, x in results.items()), "differs by rank"
    layout = positions_of(case, len(parts))
    caches = {}
    for name in parts[0].keys() - results.keys():
        every = torch.cat([part[name] for part in parts], 2)
        at = torch.cat([layout.positions(rank) for rank in range(len(parts))])
        caches[name] = torch.empty_like(every).index_copy(2, at, every)
    return results, caches


def run_cases() -> dict[str, dict[str, Tensor] | str]:
    return run_twice(call, CASES, ("out", "lse"))
