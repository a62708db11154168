"""Fixes of Triton's interpreter: arithmetic in bfloat16, and fast calls.

In Triton 3.6 to 3.9 the interpreter keeps a bfloat16 as its 16 bits in an unsigned integer.
Products and arithmetic work on these integers, and a conversion from float32 cuts instead of
rounding. :func:`mend` replaces the arithmetic, for the tests alone.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def _values(handle: Any) -> Any:
    """A handle's numbers as NumPy can compute with them."""
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data


def _rounded(x: Any) -> Any:
    """The bits of float32 numbers rounded to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), nearest)


def _handle(x: Any, dtype: Any) -> Any:
    """Numbers as a tensor of the interpreter, which holds bfloat16 as bits."""
    data = _rounded(x) if dtype == tl.bfloat16 else x.astype(interpreter._get_np_dtype(dtype))
    return interpreter.TensorHandle(data, dtype)


def _dot(builder: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
    """a @ b + d, summed in float32 as a matrix unit does."""
    product = np.matmul(_values(a).astype(np.float32), _values(b).astype(np.float32))
    return _handle(product + _values(d), d.dtype.scalar)


def _cast(original: Any, builder: Any, source: Any, target: Any) -> Any:
    """A conversion from or to bfloat16, by way of float32."""
    if tl.bfloat16 in (source.dtype.scalar, target.scalar):
        return _handle(_values(source), target.scalar)
    return original(builder, source, target)


def _binary(original: Any, builder: Any, left: Any, right: Any, op: Any) -> Any:
    """An operation on bfloat16, which NumPy lacks: computed in float32 and rounded."""
    if left.dtype.scalar != tl.bfloat16:
        return original(builder, left, right, op)
    result = op(_values(left), _values(right))
    return _handle(result, tl.int1 if result.dtype == np.bool_ else tl.bfloat16)


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function of a kernel. The original replaces all of the language before each call."""
    named = [value for value in function.fn.__globals__.values() if inspect.ismodule(value)]
    if any(module in (tl, tl.core) and module.load.__name__ == "load" for module in named):
        interpreter._patch_lang(function.fn)
    try:
        return function.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


@functools.cache
def mend() -> None:
    """Correct the interpreter's arithmetic in bfloat16."""
    builder = interpreter.InterpreterBuilder
    builder.create_dot = _dot
    cast, binary = builder.cast_impl, builder.binary_op
    builder.cast_impl = lambda self, *args: _cast(cast, self, *args)
    builder.binary_op = lambda self, *args: _binary(binary, self, *args)
    interpreter.InterpretedFunction.__call__ = _call


@contextlib.contextmanager
def quiet() -> Any:
    """Without NumPy's warnings: a NaN that is selected out is computed with first."""
    with np.errstate(all="ignore"):
        yield
