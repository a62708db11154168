"""Attention of new tokens over a key/value cache: the specification."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import checks, compat, dispatch, masks
from fastattn._flops import flops_of_pairs, values, visible_pairs
from fastattn.backends.primitives import QUANTISED, AppendOptions, DecodeOptions
from fastattn.bias import T5
from fastattn.call import Plan, Plans, with_arguments_of
from fastattn.checks import default_scale
from fastattn.compat import runs_eagerly
from fastattn.library import Operator
from fastattn.ops._append import append, check_new_rows, check_rotary, check_strides, copy_overlaps
from fastattn.ops._quantised import check_rotation, check_scales
from fastattn.ops._relative_bias import fold_distances, split_bias, traced_max

_OP = "decode_attention"
plans = Plans(rows=3)
_NOT_ROTATED = AppendOptions()
_LAYOUTS = {"bhnd": "[B, H, N, D]", "bnhd": "[B, N, H, D]"}


def decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_seqlens: Tensor | int | None = None,
    *,
    key: Tensor | None = None,
    value: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | T5 | None = None,
    mask: masks.Mask | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    rotary_positions: Tensor | None = None,
    layout: str = "bhnd",
    return_lse: bool = False,
) -> Any:
    r"""Attend from the newest tokens of each sequence to its cache of keys and values.

    .. math:: out_b = scaled\_dot\_product\_attention(query_b, K_b, V_b)

    K_b and V_b are the first ``cache_seqlens[b]`` rows of the cache of sequence b, without the
    first ``cache_leftpad[b]``, followed by the rows of ``key`` and ``value``, if given, which are
    first written there in place. ``is_causal``,
    ``window``, ``alibi_slopes``, ``relative_bias`` and masks of positions align the last query with
    the last key. With ``rotary_cos`` and ``rotary_sin``, the new keys are rotated before they are
    written, and the queries (of the last Lq new tokens) before they attend
    (https://arxiv.org/abs/2104.09864): at position n the columns (a, b) of pair r become

    .. math:: (a \cos_{n r} - b \sin_{n r}, \; a \sin_{n r} + b \cos_{n r})

    The bits of a row depend
    only on its own sequence, not on the batch, the number of threads, or the order of the pages.

    Inference only: the operator has no gradient.

    The shapes below are for ``layout="bhnd"``; with "bnhd", dimensions 1 and 2 of all operands
    and of the result are swapped. No layout needs a copy.

    Args:
        query: [B, Hq, Lq, D], float32, bfloat16, float16 or float64, any strides.
        key_cache: [E, Hkv, N, D], of query's dtype, or int8 or float8_e4m3fn with ``key_scales``,
            and its device. An entry is a sequence of at most N keys, or, with ``block_table``, a
            page of N keys, any N. Hkv must divide Hq: a key head is read once for all its query
            heads.
        value_cache: [E, Hkv, N, Dv], of the same dtype and device.
        cache_seqlens: [B], int32 or int64, or one number for all sequences: how many keys of each
            sequence are in the cache before the call. None: the cache is full.
        key, value: [B, Hkv, L, D] and [B, Hkv, L, Dv], rows to append. Both or neither; they need
            ``cache_seqlens``, which itself is not changed.
        key_scales, value_scales: [E, Hkv, N], float32, the scale of each row of quantised caches:
            the value of a row is its elements times its scale. Appended rows are quantised, after
            their rotation, with the scale max(abs(x)) / 127 (for float8_e4m3fn: / 448), which is
            written here. Both or neither. If the values are the first columns of the keys
            (``value_cache`` and ``value`` are views), pass the same tensor for both.
        block_table: [B, P], int32 or int64: the pages of each sequence, in order. Entries beyond
            its length are never read.
        cache_batch_idx: [B], int32 or int64: the entry of each sequence; None means entry b. Not
            together with ``block_table``.
        cache_leftpad: [B], int32 or int64, from 0 to ``cache_seqlens``: how many rows before the
            first key of each sequence are padding. They count in ``cache_seqlens`` and in all
            positions; no query sees them.
        is_causal: a query cannot see the keys after its own position.
        scale, window, softcap: as in :func:`scaled_dot_product_attention`.
        alibi_slopes: floating, [Hq] or [B, Hq].
        sinks: [Hq], as in :func:`scaled_dot_product_attention`.
        relative_bias: a table of distances [Hq, 2 L - 1], where L is at least the number of keys of
            the longest sequence, the new ones included, or :class:`fastattn.bias.T5`, which is made
            a table in each call; as in :func:`scaled_dot_product_attention`.
        mask: None, or a mask of :mod:`fastattn.masks` of positions in the sequences: ``causal``,
            ``sliding_window``, ``chunked``, ``prefix_lm`` with one prefix or lengths [B], and
            ``document`` with the ids of all positions of the cache, [N] or [B, N] (for a row of the
            block table: [P N]), or with separate ids of the queries, [Lq] or [B, Lq], and the keys.
            ``draft_tree`` says which of the Lq new tokens see each other. Masks combine as usual;
            ``from_function`` and ``BlockMask`` are for equal lengths only.
        rotary_cos, rotary_sin: [M, R / 2], cosines and sines of the angles of each position and
            pair, of query's dtype or float32. R is even and at most D; later columns are not
            rotated. Both or neither; they need ``key`` and ``value``, and Lq at most L.
        rotary_interleaved: a pair is columns 2 r and 2 r + 1; else columns r and r + R / 2.
        rotary_positions: [L] or [B, L], int32 or int64, the rows of the tables for the new tokens;
            None: ``cache_seqlens[b] + i``. In a draft tree, for example, siblings share one.
        layout: "bhnd" or "bnhd".
        return_lse: also return the logarithm of the sum of exponentials.

    Returns:
        ``out`` [B, Hq, Lq, Dv]; with ``return_lse`` a tuple of it and ``lse`` [B, Hq, Lq] in
        float32 (float64 for float64). A fully masked row has out 0 and lse -inf (with ``sinks``:
        the sink).

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes that do not match, lengths beyond the cache, pages, entries or rows of
            the tables that do not exist, scales that are not positive and finite, rows to quantise
            that are not finite. Nothing is written then. (Values are checked on the CPU
            only.)
        RuntimeError: dtypes or devices that do not match, a tensor that requires a gradient while
            gradients are enabled, a ``relative_bias`` or a ``mask`` that does not fit the cache, or
            a forced backend that cannot run the call.

    Example:
        >>> import torch
        >>> from fastattn import decode_attention
        >>> keys, values = torch.zeros(2, 4, 8, 100, 64)  # caches of 4 sequences, 8 heads
        >>> query, key, value = torch.ones(3, 4, 8, 1, 64)
        >>> lengths = torch.tensor([3, 50, 0, 99])
        >>> decode_attention(query, keys, values, lengths, key=key, value=value).shape
        torch.Size([4, 8, 1, 64])
        >>> keys[0, 0, 2:5, 0]
        tensor([0., 1., 0.])
    """
    tables, bias_kind = ((), ()) if relative_bias is None else split_bias(relative_bias)
    tensors = (
        *(query, key_cache, value_cache, cache_seqlens, key, value),
        *(block_table, cache_batch_idx, cache_leftpad, alibi_slopes, sinks),
        *(key_scales, value_scales, rotary_cos, rotary_sin, rotary_positions),
    )
    length_kind, signed_tensors = None, (*tensors, *tables)
    if type(cache_seqlens) is int:  # its value changes from call to call, so it is not signed
        length_kind, signed_tensors = "int", (*signed_tensors[:3], None, *signed_tensors[4:])
    options = (is_causal, scale, window, softcap, rotary_interleaved, layout, return_lse)
    signature, plan = plans.find(signed_tensors, length_kind, mask is None, *options, *bias_kind)
    plan_arguments = (relative_bias, mask, rotary_interleaved, layout, return_lse)
    if plan is not None:
        try:
            return _run_plan(plan, tensors, *plan_arguments)
        except ValueError:  # the complete path, see fastattn.call, raises a better message
            pass
    operator, arguments, append_call = prepare(
        *(query, key_cache, value_cache, cache_seqlens, key, value, key_scales, value_scales),
        *(block_table, cache_batch_idx, cache_leftpad, is_causal, scale, window, softcap),
        *(alibi_slopes, sinks, relative_bias, mask, rotary_cos, rotary_sin, rotary_interleaved),
        *(rotary_positions, layout, return_lse),
    )
    if signature is not None:
        plan = _keep_plan(signature, (*tensors, *tables), arguments, append_call)
    if append_call is not None:
        if compat.exports_onnx():
            raise compat.not_in_onnx(_OP, "it writes to its cache")
        if not torch.compiler.is_compiling() and dispatch.forced.get():
            operator.choose(arguments)  # raises before anything is written
        rotated = append(*append_call)
        arguments = arguments if rotated is None else (rotated, *arguments[1:])
    results = operator(*arguments) if plan is None else plan.all(arguments[:-1], arguments[-1])
    return _public_results(results, layout, return_lse)


def _keep_plan(
    signature: bytes,
    tensors: tuple[Any, ...],  # of the public call
    call: tuple[Any, ...],  # the operator's arguments
    append_call: tuple[Any, ...] | None,  # the arguments of append(), or None
) -> Plan | None:
    """Keep and return the plan of a call, for later calls with its signature, or return None."""
    query, key_cache, value_cache, _, _, _, block_table, *others = tensors
    entries, leftpad, slopes, sinks, key_scales, value_scales, *_ = others
    if compat.any_requires_grad(*tensors):
        return None
    if append_call is not None:
        if entries is not None:  # each call must check that it names no entry twice
            return None
        if dispatch.choose("append_to_cache", *append_call) != "cpu":
            return None
    # None is for a tensor that _run_plan makes for each call.
    biases = (slopes, sinks, None, None, leftpad, key_scales, value_scales)
    originals = (query, key_cache, value_cache, None, block_table, entries, *biases)
    return plans.keep(signature, decode, call, originals)


def _run_plan(
    plan: Plan,
    tensors: tuple[Any, ...],  # in the order in which decode_attention signs them
    relative_bias: Tensor | T5 | None,
    mask: masks.Mask | None,
    rotary_interleaved: bool,
    layout: str,
    return_lse: bool,
) -> Any:
    """Run a call by its plan; return what :func:`decode_attention` returns."""
    query, key_cache, value_cache, cache_seqlens, key, value, block_table, *others = tensors
    entries, leftpad, slopes, sinks, key_scales, value_scales, *rotary_tables = others
    rotary_cos, rotary_sin, positions = rotary_tables
    bias_table = mask_program = None
    scales = (key_scales, value_scales)
    if key_scales is not None:
        caches = (key_cache, value_cache, layout, key, value)
        scales = check_scales(key_scales, value_scales, *caches)
    if layout == "bnhd":
        query, key_cache, value_cache = (x.transpose(1, 2) for x in (query, key_cache, value_cache))
        if key is not None and value is not None:
            key, value = key.transpose(1, 2), value.transpose(1, 2)
    capacity = key_cache.shape[2] * (1 if block_table is None else block_table.shape[1])
    if isinstance(cache_seqlens, Tensor):
        lengths = cache_seqlens.to(torch.int64)
    else:
        length = capacity if cache_seqlens is None else cache_seqlens
        # Clamped, because a length beyond int64 is an error, too.
        length = min(max(length, -1), 2**62)
        lengths = torch.full((query.shape[0],), length, dtype=torch.int64, device="cpu")
    added = 0 if key is None else key.shape[2]
    new_lengths = lengths + added if added else lengths
    if relative_bias is not None or mask is not None:  # errors are raised before the append
        check_lengths(lengths, query.shape[0], capacity, added, query.device)
        if relative_bias is not None:
            bias_table = fold_table(relative_bias, query, new_lengths, capacity)
        if mask is not None:
            mask_program = masks.cache_program(_OP, mask, query, capacity, new_lengths)
    if key is not None and value is not None:
        if 0 in key_cache.stride() or 0 in value_cache.stride():
            check_strides(key_cache=key_cache, value_cache=value_cache)
        key, value = copy_overlaps((key, value), (key_cache, value_cache))
        rotary: tuple[Tensor | None, ...] = (None,) * 4
        options = _NOT_ROTATED
        if rotary_cos is not None:
            new_rows, flag = (key, value), rotary_interleaved
            rotary = check_rotary(rotary_cos, rotary_sin, positions, flag, query, new_rows, lengths)
            options = AppendOptions(rotary_interleaved)
        call = (key_cache, value_cache, key, value, lengths, block_table, entries, *rotary)
        cpu: Any = dispatch.load("cpu")
        rotated = cpu.append_to_cache(*call, *scales, leftpad, options=options)
        query = query if rotated is None else rotated
        written = (key_cache, value_cache, *scales)
        torch.autograd.graph.increment_version([x for x in written if x is not None])
    slopes, sinks = (x[None] if x is not None and x.dim() == 1 else x for x in (slopes, sinks))
    biases = (slopes, sinks, bias_table, mask_program, leftpad, *scales)
    results = plan.all((query, key_cache, value_cache, new_lengths, block_table, entries, *biases))
    return _public_results(results, layout, return_lse)


def _public_results(results: tuple[Tensor, Tensor], layout: str, return_lse: bool) -> Any:
    """Convert the results of the operator to the results of :func:`decode_attention`."""
    out, lse = results
    out = out.transpose(1, 2) if layout == "bnhd" else out
    if not return_lse:
        return out
    return out, lse if out.dtype is torch.float64 else lse.float()


def _validate(args: Any) -> tuple[Operator, tuple[Any, ...], tuple[Any, ...] | None]:
    """Validate the named arguments of :func:`decode_attention`.

    Return the operator, its arguments, and the arguments of ``append``, or None without new rows.
    """
    query, key_cache, value_cache = args.query, args.key_cache, args.value_cache
    key, value, layout = args.key, args.value, args.layout
    if layout not in _LAYOUTS:
        raise ValueError(f"{_OP}: layout must be 'bhnd' or 'bnhd', got {layout!r}")
    if not isinstance(query, Tensor):
        raise checks.wrong_type(_OP, "query", query, "Tensor")
    operands = {"query": query, "key_cache": key_cache, "value_cache": value_cache}
    if key is not None or value is not None:
        operands.update(key=key, value=value)
    for name, x in operands.items():
        checks.check_tensor(_OP, name, x, _LAYOUTS[layout], 4, query.device)
        checks.check_constant(_OP, name, x)
        is_scaled = args.key_scales is not None or x.dtype in QUANTISED
        quantised = name.endswith("_cache") and is_scaled
        if x.dtype != query.dtype and not quantised:
            raise RuntimeError(
                f"{_OP}: {name} must have query's dtype {query.dtype}, got {x.dtype}"
            )
    checks.check_dtypes(_OP, query, query, query)
    if key is not None:
        check_strides(key_cache=key_cache, value_cache=value_cache)
    scales, caches = (args.key_scales, args.value_scales), (key_cache, value_cache)
    if any(x is not None for x in scales) or any(x.dtype in QUANTISED for x in caches):
        scales = check_scales(*scales, *caches, layout, key, value)
    checks.check_flag(_OP, "is_causal", args.is_causal)
    checks.check_flag(_OP, "return_lse", args.return_lse)
    if layout == "bnhd":
        operands = {name: x.transpose(1, 2) for name, x in operands.items()}
    query, key_cache, value_cache = (
        operands[name] for name in ("query", "key_cache", "value_cache")
    )
    new_rows = (operands["key"], operands["value"]) if "key" in operands else None
    checks.check_widths(_OP, query, key_cache)
    checks.check_heads(_OP, query, key_cache, value_cache, dim=1)
    if key_cache.shape[::2] != value_cache.shape[::2]:
        raise ValueError(
            f"{_OP}: key_cache and value_cache must have the same entries and lengths, "
            f"got shapes {tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        )
    if new_rows is not None:
        check_new_rows(*new_rows, query, key_cache, value_cache, args.cache_seqlens)
        if runs_eagerly(*new_rows, key_cache, value_cache):
            new_rows = copy_overlaps(new_rows, (key_cache, value_cache))

    batch, device = query.shape[0], query.device
    block_table, cache_batch_idx = args.block_table, args.cache_batch_idx
    table = entries = None
    capacity = key_cache.shape[2]
    if block_table is not None:
        if cache_batch_idx is not None:
            raise ValueError(f"{_OP}: block_table and cache_batch_idx must not be given together")
        table = checks.check_integers(_OP, "block_table", block_table, "[B, P]", 2, device)
        _check_batch("block_table", table, batch)
        capacity = capacity * table.shape[1]
        if block_table.dtype == torch.int32:
            table = block_table
        else:  # clamping keeps a page beyond int32 invalid
            table = table.clamp(-1, torch.iinfo(torch.int32).max).to(torch.int32)
    elif cache_batch_idx is not None:
        name = "cache_batch_idx"
        entries = checks.check_integers(_OP, name, cache_batch_idx, "[B]", 1, device)
        _check_batch(name, entries, batch)
        if new_rows is not None and entries.is_cpu and runs_eagerly(entries):
            repeated = [n for n in set(entries.tolist()) if (entries == n).sum() > 1]
            if repeated:
                raise ValueError(
                    f"{_OP}: {name} must not name an entry twice where rows are appended, got "
                    f"entry {repeated[0]} for several sequences"
                )
    elif key_cache.shape[0] != batch:
        raise ValueError(
            f"{_OP}: key_cache must have an entry for each of the {batch} sequences, unless "
            f"cache_batch_idx assigns entries to them; got {key_cache.shape[0]} entries"
        )
    added = 0 if new_rows is None else new_rows[0].shape[2]
    page_sizes = None if table is None else (table.shape[1], key_cache.shape[2])
    lengths = check_lengths(args.cache_seqlens, batch, capacity, added, device, page_sizes)
    leftpad, slopes, sinks = args.cache_leftpad, args.alibi_slopes, args.sinks
    if leftpad is not None:
        leftpad = _check_padding(leftpad, lengths)
    if slopes is not None:
        slopes = checks.fold_slopes(_OP, slopes, query, query.shape[1], batch)
    if sinks is not None:
        checks.check_constant(_OP, "sinks", sinks)
        sinks = checks.check_sinks(_OP, sinks, query, query.shape[1])
    score_arguments = (args.scale, args.softcap, args.window, args.is_causal)
    scores = checks.score_options(_OP, query, *score_arguments)
    tables = (args.rotary_cos, args.rotary_sin, args.rotary_positions)
    rotary = check_rotary(*tables, args.rotary_interleaved, query, new_rows, lengths)
    append_call = None
    if new_rows is not None:
        if args.rotary_cos is not None and scales[0] is not None:
            check_rotation(*scales)
        row_places = (lengths, table, entries)
        tensors = (key_cache, value_cache, *new_rows, *row_places, *rotary, *scales, leftpad)
        interleaved = args.rotary_interleaved and args.rotary_cos is not None
        append_call = (tensors, AppendOptions(interleaved))
        lengths = lengths + added
    distance_table = mask_program = None
    if args.relative_bias is not None:
        distance_table = fold_table(args.relative_bias, query, lengths, capacity)
    if args.mask is not None:
        mask_program = masks.cache_program(_OP, args.mask, query, capacity, lengths)
    biases = (slopes, sinks, distance_table, mask_program, leftpad, *scales)
    tensors = (query, key_cache, value_cache, lengths, table, entries, *biases)
    return decode, (*tensors, DecodeOptions(**scores)), append_call


prepare = with_arguments_of(decode_attention, _validate)


def fold_table(bias: Any, query: Tensor, lengths: Tensor, capacity: int) -> Tensor:
    """Return the table of distances, [1, Hq, 2 M + 1], for the longest sequence."""
    checks.check_constant(_OP, "relative_bias", bias.table if isinstance(bias, T5) else bias)
    q_len = query.shape[2]
    if not (lengths.is_cpu and runs_eagerly(lengths)):
        return fold_distances(_OP, bias, query, traced_max(capacity, q_len, 1) - 1)
    longest = int(lengths.max()) if lengths.shape[0] else 0
    lengths_text = f"{q_len} queries and {longest} keys"
    return fold_distances(_OP, bias, query, max(longest, q_len, 1) - 1, (lengths_text,))


def _check_batch(name: str, x: Tensor, batch: int) -> None:
    if x.shape[0] != batch:
        raise ValueError(
            f"{_OP}: {name} must have a row for each of the {batch} sequences, got {x.shape[0]}"
        )


def check_lengths(
    lengths: Any,
    batch: int,
    capacity: int,
    added: int,
    device: torch.device,
    pages: tuple[int, int] | None = None,  # pages per row of the block table, and keys per page
) -> Tensor:
    """Check ``cache_seqlens``; return the length of each sequence before the call, [B] int64."""
    if lengths is None:
        lengths = capacity
    if isinstance(lengths, (int, torch.SymInt)) and not isinstance(lengths, bool):
        if not 0 <= lengths <= capacity - added:
            raise _length_error(lengths, capacity, added, pages)
        return torch.full((batch,), lengths, dtype=torch.int64, device=device)  # type: ignore[arg-type]
    lengths = checks.check_integers(_OP, "cache_seqlens", lengths, "[B] or an int", 1, device)
    _check_batch("cache_seqlens", lengths, batch)
    if lengths.is_cpu and runs_eagerly(lengths):
        for length in lengths.tolist():
            if not 0 <= length <= capacity - added:
                raise _length_error(length, capacity, added, pages)
    return lengths


def _check_padding(cache_leftpad: Any, lengths: Tensor) -> Tensor:
    """Check ``cache_leftpad``; return how many rows of each sequence are padding, [B] int64."""
    name = "cache_leftpad"
    padding = checks.check_integers(_OP, name, cache_leftpad, "[B]", 1, lengths.device)
    _check_batch(name, padding, lengths.shape[0])
    if padding.is_cpu and runs_eagerly(padding, lengths):
        for rows, length in zip(padding.tolist(), lengths.tolist(), strict=True):
            if not 0 <= rows <= length:
                raise ValueError(
                    f"{_OP}: {name} must be at least 0 and at most the {length} keys of the "
                    f"sequence, got {rows}"
                )
    return padding


def _length_error(
    length: Any, capacity: int, added: int, pages: tuple[int, int] | None
) -> ValueError:
    extra = f", plus {added} to append," if added else ""
    source = ""
    if pages is not None:
        source = f", those of the {pages[0]} pages of {pages[1]} in a row of block_table"
    return ValueError(
        f"{_OP}: cache_seqlens must be at least 0, and{extra} at most {capacity} keys per sequence"
        f"{source}, got {length}"
    )


# --- the operator -----------------------------------------------------------------------------


def _no_gradient(*_: Any) -> Any:
    raise RuntimeError("decode_attention has no gradient: it is for inference")


def _count_pairs(
    query: Tensor, key_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor | None, *rest: Any
) -> int:
    """Count the visible pairs by the lengths; a cache of unknown length counts as full."""
    batch, heads, q_len, _ = query.shape
    _, _, _, _, _, cache_leftpad, *_, options = rest
    pages = 1 if block_table is None else block_table.shape[1]
    filled = values(cache_seqlens) or [pages * key_cache.shape[2]] * batch
    pads = (None if cache_leftpad is None else values(cache_leftpad)) or [0] * batch
    window = options.window_left, options.window_right
    return heads * sum(
        visible_pairs(q_len, end - pad, end - pad - q_len, *window)
        for end, pad in zip(filled, pads, strict=True)
    )


decode = Operator(
    "decode_attention",
    "query: B Hq Lq D; key_cache: E Hkv N D; value_cache: E Hkv N Dv; cache_seqlens: B; "
    "block_table?: B *; cache_batch_idx?: B; alibi_slopes?: B|1 Hq; sinks?: 1 Hq; "
    "relative_bias?: 1 Hq *; mask_program?; cache_leftpad?: B; key_scales?: E Hkv N; "
    "value_scales?: E Hkv N; Hq % Hkv",
    "out: B Hq Lq Dv; lse: B Hq Lq",
    options=DecodeOptions,
    out_like="query",
    formula=_no_gradient,
    folds=False,
    flops=flops_of_pairs(_count_pairs),
    derived={"scale": lambda query, *_: default_scale(query.shape[-1])},
)
