"""The shapes of an operator's tensors, checked where nothing has checked them before.

Public functions check their arguments. But a graph of ``torch.jit.trace`` calls the operator of the
dispatcher with tensors of other sizes, and so may a saved program or a caller of ``torch.ops``. A
kernel would read beyond the end of a tensor that does not fit the others.

Shapes are declared as ``"query: B Hq Lq D; key: B Hkv Lk D; mask: B|1 Lq|1 Lk|1; Hq % Hkv"``:
``B|1`` may also be 1, ``*`` is any size, ``...`` at the front any sizes (the same for all tensors),
``S-1`` one less than S, and ``/`` separates shapes of several ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor


class _Size(NamedTuple):
    name: str  # "" is any size
    less: int  # subtracted from the named size
    may_be_one: bool


class _Shape(NamedTuple):
    text: str
    sizes: tuple[_Size, ...]
    leading: bool  # begins with any sizes


class Shapes:
    """The declared shapes of an operator's tensors."""

    def __init__(self, op: str, declared: str, names: Sequence[str]) -> None:
        self.op = op
        self._shapes: list[tuple[int, str, tuple[_Shape, ...]]] = []
        self._multiples: list[tuple[str, str]] = []
        for item in filter(None, map(str.strip, declared.split(";"))):
            name, colon, shapes = item.partition(":")
            if colon and name not in names:  # the shape of a result
                continue
            if colon:
                alternatives = tuple(map(_shape, shapes.split("/")))
                self._shapes.append((names.index(name), name, alternatives))
            else:
                whole, _, part = item.split()
                self._multiples.append((whole, part))

    def check(self, tensors: Sequence[Any]) -> None:
        """Raise a RuntimeError if a tensor does not have its shape, or the sizes disagree."""
        known: dict[str, Any] = {}
        for n, name, alternatives in self._shapes:
            x = tensors[n]
            if x is not None and not any(_fits(x, shape, known) for shape in alternatives):
                self._refuse(name, x, alternatives, known)
        for whole, part in self._multiples:
            if known[whole] % known[part] if known[part] else known[whole]:
                raise RuntimeError(
                    f"{self.op}: {whole} must be a multiple of {part}, got {known[whole]} and "
                    f"{known[part]}"
                )

    def lifted(self, tensors: Sequence[Any]) -> list[Any]:
        """The tensors with the declared numbers of dimensions.

        Leading dimensions of size 1 may be missing, and several may stand for the first.
        """
        results = list(tensors)
        for n, _, (shape, *others) in self._shapes:
            x, rank = results[n], len(shape.sizes)
            if x is None or others or shape.leading or x.dim() == rank:
                continue
            if x.dim() < rank:
                results[n] = x[(None,) * (rank - x.dim())]
            else:  # the legacy vmap has no flatten()
                several = x.dim() - rank + 1
                results[n] = x.reshape(math.prod(x.shape[:several]), *x.shape[several:])
        return results

    def _refuse(
        self, name: str, x: Tensor, alternatives: Sequence[_Shape], known: Mapping[str, Any]
    ) -> None:
        expected = " or ".join(f"[{shape.text}]" for shape in alternatives)
        named = {size.name: None for shape in alternatives for size in shape.sizes}
        sizes = ", ".join(f"{size} = {known[size]}" for size in named if size in known)
        raise RuntimeError(
            f"{self.op}: {name} must have the shape {expected}{sizes and f' with {sizes}'}, "
            f"got {tuple(x.shape)}"
        )


def _shape(text: str) -> _Shape:
    words = text.split()
    leading = words[:1] == ["..."]
    return _Shape(", ".join(words), tuple(map(_size, words[leading:])), leading)


def _size(word: str) -> _Size:
    name, _, one = word.partition("|")
    name, _, less = name.partition("-")
    return _Size("" if name == "*" else name, int(less or 0), bool(one))


def _fits(x: Tensor, shape: _Shape, known: dict[str, Any]) -> bool:
    """Whether a tensor has the shape; records sizes that are not known yet."""
    sizes, rank = x.shape, len(shape.sizes)
    if shape.leading:
        lead = tuple(sizes[: len(sizes) - rank])
        if len(sizes) < rank or known.setdefault("...", lead) != lead:
            return False
        sizes = sizes[len(lead) :]
    elif len(sizes) != rank:
        return False
    for (name, less, may_be_one), size in zip(shape.sizes, sizes, strict=True):
        if not name or (may_be_one and size == 1):
            continue
        expected = int(name) if name.isdigit() else known.setdefault(name, size + less) - less
        if size != expected:
            return False
    return True
