"""Memory encoding as a differentiable operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastattn._derivative import Derivative
from fastattn.backends.primitives import EncodeMemoryBackwardOptions, EncodeMemoryOptions
from fastattn.library import Operator


def _fake_backward(
    grad: Tensor, tokens: Tensor, factors: Tensor, options: EncodeMemoryBackwardOptions
) -> tuple[Tensor, Tensor]:
    models, _, tables, slots, dim = grad.shape
    return (
        grad.new_empty((models, tables, options.rows, dim)),
        grad.new_empty((models, tables, slots, dim) if options.temporal else (0,)),
    )


def _of_call(
    tokens: Tensor,
    weight: Tensor,
    factors: Tensor,
    temporal: Tensor | None,
    options: EncodeMemoryOptions,
) -> EncodeMemoryBackwardOptions:
    return EncodeMemoryBackwardOptions(
        rows=weight.shape[-2], temporal=temporal is not None, padding_idx=options.padding_idx
    )


def _flops(results: Any, tokens: Tensor, *rest: Any, backward: bool = False) -> int:
    out = results[0] if isinstance(results, list) else results
    return int(out.numel() * (2 * tokens.shape[-1] + 1))


class _Backward(Operator):
    def lifted(self, tensors: Sequence[Any]) -> list[Any]:
        """Add the dimension of models R, and for a single table G, which a plan omits."""
        grad, tokens, factors = tensors
        if grad.dim() < 5:
            grad = grad[None] if grad.dim() == 4 else grad[None, :, None]
        return [grad, tokens if tokens.dim() == 4 else tokens[None], factors]


encode = Operator(
    "encode_memory",
    "tokens: R B N J; weight: R G V D; factors: J D; temporal?: R G N D",
    "out: R B G N D",
    options=EncodeMemoryOptions,
    # dA[x_ij] += l_j o dm_i, dT_i += dm_i; l is a constant.
    derivative=Derivative(
        grads="out",
        reads="tokens factors",
        gives="weight temporal",
        options=EncodeMemoryBackwardOptions,
        opaque="factors",
        operator=_Backward,
        fake=_fake_backward,
        of_call=_of_call,
    ),
    flops=_flops,
    opaque=("factors",),
    checked_by=("cpu",),
)
