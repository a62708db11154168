"""The cases of ``hopfield_retrieve``, their inputs and their judge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import fastattn
from fastattn.backends import reference
from fastattn.backends.primitives import (
    AttentionOptions,
    MemoryHopOptions,
)
from fastattn.ops.hopfield import _prepared, _primitive, hopfield_retrieve, prepare
from fastattn.testing.draws import cached, generator_of
from fastattn.testing.memory import Watch, place
from fastattn.testing.rounding import Noise
from fastattn.testing.targets import Target
from fastattn.testing.verdict import Verdict, fresh_memory_is_nan

__all__ = [
    "HOPFIELD_CASES",
    "HopfieldCase",
    "HopfieldInputs",
    "check_hopfield",
    "make_hopfield_inputs",
    "retrieved_with_gradients",
]


@dataclass(frozen=True)
class HopfieldCase:
    """Sizes, and which of the arguments there are; masks and biases by their dimensions."""

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
    dtypes: tuple[torch.dtype, ...] = (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
    )
    slow: bool = False

    @property
    def name(self) -> str:
        changed = [
            f"{name}={value}"
            for name, value in vars(self).items()
            if value != getattr(_PLAIN, name)
        ]
        return "-".join(changed) or "plain"

    def __str__(self) -> str:
        return self.name


# Few steps: after many, most gradients are gone, and the one query that hardly contracts decides
# how large the error and the noise are.
_PLAIN = HopfieldCase()
HOPFIELD_CASES = (
    _PLAIN,
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
)


@dataclass
class HopfieldInputs:
    tensors: dict[str, Any]
    options: dict[str, Any]
    grad: Tensor


def make_hopfield_inputs(
    case: HopfieldCase, dtype: torch.dtype, layout: str = "contiguous", fence: bool = False
) -> HopfieldInputs:
    draw = generator_of(str(case))
    sizes = {"B": case.batch, "H": case.heads, "L": case.queries, "N": case.rows, "1": 1}

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    def placed(values: Tensor, as_dtype: torch.dtype = dtype) -> Tensor:
        lead = (1,) * (4 - values.ndim)
        return place(values.view(*lead, *values.shape).to(as_dtype), layout, fence=fence)[
            (0,) * len(lead)
        ]

    # A solution is what implicit derivatives are of: there the steps must get to one.
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
            mask[0, 0, 0] = False  # a query that sees nothing
        tensors["attn_mask"] = placed(mask, torch.bool)
    if case.bias is not None:
        tensors["attn_mask"] = placed(normal(*(sizes[dim] for dim in case.bias)))
    options = {"update_steps_max": case.steps, "update_steps_eps": 0.0, "grad": case.grad}
    return HopfieldInputs(tensors, options, placed(normal(*tensors["state"].shape)))


def retrieved_with_gradients(inputs: HopfieldInputs) -> dict[str, Tensor]:
    """The result and the gradients, by the library."""
    return _derived(inputs, hopfield_retrieve)


def _derived(inputs: HopfieldInputs, retrieve: Callable[..., Tensor]) -> dict[str, Tensor]:
    arguments: dict[str, Any] = {
        name: x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in inputs.tensors.items()
    }
    leaves = {n: x for n, x in arguments.items() if isinstance(x, Tensor) and x.requires_grad}
    out = retrieve(**arguments, **inputs.options)
    grads = torch.autograd.grad(out, list(leaves.values()), inputs.grad, allow_unused=True)
    named = {
        f"grad of {name}": torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
    }
    return {"out": out.detach()} | named


def _definition(inputs: HopfieldInputs) -> dict[str, Tensor]:
    """The result and the gradients, by the reference in float64."""

    def wide(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    tensors = {name: wide(x) for name, x in inputs.tensors.items()}
    return _derived(replace(inputs, tensors=tensors, grad=inputs.grad.double()), _retrieve_plainly)


def _retrieve_plainly(
    state: Tensor,
    stored: Tensor,
    projection: Tensor | None,
    beta: Any,
    attn_mask: Tensor | None,
    update_steps_max: int,
    update_steps_eps: float,
    grad: str,
) -> Tensor:
    call = _prepared(
        state,
        stored,
        projection,
        beta,
        update_steps_max,
        update_steps_eps,
        "query",
        grad,
        attn_mask,
        False,
        False,
    )
    arguments, back = _primitive(call)
    xi, *_ = reference.hopfield_states(*arguments)
    key = call.stored if call.keys is None else call.keys
    value = call.stored if call.projection is None else call.projection
    lead = (call.state.shape[0], -1, -1, -1)
    return reference.attend(
        back(xi),
        key.expand(lead),
        value.expand(lead),
        call.mask,
        None,
        None,
        AttentionOptions(scale=call.scale),
    )[0]


def _exact(case: HopfieldCase, inputs: HopfieldInputs) -> dict[str, Tensor]:
    """What is right, in extended precision: memory hops with H = 0, the last of them the reading.

    The derivative of a solution is that of many steps from it.
    """
    from fastattn.testing.memory_hops import results_and_gradients

    def wide(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    tensors = {name: wide(x) for name, x in inputs.tensors.items()}
    lead = (case.batch, case.heads)

    def flat(x: Tensor) -> Tensor:
        return x.expand(*lead, *x.shape[2:]).flatten(0, 1)

    stored, beta = tensors["stored"], tensors["beta"]
    factor = beta.view(1, -1, 1, 1) if isinstance(beta, Tensor) else torch.tensor(1.0)
    keys, value = stored * factor, tensors["projection"]
    value = stored if value is None else value
    scale = 1.0 if isinstance(beta, Tensor) else beta
    mask = tensors["attn_mask"]
    scores = (*lead, case.queries, case.rows)
    full = None
    if mask is not None:
        full = mask.expand(scores).flatten(0, 1).unsqueeze(2)

    def hops(state: Tensor, count: int) -> dict[str, Tensor]:
        read = torch.stack([*[flat(stored)] * (count - 1), flat(value)], 1)
        boolean = full is not None and full.dtype == torch.bool
        return results_and_gradients(
            state,
            flat(keys).unsqueeze(1),
            read,
            torch.zeros(1, case.width, case.width).double(),
            full if boolean else None,
            None if boolean else full,
            MemoryHopOptions(count, scale=scale),
            flat(inputs.grad.double()),
            None,
        )

    state = flat(tensors["state"])
    found = hops(state, case.steps + 1)
    if case.grad != "unroll":
        reading, value = value, stored
        before = hops(state, case.steps - 1)["out"] if case.steps > 1 else state
        value = reading
        derived = hops(before, 2 if case.grad == "one_step" else 150)
        found = derived | {"out": found["out"], "grad of query": torch.zeros_like(state)}

    def of(x: Tensor, like: Tensor) -> Tensor:
        """The sum over whatever ``like`` is common to."""
        return x.unflatten(0, lead).sum_to_size(like.shape)

    by_key = found["grad of in_memory"][:, 0]
    by_row = found["grad of out_memory"]
    results = {
        "out": found["out"].unflatten(0, lead),
        "grad of state": found["grad of query"].unflatten(0, lead),
    }
    steps, read = by_row[:, :-1].sum(1), by_row[:, -1]
    grad_stored = steps + flat(factor.double().expand(keys.shape)) * by_key
    if case.projection:
        results["grad of projection"] = of(read, value)
    else:
        grad_stored = grad_stored + read
    results["grad of stored"] = of(grad_stored, stored)
    if isinstance(beta, Tensor):
        by_head = (by_key.unflatten(0, lead) * stored).sum((0, 2, 3))
        results["grad of beta"] = by_head if beta.ndim else by_head.sum()
    if case.bias is not None:
        results["grad of attn_mask"] = of(found["grad of memory_bias"].sum(2), mask)
    return results


@cached
def expected_retrieval(
    case: HopfieldCase, dtype: torch.dtype
) -> tuple[HopfieldInputs, dict[str, Tensor], Noise]:
    """Return the inputs, what they should give, and how far rounding alone moves that."""
    inputs = make_hopfield_inputs(case, dtype)
    exact = _exact(case, inputs)
    return inputs, exact, Noise(lambda: _definition(inputs), exact, dtype)


def check_hopfield(case: HopfieldCase, dtype: torch.dtype, target: Target) -> Verdict:
    """Run ``case`` forward and backward on ``target`` and judge it by the error bound."""
    inputs, exact, noise = expected_retrieval(case, dtype)
    verdict = Verdict()
    with target.active() as backend:
        operator, (*tensors, options) = prepare(**inputs.tensors, **inputs.options)
        verdict.declined = backend.why_not(operator.name, *tensors, options=options)
        if verdict.declined:
            return verdict
        watched = {n: x for n, x in inputs.tensors.items() if isinstance(x, Tensor)}
        watch = Watch(**watched, grad=inputs.grad)
        with fresh_memory_is_nan(), fastattn.use_backend(target.backend):
            got = retrieved_with_gradients(inputs)
    verdict.faults += [f"{name} was written to" for name in watch.written()]
    verdict.judge(got, exact, noise, dict.fromkeys(exact, dtype))
    return verdict
