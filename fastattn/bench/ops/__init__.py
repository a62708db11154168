"""The operators that can be measured: every operator and module of the library, and whole models.

An operator is a constant with its name in capitals. Any importable module with an OP can be
measured too: `--op mypackage.myoperator`.
"""

from __future__ import annotations

import functools
from importlib import import_module

from fastattn.bench.ops._base import Forward, Inputs, Operator, as_tuple


def _operators_of(*files: str) -> dict[str, Operator]:
    modules = (vars(import_module(f"fastattn.bench.{file}")) for file in files)
    named = (item for module in modules for item in module.items() if item[0].isupper())
    made = ((name, x() if Operator in getattr(x, "__mro__", ()) else x) for name, x in named)
    return {name.lower(): x for name, x in made if isinstance(x, Operator)}


_FILES = "attention transformer around_attention memories".split()
_OPERATORS = _operators_of(*(f"ops.{file}" for file in _FILES))
_MODELS = _operators_of("models")  # their library is imported when one is built
MODELS = tuple(_MODELS)
LOOPS = ("bahdanau_decoder",)  # around modules of the library
OPS = tuple(name for name in _OPERATORS if name not in LOOPS)

__all__ = ["LOOPS", "MODELS", "OPS", "Forward", "Inputs", "Operator"]
__all__ += ["as_tuple", "get", "names_of", "resolve"]


@functools.cache
def get(name: str) -> Operator:
    """The operator of this name. Raises ValueError for an unknown name."""
    known = _OPERATORS | _MODELS
    if name in known:
        return known[name]
    if "." not in name:
        raise ValueError(f"--op {name!r}: known are {', '.join(known)}, or an importable module")
    try:
        operator = getattr(import_module(name), "OP", None)
    except ImportError as error:
        raise ValueError(f"--op {name!r} cannot be imported: {error}") from error
    if not isinstance(operator, Operator):
        raise ValueError(f"--op {name!r} has no OP that is a fastattn.bench.ops.Operator")
    return operator


def resolve(name: str) -> str:
    """The name in OPS or MODELS of an operator, also given by its name in the library."""
    known = next((op for op in (*_OPERATORS, *MODELS) if name in names_of(op)), name)
    get(known)
    return known


def names_of(op: str) -> tuple[str, ...]:
    """The name in OPS, the name in the library, and the latter without its module."""
    function = get(op).FUNCTION
    return op, function, function.removeprefix("nn.")
