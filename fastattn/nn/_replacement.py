"""Replaces PyTorch's modules in a model by fastattn's, and restores them.

The *class* of each module changes, but the module stays the same object: parameters, buffers,
hooks, training state, attributes and all references to it, from optimizers, shared parents or
closures, remain valid. Nothing global is patched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fastattn.nn._encoder_layer import FusedEncoder, FusedEncoderLayer
from fastattn.nn.linear import Linear, PatchEmbedding, TransposedLinear, maps_patches
from fastattn.nn.mha import MultiheadAttention, keep_forward_called

LINEAR = (Linear, PatchEmbedding, TransposedLinear)
_DERIVED = (MultiheadAttention, Linear, PatchEmbedding)  # each derives from a class of PyTorch
_REPLACED = "_fastattn_replaced"  # set in the module's __dict__ if its class was changed here


def replace_mha(model: nn.Module) -> list[str]:
    """Make every ``torch.nn.MultiheadAttention`` in ``model`` run on fused kernels, in place.

    A subclass keeps its own methods and attributes: ``fastattn.nn.MultiheadAttention`` follows it
    in the method resolution order and serves its ``super().forward(...)``. A subclass whose
    ``forward`` does not call ``super().forward`` computes the same as before.

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
            module.__class__ = _fused_class(type(module), MultiheadAttention)
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
    return replace(model, _linear_class)


def replace_encoders(model: nn.Module) -> list[str]:
    """Make encoder layers of PyTorch run as one native call, where it is faster, in place.

    Returns:
        The names of the modules that were switched, as :func:`replace_mha`.
    """
    return replace(model, lambda module: _ENCODERS.get(type(module)))


def replace(model: nn.Module, class_for: Callable[[nn.Module], type | None]) -> list[str]:
    """Give each module a class that combines its own with the class that ``class_for`` returns.

    Returns:
        The names of the modules for which ``class_for`` does not return None.
    """
    changed = []
    for name, module in model.named_modules():
        fastattn_class = class_for(module)
        if fastattn_class is not None and _REPLACED not in module.__dict__:
            module.__class__ = _fused_class(type(module), fastattn_class)
            module.__dict__[_REPLACED] = None
            changed.append(name)
    return changed


def restore(module: nn.Module) -> bool:
    """Give a module back its class; return whether it had been replaced."""
    if _REPLACED not in module.__dict__:
        return False
    hook = module.__dict__.pop(_REPLACED)
    if hook is not None:
        hook.remove()
    if hasattr(module, "forget"):  # frees what fastattn's class keeps for the module
        module.forget()  # type: ignore[operator]
    module.__class__ = _stock_class(type(module))
    return True


def _linear_class(module: nn.Module) -> type | None:
    """Return the class for a layer on the CPU whose ``forward`` is PyTorch's, or None."""
    if isinstance(module, LINEAR):
        return None
    weight, forward = getattr(module, "weight", None), getattr(type(module), "forward", None)
    if not isinstance(weight, Tensor) or isinstance(weight, nn.UninitializedParameter):
        return None
    if weight.device.type != "cpu":
        return None
    if isinstance(module, nn.Linear):
        # MultiheadAttention reads the parameters of its out_proj and never calls it.
        is_unused = type(module) is NonDynamicallyQuantizableLinear
        return Linear if forward is nn.Linear.forward and not is_unused else None
    if isinstance(module, nn.Conv2d):
        return PatchEmbedding if forward is nn.Conv2d.forward and maps_patches(module) else None
    utils = sys.modules.get("transformers.pytorch_utils")
    return TransposedLinear if utils is not None and forward is utils.Conv1D.forward else None


_ENCODERS: dict[type, type] = {
    nn.TransformerEncoderLayer: FusedEncoderLayer,
    nn.TransformerEncoder: FusedEncoder,
}
_fused_classes: dict[tuple[type, type], type] = {}


def _fused_class(stock: type, fastattn_class: type) -> type:
    """Return the class that is equal to ``stock`` but for the forward of ``fastattn_class``."""
    if stock in fastattn_class.__bases__:
        return fastattn_class
    if (stock, fastattn_class) not in _fused_classes:
        if _is_parametrized_class(stock):
            return _rebase(stock, _fused_class(stock.__bases__[0], fastattn_class))
        namespace = {
            "__module__": stock.__module__,
            "__qualname__": stock.__qualname__,
            "__doc__": stock.__doc__,
            "__reduce_ex__": _reduce_fused,
            "_fastattn_classes": (stock, fastattn_class),
        }
        # A class that inherits from PyTorch's must follow stock in the method resolution order, so
        # that super() in stock finds it. Any other class has a forward that calls stock's.
        inherits = {*fastattn_class.__mro__} & {*stock.__mro__} - {nn.Module, object}
        bases = (stock, fastattn_class) if inherits else (fastattn_class, stock)
        _fused_classes[stock, fastattn_class] = type(stock)(stock.__name__, bases, namespace)
    return _fused_classes[stock, fastattn_class]


def _stock_class(fused: type) -> type:
    """Return the inverse of ``_fused_class``, even if the module was parametrized in between."""
    if _is_parametrized_class(fused):
        return _rebase(fused, _stock_class(fused.__bases__[0]))
    if "_fastattn_classes" in fused.__dict__:
        stock: type = fused.__dict__["_fastattn_classes"][0]
        return stock
    # A module whose class other code has changed since then keeps that class.
    return fused.__bases__[0] if fused in _DERIVED else fused


def _is_parametrized_class(cls: type) -> bool:
    """Whether ``torch.nn.utils.parametrize`` made this class, one per parametrized module."""
    return cls.__module__ == "torch.nn.utils.parametrize"


def _rebase(cls: type, base: type) -> type:
    """Copy a class of ``torch.nn.utils.parametrize``, with its properties, on another ``base``."""
    namespace = {k: v for k, v in cls.__dict__.items() if k not in ("__dict__", "__weakref__")}
    return type(cls)(cls.__name__, (base,), namespace)


def _reduce_fused(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """Pickle by the names of both classes, because the created class has no importable name."""
    return (
        _new_fused,
        type(self).__dict__["_fastattn_classes"],
        *object.__reduce_ex__(self, protocol)[2:],
    )


def _new_fused(stock: type, fastattn_class: type = MultiheadAttention) -> nn.Module:
    """Return an empty object, which unpickling fills."""
    cls = _fused_class(stock, fastattn_class)
    return object.__new__(cls)
