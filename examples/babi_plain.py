"""A memory network in plain PyTorch, the reference of the module."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fastattn.nn.memn2n import MemN2N
from fastattn.ops.encode_memory import encoding_factors

__all__ = ["PlainMemN2N"]

_ACTIVATIONS = {None: lambda x: x, "relu": torch.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid}


class PlainMemN2N(MemN2N):
    """A :class:`~fastattn.nn.MemN2N` of embeddings, products and sums."""

    def _read(
        self, stories: Tensor, questions: Tensor, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """As ``MemN2N._read``, by embeddings, products and sums."""
        slots, words = stories.shape[1:]
        dtype, device = self.embedding.dtype, stories.device
        factors = encoding_factors(self.encoding, words, self.dim, dtype=dtype, device=device)

        def encode(tokens: Tensor, table: Tensor) -> Tensor:  # [..., J] -> [..., D]
            filled = (tokens != self.padding_idx).unsqueeze(-1)
            return (F.embedding(tokens, table) * factors * filled).sum(-2)

        def remember(n: int) -> Tensor:  # [B, N, D]
            memory = encode(stories, self.embedding[n])
            if self.temporal is None:
                return memory
            return memory + filled.unsqueeze(-1) * self.temporal[n, :slots]

        filled = (stories != self.padding_idx).any(-1)  # [B, N]
        memories = [remember(n) for n in range(self.embedding.shape[0])]
        adjacent = self.weight_tying == "adjacent"
        state = encode(questions, self.embedding[0] if self.question is None else self.question)
        masked = ~filled & self.mask_empty
        weights = []
        for k in range(self.hops):
            scores = torch.einsum("bnd,bd->bn", memories[k if adjacent else 0], state)
            if self.linear_start:
                p = scores.masked_fill(masked, 0.0)
            else:
                p = scores.masked_fill(masked, float("-inf")).softmax(-1)
            output = torch.einsum("bn,bnd->bd", p, memories[k + 1 if adjacent else 1])
            state = state if self.hop_proj is None else state @ self.hop_proj.mT
            state = _ACTIVATIONS[self.activation](state + output)
            weights.append(p)
        return state, torch.stack(weights, 1) if need_weights else None
