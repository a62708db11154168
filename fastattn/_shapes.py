"""The tensors of an operator and their shapes, checked where nothing has checked them before.

Public functions check their arguments. But a graph of ``torch.jit.trace`` calls the operator of the
dispatcher with tensors of other sizes, and so may a saved program or a caller of ``torch.ops``. A
kernel would read beyond the end of a tensor that does not fit the others.

They are declared as ``"query: B Hq Lq D; key: B Hkv Lk D; mask?: B|1 Lq|1 Lk|1; seed?; Hq % Hkv"``:
``mask?`` is optional, ``B|1`` may also be 1, ``*`` is any size, ``...`` at the front any sizes (the
same for all tensors), ``S-1`` one less than S, and ``/`` separates shapes of several ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor


class _Size(NamedTuple):
    name: str  # "" is any size, digits are that size
    less: int  # S-1 has the name S and 1 here
    may_be_one: bool


class _Shape(NamedTuple):
    text: str
    sizes: tuple[_Size, ...]
    leading: bool  # begins with "..."


class Declared:
    """The declaration of an operator's tensors, or of its results."""

    def __init__(self, text: str) -> None:
        self.shapes: dict[str, str] = {}  # by name; "" is no declared shape
        self.optional: set[str] = set()
        self.multiples: list[tuple[str, str]] = []  # (Hq, Hkv) of "Hq % Hkv"
        for item in map(str.strip, text.split(";")):
            if "%" in item:
                whole, _, divisor = item.split()
                self.multiples.append((whole, divisor))
                continue
            name, _, shape = item.partition(":")
            if name.endswith("?"):
                self.optional.add(name := name.removesuffix("?"))
            self.shapes[name] = shape.strip()

    def item(self, name: str) -> str:
        """The declaration of one tensor."""
        return f"{name}{'?' * (name in self.optional)}:{self.shapes[name]}"

    def schema(self) -> str:
        """The tensors as arguments of a dispatcher operator."""
        kinds = {True: "Tensor?", False: "Tensor"}
        return ", ".join(f"{kinds[name in self.optional]} {name}" for name in self.shapes)

    def sizes(self, name: str, known: Mapping[str, Any], number: int) -> tuple[Any, ...]:
        """The sizes of a result: of its shape ``number`` > 1; for 1, of the longest known shape."""
        shapes = [shape.split() for shape in self.shapes[name].split("/")]
        if number == 1:
            shape = max((x for x in shapes if known.keys() >= set(x)), key=len)
        else:
            shape = shapes[number - 1]
        return tuple(known[size] for size in shape)


class Shapes:
    """The declared shapes of an operator's tensors."""

    def __init__(self, op: str, declared: Declared) -> None:
        self.op, self._multiples = op, declared.multiples
        self._shapes = [
            (n, name, tuple(map(_parse_shape, shape.split("/"))))
            for n, (name, shape) in enumerate(declared.shapes.items())
            if shape
        ]
        # The shape of a gradient follows from the other tensors.
        self._shapes.sort(key=lambda shape: shape[1].startswith("grad_"))

    def check(self, tensors: Sequence[Any]) -> None:
        """Raise a RuntimeError if a tensor does not have its shape, or sizes of one name differ."""
        known: dict[str, Any] = {}
        for n, name, alternatives in self._shapes:
            x = tensors[n]
            if x is not None and not any(_fits(x, shape, known) for shape in alternatives):
                self._refuse(name, x, alternatives, known)
        for whole, divisor in self._multiples:
            if known[whole] % known[divisor] if known[divisor] else known[whole]:
                raise RuntimeError(
                    f"{self.op}: {whole} must be a multiple of {divisor}, got {known[whole]} and "
                    f"{known[divisor]}"
                )

    def sizes(self, tensors: Sequence[Any]) -> dict[str, Any]:
        """The sizes by name, without a check; a tensor that may have size 1 does not count."""
        known: dict[str, Any] = {}
        for n, _, alternatives in self._shapes:
            x = tensors[n]
            for shape in alternatives if x is not None else ():
                if len(shape.sizes) == x.dim():
                    pairs = zip(shape.sizes, x.shape, strict=True)
                    exact = {s.name: size for s, size in pairs if not (s.less or s.may_be_one)}
                    known = exact | known
        return known

    def lifted(self, tensors: Sequence[Any]) -> list[Any]:
        """The tensors with the declared numbers of dimensions.

        Leading dimensions of size 1 may be missing, and several may stand for the first.
        """
        reshaped = list(tensors)
        for n, _, (shape, *alternatives) in self._shapes:
            x, rank = reshaped[n], len(shape.sizes)
            if x is None or alternatives or shape.leading or x.dim() == rank:
                continue
            if x.dim() < rank:
                reshaped[n] = x[(None,) * (rank - x.dim())]
            else:  # the legacy vmap has no flatten()
                split = x.dim() - rank + 1  # the dimensions that stand for the first
                reshaped[n] = x.reshape(math.prod(x.shape[:split]), *x.shape[split:])
        return reshaped

    def _refuse(
        self, name: str, x: Tensor, alternatives: Sequence[_Shape], known: Mapping[str, Any]
    ) -> None:
        expected = " or ".join(f"[{shape.text}]" for shape in alternatives)
        names = {size.name: None for shape in alternatives for size in shape.sizes}
        sizes = ", ".join(f"{name} = {known[name]}" for name in names if name in known)
        raise RuntimeError(
            f"{self.op}: {name} must have the shape {expected}{sizes and f' with {sizes}'}, "
            f"got {tuple(x.shape)}"
        )


def _parse_shape(text: str) -> _Shape:
    words = text.split()
    leading = words[:1] == ["..."]
    return _Shape(", ".join(words), tuple(map(_parse_size, words[leading:])), leading)


def _parse_size(word: str) -> _Size:
    name, _, one = word.partition("|")
    name, _, less = name.partition("-")
    return _Size("" if name == "*" else name, less=int(less or 0), may_be_one=bool(one))


def _fits(x: Tensor, shape: _Shape, known: dict[str, Any]) -> bool:
    """Whether a tensor has the shape; adds the sizes that are not in ``known`` yet."""
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
