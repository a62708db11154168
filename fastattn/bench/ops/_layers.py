"""The layers of a Transformer in plain PyTorch, with parameters by their names in `torch.nn`."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from fastattn.bench.ops._attention import attend
from fastattn.bench.ops._base import Inputs
from fastattn.bench.ops._module import below


def multihead(
    own: Inputs,
    x: Tensor,  # [B, L, E]
    source: Tensor,  # [B, S, E], of keys and values
    heads: int,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`MultiheadAttention`: [B, L, E], and the weights [B, H, L, S]."""
    weight, offset = own["in_proj_weight"], own["in_proj_bias"]
    if source is x:
        projected = (x @ weight.T + offset).chunk(3, -1)
    else:
        parts = zip((x, source, source), weight.chunk(3), offset.chunk(3), strict=True)
        projected = tuple(part @ w.T + b for part, w, b in parts)
    query, key, value = (y.unflatten(-1, (heads, -1)).transpose(1, 2) for y in projected)
    out, weights = attend(query, key, value, visible, bias)
    return linear(below(own, "out_proj."), out.transpose(1, 2).flatten(2)), weights


def encoder_layer(own: Inputs, x: Tensor, heads: int, visible: Tensor | None = None) -> Tensor:
    attended, _ = multihead(below(own, "self_attn."), x, x, heads, visible)
    x = norm(below(own, "norm1."), x + attended)
    return norm(below(own, "norm2."), x + _feed_forward(own, x))


def decoder_layer(own: Inputs, x: Tensor, memory: Tensor, heads: int, visible: Tensor) -> Tensor:
    attended, _ = multihead(below(own, "self_attn."), x, x, heads, visible)
    x = norm(below(own, "norm1."), x + attended)
    attended, _ = multihead(below(own, "multihead_attn."), x, memory, heads)
    x = norm(below(own, "norm2."), x + attended)
    return norm(below(own, "norm3."), x + _feed_forward(own, x))


def linear(own: Inputs, x: Tensor) -> Tensor:
    return x @ own["weight"].T + own["bias"]


def norm(own: Inputs, x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], own["weight"], own["bias"])


def _feed_forward(own: Inputs, x: Tensor) -> Tensor:
    return linear(below(own, "linear2."), functional.gelu(linear(below(own, "linear1."), x)))
