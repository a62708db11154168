"""Encoders of transformers: each layer as one native call, and no work on padding."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    BaseModelOutputWithPoolingAndCrossAttentions,
)

from fastattn import compat, dispatch
from fastattn.compat import runs_eagerly
from fastattn.integrations.transformers._recording import anything_is_recorded, weights_are_recorded
from fastattn.nn._encoder_layer import (
    Names,
    Native,
    Plan,
    cached_plan,
    can_run_native,
    does_nothing,
    layer_plan,
    pack_rows,
    part_of,
    plan_of,
    run_native,
)

_NAME = "fastattn"  # in transformers' registry
# Arguments on which the result of a layer does not depend.
_IRRELEVANT = frozenset(
    "cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k seq_idx position_ids return_dict "
    "output_hidden_states use_cache num_items_in_batch".split()
)


class FusedLayer(Native):
    """The forward of an encoder layer in one native call, where it can be."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, *others: Any, **options: Any
    ) -> Any:
        if attention_mask is None and is_plain(others, options) and hidden_states.dim() == 3:
            starts = (options.get("cu_seq_lens_q"), options.get("cu_seq_lens_k"))
            y = self._try_native(hidden_states, *starts)
            if y is not None:
                return y
        stock: Any = super()
        return stock.forward(hidden_states, attention_mask, *others, **options)

    def _try_native(self, x: Tensor, q_starts: Any, k_starts: Any) -> Tensor | None:
        if q_starts is not k_starts or not _runs_on_fastattn(part_of(self, self.NAMES.attention)):
            return None
        if q_starts is None:
            return run_native((self,), self.NAMES, x)
        y = run_native((self,), self.NAMES, x[0], q_starts) if len(x) == 1 else None
        return None if y is None else y[None]


class _Bert(FusedLayer):
    NAMES = Names(
        linear="attention.self.query attention.self.key attention.self.value "
        "attention.output.dense intermediate.dense output.dense",
        norms="attention.output.LayerNorm output.LayerNorm",
        heads="attention.self.num_attention_heads",
        activation="intermediate.intermediate_act_fn",
    )


class _DistilBert(FusedLayer):
    NAMES = Names(
        linear="attention.q_lin attention.k_lin attention.v_lin attention.out_lin "
        "ffn.lin1 ffn.lin2",
        norms="sa_layer_norm output_layer_norm",
        heads="attention.n_heads",
        activation="ffn.activation",
    )


class _ViT(FusedLayer):
    NAMES = Names(
        linear="attention.q_proj attention.k_proj attention.v_proj attention.o_proj "
        "mlp.fc1 mlp.fc2",
        norms="layernorm_before layernorm_after",
        heads="attention.num_attention_heads",
        activation="mlp.activation_fn",
        norm_first=True,
    )


class _Dinov2(FusedLayer):
    NAMES = _ViT.NAMES._replace(norms="norm1 norm2", scales="layer_scale1 layer_scale2")


class _Siglip(FusedLayer):
    NAMES = Names(
        linear="self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj "
        "mlp.fc1 mlp.fc2",
        norms="layer_norm1 layer_norm2",
        heads="self_attn.num_heads",
        activation="mlp.activation_fn",
        norm_first=True,
    )


class _Whisper(FusedLayer):
    NAMES = Names(
        linear="self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj fc1 fc2",
        norms="self_attn_layer_norm final_layer_norm",
        heads="self_attn.num_heads",
        activation="activation_fn",
        norm_first=True,
    )

    def _try_native(self, x: Tensor, q_starts: Any, k_starts: Any) -> Tensor | None:
        if x.dtype == torch.float16:  # the stock layer clamps values that overflow
            return None
        return super()._try_native(x, q_starts, k_starts)


class UnpaddedEncoder(nn.Module):
    """The forward of a stack of layers on the rows that are no padding; padding gets 0."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, *others: Any, **options: Any
    ) -> Any:
        stock: Any = super()
        x, mask = hidden_states, attention_mask
        padding = _padding_of_boolean(mask, x) if self._allows_packing(x, others, options) else None
        if padding is None or not self._layers_allow_packing():
            return stock.forward(x, mask, *others, **options)
        rows, starts, restore = pack_rows(x, padding)
        packed: dict[str, Any] = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
        longest = int(starts.diff().max())
        packed |= {"max_length_q": longest, "max_length_k": longest}
        output = stock.forward(rows[None], None, *others, **{**options, **packed})
        output.last_hidden_state = restore(output.last_hidden_state[0])
        return output

    def _allows_packing(self, x: Tensor, others: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Whether only the layers of this call depend on which sequence a row belongs to."""
        if x.dim() != 3 or self.training or not is_plain(others, options):
            return False
        if options.get("output_hidden_states") or options.get("return_dict", True) is False:
            return False
        is_packed = options.get("cu_seq_lens_q") is not None
        return not is_packed and compat.may_plan() and not anything_is_recorded()

    def _layers_allow_packing(self) -> bool:
        """Whether fastattn computes the attention of all layers, and no hook reads their rows."""
        inside = [module for module in self.modules() if module is not self]
        attentions = [m for m in inside if {"config", "scaling"} <= vars(m).keys()]
        if not attentions or not all(map(_runs_on_fastattn, attentions)):
            return False
        return not compat.have_hooks(inside, does_nothing)


def _padding_of_boolean(mask: Any, x: Tensor) -> Tensor | None:
    """[B, L], True at padding; None unless a mask [B, 1, 1 or L, L] is the same for all queries."""
    if type(mask) is not Tensor or mask.dtype != torch.bool or mask.dim() != 4:
        return None
    if mask.shape[1] != 1 or (mask.shape[2] != 1 and mask.stride(2) != 0):
        return None  # each query may have other keys
    if (mask.shape[0], mask.shape[3]) != x.shape[:2] or not runs_eagerly(x, mask):
        return None
    return mask[:, 0, 0, :].logical_not()


@functools.cache
def _has_native_forward(layer: Any) -> bool:
    """Whether this class of layers has the native forward, which transformers may wrap."""
    return inspect.unwrap(layer.forward) is FusedLayer.forward


_MPNET = _Bert.NAMES._replace(
    linear="attention.attn.q attention.attn.k attention.attn.v attention.attn.o "
    "intermediate.dense output.dense",
    norms="attention.LayerNorm output.LayerNorm",
    heads="attention.attn.num_attention_heads",
)


class MPNetStack(Native):
    """The forward of MPNet's layers, which share a bias of distances, without padding.

    Stock stores that bias for all pairs of a batch and adds it, and a mask, to stored scores. Here
    the layers read the table of distances.
    """

    NAMES = _MPNET

    def native_layers(self) -> Collection[nn.Module]:
        layers: Any = self.layer
        return layers

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, *others: Any, **options: Any
    ) -> Any:
        stock: Any = super()
        if is_plain(others, options) and not options.get("output_hidden_states"):
            y = self._try_packed(hidden_states, attention_mask)
            if y is not None:
                return BaseModelOutput(last_hidden_state=y) if options.get("return_dict") else (y,)
        return stock.forward(hidden_states, attention_mask, *others, **options)

    def _try_packed(self, x: Tensor, mask: Any) -> Tensor | None:
        layers: Any = self.layer
        embedding: Any = self.relative_attention_bias
        if x.dim() != 3 or compat.have_hooks((*layers, embedding), does_nothing):
            return None
        if type(embedding) is not nn.Embedding or self.training:
            return None
        if not can_run_native(layers, _MPNET):
            return None
        no_padding = x.new_zeros(x.shape[:2], dtype=torch.bool)
        padding = no_padding if mask is None else _padding_of_additive(mask, x)
        if padding is None or has_gaps(padding):
            return None
        rows, starts, restore = pack_rows(x, padding)
        longest = max(1, int(starts.diff().max()))  # 1 if all rows are padding
        distances = torch.arange(longest - 1, -longest, -1)  # key minus query, as in stock
        buckets: Any = self.relative_position_bucket
        table = embedding.weight[buckets(distances)].t().float().contiguous()
        y = run_native(layers, _MPNET, rows, starts, table)
        return None if y is None else restore(y)


class TextModel(Native):
    """The forward of a text encoder in one native call, embeddings and layers, where it can be.

    Between kernels that read megabytes of weights, Python runs with cold caches, so the stock code
    around the layers takes longer than its work.
    """

    WHAT = "a text encoder"

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        if cls.__bases__[0] is not TextModel:  # a subclass of what accelerate() made
            return
        stock_class: Any = cls.__bases__[1]  # accelerate() puts TextModel in front of it
        stock = stock_class.forward

        @functools.wraps(stock)  # libraries inspect which arguments it has
        def forward(self: TextModel, *args: Any, **named: Any) -> Any:
            # The first two arguments are the same in all models, the others must be named.
            output = self._try_native(*args, **named) if len(args) < 3 else None
            return stock(self, *args, **named) if output is None else output

        cls.forward = forward

    def _try_native(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        *,
        token_type_ids: Any = None,
        position_ids: Any = None,
        cu_seq_lens_q: Any = None,
        cu_seq_lens_k: Any = None,
        **options: Any,
    ) -> Any:
        if not compat.may_plan() or compat.has_global_hook() or anything_is_recorded():
            return None
        if cu_seq_lens_q is not cu_seq_lens_k or not is_plain((), options):
            return None
        if options.get("output_hidden_states") or options.get("return_dict", True) is False:
            return None
        tensors = (input_ids, attention_mask, token_type_ids, position_ids, cu_seq_lens_q)
        cached: _TextPlan | None = cached_plan(self)
        output = None if cached is None else cached.run(tensors)
        if output is None:
            plan = _text_plan_of(self)
            output = None if plan in (None, cached) else plan.run(tensors)
        return output

    def why_not_native(self) -> str:
        plan = _text_plan_of(self)
        if plan is None or plan.native is None:
            return "a layer is not native, or the embeddings, hooks or configuration are unusual"
        return next(iter(plan.layers)).why_not_native()


class _TextPlan(Plan):
    """The native plan of a text encoder."""

    def __init__(self, model: nn.Module) -> None:
        embeddings, stack = part_of(model, "embeddings"), part_of(model, _name_of_stack(model))
        inside = [*embeddings.modules(), stack, part_of(stack, "layer")]
        super().__init__(inside, [*compat.state_of(model), vars(model.config)])
        self.pooler = compat.children_of(model).get("pooler")
        self.output_class = _TEXT_OUTPUTS[name_of(type(model)).removesuffix("Model")]
        self.layers: list[Any] = [*part_of(stack, "layer")]
        self.plans = [layer_plan(x, x.NAMES) for x in self.layers if isinstance(x, FusedLayer)]
        options = None
        with contextlib.suppress(AttributeError, KeyError):  # the model lacks a usual part
            options = self._native_options(model, embeddings, stack, inside)
        if options is not None:
            native: Any = dispatch.load("cpu")
            self.native = native.TextPlan(self.facts, *options)

    def _native_options(
        self, model: Any, embeddings: Any, stack: Any, inside: list[nn.Module]
    ) -> Any:
        """The arguments of the native plan; None if a part of the model is unusual."""
        children, config = dict(embeddings.named_children()), model.config
        layer_classes: Any = map(type, self.layers)
        norm, dropout = children.pop("LayerNorm"), children.pop("dropout")
        tables = [children.pop(f"{x}_embeddings", None) for x in ("word", "position", "token_type")]
        is_usual = (
            not children  # left over
            and not compat.have_hooks((*inside, *self.layers), does_nothing)
            and {*compat.children_of(model)} <= {"embeddings", _name_of_stack(model), "pooler"}
            and name_of(type(embeddings)) in _EMBEDDINGS
            and name_of(type(stack)) in _ENCODERS
            and all(x is None or (type(x) is nn.Embedding and x.max_norm is None) for x in tables)
            and type(norm) is nn.LayerNorm
            and len(norm.normalized_shape) == 1
            and not (model.training or dropout.training)
            and config.return_dict
            and not (config.output_attentions or config.output_hidden_states)
            and not getattr(config, "is_decoder", False)
            and all(map(_has_native_forward, layer_classes))
        )
        attentions = [part_of(x, x.NAMES.attention) for x in self.layers] if is_usual else []
        plans = tuple([x.native for x in self.plans if x is not None])
        if not attentions or None in plans or len(plans) != len(attentions):
            return None
        if not all(x.config is config and _runs_on_fastattn(x) for x in attentions):
            return None
        weights = [None if x is None else x.weight for x in tables]
        default_ids = [getattr(embeddings, x, None) for x in ("position_ids", "token_type_ids")]
        tensors = (*weights, norm.weight, norm.bias, *default_ids)
        padding_id = getattr(embeddings, "padding_idx", -1)
        return tensors, norm.eps, padding_id, isinstance(stack, UnpaddedEncoder), plans

    def run(self, tensors: tuple[Any, ...]) -> Any:
        """The output of the model; None if its own forward must run."""
        if self.native is None:
            return None
        run: Any = dispatch.load("cpu").encode_texts  # type: ignore[union-attr]
        y = run(*tensors, texts=self.native, wants_gradients=torch.is_grad_enabled())
        if y is None:
            return None
        if self.pooler is None:
            return self.output_class(last_hidden_state=y)
        return self.output_class(last_hidden_state=y, pooler_output=self.pooler(y))

    def holds(self) -> bool:
        return super().holds() and all(x is not None and x.holds() for x in self.plans)


def _text_plan_of(model: nn.Module) -> _TextPlan | None:
    with contextlib.suppress(AttributeError, KeyError):  # the model lacks a usual part
        return plan_of(model, _TextPlan)
    return None


def _name_of_stack(model: nn.Module) -> str:
    return "transformer" if "transformer" in compat.children_of(model) else "encoder"


def has_gaps(padding: Tensor) -> bool:
    """Whether padding [B, L] is between tokens of a sequence, so packing would change distances."""
    starts = padding[:, :-1] > padding[:, 1:]  # of the runs of tokens
    return bool((starts.sum(1) + padding[:, 0].logical_not() > 1).any())


def _padding_of_additive(mask: Any, x: Tensor) -> Tensor | None:
    """As :func:`_padding_of_boolean`, also for a floating mask of 0 and the least number."""
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
    same_for_queries = mask.stride(2) == 0 or mask.shape[2] == 1 or (mask[:, 0] == keys).all()
    return hidden[:, 0] if same_for_queries else None


def is_plain(others: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether a call has no argument that changes the result."""
    values = [*others, *(x for name, x in options.items() if name not in _IRRELEVANT)]
    return all(x is None or x is False for x in values)


def _runs_on_fastattn(attention: Any) -> bool:
    """Whether fastattn computes an attention, which is not causal and records no weights."""
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
# The text encoders, by the beginnings of their names, and the classes of their outputs.
_TEXT_OUTPUTS: dict[str, Any] = {
    "bert.Bert": BaseModelOutputWithPoolingAndCrossAttentions,
    "camembert.Camembert": BaseModelOutputWithPoolingAndCrossAttentions,
    "data2vec.Data2VecText": BaseModelOutputWithPoolingAndCrossAttentions,
    "distilbert.DistilBert": BaseModelOutput,
    "electra.Electra": BaseModelOutputWithPastAndCrossAttentions,
    "roberta.Roberta": BaseModelOutputWithPoolingAndCrossAttentions,
    "xlm_roberta.XLMRoberta": BaseModelOutputWithPoolingAndCrossAttentions,
}
_EMBEDDINGS = {"distilbert.Embeddings", *(f"{name}Embeddings" for name in _TEXT_OUTPUTS)}
_ENCODERS = {"distilbert.Transformer", *(f"{name}Encoder" for name in _TEXT_OUTPUTS)}


def layer_class(module: nn.Module) -> type | None:
    """The class with a native forward for a layer of transformers, None if it has none."""
    native = _LAYERS.get(name_of(type(module)))
    if native is None:
        return None
    forward: Any = type(module).forward
    result_type = forward.__annotations__.get("return")  # a tuple in some versions
    return native if str(result_type) in ("torch.Tensor", str(Tensor)) else None


def encoder_class(module: nn.Module) -> type | None:
    """The class for a stack of layers of transformers, None if it has none."""
    name = name_of(type(module))
    if name == "mpnet.MPNetEncoder":
        return MPNetStack
    return UnpaddedEncoder if name in _ENCODERS else None


def model_class(module: nn.Module) -> type | None:
    """The class for a text encoder of transformers, None if it has none."""
    return TextModel if name_of(type(module)).removesuffix("Model") in _TEXT_OUTPUTS else None


def name_of(kind: type) -> str:
    """The model and the name of a class of transformers, "bert.BertLayer"; "" for other classes."""
    packages = kind.__module__.split(".")
    if packages[:2] != ["transformers", "models"] or len(packages) < 4:
        return ""
    return f"{packages[2]}.{kind.__name__}"
