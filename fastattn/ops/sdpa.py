"""Scaled dot-product attention: the specification, and the folding of PyTorch's arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn import checks, compat, dispatch, masks
from fastattn._derivative import Derivative
from fastattn._flops import flops_of_pairs, visible_pairs
from fastattn._seed import draw_seed
from fastattn.backends.primitives import AttentionBackwardOptions, AttentionOptions
from fastattn.bias import T5, Decomposed2d, Disentangled, Window2d
from fastattn.call import Plan, Plans, with_arguments_of, with_seed
from fastattn.checks import default_scale, expands_to, name_of
from fastattn.library import Operator
from fastattn.ops import _jagged
from fastattn.ops._disentangled import NO_TERMS
from fastattn.ops._relative_bias import fold_bias, split_bias

_NAME = "scaled_dot_product_attention"
_BOOLEANS = ("is_causal", "enable_gqa", "return_lse", "need_weights", "average_weights")
_NO_BIAS: Sequence[Tensor | None] = (None, None, *NO_TERMS)
plans = Plans(rows=3)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | T5 | Decomposed2d | Disentangled | Window2d | None = None,
    mask: masks.Mask | None = None,
    causal_alignment: str = "upper_left",
    generator: torch.Generator | None = None,
    return_lse: bool = False,
    need_weights: bool = False,
    average_weights: bool = False,
) -> Any:
    r"""Attend from every query to all keys it can see, without storing the matrix of scores.

    .. math:: out = dropout(softmax(scale \cdot query \, key^T + bias)) \, value

    (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762.) In full, for query i and key j of one
    head, with ``d = i + offset - j``:

    1. ``s = scale * dot(query[i], key[j])``, with more terms if ``relative_bias`` is
       :class:`~fastattn.bias.Disentangled`
    2. ``s = softcap * tanh(s / softcap)`` if ``softcap`` (https://arxiv.org/abs/2408.00118)
    3. ``s = s + attn_mask[i, j]`` if the mask is floating; ``s = s + relative_bias[h, L - 1 + d]``,
       for query head h, if ``relative_bias``
    4. ``s = s - alibi_slopes * abs(d)`` (https://arxiv.org/abs/2108.12409)
    5. the pair is *excluded* if ``attn_mask`` is False or a bias -inf there, if ``mask`` is False
       there, if ``is_causal`` and ``d < 0``, or if it is outside the ``window``: not
       ``-right <= d <= left``
    6. ``lse[i]`` is the logarithm of the sum of exp(s) over the keys that are left, plus
       exp(sinks[h]) for query head h if ``sinks``
    7. ``w = exp(s - lse[i])``; dropout keeps it with probability T / 65536, times 65536 / T, where
       T = round((1 - dropout_p) * 65536), and otherwise makes it 0
    8. ``out[i]`` is the sum of ``w * value[j]``

    A fully masked row has ``out = 0``, weights 0 and ``lse = -inf`` (with ``sinks``: the sink). It
    passes no gradient, except from ``lse`` to the sink. NaN or inf in a key or value that no query
    can see never affects the result.

    The first eight arguments, including their errors, are the arguments of
    ``torch.nn.functional.scaled_dot_product_attention``. The shapes below have four dimensions. As
    in PyTorch, 2 (no batch, no head), 3 (no batch) or more than 4 are allowed, the batch dimensions
    broadcast, and so does a head dimension of 1. Jagged NestedTensors ``[B, Hq, *, D]`` (or
    ``[B, *, D]``) are computed without padding by the kernels of :func:`varlen_attention`, with its
    forms of ``mask`` and ``relative_bias``; they support no ``attn_mask`` and no weights.

    Args:
        query: [B, Hq, Lq, D], float32, bfloat16, float16 or float64, any strides; sizes may be 0.
            16-bit inputs are computed in float32.
        key: [B, Hkv, Lk, D], of query's dtype and device.
        value: [B, Hkv, Lk, Dv], of query's dtype and device.
        attn_mask: broadcastable to [B, Hq, Lq, Lk], never expanded in memory. bool: True takes
            part. Floating, of query's dtype or float32: added to the scores; differentiable. A
            ``torch.nn.attention.bias.CausalBias`` of these lengths is replaced by ``is_causal`` and
            ``causal_alignment``, and is never expanded to a tensor.
        dropout_p: the probability of dropping a weight, in [0, 1]. Always applied: pass 0 in
            evaluation. The draws are a function of one 64-bit seed per call: the same on every
            backend, for any number of threads, in forward and backward. Without dropout no random
            number is consumed.
        is_causal: exclude the keys after the query's own position. Not together with ``attn_mask``;
            ``window=(-1, 0)`` is equivalent and can be combined with a mask.
        scale: None is ``1 / sqrt(D)``.
        enable_gqa: allow Hkv < Hq: query head h uses head ``h // (Hq // Hkv)`` of key and value.
        window: (left, right), how many keys before and after its own position a query can see; -1
            is unlimited. https://arxiv.org/abs/2004.05150
        softcap: None, or the positive bound of the scores.
        alibi_slopes: floating, [Hq] or [B, Hq]. Differentiable, but only by the reference.
        sinks: [Hq], float32 or of query's dtype: attention sinks, a logit for each query head that
            joins the sum of the softmax and has no value, so the weights of a row sum to less than
            1 (https://arxiv.org/abs/2309.17453). Scale, mask, window, ``softcap``, ALiBi and
            dropout do not apply to it. -inf is no sink; inf makes the output 0. Differentiable.
            ``lse`` includes it: to attend to the keys in parts for :func:`merge_states`, give the
            sinks to one part only.
        relative_bias: a learned bias of distances, differentiable: a table [Hq, 2 L - 1], float32
            or of query's dtype. Its middle is d = 0, and L >= max(Lq + offset, Lk - offset), so
            that it has all distances. Or :class:`fastattn.bias.T5` or
            :class:`fastattn.bias.Window2d`, which read their tables in other ways, or
            :class:`fastattn.bias.Disentangled` and :class:`fastattn.bias.Decomposed2d`, which
            depend on the content, too. The bias of all pairs is never stored.
        mask: None, a mask of :mod:`fastattn.masks`, or a ``BlockMask`` of
            ``torch.nn.attention.flex_attention``: which pairs take part, without a tensor of all
            pairs. Blocks without a visible pair are skipped. Together with any other argument:
            only pairs that no argument excludes take part.
        causal_alignment: how ``is_causal``, ``window``, ``alibi_slopes``, ``relative_bias`` and
            masks of positions align queries and keys if Lq is not Lk. "upper_left": query 0
            is at key 0 (offset = 0), as in PyTorch. "bottom_right": the last query is at the last
            key (offset = Lk - Lq).
        generator: the source of the dropout seed; None is the default generator. Under
            ``torch.compile`` only None is supported.
        return_lse: also return lse.
        need_weights: also return the weights that are applied to value, after dropout.
        average_weights: with ``need_weights``, return their mean over the heads. The weights of
            single heads are then never stored.

    Returns:
        ``out`` [B, Hq, Lq, Dv], in query's dtype and memory order; or a tuple of ``out``, then
        ``lse`` [B, Hq, Lq] in float32 (float64 for float64) if ``return_lse``, then the weights
        [B, Hq, Lq, Lk] (averaged: [B, Lq, Lk]) in query's dtype if ``need_weights``. All are
        differentiable, any number of times: derivatives beyond the first, and forward mode, go
        through the reference backend.

    Under autocast, query, key and value are cast as PyTorch casts them.

    Raises:
        TypeError: an argument of the wrong type.
        RuntimeError: dtypes, devices or shapes that do not match, ``dropout_p`` outside
            [0, 1], ``attn_mask`` with ``is_causal``, or a forced backend that cannot run the call.
        IndexError: ``enable_gqa`` without a head dimension.
        NotImplementedError: a complex or an 8-bit dtype.
        ValueError: a value of ``window``, ``softcap`` or ``causal_alignment`` that is not allowed,
            ``average_weights`` without ``need_weights``, a ``CausalBias`` with ``is_causal`` or
            ``causal_alignment``.

    Examples:
        >>> import torch
        >>> from fastattn import scaled_dot_product_attention
        >>> query, key, value = torch.ones(3, 1, 2, 10, 64)
        >>> scaled_dot_product_attention(query, key, value, is_causal=True).shape
        torch.Size([1, 2, 10, 64])

        The weights, averaged over the heads, of a window of three keys:

        >>> out, weights = scaled_dot_product_attention(
        ...     query, key, value, window=(1, 1), need_weights=True, average_weights=True
        ... )
        >>> weights[0, 1, :4]
        tensor([0.3333, 0.3333, 0.3333, 0.0000])

        A fully masked row:

        >>> mask = torch.zeros(10, 10, dtype=torch.bool)
        >>> out, lse = scaled_dot_product_attention(query, key, value, mask, return_lse=True)
        >>> out.abs().max(), lse[0, 0, 0]
        (tensor(0.), tensor(-inf))
    """
    tables, kind = ((), ()) if relative_bias is None else split_bias(relative_bias)
    tensors = (query, key, value, attn_mask, alibi_slopes, sinks)
    outputs = (return_lse, need_weights, average_weights)
    signature = plan = None
    if generator is None:
        options = (dropout_p, is_causal, scale, enable_gqa, window, softcap, causal_alignment)
        signature, plan = plans.find((*tensors, *tables), *kind, mask is None, *options, *outputs)
    if plan is not None:
        biases = (relative_bias, mask)
        return run_plan(plan, *tensors, *biases, causal_alignment, return_lse, need_weights)
    operator, call, folding = prepare(
        *(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa),
        *(window, softcap, alibi_slopes, sinks, relative_bias, mask),
        *(causal_alignment, generator, *outputs),
    )
    call = with_seed(operator, call, generator)
    plan = keep_plan(signature, operator, call, (*tensors, *tables))
    # Jagged tensors have no weights.
    out, lse, *weights = operator(*call) if plan is None else plan.all(call[:-1], call[-1])
    out = folding.restore(out)
    if not return_lse and not need_weights:
        return out
    results = [out]
    if return_lse:
        results.append(folding.restore(lse if query.dtype is torch.float64 else lse.float()))
    if need_weights:
        results.append(folding.restore(weights[0], has_head=not average_weights))
    return tuple(results)


def keep_plan(
    signature: bytes | None, operator: Operator, call: tuple[Any, ...], tensors: tuple[Any, ...]
) -> Plan | None:
    """Keep and return the plan of a call, for later calls with its signature; see fastattn.call.

    Calls whose dimensions were folded, or whose heads were repeated, have no plan. The query of
    ``call`` may differ from the caller's, because ``content_bias`` was added.
    """
    query, key, value, mask, slopes, sinks, *_ = tensors
    if signature is None or call[0].shape != query.shape:
        return None
    if call[1] is not key or call[2] is not value:
        return None
    originals = (None, key, value, mask, slopes, None, sinks)
    return plans.keep(signature, operator, call, originals, tensors)


def run_plan(
    plan: Plan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    relative_bias: Tensor | T5 | Decomposed2d | Disentangled | Window2d | None = None,
    mask: masks.Mask | None = None,
    causal_alignment: str = "upper_left",
    return_lse: bool = False,
    need_weights: bool = False,
) -> Any:
    """Run a call by its plan; return what the public function returns."""
    options = plan.options
    program = seed = None
    table, positions, *terms = _NO_BIAS
    if causal_alignment == "bottom_right":
        options = plan.with_option("offset", key.shape[2] - query.shape[2])
    if attn_mask is not None and attn_mask.requires_grad:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    if relative_bias is not None:
        query, operands = fold_bias(_NAME, relative_bias, query, key, options.offset)
        table, positions, *terms = operands
    if mask is not None:
        program = masks.program(_NAME, mask, query, key.shape[2], options.offset)
    if options.dropout_p:
        seed = draw_seed(query.device)
    others = (attn_mask, slopes, seed, sinks, table, positions, program, *terms)
    tensors = (query, key, value, *others)
    if not return_lse and not need_weights:
        return plan.first(tensors, options)
    out, lse, weights = plan.all(tensors, options)
    if not return_lse:
        return out, weights
    lse = lse if query.dtype is torch.float64 else lse.float()
    return (out, lse, weights) if need_weights else (out, lse)


def _validate(
    args: Any,  # the named arguments of the public function
) -> tuple[Operator, tuple[Any, ...], Folding | _jagged.JaggedFolding]:
    """Validate; return the operator, its arguments with None for the seed, and the folding.

    All errors are raised here, before any computation.
    """
    if checks.is_jagged(args.query):
        return _jagged.prepare(args)
    query, key, value = args.query, args.key, args.value
    _check_tensors(query, key, value)
    for name in _BOOLEANS:
        checks.check_flag(_NAME, name, getattr(args, name))
    dropout_p, attn_mask = args.dropout_p, args.attn_mask
    is_causal, causal_alignment = args.is_causal, args.causal_alignment
    if dropout_p != 0.0 or type(dropout_p) is not float:
        dropout_p = checks.check_dropout(_NAME, dropout_p)
    score_arguments = (args.scale, args.softcap, args.window)
    scores = checks.score_options(_NAME, query, *score_arguments, is_causal)
    if args.generator is not None:
        checks.check_generator(_NAME, args.generator, query.device)
    if attn_mask is not None and checks.is_causal_bias(attn_mask):
        causal_alignment = _alignment_of(attn_mask, query, key, is_causal, causal_alignment)
        attn_mask, is_causal, scores["window_right"] = None, True, 0
    _check_combinations(args, attn_mask, is_causal, causal_alignment)

    query, key, value = checks.autocast(query, key, value)
    checks.check_dtypes(_NAME, query, key, value)
    query, key, value, folding = _fold(query, key, value, args.enable_gqa)
    if attn_mask is not None:
        attn_mask = _fold_mask(attn_mask, query, key.shape[2], folding)
    slopes = args.alibi_slopes
    if slopes is not None:
        slopes = _fold_slopes(slopes, query, folding)
    sinks = args.sinks
    if sinks is not None:
        heads, error = query.shape[1], RuntimeError
        sinks = checks.check_sinks(_NAME, sinks, query, heads, wrong_dtype=error, wrong_shape=error)

    offset = key.shape[2] - query.shape[2] if causal_alignment == "bottom_right" else 0
    mask_program = seed = None  # the seed is drawn later, see with_seed
    table, positions, *terms = _NO_BIAS
    if args.relative_bias is not None:
        query, (table, positions, *terms) = fold_bias(_NAME, args.relative_bias, query, key, offset)
    if args.mask is not None:
        mask_program = masks.program(_NAME, args.mask, query, key.shape[2], offset)
    if query.shape[3] == 0:  # every score is 0, as with a column of zeros
        query, key = (torch.nn.functional.pad(x, (0, 1)) for x in (query, key))
        with_columns = terms[:3]  # position_query, query_table, key_table
        terms[:3] = [x if x is None else torch.nn.functional.pad(x, (0, 1)) for x in with_columns]
        scores["scale"] = 1.0
    recorded_offset: Any = offset
    if causal_alignment == "bottom_right" and compat.records_trace():
        recorded_offset = None
    options = AttentionOptions(
        **scores,
        offset=recorded_offset,
        dropout_p=dropout_p,
        weights=(2 if args.average_weights else 1) if args.need_weights else 0,
    )
    others = (attn_mask, slopes, seed, sinks, table, positions, mask_program, *terms)
    return attention, (query, key, value, *others, options), folding


prepare = with_arguments_of(scaled_dot_product_attention, _validate)


# --- folding ----------------------------------------------------------------------------------


class Folding(NamedTuple):
    """Restores the caller's leading dimensions from the operator's [B, H, ...]."""

    rank: int  # of the scores: 2 has no head, 3 no batch, more than 4 has several
    batch: tuple[int, ...]  # the caller's batch dimensions, before the head

    def restore(self, x: Tensor, has_head: bool = True) -> Tensor:
        """[B, H, ...] -> the caller's leading dimensions; [B, ...] without a head."""
        if self.rank == 4:
            return x
        if self.rank > 4:
            return x.unflatten(0, self.batch)
        return x[0, 0] if self.rank == 2 and has_head else x[0]


def _check_tensors(query: Any, key: Any, value: Any) -> None:
    for position, name, x in ((1, "query", query), (2, "key", key), (3, "value", value)):
        checks.check_strided(_NAME, name, x, position)
        if x.dim() < 2:
            raise RuntimeError(
                f"{_NAME}: {name} must have at least 2 dimensions, got shape {tuple(x.shape)}"
            )
    if not query.device == key.device == value.device:
        raise RuntimeError(
            f"{_NAME}: query, key and value must be on the same device, "
            f"got {query.device}, {key.device} and {value.device}"
        )


def _fold(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Folding]:
    """Return query [B, Hq, Lq, D], key [B, Hkv, Lk, D], value [B, Hkv, Lk, Dv], and the folding.

    They are copied only if several batch dimensions broadcast, or if key and value have different
    numbers of heads.
    """
    qs, ks, vs = query.shape, key.shape, value.shape
    if qs[-1] != ks[-1]:
        raise RuntimeError(
            f"{_NAME}: query and key must have the same last dimension, "
            f"got shapes {tuple(qs)} and {tuple(ks)}"
        )
    if ks[-2] != vs[-2]:
        raise RuntimeError(
            f"{_NAME}: key and value must have the same length (dimension -2), "
            f"got shapes {tuple(ks)} and {tuple(vs)}"
        )
    ranks = len(qs), len(ks), len(vs)
    if enable_gqa and min(ranks) < 3:
        raise IndexError(
            f"{_NAME}: enable_gqa=True needs a head dimension (dimension -3) in query, key and "
            f"value, got shapes {tuple(qs)}, {tuple(ks)} and {tuple(vs)}"
        )
    if ranks == (4, 4, 4) and qs[0] == ks[0] == vs[0]:
        batch: tuple[int, ...] = (qs[0],)
    else:
        batch = _common_shape("batch dimensions", qs[:-3], ks[:-3], vs[:-3])
        query, key, value = (_fold_batch(x, batch) for x in (query, key, value))
    if not query.shape[1] == key.shape[1] == value.shape[1]:
        query, key, value = (_group_heads if enable_gqa else _broadcast_heads)(query, key, value)
    return query, key, value, Folding(max(ranks), batch)


def _fold_batch(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    """[*, H, L, D] -> [B, H, L, D], where B is the product of ``batch``."""
    if x.dim() == 2:
        x = x.unsqueeze(0)
    rows = x.shape[-3:]
    return x.expand(*batch, *rows).reshape(math.prod(batch), *rows)


def _broadcast_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Broadcast the heads. A single head of key and value is kept: all query heads share it."""
    q_heads, k_heads, v_heads = query.shape[1], key.shape[1], value.shape[1]
    what = "numbers of heads (dimension -3)"
    (heads,) = _common_shape(what, (q_heads,), (k_heads,), (v_heads,))
    if q_heads != heads:
        query = query.expand(-1, heads, -1, -1)
    if k_heads != v_heads:
        key, value = key.expand(-1, heads, -1, -1), value.expand(-1, heads, -1, -1)
    return query, key, value


def _group_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    heads = query.shape[1]
    for name, x in (("key", key), ("value", value)):
        n = x.shape[1]
        if heads % n if n else heads:
            raise RuntimeError(
                f"{_NAME}: with enable_gqa=True the number of heads of {name} must divide that of "
                f"query, got {n} and {heads}"
            )
    if key.shape[1] == value.shape[1]:
        return query, key, value
    return query, _repeat_heads(key, heads), _repeat_heads(value, heads)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    n = x.shape[1]
    if n == heads:  # also for 0 heads
        return x
    return x.expand(-1, heads, -1, -1) if n == 1 else x.repeat_interleave(heads // n, 1)


# --- bias and options ------------------------------------------------------------------------


def _fold_mask(mask: Any, query: Tensor, k_len: int, folding: Folding) -> Tensor:
    """Return the mask as [B|1, Hq|1, Lq|1, Lk|1]."""
    mask = checks.check_mask(_NAME, mask, query)
    _, heads, q_len, _ = query.shape
    scores = (*folding.batch, heads, q_len, k_len)[-folding.rank :]
    shape = mask.shape
    if not expands_to(shape, scores):
        raise RuntimeError(
            f"{_NAME}: attn_mask must be broadcastable to the scores {scores}, got {tuple(shape)}"
        )
    if len(shape) < 4:
        return mask.view((1,) * (4 - len(shape)) + tuple(shape))
    return mask if folding.rank == 4 else _fold_leading(mask, 3, folding.batch)


def _alignment_of(bias: Any, query: Tensor, key: Tensor, is_causal: Any, alignment: Any) -> str:
    """Return the ``causal_alignment`` that makes ``is_causal`` equal to this bias."""
    if is_causal:
        raise ValueError(f"{_NAME}: CausalBias should not be used with causal=True")
    if alignment != "upper_left":
        raise ValueError(f"{_NAME}: causal_alignment must be left out with a CausalBias")
    lengths = getattr(bias, "seq_len_q", None), getattr(bias, "seq_len_kv", None)  # None: a view
    expected = query.shape[-2], key.shape[-2]
    if lengths != expected:
        raise RuntimeError(
            f"{_NAME}: attn_mask must be a CausalBias of the lengths of query and key, {expected}, "
            f"got {lengths}"
        )
    return "bottom_right" if bias.variant.name == "LOWER_RIGHT" else "upper_left"


def _fold_slopes(slopes: Any, query: Tensor, folding: Folding) -> Tensor:
    """Return the slopes as [B|1, Hq], float32 (float64 for float64)."""
    checks.check_strided(_NAME, "alibi_slopes", slopes)
    if not slopes.is_floating_point():
        raise RuntimeError(f"{_NAME}: alibi_slopes must be floating, got {name_of(slopes)}")
    checks.check_device(_NAME, "alibi_slopes", slopes, query.device)
    heads = query.shape[1]
    full = (*folding.batch, heads)
    if slopes.dim() == 0 or slopes.shape[-1] != heads or not expands_to(slopes.shape, full):
        raise RuntimeError(
            f"{_NAME}: alibi_slopes must have shape {(heads,)} or {full}, got {tuple(slopes.shape)}"
        )
    slopes = slopes.to(torch.promote_types(query.dtype, torch.float32))
    return slopes[None] if slopes.dim() == 1 else _fold_leading(slopes, 1, folding.batch)


def _fold_leading(x: Tensor, last_dims: int, batch: tuple[int, ...]) -> Tensor:
    """Fold the dimensions before the last ones into one, of size 1 or the product of ``batch``."""
    rows = x.shape[-last_dims:]
    if all(n == 1 for n in x.shape[:-last_dims]):
        return x.reshape(1, *rows)
    return x.expand(*batch, *rows).reshape(math.prod(batch), *rows)


def _check_combinations(args: Any, attn_mask: Any, is_causal: bool, alignment: Any) -> None:
    if attn_mask is not None and is_causal:
        raise RuntimeError(
            f"{_NAME}: Explicit attn_mask should not be set when is_causal=True; "
            "window=(-1, 0) adds the causal exclusion to a mask"
        )
    if args.average_weights and not args.need_weights:
        raise ValueError(f"{_NAME}: average_weights=True needs need_weights=True")
    if alignment != "upper_left" and alignment != "bottom_right":
        raise ValueError(
            f"{_NAME}: causal_alignment must be 'upper_left' or 'bottom_right', got {alignment!r}"
        )


# --- shared ----------------------------------------------------------------------------------


def _common_shape(what: str, *shapes: Sequence[int]) -> tuple[int, ...]:
    first = tuple(shapes[0])
    if all(tuple(shape) == first for shape in shapes[1:]):
        return first
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        listed = ", ".join(str(tuple(shape)) for shape in shapes)
        raise RuntimeError(
            f"{_NAME}: the {what} of query, key and value must be broadcastable, got {listed}"
        ) from None


# --- the operator -----------------------------------------------------------------------------


def _count_pairs(query: Tensor, key: Tensor, *rest: Any) -> int:
    """Count the visible pairs by the sizes and the window."""
    (batch, heads, q_len, _), (*_, options) = query.shape, rest
    offset = _bottom_right_offset(query, key) if options.offset is None else options.offset
    window = (offset, options.window_left, options.window_right)
    return batch * heads * visible_pairs(q_len, key.shape[2], *window)


def _bottom_right_offset(query: Tensor, key: Tensor, *_: Any) -> int:
    """Return the offset that aligns the last query with the last key."""
    return key.shape[2] - query.shape[2]


class _Backward(Operator):
    def _run(self, backend: str, tensors: Sequence[Any], options: Any) -> Any:
        _, grad_lse, _, *forward_tensors = tensors  # after the gradients of out, lse and weights
        if backend != "torch" or grad_lse is None:
            return super()._run(backend, tensors, options)
        return compat.run_outside(self._run_own, tensors, forward_tensors, options)

    def _run_own(self, tensors: Sequence[Any], forward_tensors: Sequence[Any], options: Any) -> Any:
        """Differentiate lse by fastattn's kernels, because PyTorch's has no gradient of it."""
        by_name = dict(zip(self.names[3:], forward_tensors, strict=True))
        call = [by_name[name] for name in attention.names]
        backend = dispatch.choose(attention.name, call, options, without="torch")
        by_name["out"], by_name["lse"], _ = attention.run(*call, options, backend)
        return super()._run(backend, (*tensors[:3], *by_name.values()), options)


attention: Operator = Operator(
    "scaled_dot_product_attention",
    "query: B Hq Lq D; key: B Hkv Lk D; value: B Hkv Lk Dv; attn_mask?: B|1 Hq|1 Lq|1 Lk|1; "
    "alibi_slopes?: B|1 Hq; seed?; sinks?: B|1 Hq; relative_bias?: B|1 Hq *; positions?: Lk; "
    "mask_program?; position_query?: B Hq Lq D; query_table?: B|1 Hq N D; "
    "key_table?: B|1 Hq N D; distance_buckets?: *; row_bias?: B Hq Lq *; "
    "column_bias?: B Hq Lq *; Hq % Hkv",
    "out: B Hq Lq Dv; lse: B Hq Lq; weights: B Hq Lq Lk / B Lq Lk",
    options=AttentionOptions,
    out_like="query",
    derivative=Derivative(
        grads="out lse weights",
        # Not the weights: O(L) memory.
        reads="query key value attn_mask alibi_slopes seed out lse "
        "sinks relative_bias positions mask_program position_query query_table key_table "
        "distance_buckets row_bias column_bias",
        gives="query key value attn_mask sinks relative_bias position_query query_table key_table "
        "row_bias column_bias",
        in_order="query key value position_query",
        options=AttentionBackwardOptions,
        operator=_Backward,
    ),
    flops=flops_of_pairs(_count_pairs, operator=lambda: attention),
    opaque=("alibi_slopes",),
    checked_by=("cpu",),
    derived={
        "scale": lambda query, *_: default_scale(query.shape[-1]),
        "offset": _bottom_right_offset,
    },
)
attention_backward = attention.backward
