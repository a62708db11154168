"""Modules of Luong attention: ``LuongAttention``, and OpenNMT's ``GlobalAttention``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from fastattn.checks import check_choice, check_dense
from fastattn.nn._sizes import check_dropout, check_optional_sizes, check_sizes
from fastattn.ops import additive_attention
from fastattn.ops.luong import METHODS, WINDOWS, luong_attention


class LuongAttention(nn.Module):
    r"""The attention of Luong et al. 2015 (https://arxiv.org/abs/1508.04025), with its weights.

    Args:
        query_size, key_size: the widths Dq and Dk; key_size None is query_size.
        method: "dot", "general" or "concat", the score; see :func:`fastattn.luong_attention`.
        window: "global", "local-m" or "local-p". The positions of "local-p" are predicted,
            :math:`p_i = T_k \, \sigma(v_p^T \tanh(W_p q_i))`.
        D: half the width of a local window.
        attention_size: the hidden width of "concat" and of the prediction; None is query_size.
        dropout: the probability of dropping a weight in training.
        device, dtype: of the parameters.

    Attributes:
        weight: W [Dq, Dk] of "general", or [A, Dq + Dk] of "concat", with v [A]; else None.
        position_weight, position_v: W_p [A, Dq] and v_p [A] of "local-p"; else None.
    """

    weight: Parameter | None
    v: Parameter | None
    position_weight: Parameter
    position_v: Parameter

    def __init__(
        self,
        query_size: int,
        key_size: int | None = None,
        method: str = "general",
        window: str = "global",
        D: int = 10,
        *,
        attention_size: int | None = None,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(query_size=query_size)
        check_optional_sizes(key_size=key_size, attention_size=attention_size)
        key_size = query_size if key_size is None else key_size
        check_choice("method", method, METHODS)
        check_choice("window", window, WINDOWS)
        if method == "dot" and query_size != key_size:
            raise ValueError(
                f"method='dot' needs query and key of one width, got {query_size} and {key_size}"
            )
        check_dropout(dropout)
        hidden = query_size if attention_size is None else attention_size
        self.method, self.window, self.D, self.dropout = method, window, D, dropout
        shapes: dict[str, tuple[int, ...] | None] = {
            "weight": {
                "general": (query_size, key_size),
                "concat": (hidden, query_size + key_size),
            }.get(method),
            "v": (hidden,) if method == "concat" else None,
            "position_weight": (hidden, query_size) if window == "local-p" else None,
            "position_v": (hidden,) if window == "local-p" else None,
        }
        for name, shape in shapes.items():
            tensor = None if shape is None else torch.empty(shape, device=device, dtype=dtype)
            self.register_parameter(name, None if tensor is None else Parameter(tensor))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every weight uniformly within 1 / sqrt of its last dimension."""
        for parameter in self.parameters():
            bound = max(parameter.shape[-1], 1) ** -0.5
            nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the contexts and the weights (None if not needed).

        Args:
            query: [B, Tq, Dq], or [B, Dq] for one step of a decoder.
            key: [B, Tk, Dk].
            value: [B, Tk, Dv]; None is key.
            key_padding_mask: [B, Tk], True is ignored. "local-p" predicts a position among the
                remaining keys.
            need_weights: return them, [B, Tq, Tk] ([B, Tk] for one step).
        """
        check_dense("LuongAttention", query=query, key=key)
        is_step = query.ndim == 2
        query = query.unsqueeze(1) if is_step else query
        weight: Any = (self.weight, self.v) if self.method == "concat" else self.weight
        positions = None
        if self.window == "local-p":
            hidden = torch.tanh(nn.functional.linear(query, self.position_weight))
            length: Any = key.shape[1]
            if key_padding_mask is not None:
                length = (~key_padding_mask).sum(1, keepdim=True).to(query.dtype)
            positions = length * torch.sigmoid(hidden @ self.position_v)
        result = luong_attention(
            query,
            key,
            key if value is None else value,
            method=self.method,
            weight=weight,
            window=self.window,
            D=self.D,
            positions=positions,
            key_padding_mask=key_padding_mask,
            dropout_p=self.dropout if self.training else 0.0,
            need_weights=need_weights,
        )
        context, weights = result if need_weights else (result, None)
        if is_step:
            context, weights = context[:, 0], None if weights is None else weights[:, 0]
        return context, weights

    def extra_repr(self) -> str:
        return f"method={self.method!r}, window={self.window!r}, D={self.D}, dropout={self.dropout}"


class GlobalAttention(nn.Module):
    r"""Global attention with the names of OpenNMT-py's layer, batch first.

    .. math:: a = softmax(score(source, memory)), \quad c = a \, memory, \quad
              out = \tanh(W_{out} [c; source])

    The score is Luong's "dot" or "general", or Bahdanau's "mlp", whose output has no tanh.

    Args:
        dim: the width of source, memory and output.
        coverage: add a learned multiple of the sum of earlier weights to the memory, followed by a
            tanh (Tu et al. 2016, https://arxiv.org/abs/1601.04811).
        attn_type: "dot", "general" or "mlp".
        device, dtype: of the parameters.

    Attributes:
        linear_in (general), linear_context, linear_query, v (mlp), linear_out, linear_cover
        (coverage): ``nn.Linear`` layers, with the names and shapes of OpenNMT-py's checkpoints.
    """

    def __init__(
        self,
        dim: int,
        coverage: bool = False,
        attn_type: str = "dot",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if attn_type not in ("dot", "general", "mlp"):
            raise ValueError(f"attn_type must be one of dot, general, mlp, got {attn_type!r}")
        check_sizes(dim=dim)
        self.dim, self.coverage, self.attn_type = dim, coverage, attn_type

        def layer(inputs: int, outputs: int, bias: bool) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=bias, device=device, dtype=dtype)

        if attn_type == "general":
            self.linear_in = layer(dim, dim, False)
        elif attn_type == "mlp":
            self.linear_context = layer(dim, dim, False)
            self.linear_query = layer(dim, dim, True)
            self.v = layer(dim, 1, False)
        self.linear_out = layer(2 * dim, dim, attn_type == "mlp")
        if coverage:
            self.linear_cover = layer(1, dim, False)

    def forward(
        self,
        source: Tensor,
        memory_bank: Tensor,
        memory_lengths: Tensor | None = None,
        coverage: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the weights.

        Args:
            source: [B, Tq, dim], or [B, dim] for one step.
            memory_bank: [B, Tk, dim].
            memory_lengths: [B], the number of valid rows of each memory; None: all.
            coverage: [B, Tk], the sum of the weights so far; needs ``coverage=True``.

        Returns:
            [B, Tq, dim] and [B, Tq, Tk]; for one step [B, dim] and [B, Tk].
        """
        check_dense("GlobalAttention", source=source, memory_bank=memory_bank)
        is_step = source.ndim == 2
        source = source.unsqueeze(1) if is_step else source
        if coverage is not None:
            if not self.coverage:
                raise ValueError("coverage needs GlobalAttention(..., coverage=True)")
            memory_bank = torch.tanh(memory_bank + self.linear_cover(coverage.unsqueeze(-1)))
        padding = None
        if memory_lengths is not None:
            rows = torch.arange(memory_bank.shape[1], device=memory_bank.device)
            padding = rows >= memory_lengths.unsqueeze(1)
        context, weights = self._attend(source, memory_bank, padding)
        out = self.linear_out(torch.cat([context, source], -1))
        out = out if self.attn_type == "mlp" else torch.tanh(out)
        return (out[:, 0], weights[:, 0]) if is_step else (out, weights)

    def _attend(
        self, source: Tensor, memory: Tensor, padding: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Contexts [B, Tq, dim] and weights [B, Tq, Tk]."""
        if self.attn_type == "mlp":
            return additive_attention(
                self.linear_query(source),
                self.linear_context(memory),
                memory,
                self.v.weight[0],
                key_padding_mask=padding,
                need_weights=True,
            )
        query = self.linear_in(source) if self.attn_type == "general" else source
        return luong_attention(query, memory, memory, key_padding_mask=padding, need_weights=True)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, coverage={self.coverage}, attn_type={self.attn_type!r}"
