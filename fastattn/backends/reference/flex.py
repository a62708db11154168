"""The definition of attention with a modified score.

``flex_attention`` (Dong et al. 2024, https://arxiv.org/abs/2412.05496), for query i and key j of
head h in entry b of the batch:

    s_ij = program(scale * q_i . k_j, b, h, i, j)
    s_ij = -inf                                unless the mask program makes the pair visible

then as in :mod:`fastattn.backends.reference.sdpa`.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn.backends._score_program import FIELDS, FLAGS, HEADER, Flag, Op
from fastattn.backends.primitives import AttentionOptions, FlexOptions
from fastattn.backends.reference._vjp import gradients
from fastattn.backends.reference.sdpa import attend

__all__ = ["flex_attention", "flex_attention_backward"]


def flex_attention(
    query: Tensor,  # [B, Hq, Lq, D]
    key: Tensor,  # [B, Hkv, Lk, D]
    value: Tensor,  # [B, Hkv, Lk, Dv]
    score_program: Tensor,  # [size] int32, see backends/_score_program.py
    score_data: Tensor | None = None,  # [n], what the program gathers from
    mask_program: Tensor | None = None,  # [size] int32, see backends/_mask_program.py
    *,
    options: FlexOptions,
) -> tuple[Tensor, Tensor]:
    """Return ``(out [B, Hq, Lq, Dv], lse [B, Hq, Lq])``, see the equations above."""
    modify = functools.partial(modified_scores, score_program, score_data)
    given = AttentionOptions(scale=options.scale)
    out, lse, _ = attend(
        query, key, value, None, None, None, given, mask_program=mask_program, modify=modify
    )
    return out.to(query.dtype), lse.double()


def flex_attention_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_program: Tensor,
    out: Tensor,
    lse: Tensor,
    score_data: Tensor | None = None,
    mask_program: Tensor | None = None,
    *,
    options: FlexOptions,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key, value and score_data, differentiable again."""
    function = functools.partial(flex_attention, options=options)
    tensors = (query, key, value, score_program, score_data, mask_program)
    wanted = (0, 1, 2, 4) if int(score_program[FLAGS]) & Flag.SCATTERS else (0, 1, 2)
    found = gradients(function, tensors, wanted, (grad_out, grad_lse))
    return *found[:3], found[4]


def modified_scores(program: Tensor, data: Tensor | None, score: Tensor) -> Tensor:
    """The program's value for scores [B, Hq, Lq, Lk]. Its steps are read as numbers."""
    header = [int(n) for n in program[:HEADER]]
    batch, registers, before, each, *_, value, _, _, integers = header
    first = HEADER + registers
    words = [int(n) for n in program[first : first + FIELDS * (before + each)]]
    captured = program[program.shape[0] - integers :].long()
    indices = [
        torch.arange(size, device=score.device).view([-1 if n == d else 1 for n in range(4)])
        for d, size in enumerate(score.shape)
    ]
    indices[0] = indices[0] % batch
    found: dict[int, Any] = {0: score}
    for at in range(0, len(words), FIELDS):
        op, to, a, b, c = words[at : at + FIELDS]
        if op == Op.CONST:
            found[to] = score.new_tensor(struct.unpack("<d", struct.pack("<ii", a, b))[0])
        elif op == Op.INT:
            found[to] = torch.tensor(a, device=score.device)
        elif op in (Op.BATCH, Op.HEAD, Op.QUERY, Op.KEY):
            found[to] = indices[op - Op.BATCH]
        elif op == Op.INDEX:
            x = found[a]
            found[to] = torch.where(x < 0, x + b, x).clamp(0, b - 1) * c
        elif op in (Op.GATHER, Op.GATHER_INT):
            source = data if op == Op.GATHER else captured
            assert source is not None
            found[to] = source[b + found[a].clamp(0, c - 1)]
            if op == Op.GATHER:
                found[to] = found[to].to(score.dtype)
        elif op == Op.SELECT:
            found[to] = torch.where(found[a], *torch.broadcast_tensors(found[b], found[c]))
        elif op == Op.TO_FLOAT:
            found[to] = found[a].to(score.dtype)
        else:
            unary = op in _UNARY
            found[to] = _UNARY[op](found[a]) if unary else _BINARY[op](found[a], found[b])
    return torch.broadcast_to(found[value], score.shape)


def _divided(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b == 0, 0, a.div(torch.where(b == 0, 1, b), rounding_mode="floor"))


_UNARY: dict[int, Callable[..., Tensor]] = {
    **{Op[name.upper()]: getattr(torch, name)
       for name in "abs exp log tanh sigmoid sqrt floor".split()},
    Op.NEG: torch.neg, Op.IABS: torch.abs, Op.NOT: torch.bitwise_not,
    Op.TO_INT: lambda x: x.to(torch.int64),
}  # fmt: skip
_BINARY: dict[int, Callable[..., Tensor]] = {
    **{Op[kind + name.upper()]: getattr(torch, name)
       for name in "add sub mul lt le eq".split() for kind in ("", "I")},
    Op.DIV: torch.div, Op.MIN: torch.minimum, Op.MAX: torch.maximum,
    Op.IDIV: _divided, Op.IMOD: lambda a, b: a - _divided(a, b) * b,
    Op.AND: torch.bitwise_and, Op.OR: torch.bitwise_or, Op.XOR: torch.bitwise_xor,
}  # fmt: skip
