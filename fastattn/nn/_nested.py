"""Attention over NestedTensors: jagged ones, and the strided ones that
``torch.nn.TransformerEncoder`` creates from a padded batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastattn.checks import is_jagged
from fastattn.compat import children_of
from fastattn.masks import Mask
from fastattn.nn._projections import project, project_out
from fastattn.ops._jagged import packed_rows, same_lengths
from fastattn.ops.sdpa import scaled_dot_product_attention
from fastattn.ops.varlen import varlen_attention


def nested_attention(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    need_weights: bool,
    average_attn_weights: bool,
    is_causal: bool = False,
    mask: Mask | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention over N sequences of lengths L_n, without storing or computing any padding.

    The jagged layout supports gradients and any attention without mask tensors and appended keys;
    ``mask``, of :mod:`fastattn.masks`, excludes returning the weights, which need padding.
    The strided layout supports what ``torch.nn.MultiheadAttention`` supports. Returns the output,
    nested as ``query``, and the weights padded with 0, [N, (H,) max L_n, max S_n], or None.

    Raises:
        AssertionError: an unsupported NestedTensor.
    """
    jagged = is_jagged(query)
    reason = (_why_not_jagged if jagged else _why_not_strided)(
        module, query, key, value, key_padding_mask, attn_mask
    )
    if mask is not None and not reason and (need_weights or not jagged):
        condition = "need_weights must be False" if jagged else "query must be jagged"
        reason = f"MultiheadAttention: {condition} with mask and NestedTensor"
    if reason:
        raise AssertionError(reason)
    rows, q_starts = _pack(query)
    if key is query:
        keys, k_starts = rows, q_starts
    else:
        keys, k_starts = _pack(key)
    values = keys if value is key else _pack(value)[0]
    # All rows are one batch of the projections, [1, H, T, D]; packed sequences are [T, H, D].
    heads = project(module, rows, keys, values, batch_dim=0)
    q, k, v = (x[0].transpose(0, 1) for x in heads)
    bias_module = children_of(module).get("relative_bias")
    bias = None if bias_module is None else bias_module()
    dropout = module.dropout if module.training else 0.0
    if need_weights:
        out, weights = _attend_padded(
            q, k, v, q_starts, k_starts, dropout, is_causal, bool(average_attn_weights), bias
        )
    else:
        weights = None
        out = varlen_attention(
            q,
            k,
            v,
            q_starts,
            k_starts,
            dropout_p=dropout,
            is_causal=is_causal,
            relative_bias=bias,
            mask=mask,
        )
    result = project_out(module, out.transpose(0, 1)[None], batch_dim=0)[0]
    if jagged:
        return torch.nested.nested_tensor_from_jagged(result, q_starts), weights
    sequences = result.split(q_starts.diff().tolist())
    return torch.nested.as_nested_tensor(list(sequences), layout=torch.strided), weights


def _pack(nested: Tensor) -> tuple[Tensor, Tensor]:
    """Pack N sequences of [L_n, E] to [1, T, E]; return the start of each as well, [N + 1]."""
    if is_jagged(nested):
        rows, starts = packed_rows(nested)
        return rows[None], starts
    sequences = nested.unbind()
    lengths = torch.tensor([0, *map(len, sequences)], device=nested.device)
    return torch.cat(sequences)[None], lengths.cumsum(0)


def _attend_padded(
    q: Tensor,  # [Tq, H, D]
    k: Tensor,  # [Tk, H, D]
    v: Tensor,
    q_starts: Tensor,  # [N + 1]
    k_starts: Tensor,
    dropout: float,
    is_causal: bool,
    average: bool,
    relative_bias: Any,
) -> tuple[Tensor, Tensor]:
    """Attend over padded rows, for the weights, which are padded in any case."""
    q, q_valid = _pad(q, q_starts)
    (k, k_valid), (v, _) = _pad(k, k_starts), _pad(v, k_starts)
    out, weights = scaled_dot_product_attention(
        q,
        k,
        v,
        (q_valid[:, :, None] & k_valid[:, None])[:, None],
        dropout_p=dropout,
        window=(-1, 0) if is_causal else None,  # as is_causal, but allows a mask
        relative_bias=relative_bias,
        need_weights=True,
        average_weights=average,
    )
    return out.transpose(1, 2)[q_valid], weights


def _pad(rows: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Pad [T, H, D] to [N, H, L, D]; return which of its rows are not padding as well, [N, L]."""
    lengths = starts.diff()
    valid = torch.arange(int(lengths.max()), device=rows.device) < lengths[:, None]
    padded = rows.new_zeros(*valid.shape, *rows.shape[1:])
    return padded.masked_scatter(valid[..., None, None], rows).transpose(1, 2), valid


def _why_not_jagged(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
) -> str:
    """Why jagged tensors cannot take these arguments, or ""."""
    name = "MultiheadAttention"
    for argument, x, width in (
        ("query", query, module.embed_dim),
        ("key", key, module.kdim),
        ("value", value, module.vdim),
    ):
        if not is_jagged(x):
            return f"{name}: {argument} must be jagged, as query is"
        if x.dim() != 3 or x.shape[2] != width:
            return f"{name}: a jagged {argument} must be [N, *, {width}], got {tuple(x.shape)}"
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return f"{name}: query, key and value must have the same number of sequences"
    if not same_lengths(key, value):
        return f"{name}: key and value must have the same lengths"
    unsupported = {
        "key_padding_mask must be None": key_padding_mask is not None,
        "attn_mask must be None": attn_mask is not None,
        "add_bias_kv must be False": module.bias_k is not None,
        "add_zero_attn must be False": module.add_zero_attn,
    }
    requirement = next((reason for reason, holds in unsupported.items() if holds), "")
    return requirement and f"{name}: {requirement} if query is jagged"


def _why_not_strided(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
) -> str:
    """PyTorch's error message if it would reject this NestedTensor, else empty."""
    tensors = (
        query,
        module.in_proj_weight,
        module.in_proj_bias,
        module.out_proj.weight,
        module.out_proj.bias,
    )
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    reasons = {
        f"input not batched; expected query.dim() of 3 but got {query.dim()}": query.dim() != 3,
        "torch.backends.mha.get_fastpath_enabled() was not True": (
            not torch.backends.mha.get_fastpath_enabled()
        ),
        "non-self attention was used (query, key, and value are not the same Tensor)": (
            query is not key or key is not value
        ),
        "in_proj_weight was None": module.in_proj_weight is None,
        "in_proj_bias was None": module.in_proj_bias is None,
        "training is enabled": module.training,
        "self.num_heads is not even": module.num_heads % 2 != 0,
        "batch_first was not True": not module.batch_first,
        "self.bias_k was not None": module.bias_k is not None,
        "add_zero_attn was enabled": module.add_zero_attn,
        "supplying both src_key_padding_mask and src_mask at the same time is not supported with "
        "NestedTensor input": (key_padding_mask is not None or attn_mask is not None),
        "some Tensor argument has_torch_function": query.layout != torch.strided,
        "autocast is enabled": torch.is_autocast_enabled(),
        "grad is enabled and at least one of query or the input/output projection weights or "
        "biases requires_grad": needs_grad,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), "")
    return reason and (
        "MultiheadAttention does not support NestedTensor outside of its fast path. "
        f"The fast path was not hit because {reason}"
    )
