"""PyTorch's own ``scaled_dot_product_attention`` on fused kernels, for a whole process.

:func:`activate` registers a function of fastattn for the dispatcher operator
``aten::scaled_dot_product_attention`` on the CPU. So it serves each call, by whatever import, from
Python, TorchScript or C++, without patching a Python name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.call import with_seed
from fastattn.compat import stock_attention
from fastattn.integrations._registration import lock
from fastattn.ops.sdpa import keep_plan, plans, prepare, run_plan

__all__ = ["Activation", "activate"]

STOCK = torch.ops.aten.scaled_dot_product_attention.default
# For recorded gradients, and for inference mode, where tensors have no autograd key.
_KEYS = ("AutogradCPU", "CPU")

_active: set[Activation] = set()
# Registered by the first activation and never deleted: PyTorch frees the functions of a deleted
# Library even while another thread runs them.
_library: torch.library.Library | None = None


class Activation:
    """Keeps :func:`activate` in effect until :meth:`undo`, or until the end of a ``with`` block."""

    def undo(self) -> None:
        """Give the operator back to PyTorch, unless another activation is in effect."""
        with lock:
            _active.discard(self)

    def __enter__(self) -> Activation:
        with lock:
            _active.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def activate() -> Activation:
    """Run ``torch.nn.functional.scaled_dot_product_attention`` on fused kernels on the CPU.

    This affects all calls in the process, forward and backward, including calls by
    ``torch.nn.MultiheadAttention`` without weights, by timm, diffusers, Whisper and others, and
    calls that ``torch.compile`` traces from now on. Arguments, results and gradients agree with
    PyTorch's up to rounding; dropout draws other numbers from the same generator, and a fully
    masked row is 0.

    PyTorch serves, as before, whatever :func:`fastattn.scaled_dot_product_attention` does not
    accept: other dtypes and devices, shapes that PyTorch alone broadcasts, NestedTensors, invalid
    arguments; and all calls where its fused kernel is disabled, as by
    ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``.

    Returns:
        An :class:`Activation`. Its ``undo()``, or leaving it as a context manager, gives the
        operator back to PyTorch. Several may be active at once, and end in any order. After the
        last one, each call still passes through Python, which takes a few microseconds.

    ::

        fastattn.integrations.torch.activate()  # until the process ends

        with fastattn.integrations.torch.activate():
            model(x)
    """
    global _library
    activation = Activation()
    with lock:
        if _library is None:
            _library = torch.library.Library("aten", "IMPL")
            for key in _KEYS:
                _library.impl("scaled_dot_product_attention", attend, key)
            _library.impl("scaled_dot_product_attention", _attend_in_vmap, "FuncTorchVmapMode")
        _active.add(activation)
    return activation


def attend(*args: Any, **options: Any) -> Tensor:
    """The implementation of ``aten::scaled_dot_product_attention`` on the CPU, activated or not.

    The dispatcher omits arguments at their defaults. Passing them on would slow PyTorch's own calls
    down.
    """
    if _active:
        out = _try_fastattn(*args, **options)
        if out is not None:
            return out
    stock: Tensor = stock_attention(*args, **options)
    return stock


def _attend_in_vmap(query: Tensor, *args: Any, **options: Any) -> Tensor:
    """:func:`attend` within ``torch.vmap``, whose dispatch key is the same for every device."""
    if query.is_cpu:
        return attend(query, *args, **options)
    stock: Tensor = stock_attention(query, *args, **options)
    return stock


# Marks the signature of a call without a mask of fastattn.masks, as in fastattn.ops.sdpa.
_NO_MASK = True


def _try_fastattn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Return the output of fastattn's operator, or None for a call that PyTorch serves.

    Raises:
        RuntimeError: a call in which PyTorch divides by the number of heads of key, 0, which ends
            the process, or reads and writes beyond a value with fewer rows than key.
    """
    if enable_gqa and key.dim() > 2 and key.shape[-3] == 0 and value.numel() > 0:
        raise RuntimeError(
            "scaled_dot_product_attention: with enable_gqa=True key must have heads (dimension "
            f"-3) if value has, got shapes {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if not torch.backends.cuda.flash_sdp_enabled():  # the switch applies to the CPU too
        return None
    if attn_mask is not None and attn_mask.dim() < 2 and query.dim() == 4:
        return None  # PyTorch's fused kernel refuses it
    # None: alibi_slopes, sinks, relative_bias.
    tensors = (query, key, value, attn_mask, None, None, None)
    signature, plan = plans.find(tensors, _NO_MASK, dropout_p, is_causal, scale, enable_gqa)
    if plan is not None:
        out: Tensor = run_plan(plan, *tensors[:6])
        return out
    if any(0 in x.shape[:-2] for x in (query, key, value)):
        return None  # PyTorch's result then has the heads of query, without broadcasting
    try:
        if any(hasattr(type(x), "__tensor_flatten__") for x in (query, key, value)):
            return None  # a wrapper, such as DTensor, has rules only for aten's operators
        operator, call, folding = prepare(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        _check_lengths(key, value)
        return None  # PyTorch accepts the call, or raises its own error
    call = with_seed(operator, call)
    plan = keep_plan(signature, operator, call, tensors)
    results = operator(*call) if plan is None else plan.all(call[:-1], call[-1])
    result: Tensor = folding.restore(results[0])
    return result


def _check_lengths(key: Tensor, value: Tensor) -> None:
    """Raise RuntimeError for keys and values that PyTorch would read out of bounds."""
    if key.is_nested or value.is_nested or key.dim() < 2 or value.dim() < 2:
        return
    if key.shape[-2] != value.shape[-2]:
        raise RuntimeError(
            "scaled_dot_product_attention: key and value must have the same length (dimension "
            f"-2), got shapes {tuple(key.shape)} and {tuple(value.shape)}"
        )
