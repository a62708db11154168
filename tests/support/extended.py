"""Exact results for candidates in float64: those of ``naive``, in extended precision.

Importing it (conftest.py does) makes them what the proofs of ``fastattn.testing`` compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import naive
import torch

from fastattn.ops.memory_hops import prepare
from fastattn.testing import decode, encode_memory, varlen
from fastattn.testing.calls import Call, Operands, Results
from fastattn.testing.inputs import Inputs
from fastattn.testing.verdict import EXTENDED

__all__ = ["attention", "exact", "memory_hops"]


def exact(inputs: Inputs) -> Results:
    """The exact results of attention in the dtype of the inputs."""
    return attention(inputs) if inputs.query.dtype == torch.float64 else inputs.definition()


def attention(inputs: Inputs) -> Results:
    return inputs.operands().cleaned().results(naive)


def _additive(inputs: Operands) -> Results:
    tensors = inputs.cleaned().tensors.values()
    return naive.additive_attention(*tensors, inputs.options, *inputs.grads.values())


def _encoding(inputs: Call) -> Results:
    tokens, *tables = inputs.tensors.values()
    weight, temporal = (x.unsqueeze(0) if x.ndim == 2 else x for x in tables)
    grad = inputs.grad if inputs.grad.ndim == 4 else inputs.grad.unsqueeze(1)
    factors = encode_memory.factors_of(inputs)
    results = naive.encode_memory(tokens, weight, factors, temporal, grad)
    shapes = (inputs.grad.shape, *(x.shape for x in tables))
    return {name: x.view(s) for (name, x), s in zip(results.items(), shapes, strict=True)}


def _hopfield(inputs: Call) -> Results:
    call, options = inputs.doubled(), inputs.options
    return naive.hopfield_retrieve(
        *call.tensors.values(), options["update_steps_max"], options["grad"], call.grad
    )


def _luong(inputs: Call) -> Results:
    clean, options = inputs.doubled().tensors, inputs.options
    return naive.luong_attention(
        *(clean[name] for name in ("query", "key", "value")),
        positions=clean.get("positions", options.get("positions")),
        padding=options["key_padding_mask"],
        half=options["D"],
        bell=options["window"] == "local-p",
        grad_out=inputs.grad,
        grad_weights=inputs.grad_weights,
    )


def memory_hops(inputs: Call) -> Results:
    _, (*tensors, options) = prepare(**inputs.tensors, **inputs.options)
    query, m, c, hop_proj, *rest = tensors
    given = [inputs.grad, inputs.grad_weights]
    if query.ndim == 2:
        query, *given = (None if x is None else x.unsqueeze(1) for x in (query, *given))
    m, c = (x.unsqueeze(1) if x is not None and x.ndim == 3 else x for x in (m, c))
    if hop_proj is not None and hop_proj.ndim == 2:
        hop_proj = hop_proj.unsqueeze(0)
    results = naive.memory_hop_attention(query, m, c, hop_proj, *rest, options, *given)
    shapes = {f"grad of {name}": x.shape for name, x in inputs.tensors.items() if x is not None}
    shapes |= {"out": inputs.grad.shape}
    if inputs.grad_weights is not None:
        shapes["weights"] = inputs.grad_weights.shape
    return {name: x.reshape(shapes[name]) for name, x in results.items()}


_BY_OPERATOR: dict[str, Callable[[Any], Results]] = {
    "additive_attention": _additive,
    "append_to_cache": lambda inputs: inputs.define(naive),
    "decode_attention": lambda inputs: decode.sequence_by_sequence(inputs, attention),
    "encode_memory": _encoding,
    "hopfield_retrieve": _hopfield,
    "luong_attention": _luong,
    "memory_hop_attention": memory_hops,
    "merge_states": lambda inputs: inputs.cleaned().results(naive),
    "scaled_dot_product_attention": attention,
    "varlen_attention": lambda inputs: varlen.sequence_by_sequence(inputs, attention),
}
EXTENDED.update({(op, torch.float64): function for op, function in _BY_OPERATOR.items()})
# Nothing of the retrieval that is judged is part of this definition.
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    EXTENDED["hopfield_retrieve", dtype] = _hopfield
