"""`Hopfield`: norms, projections, K steps of retrieval, and the output projection.

The operations of layer norms are not counted, as in all operators here.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._attention import attend
from fastattn.bench.ops._base import Inputs, Outputs, Sizes
from fastattn.bench.ops._layers import linear, norm
from fastattn.bench.ops._module import Module, below
from fastattn.nn import Hopfield

# No query stops early, so that all steps are counted and compared.
FIXED_STEPS = {"update_steps_eps": 0.0}


class HopfieldModule(Module):
    FUNCTION = "nn.Hopfield"
    ABOUT = (
        "states [B, L, E] retrieve from patterns [B, N, E], H heads, K steps, norms, projections"
    )
    SIZES: ClassVar[Sizes] = {"B": 4, "L": 128, "N": 128, "E": 512, "H": 8, "K": 3}
    SHAPES: ClassVar = {"state": "B L E", "stored": "B N E"}
    OUTPUT = "B L E"

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        batch, states, rows, embed = (cell[key] for key in ("B", "L", "N", "E"))
        attention = batch * states * rows * embed * (cell["K"] + 1)
        # Query and output of every state, key and value of every pattern.
        projections = 2 * embed**2 * (2 * batch * states + 2 * self.copies(cell) * rows)
        return 4 * attention + projections, 10 * attention + 2 * projections

    def copies(self, cell: Cell) -> int:
        """The number of copies of the stored patterns."""
        return cell["B"]

    def make(self, cell: Cell, **made: Any) -> nn.Module:
        steps: dict[str, Any] = {"update_steps_max": cell["K"], **FIXED_STEPS}
        return Hopfield(cell["E"], num_heads=cell["H"], **steps, **made)

    def parameter(self, name: str, shape: tuple[int, ...], draw: Draw) -> Tensor:
        drawn = super().parameter(name, shape, draw)
        # Small, so that the steps contract; diverging steps would amplify rounding errors.
        return drawn / 2 if "in_proj" in name else drawn

    def call(self, cell: Cell, module: nn.Module, inputs: Inputs) -> Tensor:
        stored = inputs["stored"]
        out: Tensor = module((stored, inputs["state"], stored))
        return out

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        return (associated(cell, inputs["stored"], inputs["state"], inputs),)


def associated(
    cell: Cell,
    stored: Tensor,  # [B or 1, N, E]
    state: Tensor,  # [B, L, E]
    own: Inputs,  # the parameters of a `Hopfield`, by their names
) -> Tensor:
    """[B, L, E]"""
    core = below(own, "association_core.")

    def heads(n: int, kind: str, x: Tensor) -> Tensor:
        weight, bias = (core[f"in_proj_{name}"].chunk(3)[n] for name in ("weight", "bias"))
        projected = norm(below(own, f"norm_{kind}."), x) @ weight.T + bias
        return projected.unflatten(-1, (cell["H"], -1)).transpose(1, 2)

    xi = heads(0, "state_pattern", state)
    keys = heads(1, "stored_pattern", stored)
    values = heads(2, "pattern_projection", stored)
    for _ in range(cell["K"]):
        xi, _ = attend(xi, keys, keys)
    joined = attend(xi, keys, values)[0].transpose(1, 2).flatten(2)
    return linear(below(core, "out_proj."), joined)


OP = HopfieldModule()
