"""The cases of ``encode_memory``, their inputs and their proof."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastattn.backends import reference
from fastattn.ops.encode_memory import encode_memory, encoding_factors, prepare
from fastattn.testing.calls import Call
from fastattn.testing.cases import FLOATS
from fastattn.testing.draws import generator_of
from fastattn.testing.verdict import Proof

__all__ = ["ENCODE_CASES", "EncodeCase", "check_encoding", "draw_sentences"]


@dataclass(frozen=True)
class EncodeCase:
    """Sizes, the number of tables (None: weight [V, D]), and the factors."""

    batch: int
    sentences: int
    words: int
    rows: int
    width: int
    tables: int | None
    encoding: str  # "own": a tensor of factors
    dtypes: tuple[torch.dtype, ...] = FLOATS
    slow: bool = False

    @property
    def name(self) -> str:
        sizes = (self.batch, self.sentences, self.words, self.rows, self.width)
        tables = "" if self.tables is None else f"-G{self.tables}"
        return f"{'x'.join(map(str, sizes))}{tables}-{self.encoding}"

    def __str__(self) -> str:
        return self.name


_SHAPES = (
    (3, 4, 5, 11, 8, None),
    (2, 3, 1, 7, 1, 2),
    (2, 5, 7, 13, 20, None),
    (1, 6, 4, 9, 33, 3),
    (4, 7, 12, 30, 50, 4),
    (2, 3, 6, 17, 64, None),
    (2, 3, 5, 8, 67, 2),
    (1, 2, 9, 5, 300, None),
)
ENCODE_CASES = tuple(
    EncodeCase(b, n, j, v, d, g, encoding)
    for b, n, j, v, d, g in _SHAPES
    for encoding in ("position", "centered", "bow", "own")
)


def draw_sentences(
    shape: tuple[int, int, int, int, int, int | None],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, of which a third are padding (0), weight and temporal."""
    b, n, j, v, d, g = shape
    tokens = torch.randint(0, v, (b, n, j), generator=generator)
    tokens *= torch.rand(b, n, j, generator=generator) < 0.67
    tokens[0, 0] = 0
    lead = () if g is None else (g,)

    def normal(*size: int) -> Tensor:
        return torch.randn(*lead, *size, dtype=torch.float64, generator=generator).to(dtype)

    return tokens, normal(v, d), normal(n, d)


def _make(case: EncodeCase, dtype: torch.dtype) -> Call:
    draw = generator_of(case.name)
    shape = (case.batch, case.sentences, case.words, case.rows, case.width, case.tables)
    tokens, weight, temporal = draw_sentences(shape, dtype, draw)
    encoding: str | Tensor = case.encoding
    if case.encoding == "own":
        encoding = torch.randn(case.words, case.width, dtype=torch.float64, generator=draw)
    size = (case.batch, *weight.shape[:-2], case.sentences, case.width)
    grad = torch.randn(size, dtype=torch.float64, generator=draw).to(dtype)
    tensors = {"tokens": tokens, "weight": weight, "temporal": temporal}
    return Call(tensors, {"encoding": encoding}, grad)


def _factors(inputs: Call) -> Tensor:
    encoding, weight = inputs.options["encoding"], inputs.tensors["weight"]
    if isinstance(encoding, Tensor):
        return encoding
    words = inputs.tensors["tokens"].shape[-1]
    return encoding_factors(encoding, words, weight.shape[-1], dtype=torch.float64)


def _definition(inputs: Call) -> dict[str, Tensor]:
    one = inputs.tensors["weight"].ndim == 2

    def encode(**arguments: Any) -> Tensor:
        _, (*tensors, options) = prepare(**arguments)
        out = reference.encode_memory(*tensors, options=options).squeeze(0)
        return out.squeeze(1) if one else out

    exact = replace(inputs.doubled(), options={"encoding": _factors(inputs)})
    return exact.run(encode)


def _extended(naive: Any, inputs: Call) -> dict[str, Tensor]:
    tokens, *tables = inputs.tensors.values()
    weight, temporal = (x.unsqueeze(0) if x.ndim == 2 else x for x in tables)
    grad = inputs.grad if inputs.grad.ndim == 4 else inputs.grad.unsqueeze(1)
    results = naive.encode_memory(tokens, weight, _factors(inputs), temporal, grad)
    shapes = (inputs.grad.shape, *(x.shape for x in tables))
    return {name: x.view(s) for (name, x), s in zip(results.items(), shapes, strict=True)}


check_encoding = Proof(
    "encode_memory",
    ENCODE_CASES,
    make=_make,
    watched=Call.watched,
    primitive=lambda inputs: inputs.primitive(prepare),
    run=lambda backend, inputs: inputs.run(encode_memory),
    definition=_definition,
    extended=_extended,
    public=True,
)
