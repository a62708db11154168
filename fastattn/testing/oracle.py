"""What a case should give, exactly, and what a backend gives.

All functions return results by name: out, lse, weights if asked for, and grad_query,
grad_key, grad_value, grad_mask if any gradient is given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.backends import reference
from fastattn.backends.primitives import AttentionOptions
from fastattn.testing.inputs import Inputs
from fastattn.testing.rounding import Noise

__all__ = ["definition", "exact", "noise_of", "run"]

Results = dict[str, Tensor]


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

    return _run(naive, inputs.forward_args(clean=True), inputs.cotangents(clean=True), inputs)


def definition(inputs: Inputs) -> Results:
    """Return the results of the reference in float64."""
    args = tuple(_double(arg) for arg in inputs.forward_args(clean=True))
    given = tuple(_double(grad) for grad in inputs.cotangents(clean=True))
    return _run(reference, args, given, inputs)


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


def _double(x: Tensor | None) -> Tensor | None:
    return x.double() if x is not None and x.is_floating_point() else x
