"""The projections of multi-head attention, from rows to heads and back.

Users may change any attribute of a module. As in PyTorch, each call reads the attributes, and wrong
values raise PyTorch's errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fastattn.ops.linear import linear


def project(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, batch_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the projections as views [N, H, L, D]; one GEMM serves inputs that are one tensor."""
    heads, bias = _head_sizes(module), module.in_proj_bias
    is_joint = module._qkv_same_embed_dim  # one weight serves all three
    weights = _read_weights(module, ("in",) if is_joint else ("q", "k", "v"))
    if is_joint:
        weight = weights[0]  # [3E, E]
        if query is key and key is value:
            q, k, v = _split_heads(linear(query, weight, bias), heads, batch_dim, count=3)
            return q, k, v
        if key is value:
            e = module.embed_dim
            q_bias, kv_bias = (None, None) if bias is None else (bias[:e], bias[e:])
            (q,) = _split_heads(linear(query, weight[:e], q_bias), heads, batch_dim, count=1)
            k, v = _split_heads(linear(key, weight[e:], kv_bias), heads, batch_dim, count=2)
            return q, k, v
        weights = weight.chunk(3)
    inputs = query, key, value
    biases: Sequence[Tensor | None] = (None, None, None) if bias is None else bias.chunk(3)
    if not is_joint:
        _check_separate(module.embed_dim, inputs, weights, biases)
    q, k, v = (
        _split_heads(linear(x, w, b), heads, batch_dim, count=1)[0]
        for x, w, b in zip(inputs, weights, biases, strict=True)
    )
    return q, k, v


def project_query(module: nn.MultiheadAttention, query: Tensor, batch_dim: int) -> Tensor:
    """Return the projection of the query alone, for calls with cached keys and values."""
    heads, width = _head_sizes(module), module.embed_dim
    bias = None if module.in_proj_bias is None else module.in_proj_bias[:width]
    if module._qkv_same_embed_dim:
        weight = _read_weights(module, ("in",))[0][:width]
    else:
        (weight,) = _read_weights(module, ("q",))
        _check_separate(width, (query,), (weight,), (bias,))
    return _split_heads(linear(query, weight, bias), heads, batch_dim, count=1)[0]


def project_out(module: nn.MultiheadAttention, out: Tensor, batch_dim: int) -> Tensor:
    """[N, H, L, D] -> [N, L, E] or [L, N, E]"""
    order = (0, 2, 1, 3) if batch_dim == 0 else (2, 0, 1, 3)
    # As in PyTorch, out_proj is never called: its parameters are read, and wrappers rely on that.
    out, weight, bias = out.permute(order).flatten(2), module.out_proj.weight, module.out_proj.bias
    if weight is None:
        raise TypeError("linear(): argument 'weight' (position 2) must be Tensor, not NoneType")
    return linear(out, weight, bias)


def _head_sizes(module: nn.MultiheadAttention) -> tuple[int, int]:
    """Return the number of heads H and their width D."""
    width, heads = module.embed_dim, module.num_heads
    if width // heads * heads != width:
        raise AssertionError(f"embed_dim {width} not divisible by num_heads {heads}")
    return heads, width // heads


def _read_weights(module: nn.MultiheadAttention, prefixes: Sequence[str]) -> Sequence[Tensor]:
    """Return the weights ``<prefix>_proj_weight``; raise PyTorch's error for a missing one."""
    weights: list[Any] = []
    for name in (f"{x}_proj_weight" for x in prefixes):
        weights.append(getattr(module, name))
        if weights[-1] is None:
            separate = name != "in_proj_weight"
            raise AssertionError(f"use_separate_proj_weight is {separate} but {name} is None")
    return weights


def _check_separate(
    width: int,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
) -> None:
    """Raise PyTorch's error for a separate weight or bias of the wrong shape."""
    for name, x, w, b in zip(("query", "key", "value"), inputs, weights, biases, strict=False):
        for kind, parameter, shape in (("weights", w, (width, x.shape[-1])), ("bias", b, (width,))):
            if parameter is not None and parameter.shape != shape:
                raise AssertionError(
                    f"expecting {name} {kind} shape of {shape}, but got {parameter.shape}"
                )


def _split_heads(
    joined: Tensor, head_sizes: tuple[int, int], batch_dim: int, count: int
) -> tuple[Tensor, ...]:
    """Split [N, L, count·E] or [L, N, count·E] into ``count`` views [N, H, L, D]."""
    heads = joined.view(*joined.shape[:2], count, *head_sizes)
    order = (0, 2, 1, 3) if batch_dim == 0 else (1, 2, 0, 3)
    # unbind first: its backward then writes the gradient of `joined` in its own layout, in one pass
    return tuple(x.permute(order) for x in heads.unbind(2))
