"""Memory encoding on the CUDA kernels.

The gradient of the table is summed without atomics: PyTorch sorts the words by their row of the
table, and each block of threads sums those of its row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import _cuda
from fastattn.backends.cuda.operands import launch, why_not_dtype
from fastattn.backends.primitives import EncodeMemoryBackwardOptions, EncodeMemoryOptions

__all__ = ["encode_memory", "encode_memory_backward", "why_not"]

_MAX_WIDTH = 8192  # a block's sums, [4, D] floats, fit in shared memory


def why_not(weight: Tensor | None = None, grad: Tensor | None = None, **_: Any) -> list[str]:
    """Return the reasons why the kernels cannot run on these arguments."""
    x = grad if weight is None else weight  # the backward pass has no weight
    assert x is not None
    reasons = why_not_dtype(x.dtype)
    if x.shape[-1] > _MAX_WIDTH:
        reasons.append(f"a memory has {x.shape[-1]} columns; the kernels take up to {_MAX_WIDTH}")
    return reasons


def encode_memory(
    tokens: Tensor,  # [R, B, N, J] int64
    weight: Tensor,  # [R, G, V, D]
    factors: Tensor,  # [J, D] float32
    temporal: Tensor | None,  # [R, G, N, D]
    *,
    options: EncodeMemoryOptions,
) -> Tensor:
    """Return the memories [R, B, G, N, D], see ``docs/design.md``."""
    tensors = (tokens, weight, factors, temporal)
    memories: Tensor = launch(_cuda.encode_memory, weight, options, *tensors)
    return memories


def encode_memory_backward(
    grad: Tensor,  # [R, B, G, N, D]
    tokens: Tensor,
    factors: Tensor,
    *,
    options: EncodeMemoryBackwardOptions,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of weight and temporal, see ``docs/design.md``."""
    models, rows = tokens.shape[0], options.rows
    counts = (tokens >= 0) & (tokens < rows)
    if options.padding_idx is not None:
        counts &= tokens != options.padding_idx
    # Words that do not count are sorted after the last row.
    words, order = torch.where(counts, tokens, rows).flatten(1).sort(stable=True)
    bounds = torch.arange(rows + 1, device=tokens.device).expand(models, -1).contiguous()
    starts, any_word = torch.searchsorted(words, bounds), counts.any(-1)
    sorted_words = (order, starts, any_word)
    grads: Any = launch(
        _cuda.encode_memory_backward, grad, options, grad, tokens, factors, *sorted_words
    )
    return grads
