"""Scaled dot-product attention: the specification, and the way from PyTorch's arguments to it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastattn.autograd import attention
from fastattn.library import Operator
from fastattn.ops import _sdpa_arguments as check

__all__ = ["scaled_dot_product_attention"]

_SEEDS = 2**63 - 1
_NO_WEIGHTS, _PER_HEAD, _AVERAGED = 0, 1, 2


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
    causal_alignment: str = "upper_left",
    generator: torch.Generator | None = None,
    return_lse: bool = False,
    need_weights: bool = False,
    average_weights: bool = False,
) -> Any:
    operator, args, folding = prepare(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        causal_alignment=causal_alignment,
        generator=generator,
        return_lse=return_lse,
        need_weights=need_weights,
        average_weights=average_weights,
    )
    if args[11] > 0:
        args = (*args[:5], _draw_seed(query.device, generator), *args[6:])
    out, lse, weights = operator(*args)
    results = [folding.restore(out)]
    if return_lse:
        results.append(folding.restore(lse))
    if need_weights:
        results.append(folding.restore(weights, has_head=not average_weights))
    return tuple(results) if len(results) > 1 else results[0]


def prepare(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    scale: Any = None,
    enable_gqa: Any = False,
    *,
    window: Any = None,
    softcap: Any = None,
    alibi_slopes: Any = None,
    causal_alignment: Any = "upper_left",
    generator: Any = None,
    return_lse: Any = False,
    need_weights: Any = False,
    average_weights: Any = False,
) -> tuple[Operator, tuple[Any, ...], check.Folding]:
    """Validate, and return the operator, the primitive's arguments without the seed, the folding.

    Everything that can be wrong is found here, before anything is computed.
    """
    check.check_tensors(query, key, value)
    for name, flag in (
        ("is_causal", is_causal),
        ("enable_gqa", enable_gqa),
        ("return_lse", return_lse),
        ("need_weights", need_weights),
        ("average_weights", average_weights),
    ):
        check.check_bool(name, flag)
    dropout_p = check.check_dropout(dropout_p)
    if generator is not None:
        check.check_generator(generator, query.device)
    if attn_mask is not None and is_causal:
        raise RuntimeError(
            "scaled_dot_product_attention: attn_mask must be None when is_causal=True; "
            "window=(-1, 0) adds the causal exclusion to a mask"
        )
    if average_weights and not need_weights:
        raise ValueError(
            "scaled_dot_product_attention: average_weights=True needs need_weights=True"
        )

    query, key, value = check.autocast(query, key, value)
    check.check_dtypes(query, key, value)
    query, key, value, folding = check.fold(query, key, value, enable_gqa)
    if attn_mask is not None:
        attn_mask = _mask_under_autocast(attn_mask, query)
        attn_mask = check.fold_mask(attn_mask, query, key.shape[2], folding)
    if alibi_slopes is not None:
        alibi_slopes = check.fold_slopes(alibi_slopes, query, folding)

    bottom_right = check.check_alignment(causal_alignment)
    offset = key.shape[2] - query.shape[2] if bottom_right else 0
    left, right = check.check_window(window, is_causal)
    cap = 0.0 if softcap is None else check.check_softcap(softcap)
    weights = (_AVERAGED if average_weights else _PER_HEAD) if need_weights else _NO_WEIGHTS
    if query.shape[3] == 0:  # every score is 0, also with one dimension of zeros
        query, key = (torch.nn.functional.pad(x, (0, 1)) for x in (query, key))
        scale = 1.0
    scale = 1.0 / math.sqrt(query.shape[3]) if scale is None else check.check_float("scale", scale)
    tensors = (query, key, value, attn_mask, alibi_slopes, None)
    return attention, (*tensors, scale, offset, left, right, cap, dropout_p, weights), folding


def _mask_under_autocast(mask: Any, query: Tensor) -> Any:
    """A 16-bit mask follows autocast; float32 is allowed with any query, and stays exact."""
    if isinstance(mask, Tensor) and mask.dtype in (torch.float16, torch.bfloat16):
        return check.autocast(query, mask)[1]
    return mask


def _draw_seed(device: torch.device, generator: torch.Generator | None) -> Tensor:
    return torch.randint(_SEEDS, (), dtype=torch.int64, device=device, generator=generator)
