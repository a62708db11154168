"""Replaces modules of PyTorch by ours in a model, and restores them.

The *class* of each module changes, but the module stays the same object: parameters, buffers,
hooks, training state, attributes and all references to it, from optimizers, shared parents or
closures, remain valid. Nothing global is patched.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fastattn.nn.linear import Linear, PatchEmbedding, TransposedLinear, is_of_patches
from fastattn.nn.mha import MultiheadAttention, keep_forward_called

LINEAR = (Linear, PatchEmbedding, TransposedLinear)
_REPLACED = "_fastattn_replaced"  # set in the module's __dict__ if its class was changed here


def replace_mha(model: nn.Module) -> list[str]:
    """Make every ``torch.nn.MultiheadAttention`` in ``model`` run on fused kernels, in place.

    A subclass keeps its own methods and attributes: ``fastattn.nn.MultiheadAttention`` follows it
    in the method resolution order, so its ``super().forward(...)`` calls our class. A subclass
    whose ``forward`` does not call ``super().forward`` computes the same as before.

    ``torch.nn.TransformerEncoderLayer`` then calls its attention in eval mode too, instead of
    passing the weights to a PyTorch operator, and ``torch.nn.TransformerEncoder`` still skips
    padding with NestedTensors.

    Args:
        model: any module; it may itself be a ``torch.nn.MultiheadAttention``.

    Returns:
        The names (as in ``model.named_modules()``, "" for the model itself) of the modules that
        were switched. A module registered under several names is switched, and named, once. Empty
        when called a second time.
    """
    changed = []
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and not isinstance(module, MultiheadAttention):
            module.__class__ = _fused_class(type(module))
            module.__dict__[_REPLACED] = module.register_forward_pre_hook(keep_forward_called)
            changed.append(name)
    return changed


def restore_mha(model: nn.Module) -> list[str]:
    """Undo ``replace_mha``. Modules created as ``fastattn.nn.MultiheadAttention`` do not change.

    Returns:
        The names of the modules that were switched back.
    """
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, MultiheadAttention) and restore(module)
    ]


def replace_linear(model: nn.Module) -> list[str]:
    """Make the linear layers of ``model`` on the CPU run on the fastest GEMM, in place.

    These are ``torch.nn.Linear``, transformers' ``Conv1D``, and each ``torch.nn.Conv2d`` whose
    stride is its kernel, and subclasses that inherit their ``forward``.

    Returns:
        The names of the modules that were switched, as :func:`replace_mha`.
    """
    changed = []
    for name, module in model.named_modules():
        if _is_linear(module):
            module.__class__ = _fused_class(type(module))
            module.__dict__[_REPLACED] = None
            changed.append(name)
    return changed


def restore(module: nn.Module) -> bool:
    """Give a module back its class; whether it had been replaced."""
    if _REPLACED not in module.__dict__:
        return False
    hook = module.__dict__.pop(_REPLACED)
    if hook is not None:
        hook.remove()
    module.__class__ = _stock_class(type(module))
    return True


def _is_linear(module: nn.Module) -> bool:
    """Whether a module on the CPU has the forward of a layer that one of our classes replaces."""
    if isinstance(module, LINEAR):
        return False
    weight, forward = getattr(module, "weight", None), getattr(type(module), "forward", None)
    if not isinstance(weight, Tensor) or isinstance(weight, nn.UninitializedParameter):
        return False
    if weight.device.type != "cpu":
        return False
    if isinstance(module, nn.Linear):
        # MultiheadAttention reads the parameters of its out_proj and never calls it.
        return forward is nn.Linear.forward and type(module) is not NonDynamicallyQuantizableLinear
    if isinstance(module, nn.Conv2d):
        return forward is nn.Conv2d.forward and is_of_patches(module)
    utils = sys.modules.get("transformers.pytorch_utils")
    return utils is not None and forward is utils.Conv1D.forward


_fused_classes: dict[type, type] = {
    nn.MultiheadAttention: MultiheadAttention,
    nn.Linear: Linear,
    nn.Conv2d: PatchEmbedding,
}


def _fused_class(stock: type) -> type:
    """The class equivalent to ``stock`` on our kernels."""
    if stock not in _fused_classes:
        if _is_parametrized_class(stock):
            return _rebased(stock, _fused_class(stock.__bases__[0]))
        namespace = {
            "__module__": stock.__module__,
            "__qualname__": stock.__qualname__,
            "__doc__": stock.__doc__,
            "__reduce_ex__": _reduce_fused,
            "_fastattn_stock_class": stock,
        }
        ours = next((_fused_classes[x] for x in stock.__mro__ if x in _fused_classes), None)
        # MRO: this, stock, …, fastattn's, torch's; super() in stock finds fastattn's before torch's
        bases = (stock, ours) if ours else (TransposedLinear, stock)
        _fused_classes[stock] = type(stock)(stock.__name__, bases, namespace)
    return _fused_classes[stock]


def _stock_class(fused: type) -> type:
    """The inverse of ``_fused_class``, even if the module was parametrized in between."""
    if _is_parametrized_class(fused):
        return _rebased(fused, _stock_class(fused.__bases__[0]))
    stock = fused.__dict__.get("_fastattn_stock_class")
    # A module whose class was changed by others since then keeps it.
    return stock or next((kind for kind, ours in _fused_classes.items() if ours is fused), fused)


def _is_parametrized_class(cls: type) -> bool:
    """Whether ``torch.nn.utils.parametrize`` made this class: one per module, on the module's."""
    return cls.__module__ == "torch.nn.utils.parametrize"


def _rebased(cls: type, base: type) -> type:
    """A copy of a class of ``torch.nn.utils.parametrize``, which holds properties, on ``base``."""
    namespace = {k: v for k, v in cls.__dict__.items() if k not in ("__dict__", "__weakref__")}
    return type(cls)(cls.__name__, (base,), namespace)


def _reduce_fused(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """Pickle by the name of the user's class: the class created here cannot be imported by name."""
    stock = type(self)._fastattn_stock_class  # type: ignore[attr-defined]
    return _new_fused, (stock,), *object.__reduce_ex__(self, protocol)[2:]


def _new_fused(stock: type) -> nn.Module:
    cls = _fused_class(stock)
    return object.__new__(cls)
