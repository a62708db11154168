"""Encoders of transformers: each layer as one native call, and no work on padding."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.generic import ModelOutput

from fastattn import compat
from fastattn.eager import runs_eagerly
from fastattn.integrations.transformers._recording import anything_is_recorded, weights_are_recorded
from fastattn.nn._encoder_layer import Names, does_nothing, is_served, joined, part_of, served

__all__ = ["encoder_class", "has_gaps", "layer_class"]

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
            return served((self,), self.NAMES, x)
        y = served((self,), self.NAMES, x[0], q_starts) if len(x) == 1 else None
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
    """The forward of a stack of layers on the rows that are no padding; 0 elsewhere.

    All layers are one native call, where they can be: between kernels that read megabytes of
    weights Python runs from cold caches, and a layer's own call takes 50 µs.
    """

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, *others: Any, **more: Any
    ) -> Any:
        stock: Any = super()
        x, mask = hidden_states, attention_mask
        if not self._may_join(x, others, more):
            return stock.forward(x, mask, *others, **more)
        layers: Any = self._native_layers()
        kind: Any = type(self)
        if mask is None:
            y = served(layers, layers[0].NAMES, x) if layers else None
            return stock.forward(x, mask, *others, **more) if y is None else _result(kind)(y)
        padding = _padding_of_boolean(mask, x)
        is_native = bool(layers) and is_served(layers, layers[0].NAMES, x)
        if padding is None or not (is_native or self._may_pack()):
            return stock.forward(x, mask, *others, **more)
        rows, starts, back = joined(x, padding)
        if is_native:
            return _result(kind)(back(served(layers, layers[0].NAMES, rows, starts)))
        packed: dict[str, Any] = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
        longest = int(starts.diff().max())
        packed |= {"max_length_q": longest, "max_length_k": longest}
        output = stock.forward(rows[None], None, *others, **{**more, **packed})
        output.last_hidden_state = back(output.last_hidden_state[0])
        return output

    def _may_join(self, x: Tensor, others: tuple[Any, ...], more: dict[str, Any]) -> bool:
        """Whether nothing but the layers needs to know which rows are of which sequence."""
        if x.dim() != 3 or self.training or not _is_plain(others, more):
            return False
        if more.get("output_hidden_states") or more.get("return_dict", True) is False:
            return False
        given = more.get("cu_seq_lens_q")
        return given is None and compat.nothing_intercepts() and not anything_is_recorded()

    def _native_layers(self) -> Sequence[nn.Module]:
        """The layers, if a native call may compute them all; else none."""
        layers: Any = tuple(compat.children_of(part_of(self, "layer")).values())
        kind: Any = type(self)
        if _result(kind) is None or compat.are_watched(layers, does_nothing):
            return ()
        kinds: set[Any] = set(map(type, layers))
        if not all(map(_runs_ours, kinds)):
            return ()
        attentions = [part_of(layer, layer.NAMES.attention) for layer in layers]
        return layers if all(map(_is_ours, attentions)) else ()

    def _may_pack(self) -> bool:
        """Whether the attention of all layers is ours, and no hook reads the positions."""
        inside = [module for module in self.modules() if module is not self]
        attentions = [m for m in inside if {"config", "scaling"} <= vars(m).keys()]
        if not attentions or not all(map(_is_ours, attentions)):
            return False
        return not compat.are_watched(inside, does_nothing)


def _padding_of_boolean(mask: Any, x: Tensor) -> Tensor | None:
    """[B, L], True at padding, if a mask [B, 1, 1 or L, L] hides keys from all queries alike."""
    if type(mask) is not Tensor or mask.dtype != torch.bool or mask.dim() != 4:
        return None
    if mask.shape[1] != 1 or (mask.shape[2] != 1 and mask.stride(2) != 0):
        return None  # a mask of pairs
    if (mask.shape[0], mask.shape[3]) != x.shape[:2] or not runs_eagerly(x, mask):
        return None
    return mask[:, 0, 0, :].logical_not()


@functools.cache
def _runs_ours(layer: Any) -> bool:
    """Whether this class has the native forward, which transformers wraps."""
    return inspect.unwrap(layer.forward) is FusedLayer.forward


@functools.cache
def _result(encoder: type) -> Any:
    """What the forward of a stack of layers returns, a class with ``last_hidden_state``."""
    stock: Any = next(kind for kind in encoder.__mro__[1:] if kind is not UnpaddedEncoder)
    names = re.findall(r"\w+", str(stock.forward.__annotations__.get("return")))
    kinds = [getattr(sys.modules[stock.__module__], name, None) for name in names]
    return next((x for x in kinds if isinstance(x, type) and issubclass(x, ModelOutput)), None)


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
        if not is_served(layers, _MPNET, x):
            return None
        none = x.new_zeros(x.shape[:2], dtype=torch.bool)
        padding = none if mask is None else _padding_of_additive(mask, x)
        if padding is None or has_gaps(padding):
            return None
        rows, starts, back = joined(x, padding)
        longest = max(1, int(starts.diff().max()))  # 1 also where all is padding
        distances = torch.arange(longest - 1, -longest, -1)  # of key and query, as stock's
        buckets: Any = self.relative_position_bucket
        table = embedding.weight[buckets(distances)].t().float().contiguous()
        return back(served(layers, _MPNET, rows, starts, table))


def has_gaps(padding: Tensor) -> bool:
    """Whether padding [B, L] is between tokens of a sequence, whose distances it is a part of."""
    begins = padding[:, :-1] > padding[:, 1:]
    return bool((begins.sum(1) + padding[:, 0].logical_not() > 1).any())


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
