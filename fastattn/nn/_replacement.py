"""Replaces ``torch.nn.MultiheadAttention`` by ``fastattn.nn.MultiheadAttention`` in a model, and
restores it.

The *class* of each module changes, but the module stays the same object: parameters, buffers,
hooks, training state, attributes and all references to it, from optimizers, shared parents or
closures, remain valid. Nothing global is patched.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import MultiheadAttention as _Stock

from fastattn.nn.mha import MultiheadAttention, keep_forward_called

_REPLACED = "_fastattn_replaced"  # set in the module's __dict__ if replace_mha changed its class


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
        if isinstance(module, _Stock) and not isinstance(module, MultiheadAttention):
            module.__class__ = _fused_class(type(module))
            hook = module.register_forward_pre_hook(keep_forward_called)
            module.__dict__[_REPLACED] = hook
            changed.append(name)
    return changed


def restore_mha(model: nn.Module) -> list[str]:
    """Undo ``replace_mha``. Modules created as ``fastattn.nn.MultiheadAttention`` do not change.

    Returns:
        The names of the modules that were switched back.
    """
    changed = []
    for name, module in model.named_modules():
        hook = module.__dict__.pop(_REPLACED, None)
        if hook is not None:
            module.__class__ = _stock_class(type(module))
            hook.remove()
            changed.append(name)
    return changed


_fused_classes: dict[type, type] = {_Stock: MultiheadAttention}


def _fused_class(stock: type) -> type:
    """The class equivalent to ``stock`` on fused kernels."""
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
        # MRO: this, stock, …, fastattn's, torch's; super() in stock finds fastattn's before torch's
        _fused_classes[stock] = type(stock)(stock.__name__, (stock, MultiheadAttention), namespace)
    return _fused_classes[stock]


def _stock_class(fused: type) -> type:
    """The inverse of ``_fused_class``, even if the module was parametrized in between."""
    if _is_parametrized_class(fused):
        return _rebased(fused, _stock_class(fused.__bases__[0]))
    return fused.__dict__.get("_fastattn_stock_class", _Stock)


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
