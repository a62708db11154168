"""The gradient of memory encoding on the CUDA kernels.

The gradient of the table is summed without atomics: PyTorch sorts the words by their row of the
table, and each block of threads sums the words of its row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import _cuda
from fastattn.backends.cuda.operands import launch_on_stream
from fastattn.backends.primitives import EncodeMemoryBackwardOptions

_encode_memory_backward = launch_on_stream(_cuda.encode_memory_backward)


def encode_memory_backward(
    grad: Tensor,  # [R, B, G, N, D]
    tokens: Tensor,  # [R, B, N, J] int64
    factors: Tensor,  # [J, D] float32
    *,
    options: EncodeMemoryBackwardOptions,
) -> Any:
    """Return the gradients of weight and temporal, see ``docs/design.md``."""
    models, rows = tokens.shape[0], options.rows
    is_word = (tokens >= 0) & (tokens < rows)
    if options.padding_idx is not None:
        is_word &= tokens != options.padding_idx
    # Padding is sorted after the last row.
    sorted_rows, order = torch.where(is_word, tokens, rows).flatten(1).sort(stable=True)
    bounds = torch.arange(rows + 1, device=tokens.device).expand(models, -1).contiguous()
    starts, any_word = torch.searchsorted(sorted_rows, bounds), is_word.any(-1)
    return _encode_memory_backward(grad, tokens, factors, order, starts, any_word, options=options)
