"""The gradients of attention on the CUDA kernels, dense and over packed sequences."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from fastattn import _cuda
from fastattn.backends._partial import backward_of_part
from fastattn.backends.cuda.operands import launch_on_stream
from fastattn.backends.primitives import AttentionBackwardOptions, VarlenOptions

scaled_dot_product_attention = launch_on_stream(_cuda.scaled_dot_product_attention)
_attention_backward = launch_on_stream(_cuda.scaled_dot_product_attention_backward)
_varlen_backward = launch_on_stream(_cuda.varlen_attention_backward)


@backward_of_part(scaled_dot_product_attention)
@functools.wraps(_attention_backward)
def scaled_dot_product_attention_backward(
    *tensors: Tensor | None, options: AttentionBackwardOptions
) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key, value, mask, sinks and relative bias, or None."""
    lse, *biases = tensors[10:]
    assert lse is not None
    *grads, stats, grad_table = _attention_backward(*tensors, options=options)
    return *grads, _grad_of_sinks(biases, lse, stats), grad_table


@functools.wraps(_varlen_backward)
def varlen_attention_backward(
    *tensors: Tensor | None, options: VarlenOptions
) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key, value, sinks and relative bias, or None."""
    lse, *biases = tensors[10:]
    assert lse is not None
    *grads, stats, grad_table = _varlen_backward(*tensors, options=options)
    return *grads, _grad_of_sinks(biases, lse[None], stats[None]), grad_table


def _grad_of_sinks(biases: Any, lse: Tensor, stats: Tensor) -> Tensor | None:
    """Return the gradient of sinks [B|1, Hq] from lse [B, Hq, Lq] and stats [B, Hq, Lq, 4].

    The sum of e^(sink - lse) (dlse - delta) over the rows. ``stats`` come from the backward kernel:
    lse in two parts, delta - dlse, and its remainder. The sinks are the first of the biases.
    """
    if not biases or biases[0] is None:
        return None
    sinks: Tensor = biases[0]
    sink = sinks.to(torch.float64)[..., None]
    high, low, delta, rest = stats.to(torch.float64).unbind(-1)
    # Fully masked rows have high = inf, and the weight 1 unless they are after the last sequence. A
    # sink of -inf counts as no sink, and its rows have the weight 0 whatever is in them.
    weight = torch.where(high == math.inf, (lse == sink).double(), (sink - high - low).exp())
    shares = torch.where(sink == -math.inf, 0.0, -weight * (delta + rest))
    return shares.sum(-1).sum_to_size(sinks.shape).to(sinks.dtype)
