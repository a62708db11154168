"""The attention inside Transformer layers: causal without a mask, and with a cache."""

from __future__ import annotations

from torch import Tensor, nn

from fastattn.compat import mha_is_batched
from fastattn.masks import Mask
from fastattn.nn._cache import KeyValueCache
from fastattn.nn.mha import MultiheadAttention, Options, keep_forward_called


class LayerAttention(MultiheadAttention):
    """``MultiheadAttention`` whose ``is_causal=True`` needs no mask, with an optional cache."""

    _causal_needs_mask = False

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
        """As ``MultiheadAttention``; with a cache, the positions follow the cached positions."""
        options = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        if cache is None:
            return super().forward(query, key, value, *options, mask=mask)
        if self._watch is not None:
            implementation = LayerAttention.forward
            return self._watch(
                implementation, self, query, key, value, *options, mask=mask, cache=cache
            )
        if self._context is not None:
            self._check_context_call(query, need_weights, cache)
        # Without the mask, because the check of its shape does not know of cached keys.
        batched = mha_is_batched(query, key, value, key_padding_mask, None, self.num_heads)
        flags = (is_causal, need_weights, average_attn_weights)
        record = Options(key_padding_mask, attn_mask, mask, *flags)
        return self._forward_general(query, key, value, record, batched, cache)


def convert_to_layer_attention(attention: nn.MultiheadAttention) -> None:
    """Change the class of ``attention`` in place, which keeps PyTorch's initial parameters."""
    attention.__class__ = LayerAttention
    attention.register_forward_pre_hook(keep_forward_called)
