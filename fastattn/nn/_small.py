"""Multi-head self-attention in one native call, for sizes where calls cost more than arithmetic."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastattn import compat, dispatch, evidence
from fastattn.compat import may_plan

_BACKENDS = ("", "cpu")
_MIN_ROWS, _FEW_ROWS_WORK_LIMIT = 8, 2**16


def self_attention(
    module: torch.nn.MultiheadAttention,
    x: Tensor,
    key_padding_mask: Tensor | None,
    is_causal: bool,
) -> Tensor | None:
    """Return the output for one 3-D tensor as query, key and value, or None for other calls.

    A call is served if the module has no optional features, there is no gradient, dropout or
    tracer, all tensors are contiguous, on the CPU and of one dtype, and the size is small.
    """
    parameters = compat.parameters_of(module)
    out_proj = compat.children_of(module).get("out_proj")
    if out_proj is None:
        return None
    out_parameters = compat.parameters_of(out_proj)
    try:  # a layer without a bias has the key with the value None
        w_in, b_in = parameters["in_proj_weight"], parameters["in_proj_bias"]
        w_out, b_out = out_parameters["weight"], out_parameters["bias"]
    except KeyError:  # the parameter is computed by a parametrization, pruning or an adapter
        return None
    if (
        w_in is None  # kdim or vdim differ from embed_dim
        or w_out is None
        or (b_in is None) != (b_out is None)
        or (module.training and module.dropout > 0)
        or module.add_zero_attn
        or module.bias_k is not None
        or module.bias_v is not None
        or not module._qkv_same_embed_dim  # changed by the user: PyTorch raises an error
        or not may_plan()
        or dispatch.forced.get() not in _BACKENDS
        or not x.is_cpu
        or x.dim() != 3
    ):
        return None
    dim0, dim1, width = x.shape  # batch and length, or length and batch
    heads = module.num_heads  # read once, checked, then divided by
    if type(heads) is not int or heads < 1 or width % heads or width != module.embed_dim:
        return None  # changed by the user: the general path raises PyTorch's error
    rows = dim0 * dim1
    work = 3 * rows * width * width
    if not 0 < work <= _work_limit(x.dtype) or (rows < _MIN_ROWS and work > _FEW_ROWS_WORK_LIMIT):
        return None
    native = dispatch.load("cpu")
    if isinstance(native, str):
        return None
    result: Tensor | None = native.self_attention(
        *(x, w_in, b_in, w_out, b_out, key_padding_mask),
        num_heads=heads,
        batch_first=bool(module.batch_first),
        causal=is_causal,
        recorded=torch.is_grad_enabled(),
    )
    return result


@functools.cache
def _work_limit(dtype: torch.dtype) -> int:
    """Return the most multiplications of the larger projection for the native call.

    Above this limit another GEMM is faster (docs/performance.md): PyTorch's, or one that works on
    vectors if there are fewer rows than vector lanes.
    """
    native = dispatch.load("cpu")
    return 0 if isinstance(native, str) else native.rule(dtype).small_up_to


evidence.on_change(_work_limit.cache_clear)
