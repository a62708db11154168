"""The arithmetic of fastattn's operators, for ``torch.utils.flop_counter.FlopCounterMode``.

The counter reads its table when it is created, so the formulas must be in the table once its
module is imported. Importing that module here would also import Triton, which takes as long as
``import fastattn`` itself; a finder of ``sys.meta_path`` waits for the import instead.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch import Tensor

from fastattn import compat
from fastattn.compat import has_strided_memory

_COUNTER = "torch.utils.flop_counter"
_formulas: dict[Any, Callable[..., int]] = {}


def count(operator: Any, formula: Callable[..., int]) -> None:
    """Count an operator of the dispatcher by ``formula(args, results) -> int``."""

    def count_call(*args: Any, out_val: Any = None, **_: Any) -> int:
        return formula(args, out_val)

    _formulas[operator] = count_call
    if _COUNTER in sys.modules:
        _register(sys.modules[_COUNTER])


def _register(counter: ModuleType) -> None:
    for operator, formula in _formulas.items():
        if operator not in counter.flop_registry:
            counter.register_flop_formula(operator, get_raw=True)(formula)


class _Finder(importlib.abc.MetaPathFinder):
    """Registers the formulas when the counter's module has been executed."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != _COUNTER:
            return None
        spec = next(self._specs_of_others(name, path, target), None)
        if spec is None or spec.loader is None:
            return spec
        exec_module = spec.loader.exec_module

        def exec_and_register(module: ModuleType) -> None:
            exec_module(module)
            _register(module)

        spec.loader.exec_module = exec_and_register  # type: ignore[method-assign]
        return spec

    def _specs_of_others(self, *module: Any) -> Iterator[ModuleSpec]:
        """The specs of a module that the other finders return."""
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(*module)
            if spec is not None:
                yield spec


if _COUNTER not in sys.modules:
    sys.meta_path.insert(0, _Finder())


# The formulas of a forward or a backward pass. ``pairs`` counts the visible pairs of a query and a
# key. A multiplication, an addition and a tanh are one operation each.


def attention_flops(pairs: int, width: int, value_width: int, backward: bool = False) -> int:
    """Softmax attention: 2 D for the score of a pair, and 2 Dv for its part of the output.

    The backward computes the scores again, and the products that give dP, dV, dQ and dK.
    """
    return pairs * (6 * width + 4 * value_width if backward else 2 * (width + value_width))


def additive_flops(pairs: int, units: int, value_width: int, backward: bool = False) -> int:
    """Additive attention: 4 A for the score v . tanh(q + k + b) of a pair, 2 Dv for the output.

    A is ``units``. The backward has 8 A: the derivative of tanh, and its parts of dq, dk and dv.
    """
    return pairs * (8 * units + 4 * value_width if backward else 4 * units + 2 * value_width)


def product_flops(count: int, backward: bool = False) -> int:
    """Matrix products of ``count`` multiplications; the backward has two products for each."""
    return (4 if backward else 2) * count


def flops_of_pairs(
    pairs: Callable[..., int],
    formula: Callable[..., int] = attention_flops,
    operator: Callable[[], Any] | None = None,
) -> Callable[..., int]:
    """The operations of an operator of query, key and value, from the number of ``pairs``.

    ``operator`` returns an operator that has the tables of :class:`fastattn.bias.Disentangled`.
    Each table of a call adds 2 D for a pair, and 6 D in the backward.
    """

    def flops(
        _: Any, query: Tensor, key: Tensor, value: Tensor, *others: Any, backward: bool = False
    ) -> int:
        count, width = pairs(query, key, *others), query.shape[-1]
        bias_flops = 0
        if operator is not None:
            places = [operator().place_of(name) for name in ("query_table", "key_table")]
            tables = sum(others[place - 3] is not None for place in places)  # query, key, value: 3
            bias_flops = count * tables * (6 if backward else 2) * width
        return bias_flops + formula(count, width, value.shape[-1], backward=backward)

    return flops


def values(x: Tensor) -> list[int] | None:
    """The elements of a one-dimensional tensor; None if it has no memory to read."""
    if type(x) is not Tensor or not has_strided_memory(x):
        return None
    numbers: list[int] = compat.run_outside(x.tolist)
    return numbers


def visible_pairs(rows: int, columns: int, offset: int = 0, left: int = -1, right: int = -1) -> int:
    """The number of pairs (i, j) with -right <= i + offset - j <= left; -1 is unlimited."""
    pairs = rows * columns if right < 0 else _pairs_up_to(offset + right, rows, columns)
    return pairs - (0 if left < 0 else _pairs_up_to(offset - left - 1, rows, columns))


def _pairs_up_to(diagonal: int, rows: int, columns: int) -> int:
    """The number of pairs (i, j) with j <= i + diagonal, of all pairs of rows and columns."""

    def triangle(n: int) -> int:
        return n * (n + 1) // 2 if n > 0 else 0

    # As if there were endless columns, less the pairs beyond the last column.
    endless = triangle(diagonal + rows) - triangle(diagonal)
    beyond = triangle(diagonal + rows - columns) - triangle(diagonal - columns)
    return endless - beyond
