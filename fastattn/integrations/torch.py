"""PyTorch's own ``scaled_dot_product_attention`` on fused kernels, for a whole process.

:func:`activate` registers our function for the dispatcher operator
``aten::scaled_dot_product_attention`` on the CPU. So it serves each call, by whatever import, from
Python, TorchScript or C++, with no Python name patched.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from fastattn import checks
from fastattn.ops._sdpa_plain import attend_plainly
from fastattn.ops.sdpa import prepare

__all__ = ["Activation", "activate"]

STOCK = torch.ops.aten.scaled_dot_product_attention.default
# With gradients recorded, and in inference mode, where tensors have no autograd key.
_KEYS = ("AutogradCPU", "CPU")

_lock = threading.Lock()
_active: set[Activation] = set()
# Registered by the first activation, and kept: PyTorch frees the functions of a deleted Library
# even while another thread runs them.
_library: torch.library.Library | None = None


class Activation:
    """Keeps :func:`activate` in effect until :meth:`undo`, or until the end of a ``with`` block."""

    def undo(self) -> None:
        """Give the operator back to PyTorch, once no other activation is left."""
        with _lock:
            _active.discard(self)

    def __enter__(self) -> Activation:
        with _lock:
            _active.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def activate() -> Activation:
    """Run ``torch.nn.functional.scaled_dot_product_attention`` on fused kernels on the CPU.

    All calls in this process, forward and backward, also those of ``torch.nn.MultiheadAttention``
    without weights, of timm, diffusers, Whisper and others, and those traced by ``torch.compile``
    from now on. Arguments, results and gradients are those of PyTorch, within rounding; dropout
    draws other numbers from the same generator, and a fully masked row is 0.

    PyTorch serves, as before, whatever :func:`fastattn.scaled_dot_product_attention` does not
    accept: other dtypes and devices, shapes that PyTorch alone broadcasts, NestedTensors, calls
    under ``torch.vmap``, invalid arguments; and all calls where its fused kernel is disabled, as by
    ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``.

    Returns:
        An :class:`Activation`. Its ``undo()``, or leaving it as a context manager, gives the
        operator back to PyTorch. Several may be active at once, and end in any order. After the
        last one, each call still passes through Python, which takes some microseconds.

    ::

        fastattn.integrations.torch.activate()  # until the process ends

        with fastattn.integrations.torch.activate():
            model(x)
    """
    global _library
    activation = Activation()
    with _lock:
        if _library is None:
            _library = torch.library.Library("aten", "IMPL")
            for key in _KEYS:
                _library.impl("scaled_dot_product_attention", attend, key)
        _active.add(activation)
    return activation


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What ``aten::scaled_dot_product_attention`` runs on the CPU, activated or not."""
    call = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if _active and torch.backends.cuda.flash_sdp_enabled():  # which holds for the CPU too
        if dropout_p == 0.0:
            out = attend_plainly(query, key, value, attn_mask, is_causal, scale, enable_gqa)
            if out is not None:
                return out
        try:
            if any(hasattr(type(x), "__tensor_flatten__") for x in (query, key, value)):
                raise NotImplementedError  # a wrapper, such as DTensor, has rules for aten only
            operator, prepared, folding = prepare(*call)
        except (NotImplementedError, RuntimeError, TypeError, ValueError):
            pass  # checks only: PyTorch accepts the call, or raises its own error
        else:
            results = operator(*checks.with_seed(operator, prepared, None))
            return folding.restore(results[0])
    stock: Any = STOCK.decompose(*call[:6], scale=scale, enable_gqa=enable_gqa)
    return stock
