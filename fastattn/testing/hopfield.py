"""The cases of ``hopfield_retrieve``, their inputs and their proof."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastattn.backends import reference
from fastattn.backends.primitives import AttentionOptions
from fastattn.ops.hopfield import prepare, prepared, primitive
from fastattn.testing.calls import Call
from fastattn.testing.cases import NamedByFields, numbers_of
from fastattn.testing.judge import Proof
from fastattn.testing.memory import STRIDED, place_any


@dataclass(frozen=True)
class HopfieldCase(NamedByFields):
    """Sizes, and which arguments are given; masks and biases by their dimensions."""

    batch: int = 2
    heads: int = 2
    queries: int = 3
    rows: int = 11
    width: int = 7
    steps: int = 3
    shared: bool = False
    projection: bool = False
    mask: str | None = None
    bias: str | None = None
    beta: str = "number"  # or "scalar", "heads"
    grad: str = "unroll"
    layout: str = "contiguous"  # of all tensors


# Few steps: after many, most gradients vanish, and the query with the slowest contraction
# determines both the error and the noise.
HOPFIELD_CASES = (
    HopfieldCase(),
    HopfieldCase(batch=1, heads=1, queries=1, rows=1, width=1, steps=1),
    HopfieldCase(rows=50, width=20, queries=1, projection=True),
    HopfieldCase(queries=2, rows=70, width=48, mask="BHLN", projection=True),
    HopfieldCase(queries=4, rows=40, width=65, bias="BHLN", steps=2),
    HopfieldCase(queries=3, rows=33, width=16, beta="heads", bias="HLN"),
    HopfieldCase(queries=9, rows=97, width=40, mask="B11N"),
    HopfieldCase(queries=37, rows=41, width=18, mask="BHLN", beta="scalar", projection=True),
    HopfieldCase(queries=70, rows=300, width=33, bias="LN", steps=2),
    HopfieldCase(batch=5, queries=1, rows=60, width=24, shared=True, beta="heads"),
    HopfieldCase(batch=3, queries=20, rows=64, width=32, shared=True, mask="B11N", steps=2),
    HopfieldCase(batch=1, heads=1, rows=1500, width=6, mask="LN", steps=2),
    HopfieldCase(queries=2, rows=30, width=9, grad="one_step", mask="BHLN"),
    HopfieldCase(queries=12, rows=30, width=9, grad="one_step", bias="N", projection=True),
    HopfieldCase(queries=2, rows=6, width=12, grad="implicit", mask="B11N", steps=60),
    HopfieldCase(queries=11, rows=6, width=12, grad="implicit", bias="N", beta="heads", steps=60),
    *(HopfieldCase(rows=20, width=18, bias="BHLN", projection=True, layout=x) for x in STRIDED),
    *(HopfieldCase(queries=9, rows=40, width=13, mask="BHLN", layout=x) for x in STRIDED),
)


def define(
    state: Tensor,
    stored: Tensor,
    projection: Tensor | None,
    beta: Any,
    attn_mask: Tensor | None,
    update_steps_max: int,
    update_steps_eps: float,
    grad: str,
) -> Tensor:
    steps = (update_steps_max, update_steps_eps, "query", grad)
    call = prepared(state, stored, projection, beta, *steps, attn_mask, False, False)
    arguments, back = primitive(call)
    xi, *_ = reference.hopfield_states(*arguments)
    xi, key, value, mask = call.reading(back(xi))
    lead, options = (call.state.shape[0], -1, -1, -1), AttentionOptions(scale=call.scale)
    operands = (xi, key.expand(lead), value.expand(lead), mask)
    return reference.attend(*operands, None, None, options)[0]


def make_hopfield_inputs(case: HopfieldCase, dtype: torch.dtype) -> Call:
    """Return the tensors of ``case``, equal from call to call, in poisoned memory."""
    draw, normal = numbers_of(str(case))
    sizes = {"B": case.batch, "H": case.heads, "L": case.queries, "N": case.rows, "1": 1}

    def placed(values: Tensor, as_dtype: torch.dtype = dtype) -> Tensor:
        return place_any(values.to(as_dtype), case.layout)

    # Implicit derivatives are those of a fixed point, so the steps must converge.
    sharp = 3.0 if case.grad == "implicit" else 1.0
    stored = normal(1 if case.shared else case.batch, case.heads, case.rows, case.width)
    tensors: dict[str, Any] = {
        "state": placed(normal(case.batch, case.heads, case.queries, case.width)),
        "stored": placed(stored * sharp / case.width**0.5 * 1.5),
        "projection": placed(normal(*stored.shape)) if case.projection else None,
        "beta": 1.4,
        "attn_mask": None,
    }
    if case.beta != "number":
        heads = (case.heads,) if case.beta == "heads" else ()
        tensors["beta"] = (1.0 + torch.rand(heads, generator=draw, dtype=torch.float64)).to(dtype)
    if case.mask is not None:
        shape = tuple(sizes[dim] for dim in case.mask)
        mask = torch.rand(shape, generator=draw) < 0.7
        if case.mask == "BHLN":
            mask[0, 0, 0] = False  # a fully masked row
        tensors["attn_mask"] = placed(mask, torch.bool)
    if case.bias is not None:
        tensors["attn_mask"] = placed(normal(*(sizes[dim] for dim in case.bias)))
    options = {"update_steps_max": case.steps, "update_steps_eps": 0.0, "grad": case.grad}
    grads = {"out": placed(normal(*tensors["state"].shape))}
    return Call("hopfield_retrieve", tensors, options, grads, plain=define, prepare=prepare)


check_hopfield = Proof("hopfield_retrieve", HOPFIELD_CASES, make=make_hopfield_inputs)
