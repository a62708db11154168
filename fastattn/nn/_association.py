"""The shared part of the Hopfield modules: projections, heads, masks, and the retrieval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from fastattn.nn._masks import append_rows, merge_masks
from fastattn.ops.hopfield import hopfield_retrieve
from fastattn.ops.linear import linear


class Association(nn.Module):
    """Projects stored patterns, states and values to heads, retrieves, and projects the result.

    The parameters have the names and shapes of hflayers' ``HopfieldCore``, so its checkpoints load.
    There are H heads: queries and keys have the width ``head_dim``, values the width
    ``pattern_dim``.
    """

    in_proj_weight: Parameter | None
    q_proj_weight: Parameter | None
    k_proj_weight: Parameter | None
    v_proj_weight: Parameter | None
    in_proj_bias: Parameter | None
    p_norm_weight: Parameter | None
    p_norm_bias: Parameter | None
    bias_k: Parameter | None
    bias_v: Parameter | None

    def __init__(
        self,
        embed_dim: int | None,
        num_heads: int,
        head_dim: int | None,
        pattern_dim: int | None,
        out_dim: int | None,
        kdim: int | None,
        vdim: int | None,
        dropout: float,
        bias: bool,
        add_bias_kv: bool,
        add_zero_attn: bool,
        disable_out_projection: bool,
        key_as_static: bool,
        query_as_static: bool,
        value_as_static: bool,
        value_as_connected: bool,
        normalize_pattern: bool,
        normalize_pattern_affine: bool,
        normalize_pattern_eps: float,
        factory: dict[str, Any],
    ) -> None:
        super().__init__()
        static = key_as_static and query_as_static and value_as_static
        # Without projections the inputs keep their widths.
        self.static_execution = static and disable_out_projection and not normalize_pattern
        if self.static_execution:
            embed_dim = kdim = vdim = None
        elif embed_dim is None:
            raise ValueError("input_size is needed, unless nothing is projected")
        if not static and head_dim is None and embed_dim is not None and embed_dim % num_heads:
            raise ValueError(f"num_heads {num_heads} must divide input_size {embed_dim}")
        self.num_heads, self.dropout = num_heads, dropout
        self.embed_dim = embed_dim
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.out_dim = embed_dim if out_dim is None else out_dim
        self.key_as_static, self.query_as_static = key_as_static, query_as_static
        self.value_as_static, self.value_as_connected = value_as_static, value_as_connected
        self.add_zero_attn, self.disable_out_projection = add_zero_attn, disable_out_projection
        has_equal_widths = self.kdim == embed_dim == self.vdim and pattern_dim is None
        self._qkv_same_embed_dim = has_equal_widths and not value_as_connected
        if not self.static_execution:
            assert embed_dim is not None
            head_dim = embed_dim // num_heads if head_dim is None else head_dim
            pattern_dim = head_dim if pattern_dim is None else pattern_dim
            if value_as_connected and pattern_dim != head_dim:
                raise ValueError(
                    "pattern_size must be hidden_size if the pattern projection is connected, "
                    f"got {pattern_dim} and {head_dim}"
                )
        self.head_dim, self.pattern_dim = head_dim, pattern_dim
        self.normalize_pattern, self.normalize_pattern_eps = (
            normalize_pattern,
            normalize_pattern_eps,
        )

        key_width, value_width = num_heads * (head_dim or 0), num_heads * (pattern_dim or 0)
        sizes = {
            "q": None if query_as_static else (key_width, self.embed_dim),
            "k": None if key_as_static else (key_width, self.kdim),
            "v": None if value_as_static else (value_width, self.vdim),
        }
        if value_as_connected and not (key_as_static or value_as_static):
            sizes["v"] = (value_width, key_width)
        rows = sum(size[0] for size in sizes.values() if size is not None)
        has_joint_weight = self._qkv_same_embed_dim and rows > 0
        self._register("in_proj_weight", (rows, embed_dim) if has_joint_weight else None, factory)
        for name, size in sizes.items():
            separate_size = None if self._qkv_same_embed_dim else size
            self._register(f"{name}_proj_weight", separate_size, factory)
        # The bias has a part for the values even if they are static.
        bias_length = rows + (value_width if value_as_static else 0)
        self._register("in_proj_bias", (bias_length,) if bias and rows else None, factory)
        norm_size = (head_dim,) if normalize_pattern_affine else None
        self._register("p_norm_weight", norm_size, factory)
        self._register("p_norm_bias", norm_size, factory)
        # hflayers does not support this kind of appended pattern for static patterns either.
        bias_k = (1, 1, key_width) if add_bias_kv and not key_as_static else None
        bias_v = (1, 1, value_width) if add_bias_kv and not value_as_static else None
        if add_bias_kv and (bias_k is None or bias_v is None):
            raise ValueError("concat_bias_pattern needs patterns that are not static")
        self._register("bias_k", bias_k, factory)
        self._register("bias_v", bias_v, factory)
        self.out_proj: nn.Linear | None = None
        if not disable_out_projection:
            self.out_proj = nn.Linear(value_width, self.out_dim or 0, bias=bias, **factory)
        self.reset_parameters()

    def _register(self, name: str, size: Any, factory: dict[str, Any]) -> None:
        """Register a parameter of this size; without a size, register None."""
        self.register_parameter(
            name, None if size is None else Parameter(torch.empty(size, **factory))
        )

    def reset_parameters(self) -> None:
        """Draw the weights from N(0, 0.02^2) and set the biases to 0, as hflayers does."""
        for name, parameter in self.named_parameters():
            if name == "p_norm_weight":
                nn.init.ones_(parameter)
            elif name in ("in_proj_bias", "p_norm_bias", "out_proj.bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=0.02)

    # --- [N, S, E] -> [N, H, S, D] ---------------------------------------------------------------

    def project(self, stored: Tensor, state: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Project state, stored and value to heads; stored and value may have N = 1."""
        # A static input has no rows in the joint weight; static values have a bias all the same.
        static = (self.query_as_static, self.key_as_static, self.value_as_static)
        rows = [0 if is_static else self.num_heads * (self.head_dim or 0) for is_static in static]
        weights: list[Any] = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
        if self._qkv_same_embed_dim and self.in_proj_weight is not None:
            weights = list(self.in_proj_weight.split(rows))
        biases: Sequence[Tensor | None] = (None, None, None)
        if self.in_proj_bias is not None:
            biases = self.in_proj_bias.split([*rows[:2], len(self.in_proj_bias) - sum(rows[:2])])
        q = self._to_heads(state, weights[0], biases[0], self.query_as_static)
        k = self._to_heads(stored, weights[1], biases[1], self.key_as_static)
        if self.value_as_connected and not self.key_as_static:
            value = linear(value, weights[1], biases[1])
            if self.value_as_static:  # the keys serve as values, without another projection
                v = value.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            else:
                v = self._to_heads(value, weights[2], biases[2], False)
        else:
            v = self._to_heads(value, weights[2], biases[2], self.value_as_static)
        if self.normalize_pattern:
            q, k = self._normalize_heads(q), self._normalize_heads(k)
        return q, k, v

    def _to_heads(self, x: Tensor, weight: Any, bias: Tensor | None, static: bool) -> Tensor:
        """Project rows [N, S, E] to heads [N, H, S, D], or repeat static rows for each head."""
        if static:  # every head gets the full width
            return x.unsqueeze(1).expand(-1, self.num_heads, -1, -1)
        return linear(x, weight, bias).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _normalize_heads(self, x: Tensor) -> Tensor:
        """Apply a layer norm to every head, with one learned scale and shift for all heads."""
        eps = self.normalize_pattern_eps
        return F.layer_norm(x, x.shape[-1:], self.p_norm_weight, self.p_norm_bias, eps)

    def _append_rows(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the learned pattern and the pattern of zeros."""
        return (
            append_rows(k, self.bias_k, self.add_zero_attn),
            append_rows(v, self.bias_v, self.add_zero_attn),
        )

    # --- the retrieval ---------------------------------------------------------------------------

    def forward(
        self,
        stored: Tensor,  # [N|1, S, E]
        state: Tensor,  # [N, L, E]
        value: Tensor,  # [N|1, S, E]
        padding: Tensor | None,  # [N, S]
        mask: Tensor | None,  # [L, S] or [N H, L, S]
        scaling: float | Tensor,
        steps_max: int | Tensor | None,
        steps_eps: float | Tensor,
        stop: str,
        grad: str,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the result [N, L, out] and the weights [N, H, L, S]."""
        q, k, v = self.project(stored, state, value)
        k_len = k.shape[2]
        k, v = self._append_rows(k, v)
        merged = merge_masks(
            _as_bool(padding),
            _as_bool(mask),
            batch=q.shape[0],
            num_heads=self.num_heads,
            q_len=q.shape[2],
            k_len=k_len,
            appended=k.shape[2] - k_len,
        )

        def retrieve(heads: slice, beta: Any, steps: Any, eps: Any) -> Any:
            """Retrieve by these heads: the result, and the weights or None."""
            heads_mask = merged
            if merged is not None and merged.shape[1] > 1:
                heads_mask = merged[:, heads]
            result = hopfield_retrieve(
                q[:, heads],
                k[:, heads],
                v[:, heads],
                beta=beta,
                update_steps_max=None if steps is None or steps < 0 else int(steps),
                update_steps_eps=float(eps),
                stop=stop,
                grad=grad,
                attn_mask=heads_mask,
                dropout_p=self.dropout if self.training else 0.0,
                need_weights=need_weights,
            )
            return result if need_weights else (result, None)

        if isinstance(steps_max, Tensor) or isinstance(steps_eps, Tensor):  # one limit per head
            limits = (scaling, steps_max, steps_eps)
            results = [
                retrieve(slice(h, h + 1), *(x[h] if isinstance(x, Tensor) else x for x in limits))
                for h in range(self.num_heads)
            ]
            out = torch.cat([result[0] for result in results], 1)
            weights = torch.cat([result[1] for result in results], 1) if need_weights else None
        else:
            out, weights = retrieve(slice(None), scaling, steps_max, steps_eps)
        out = out.transpose(1, 2).flatten(2)
        if self.out_proj is not None:
            out = linear(out, self.out_proj.weight, self.out_proj.bias)
        return out, weights


def _as_bool(mask: Tensor | None) -> Tensor | None:
    """Convert a mask in uint8, which hflayers accepts, to bool."""
    return mask.bool() if mask is not None and mask.dtype == torch.uint8 else mask
