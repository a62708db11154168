"""PyTorch's fused attention kernel of the GPU, FlashAttention, for 16-bit inputs without a mask.

    out, lse = softmax(scale · Q Kᵀ) V       lse [B, Hq, Lq], natural logarithm, float32

No masks: a NaN in a key that the mask hides would reach the result, and searching for one would
synchronize with the GPU. Checked only against the operators' signatures
(``tests/core/test_torch_backend.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn import compat

_forward, _backward = compat.flash_cuda, compat.flash_cuda_backward


def why_not(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
) -> list[str]:
    """Return the reasons why PyTorch's kernel does not serve this call on a GPU."""
    if query.device.type != "cuda" or _forward is None or _backward is None:
        return [f"torch {torch.__version__} has no fused attention operator for {query.device}"]
    if mask is not None:
        return ["under a mask PyTorch's kernel spreads the NaN of hidden keys"]
    if causal and query.shape[2] != key.shape[2]:
        return ["PyTorch's kernel aligns causal attention to the bottom right"]
    if query.shape[3] % 8:
        return [f"a head dimension of {query.shape[3]} is not a multiple of 8"]
    grouped = query.shape[1] != key.shape[1]
    parameters = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, causal, grouped)
    # Without a GPU, only `explain` asks, with fake tensors, and PyTorch has no answer.
    if torch.cuda.is_available() and not torch.backends.cuda.can_use_flash_attention(parameters):
        return ["PyTorch would not take its FlashAttention kernel for these tensors"]
    return []


def forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)``."""
    assert _forward is not None
    no_dropout, no_debug_mask = 0.0, False
    out, lse = _forward(query, key, value, no_dropout, causal, no_debug_mask, scale=scale)[:2]
    return out, lse


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    assert _backward is not None
    if grad_out.stride(3) != 1:
        grad_out = grad_out.contiguous()
    # None: no starts of packed sequences. Without dropout (0.0), its random state is not read.
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    unused = torch.zeros((), dtype=torch.uint64, device=query.device)
    sequences = (None, None, query.shape[2], key.shape[2])
    forward_tensors = (grad_out, query, key, value, out, lse.float())
    grad_query, grad_key, grad_value = _backward(
        *forward_tensors, *sequences, 0.0, causal, state, unused, scale=scale
    )
    return grad_query, grad_key, grad_value
