"""The proof of ``scaled_dot_product_attention``: what a case should give, and what a backend gives.

All functions return results by name: out, lse, weights if asked for, and grad_query,
grad_key, grad_value, grad_mask if any gradient is given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.backends import reference
from fastattn.backends.primitives import AttentionOptions
from fastattn.testing.calls import double
from fastattn.testing.cases import CASES
from fastattn.testing.inputs import Inputs, make_inputs
from fastattn.testing.rounding import Noise
from fastattn.testing.verdict import Proof, Results

__all__ = ["check", "definition", "exact", "extended", "noise_of", "run"]


def run(backend: Any, inputs: Inputs) -> Results:
    """Return what a backend gives, forward and backward, NaN in unseen keys and values included."""
    return _run(backend, inputs.forward_args(), inputs.cotangents(), inputs)


def exact(inputs: Inputs) -> Results:
    """Return the results in float64.

    For 16 and 32 bits they are those of the reference in float64. A float64 candidate needs a
    more exact judge: ``testing.naive``, which needs NumPy.
    """
    if inputs.query.dtype != torch.float64:
        return definition(inputs)
    from fastattn.testing import naive

    return extended(naive, inputs)


def extended(naive: Any, inputs: Inputs) -> Results:
    """Return the results in extended precision, rounded to float64."""
    return _run(naive, inputs.forward_args(clean=True), inputs.cotangents(clean=True), inputs)


def definition(inputs: Inputs) -> Results:
    """Return the results of the reference in float64."""
    args, given = inputs.forward_args(clean=True), inputs.cotangents(clean=True)
    return _run(reference, double(args), double(given), inputs)


def noise_of(inputs: Inputs, results: Results) -> Noise:
    """Return how far rounding alone moves each of the exact ``results``."""
    return Noise(lambda: definition(inputs), results, inputs.query.dtype)


def _run(
    backend: Any, args: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...], inputs: Inputs
) -> Results:
    forward = backend.scaled_dot_product_attention(*args, options=inputs.options)
    if all(grad is None for grad in given):
        return _named(forward, None, inputs.options)
    grads = backend.scaled_dot_product_attention_backward(
        *given, *args, *forward[:2], options=inputs.backward_options()
    )
    return _named(forward, grads, inputs.options)


def _named(
    forward: tuple[Tensor, ...], grads: tuple[Tensor | None, ...] | None, options: AttentionOptions
) -> Results:
    results = dict(zip(("out", "lse", "weights"), forward, strict=True))
    if options.weights == 0:
        del results["weights"]
    # A primitive's lse is float64; what the user gets, and what is judged, is rounded to this.
    out = results["out"]
    results["lse"] = results["lse"].to(torch.promote_types(out.dtype, torch.float32))
    names = ("grad_query", "grad_key", "grad_value", "grad_mask")
    results.update((n, g) for n, g in zip(names, grads or (), strict=False) if g is not None)
    return {name: tensor.detach() for name, tensor in results.items()}


def _dtypes(inputs: Inputs) -> dict[str, torch.dtype]:
    dtypes = {"lse": torch.promote_types(inputs.query.dtype, torch.float32)}
    return dtypes if inputs.attn_mask is None else dtypes | {"grad_mask": inputs.attn_mask.dtype}


check = Proof(
    "scaled_dot_product_attention",
    CASES["scaled_dot_product_attention"],
    make=make_inputs,
    watched=Inputs.tensors,
    primitive=lambda inputs: (inputs.forward_args(), inputs.options),
    run=run,
    definition=definition,
    extended=extended,
    dtypes=_dtypes,
    coarse=("lse",),  # that of 16-bit inputs is a sum of weights that were rounded to 16 bits
)
