"""The proof of ``scaled_dot_product_attention``: exact results, and those of a backend.

All functions return results by name: out, lse, weights if requested, and grad_query, grad_key,
grad_value, grad_mask if any gradient is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastattn import dispatch
from fastattn.backends import reference
from fastattn.testing.calls import double
from fastattn.testing.cases import CASES
from fastattn.testing.inputs import Inputs, make_inputs
from fastattn.testing.rounding import Noise
from fastattn.testing.verdict import Proof, Results

__all__ = ["check", "definition", "exact", "extended", "noise_of", "run"]


def run(backend: Any, inputs: Inputs) -> Results:
    """Return the results of a backend, forward and backward, for inputs that may have poison."""
    return _run(backend, inputs)


def exact(inputs: Inputs) -> Results:
    """Return the results in float64.

    For 16 and 32 bits they are those of the reference in float64. For float64 they are those of
    ``testing.naive`` in extended precision, which needs NumPy.
    """
    if inputs.query.dtype != torch.float64:
        return definition(inputs)
    from fastattn.testing import naive

    return extended(naive, inputs)


def extended(naive: Any, inputs: Inputs) -> Results:
    """Return the results in extended precision, rounded to float64."""
    return _run(naive, inputs, clean=True)


def definition(inputs: Inputs) -> Results:
    """Return the results of the reference in float64."""
    return _run(reference, inputs, clean=True, convert=double)


def noise_of(inputs: Inputs, results: Results) -> Noise:
    """Return the noise of the exact ``results``: their deviation by rounding alone."""
    return Noise(lambda: definition(inputs), results, inputs.query.dtype)


def _run(
    backend: Any,
    inputs: Inputs,
    *,
    clean: bool = False,
    convert: Callable[[Any], Any] = lambda tensors: tensors,
) -> Results:
    forward = backend.scaled_dot_product_attention
    given = dispatch.taken_by(forward, convert(inputs.forward_args(clean=clean)))
    results = dict(
        zip(("out", "lse", "weights"), forward(*given, options=inputs.options), strict=True)
    )
    if any(grad is not None for grad in inputs.cotangents()):
        backward = backend.scaled_dot_product_attention_backward
        args = inputs.backward_args(results["out"], results["lse"], clean=clean)
        given = dispatch.taken_by(backward, convert(args))
        results |= inputs.gradients(backward(*given, options=inputs.backward_options()))
    if inputs.options.weights == 0:
        del results["weights"]
    # A primitive's lse is float64; the public function rounds it to this dtype.
    results["lse"] = results["lse"].to(torch.promote_types(results["out"].dtype, torch.float32))
    return {name: tensor.detach() for name, tensor in results.items()}


check = Proof(
    "scaled_dot_product_attention",
    CASES["scaled_dot_product_attention"],
    make=make_inputs,
    watched=Inputs.tensors,
    primitive=lambda inputs: (inputs.forward_args(), inputs.options),
    run=run,
    definition=definition,
    extended=extended,
    dtypes=Inputs.dtypes,
    coarse=("lse",),  # for 16-bit inputs, lse is a sum of weights rounded to 16 bits
)
