"""The networks of translation.py, and the same in plain PyTorch.

All take tokens, ``model(source [N, S], target [N, T]) -> logits [N, T, V]``, and have ``generate``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from translation_data import PAD

import fastattn
from fastattn.nn import BahdanauAttention, Transformer

__all__ = ["MODELS", "make"]

MODELS = ("bahdanau", "luong", "transformer")


class Recurrent(nn.Module):
    """The common encoder: a bidirectional GRU, whose last state starts the decoder."""

    def __init__(self, sizes: tuple[int, int], width: int, dropout: float) -> None:
        super().__init__()
        source, target = sizes
        self.src_embedding = nn.Embedding(source, width, PAD)
        self.tgt_embedding = nn.Embedding(target, width, PAD)
        self.dropout = nn.Dropout(dropout)
        self.encoder = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(width // 2, width)
        self.output = nn.Linear(width, target)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Memory [N, S, E], its padding [N, S] and the decoder's first state [N, E]."""
        padding = source == PAD
        x = self.dropout(self.src_embedding(source))
        packed = pack_padded_sequence(x, (~padding).sum(1), batch_first=True, enforce_sorted=False)
        read, last = self.encoder(packed)
        memory = pad_packed_sequence(read, batch_first=True, total_length=source.shape[1])[0]
        return memory, padding, torch.tanh(self.bridge(last[1]))  # of the backward direction

    def decode(
        self, target: Tensor, memory: Tensor, padding: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits [N, T, V], and the state after the last token."""
        raise NotImplementedError

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decode(target, *self.encode(source))[0]

    @torch.no_grad()
    def generate(self, source: Tensor, *, bos_idx: int, eos_idx: int, max_length: int) -> Tensor:
        """Greedy decoding, [N, T]."""
        memory, padding, state = self.encode(source)
        words = [source.new_full((len(source), 1), bos_idx)]
        done = torch.zeros(len(source), 1, dtype=torch.bool)
        for _ in range(max_length):
            logits, state = self.decode(words[-1], memory, padding, state)
            words.append(logits.argmax(-1).masked_fill(done, PAD))
            done = done | (words[-1] == eos_idx)
            if done.all():
                break
        return torch.cat(words[1:], 1)


class Bahdanau(Recurrent):
    """Bahdanau et al. 2015: the state is the query, and the context enters the next state."""

    def __init__(self, sizes: tuple[int, int], width: int, dropout: float, plain: bool) -> None:
        super().__init__(sizes, width, dropout)
        kind = PlainBahdanau if plain else BahdanauAttention
        self.attention = kind(width, query_size=width, memory_size=width)
        self.cell = nn.GRUCell(2 * width, width)
        self.readout = nn.Linear(3 * width, width)

    def decode(
        self, target: Tensor, memory: Tensor, padding: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Word by word: attend from the state, then take a step of the GRU."""
        keys = self.attention.memory_layer(memory)
        options = {"keys": keys, "key_padding_mask": padding, "need_weights": False}
        readouts = []
        for word in self.dropout(self.tgt_embedding(target)).unbind(1):
            context = self.attention(state, memory, **options)[0]
            state = self.cell(torch.cat((word, context), 1), state)
            readouts.append(torch.cat((state, context, word), 1))
        hidden = torch.tanh(self.readout(torch.stack(readouts, 1)))
        return self.output(self.dropout(hidden)), state


class Luong(Recurrent):
    """Luong et al. 2015: all states first, then each attends to the memory (global, general)."""

    def __init__(self, sizes: tuple[int, int], width: int, dropout: float, plain: bool) -> None:
        super().__init__(sizes, width, dropout)
        self.attention = (PlainGeneral if plain else General)(width)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.readout = nn.Linear(2 * width, width)

    def decode(
        self, target: Tensor, memory: Tensor, padding: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """All states of the GRU at once, then attend from each."""
        x = self.dropout(self.tgt_embedding(target))
        states, last = self.decoder(x, state[None].contiguous())
        context = self.attention(states, memory, padding)
        hidden = torch.tanh(self.readout(torch.cat((context, states), -1)))
        return self.output(self.dropout(hidden)), last[0]


class General(nn.Module):
    """score = query W memory, by the library."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))
        nn.init.xavier_uniform_(self.weight)

    def forward(
        self, query: Tensor, memory: Tensor, padding: Tensor, need_weights: bool = False
    ) -> Any:
        return fastattn.luong_attention(
            query,
            memory,
            memory,
            method="general",
            weight=self.weight,
            key_padding_mask=padding,
            need_weights=need_weights,
        )


def transformer(sizes: tuple[int, int], width: int, dropout: float, plain: bool) -> nn.Module:
    """A small Transformer, the library's or PyTorch's."""
    heads, layers = 4, 2
    shape = (width, heads, layers, layers, 4 * width, dropout)
    kind = PlainTransformer if plain else Transformer
    model = kind(*shape, batch_first=True, vocab_size=sizes, padding_idx=PAD)
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0  # of weights: plain PyTorch draws others
    return model


def make(
    name: str, sizes: tuple[int, int], width: int, dropout: float, *, plain: bool = False
) -> Any:
    """One of MODELS; from one seed, the plain one has the same parameters."""
    build: Any = {"bahdanau": Bahdanau, "luong": Luong, "transformer": transformer}[name]
    return build(sizes, width, dropout, plain)


# --- the same without the library ------------------------------------------------------------


class PlainBahdanau(BahdanauAttention):
    def forward(self, query: Tensor, memory: Tensor, value: Any = None, **kwargs: Any) -> Any:
        hidden = torch.tanh(self.query_layer(query)[:, None] + kwargs["keys"])  # [N, S, A]
        scores = (hidden @ self.v).masked_fill(kwargs["key_padding_mask"], -math.inf)
        weights = scores.softmax(-1)
        return torch.einsum("ns,nse->ne", weights, memory), weights


class PlainGeneral(General):
    def forward(
        self, query: Tensor, memory: Tensor, padding: Tensor, need_weights: bool = False
    ) -> Any:
        scores = (query @ self.weight) @ memory.mT  # [N, T, S]
        weights = scores.masked_fill(padding[:, None], -math.inf).softmax(-1)
        return (weights @ memory, weights) if need_weights else weights @ memory


class PlainTransformer(Transformer):
    """The library's embeddings around the stacks of ``torch.nn``, and a table of sinusoids."""

    def __init__(self, *shape: Any, batch_first: bool, **kwargs: Any) -> None:
        width, heads, layers, _, feed, dropout = shape
        options = {"dropout": dropout, "batch_first": batch_first}
        encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, heads, feed, **options), layers, nn.LayerNorm(width)
        )
        decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(width, heads, feed, **options), layers, nn.LayerNorm(width)
        )
        stacks = {"custom_encoder": encoder, "custom_decoder": decoder}
        super().__init__(*shape, **stacks, batch_first=batch_first, **kwargs)
        self.positional = Sinusoids(dropout)
        for module in self.modules():
            if isinstance(module, nn.MultiheadAttention):
                # Its output is [T, N, E] in memory, and dropout draws in memory order.
                module.register_forward_hook(lambda *call: (call[2][0].contiguous(), call[2][1]))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        length = target.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        return super().forward(source, target, tgt_mask=future, tgt_is_causal=True)

    @torch.no_grad()
    def generate(self, source: Tensor, *, bos_idx: int, eos_idx: int, max_length: int) -> Tensor:  # type: ignore[override]
        """Greedy decoding without a cache, [N, T]."""
        words = source.new_full((len(source), 1), bos_idx)
        for _ in range(max_length):
            ended = (words == eos_idx).any(1)
            if ended.all():
                break
            word = self(source, words)[:, -1].argmax(-1).masked_fill(ended, PAD)
            words = torch.cat((words, word[:, None]), 1)
        return words[:, 1:]


class Sinusoids(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        length, width = x.shape[-2:]
        rates = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        turns = torch.arange(offset, offset + length)[:, None] * rates
        table = torch.stack((turns.sin(), turns.cos()), -1).flatten(1)
        return self.dropout(x * math.sqrt(width) + table.to(x.dtype))
