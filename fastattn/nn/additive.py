"""Modules of additive attention, under the names of other libraries."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import Parameter, UninitializedParameter

from fastattn.checks import check_dense
from fastattn.nn._sizes import check_dropout, check_optional_sizes, check_sizes
from fastattn.ops import additive_attention


class BahdanauAttention(nn.Module):
    r"""The attention of Bahdanau et al. 2015 (https://arxiv.org/abs/1409.0473), with projections.

    .. math:: e_{ij} = v^T \tanh(W query_i + U memory_j), \qquad
              context_i = \sum_j softmax_j(e_{ij}) \, value_j

    As in TensorFlow's ``BahdanauAttention(units)``, the projections have no bias, and the first
    call sets the widths of their inputs unless ``query_size`` and ``memory_size`` are given.

    Args:
        units: the width A of the hidden layer.
        normalize: use :math:`g \cdot v / \|v\|` for v, and add a bias in the hidden layer (Salimans
            and Kingma 2016, https://arxiv.org/abs/1602.07868).
        query_size, memory_size: the widths of query and memory; None: set by the first call.
        dropout: the probability of dropping a weight in training.
        device, dtype: of the parameters.

    Attributes:
        query_layer, memory_layer: ``nn.Linear(..., units, bias=False)``: W and U.
        v: [units]. g [] and bias [units] with ``normalize``, else None.
    """

    def __init__(
        self,
        units: int,
        normalize: bool = False,
        *,
        query_size: int | None = None,
        memory_size: int | None = None,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(units=units)
        check_optional_sizes(query_size=query_size, memory_size=memory_size)
        check_dropout(dropout)
        self.units, self.normalize, self.dropout = units, normalize, dropout
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.query_layer = _linear(query_size, units, factory)
        self.memory_layer = _linear(memory_size, units, factory)
        self.v = Parameter(torch.empty(units, **factory))
        self.g = Parameter(torch.empty((), **factory)) if normalize else None
        self.bias = Parameter(torch.empty(units, **factory)) if normalize else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw v uniformly within 1 / sqrt(units); set g to 1 / sqrt(units) and the bias to 0."""
        bound = 1 / math.sqrt(self.units)
        nn.init.uniform_(self.v, -bound, bound)
        if self.g is not None:
            nn.init.constant_(self.g, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        for layer in (self.query_layer, self.memory_layer):
            if not isinstance(layer.weight, UninitializedParameter):
                layer.reset_parameters()

    def forward(
        self,
        query: Tensor,
        memory: Tensor,
        value: Tensor | None = None,
        *,
        keys: Tensor | None = None,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the contexts and the weights (None if not needed).

        Args:
            query: [B, Tq, Dq], or [B, Dq] for one step of a decoder.
            memory: [B, Tk, Dk].
            value: [B, Tk, Dv]; None is memory.
            keys: ``memory_layer(memory)``, if already computed: a decoder computes it once.
            attn_mask, key_padding_mask: as for :func:`fastattn.additive_attention`.
            need_weights: return them, [B, Tq, Tk] ([B, Tk] for one step).
        """
        check_dense("BahdanauAttention", query=query, memory=memory)
        is_step = query.ndim == 2
        query = self.query_layer(query.unsqueeze(1) if is_step else query)
        keys = self.memory_layer(memory) if keys is None else keys
        v = self.v if self.g is None else self.g * self.v / torch.linalg.vector_norm(self.v)
        result = additive_attention(
            query,
            keys,
            memory if value is None else value,
            v,
            self.bias,
            attn_mask,
            key_padding_mask,
            self.dropout if self.training else 0.0,
            need_weights=need_weights,
        )
        context, weights = result if need_weights else (result, None)
        if is_step:
            context, weights = context[:, 0], None if weights is None else weights[:, 0]
        return context, weights

    def extra_repr(self) -> str:
        return f"units={self.units}, normalize={self.normalize}, dropout={self.dropout}"


class AdditiveAttention(LazyModuleMixin, nn.Module):
    r"""Additive attention without projections, with the names of Keras's layer.

    .. math:: e_{ij} = \sum_a scale_a \tanh(query_{ia} + key_{ja})

    Args:
        use_scale: learn ``scale``; else it is 1.
        dropout: the probability of dropping a weight in training.
        dim: the width of query and key; None: set by the first call.
        device, dtype: of the parameter.
    """

    scale: Any  # a Parameter (uninitialized before the first call), or None
    cls_to_become = None

    def __init__(
        self,
        use_scale: bool = True,
        dropout: float = 0.0,
        *,
        dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_optional_sizes(dim=dim)
        check_dropout(dropout)
        self.use_scale, self.dropout = use_scale, dropout
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        if not use_scale:
            self.register_parameter("scale", None)
        elif dim is None:
            self.scale = UninitializedParameter(**factory)
        else:
            self.scale = Parameter(torch.empty(dim, **factory))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the scale uniformly within sqrt(3 / dim), as Keras does."""
        if self.scale is not None and not self.has_uninitialized_params():
            bound = math.sqrt(3 / max(self.scale.numel(), 1))
            nn.init.uniform_(self.scale, -bound, bound)

    def initialize_parameters(self, query: Tensor, *args: Any, **kwargs: Any) -> None:
        """Called by ``LazyModuleMixin`` before the first forward."""
        if self.has_uninitialized_params():
            self.scale.materialize((query.shape[-1],))
            self.reset_parameters()

    def forward(
        self,
        query: Tensor,
        value: Tensor,
        key: Tensor | None = None,
        *,
        query_mask: Tensor | None = None,
        value_mask: Tensor | None = None,
        use_causal_mask: bool = False,
        return_attention_scores: bool = False,
    ) -> Any:
        """Return the result [B, Tq, Dv], or ``(result, weights [B, Tq, Tk])``.

        Args:
            query: [B, Tq, A].
            value: [B, Tk, Dv].
            key: [B, Tk, A]; None is value. (The order of the arguments is Keras's.)
            query_mask: [B, Tq] bool, False gives a result of 0.
            value_mask: [B, Tk] bool, False is ignored: the opposite of a ``key_padding_mask``.
            use_causal_mask: exclude the keys after the query's own position.
            return_attention_scores: also return the weights.
        """
        check_dense("AdditiveAttention", query=query, value=value)
        scale = query.new_ones(query.shape[-1]) if self.scale is None else self.scale
        result = additive_attention(
            query,
            value if key is None else key,
            value,
            scale,
            key_padding_mask=None if value_mask is None else ~value_mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=use_causal_mask,
            need_weights=return_attention_scores,
        )
        out, weights = result if return_attention_scores else (result, None)
        if query_mask is not None:
            out = torch.where(query_mask[..., None], out, 0.0)
        return (out, weights) if return_attention_scores else out

    def extra_repr(self) -> str:
        return f"use_scale={self.use_scale}, dropout={self.dropout}"


def _linear(size: int | None, units: int, factory: dict[str, Any]) -> nn.Linear:
    """A linear layer without bias; without a size, the first call sets it."""
    if size is None:
        return nn.LazyLinear(units, bias=False, **factory)
    return nn.Linear(size, units, bias=False, **factory)
