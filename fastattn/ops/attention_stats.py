"""Streaming statistics of attention weights: the specification."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn import checks
from fastattn.backends._precision import without_autocast
from fastattn.call import with_arguments_of
from fastattn.library import Operator
from fastattn.ops import sdpa

_OP = "attention_stats"
# The number of queries whose weights are in memory at once. It is a constant, so the order of the
# sums over queries does not depend on the batch.
_BLOCK = 64
# The number of weights whose logarithms are in memory at once. A larger result would be new memory
# in each call, whose page faults cost more than the logarithms.
_MAX_LOGARITHMS = 1 << 20


class AttentionStats(NamedTuple):
    """The result of :func:`attention_stats`; fields that were not requested are None."""

    lse: Tensor
    column_sums: Tensor | None
    entropy: Tensor | None
    top_values: Tensor | None
    top_indices: Tensor | None
    rows: Tensor | None


def attention_stats(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    column_sums: bool = True,
    entropy: bool = True,
    top_k: int = 0,
    rows: Sequence[int] = (),
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    causal_alignment: str = "upper_left",
) -> AttentionStats:
    r"""Compute statistics of the attention weights without storing the full matrix.

    With w the weights of :func:`scaled_dot_product_attention` without dropout,

    .. math::
        column\_sums_j = \sum_i w_{ij} \qquad entropy_i = -\sum_j w_{ij} \log w_{ij}

    ``column_sums`` is the total attention that each key receives; it can be used to evict keys from
    a cache (https://arxiv.org/abs/2306.14048). ``entropy`` measures how widely a query spreads its
    attention, in nats. Only the weights of 64 queries are in memory at a time.

    Args:
        query, key: as in :func:`scaled_dot_product_attention`, but 4-D only: [B, Hq, Lq, D] and
            [B, Hkv, Lk, D]. 16-bit inputs are computed in float32.
        attn_mask, is_causal, scale, enable_gqa, window, softcap, alibi_slopes, causal_alignment:
            as in :func:`scaled_dot_product_attention`.
        column_sums, entropy: whether to compute them.
        top_k: how many of the largest weights of every query to return; at most Lk.
        rows: queries whose full rows of weights to return; negative indices count from the end.

    Returns:
        A named tuple, in float32 (float64 for float64): ``lse`` [B, Hq, Lq], ``column_sums``
        [B, Hq, Lk], ``entropy`` [B, Hq, Lq], ``top_values`` and ``top_indices`` (int64)
        [B, Hq, Lq, top_k], the largest first, and ``rows`` [B, Hq, len(rows), Lk]. A fully masked
        row has weights and entropy 0 and lse -inf. All but the indices are differentiable. A
        gradient of the entropy or of the largest weights keeps the weights of all blocks in memory;
        a gradient of the entropy also keeps two tensors of their size.

    Raises:
        TypeError, RuntimeError, ValueError: as :func:`scaled_dot_product_attention`, and for
            ``top_k`` larger than Lk or ``rows`` outside Lq.

    Example:
        >>> import torch
        >>> from fastattn import attention_stats
        >>> x = torch.ones(1, 1, 4, 8)
        >>> stats = attention_stats(x, x, is_causal=True, rows=[-1])
        >>> stats.column_sums[0, 0], stats.rows[0, 0, 0]
        (tensor([2.0833, 1.0833, 0.5833, 0.2500]), tensor([0.2500, 0.2500, 0.2500, 0.2500]))
    """
    operator, args = prepare(
        *(query, key, attn_mask, is_causal, scale, enable_gqa, column_sums, entropy, top_k, rows),
        *(window, softcap, alibi_slopes, causal_alignment),
    )
    batch, heads, q_len, _ = args[0].shape
    row_indices = [n % q_len for n in rows]
    results: dict[str, Tensor] = {}

    def write_block(name: str, begin: int, block: Tensor) -> None:
        """Write the result of a block of queries into the whole result, [B, Hq, Lq, ...]."""
        # No list to concatenate: live parts would fragment the memory that blocks free.
        if name not in results:
            results[name] = block.new_empty((batch, heads, q_len, *block.shape[3:]))
        results[name][:, :, begin : begin + block.shape[2]] = block

    column_totals, row_weights = None, {}
    for begin, lse, w in _run_blocks(operator, args):
        write_block("lse", begin, lse.to(w.dtype))
        if column_sums:
            column_totals = w.sum(2) if column_totals is None else column_totals + w.sum(2)
        if entropy:
            write_block("entropy", begin, _entropy(w))
        if top_k:
            largest = w.topk(top_k, dim=-1)
            write_block("top_values", begin, largest.values)
            write_block("top_indices", begin, largest.indices)
        for n in row_indices:
            if begin <= n < begin + w.shape[2]:
                row_weights[n] = w[:, :, n - begin].clone()  # no view, which keeps the whole block
    return AttentionStats(
        results["lse"],
        column_totals if column_sums else None,
        results.get("entropy"),
        results.get("top_values"),
        results.get("top_indices"),
        torch.stack([row_weights[n] for n in row_indices], 2) if row_indices else None,
    )


def _entropy(weights: Tensor) -> Tensor:
    """Return -Σ w log w over the keys, with 0 log 0 = 0; weights are [B, Hq, n, Lk].

    `torch.special.entr` takes the logarithms on the CPU one by one; `log` takes whole vectors.
    """
    smallest = torch.finfo(weights.dtype).tiny
    heads = max(1, _MAX_LOGARITHMS // max(1, weights[:, :1].numel()))
    parts = (0 - (w.clamp_min(smallest).log() * w).sum(-1) for w in weights.split(heads, 1))
    return torch.cat(tuple(parts), 1)


_SHARED_OPTIONS = "is_causal scale enable_gqa window softcap alibi_slopes causal_alignment".split()


def _validate(args: Any) -> tuple[Operator, tuple[Any, ...]]:
    """Validate the named arguments; return attention's operator and its arguments, for weights."""
    query, key, attn_mask, top_k, rows = args.query, args.key, args.attn_mask, args.top_k, args.rows
    options = {name: getattr(args, name) for name in _SHARED_OPTIONS}
    for name, x in (("query", query), ("key", key)):
        if isinstance(x, Tensor) and (x.is_nested or x.layout is not torch.strided):
            raise checks.not_dense(_OP, name, x)
        if isinstance(x, Tensor) and x.dim() != 4:
            raise ValueError(f"{_OP}: {name} must be [B, H, L, D], got shape {tuple(x.shape)}")
        if isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16):
            query, key = (query.float(), key) if name == "query" else (query, key.float())
    checks.check_bool(f"{_OP}: column_sums", args.column_sums)
    checks.check_bool(f"{_OP}: entropy", args.entropy)
    checks.check_int(f"{_OP}: top_k", top_k)
    if not isinstance(rows, Sequence) or any(
        not isinstance(n, int) or isinstance(n, bool) for n in rows
    ):
        raise TypeError(f"{_OP}: rows must be a sequence of ints, got {rows!r}")
    if isinstance(attn_mask, Tensor) and attn_mask.dtype in (torch.float16, torch.bfloat16):
        attn_mask = attn_mask.float()
    # One column of the keys serves as the value: the weights are the same, at the lowest cost.
    value = key[..., :1] if isinstance(key, Tensor) else key
    # The weights are exact, even where autocast would round query and key.
    device_type = query.device.type if isinstance(query, Tensor) else "cpu"
    with without_autocast(device_type):
        operator, call, _ = sdpa.prepare(query, key, value, attn_mask, need_weights=True, **options)
    q_len, k_len = call[0].shape[2], call[1].shape[2]
    if not 0 <= top_k <= k_len:
        raise ValueError(f"{_OP}: top_k must be between 0 and the {k_len} keys, got {top_k}")
    for n in rows:
        if not -q_len <= n < q_len:
            raise ValueError(f"{_OP}: rows must name some of the {q_len} queries, got {n}")
    return operator, call


prepare = with_arguments_of(attention_stats, _validate)


def _run_blocks(operator: Operator, args: tuple[Any, ...]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (first query, lse [B, Hq, n], weights [B, Hq, n, Lk]) for each block of n queries."""
    query, key, value, mask, *others, options = args
    if options.offset is None:  # a trace computes it from the number of queries, here of a block
        raise RuntimeError(
            f"{_OP}: torch.jit.trace would keep the lengths of this call with "
            "causal_alignment='bottom_right': use torch.export or torch.compile"
        )
    for begin in range(0, max(query.shape[2], 1), _BLOCK):  # without queries, one empty block
        end = min(begin + _BLOCK, query.shape[2])
        block_mask = mask[:, :, begin:end] if mask is not None and mask.shape[2] != 1 else mask
        block_options = replace(options, offset=options.offset + begin)
        queries = query[:, :, begin:end]
        _, lse, weights = operator(queries, key, value, block_mask, *others, block_options)
        yield begin, lse, weights
