"""The definition of attention with a modified score.

``flex_attention`` (Dong et al. 2024, https://arxiv.org/abs/2412.05496), for query i and key j of
head h in entry b of the batch:

    s_ij = program(scale * q_i . k_j, b, h, i, j)
    s_ij = -inf                                unless the mask program makes the pair visible

then as in :mod:`fastattn.backends.reference.sdpa`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fastattn.backends._score_program import FIELDS, FLAGS, HEADER, Flag, evaluate
from fastattn.backends.primitives import AttentionOptions, FlexOptions
from fastattn.backends.reference._vjp import gradients
from fastattn.backends.reference.sdpa import attend


def flex_attention(
    query: Tensor,  # [B, Hq, Lq, D]
    key: Tensor,  # [B, Hkv, Lk, D]
    value: Tensor,  # [B, Hkv, Lk, Dv]
    score_program: Any,  # [size] int32, see backends/_score_program.py
    score_data: Tensor | None = None,  # [n], what the program gathers from
    mask_program: Tensor | None = None,  # [size] int32, see backends/_mask_program.py
    *,
    options: FlexOptions,
) -> tuple[Tensor, Tensor]:
    """Return ``(out [B, Hq, Lq, Dv], lse [B, Hq, Lq])``, see the equations above."""
    modify = functools.partial(modified_scores, score_program, score_data)
    attention_options = AttentionOptions(scale=options.scale)
    no_biases = (None, None, None)  # no mask, slopes or seed
    out, lse, _ = attend(
        *(query, key, value, *no_biases, attention_options),
        mask_program=mask_program,
        modify=modify,
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
    forward = functools.partial(flex_attention, options=options)
    tensors = (query, key, value, score_program, score_data, mask_program)
    needed = (0, 1, 2, 4) if int(score_program[FLAGS]) & Flag.SCATTERS else (0, 1, 2)  # 4: data
    grads = gradients(forward, tensors, needed, (grad_out, grad_lse))
    return *grads[:3], grads[4]


def modified_scores(program: Any, data: Tensor | None, score: Tensor) -> Tensor:
    """Modify scores [B, Hq, Lq, Lk] by a program, or by its parts if ONNX exports the call.

    The parts are the words of the program, the numbers that its steps name, and the captured
    integers; see ``fastattn/backends/_score_program.py`` for the layout.
    """
    b, h, q, k = (
        torch.arange(size, device=score.device).view([-1 if n == d else 1 for n in range(4)])
        for d, size in enumerate(score.shape)
    )
    if isinstance(program, Tensor):
        header = [int(n) for n in program[:HEADER]]
        end = HEADER + header[0] + FIELDS * sum(header[1:6])  # of the steps of all five sections
        *parts, captured = program.tensor_split((end, end + header[-1]))
        # One by one: `tolist` fails within `torch.func.vjp` of PyTorch 2.6 to 2.8.
        words, (batch, _, _, *named) = ([int(n) for n in part] for part in parts)
        program, b = (words, named, captured.long()), b % batch
    words, named, captured = program
    value = evaluate(words, named, data, captured, score, (b, h, q, k))
    return torch.broadcast_to(value, score.shape)
