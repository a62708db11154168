"""The stacks of a Transformer, as in ``torch.nn``, on fused attention and with a decoder cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastattn import compat
from fastattn.compat import runs_eagerly
from fastattn.nn._cache import DecoderCache, KeyValueCache
from fastattn.nn._causal import convert_to_layer_attention
from fastattn.nn._context import ContextParallel
from fastattn.nn._encoder_layer import FusedEncoder, FusedEncoderLayer
from fastattn.nn._leaf import call_as_leaf, is_symbolic
from fastattn.nn._replacement import replace_linear, replace_mha


class TransformerEncoderLayer(FusedEncoderLayer, nn.TransformerEncoderLayer, ContextParallel):
    """``torch.nn.TransformerEncoderLayer`` on fused attention.

    Constructor, ``forward``, parameters and initial values are PyTorch's. ``is_causal=True`` needs
    no ``src_mask`` here; keys that ``src_key_padding_mask`` hides are not computed. In eval mode,
    without gradients and masks, a layer is one native call where that is faster.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        convert_to_layer_attention(self.self_attn)
        replace_linear(self)


class TransformerEncoder(FusedEncoder, nn.TransformerEncoder, ContextParallel):
    """``torch.nn.TransformerEncoder`` on fused attention, a stack of copies of any encoder layer.

    In eval mode without gradients, padding at the end of sequences is not computed.
    """

    def __init__(
        self,
        encoder_layer: nn.TransformerEncoderLayer,
        num_layers: int,
        norm: nn.Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
    ) -> None:
        super().__init__(encoder_layer, num_layers, norm, enable_nested_tensor, mask_check)
        replace_mha(self)  # the attention of layers of PyTorch's own class

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """As ``torch.nn.TransformerEncoder``, but a batch may consist of padding only."""
        if is_symbolic(src):
            return call_as_leaf(self, src, mask, src_key_padding_mask, is_causal)
        first_layer: Any = self.layers[0]
        if first_layer.training or mask is not None or _can_be_nested(src_key_padding_mask, src):
            return super().forward(src, mask, src_key_padding_mask, is_causal)
        for layer in self.layers:
            src = layer(src, src_key_padding_mask=src_key_padding_mask, is_causal=bool(is_causal))
        return src if self.norm is None else self.norm(src)


def _can_be_nested(padding: Tensor | None, src: Tensor) -> bool:
    """Whether PyTorch, which may store the sequences without padding, reads this mask correctly.

    It cannot pad empty sequences again, takes every number but 0 for padding, and fixes the sizes
    in a graph of torch.jit.trace.
    """
    if padding is None or padding.numel() > src.numel():  # too large: PyTorch raises later
        return True
    if not runs_eagerly(padding):
        return False
    hides = padding if padding.dtype == torch.bool else padding == float("-inf")
    return not hides.all() and bool((hides == padding.bool()).all())


class TransformerDecoderLayer(nn.TransformerDecoderLayer, ContextParallel):
    """``torch.nn.TransformerDecoderLayer`` on fused attention, with a cache.

    Constructor, parameters and initial values are PyTorch's. ``tgt_is_causal=True`` needs no
    ``tgt_mask`` here.
    """

    self_attn: Any  # LayerAttention
    multihead_attn: Any

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        convert_to_layer_attention(self.self_attn)
        convert_to_layer_attention(self.multihead_attn)
        replace_linear(self)

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
        *,
        cache: tuple[KeyValueCache, KeyValueCache] | None = None,
    ) -> Tensor:
        """As ``torch.nn.TransformerDecoderLayer``; ``cache`` as in :class:`TransformerDecoder`."""
        masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
        if is_symbolic(tgt):
            flags = (tgt_is_causal, memory_is_causal)
            return call_as_leaf(self, tgt, memory, *masks, *flags, cache=cache)
        if cache is not None and memory_is_causal:
            raise ValueError("memory_is_causal is not supported with a cache: pass memory_mask")
        self_cache, cross_cache = (None, None) if cache is None else cache

        def attend_to_targets(x: Tensor) -> Tensor:
            """Self-attention and dropout."""
            masks = {"key_padding_mask": tgt_key_padding_mask, "attn_mask": tgt_mask}
            flags = {"is_causal": tgt_is_causal, "need_weights": False}
            return self.dropout1(self.self_attn(x, x, x, **masks, **flags, cache=self_cache)[0])

        def attend_to_memory(x: Tensor) -> Tensor:
            """Cross-attention and dropout."""
            masks = {"key_padding_mask": memory_key_padding_mask, "attn_mask": memory_mask}
            flags = {"is_causal": memory_is_causal, "need_weights": False}
            out = self.multihead_attn(x, memory, memory, **masks, **flags, cache=cross_cache)[0]
            return self.dropout2(out)

        x = tgt
        if self.norm_first:
            x = x + attend_to_targets(self.norm1(x))
            x = x + attend_to_memory(self.norm2(x))
            return x + compat.feed_forward(self, self.norm3(x))
        x = self.norm1(x + attend_to_targets(x))
        x = self.norm2(x + attend_to_memory(x))
        return self.norm3(x + compat.feed_forward(self, x))


class TransformerDecoder(nn.TransformerDecoder, ContextParallel):
    """``torch.nn.TransformerDecoder`` on fused attention, with a cache for decoding in steps.

    ::

        cache = decoder.new_cache()
        for tgt in steps:                                       # [N, 1, E], or several positions
            out = decoder(tgt, memory, tgt_is_causal=True, cache=cache)

    gives, up to rounding, the result of one call ``decoder(torch.cat(steps, 1), memory,
    tgt_is_causal=True)``, without recomputing keys and values of earlier positions and the memory.
    """

    def __init__(
        self,
        decoder_layer: nn.TransformerDecoderLayer,
        num_layers: int,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__(decoder_layer, num_layers, norm)
        replace_mha(self)

    def new_cache(self) -> DecoderCache:
        """Return an empty cache, for one batch and one memory."""
        for layer in self.layers:
            if not isinstance(layer, TransformerDecoderLayer):
                raise TypeError(
                    "a cache needs layers of fastattn.nn.TransformerDecoderLayer, "
                    f"got {type(layer).__name__}"
                )
        return DecoderCache(len(self.layers))

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
        *,
        cache: DecoderCache | None = None,
    ) -> Tensor:
        """Pass the targets through all layers.

        Args:
            tgt: [N, T, E], [T, N, E] without ``batch_first``, or [T, E]. With a cache, the T
                positions that follow the cached positions.
            memory: the encoder's output. With a cache it is read in the first call only.
            tgt_mask: [T, T] or [N·H, T, T]. With a cache [T, S], with S all positions so far.
            memory_mask, memory_key_padding_mask, memory_is_causal: as in PyTorch.
            tgt_key_padding_mask: [N, T]. With a cache [N, S].
            tgt_is_causal: whether position i can see only positions up to i; needs no mask. None:
                True if ``tgt_mask`` is that mask.
            cache: from :meth:`new_cache`. It is filled, and gradients flow through it.

        Returns:
            The result, in the shape of ``tgt``.
        """
        masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
        if is_symbolic(tgt):
            flags = (tgt_is_causal, memory_is_causal)
            return call_as_leaf(self, tgt, memory, *masks, *flags, cache=cache)
        if cache is None:
            return super().forward(tgt, memory, *masks, tgt_is_causal, memory_is_causal)
        if len(cache.layers) != len(self.layers):
            raise ValueError(
                f"the cache has {len(cache.layers)} layers, but the decoder has {len(self.layers)}"
            )
        x = tgt
        for layer, caches in zip(self.layers, cache.layers, strict=True):
            x = layer(x, memory, *masks, bool(tgt_is_causal), memory_is_causal, cache=caches)
        sequence_first = tgt.ndim == 2 or not self.layers[0].self_attn.batch_first
        for self_cache, _ in cache.layers:
            self_cache.advance(tgt.shape[0 if sequence_first else 1])
        return x if self.norm is None else self.norm(x)
