"""The plan of attention over a cache, see :mod:`fastattn.call`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import compat, dispatch
from fastattn.autograd.decode import decode
from fastattn.backends.primitives import AppendOptions, DecodeOptions
from fastattn.call import Plans, may_plan, only_viewed

__all__ = ["find", "keep"]

_plans = Plans()
_ROWS = 3  # query and both caches: their heads and columns are in the signature
_APPEND = AppendOptions()


def find(
    tensors: tuple[Any, ...],  # query, both caches, lengths, key, value, and the rest of Plan.run
    *options: Any,
) -> tuple[bytes | None, Plan | None]:
    """The signature and the plan of a call, None where it has none."""
    if not may_plan():
        return None, None
    kind = None
    if type(tensors[3]) is int:  # it changes from call to call: checked each time
        tensors, kind = (*tensors[:3], None, *tensors[4:]), "int"
    signature = _plans.sign(tensors, _ROWS, (dispatch.forced.get(), kind, *options))
    return signature, _plans.get(signature)


def keep(
    signature: bytes,
    tensors: tuple[Any, ...],
    call: tuple[Any, ...],
    append: tuple[Any, ...] | None,
    is_transposed: bool,
    returns_lse: bool,
) -> None:
    """Keep the plan of a call that the complete path prepared: tensors became ``call``."""
    _, _, _, _, table, entries, slopes, sinks, _, _, leftpad, _, _, options = call
    *_, block_table, cache_batch_idx, cache_leftpad, given_slopes, given_sinks = tensors
    indices = ((table, block_table), (entries, cache_batch_idx), (leftpad, cache_leftpad))
    if any(prepared is not tensor for prepared, tensor in indices):
        return  # converted from another dtype
    if not only_viewed((slopes, sinks), (given_slopes, given_sinks)):
        return
    if compat.any_requires_grad(*tensors):
        return
    chosen = {decode.choose(call)}
    if append is not None:
        if cache_batch_idx is not None:  # whether it names an entry twice is asked each time
            return
        chosen.add(dispatch.choose("append_to_cache", *append))
    if chosen == {"cpu"}:
        _plans.keep(signature, Plan(options, is_transposed, returns_lse))


class Plan:
    """How the calls of one signature run."""

    __slots__ = ("backend", "is_transposed", "options", "returns_lse")

    def __init__(self, options: DecodeOptions, is_transposed: bool, returns_lse: bool) -> None:
        self.backend: Any = dispatch.load("cpu")
        self.options, self.is_transposed, self.returns_lse = options, is_transposed, returns_lse

    def run(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        cache_seqlens: Tensor | int | None,
        key: Tensor | None,
        value: Tensor | None,
        block_table: Tensor | None,
        cache_batch_idx: Tensor | None,
        cache_leftpad: Tensor | None,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
    ) -> Any:
        """The results of the public function; None if a value is wrong, which it then names."""
        if self.is_transposed:
            query, key_cache, value_cache = (
                x.transpose(1, 2) for x in (query, key_cache, value_cache)
            )
        lengths = self._lengths(cache_seqlens, query, key_cache, block_table)
        slopes, rows = (
            x[None] if x is not None and x.dim() == 1 else x for x in (alibi_slopes, sinks)
        )
        where = (block_table, cache_batch_idx)
        try:
            if key is not None and value is not None:
                if _may_overlap(key_cache) or _may_overlap(value_cache):
                    return None
                if self.is_transposed:
                    key, value = key.transpose(1, 2), value.transpose(1, 2)
                new = (key_cache, value_cache, key, value, lengths, *where)
                self.backend.append_to_cache(
                    *new, *(None,) * 6, cache_leftpad=cache_leftpad, options=_APPEND
                )
                torch.autograd.graph.increment_version((key_cache, value_cache))
                lengths = lengths + key.shape[2]
            out, lse = self.backend.decode_attention(
                query,
                key_cache,
                value_cache,
                lengths,
                *where,
                slopes,
                rows,
                cache_leftpad=cache_leftpad,
                options=self.options,
            )
        except ValueError:
            return None
        out = out.transpose(1, 2) if self.is_transposed else out
        if not self.returns_lse:
            return out
        return out, lse if out.dtype is torch.float64 else lse.float()

    @staticmethod
    def _lengths(
        given: Tensor | int | None, query: Tensor, key_cache: Tensor, block_table: Tensor | None
    ) -> Tensor:
        if isinstance(given, Tensor):
            return given if given.dtype is torch.int64 else given.to(torch.int64)
        if given is None:
            given = key_cache.shape[2] * (1 if block_table is None else block_table.shape[1])
        # A length beyond int64 is none of the cache, either.
        given = min(max(given, -1), 2**62)
        return torch.full((query.shape[0],), given, dtype=torch.int64, device="cpu")


def _may_overlap(cache: Tensor) -> bool:
    return 0 in cache.stride()
