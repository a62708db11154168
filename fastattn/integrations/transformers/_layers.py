"""Encoders of transformers: each layer as one native call, and no work on padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from fastattn import compat
from fastattn.eager import runs_eagerly
from fastattn.integrations.transformers._recording import anything_is_recorded, weights_are_recorded
from fastattn.nn._encoder_layer import Names, does_nothing, is_served, joined, part_of, served

__all__ = ["encoder_class", "layer_class"]

_NAME = "fastattn"  # in transformers' registry
# Arguments on which the result of a layer does not depend.
_HARMLESS = frozenset(
    "cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k seq_idx position_ids return_dict "
    "output_hidden_states use_cache num_items_in_batch".split()
)


class FusedLayer(nn.Module):
    """The forward of an encoder layer in one native call, where it can be."""

    NAMES: Names

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, *others: Any, **more: Any
    ) -> Any:
        if attention_mask is None and _is_plain(others, more) and hidden_states.dim() == 3:
            y = self._fused(hidden_states, more.get("cu_seq_lens_q"), more.get("cu_seq_lens_k"))
            if y is not None:
                return y
        stock: Any = super()
        return stock.forward(hidden_states, attention_mask, *others, **more)

    def _fused(self, x: Tensor, q_starts: Any, k_starts: Any) -> Tensor | None:
        if q_starts is not k_starts or not _is_ours(part_of(self, self.NAMES.attention)):
            return None
        if q_starts is None:
            return served(self, self.NAMES, x)
        y = served(self, self.NAMES, x[0], q_starts) if len(x) == 1 else None
        return None if y is None else y[None]


class _Bert(FusedLayer):
    NAMES = Names(
        linear="attention.self.query attention.self.key attention.self.value "
        "attention.output.dense intermediate.dense output.dense",
        norms="attention.output.LayerNorm output.LayerNorm",
        attention="attention.self",
        heads="num_attention_heads",
        activation="intermediate",
        function="intermediate_act_fn",
        norm_first=False,
    )


class _DistilBert(FusedLayer):
    NAMES = Names(
        linear="attention.q_lin attention.k_lin attention.v_lin attention.out_lin "
        "ffn.lin1 ffn.lin2",
        norms="sa_layer_norm output_layer_norm",
        attention="attention",
        heads="n_heads",
        activation="ffn",
        function="activation",
        norm_first=False,
    )


class _ViT(FusedLayer):
    NAMES = Names(
        linear="attention.q_proj attention.k_proj attention.v_proj attention.o_proj "
        "mlp.fc1 mlp.fc2",
        norms="layernorm_before layernorm_after",
        attention="attention",
        heads="num_attention_heads",
        activation="mlp",
        function="activation_fn",
        norm_first=True,
    )


class _Dinov2(FusedLayer):
    NAMES = _ViT.NAMES._replace(norms="norm1 norm2", scales="layer_scale1 layer_scale2")


class _Siglip(FusedLayer):
    NAMES = Names(
        linear="self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj "
        "mlp.fc1 mlp.fc2",
        norms="layer_norm1 layer_norm2",
        attention="self_attn",
        heads="num_heads",
        activation="mlp",
        function="activation_fn",
        norm_first=True,
    )


class _Whisper(FusedLayer):
    NAMES = Names(
        linear="self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj fc1 fc2",
        norms="self_attn_layer_norm final_layer_norm",
        attention="self_attn",
        heads="num_heads",
        activation="",
        function="activation_fn",
        norm_first=True,
    )

    def _fused(self, x: Tensor, q_starts: Any, k_starts: Any) -> Tensor | None:
        if x.dtype == torch.float16:  # the layer clamps what overflows
            return None
        return super()._fused(x, q_starts, k_starts)


class UnpaddedEncoder(nn.Module):
    """The forward of a stack of layers on the rows that are no padding; 0 elsewhere."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, *others: Any, **more: Any
    ) -> Any:
        stock: Any = super()
        padding = self._padding(hidden_states, attention_mask, others, more)
        if padding is None:
            return stock.forward(hidden_states, attention_mask, *others, **more)
        rows, starts, back = joined(hidden_states, padding)
        packed: dict[str, Any] = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
        longest = int(starts.diff().max())
        packed |= {"max_length_q": longest, "max_length_k": longest}
        output = stock.forward(rows[None], None, *others, **{**more, **packed})
        output.last_hidden_state = back(output.last_hidden_state[0])
        return output

    def _padding(
        self, x: Tensor, mask: Any, others: tuple[Any, ...], more: dict[str, Any]
    ) -> Tensor | None:
        """[B, L], True at padding, if the mask is that and nothing else reads the positions."""
        if type(mask) is not Tensor or mask.dtype != torch.bool or mask.dim() != 4 or x.dim() != 3:
            return None
        if mask.shape[1] != 1 or (mask.shape[2] != 1 and mask.stride(2) != 0):
            return None  # a mask of pairs
        if (mask.shape[0], mask.shape[3]) != x.shape[:2] or not _is_plain(others, more):
            return None
        if self.training or more.keys() & {"cu_seq_lens_q"} or not compat.nothing_intercepts():
            return None
        attentions = [m for m in self.modules() if {"config", "scaling"} <= vars(m).keys()]
        if not attentions or not all(map(_is_ours, attentions)) or not runs_eagerly(x, mask):
            return None
        if anything_is_recorded():
            return None
        inside = [module for module in self.modules() if module is not self]
        if compat.are_watched(inside, does_nothing):
            return None
        return mask[:, 0, 0, :].logical_not()


_MPNET = _Bert.NAMES._replace(
    linear="attention.attn.q attention.attn.k attention.attn.v attention.attn.o "
    "intermediate.dense output.dense",
    norms="attention.LayerNorm output.LayerNorm",
    attention="attention.attn",
)


class MPNetStack(nn.Module):
    """The forward of MPNet's layers, which share a bias of distances, without padding.

    Stock stores that bias for all pairs of a batch and adds it, and a mask, to stored scores. Here
    the layers read the table of distances.
    """

    NAMES = _MPNET

    def native_layers(self) -> Any:
        """What ``NAMES`` describes."""
        return self.layer

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, *others: Any, **more: Any
    ) -> Any:
        stock: Any = super()
        if _is_plain(others, more) and not more.get("output_hidden_states"):
            y = self._packed(hidden_states, attention_mask)
            if y is not None:
                return BaseModelOutput(last_hidden_state=y) if more.get("return_dict") else (y,)
        return stock.forward(hidden_states, attention_mask, *others, **more)

    def _packed(self, x: Tensor, mask: Any) -> Tensor | None:
        layers: Any = self.layer
        embedding: Any = self.relative_attention_bias
        if x.dim() != 3 or compat.are_watched((*layers, embedding), does_nothing):
            return None
        if type(embedding) is not nn.Embedding or self.training:
            return None
        if not all(is_served(layer, _MPNET, x) for layer in layers):
            return None
        none = x.new_zeros(x.shape[:2], dtype=torch.bool)
        padding = none if mask is None else _padding_of_additive(mask, x)
        if padding is None:
            return None
        rows, starts, back = joined(x, padding)
        longest = max(1, int(starts.diff().max()))  # 1 also where all is padding
        distances = torch.arange(longest - 1, -longest, -1)  # of key and query, as stock's
        buckets: Any = self.relative_position_bucket
        table = embedding.weight[buckets(distances)].t().float().contiguous()
        for layer in layers:
            rows = served(layer, _MPNET, rows, starts, table)
        return back(rows)


def _padding_of_additive(mask: Any, x: Tensor) -> Tensor | None:
    """[B, L], True at padding, if a mask [B, 1, 1 or L, L] is 0 or hides keys from all queries."""
    if type(mask) is not Tensor or mask.dim() != 4 or not runs_eagerly(mask):
        return None
    if mask.shape[1] != 1 or (mask.shape[0], mask.shape[3]) != x.shape[:2]:
        return None
    keys = mask[:, 0, :1]
    if mask.dtype == torch.bool:
        hidden = keys.logical_not()
    else:
        hidden = keys == torch.finfo(mask.dtype).min
        if not (hidden | (keys == 0)).all():
            return None
    same = mask.stride(2) == 0 or mask.shape[2] == 1 or (mask[:, 0] == keys).all()
    return hidden[:, 0] if same else None


def _is_plain(others: tuple[Any, ...], more: dict[str, Any]) -> bool:
    given = [*others, *(x for name, x in more.items() if name not in _HARMLESS)]
    return all(x is None or x is False for x in given)


def _is_ours(attention: Any) -> bool:
    """Whether our function computes this attention, without causality and recorded weights."""
    return (
        attention.config._attn_implementation == _NAME
        and not getattr(attention, "is_causal", False)
        and not weights_are_recorded(attention)
    )


_LAYERS = {
    "bert.BertLayer": _Bert,
    "camembert.CamembertLayer": _Bert,
    "data2vec.Data2VecTextLayer": _Bert,
    "deit.DeiTLayer": _ViT,
    "dinov2.Dinov2Layer": _Dinov2,
    "dinov2_with_registers.Dinov2WithRegistersLayer": _Dinov2,
    "distilbert.TransformerBlock": _DistilBert,
    "electra.ElectraLayer": _Bert,
    "roberta.RobertaLayer": _Bert,
    "siglip.SiglipEncoderLayer": _Siglip,
    "vit.ViTLayer": _ViT,
    "whisper.WhisperEncoderLayer": _Whisper,
    "xlm_roberta.XLMRobertaLayer": _Bert,
}
_ENCODERS = frozenset(
    "bert.BertEncoder camembert.CamembertEncoder data2vec.Data2VecTextEncoder "
    "distilbert.Transformer electra.ElectraEncoder roberta.RobertaEncoder "
    "xlm_roberta.XLMRobertaEncoder".split()
)


def layer_class(module: nn.Module) -> type | None:
    """The class with a native forward for a layer of transformers, None if it has none."""
    found = _LAYERS.get(_name_of(type(module)))
    if found is None:
        return None
    forward: Any = type(module).forward
    returned = forward.__annotations__.get("return")  # a tuple in some versions
    return found if str(returned) in ("torch.Tensor", str(Tensor)) else None


def encoder_class(module: nn.Module) -> type | None:
    """The class for a stack of such layers."""
    name = _name_of(type(module))
    if name == "mpnet.MPNetEncoder":
        return MPNetStack
    return UnpaddedEncoder if name in _ENCODERS else None


def _name_of(kind: type) -> str:
    folders = kind.__module__.split(".")
    if folders[:2] != ["transformers", "models"] or len(folders) < 4:
        return ""
    return f"{folders[2]}.{kind.__name__}"
