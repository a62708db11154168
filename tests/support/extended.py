"""Exact results for candidates in float64, by ``naive`` in extended precision.

Importing it (conftest.py does) makes them what the proofs of ``fastattn.testing`` compare with.
Gradients still come from the definition, whose derivative ``test_reference.py`` compares with
differences of ``naive``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import naive
import torch

from fastattn.ops.encode_memory import prepare as prepared_sentences
from fastattn.ops.memory_hops import prepare as prepared_hops
from fastattn.testing.calls import Call, Operands, Results, double
from fastattn.testing.judge import EXTENDED


def _primitive(inputs: Operands) -> Results:
    """A primitive in extended precision."""
    return replace(inputs.cleaned(), grads={}).results(naive)


def _encoding(inputs: Call) -> Results:
    """Sentence encoding in extended precision."""
    _, (tokens, weight, factors, temporal, _) = prepared_sentences(
        **inputs.tensors, **inputs.options
    )
    out = naive.encode_memory(tokens[0], weight[0], factors, temporal[0])
    return {"out": out.squeeze(1) if inputs.weight.ndim == 2 else out}


def _hopfield(inputs: Call) -> Results:
    """Hopfield retrieval in extended precision."""
    call = inputs.cleaned(double)
    out = naive.hopfield_retrieve(*call.tensors.values(), inputs.options["update_steps_max"])
    return {"out": out}


def _luong(inputs: Call) -> Results:
    """Luong attention in extended precision."""
    clean, options = inputs.cleaned(double), inputs.options
    out, weights = naive.luong_attention(
        *(clean.tensors[name] for name in ("query", "key", "value")),
        positions=clean.tensors.get("positions", options.get("positions")),
        padding=options["key_padding_mask"],
        half=options["D"],
        bell=options["window"] == "local-p",
    )
    return {"out": out, "weights": weights} if options["need_weights"] else {"out": out}


def _memory_hops(inputs: Call) -> Results:
    """Memory hops in extended precision."""
    clean = inputs.cleaned()
    _, (query, m, c, *rest, options) = prepared_hops(**clean.tensors, **clean.options)
    if query.ndim == 2:
        query = query.unsqueeze(1)
    m, c, hop_proj = (
        x if x is None or x.ndim == n else x.unsqueeze(n - 3)
        for x, n in zip((m, c, rest[0]), (4, 4, 3), strict=True)
    )
    out, weights = naive.memory_hop_attention(query, m, c, hop_proj, *rest[1:], options=options)
    lead = clean.query.shape[:-1]
    found = {"out": out.view(*lead, -1), "weights": weights.reshape(*lead, *weights.shape[2:])}
    return found if options.weights else {"out": found["out"]}


FORWARD: dict[str, Callable[[Any], Results]] = {
    **dict.fromkeys(
        ("additive_attention", "merge_states", "scaled_dot_product_attention"), _primitive
    ),
    "encode_memory": _encoding,
    "hopfield_retrieve": _hopfield,
    "luong_attention": _luong,
    "memory_hop_attention": _memory_hops,
}


def exact(inputs: Any) -> Results:
    """The results in extended precision, and the gradients of the definition."""
    return inputs.definition() | FORWARD[inputs.operator](inputs)


EXTENDED.update({(op, torch.float64): exact for op in FORWARD})
EXTENDED["append_to_cache", torch.float64] = lambda inputs: inputs.definition(naive)
for op in ("decode_attention", "varlen_attention"):
    EXTENDED[op, torch.float64] = lambda inputs: inputs.by_sequence(exact)
# The definition shares the preparation of its arguments with the retrieval that is judged.
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    EXTENDED["hopfield_retrieve", dtype] = exact
