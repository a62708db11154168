"""The cases of ``hopfield_retrieve``, their inputs and their proof."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastattn.testing.calls import Call
from fastattn.testing.cases import Case, Draw, drawn
from fastattn.testing.inputs import make_inputs
from fastattn.testing.judge import Proof
from fastattn.testing.memory import STRIDED


@dataclass(frozen=True)
class HopfieldCase(Case):
    """A case of attention: states, stored patterns, and projections for query, key and value."""

    q_len: int = 3
    k_len: int = 11
    head_dim: int = 7
    steps: int = 3
    shared: bool = False  # patterns of all entries of the batch
    projection: bool = False
    beta: str = "number"  # or "scalar", "heads"
    grad: str = "unroll"


# Few steps: after many, most gradients vanish, and the query with the slowest contraction
# determines both the error and the noise.
_SIZES: dict[str, Sequence[Any]] = {
    "batch heads shared": [(2, 2, False), (1, 1, False), (5, 2, True), (3, 2, True)],
    "q_len steps": [(1, 3), (2, 3), (3, 3), (4, 2), (9, 3), (12, 2), (37, 3), (70, 2)],
    "k_len head_dim": [
        *((11, 7), (1, 1), (50, 20), (70, 48), (40, 65), (33, 16), (97, 40), (41, 18), (300, 33)),
        *((60, 24), (64, 32)),
    ],
}
_OPTIONS: dict[str, Sequence[Any]] = {
    "projection": [True] * 4,
    "mask mask_dims": [
        *(("bool_rows", "bhqk"), ("bool", "bk"), ("bool", "qk")),
        *(("float", dims) for dims in ("bhqk", "hqk", "qk", "k")),
    ],
    "beta": ["scalar", "heads", "heads"],
    "grad": ["one_step"] * 3,
    "grad steps k_len head_dim": [("implicit", 60, 6, 12)] * 3,
    "layouts mask_layout grad_layout": [((x, x, x), x, x) for x in STRIDED],
}
HOPFIELD_CASES = (
    HopfieldCase("plain"),
    HopfieldCase("long", batch=1, heads=1, k_len=1500, head_dim=6, steps=2, mask="bool"),
    *drawn(HopfieldCase("mixed"), 48, _SIZES, _OPTIONS),
)


def make_hopfield_inputs(case: HopfieldCase, dtype: torch.dtype) -> Call:
    """Return the tensors of ``case``, equal from call to call, in poisoned memory."""
    # Implicit derivatives are those of a fixed point, so the steps must converge.
    sharp = 3.0 if case.grad == "implicit" else 1.0
    spreads = (1.0, sharp / case.head_dim**0.5 * 1.5)
    given = make_inputs(replace(case, spreads=spreads), dtype)
    patterns = slice(1 if case.shared else None)
    tensors: dict[str, Any] = {
        "state": given.query,
        "stored": given.key[patterns],
        "projection": given.value[patterns] if case.projection else None,
        "beta": 1.4,
        "attn_mask": given.attn_mask,
    }
    if case.beta != "number":
        heads = (case.heads,) if case.beta == "heads" else ()
        tensors["beta"] = (1 + Draw(case, dtype).normal(*heads).abs() / 2).to(dtype)
    options = {"update_steps_max": case.steps, "update_steps_eps": 0.0, "grad": case.grad}
    grads = {"out": given.grads["out"]}
    return Call("hopfield_retrieve", tensors, options, grads)


check_hopfield = Proof("hopfield_retrieve", HOPFIELD_CASES, make=make_hopfield_inputs)
