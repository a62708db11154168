"""The cases of ``encode_memory``, their inputs and their proof."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fastattn.testing.calls import Call
from fastattn.testing.cases import Draw, NamedCase
from fastattn.testing.judge import Proof


@dataclass(frozen=True)
class EncodeCase(NamedCase):
    """Sizes: batch, sentences, words, rows, width, tables (None: weight [V, D]); and factors."""

    sizes: tuple[int, int, int, int, int, int | None] = (3, 4, 5, 11, 8, None)
    encoding: str = "position"  # "own": a tensor of factors


_SIZES = (
    *((3, 4, 5, 11, 8, None), (2, 3, 1, 7, 1, 2), (2, 5, 7, 13, 20, None), (1, 6, 4, 9, 33, 3)),
    *((4, 7, 12, 30, 50, 4), (2, 3, 6, 17, 64, None), (2, 3, 5, 8, 67, 2), (1, 2, 9, 5, 300, None)),
)
ENCODE_CASES = tuple(
    EncodeCase(f"{'x'.join(map(str, filter(None, sizes)))}-{encoding}", sizes, encoding)
    for sizes, encoding in product(_SIZES, ("position", "centered", "bow", "own"))
)


def draw_sentences(
    sizes: tuple[int, int, int, int, int, int | None],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, of which a third are padding (0), weight and temporal."""
    b, n, j, v, d, g = sizes
    tokens = torch.randint(0, v, (b, n, j), generator=generator)
    tokens *= torch.rand(b, n, j, generator=generator) < 0.67
    tokens[0, 0] = 0
    lead = () if g is None else (g,)

    def normal(*size: int) -> Tensor:
        return torch.randn(*lead, *size, dtype=torch.float64, generator=generator).to(dtype)

    return tokens, normal(v, d), normal(n, d)


def _make(case: EncodeCase, dtype: torch.dtype) -> Call:
    draw = Draw(case, dtype)
    tokens, weight, temporal = draw_sentences(case.sizes, dtype, draw.generator)
    own = case.encoding == "own"
    options = {"encoding": draw.normal(case.sizes[2], case.sizes[4]) if own else case.encoding}
    grads = {"out": draw.normal(case.sizes[0], *temporal.shape).to(dtype)}
    tensors: dict[str, Any] = {"tokens": tokens, "weight": weight, "temporal": temporal}
    return Call("encode_memory", tensors, options, grads)


check_encoding = Proof("encode_memory", ENCODE_CASES, make=_make)
