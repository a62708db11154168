"""Attention of transformers' models whose bias depends on the content, without a matrix of pairs.

Each class has the forward of one class of transformers, which it falls back to. It is put in front
of that class by :func:`fastattn.accelerate`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastattn.bias import Disentangled
from fastattn.ops.sdpa import scaled_dot_product_attention

__all__ = ["RelativeAttention", "relative_class"]


class RelativeAttention(nn.Module):
    """An attention layer whose scores have terms of distance and content."""


class _DebertaV2(RelativeAttention):
    """Disentangled attention: the tables are projections of one table of embeddings."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        output_attentions: bool = False,
        query_states: Any = None,
        relative_pos: Any = None,
        rel_embeddings: Any = None,
    ) -> Any:
        rows = hidden_states if query_states is None else query_states
        if relative_pos is not None or rows.shape != hidden_states.shape or not rows.is_cpu:
            stock: Any = super()
            others = (output_attentions, query_states, relative_pos, rel_embeddings)
            return stock.forward(hidden_states, attention_mask, *others)
        me: Any = self
        kinds = {"c2p", "p2c"} & set(me.pos_att_type)
        query = self._heads(me.query_proj(rows)).transpose(1, 2)
        key = self._heads(me.key_proj(hidden_states)).transpose(1, 2)
        value = self._heads(me.value_proj(hidden_states)).transpose(1, 2)
        results = scaled_dot_product_attention(
            query,
            key,
            value,
            attention_mask.bool(),
            me.dropout.p if self.training else 0.0,
            scale=((1 + len(kinds)) * query.shape[3]) ** -0.5,
            relative_bias=self._terms(rel_embeddings, kinds) if kinds else None,
            need_weights=output_attentions,
        )
        out, weights = results if output_attentions else (results, None)
        return out.transpose(1, 2).flatten(2), weights

    def _terms(self, embeddings: Tensor, kinds: set[str]) -> Disentangled | None:
        """The embedding of distance d is in row b(d) + span of 2 span: the last one twice here.

        Stock reads both tables at b(i - j); ours reads that of keys at b(j - i).
        """
        me: Any = self
        if not me.relative_attention:
            return None
        rows = me.pos_dropout(embeddings)[: 2 * me.pos_ebd_size]
        rows = torch.cat([rows, rows[-1:]])
        shared = me.share_att_key
        of_queries = of_keys = None
        if "c2p" in kinds:
            of_queries = self._heads((me.key_proj if shared else me.pos_key_proj)(rows))
        if "p2c" in kinds:
            of_keys = self._heads((me.query_proj if shared else me.pos_query_proj)(rows)).flip(0)
        limit = me.max_relative_positions if me.position_buckets > 0 else None
        return Disentangled(of_queries, of_keys, max_distance=limit)

    def _heads(self, x: Tensor) -> Tensor:
        heads: Any = self.num_attention_heads
        return x.unflatten(-1, (heads, -1))


class _DebertaV2Encoder(nn.Module):
    """Passes on which keys are padding, and leaves the distances of all pairs to the layers.

    A layer that falls back to stock makes them itself.
    """

    def get_attention_mask(self, attention_mask: Tensor) -> Tensor:
        if attention_mask.dim() == 2:
            return attention_mask[:, None, None]
        stock: Any = super()
        mask: Tensor = stock.get_attention_mask(attention_mask)
        return mask

    def get_rel_pos(
        self, hidden_states: Tensor, query_states: Any = None, relative_pos: Any = None
    ) -> Any:
        return relative_pos


_CLASSES: dict[str, type] = {
    "deberta_v2.DisentangledSelfAttention": _DebertaV2,
    "deberta_v2.DebertaV2Encoder": _DebertaV2Encoder,
}


def relative_class(module: nn.Module) -> type | None:
    """The class for a module of transformers, None if there is none."""
    folders = type(module).__module__.split(".")
    if folders[:2] != ["transformers", "models"] or len(folders) < 4:
        return None
    return _CLASSES.get(f"{folders[2]}.{type(module).__name__}")
