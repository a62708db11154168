"""Attention over packed sequences: the specification."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fastattn import checks, compat, masks
from fastattn._derivative import Derivative
from fastattn._flops import flops_of_pairs, values, visible_pairs
from fastattn._seed import draw_seed
from fastattn.backends.primitives import VarlenOptions
from fastattn.bias import T5, Disentangled
from fastattn.call import Plan, Plans, with_arguments_of, with_seed
from fastattn.checks import default_scale
from fastattn.compat import runs_eagerly
from fastattn.library import Operator
from fastattn.ops._disentangled import fold_terms
from fastattn.ops._relative_bias import fold_distances, split_bias, traced_max

__all__ = ["varlen_attention"]

_OP = "varlen_attention"
plans = Plans(rows=3)
_NO_TERMS: Sequence[Tensor | None] = (None,) * 4
_LENGTH_TYPES = {int, type(None)}  # their values are checked in each call


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | T5 | Disentangled | None = None,
    mask: masks.Mask | None = None,
    causal_alignment: str = "upper_left",
    generator: torch.Generator | None = None,
    return_lse: bool = False,
) -> Any:
    r"""Attend within each of several sequences, packed one after the other without padding.

    Sequence b has the queries ``cu_seqlens_q[b]``, ..., ``cu_seqlens_q[b + 1] - 1`` and the keys
    ``cu_seqlens_k[b]``, ..., ``cu_seqlens_k[b + 1] - 1``, and its result is

    .. math:: out_b = scaled\_dot\_product\_attention(query_b, key_b, value_b)

    with the options below. On one backend it is bitwise equal to a call on this sequence alone,
    except for dropout, whose draws are those of entry b of a batch. No padding is stored or
    computed, and the work is split among threads by the lengths of the sequences.

    Args:
        query: [Tq, Hq, D], float32, bfloat16, float16 or float64, any strides; sizes may be 0.
        key: [Tk, Hkv, D], of query's dtype and device. Hkv must divide Hq: query head h uses head
            ``h // (Hq // Hkv)`` of key and value.
        value: [Tk, Hkv, Dv], of query's dtype and device.
        cu_seqlens_q: [B + 1], int32 or int64: 0, then where each sequence of queries ends. A
            sequence may be empty. Rows after the last sequence give 0, ``lse`` -inf, and have
            gradient 0.
        cu_seqlens_k: [B + 1], the same for keys and values.
        max_seqlen_q: if given, it must not be less than the longest sequence. Only compiled code
            needs it, and only with a record of ``bias``: its map of distances is made for
            sequences of this length, else for one of all rows.
        max_seqlen_k: likewise.
        dropout_p, is_causal, scale, window, softcap, generator: as in
            :func:`scaled_dot_product_attention`; positions count within a sequence.
        alibi_slopes: floating, [Hq] or [B, Hq]. Differentiable, but only by the reference.
        sinks: [Hq], as in :func:`scaled_dot_product_attention`, for every sequence.
        relative_bias: a table of distances [Hq, 2 L - 1], where L is at least the length of the
            longest sequence, :class:`fastattn.bias.T5` or :class:`fastattn.bias.Disentangled`,
            as in :func:`scaled_dot_product_attention`, for every sequence. Differentiable.
        mask: None, or a mask of :mod:`fastattn.masks`, for every sequence: ``causal``,
            ``sliding_window``, ``chunked`` and ``prefix_lm`` count positions within a sequence,
            with one prefix for all or lengths [B]. ``document`` takes the numbers of all rows,
            [Tq], and [Tk] for keys of their own. Masks combine as usual; ``from_function`` and
            ``BlockMask`` are for equal lengths only.
        causal_alignment: how ``is_causal``, ``window``, ``alibi_slopes``, ``relative_bias`` and
            masks of positions align queries and keys in a sequence with more, or fewer, keys than
            queries. "upper_left": query 0 is at key 0. "bottom_right": the last query is at the
            last key.
        return_lse: also return the logarithm of the sum of exponentials.

    Returns:
        ``out`` [Tq, Hq, Dv], in query's dtype and memory order; with ``return_lse`` a tuple of it
        and ``lse`` [Hq, Tq] in float32 (float64 for float64). Both are differentiable in query,
        key, value, sinks and relative bias, any number of times; derivatives beyond the first, and
        forward mode, go through the reference backend, which stores a matrix [Hq, Tq, Tk].

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes that do not match, or ``cu_seqlens`` that do not start with 0, decrease,
            or end beyond the last row. (Their values are checked on the CPU only.)
        RuntimeError: dtypes or devices that do not match, ``dropout_p`` outside [0, 1], a
            ``relative_bias`` or a ``mask`` that does not fit the sequences, or a forced backend
            that cannot run the call.
        NotImplementedError: a complex or an 8-bit dtype.

    Example:
        >>> import torch
        >>> from fastattn import varlen_attention
        >>> query, key, value = torch.ones(3, 12, 2, 64)  # 12 rows: 3, 9 and 0 of three sequences
        >>> ends = torch.tensor([0, 3, 12, 12])
        >>> varlen_attention(query, key, value, ends, ends, is_causal=True).shape
        torch.Size([12, 2, 64])
    """
    tables, kind = ((), ()) if relative_bias is None else split_bias(relative_bias)
    tensors = (query, key, value, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks)
    longest = (max_seqlen_q, max_seqlen_k)
    options = (dropout_p, is_causal, scale, window, softcap, causal_alignment, return_lse)
    signature = plan = None
    if generator is None and {type(max_seqlen_q), type(max_seqlen_k)} <= _LENGTH_TYPES:
        signature, plan = plans.find((*tensors, *tables), *kind, mask is None, *options)
    if plan is not None:
        try:
            return _run_plan(plan, tensors, (relative_bias, mask), longest, return_lse)
        except ValueError:  # the complete path, see fastattn.call, raises a better message
            pass
    operator, call = prepare(
        *(query, key, value, cu_seqlens_q, cu_seqlens_k, *longest, dropout_p, is_causal, scale),
        *(window, softcap, alibi_slopes, sinks, relative_bias, mask),
        *(causal_alignment, generator, return_lse),
    )
    call = with_seed(operator, call, generator)
    # The query may have content_bias added.
    originals = (None, key, value, None, None, alibi_slopes, None, sinks)
    plan = plans.keep(signature, operator, call, originals, (*tensors, *tables))
    out, lse = operator(*call) if plan is None else plan.all(call[:-1], call[-1])
    if not return_lse:
        return out
    return out, lse if out.dtype is torch.float64 else lse.float()


def _run_plan(
    plan: Plan,
    tensors: tuple[Any, ...],  # in the order in which varlen_attention signs them
    biases: tuple[Any, Any],  # relative_bias and mask
    longest: tuple[int | None, int | None],
    return_lse: bool,
) -> Any:
    """Run a call by its plan; return what :func:`varlen_attention` returns."""
    query, key, value, *starts, slopes, sinks = tensors
    if longest != (None, None):
        for side, ends, limit in zip("qk", starts, longest, strict=True):
            if limit is not None:
                checks.check_int64(f"{_OP}: max_seqlen_{side}", limit)
            _check_lengths(side, ends.tolist(), limit, None)
    if any(x is not None for x in biases):
        starts = [x.to(torch.int64) for x in starts]
    seed = draw_seed(query.device) if plan.options.dropout_p else None
    head_tensors, bottom_right = (slopes, seed, sinks), plan.options.bottom_right
    tensors = _fold_operands(query, key, value, starts, head_tensors, biases, longest, bottom_right)
    if not return_lse:
        return plan.first(tensors)
    out, lse = plan.all(tensors)
    return out, lse if out.dtype is torch.float64 else lse.float()


def _fold_operands(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Sequence[Tensor],
    head_tensors: tuple[Tensor | None, ...],  # slopes, seed and sinks
    biases: tuple[Any, Any],  # relative_bias and mask
    longest: tuple[int | None, int | None],
    bottom_right: bool,
) -> tuple[Any, ...]:
    """Return the tensors of the operator, with the biases as its operands."""
    relative_bias, mask = biases
    table = program = None
    terms: Sequence[Tensor | None] = _NO_TERMS
    if relative_bias is not None:
        query, table, terms = _fold_bias(relative_bias, query, key, starts, longest)
    if mask is not None:
        program = masks.packed_program(_OP, mask, query, key, (starts[0], starts[1]), bottom_right)
    return query, key, value, *starts, *head_tensors, table, program, *terms


def _validate(args: Any) -> tuple[Operator, tuple[Any, ...]]:
    """Validate the named arguments; return the operator and its arguments, without a seed."""
    query, key, value, generator = args.query, args.key, args.value, args.generator
    if not isinstance(query, Tensor):
        raise checks.wrong_type(_OP, "query", query, "Tensor")
    tensors = (("query", query, "Hq, D"), ("key", key, "Hkv, D"), ("value", value, "Hkv, Dv"))
    for name, x, dims in tensors:
        checks.check_tensor(_OP, name, x, f"[T, {dims}]", 3, query.device)
    checks.check_flag(_OP, "is_causal", args.is_causal)
    checks.check_flag(_OP, "return_lse", args.return_lse)
    dropout_p = checks.check_dropout(_OP, args.dropout_p)
    score_arguments = (args.scale, args.softcap, args.window, args.is_causal)
    scores = checks.score_options(_OP, query, *score_arguments)
    if generator is not None:
        checks.check_generator(_OP, generator, query.device)
    bottom_right = args.causal_alignment == "bottom_right"
    if not bottom_right and args.causal_alignment != "upper_left":
        raise ValueError(
            f"{_OP}: causal_alignment must be 'upper_left' or 'bottom_right', "
            f"got {args.causal_alignment!r}"
        )

    query, key, value = checks.autocast(query, key, value)
    checks.check_dtypes(_OP, query, key, value)
    checks.check_widths(_OP, query, key)
    checks.check_heads(_OP, query, key, value, dim=1)
    if key.shape[0] != value.shape[0]:
        raise ValueError(
            f"{_OP}: key and value must have the same number of rows, "
            f"got shapes {tuple(key.shape)} and {tuple(value.shape)}"
        )
    longest, device = (args.max_seqlen_q, args.max_seqlen_k), query.device
    q_starts = check_starts("q", args.cu_seqlens_q, device, longest[0], query.shape[0])
    k_starts = check_starts("k", args.cu_seqlens_k, device, longest[1], key.shape[0])
    if q_starts.shape != k_starts.shape:
        raise ValueError(
            f"{_OP}: cu_seqlens_q and cu_seqlens_k must have the same length, "
            f"got {q_starts.shape[0]} and {k_starts.shape[0]}"
        )
    slopes, sinks = args.alibi_slopes, args.sinks
    if slopes is not None:
        slopes = checks.fold_slopes(_OP, slopes, query, query.shape[1], q_starts.shape[0] - 1)
    if sinks is not None:
        sinks = checks.check_sinks(_OP, sinks, query, query.shape[1])
    starts, head_tensors = (q_starts, k_starts), (slopes, None, sinks)
    biases = (args.relative_bias, args.mask)
    tensors = _fold_operands(query, key, value, starts, head_tensors, biases, longest, bottom_right)
    options = VarlenOptions(**scores, bottom_right=bottom_right, dropout_p=dropout_p)
    return packed_attention, (*tensors, options)


prepare = with_arguments_of(varlen_attention, _validate)


def _fold_bias(
    bias: Any,
    query: Tensor,
    key: Tensor,
    starts: Sequence[Tensor],
    longest: tuple[int | None, int | None],
) -> tuple[Tensor, Tensor | None, Sequence[Tensor | None]]:
    """Return the query, with a content bias added, and the table and terms of the bias.

    The table of distances, [1, Hq, 2 M + 1], and the terms are for the longest sequence.
    """
    lengths_text: tuple[str] | None = None
    if all(x.is_cpu and runs_eagerly(x) for x in starts):
        rows = max(int(x.diff().max()) if x.shape[0] > 1 else 0 for x in starts)
        lengths_text = (f"a sequence of {rows} rows",)
        farthest = max(rows - 1, 0)
    else:
        totals = (query.shape[0], key.shape[0])
        bounds = [n if limit is None else limit for n, limit in zip(totals, longest, strict=True)]
        if not compat.records_trace():  # which would keep the number of rows of its own call
            bounds = [min(n, bound) for n, bound in zip(totals, bounds, strict=True)]
        farthest = traced_max(*bounds, 1) - 1
    if type(bias) is Disentangled:
        query, terms = fold_terms(_OP, bias, query, key, farthest)
        return query, None, terms[:4]
    return query, fold_distances(_OP, bias, query, farthest, lengths_text), _NO_TERMS


def check_starts(
    side: str, starts: Any, device: torch.device, longest: Any, rows: int | None = None
) -> Tensor:
    """Check ``cu_seqlens_q`` or ``_k``, and return it as int64; ``rows`` is None for paged keys."""
    name = f"cu_seqlens_{side}"
    starts = checks.check_integers(_OP, name, starts, "[B + 1]", 1, device)
    if starts.shape[0] == 0:
        raise ValueError(f"{_OP}: {name} must be [B + 1], got shape (0,)")
    if longest is not None and (
        isinstance(longest, bool) or not isinstance(longest, (int, torch.SymInt))
    ):
        raise checks.wrong_type(_OP, f"max_seqlen_{side}", longest, "int or None")
    if longest is not None:
        checks.check_int64(f"{_OP}: max_seqlen_{side}", longest)
    if starts.is_cpu and runs_eagerly(starts):
        _check_lengths(side, starts.tolist(), longest, rows)
    return starts


def _check_lengths(side: str, starts: list[int], longest: Any, rows: int | None) -> None:
    name = f"cu_seqlens_{side}"
    if starts[0] != 0:
        raise ValueError(f"{_OP}: {name} must begin with 0, got {starts[0]}")
    lengths = [end - begin for begin, end in pairwise(starts)]
    if min(lengths, default=0) < 0:
        raise ValueError(f"{_OP}: {name} must not decrease, got {starts}")
    if rows is not None and starts[-1] > rows:
        raise ValueError(f"{_OP}: {name} must not end beyond the {rows} rows, got {starts[-1]}")
    length = max(lengths, default=0)
    if longest is not None and length > longest:
        raise ValueError(
            f"{_OP}: max_seqlen_{side} must be at least the longest sequence, {length}, "
            f"got {longest}"
        )


# --- the operator -----------------------------------------------------------------------------


def _count_pairs(query: Tensor, key: Tensor, cu_q: Tensor, cu_k: Tensor, *rest: Any) -> int:
    """Count the visible pairs by the lengths; unknown lengths count as equal."""
    count = cu_q.shape[0] - 1
    starts, ends = values(cu_q), values(cu_k)
    if starts is None or ends is None:
        lengths = [(query.shape[0] // max(count, 1), key.shape[0] // max(count, 1))] * count
    else:
        lengths = [(starts[b + 1] - starts[b], ends[b + 1] - ends[b]) for b in range(count)]
    *_, options = rest
    window = options.window_left, options.window_right
    offsets = ((q, k, k - q if options.bottom_right else 0) for q, k in lengths)
    return query.shape[1] * sum(visible_pairs(*sizes, *window) for sizes in offsets)


class _Backward(Operator):
    def lifted(self, tensors: Sequence[Any]) -> list[Any]:
        """Convert the lengths of a plan to int64, because a plan also takes int32."""
        lifted = super().lifted(tensors)
        for n in (self.place_of("cu_seqlens_q"), self.place_of("cu_seqlens_k")):
            lifted[n] = lifted[n].to(torch.int64)
        return lifted


packed_attention: Operator = Operator(
    "varlen_attention",
    "query: Tq Hq D; key: Tk Hkv D; value: Tk Hkv Dv; cu_seqlens_q: S; cu_seqlens_k: S; "
    "alibi_slopes?: S-1|1 Hq; seed?; sinks?: 1 Hq; relative_bias?: 1 Hq *; mask_program?; "
    "position_query?: Tq Hq D; query_table?: 1 Hq N D; key_table?: 1 Hq N D; "
    "distance_buckets?: *; Hq % Hkv",
    "out: Tq Hq Dv; lse: Hq Tq",
    options=VarlenOptions,
    out_like="query",
    derivative=Derivative(
        grads="out lse",
        reads="query key value cu_seqlens_q cu_seqlens_k alibi_slopes seed out lse "
        "sinks relative_bias mask_program position_query query_table key_table distance_buckets",
        gives="query key value sinks relative_bias position_query query_table key_table",
        in_order="query key value position_query",
        options=VarlenOptions,
        operator=_Backward,
    ),
    folds=False,  # draws are indexed by each example's own sequences
    flops=flops_of_pairs(_count_pairs, operator=lambda: packed_attention),
    opaque=("alibi_slopes",),
    checked_by=("cpu",),
    derived={"scale": lambda query, *_: default_scale(query.shape[-1])},
)
