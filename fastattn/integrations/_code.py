"""Finds the functions that a module calls, in the byte code that its ``forward`` reaches."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from fastattn import compat

# Functions that compute attention, and the softmax of which, with products, it can be composed.
RECOGNIZED = {
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
    "flex_attention",
    "ALL_ATTENTION_FUNCTIONS",  # the registry of transformers
    "dispatch_attention_fn",  # the registry of diffusers
    "softmax",
}
_PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum"}
# Packages whose functions are not followed, because their names suffice.
_OPAQUE_PACKAGES = ("torch", "numpy", "builtins", "fastattn", "einops", "math")


def calls_of(module: nn.Module, cache: dict[Any, set[str]]) -> set[str]:
    """The names in ``RECOGNIZED`` that the ``forward`` of a module reaches, and "product".

    Methods of the module, functions of any package, and values of the module's attributes and of
    closures are followed, but no submodules, which have their own ``forward``. A branch counts
    whether or not it is taken. ``cache`` keeps results between calls, because most modules of a
    model share their code.
    """
    if isinstance(module, torch.jit.ScriptModule):
        text = getattr(module, "code", "")
        return _recognize(name for name in RECOGNIZED | _PRODUCTS if name in text)
    key = _cache_key(module)
    if key not in cache:
        cache[key] = _reachable_names(module)
    return cache[key]


def _cache_key(module: nn.Module) -> tuple[Any, ...]:
    """The cache key of a module's code: its class, the values that it can call, its submodules."""
    callables = tuple(
        (name, getattr(value, "func", value) if _is_function(value) else type(value))
        for name, value in vars(module).items()
        if callable(value) and not isinstance(value, (nn.Module, torch.Tensor))
    )
    return type(module), callables, frozenset(map(type, module.children()))


def _is_function(value: Any) -> bool:
    """Whether a value is a function, which the cache key holds itself instead of its class."""
    return isinstance(value, (FunctionType, BuiltinFunctionType, functools.partial))


def _reachable_names(module: nn.Module) -> set[str]:
    """The names of ``RECOGNIZED`` that ``forward`` reaches, and "product"."""
    names: set[str] = set()
    visited: set[CodeType] = set()
    # Each value that may be called, with the object whose method it is.
    pending: list[tuple[Any, Any]] = [(vars(module).get("forward", type(module).forward), module)]
    while pending:
        value, owner = pending.pop()
        function = _python_function(value)
        if function is None or function.__code__ in visited:
            continue
        visited.add(function.__code__)
        callees = list(_closure_values(function))
        for code in _with_nested(function.__code__):
            names |= _recognize(code.co_names)
            if any(map(_is_product, dis.get_instructions(code))):
                names.add("product")
            for name in code.co_names:
                callees += _referents(name, function, owner, module)
        for callee in callees:
            names |= _recognize_value(callee)
            if not isinstance(callee, nn.Module):
                pending.append((callee, owner))
                # A callable object, such as a processor of diffusers.
                pending.append((inspect.getattr_static(type(callee), "__call__", None), callee))
    return names


def _recognize_value(value: Any) -> set[str]:
    """The names in ``RECOGNIZED`` of a value, which code may call by another name."""
    if isinstance(value, functools.partial):
        value = value.func
    if value is torch.nn.functional.scaled_dot_product_attention:
        return {"scaled_dot_product_attention"}
    return {"softmax"} if isinstance(value, nn.Softmax) else set()


def _recognize(names: Any) -> set[str]:
    """The names in ``RECOGNIZED``, and "product" if there is a product among the names."""
    names = set(names)
    return (names & RECOGNIZED) | ({"product"} if names & _PRODUCTS else set())


def _is_product(instruction: dis.Instruction) -> bool:
    """Whether an instruction is the operator ``@``."""
    return instruction.opname == "BINARY_MATRIX_MULTIPLY" or (  # Python 3.10
        instruction.opname == "BINARY_OP" and instruction.argrepr == "@"
    )


def _with_nested(code: CodeType) -> Iterator[CodeType]:
    """A code object and the code objects of the functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_nested(constant)


def _referents(name: str, function: FunctionType, owner: Any, module: nn.Module) -> Iterator[Any]:
    """The globals, members of imported modules and attributes that a name may refer to."""
    scope = function.__globals__
    if name in scope:
        yield scope[name]
    for module_name in function.__code__.co_names:
        imported = scope.get(module_name)
        if isinstance(imported, ModuleType) and not _is_opaque(imported.__name__):
            yield vars(imported).get(name)
    for source in (owner, module):
        children = compat.children_of(source) if isinstance(source, torch.nn.Module) else {}
        members = {**getattr(source, "__dict__", {}), **children}
        yield members[name] if name in members else inspect.getattr_static(type(source), name, None)


def _closure_values(function: FunctionType) -> Iterator[Any]:
    """The values of the variables that a function captures from the enclosing function."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not assigned
            yield cell.cell_contents


def _python_function(value: Any) -> FunctionType | None:
    """The Python function that a call of this value runs; None if it is not followed."""
    while isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, (MethodType, classmethod, staticmethod)):
        value = value.__func__
    if not callable(value) or isinstance(value, type):
        return None
    value = inspect.unwrap(value)
    if not isinstance(value, FunctionType) or _is_opaque(value.__module__ or ""):
        return None
    return value


def _is_opaque(module: str) -> bool:
    """Whether the functions of a module are not followed."""
    return module.partition(".")[0] in _OPAQUE_PACKAGES
