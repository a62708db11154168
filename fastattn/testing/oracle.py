"""What a case should give: in float64, and in plain PyTorch of the case's own precision.

All three functions return results by name: out, lse, weights if asked for, and grad_query,
grad_key, grad_value, grad_mask if any gradient is given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.backends import reference
from fastattn.testing.inputs import Inputs

__all__ = ["eager", "exact", "run"]

Results = dict[str, Tensor]


def run(backend: Any, inputs: Inputs) -> Results:
    """Return what a backend gives, forward and backward, NaN in unseen keys and values included."""
    return _run(backend, inputs.forward_args(), inputs.cotangents(), inputs)


def exact(inputs: Inputs) -> Results:
    """Return the results in float64.

    For 16 and 32 bits they are those of the reference in float64. A float64 candidate needs a
    more exact judge: ``testing.naive``, which needs NumPy.
    """
    args = inputs.forward_args(clean=True)
    if inputs.query.dtype == torch.float64:
        from fastattn.testing import naive

        return _run(naive, args, inputs.cotangents(clean=True), inputs)
    given = tuple(_double(grad) for grad in inputs.cotangents(clean=True))
    return _run(reference, tuple(_double(arg) for arg in args), given, inputs)


def _run(
    backend: Any, args: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...], inputs: Inputs
) -> Results:
    forward = backend.scaled_dot_product_attention(*args, **inputs.options)
    if all(grad is None for grad in given):
        return _named(forward, None, inputs.options)
    grads = backend.scaled_dot_product_attention_backward(
        *given, *args, *forward[:2], **inputs.options, needs_mask_grad=inputs.needs_mask_grad
    )
    return _named(forward, grads, inputs.options)


def eager(inputs: Inputs) -> Results:
    """Return plain PyTorch's results in the precision of the query.

    16 bits: each operation in float32 and its result, or its gradient, rounded to the 16 bits.
    """
    dtype = inputs.query.dtype
    args = inputs.forward_args(clean=True)
    options = {name: value for name, value in inputs.options.items() if name != "weights"}
    query, key, value, mask = (None if arg is None else arg.detach() for arg in args[:4])
    leaves = [query, key, value, *([mask] if inputs.needs_mask_grad else [])]
    wide = torch.float32 if dtype.itemsize == 2 else dtype

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).to(wide)

    with torch.enable_grad():
        for leaf in leaves:
            assert leaf is not None
            leaf.requires_grad_()
        out, lse, w = reference.attend(
            query,  # type: ignore[arg-type]
            key,  # type: ignore[arg-type]
            value,  # type: ignore[arg-type]
            mask,
            *args[4:],
            **options,
            rounded=rounded,
        )
        weights = reference.requested_weights(w, inputs.options["weights"])
        forward = (out.to(dtype), lse, weights.to(dtype))
        pairs = zip(forward, inputs.cotangents(clean=True), strict=True)
        given = [(y, grad.to(y.dtype)) for y, grad in pairs if grad is not None]
        if not given:
            return _named(forward, None, inputs.options)
        outputs, grads = zip(*given, strict=True)
        found = torch.autograd.grad(outputs, leaves, grads, allow_unused=True)  # type: ignore[arg-type]
    leaf_grads = [
        torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)
    ]
    return _named(forward, tuple(leaf_grads), inputs.options)


def _named(
    forward: tuple[Tensor, ...], grads: tuple[Tensor | None, ...] | None, options: dict[str, Any]
) -> Results:
    results = dict(zip(("out", "lse", "weights"), forward, strict=True))
    if options["weights"] == 0:
        del results["weights"]
    # A primitive's lse is float64; what the user gets, and what is judged, is rounded to this.
    out = results["out"]
    results["lse"] = results["lse"].to(torch.promote_types(out.dtype, torch.float32))
    names = ("grad_query", "grad_key", "grad_value", "grad_mask")
    results.update((n, g) for n, g in zip(names, grads or (), strict=False) if g is not None)
    return {name: tensor.detach() for name, tensor in results.items()}


def _double(x: Tensor | None) -> Tensor | None:
    return x.double() if x is not None and x.is_floating_point() else x
