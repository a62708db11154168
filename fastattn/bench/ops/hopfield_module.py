"""`Hopfield`: norms, projections, K steps of retrieval, and the way out.

A layer norm counts as nothing, as everywhere here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional

from fastattn.bench.cells import Cell
from fastattn.bench.inputs import Draw
from fastattn.bench.ops._attention import attend
from fastattn.bench.ops._base import Inputs, Outputs, Sizes
from fastattn.bench.ops._module import Module
from fastattn.nn import Hopfield

_KINDS = ("stored_pattern", "state_pattern", "pattern_projection")
PARAMETERS = (
    *(f"association_core.in_proj_{kind}" for kind in ("weight", "bias")),
    *(f"association_core.out_proj.{kind}" for kind in ("weight", "bias")),
    *(f"norm_{name}.{kind}" for name in _KINDS for kind in ("weight", "bias")),
)
# No query rests early: as many steps are compared as are counted.
NEVER_RESTS = {"update_steps_eps": 0.0}


class HopfieldModule(Module):
    FUNCTION = "nn.Hopfield"
    ABOUT = (
        "states [B, L, E] retrieve from patterns [B, N, E], H heads, K steps, norms, projections"
    )
    TORCH = "the equation: torch has no such module"
    SIZES: ClassVar[Sizes] = {"B": 4, "L": 128, "N": 128, "E": 512, "H": 8, "K": 3}
    LEAVES = ("state", "stored", *PARAMETERS)

    def check(self, sizes: Mapping[str, int]) -> None:
        if sizes["E"] % sizes["H"]:
            raise ValueError(f"E={sizes['E']} is not a multiple of H={sizes['H']}")

    def flops(self, cell: Cell, pairs: int) -> tuple[int, int]:
        batch, states, rows, embed = (cell[key] for key in ("B", "L", "N", "E"))
        attention = batch * states * rows * embed * (cell["K"] + 1)
        # Query and output of every state, key and value of every pattern.
        projections = 2 * embed**2 * (2 * batch * states + 2 * self.copies(cell) * rows)
        return 4 * attention + projections, 10 * attention + 2 * projections

    def copies(self, cell: Cell) -> int:
        """How often the stored patterns are there."""
        return cell["B"]

    def elements(self, cell: Cell) -> tuple[int, int]:
        states, stored = cell["B"] * cell["L"], cell["B"] * cell["N"]
        return (states + stored) * cell["E"] + self.parameters(cell), states * cell["E"]

    def make(self, cell: Cell, **made: Any) -> nn.Module:
        steps: dict[str, Any] = {"update_steps_max": cell["K"], **NEVER_RESTS}
        return Hopfield(cell["E"], num_heads=cell["H"], **steps, **made)

    def given(self, cell: Cell, draw: Draw) -> Inputs:
        batch, embed = cell["B"], cell["E"]
        return {
            "state": draw.normal(batch, cell["L"], embed),
            "stored": draw.normal(batch, cell["N"], embed),
            "grad_out": draw.normal(batch, cell["L"], embed),
        }

    def parameter(self, name: str, shape: tuple[int, ...], draw: Draw) -> Tensor:
        drawn = super().parameter(name, shape, draw)
        # Small enough for the steps to draw states together: where they part, rounding decides.
        return drawn / 2 if "in_proj" in name else drawn

    def call(self, cell: Cell, module: nn.Module, inputs: Inputs) -> Tensor:
        stored = inputs["stored"]
        out: Tensor = module((stored, inputs["state"], stored))
        return out

    def plain(self, cell: Cell, inputs: Inputs) -> Outputs:
        parameters = [inputs[name] for name in self.LEAVES[-len(PARAMETERS) :]]
        return (associated(cell, inputs["stored"], inputs["state"], parameters),)


def associated(
    cell: Cell,
    stored: Tensor,  # [B or 1, N, E]
    state: Tensor,  # [B, L, E]
    parameters: list[Tensor],  # in the order of PARAMETERS
) -> Tensor:
    """[B, L, E]"""
    in_weight, in_bias, out_weight, out_bias, *norms = parameters

    def norm(n: int, x: Tensor) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], norms[2 * n], norms[2 * n + 1])

    def heads(n: int, x: Tensor) -> Tensor:
        projected = x @ in_weight.chunk(3)[n].T + in_bias.chunk(3)[n]
        return projected.unflatten(-1, (cell["H"], -1)).transpose(1, 2)

    xi, keys, values = (
        heads(0, norm(1, state)),
        heads(1, norm(0, stored)),
        heads(2, norm(2, stored)),
    )
    for _ in range(cell["K"]):
        xi, _ = attend(xi, keys, keys, None, None)
    joined = attend(xi, keys, values, None, None)[0].transpose(1, 2).flatten(2)
    return joined @ out_weight.T + out_bias


OP = HopfieldModule()
