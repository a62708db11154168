"""Position encodings: x·√E + PE(position), the table PE itself, and learned positions."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.bench.cells import Cell
from fastattn.bench.ops._base import Forward, Inputs, Module, Operator
from fastattn.nn import LearnedPositionalEncoding, SinusoidalPositionalEncoding


def _table(cell: Cell, like: Tensor) -> Tensor:
    """[L, E], with the sine and the cosine of a frequency in adjacent columns."""
    halves = torch.arange(0, cell["E"], 2, dtype=torch.float64, device=like.device)
    position = torch.arange(cell["L"], dtype=torch.float64, device=like.device)[:, None]
    angle = position * 10000.0 ** (-halves / cell["E"])
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, : cell["E"]].to(like.dtype)


def _added(cell: Cell, x: Inputs) -> Forward:
    rows, table = x.x, _table(cell, x.x)
    return lambda: rows * cell["E"] ** 0.5 + table


_OF_ROWS = {"SIZES": {"B": 1, "L": 512, "E": 512}, "SHAPES": {"x": "B L E"}}
_SINUSOIDAL = _OF_ROWS | {
    "ABOUT": "x·√E + PE(position) on x [B, L, E]",
    "TORCH": "x * sqrt(E) + table[:L]",
    "FLOPS": "(2 - backward) * B*L*E",
    "eager": _added,
}

SINUSOIDAL = Operator(
    FUNCTION="sinusoidal_encoding",
    KEYWORDS={"scale": lambda cell: cell["E"] ** 0.5},
    **_SINUSOIDAL,
)
POSITIONAL = Module(
    FUNCTION="nn.SinusoidalPositionalEncoding",
    make=lambda cell, **made: SinusoidalPositionalEncoding(cell["E"], scale="sqrt_dim"),
    **_SINUSOIDAL,
)
SINUSOIDAL_TABLE = Operator(
    FUNCTION="sinusoidal_table",
    ABOUT="PE(0), ..., PE(L − 1), [L, E]",
    TORCH="sin and cos of an outer product, in fp64 and rounded",
    SIZES={"L": 512, "E": 512},
    PASSES=("fwd",),
    SHAPES={},
    OUTPUT="L E",
    FLOPS="L*E",  # a sine counts as one operation
    # The table has no input; this tensor carries dtype and device.
    others=lambda cell, draw: {"like": draw.normal(0)},
    arguments=lambda cell, x: (
        [cell["L"], cell["E"]],
        {"dtype": x.like.dtype, "device": x.like.device},
    ),
    equation=lambda cell, x: _table(cell, x.like),
)
LEARNED = Module(
    FUNCTION="nn.LearnedPositionalEncoding",
    ABOUT="x + weight[position] on x [B, L, E], weight [L, E]",
    TORCH="x + nn.Parameter[:L]",
    FLOPS="B*L*E",
    make=lambda cell, **made: LearnedPositionalEncoding(cell["L"], cell["E"], **made),
    equation=lambda cell, x: x.x + x.weight,
    **_OF_ROWS,
)
