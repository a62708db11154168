"""The cases of ``encode_memory``, their inputs and their judge."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import fastattn
from fastattn.ops.encode_memory import encode_memory, encoding_factors, prepare
from fastattn.testing.draws import generator_of
from fastattn.testing.memory import Watch
from fastattn.testing.rounding import Noise
from fastattn.testing.targets import Target
from fastattn.testing.verdict import Verdict, fresh_memory_is_nan

__all__ = ["ENCODE_CASES", "EncodeCase", "check_encoding", "draw_sentences", "plain_encoding"]


@dataclass(frozen=True)
class EncodeCase:
    """Sizes, how many tables there are (None: [V, D]), and which factors."""

    batch: int
    sentences: int
    words: int
    rows: int
    width: int
    tables: int | None
    encoding: str  # "own": factors of the caller's
    dtypes: tuple[torch.dtype, ...] = (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
    )
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
    """Tokens, of which a third are padding (0), weight and temporal."""
    b, n, j, v, d, g = shape
    tokens = torch.randint(0, v, (b, n, j), generator=generator)
    tokens *= torch.rand(b, n, j, generator=generator) < 0.67
    tokens[0, 0] = 0
    lead = () if g is None else (g,)

    def normal(*size: int) -> Tensor:
        return torch.randn(*lead, *size, dtype=torch.float64, generator=generator).to(dtype)

    return tokens, normal(v, d), normal(n, d)


def plain_encoding(tokens: Tensor, weight: Tensor, factors: Tensor, temporal: Tensor) -> Tensor:
    """The definition in plain PyTorch, where 0 is padding."""
    if weight.ndim == 3:
        each = zip(weight, temporal, strict=True)
        return torch.stack([plain_encoding(tokens, w, factors, t) for w, t in each], 1)
    told = tokens != 0
    words = F.embedding(tokens, weight) * factors.to(weight.dtype) * told.unsqueeze(-1)
    return words.sum(-2) + temporal * told.any(-1, keepdim=True)


def check_encoding(case: EncodeCase, dtype: torch.dtype, target: Target) -> Verdict:
    """Run ``case`` forward and backward on ``target`` and judge it by the error bound."""
    draw = generator_of(case.name)
    shape = (case.batch, case.sentences, case.words, case.rows, case.width, case.tables)
    tokens, weight, temporal = draw_sentences(shape, dtype, draw)
    encoding: str | Tensor = case.encoding
    if case.encoding == "own":
        encoding = torch.randn(case.words, case.width, dtype=torch.float64, generator=draw)
        factors = encoding
    else:
        factors = encoding_factors(case.encoding, case.words, case.width, dtype=torch.float64)
    size = (case.batch, *weight.shape[:-2], case.sentences, case.width)
    grad = torch.randn(size, dtype=torch.float64, generator=draw).to(dtype)

    def run(encode: bool, weight: Tensor, temporal: Tensor, grad: Tensor) -> list[Tensor]:
        leaves = [weight.detach().requires_grad_(), temporal.detach().requires_grad_()]
        if encode:
            out = encode_memory(tokens, leaves[0], temporal=leaves[1], encoding=encoding)
        else:
            out = plain_encoding(tokens, leaves[0], factors, leaves[1])
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    verdict = Verdict()
    with target.active() as backend:
        operator, (*tensors, options) = prepare(
            tokens, weight, temporal=temporal, encoding=encoding
        )
        verdict.declined = backend.why_not(operator.name, *tensors, options=options)
        if verdict.declined:
            return verdict
        watch = Watch(tokens=tokens, weight=weight, temporal=temporal, grad=grad)
        with fresh_memory_is_nan(), fastattn.use_backend(target.backend):
            got = run(True, weight, temporal, grad)
    verdict.faults += [f"{name} was written to" for name in watch.written()]
    names = ("out", "grad of weight", "grad of temporal")

    def definition() -> dict[str, Tensor]:
        found = run(False, weight.double(), temporal.double(), grad.double())
        return dict(zip(names, found, strict=True))

    want = definition()
    if dtype is torch.float64:
        found = _in_extended_precision(tokens, weight, factors, temporal, grad)
        want = dict(zip(names, found, strict=True))
    results = dict(zip(names, got, strict=True))
    verdict.judge(results, want, Noise(definition, want, dtype), dict.fromkeys(want, dtype))
    return verdict


def _in_extended_precision(
    tokens: Tensor, weight: Tensor, factors: Tensor, temporal: Tensor, grad: Tensor
) -> list[Tensor]:
    """What is right for float64, word by word in NumPy's long doubles."""
    import numpy as np

    def wide(x: Tensor) -> np.ndarray:
        return x.numpy().astype(np.longdouble)

    one = weight.ndim == 2
    tables, rows = (wide(x)[None] if one else wide(x) for x in (weight, temporal))
    g = wide(grad.unsqueeze(1) if one else grad)  # [B, G, N, D]
    f = wide(factors)
    out, grad_tables, grad_rows = np.zeros_like(g), np.zeros_like(tables), np.zeros_like(rows)
    for b, story in enumerate(tokens.tolist()):
        for n, sentence in enumerate(story):
            if any(sentence):
                out[b, :, n] += rows[:, n]
                grad_rows[:, n] += g[b, :, n]
            for j, token in enumerate(sentence):
                if token:
                    out[b, :, n] += f[j] * tables[:, token]
                    grad_tables[:, token] += f[j] * g[b, :, n]
    shapes = (grad.shape, weight.shape, temporal.shape)
    exact = zip((out, grad_tables, grad_rows), shapes, strict=True)
    return [torch.from_numpy(x.astype(np.float64).reshape(s)) for x, s in exact]
