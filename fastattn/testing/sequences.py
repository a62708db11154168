"""Attention over packed sequences and over caches: the definition is attention for each sequence.

The proof is independent of packing, so it also judges the reference of packed sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastattn import masks
from fastattn.backends._sequences import places
from fastattn.backends.primitives import AttentionOptions
from fastattn.backends.reference._mask_program import visible_by_program
from fastattn.testing.calls import Operands, Results
from fastattn.testing.inputs import attention_operands

_Alone = tuple[slice, slice, Operands]  # the rows of queries and keys, and the call of attention


@dataclass(frozen=True)
class Sequences(Operands):
    """The arguments of a primitive, and the calls of attention for each sequence alone."""

    alone: tuple[_Alone, ...] = ()

    def with_each_alone(self) -> Sequences:
        of_cache = self.operator == "decode_attention"
        return replace(self, alone=tuple(_cached(self) if of_cache else _packed(self)))

    def definition(self) -> Results:
        return self.by_sequence(Operands.definition)

    def by_sequence(self, run: Callable[[Operands], Results]) -> Results:
        """Apply ``run`` to each sequence, and combine the results."""
        shape, in_cache = self.query.shape[:-1], self.operator == "decode_attention"
        value = self.value_cache if in_cache else self.value
        results: Results = {
            "out": torch.zeros(*shape, value.shape[-1], dtype=torch.float64),
            "lse": torch.full(shape if in_cache else shape[::-1], -torch.inf).double(),
        }
        if any(grad is not None for grad in self.grads.values()):
            for name in ("query", "key", "value", "sinks", "relative_bias"):
                if (x := self.tensors[name]) is not None:
                    results[f"grad_{name}"] = torch.zeros_like(x, dtype=torch.float64)
        for q, k, alone in self.alone:
            for name, result in run(alone).items():
                if name in ("grad_sinks", "grad_relative_bias"):
                    results[name] += result.double()
                elif in_cache:
                    results[name][q] = result.double()
                elif name == "lse":
                    results[name][:, q] = result[-1].double()
                else:
                    rows = k if name in ("grad_key", "grad_value") else q
                    results[name][rows] = result[-1].transpose(0, 1).double()
        return results


def _packed(inputs: Operands) -> Iterator[_Alone]:
    starts_q, starts_k = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()
    options = vars(inputs.options).copy()
    at_end = options.pop("bottom_right")
    visible: Any = None
    if inputs.mask_program is not None:
        of_keys = places(inputs.cu_seqlens_k, inputs.key.shape[0])[1]
        rows = inputs.query.shape[0], inputs.key.shape[0]
        visible = visible_by_program(inputs.mask_program, 1, *rows, packed_keys=of_keys)[0, 0]
    for b in range(len(starts_q) - 1):
        q, k = slice(*starts_q[b : b + 2]), slice(*starts_k[b : b + 2])
        n, m = q.stop - q.start, k.stop - k.start
        # The last of a batch, so that its dropout has the same batch index.
        batch = b + 1 if inputs.seed is not None else 1

        def last(x: Tensor | None, rows: slice, batch: int = batch) -> Any:
            if x is None:
                return None
            full = x.new_zeros(batch, x.shape[1], rows.stop - rows.start, x.shape[2])
            full[-1] = x[rows].transpose(0, 1)
            return full

        own = {"query": last(inputs.query, q), "key": last(inputs.key, k)}
        own |= {"value": last(inputs.value, k), "grad_out": last(inputs.grads["out"], q)}
        if (grad_lse := inputs.grads["lse"]) is not None:
            own["grad_lse"] = last(grad_lse.mT[..., None], q)[..., 0]
        offset = (m - n) * at_end
        if visible is not None:
            mask = masks.from_function(functools.partial(_seen, visible[q, k]), None, None, n, m)
            own["mask_program"] = masks.program("testing", mask, own["query"], m, offset)
        yield q, k, _call(inputs, b, AttentionOptions(offset=offset, **options), **own)


def _seen(pairs: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return pairs[q, k]


def _cached(inputs: Operands) -> Iterator[_Alone]:
    clean = inputs.cleaned()
    (batch, _, queries, _), page = clean.query.shape, clean.key_cache.shape[2]
    table, entries = clean.block_table, clean.cache_batch_idx
    if table is None:
        table = (torch.arange(batch) if entries is None else entries)[:, None]
    filled = torch.ones(batch, 1, queries, table.shape[1] * page, dtype=torch.bool)
    if clean.mask_program is not None:
        filled = visible_by_program(clean.mask_program, batch, queries, filled.shape[3])
    if clean.cache_leftpad is not None:
        padding = clean.cache_leftpad[:, None, None, None]
        filled = filled & (torch.arange(filled.shape[3]) >= padding)
    for b, n in enumerate(clean.cache_seqlens.tolist()):
        used = table[b, : -(-n // page)].long()
        key, value = (x[used].transpose(0, 1).flatten(1, 2)[None, :, :n]
                      for x in (clean.key_cache, clean.value_cache))  # fmt: skip
        own = {"query": clean.query[b : b + 1], "key": key, "value": value}
        if clean.mask_program is not None or clean.cache_leftpad is not None:
            own["attn_mask"] = filled[b : b + 1, ..., :n]
        options = AttentionOptions(offset=n - queries, **vars(inputs.options))
        yield slice(b, b + 1), slice(0, n), _call(clean, b, options, **own)


def _call(inputs: Operands, b: int, options: AttentionOptions, **own: Any) -> Operands:
    """The call of sequence b, with what all sequences share."""
    slopes = inputs.alibi_slopes
    own["alibi_slopes"] = None if slopes is None else slopes[b % slopes.shape[0]][None]
    names = ("seed", "sinks", "relative_bias")
    return attention_operands(options, **own, **{n: inputs.tensors.get(n) for n in names})
