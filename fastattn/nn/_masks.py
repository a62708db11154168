"""Converts the masks of ``torch.nn.MultiheadAttention`` to the single mask of
``scaled_dot_product_attention``.

Two things change: the polarity (True is *ignored* there, *takes part* here) and the shape, which
stays as small as the masks allow: padding alone is [N, 1, 1, S], never [N, H, L, S].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.compat import canonical_mask, is_eager_on_cpu


def check_mask_dtypes(
    key_padding_mask: Tensor | None, attn_mask: Tensor | None, query_dtype: torch.dtype
) -> None:
    """Raise and warn about the masks' dtypes as PyTorch does, by passing it empty masks."""
    masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
    for name, mask in masks.items():
        if mask is not None and not isinstance(mask, Tensor):
            raise TypeError(f"{name} must be a Tensor or None, got {type(mask).__name__}")
    dtypes = {mask.dtype for mask in masks.values() if mask is not None}
    compatible = len(dtypes) < 2 and all(d == torch.bool or d.is_floating_point for d in dtypes)
    if compatible or canonical_mask is None:
        return
    padding = None if key_padding_mask is None else key_padding_mask.new_empty(0)
    attention = None if attn_mask is None else attn_mask.new_empty(0)
    # PyTorch checks twice: in nn.MultiheadAttention, then F.multi_head_attention_forward checks
    # the result.
    for _ in range(2):
        padding = canonical_mask(
            mask=padding,
            mask_name="key_padding_mask",
            other_type=None if attention is None else attention.dtype,
            other_name="attn_mask",
            target_type=query_dtype,
            check_other=attention is not None,
        )
        attention = canonical_mask(
            mask=attention,
            mask_name="attn_mask",
            other_type=None,
            other_name="",
            target_type=query_dtype,
            check_other=False,
        )


def is_causal_mask(mask: Tensor) -> bool:
    """Whether ``mask`` [L, S] is exactly "no key after the query", so attention need not read it.

    False if its values cannot be read (tracing, transforms, other devices), or if it is learned.
    """
    if mask.dim() != 2 or mask.requires_grad or not is_eager_on_cpu(mask):
        return False
    future = torch.ones_like(mask, dtype=torch.bool).triu_(1)
    if mask.dtype == torch.bool:
        return torch.equal(mask, future)
    return torch.equal(mask, torch.zeros_like(mask).masked_fill_(future, float("-inf")))


def append_rows(x: Tensor, learned: Tensor | None, zeros: bool) -> Tensor:
    """Append the rows of ``add_bias_kv`` and ``add_zero_attn`` to keys or values [N, H, S, D]."""
    batch, heads, _, width = x.shape
    rows = [x]
    if learned is not None:
        rows.append(learned.view(1, heads, 1, width).expand(batch, -1, -1, -1))
    if zeros:
        rows.append(x.new_zeros((batch, heads, 1, width)))
    return torch.cat(rows, dim=2) if len(rows) > 1 else x


def merge_masks(
    key_padding_mask: Tensor | None,  # [N, S]
    attn_mask: Tensor | None,  # [L, S] or [N·H, L, S]
    *,
    batch: int,
    num_heads: int,
    q_len: int,
    k_len: int,
    appended: int,
) -> Tensor | None:
    """Return one mask [N|1, H|1, L|1, S + appended], bool (True takes part) or floating (added),
    or None.

    ``appended`` counts the keys that ``add_bias_kv`` and ``add_zero_attn`` append; no mask hides
    them. A floating padding mask that holds only 0 and -inf, which the layers of
    ``torch.nn.Transformer`` create from a boolean one, becomes boolean again.

    Raises:
        RuntimeError: ``attn_mask`` has the wrong shape.
        AssertionError: ``key_padding_mask`` has the wrong shape.
    """
    attention = _attention_mask(attn_mask, batch, num_heads, q_len, k_len, appended)
    padding = _padding_mask(key_padding_mask, batch, k_len, appended)
    if attention is None or padding is None:
        return padding if attention is None else attention
    if padding.dtype == torch.bool:
        if attention.dtype == torch.bool:
            return attention & padding
        return torch.where(padding, attention, float("-inf"))
    if attention.dtype == torch.bool:
        return torch.where(attention, padding, float("-inf"))
    return attention + padding


def _attention_mask(
    mask: Tensor | None, batch: int, num_heads: int, q_len: int, k_len: int, appended: int
) -> Tensor | None:
    """Invert a mask: [L, S] -> [1, 1, L, S + appended], [N·H, L, S] -> [N, H, L, S + appended]."""
    if mask is None:
        return None
    expected = (q_len, k_len) if mask.dim() == 2 else (batch * num_heads, q_len, k_len)
    if mask.shape != expected:
        raise RuntimeError(
            f"The shape of the {mask.dim()}D attn_mask is {mask.shape}, but should be {expected}."
        )
    if appended:
        mask = F.pad(mask, (0, appended))
    if mask.dtype == torch.bool:
        mask = mask.logical_not()
    batches, heads = (1, 1) if mask.dim() == 2 else (batch, num_heads)
    return mask.reshape(batches, heads, q_len, k_len + appended)


def _padding_mask(mask: Tensor | None, batch: int, k_len: int, appended: int) -> Tensor | None:
    """Invert a padding mask: [N, S] -> [N, 1, 1, S + appended]."""
    if mask is None:
        return None
    if appended:
        mask = F.pad(mask, (0, appended))
    for dim, size in enumerate((batch, k_len + appended)):
        if mask.shape[dim] != size:
            raise AssertionError(
                f"Expected key_padded_mask.shape[{dim}] to be {size}, but got {mask.shape[dim]}"
            )
    if mask.dtype == torch.bool:
        mask = mask.logical_not()
    elif _only_excludes(mask):
        mask = mask == 0
    return mask[:, None, None, :]


def _only_excludes(mask: Tensor) -> bool:
    """Whether a floating mask holds only 0 and -inf. False if its values cannot be read."""
    if mask.requires_grad or not is_eager_on_cpu(mask):
        return False
    return bool(((mask == 0) | (mask == float("-inf"))).all())
