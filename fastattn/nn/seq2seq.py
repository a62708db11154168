"""``Transformer``: encoder and decoder, on vectors as in ``torch.nn``, or on tokens."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastattn.checks import check_dense
from fastattn.compat import is_eager_on_cpu
from fastattn.nn._cache import DecoderCache
from fastattn.nn._context import ContextParallel, unsupported
from fastattn.nn._leaf import call_as_leaf, is_symbolic
from fastattn.nn._sizes import check_integers
from fastattn.nn.positional import SinusoidalPositionalEncoding
from fastattn.nn.transformer import (
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)


class Transformer(nn.Transformer, ContextParallel):
    r"""The Transformer of Vaswani et al. 2017 (https://arxiv.org/abs/1706.03762).

    Without ``vocab_size`` it is ``torch.nn.Transformer`` on fused attention: vectors in, vectors
    out, with the same arguments, the same parameters from the same seed, the same ``state_dict``.

    With ``vocab_size`` it is the network of the paper, from tokens to logits:

    .. math::
        x_i = \sqrt{E} \, table[src_i] + PE(i), \quad
        memory = encoder(dropout(x)), \quad
        logits = decoder(dropout(y), memory) \, table^T

    with the sinusoids of :class:`SinusoidalPositionalEncoding` and one table for source, target
    and output. Padding is masked and the decoder is causal by default.

    Args:
        d_model, nhead, num_encoder_layers, num_decoder_layers, dim_feedforward, dropout: as in
            ``torch.nn.Transformer``, whose defaults are the paper's base model: 512, 8, 6, 6, 2048,
            0.1, and ReLU.
        activation, custom_encoder, custom_decoder, layer_norm_eps: as in ``torch.nn.Transformer``.
        batch_first, norm_first, bias, device, dtype: as in ``torch.nn.Transformer``.
        vocab_size: the number of tokens: of one vocabulary, or (source, target).
        tie_embeddings: whether the output shares its weights with the target's table and, with
            one vocabulary, also with the source's.
        padding_idx: the token that pads sequences.

    Attributes:
        encoder, decoder: the stacks.
        src_embedding, tgt_embedding: ``nn.Embedding``; positional: the sinusoids and the dropout;
            output: ``nn.Linear`` without bias. None without ``vocab_size``.
    """

    decoder: Any  # TransformerDecoder of this package, which supports a cache

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        custom_encoder: nn.Module | None = None,
        custom_decoder: nn.Module | None = None,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        vocab_size: int | tuple[int, int] | None = None,
        tie_embeddings: bool = True,
        padding_idx: int = 0,
    ) -> None:
        sizes = None if vocab_size is None else _check_vocab_sizes(vocab_size, padding_idx)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        options = (d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps)
        flags = (batch_first, norm_first, bias)

        def make_norm() -> nn.LayerNorm:
            return nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias, **factory)

        if custom_encoder is None:
            with warnings.catch_warnings():  # PyTorch warns about layers that cannot skip padding
                warnings.filterwarnings("ignore", "enable_nested_tensor is True")
                encoder_layer = TransformerEncoderLayer(*options, *flags, **factory)
                custom_encoder = TransformerEncoder(encoder_layer, num_encoder_layers, make_norm())
        if custom_decoder is None:
            decoder_layer = TransformerDecoderLayer(*options, *flags, **factory)
            custom_decoder = TransformerDecoder(decoder_layer, num_decoder_layers, make_norm())
        super().__init__(
            d_model,
            nhead,
            num_encoder_layers,
            num_decoder_layers,
            dim_feedforward,
            dropout,
            activation,
            custom_encoder,
            custom_decoder,
            layer_norm_eps,
            *flags,
            **factory,
        )
        self.padding_idx = padding_idx
        self.src_embedding: nn.Embedding | None = None
        self.tgt_embedding: nn.Embedding | None = None
        self.output: nn.Linear | None = None
        self.positional: SinusoidalPositionalEncoding | None = None
        if sizes is None:
            return
        source, target = sizes
        self.tgt_embedding = nn.Embedding(target, d_model, padding_idx, **factory)
        shared = tie_embeddings and isinstance(vocab_size, int)
        self.src_embedding = (
            self.tgt_embedding if shared else nn.Embedding(source, d_model, padding_idx, **factory)
        )
        self.output = nn.Linear(d_model, target, bias=False, **factory)
        if tie_embeddings:
            self.output.weight = self.tgt_embedding.weight
        self.positional = SinusoidalPositionalEncoding(
            d_model, dropout=dropout, scale="sqrt_dim", batch_first=batch_first
        )
        tables = (self.src_embedding.weight, self.tgt_embedding.weight, self.output.weight)
        for table in dict.fromkeys(tables):
            nn.init.normal_(table, std=1 / math.sqrt(d_model))  # logits of about 1
        for embedding in (self.src_embedding, self.tgt_embedding):
            with torch.no_grad():
                embedding.weight[padding_idx].zero_()

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Return the decoder's output [N, T, E], or logits [N, T, V] of tokens.

        Args:
            src: vectors [N, S, E], or tokens [N, S], int64 or int32.
            tgt: vectors [N, T, E], or tokens [N, T]. (Without ``batch_first``, N is the second
                dimension. N may be missing.)
            src_mask, tgt_mask, memory_mask: as in ``torch.nn.Transformer``.
            src_key_padding_mask, tgt_key_padding_mask, memory_key_padding_mask: as there. For
                tokens, missing ones follow from ``padding_idx``.
            src_is_causal, tgt_is_causal, memory_is_causal: as there, but they need no mask. For
                tokens, ``tgt_is_causal`` is True unless ``tgt_mask`` is given.
        """
        masks = (src_mask, tgt_mask, memory_mask)
        padding = (src_key_padding_mask, tgt_key_padding_mask, memory_key_padding_mask)
        flags = (src_is_causal, tgt_is_causal, memory_is_causal)
        if is_symbolic(src):
            return call_as_leaf(self, src, tgt, *masks, *padding, *flags)
        if self.tgt_embedding is None:
            return super().forward(src, tgt, *masks, *padding, *flags)
        check_dense("Transformer", src=src, tgt=tgt)
        batch_dim = 0 if self.batch_first else 1
        if src.ndim == tgt.ndim == 2 and src.shape[batch_dim] != tgt.shape[batch_dim]:
            raise RuntimeError("the batch number of src and tgt must be equal")
        if src_key_padding_mask is None:
            src_key_padding_mask = self.padding_of(src)
        if memory_key_padding_mask is None:
            memory_key_padding_mask = src_key_padding_mask
        memory = self.encode(src, src_mask, src_key_padding_mask, src_is_causal)
        masks = (tgt_mask, memory_mask, tgt_key_padding_mask)
        return self.decode(tgt, memory, *masks, memory_key_padding_mask, *flags[1:])

    def encode(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None,
    ) -> Tensor:
        """Return the memory [N, S, E]; arguments as in :meth:`forward`."""
        if self.src_embedding is not None:
            if src_key_padding_mask is None:
                src_key_padding_mask = self.padding_of(src)
            if src_key_padding_mask.numel() == src.numel():  # a wrong size raises later
                src_key_padding_mask = _drop_empty_mask(src_key_padding_mask)
            src = self._embed("src", src, self.src_embedding, 0)
        return self.encoder(src, src_mask, src_key_padding_mask, src_is_causal)

    def decode(
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
        """Return the output for the targets; arguments as in :meth:`forward`.

        With ``cache = model.decoder.new_cache()`` they continue the targets of earlier calls; masks
        are as in :class:`TransformerDecoder`. The padding of the memory cannot be derived from it:
        pass ``memory_key_padding_mask=model.padding_of(src)``.
        """
        if self.tgt_embedding is not None:
            if tgt_key_padding_mask is None:
                tgt_key_padding_mask = _drop_empty_mask(self._extend_padding(tgt, cache))
            if tgt_is_causal is None and tgt_mask is None:
                tgt_is_causal = True
            offset = 0 if cache is None else cache.length
            tgt = self._embed("tgt", tgt, self.tgt_embedding, offset)
        masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
        cache_option = {} if cache is None else {"cache": cache}
        out = self.decoder(tgt, memory, *masks, tgt_is_causal, memory_is_causal, **cache_option)
        return out if self.output is None else self.output(out)

    def _check_context(self) -> None:
        """Raise for tokens, whose positions would count from 0 on each rank."""
        if self.tgt_embedding is not None:
            raise unsupported("a Transformer of tokens, whose positions count from 0 on each rank,")

    def padding_of(self, tokens: Tensor) -> Tensor:
        """Return the key padding mask of tokens, [N, L]."""
        padding = tokens == self.padding_idx
        return padding if self.batch_first or tokens.ndim == 1 else padding.T

    @torch.no_grad()
    def generate(
        self, src: Tensor, *, bos_idx: int, eos_idx: int, max_length: int, beams: int = 1
    ) -> Tensor:
        """Return the most likely targets that greedy search or beam search finds.

        Args:
            src: tokens [N, S] ([S, N] without ``batch_first``).
            bos_idx: the token that every target starts with.
            eos_idx: the token that ends one.
            max_length: the maximum number of tokens, without the first.
            beams: how many partial targets to keep per sequence; 1 is greedy. The target with the
                largest mean log-probability per token is returned.

        Returns:
            Tokens [N, T] ([T, N]), T <= max_length, without ``bos_idx``; padded. Call it in eval
            mode; otherwise dropout is applied.
        """
        if self.tgt_embedding is None:
            raise RuntimeError("generate needs tokens: create the Transformer with vocab_size")
        check_dense("generate", src=src)
        if src.ndim != 2:
            raise ValueError(f"src must be a batch of tokens, got shape {tuple(src.shape)}")
        check_integers(max_length=max_length, beams=beams, bos_idx=bos_idx, eos_idx=eos_idx)
        for name, value in (("max_length", max_length), ("beams", beams)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        batch_dim, time_dim = (0, 1) if self.batch_first else (1, 0)
        padding = self.padding_of(src).repeat_interleave(beams, 0)
        memory = self.encode(src).repeat_interleave(beams, batch_dim)
        batch = src.shape[batch_dim]  # N; below, beam b of sequence n is row n·beams + b
        first_beam = torch.arange(batch, device=src.device)[:, None] * beams
        scores = memory.new_full((batch, beams), -math.inf, dtype=torch.float32)
        scores[:, 0] = 0.0  # all beams are equal at first, so only one counts
        tokens = src.new_full((batch * beams, 1), bos_idx)
        is_done = torch.zeros(batch * beams, dtype=torch.bool, device=src.device)
        cache = self.decoder.new_cache()
        for _ in range(max_length):
            last_tokens = tokens[:, -1:] if self.batch_first else tokens[:, -1:].T
            logits = self.decode(last_tokens, memory, memory_key_padding_mask=padding, cache=cache)
            log_p = logits.select(time_dim, 0).float().log_softmax(-1)  # [N·beams, V]
            log_p[is_done] = -math.inf
            log_p[is_done, self.padding_idx] = 0.0  # an ended beam continues with padding, score 0
            scores, top = (
                (scores.flatten()[:, None] + log_p).view(batch, beams * log_p.shape[1]).topk(beams)
            )
            parent_rows = (first_beam + top // log_p.shape[1]).flatten()
            next_tokens = (top % log_p.shape[1]).flatten()
            tokens = torch.cat((tokens[parent_rows], next_tokens[:, None].to(tokens.dtype)), 1)
            is_done = is_done[parent_rows] | (next_tokens == eos_idx)
            cache.select(parent_rows)
            if is_done.all():
                break
        generated = tokens[:, 1:].view(batch, beams, tokens.shape[1] - 1)
        lengths = (generated != self.padding_idx).sum(-1).clamp(min=1)
        chosen = generated[torch.arange(batch), (scores / lengths).argmax(1)]
        return chosen if self.batch_first else chosen.T

    def _embed(self, name: str, tokens: Tensor, embedding: nn.Embedding, offset: int) -> Tensor:
        """Embed tokens and add their positions, or raise an error that names the argument."""
        if tokens.is_floating_point() or tokens.dtype == torch.bool or tokens.ndim not in (1, 2):
            raise ValueError(
                f"{name} must be tokens, int64 or int32, with or without a batch dimension, got "
                f"{tokens.dtype} {tuple(tokens.shape)}"
            )
        assert self.positional is not None
        try:
            vectors = embedding(tokens)
        except IndexError as error:
            raise IndexError(
                f"{name} holds a token that is negative or not below its vocab_size "
                f"{embedding.num_embeddings}"
            ) from error
        return self.positional(vectors, offset=offset)

    def _extend_padding(self, tgt: Tensor, cache: DecoderCache | None) -> Tensor:
        """Return the padding of cached and new targets, [N, positions so far], and cache it."""
        padding = self.padding_of(tgt)
        if cache is None:
            return padding
        if cache.padding is not None:
            padding = torch.cat((cache.padding, padding), -1)
        cache.padding = padding
        return padding


def _drop_empty_mask(padding: Tensor) -> Tensor | None:
    """Return the mask, or None if its values can be read and it hides nothing."""
    return None if is_eager_on_cpu(padding) and not padding.any() else padding


def _check_vocab_sizes(vocab_size: Any, padding_idx: int) -> tuple[int, int]:
    """Check ``vocab_size``, and return the sizes of the two vocabularies."""
    sizes = vocab_size if isinstance(vocab_size, tuple) else (vocab_size, vocab_size)
    if len(sizes) != 2 or any(isinstance(n, bool) or not isinstance(n, int) for n in sizes):
        raise TypeError(f"vocab_size must be an integer or a pair of them, got {vocab_size!r}")
    if min(sizes) < 1:
        raise ValueError(f"vocab_size must be at least 1, got {vocab_size!r}")
    check_integers(padding_idx=padding_idx)
    if not 0 <= padding_idx < min(sizes):
        raise ValueError(
            f"padding_idx must be in [0, vocab_size = {vocab_size}), got {padding_idx}"
        )
    return sizes
