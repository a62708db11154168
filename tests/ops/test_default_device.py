"""Calls on tensors of the CPU while the default device is another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn

Run = Callable[[], Any]


def _leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    draw = torch.Generator("cpu").manual_seed(1)
    return [torch.randn(x, generator=draw, device="cpu").requires_grad_() for x in shapes]


def _cache(paged: bool, queries: int = 40, dtype: torch.dtype = torch.float32) -> Run:
    with torch.no_grad():
        query, keys = _leaves((2, 4, queries, 16), (6, 2, 16, 16) if paged else (2, 2, 48, 16))
    table = torch.arange(6, dtype=torch.int32, device="cpu").view(2, 3) if paged else None
    lengths = torch.tensor([41, 48], device="cpu")
    where: dict[str, Any] = {"cache_seqlens": lengths, "block_table": table, "is_causal": True}
    if dtype == torch.int8:
        scales = torch.rand(keys.shape[:3], generator=torch.Generator("cpu"), device="cpu") + 0.5
        keys = keys.detach().mul(20).to(dtype)
        where |= {"key_scales": scales, "value_scales": scales}
    query, keys = query.detach(), keys.detach()
    return lambda: fastattn.decode_attention(query, keys, keys, return_lse=True, **where)


def _varlen() -> Run:
    (rows,) = _leaves((12, 2, 8))
    ends = torch.tensor([0, 3, 12], device="cpu")
    return lambda: fastattn.varlen_attention(rows, rows, rows, ends, ends, is_causal=True)


def _attention(**options: Any) -> Run:
    query, key, value, mask = _leaves((1, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 6), (5, 7))
    if options.pop("masked", False):
        options["attn_mask"] = mask
    return lambda: fastattn.scaled_dot_product_attention(query, key, value, **options)


def _hops(batch: int, **options: Any) -> Run:
    query, memory = _leaves((batch, 4), (batch, 6, 4))
    return lambda: fastattn.memory_hop_attention(query, memory, memory, hops=2, **options)


def _additive(**options: Any) -> Run:
    query, key, value, v = _leaves((2, 3, 4), (2, 5, 4), (2, 5, 6), (4,))
    return lambda: fastattn.additive_attention(query, key, value, v, **options)


def _hopfield(steps: int | None) -> Run:
    state, stored = _leaves((2, 3, 8), (2, 9, 8))
    return lambda: fastattn.hopfield_retrieve(state, stored, update_steps_max=steps)


CALLS: dict[str, Callable[[], Run]] = {
    "sdpa": _attention,
    "sdpa-mask": lambda: _attention(masked=True),
    "sdpa-weights": lambda: _attention(need_weights=True),
    "sdpa-causal": lambda: _attention(is_causal=True),
    "varlen": _varlen,
    "cache": lambda: _cache(False),
    "cache-pages": lambda: _cache(True),
    "cache-int8": lambda: _cache(False, dtype=torch.int8),
    "cache-int8-pages": lambda: _cache(True, dtype=torch.int8),
    "cache-next-token": lambda: _cache(True, queries=1),
    "hops": lambda: _hops(2),
    "hops-shared": lambda: _hops(1),
    "hops-weights": lambda: _hops(2, need_weights=True),
    "additive": _additive,
    "additive-weights": lambda: _additive(need_weights=True),
    "hopfield": lambda: _hopfield(1),
    "hopfield-converged": lambda: _hopfield(None),
}


def _results(run: Run) -> list[Tensor]:
    found = run()
    outs = [x for x in (found if isinstance(found, tuple) else (found,)) if isinstance(x, Tensor)]
    first = outs[0]
    if first.requires_grad:
        first.square().sum().backward()
    return outs


@pytest.mark.parametrize("name", CALLS)
def test_results_are_where_the_tensors_are(name: str, choice: str) -> None:
    expected = _results(CALLS[name]())
    run = CALLS[name]()
    with torch.device("meta"):
        found = _results(run)
    for x, y in zip(found, expected, strict=True):
        assert x.device.type == "cpu"
        assert torch.equal(x, y)
