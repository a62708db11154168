"""Models of transformers on one rank's rows of a sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.distributed import attention
from fastattn.distributed._columns import gather_columns
from fastattn.integrations.transformers._attention import check_others
from fastattn.integrations.transformers._masks import StructuredMask
from fastattn.integrations.transformers._patterns import Pattern, pattern_of
from fastattn.integrations.transformers._recording import weights_are_recorded
from fastattn.nn._context import Context

_NAME = "attn_implementation='fastattn_context_parallel'"


class TransformersContext(Context):
    """How ranks share the rows of a sequence; its methods are what transformers registers."""

    def attention_forward(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """The attention function for the rows of this rank and the keys of all ranks."""
        check_others(module, kwargs)
        if output_attentions or weights_are_recorded(module):
            raise NotImplementedError(f"{_NAME} cannot return attention weights")
        if isinstance(attention_mask, StructuredMask):
            pattern, padding = attention_mask.pattern, attention_mask.padding
        elif attention_mask is None:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            size = -1 if sliding_window is None else sliding_window - 1
            pattern, padding = Pattern(left=size, right=0 if causal else size), None
        else:
            raise NotImplementedError(
                f"{_NAME}: {type(module).__name__} changes its mask, so it must run on one rank"
            )
        sinks_dtype = torch.promote_types(query.dtype, torch.float32)
        out = attention(
            query,
            key,
            value,
            group=self.group,
            method=self.method,
            layout=self.layout,
            attn_mask=None if padding is None else padding[:, None, None, :],
            window=(pattern.left, pattern.right),
            softcap=softcap,
            sinks=None if s_aux is None else s_aux.to(sinks_dtype),
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(1, 2).contiguous(), None

    def attention_mask(
        self,
        batch_size: int,
        q_length: int | None = None,
        kv_length: int = 0,
        q_offset: int | Tensor = 0,
        kv_offset: int = 0,
        mask_function: Callable[..., Any] | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> StructuredMask:
        """The pattern of ``mask_function``, in positions of the whole sequence, and all padding."""
        positions = kwargs.get("cache_position")  # transformers 5.0 passes it instead of q_length
        if positions is not None:
            q_length, q_offset = len(positions), positions[0] if len(positions) else 0
        if int(q_offset) or kv_offset:
            raise NotImplementedError(f"{_NAME} has no cache of keys: call with use_cache=False")
        pattern = Pattern(right=0) if mask_function is None else pattern_of(mask_function)
        if pattern is None:
            raise NotImplementedError(f"{_NAME} supports only causal masks and windows")
        if pattern.segments is not None:
            raise NotImplementedError(
                f"{_NAME}: transformers interprets jumps of position_ids as packed sequences; pass "
                "attention_mask=torch.ones_like(input_ids)"
            )
        padding = None
        if attention_mask is not None:
            padding = gather_columns(attention_mask.bool(), self.group, self.layout)
            padding = None if bool(padding.all()) else padding
        assert q_length is not None
        shape = (batch_size, 1, q_length, kv_length)
        device = torch.device(kwargs.get("device", "cpu"))
        return StructuredMask(shape, pattern, offset=0, padding=padding, device=device)
