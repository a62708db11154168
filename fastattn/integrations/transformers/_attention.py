"""The attention function that transformers calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.integrations.transformers._compact import CompactBias
from fastattn.integrations.transformers._masks import StructuredMask, dense_mask
from fastattn.integrations.transformers._patterns import Pattern, in_window
from fastattn.integrations.transformers._recording import weights_are_recorded
from fastattn.integrations.transformers._support import is_model_input, takes_any_mask
from fastattn.ops import merge_states, scaled_dot_product_attention, varlen_attention

# Arguments that models pass to every layer and that do not change attention. Composite models also
# pass their own inputs (PaliGemma: labels), which is_model_input finds.
_IRRELEVANT = frozenset(
    """
    cache_position decoder_attention_mask decoder_input_ids deterministic generation_mode
    logits_to_keep max_length_k max_length_q num_items_in_batch output_hidden_states
    output_router_logits position_ids return_dict seq_idx use_cache vision_feature_layer
    vision_feature_select_strategy
    """.split()
)
# Continuous batching also passes arguments for its cache and for the sampling of tokens.
_PAGED = _IRRELEVANT | set(
    "block_table logits_indices logits_processor_args read_index write_index".split()
)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | StructuredMask | CompactBias | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    position_bias: Tensor | CompactBias | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    cache: Any = None,
    output_attentions: bool | None = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend on fused kernels; it is transformers' ``AttentionInterface``.

    .. math:: out = softmax(softcap(scaling \\cdot query \\, key^T) + bias) \\, value

    Args:
        module: the attention layer. Its attribute ``is_causal`` is the default of ``is_causal``;
            without the attribute, True.
        query: [B, Hq, Lq, D].
        key: [B, Hkv, Lk, D]. Hkv must divide Hq; nothing is repeated.
        value: [B, Hkv, Lk, Dv].
        attention_mask: None; a :class:`StructuredMask` of these Lq and Lk; [B, Lk], nonzero at real
            keys; or, as in :func:`fastattn.scaled_dot_product_attention`, broadcastable to [B, Hq,
            Lq, Lk], where keys beyond Lk are left out. With a mask, ``is_causal`` and
            ``sliding_window`` are ignored, because the mask includes them. A :class:`CompactBias`
            is a bias and its mask.
        dropout: the probability of dropping a weight.
        scaling: None is 1 / sqrt(D).
        is_causal: without a mask, and with more than one query: query i can see keys 0, ..., i.
        sliding_window: without a mask: how many keys a query can see, including its own; without
            causality the same number on the other side.
        softcap: the bound of the scores.
        position_bias: added to the scores; broadcastable to [B, Hq, Lq, Lk], or a
            :class:`CompactBias`. Differentiable.
        s_aux: [Hq], attention sinks: logits that take part in the softmax and have no value.
            Differentiable.
        sinks: [B, Hq, Lq, n]: n attention sinks for each query.
        indices: [B, Lq, k], the keys that each query is restricted to.
        block_indices: [B, G, Lq, k], the blocks of ``module.indexer.block_size`` keys that each
            query is restricted to; -1 is no block. Each of the G rows applies to the next Hq / G
            heads.
        cu_seq_lens_q, cu_seq_lens_k: [S + 1], the starts of the packed sequences, then the end.
            The rows of all B entries are numbered consecutively.
        cache: the paged cache of continuous batching up to transformers 5.23. It stores key and
            value, and returns the rows of all tokens so far; later versions do this in the model.
            The mask then also separates the sequences.
        output_attentions: also return the weights; they are also returned if the model records
            them.
        kwargs: arguments that attention does not depend on, or None.

    Returns:
        [B, Lq, Hq, Dv] contiguous, and the weights [B, Hq, Lq, Lk] or None. A fully masked row
        is 0.

    Raises:
        TypeError: an unknown argument that is not None.
        RuntimeError: a mask of another number of queries or keys.
    """
    is_paged = cache is not None or kwargs.get("write_index") is not None
    check_others(module, kwargs, _PAGED if is_paged else _IRRELEVANT)
    if is_paged and attention_mask is not None:  # it also separates the sequences
        cu_seq_lens_q = None
    if cache is not None:
        paged = {**kwargs, "cu_seq_lens_k": cu_seq_lens_k}  # per layer type; the cache selects one
        key, value = cache.update(
            key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=paged
        )
        cu_seq_lens_k = paged["cu_seq_lens_k"]
    compact = None
    if isinstance(position_bias, CompactBias):  # T5
        compact, position_bias = position_bias.with_gradient(), None
    if isinstance(attention_mask, CompactBias):  # Swin
        compact, attention_mask = attention_mask, attention_mask.mask
    if attention_mask is None and not takes_any_mask(getattr(module, "config", None)):
        is_causal = False  # a causal model would pass a mask, as in eager attention
    elif is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    need_weights = bool(output_attentions) or weights_are_recorded(module)
    call = _Call(query, key, value, scaling, softcap, dropout, need_weights, compact)
    if s_aux is not None:
        dtype = torch.promote_types(query.dtype, torch.float32)
        call = replace(call, sinks=s_aux.to(dtype))
    elif sinks is not None:
        call = replace(call, row_sinks=_logsumexp(sinks))

    starts = None  # of the packed sequences, in the queries and in the keys
    if isinstance(attention_mask, StructuredMask):
        visible = _visible_of(attention_mask, query, key)
        if attention_mask.starts is not None:
            starts = (attention_mask.starts, attention_mask.starts)
    elif attention_mask is not None:
        visible = _Visible(_fit_mask(attention_mask, query, key))
    else:
        visible = _visible_without_mask(query, key, bool(is_causal), sliding_window)
    if indices is not None:
        chosen = _mask_of_indices(indices[:, None], key.shape[2])
        visible = replace(visible, mask=_restrict(chosen, visible.mask))
    if block_indices is not None:
        indexer: Any = module.indexer
        chosen = _mask_of_blocks(block_indices, indexer.block_size, query, key)
        visible = replace(visible, mask=_restrict(chosen, visible.mask))
    if starts is None and cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        starts = (cu_seq_lens_q, cu_seq_lens_k)

    if starts is not None:
        has_no_bias = position_bias is None and compact is None
        if visible.mask is None and has_no_bias and not call.need_weights:
            return _attend_packed(call, visible, *starts), None
        visible = _separate_sequences(call, visible, *starts)
    if position_bias is not None:
        visible = replace(visible, mask=_add_bias(position_bias, visible.mask, key))
    return _attend(call, visible)


def check_others(
    module: nn.Module, kwargs: Mapping[str, Any], known: Collection[str] = _IRRELEVANT
) -> None:
    """Raise if there is an argument that may change attention."""
    present = (name for name, value in kwargs.items() if value is not None)
    unknown = [name for name in present if name not in known and not is_model_input(name)]
    if unknown:
        raise TypeError(
            f"fastattn's attention for transformers does not know the argument {unknown[0]!r} of "
            f"{type(module).__name__}; choose another attn_implementation for this model"
        )


@dataclass(frozen=True)
class _Call:
    query: Tensor  # [B, Hq, Lq, D]
    key: Tensor  # [B, Hkv, Lk, D]
    value: Tensor  # [B, Hkv, Lk, Dv]
    scale: float | None
    softcap: float | None
    dropout_p: float
    need_weights: bool
    compact: CompactBias | None = None
    sinks: Tensor | None = None  # [Hq]
    row_sinks: Tensor | None = None  # [B, Hq, Lq]


@dataclass(frozen=True)
class _Visible:
    """The pairs that take part: those allowed by both the mask and the window.

    With d = i + offset - j, the window is ``-right <= d <= left``; -1 is unlimited.
    """

    mask: Tensor | None = None  # broadcastable to [B, Hq, Lq, Lk]; bool, or added to the scores
    left: int = -1
    right: int = -1
    offset: int = 0


def _visible_of(mask: StructuredMask, query: Tensor, key: Tensor) -> _Visible:
    """The visible pairs of a structured mask, checked against the layer's lengths."""
    expected = (query.shape[2], key.shape[2])
    if mask.shape[2:] != expected:  # a cache may have more or fewer keys than it announced
        raise RuntimeError(
            "fastattn's attention for transformers: the attention mask has "
            f"{mask.shape[2]} queries and {mask.shape[3]} keys, the layer has "
            f"{expected[0]} and {expected[1]}"
        )
    padding = None if mask.padding is None else mask.padding[:, None, None, :]
    return _Visible(padding, mask.pattern.left, mask.pattern.right, mask.offset)


def _visible_without_mask(
    query: Tensor, key: Tensor, is_causal: bool, sliding_window: int | None
) -> _Visible:
    """The visible pairs without a mask. A single query is at the last key."""
    q_len, k_len = query.shape[2], key.shape[2]
    offset = k_len - 1 if q_len == 1 else 0
    left = -1 if sliding_window is None or sliding_window >= k_len else sliding_window - 1
    right = left
    if is_causal:
        right = 0 if q_len > 1 else -1  # the last query can see all keys
    return _Visible(None, left, right, offset)


def _fit_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask with a shape and a dtype that fastattn's attention accepts."""
    k_len = key.shape[2]
    if mask.dim() == 2 and mask.shape == (query.shape[0], k_len):  # padding, as for flash attention
        mask = mask[:, None, None, :].bool()
    if mask.shape[-1] > k_len:
        mask = mask[..., :k_len]
    if mask.dim() == 4 and mask.shape[2] > 1 and mask.stride(2) == 0:
        mask = mask[:, :, :1]  # all queries can see the same keys; kernels use this
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        mask = mask.to(query.dtype)
    return mask


def _mask_of_indices(indices: Tensor, count: int) -> Tensor:
    """[..., Lq, count]: True at ``indices`` [..., Lq, k]; negative indices are ignored."""
    mask = torch.zeros(*indices.shape[:-1], count + 1, dtype=torch.bool, device=indices.device)
    columns = torch.where(indices < 0, count, indices.long())  # the last column is cut off
    return mask.scatter(-1, columns, True)[..., :count]


def _mask_of_blocks(indices: Tensor, size: int, query: Tensor, key: Tensor) -> Tensor:
    """[B, Hq, Lq, Lk]: True at the keys of the blocks ``indices`` [B, G, Lq, k]."""
    k_len = key.shape[2]
    mask = _mask_of_indices(indices, -(-k_len // size)).repeat_interleave(size, dim=-1)[..., :k_len]
    return mask.repeat_interleave(query.shape[1] // indices.shape[1], dim=1)


def _restrict(chosen: Tensor, mask: Tensor | None) -> Tensor:
    """The mask, restricted to the pairs of a boolean ``chosen``."""
    return chosen if mask is None else _intersect(chosen, mask)


def _intersect(keep: Tensor, mask: Tensor) -> Tensor:
    """The pairs that both ``keep``, a boolean mask, and a boolean or floating mask allow."""
    if mask.dtype is torch.bool:
        return keep & mask
    return torch.where(keep, mask, -torch.inf)


def _add_bias(bias: Tensor, mask: Tensor | None, key: Tensor) -> Tensor:
    """The mask with a bias added, as a floating mask."""
    bias = bias[..., : key.shape[2]]
    if mask is None:
        return bias
    return _intersect(mask, bias) if mask.dtype is torch.bool else bias + mask


def _attend(call: _Call, visible: _Visible) -> tuple[Tensor, Tensor | None]:
    """[B, Lq, Hq, Dv], and the weights if requested."""
    q_len, k_len = call.query.shape[2], call.key.shape[2]
    key, value, mask = call.key, call.value, visible.mask
    left, right, offset = visible.left, visible.right, visible.offset
    visible_keys = k_len  # the keys that any query can see
    # The operator supports two offsets: 0, and the last query at the last key. The table of a
    # compact bias has one of these; a window of another offset becomes a part of the mask.
    if call.compact is not None:
        if (left, right) != (-1, -1) and offset != call.compact.offset:
            mask = _add_window(call, visible)
            left = right = -1
        offset = call.compact.offset
    if (left, right) != (-1, -1) and offset not in (0, k_len - q_len):
        if right == 0 and offset + q_len <= k_len:  # no query can see the keys after its own
            visible_keys = offset + q_len
            key, value = key[:, :, :visible_keys], value[:, :, :visible_keys]
            mask = mask if mask is None or mask.shape[-1] == 1 else mask[..., :visible_keys]
        else:
            mask = _add_window(call, visible)
            left = right = -1
    is_causal = mask is None and (left, right) == (-1, 0)
    results = scaled_dot_product_attention(
        call.query,
        key,
        value,
        mask,
        dropout_p=call.dropout_p,
        is_causal=is_causal,
        scale=call.scale,
        enable_gqa=call.query.shape[1] != key.shape[1],
        window=None if is_causal or (left, right) == (-1, -1) else (left, right),
        softcap=call.softcap,
        sinks=call.sinks,
        relative_bias=None if call.compact is None else call.compact.relative_bias,
        causal_alignment="upper_left" if offset == 0 else "bottom_right",
        return_lse=call.row_sinks is not None,
        need_weights=call.need_weights,
    )
    out, *further_results = results if isinstance(results, tuple) else (results,)
    weights = further_results[-1] if call.need_weights else None
    if call.row_sinks is not None:
        out, share_of_keys = _add_row_sinks(out, further_results[0], call.row_sinks)
        if weights is not None:
            weights = (weights * share_of_keys[..., None]).to(weights.dtype)
    if weights is not None and visible_keys < k_len:
        weights = torch.nn.functional.pad(weights, (0, k_len - visible_keys))
    return out.transpose(1, 2).contiguous(), weights


def _add_window(call: _Call, visible: _Visible) -> Tensor:
    """The mask and the window as one mask."""
    batch, _, q_len, _ = call.query.shape
    shape = (batch, 1, q_len, call.key.shape[2])
    pattern = Pattern(visible.left, visible.right)
    window = dense_mask(shape, pattern, visible.offset, call.query.device)
    return window if visible.mask is None else _intersect(window, visible.mask)


def _attend_packed(call: _Call, visible: _Visible, q_starts: Tensor, k_starts: Tensor) -> Tensor:
    """[B, Lq, Hq, Dv] of sequences that are packed in the rows of all entries."""
    batch, _, q_len, _ = call.query.shape
    query, key, value = (
        x.transpose(1, 2).flatten(0, 1) for x in (call.query, call.key, call.value)
    )
    results = varlen_attention(
        query,
        key,
        value,
        q_starts,
        k_starts,
        dropout_p=call.dropout_p,
        scale=call.scale,
        window=(visible.left, visible.right),
        softcap=call.softcap,
        sinks=call.sinks,
        causal_alignment="bottom_right",
        return_lse=call.row_sinks is not None,
    )
    if call.row_sinks is None:
        out = results
    else:
        out, lse = results  # [B · Lq, Hq, Dv], [Hq, B · Lq]
        sinks = call.row_sinks.transpose(0, 1).flatten(1)
        out = _add_row_sinks(out.transpose(0, 1), lse, sinks)[0].transpose(0, 1)
    return out.unflatten(0, (batch, q_len)).contiguous()


def _add_row_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add a sink to each row of [..., L, Dv]; return out, and the weight of all keys [..., L].

    The operators support one sink per head only. A sink is a key with the value 0, which is merged
    with the keys; a sink of inf leaves the keys no weight.
    """
    zero_values, infinite_sink = out.new_zeros(1).expand_as(out), sinks == torch.inf
    finite = torch.where(infinite_sink, 0.0, sinks.to(lse.dtype))
    out, total = merge_states(out, lse, zero_values, finite.contiguous())
    keys_have_no_weight = infinite_sink | (lse == -torch.inf)
    share_of_keys = torch.where(keys_have_no_weight, 0.0, torch.exp(lse - total))
    return torch.where(infinite_sink[..., None], 0.0, out), share_of_keys


def _logsumexp(sinks: Tensor) -> Tensor:
    """The log-sum-exp of [..., n]. Where it is infinite it passes no gradient: it would be NaN."""
    total = sinks.detach().logsumexp(-1)
    infinite = total.isinf()
    finite = torch.where(infinite[..., None], 0.0, sinks).logsumexp(-1)
    return torch.where(infinite, total, finite)


def _separate_sequences(
    call: _Call, visible: _Visible, q_starts: Tensor, k_starts: Tensor
) -> _Visible:
    """The visible pairs of packed sequences as a mask [B, 1, Lq, Lk] of all rows."""
    batch = call.query.shape[0]
    q_sequence, q_distance = _sequences_of_rows(q_starts, batch, call.query.shape[2])
    k_sequence, k_distance = _sequences_of_rows(k_starts, batch, call.key.shape[2])
    distance = q_distance[:, :, None] - k_distance[:, None, :]
    keep = in_window(distance, visible.left, visible.right)
    keep = (keep & (q_sequence[:, :, None] == k_sequence[:, None, :]))[:, None]
    return _Visible(keep if visible.mask is None else _intersect(keep, visible.mask))


def _sequences_of_rows(starts: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """The sequence of each row, and its distance from the sequence's end. Both [B, L]."""
    rows = torch.arange(batch * length, device=starts.device, dtype=starts.dtype)
    sequence = torch.searchsorted(starts[1:], rows, right=True)
    ends = torch.nn.functional.pad(starts[1:], (0, 1), value=batch * length)  # for other rows
    return sequence.view(batch, length), (rows - ends[sequence]).view(batch, length)
