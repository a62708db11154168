"""Attention of transformers' models whose bias depends on the content, without a matrix of pairs.

Each class has the forward of one class of transformers, which it falls back to. It is put in front
of that class by :func:`fastattn.accelerate`. ``me`` is ``self`` without a type, for the attributes
of the class of transformers.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from fastattn import compat, dispatch
from fastattn.bias import Decomposed2d, Disentangled
from fastattn.compat import runs_eagerly
from fastattn.integrations.transformers._layers import (
    encoder_class,
    has_gaps,
    is_plain,
    layer_class,
    model_class,
    name_of,
)
from fastattn.integrations.transformers._recording import weights_are_recorded
from fastattn.nn._encoder_layer import does_nothing, pack_rows
from fastattn.nn.linear import Linear
from fastattn.ops._disentangled import distance_buckets
from fastattn.ops.sdpa import scaled_dot_product_attention
from fastattn.ops.varlen import varlen_attention

# The tables of each layer, with the fingerprints of the values that they depend on.
_tables_of: weakref.WeakKeyDictionary[nn.Module, tuple[Any, list[Any]]] = (
    weakref.WeakKeyDictionary()
)


def _fingerprints(rows: Tensor, layers: list[Any]) -> Any:
    """Fingerprints of all values that the outputs of linear layers on ``rows`` depend on.

    None if the outputs may not be kept. A call reads all weights of the layers, which takes
    milliseconds for DeBERTa-base.
    """
    if torch.is_grad_enabled() or not runs_eagerly(rows) or not compat.may_plan():
        return None
    native: Any = dispatch.load("cpu")
    if isinstance(native, str) or compat.have_hooks(layers, does_nothing):
        return None
    if any(type(x).forward not in (nn.Linear.forward, Linear.forward) for x in layers):
        return None
    tensors = [rows, *(x.weight for x in layers), *(x.bias for x in layers)]
    fingerprints = [native.fingerprint(x) for x in tensors if x is not None]
    return None if None in fingerprints else (dispatch.forced.get(), rows.shape, fingerprints)


@functools.lru_cache(maxsize=1024)
def _row_of(distance: int, span: int, limit: int | None) -> int:
    return int(distance_buckets(torch.tensor(distance), span, limit))


class _DebertaV2(nn.Module):
    """Disentangled attention: the tables of the bias are projections of one table of embeddings.

    Without gradients the tables are kept until a value that they depend on changes.
    """

    RELATIVE = True

    def forget(self) -> None:
        """Called when the class changes back."""
        _tables_of.pop(self, None)

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
        query = self._split_heads(me.query_proj(rows))  # [B, L, H, D]
        key = self._split_heads(me.key_proj(hidden_states))
        value = self._split_heads(me.value_proj(hidden_states))
        scale = ((1 + len(kinds)) * query.shape[3]) ** -0.5
        # _UnpaddedDebertaV2Encoder passes the starts of packed sequences in place of a mask.
        starts = attention_mask if attention_mask.dim() == 1 else None
        longest = rows.shape[1] if starts is None else int(starts.diff().max())
        bias = self._relative_bias(rel_embeddings, kinds, longest) if kinds else None
        if starts is not None:
            packed = (query[0], key[0], value[0], starts, starts)
            out = varlen_attention(*packed, scale=scale, relative_bias=bias)
            return out.flatten(1)[None], None
        results = scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attention_mask.bool(),
            dropout_p=me.dropout.p if self.training else 0.0,
            scale=scale,
            relative_bias=bias,
            need_weights=output_attentions,
        )
        out, weights = results if output_attentions else (results, None)
        return out.transpose(1, 2).flatten(2), weights

    def _relative_bias(
        self, embeddings: Tensor, kinds: set[str], length: int
    ) -> Disentangled | None:
        """The bias of sequences of this length; "c2p" is a table of queries, "p2c" a table of keys.

        The embedding of distance d is in row b(d) + span of ``embeddings``, which has 2 span rows:
        the last one also serves b(d) = span. Stock reads both tables at b(i - j), the kernels read
        the table of keys at b(j - i), so it is flipped.
        """
        me: Any = self
        if not me.relative_attention:
            return None
        shared, span = me.share_att_key, me.pos_ebd_size
        layers: list[Any] = [None, None]  # the projections of the table of queries, and of keys
        if "c2p" in kinds:
            layers[0] = me.key_proj if shared else me.pos_key_proj
        if "p2c" in kinds:
            layers[1] = me.query_proj if shared else me.pos_query_proj
        limit = me.max_relative_positions if me.position_buckets > 0 else None
        rows = me.pos_dropout(embeddings)[: 2 * span]
        fingerprints = _fingerprints(rows, [x for x in layers if x is not None])
        if fingerprints is not None and self in _tables_of:
            known_fingerprints, (query_table, key_table) = _tables_of[self]
            if known_fingerprints == fingerprints:
                return Disentangled(query_table, key_table, max_distance=limit)
        rows = torch.cat([rows, rows[-1:]])
        # Kept tables have a row for every distance, others only for the distances of this length.
        reach = span
        if fingerprints is None and runs_eagerly(rows):
            reach = _row_of(length - 1, span, limit) - span
        rows = rows[span - reach : span + reach + 1]
        tables = [None if layer is None else self._split_heads(layer(rows)) for layer in layers]
        if tables[1] is not None:
            tables[1] = tables[1].flip(0)
        if fingerprints is not None:
            _tables_of[self] = fingerprints, tables
        elif limit is None or reach <= span // 2:
            limit = None  # each distance has a row of its own
        elif reach < span:
            missing_rows = (0, 0, 0, 0, span - reach, span - reach)
            tables = [x if x is None else nn.functional.pad(x, missing_rows) for x in tables]
        return Disentangled(tables[0], tables[1], max_distance=limit)

    def _split_heads(self, x: Tensor) -> Tensor:
        heads: Any = self.num_attention_heads
        return x.unflatten(-1, (heads, -1))


class _DebertaV2Encoder(nn.Module):
    """Passes the mask of keys to the layers, and no distances of all pairs.

    A layer that falls back to stock computes the distances itself.
    """

    def get_attention_mask(self, attention_mask: Tensor) -> Tensor:
        if attention_mask.dim() == 1:
            return attention_mask
        if attention_mask.dim() == 2:
            return attention_mask[:, None, None]
        stock: Any = super()
        mask: Tensor = stock.get_attention_mask(attention_mask)
        return mask

    def get_rel_pos(
        self, hidden_states: Tensor, query_states: Any = None, relative_pos: Any = None
    ) -> Any:
        return relative_pos


class _UnpaddedDebertaV2Encoder(_DebertaV2Encoder):
    """Runs the layers of an encoder on the rows that are no padding; padding gets 0.

    In place of a mask, the layers get the starts of the sequences.
    """

    def forward(
        self, hidden_states: Tensor, attention_mask: Any, *others: Any, **options: Any
    ) -> Any:
        stock: Any = super()
        x, mask = hidden_states, attention_mask
        is_plain_call = is_plain(others, options) and options.get("return_dict", True)
        padding = mask == 0 if is_plain_call and self._allows_packing(x, mask) else None
        if padding is None or not padding.any() or has_gaps(padding):
            return stock.forward(x, mask, *others, **options)
        rows, starts, restore = pack_rows(x, padding)
        output = stock.forward(rows[None], starts, **options)
        output.last_hidden_state = restore(output.last_hidden_state[0])
        if output.hidden_states is not None:
            output.hidden_states = tuple(restore(y[0]) for y in output.hidden_states)
        return output

    def _allows_packing(self, x: Tensor, mask: Any) -> bool:
        """Whether only attention depends on which sequence a row belongs to."""
        me: Any = self
        if self.training or me.conv is not None or type(mask) is not Tensor or x.dim() != 3:
            return False
        if mask.shape != x.shape[:2] or not x.is_cpu or not runs_eagerly(x, mask):
            return False
        if not all(isinstance(layer.attention.self, _DebertaV2) for layer in me.layer):
            return False
        inside = [module for module in self.modules() if module is not self]
        return compat.may_plan() and not compat.have_hooks(inside, does_nothing)


class _Wav2Vec2Conformer(nn.Module):
    """Attention with the bias of Transformer-XL, if the positions are relative."""

    RELATIVE = True

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        relative_position_embeddings: Any = None,
        **options: Any,
    ) -> Any:
        me: Any = self
        relative = me.position_embeddings_type == "relative"
        if not relative or not _can_serve(self, hidden_states, attention_mask, options):
            stock: Any = super()
            others = (attention_mask, relative_position_embeddings)
            return stock.forward(hidden_states, *others, **options)
        projections = (me.linear_q, me.linear_k, me.linear_v)
        operands = [_split_heads(project(hidden_states), me) for project in projections]
        table = _split_heads(me.linear_pos(relative_position_embeddings[0]), me)
        bias = Disentangled(table.flip(0), None, me.pos_bias_u, me.pos_bias_v)
        out = _attend(self, operands, attention_mask, me.dropout.p, bias)
        return me.linear_out(out), None


class _Parakeet(nn.Module):
    """Attention with the bias of Transformer-XL, where query heads may share heads of keys."""

    RELATIVE = True

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Any = None,
        **options: Any,
    ) -> Any:
        me: Any = self
        if position_embeddings is None or not _can_serve(
            self, hidden_states, attention_mask, options
        ):
            stock: Any = super()
            return stock.forward(hidden_states, position_embeddings, attention_mask, **options)
        projections = (me.q_proj, me.k_proj, me.v_proj)
        operands = [f(hidden_states).unflatten(-1, (-1, me.head_dim)) for f in projections]
        table = me.relative_k_proj(position_embeddings[0]).unflatten(-1, (-1, me.head_dim))
        bias = Disentangled(table.flip(0), None, me.bias_u, me.bias_v)
        out = _attend(self, operands, attention_mask, me.attention_dropout, bias)
        return me.o_proj(out), None


class _Sam(nn.Module):
    """Attention of an image or of its windows, with a bias for the row and the column of a key."""

    RELATIVE = True

    def forward(self, hidden_states: Tensor, output_attentions: Any = None) -> Any:
        me: Any = self
        batch, height, width, _ = hidden_states.shape
        fits = not me.use_rel_pos or (
            (me.rel_pos_h.shape[0], me.rel_pos_w.shape[0]) == (2 * height - 1, 2 * width - 1)
        )  # else stock interpolates the tables
        drops = me.training and me.dropout > 0
        recorded = output_attentions or weights_are_recorded(self)
        if not fits or drops or recorded or not hidden_states.is_cpu:
            stock: Any = super()
            return stock.forward(hidden_states, output_attentions)
        qkv = me.qkv(hidden_states).view(batch, height * width, 3, me.num_attention_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        bias = None
        if me.use_rel_pos:
            bias = Decomposed2d.of_tables(query, me.rel_pos_h, me.rel_pos_w)
        out = scaled_dot_product_attention(query, key, value, scale=me.scale, relative_bias=bias)
        return me.proj(out.transpose(1, 2).reshape(batch, height, width, -1)), None


class _Blip(nn.Module):
    """Attention of an image, which the stock module computes by products and a softmax."""

    RELATIVE = True

    def forward(self, hidden_states: Tensor, *others: Any, **options: Any) -> Any:
        me: Any = self
        if others or not _can_serve(self, hidden_states, None, options):
            stock: Any = super()
            return stock.forward(hidden_states, *others, **options)
        qkv = me.qkv(hidden_states).unflatten(-1, (3, me.num_heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = me.dropout.p if self.training else 0.0
        out = scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=me.scale)
        return me.projection(out.transpose(1, 2).flatten(2)), None


def _can_serve(layer: nn.Module, x: Tensor, mask: Any, options: dict[str, Any]) -> bool:
    """Whether a call on the CPU requests no weights, and its mask is a tensor or None."""
    if options.get("output_attentions") or weights_are_recorded(layer):
        return False
    return x.is_cpu and x.dim() == 3 and (mask is None or type(mask) is Tensor)


def _split_heads(x: Tensor, layer: Any) -> Tensor:
    return x.unflatten(-1, (layer.num_heads, -1))


def _attend(
    layer: Any, operands: list[Tensor], mask: Tensor | None, dropout: float, bias: Disentangled
) -> Tensor:
    """Attention [B, L, Hq D] of query, key and value [B, L, H, D]."""
    query, key, value = (x.transpose(1, 2) for x in operands)
    out: Tensor = scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        dropout_p=dropout if layer.training else 0.0,
        scale=layer.scaling,
        enable_gqa=True,
        relative_bias=bias,
    )
    return out.transpose(1, 2).flatten(2)


_CLASSES: dict[str, type] = {
    "blip.BlipAttention": _Blip,
    "deberta_v2.DisentangledSelfAttention": _DebertaV2,
    "deberta_v2.DebertaV2Encoder": _DebertaV2Encoder,
    "parakeet.ParakeetEncoderAttention": _Parakeet,
    **dict.fromkeys(("sam.SamVisionAttention", "sam.SamVisionSdpaAttention"), _Sam),
    **dict.fromkeys(("sam_hq.SamHQVisionAttention", "sam_hq.SamHQVisionSdpaAttention"), _Sam),
    "wav2vec2_conformer.Wav2Vec2ConformerSelfAttention": _Wav2Vec2Conformer,
}


def native_class(module: nn.Module, unpad: bool = True) -> type | None:
    """The class for a module of transformers, None if there is none."""
    native = _CLASSES.get(name_of(type(module)))
    if unpad and native is _DebertaV2Encoder:
        return _UnpaddedDebertaV2Encoder
    stack = encoder_class(module) if unpad else None
    return native or stack or layer_class(module) or model_class(module)
