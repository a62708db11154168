"""The attention inside Transformer layers: causal without a mask, and with a cache."""

from __future__ import annotations

from torch import Tensor, nn

from fastattn.compat import mha_is_batched
from fastattn.masks import Mask
from fastattn.nn._cache import KeyValueCache
from fastattn.nn._leaf import is_symbolic
from fastattn.nn._nested import nested_attention
from fastattn.nn._small import self_attention
from fastattn.nn.mha import MultiheadAttention, keep_forward_called


class LayerAttention(MultiheadAttention):
    """``MultiheadAttention`` whose ``is_causal=True`` needs no mask, with an optional cache."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        mask: Mask | None = None,
        cache: KeyValueCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        rest = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        if cache is None and (is_symbolic(query) or not (is_causal and attn_mask is None)):
            return super().forward(query, key, value, *rest, mask=mask)
        if self._watch is not None:
            own = LayerAttention.forward
            return self._watch(own, self, query, key, value, *rest, mask=mask, cache=cache)
        if self._context is not None:
            self._check_call(query, need_weights, cache)
        if query.is_nested:
            masks = (key_padding_mask, None)
            flags = (need_weights, average_attn_weights, True)
            return nested_attention(self, query, key, value, *masks, *flags, mask)
        batched = mha_is_batched(query, key, value, key_padding_mask, None, self.num_heads)
        plain = cache is None and mask is None and self._context is None
        if plain and query is key and key is value and batched and not need_weights:
            small = self_attention(self, query, key_padding_mask, True)
            if small is not None:
                return small, None
        given = (key_padding_mask, attn_mask, is_causal, need_weights, average_attn_weights)
        return self._general(query, key, value, *given, batched, cache, mask)


def into_layer_attention(attention: nn.MultiheadAttention) -> None:
    """Change the class in place, so parameters and their random numbers stay PyTorch's."""
    attention.__class__ = LayerAttention
    attention.register_forward_pre_hook(keep_forward_called)
