"""Scaled dot-product attention: the specification, and the conversion of PyTorch's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn import checks, compat, masks
from fastattn._seed import draw_seed
from fastattn.autograd.sdpa import NO_TERMS, attention
from fastattn.backends.primitives import AttentionOptions
from fastattn.bias import T5, Decomposed2d, Disentangled, Window2d
from fastattn.call import Plan, Plans, with_arguments_of
from fastattn.library import Operator
from fastattn.ops import _jagged
from fastattn.ops import _sdpa_arguments as arguments
from fastattn.ops._disentangled import fold_image, fold_terms
from fastattn.ops._relative_bias import fold_relative_bias, largest, split_bias

_NAME = "scaled_dot_product_attention"
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
    flags = (return_lse, need_weights, average_weights)
    signature = plan = None
    if generator is None:
        options = (dropout_p, is_causal, scale, enable_gqa, window, softcap, causal_alignment)
        signature, plan = plans.find((*tensors, *tables), *kind, mask is None, *options, *flags)
    if plan is None:
        operator, call, folding = prepare(
            *(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa),
            *(window, softcap, alibi_slopes, sinks, relative_bias, mask),
            *(causal_alignment, generator, *flags),
        )
        plan = keep(signature, (*tensors, *tables), operator, call)
    if plan is not None:
        biases = (relative_bias, mask)
        return planned(plan, *tensors, *biases, causal_alignment, return_lse, need_weights)
    # Jagged tensors have no weights.
    out, lse, *weights = operator(*checks.with_seed(operator, call, generator))
    out = folding.restore(out)
    if not return_lse and not need_weights:
        return out
    results = [out]
    if return_lse:
        results.append(folding.restore(lse if query.dtype is torch.float64 else lse.float()))
    if need_weights:
        results.append(folding.restore(weights[0], has_head=not average_weights))
    return tuple(results)


def keep(
    signature: bytes | None, tensors: tuple[Any, ...], operator: Operator, call: tuple[Any, ...]
) -> Plan | None:
    """Keep and return the plan of a call, unless its dimensions were folded or its heads repeated.

    The query may be another one: with ``content_bias`` added.
    """
    if signature is None or call[0].shape != tensors[0].shape:
        return None
    if call[1] is not tensors[1] or call[2] is not tensors[2]:
        return None
    in_order = (None, *tensors[1:5], None, tensors[5])
    return plans.keep(signature, operator, call, in_order, tensors)


def planned(
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
    """The results of a call by its plan."""
    options = plan.options
    program = seed = None
    of_bias: Sequence[Tensor | None] = _NO_BIAS
    if causal_alignment == "bottom_right":
        options = plan.with_option("offset", key.shape[2] - query.shape[2])
    if attn_mask is not None and attn_mask.requires_grad:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    if relative_bias is not None:
        query, of_bias = _fold_bias(relative_bias, query, key, options.offset)
    if mask is not None:
        program = masks.program(_NAME, mask, query, key.shape[2], options.offset)
    if options.dropout_p:
        seed = draw_seed(query.device)
    biases = (attn_mask, slopes, seed, sinks, *of_bias[:2], program, *of_bias[2:])
    tensors = (query, key, value, *biases)
    if not return_lse and not need_weights:
        return plan.first(tensors, options)
    out, lse, weights = plan.all(tensors, options)
    if not return_lse:
        return out, weights
    lse = lse if query.dtype is torch.float64 else lse.float()
    return (out, lse, weights) if need_weights else (out, lse)


def _prepare(
    args: Any,  # the arguments of the public function
) -> tuple[Operator, tuple[Any, ...], arguments.Folding | _jagged.JaggedFolding]:
    """Validate; return the operator, its arguments with None for the seed, and the folding.

    All errors are raised here, before any computation.
    """
    if _jagged.is_jagged(args.query):
        return _jagged.prepare(args)
    query, key, value = args.query, args.key, args.value
    arguments.check_tensors(query, key, value)
    arguments.check_flags(args)
    dropout_p, attn_mask = args.dropout_p, args.attn_mask
    is_causal, causal_alignment = args.is_causal, args.causal_alignment
    if dropout_p != 0.0 or type(dropout_p) is not float:
        dropout_p = checks.check_dropout(_NAME, dropout_p)
    of_scores = (args.scale, args.softcap, args.window)
    scores = checks.score_options(_NAME, query, *of_scores, is_causal)
    if args.generator is not None:
        checks.check_generator(_NAME, args.generator, query.device)
    if attn_mask is not None and checks.is_causal_bias(attn_mask):
        causal_alignment = arguments.causal_alignment_of(
            attn_mask, query, key, is_causal, causal_alignment
        )
        attn_mask, is_causal, scores["window_right"] = None, True, 0
    arguments.check_combinations(
        attn_mask, is_causal, args.need_weights, args.average_weights, causal_alignment
    )

    query, key, value = checks.autocast(query, key, value)
    checks.check_dtypes(_NAME, query, key, value)
    query, key, value, folding = arguments.fold(query, key, value, args.enable_gqa)
    if attn_mask is not None:
        attn_mask = arguments.fold_mask(attn_mask, query, key.shape[2], folding)
    slopes = args.alibi_slopes
    if slopes is not None:
        slopes = arguments.fold_slopes(slopes, query, folding)
    sinks = args.sinks
    if sinks is not None:
        sinks = checks.check_sinks(
            _NAME,
            sinks,
            query,
            query.shape[1],
            wrong_dtype=RuntimeError,
            wrong_shape=RuntimeError,
        )

    offset = key.shape[2] - query.shape[2] if causal_alignment == "bottom_right" else 0
    mask_program = None
    of_bias: Sequence[Tensor | None] = _NO_BIAS
    if args.relative_bias is not None:
        query, of_bias = _fold_bias(args.relative_bias, query, key, offset)
    if args.mask is not None:
        mask_program = masks.program(_NAME, args.mask, query, key.shape[2], offset)
    if query.shape[3] == 0:  # every score is 0, as with a column of zeros
        query, key = (torch.nn.functional.pad(x, (0, 1)) for x in (query, key))
        padded = (x if x is None else torch.nn.functional.pad(x, (0, 1)) for x in of_bias[2:5])
        of_bias = (*of_bias[:2], *padded, *of_bias[5:])
        scores["scale"] = 1.0
    of_call: Any = offset
    if causal_alignment == "bottom_right" and compat.records_trace():
        of_call = None
    options = AttentionOptions(
        **scores,
        offset=of_call,
        dropout_p=dropout_p,
        weights=(2 if args.average_weights else 1) if args.need_weights else 0,
    )
    biases = (attn_mask, slopes, None, sinks, *of_bias[:2], mask_program, *of_bias[2:])
    return attention, (query, key, value, *biases, options), folding


_NO_BIAS = (None, None, *NO_TERMS)


def _fold_bias(
    bias: Any, query: Tensor, key: Tensor, offset: int
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """The query, to which a bias of content may be added, and the operands: a table of distances,
    positions, and the terms of content."""
    if type(bias) is Disentangled:
        farthest = largest(query.shape[2] - 1 + offset, key.shape[2] - 1 - offset, 0)
        query, terms = fold_terms(_NAME, bias, query, key, farthest)
        return query, (None, None, *terms)
    if type(bias) is Decomposed2d:
        return query, (None, None, *fold_image(_NAME, bias, query, key.shape[2]))
    return query, (*fold_relative_bias(_NAME, bias, query, key.shape[2], offset), *NO_TERMS)


prepare = with_arguments_of(scaled_dot_product_attention, _prepare)
