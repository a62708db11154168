"""Exact results for candidates in float64: those of ``naive``, in extended precision.

Importing it (conftest.py does) makes them what the proofs of ``fastattn.testing`` compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import naive
import torch

from fastattn.ops.memory_hops import prepare
from fastattn.testing.calls import Call, Operands, Results, double
from fastattn.testing.encode_memory import factors_of
from fastattn.testing.judge import EXTENDED

__all__ = ["attention", "exact", "memory_hops"]


def exact(inputs: Operands) -> Results:
    """The exact results of attention in the dtype of the inputs."""
    return attention(inputs) if inputs.query.dtype == torch.float64 else inputs.definition()


def attention(inputs: Operands) -> Results:
    found: Results = inputs.cleaned().results(naive)
    return found


def _additive(inputs: Operands) -> Results:
    tensors = inputs.cleaned().tensors.values()
    return naive.additive_attention(*tensors, inputs.options, *inputs.grads.values())


def _encoding(inputs: Call) -> Results:
    tokens, *tables = inputs.tensors.values()
    grad = inputs.grad_out
    factors = factors_of(inputs.options["encoding"], tokens.shape[-1], grad.shape[-1])
    weight, temporal = (x.unsqueeze(0) if x.ndim == 2 else x for x in tables)
    grad = grad if grad.ndim == 4 else grad.unsqueeze(1)
    results = naive.encode_memory(tokens, weight, factors, temporal, grad)
    shapes = (inputs.grad_out.shape, *(x.shape for x in tables))
    return {name: x.view(s) for (name, x), s in zip(results.items(), shapes, strict=True)}


def _hopfield(inputs: Call) -> Results:
    call, options = inputs.cleaned(double), inputs.options
    return naive.hopfield_retrieve(
        *call.tensors.values(), options["update_steps_max"], options["grad"], call.grad_out
    )


def _luong(inputs: Call) -> Results:
    clean, options = inputs.cleaned(double), inputs.options
    return naive.luong_attention(
        *(clean.tensors[name] for name in ("query", "key", "value")),
        positions=clean.tensors.get("positions", options.get("positions")),
        padding=options["key_padding_mask"],
        half=options["D"],
        bell=options["window"] == "local-p",
        grad_out=inputs.grad_out,
        grad_weights=inputs.grad_weights,
    )


def memory_hops(inputs: Call) -> Results:
    clean = inputs.cleaned()
    _, (*tensors, options) = prepare(**clean.tensors, **clean.options)
    query, m, c, hop_proj, *rest = tensors
    grads = [clean.grads["out"], clean.grads.get("weights")]
    shapes = {f"grad_{name}": x.shape for name, x in clean.tensors.items() if x is not None}
    shapes |= {n: x.shape for n, x in zip(("out", "weights"), grads, strict=True) if x is not None}
    if query.ndim == 2:
        query, *grads = (None if x is None else x.unsqueeze(1) for x in (query, *grads))
    m, c = (x.unsqueeze(1) if x is not None and x.ndim == 3 else x for x in (m, c))
    if hop_proj is not None and hop_proj.ndim == 2:
        hop_proj = hop_proj.unsqueeze(0)
    results = naive.memory_hop_attention(query, m, c, hop_proj, *rest, options, *grads)
    return {name: x.reshape(shapes[name]) for name, x in results.items()}


_BY_OPERATOR: dict[str, Callable[[Any], Results]] = {
    "additive_attention": _additive,
    "append_to_cache": lambda inputs: inputs.define(naive),
    "decode_attention": lambda inputs: inputs.by_sequence(attention),
    "encode_memory": _encoding,
    "hopfield_retrieve": _hopfield,
    "luong_attention": _luong,
    "memory_hop_attention": memory_hops,
    "merge_states": attention,
    "scaled_dot_product_attention": attention,
    "varlen_attention": lambda inputs: inputs.by_sequence(attention),
}
EXTENDED.update({(op, torch.float64): function for op, function in _BY_OPERATOR.items()})
# Nothing of the retrieval that is judged is part of this definition.
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    EXTENDED["hopfield_retrieve", dtype] = _hopfield
