"""`SinusoidalPositionalEncoding`: the module of `sinusoidal_encoding`, x·√E + PE(position)."""

from __future__ import annotations

from fastattn.bench.cells import Cell
from fastattn.bench.ops._base import Inputs, Prepared
from fastattn.bench.ops.sinusoidal import Sinusoidal
from fastattn.nn import SinusoidalPositionalEncoding


class Positional(Sinusoidal):
    FUNCTION = "nn.SinusoidalPositionalEncoding"

    def ours(self, cell: Cell, inputs: Inputs) -> Prepared:
        module = SinusoidalPositionalEncoding(cell["E"], scale="sqrt_dim")
        x = inputs["x"]
        return lambda: (module(x),), [x]


OP = Positional()
