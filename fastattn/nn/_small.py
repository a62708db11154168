"""Multi-head self-attention in one native call, for sizes where calls cost more than arithmetic.

At 16 positions of width 64 the projections and the attention take 10 µs. The six PyTorch operators
around them, and the Python code in between, take another 55.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn import compat, dispatch, evidence
from fastattn.compat import nothing_intercepts
from fastattn.eager import LOW
from fastattn.nn._linear import _WIDE_DTYPES, rule

# The largest number of products of the larger projection for this path, filled on first use. Above
# it another GEMM is faster (docs/performance.md): PyTorch's, or one that works on vectors if there
# are fewer rows than vector lanes.
_MOST_WORK: dict[torch.dtype, int] = {}
evidence.on_change(_MOST_WORK.clear)
_NATIVE_HALF = 2**22  # for float16, if oneDNN supports it natively
_PLAIN = (Tensor, torch.nn.Parameter)
_BACKENDS = ("", "cpu")
_LEAST_ROWS, _FEW_ROWS_MOST_WORK = 8, 2**16


def _are_exact(*tensors: Tensor | None) -> bool:
    """Whether these are tensors, and no subclass, stored at their address on the CPU, or None."""
    try:
        for t in tensors:
            if t is not None and (
                type(t) is not Tensor
                or not t.is_cpu
                or t.is_neg()
                or (not t.data_ptr() and t.numel())
            ):
                return False
    except RuntimeError:  # data_ptr() raises where there is no address
        return False
    return True


def self_attention(
    module: torch.nn.MultiheadAttention,
    x: Tensor,
    key_padding_mask: Tensor | None,
    is_causal: bool,
) -> Tensor | None:
    """Return the output for one 3-D tensor as query, key and value, or None: use the general path.

    Returns None unless the module has no optional features, there is no gradient, dropout or
    tracer, all tensors are contiguous, on the CPU and of one dtype, and the size is small.
    """
    parameters = compat.parameters_of(module)
    out_proj = compat.children_of(module).get("out_proj")
    if out_proj is None:
        return None
    out_parameters = compat.parameters_of(out_proj)
    try:  # a layer without a bias has the key, too
        w_in, b_in = parameters["in_proj_weight"], parameters["in_proj_bias"]
        w_out, b_out = out_parameters["weight"], out_parameters["bias"]
    except KeyError:  # computed by a parametrization, pruning or an adapter
        return None
    if (
        w_in is None  # other widths
        or w_out is None
        or (b_in is None) != (b_out is None)
        or (module.training and module.dropout > 0)
        or module.add_zero_attn
        or module.bias_k is not None
        or module.bias_v is not None
        or not module._qkv_same_embed_dim  # changed by the user: PyTorch raises an error
        or type(w_in) not in _PLAIN
        or type(w_out) not in _PLAIN
        or not nothing_intercepts()
        or dispatch.forced.get() not in _BACKENDS
        or not _are_exact(x, key_padding_mask)
    ):
        return None
    try:
        first, second, width = x.shape
    except (RuntimeError, ValueError):  # nested, or not 3-D
        return None
    heads = module.num_heads  # read once, checked, then divided by
    if type(heads) is not int or heads < 1 or width % heads or width != module.embed_dim:
        return None  # changed by the user: the general path raises PyTorch's error
    dtype = x.dtype
    most = _MOST_WORK.get(dtype)
    if most is None:
        most = _most_work(dtype)
    rows = first * second
    work = 3 * rows * width * width
    if not 0 < work <= most or (rows < _LEAST_ROWS and work > _FEW_ROWS_MOST_WORK):
        return None
    w_in_stride, w_out_stride = w_in.stride(), w_out.stride()
    if (
        not (dtype is w_in.dtype is w_out.dtype)
        or not (w_in.is_cpu and w_out.is_cpu)
        or not x.is_contiguous()
        or w_in.shape != (3 * width, width)
        or w_out.shape != (width, width)
        or w_in_stride[1] != 1
        or w_out_stride[1] != 1
    ):
        return None
    if torch.is_grad_enabled() and (
        x.requires_grad
        or w_in.requires_grad
        or w_out.requires_grad
        or (b_in is not None and b_in.requires_grad)
        or (b_out is not None and b_out.requires_grad)
    ):
        return None
    biases = (0, 0)
    try:
        weights = w_in.data_ptr(), w_out.data_ptr()
        if b_in is not None and b_out is not None:
            for bias, size in ((b_in, 3 * width), (b_out, width)):
                if (
                    type(bias) not in _PLAIN
                    or bias.dtype is not dtype
                    or not bias.is_cpu
                    or bias.shape != (size,)
                    or not bias.is_contiguous()
                ):
                    return None
            biases = b_in.data_ptr(), b_out.data_ptr()
    except RuntimeError:  # a parameter without memory: wrapped by a transform
        return None
    if min(weights) < LOW or (b_in is not None and min(biases) < LOW):
        return None  # or one whose storage was freed
    batch_first = module.batch_first
    batch, length = (first, second) if batch_first else (second, first)
    padding_stride: tuple[int, ...]
    padding, padding_stride = 0, (0, 0)
    if key_padding_mask is not None:
        if key_padding_mask.dtype is not torch.bool or key_padding_mask.shape != (batch, length):
            return None
        padding, padding_stride = key_padding_mask.data_ptr(), key_padding_mask.stride()
        if padding < LOW:
            return None
    native = dispatch.load("cpu")
    if isinstance(native, str):
        return None
    return native.self_attention(
        x,
        (batch, length, width, heads),
        (length, 1) if batch_first else (1, batch),
        weights[0],
        w_in_stride[0],
        biases[0],
        weights[1],
        w_out_stride[0],
        biases[1],
        padding,
        padding_stride,
        is_causal,
    )


def _most_work(dtype: torch.dtype) -> int:
    most = rule(dtype).small_up_to
    if dtype is torch.float16 and dtype not in _WIDE_DTYPES:
        most = min(most, _NATIVE_HALF)
    _MOST_WORK[dtype] = most
    return most
