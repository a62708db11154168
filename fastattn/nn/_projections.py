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
    """The projections as views [N, H, L, D]; inputs that are the same tensor share one GEMM."""
    heads, bias = _heads_of(module), module.in_proj_bias
    joint = module._qkv_same_embed_dim  # one weight serves all three
    weights = _weights(module, ("in",) if joint else ("q", "k", "v"))
    if joint:
        weight = weights[0]  # [3E, E]
        if query is key and key is value:
            q, k, v = _split(linear(query, weight, bias), heads, batch_dim, 3)
            return q, k, v
        if key is value:
            e = module.embed_dim
            b_q, b_kv = (None, None) if bias is None else (bias[:e], bias[e:])
            (q,) = _split(linear(query, weight[:e], b_q), heads, batch_dim, 1)
            k, v = _split(linear(key, weight[e:], b_kv), heads, batch_dim, 2)
            return q, k, v
        weights = weight.chunk(3)
    inputs = query, key, value
    biases: Sequence[Tensor | None] = (None, None, None) if bias is None else bias.chunk(3)
    if not joint:
        _check_separate(module.embed_dim, inputs, weights, biases)
    q, k, v = (
        _split(linear(x, w, b), heads, batch_dim, 1)[0]
        for x, w, b in zip(inputs, weights, biases, strict=True)
    )
    return q, k, v


def project_query(module: nn.MultiheadAttention, query: Tensor, batch_dim: int) -> Tensor:
    """The projection of the query alone, where keys and values are cached."""
    heads, width = _heads_of(module), module.embed_dim
    bias = None if module.in_proj_bias is None else module.in_proj_bias[:width]
    if module._qkv_same_embed_dim:
        weight = _weights(module, ("in",))[0][:width]
    else:
        (weight,) = _weights(module, ("q",))
        _check_separate(width, (query,), (weight,), (bias,))
    return _split(linear(query, weight, bias), heads, batch_dim, 1)[0]


def project_out(module: nn.MultiheadAttention, out: Tensor, batch_dim: int) -> Tensor:
    """[N, H, L, D] -> [N, L, E] or [L, N, E]"""
    order = (0, 2, 1, 3) if batch_dim == 0 else (2, 0, 1, 3)
    # As in PyTorch, out_proj is never called: its parameters are read, and wrappers rely on that.
    out, weight, bias = out.permute(order).flatten(2), module.out_proj.weight, module.out_proj.bias
    if weight is None:
        raise TypeError("linear(): argument 'weight' (position 2) must be Tensor, not NoneType")
    return linear(out, weight, bias)


def _heads_of(module: nn.MultiheadAttention) -> tuple[int, int]:
    """H and D."""
    width, heads = module.embed_dim, module.num_heads
    if width // heads * heads != width:
        raise AssertionError(f"embed_dim {width} not divisible by num_heads {heads}")
    return heads, width // heads


def _weights(module: nn.MultiheadAttention, prefixes: Sequence[str]) -> Sequence[Tensor]:
    """The projection weights of these prefixes, or PyTorch's error for a missing one."""
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


def _split(
    packed: Tensor, heads: tuple[int, int], batch_dim: int, count: int
) -> tuple[Tensor, ...]:
    """[N, L, count·E] or [L, N, count·E] -> ``count`` views [N, H, L, D]"""
    split = packed.view(*packed.shape[:2], count, *heads)
    order = (0, 2, 1, 3) if batch_dim == 0 else (1, 2, 0, 3)
    # unbind first: its backward then writes the gradient of `packed` in its own layout, in one pass
    return tuple(x.permute(order) for x in split.unbind(2))
