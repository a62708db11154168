"""What serves which call: the tables of support.md, asked from `why_not` of every backend.

`python docs/support.py` prints them.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

os.environ["TRITON_INTERPRET"] = "1"  # so that its backend judges tensors of the CPU

import torch
from docutils import nodes
from sphinx.util.docutils import SphinxDirective
from torch import Tensor

import fastattn
from fastattn import bias, compat, dispatch, masks
from fastattn.backends.primitives import AppendOptions
from fastattn.bench.ops._base import Intercepting
from fastattn.library import operators

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
BACKENDS = {"torch": "PyTorch's kernel", "cpu": "CPU", "cuda": "CUDA", "triton": "Triton"}
B, H, L, D = 2, 4, 32, 64

CUDA = Path(__file__).parents[1] / "csrc/cuda"

Call = Callable[[torch.dtype], Any]


def backends() -> dict[str, Any]:
    """Their modules. That for CUDA judges calls without its kernels, which are seldom built."""
    stand_in = Mock()
    info = {"device": "cpu", "widths": _constants("kernels/table.h", r"kWidths\[\] = \{(.*)\};")}
    stand_in.build_info.return_value = info
    (stand_in.max_hop_width,) = _constants("params.h", r"kMaxHopWidth = (\d+);")
    sys.modules["fastattn._cuda"] = stand_in
    found = {name: importlib.import_module(f"fastattn.backends.{name}") for name in BACKENDS}
    del sys.modules["fastattn._cuda"]
    return found


def _constants(file: str, pattern: str) -> list[int]:
    """The numbers of a constant in a CUDA source."""
    found = re.search(pattern, (CUDA / file).read_text())
    assert found is not None
    return [int(number) for number in found[1].split(",")]


def calls() -> dict[str, dict[str, Call]]:
    """By the name of an operator and of what is special about a call."""
    return {
        "scaled_dot_product_attention": dict(_dense()),
        "varlen_attention": dict(_packed()),
        "decode_attention": dict(_cached()),
        "additive_attention": dict(_additive()),
        "luong_attention": dict(_luong()),
        "memory_hop_attention": dict(_hops()),
        "hopfield_retrieve": dict(_hopfield()),
        "encode_memory": dict(_encoded()),
        "sinusoidal_encoding": dict(_positions()),
        "merge_states": {"no option": _merge},
    }


def _options(dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """The options that several operators have."""
    table = torch.ones(H, 2 * L - 1, dtype=dtype, requires_grad=True)
    return {
        "no option": {},
        "causal": {"is_causal": True},
        "a window": {"window": (8, 0)},
        "softcap": {"softcap": 30.0},
        "ALiBi": {"alibi_slopes": torch.ones(H)},
        "sinks": {"sinks": torch.ones(H, requires_grad=True)},
        "a relative bias": {"relative_bias": table},
        "a relative bias of T5": {"relative_bias": bias.T5(torch.ones(32, H, dtype=dtype))},
        "a mask of `fastattn.masks`": {"mask": masks.causal() & masks.chunked(8)},
    }


def _dense() -> Iterator[tuple[str, Call]]:
    """Calls of dense attention, by the option that each has."""

    def call(
        more: Callable[[torch.dtype], dict[str, Any]], heads: int = H, width: int = D, out: int = D
    ) -> Call:
        def attend(dtype: torch.dtype) -> Any:
            shapes = ((B, H, L, width), (B, heads, L, width), (B, heads, L, out))
            q, k, v = (torch.ones(s, dtype=dtype, requires_grad=True) for s in shapes)
            return fastattn.scaled_dot_product_attention(q, k, v, **more(dtype))

        return attend

    for name in _options(torch.float32):
        yield name, call(lambda dtype, name=name: _options(dtype)[name])
    yield "a boolean mask", call(lambda dtype: {"attn_mask": torch.ones(L, L).bool()})
    yield "an additive mask", call(lambda dtype: {"attn_mask": torch.zeros(L, L, dtype=dtype)})
    learned = torch.zeros(L, L, requires_grad=True)
    yield "a learned mask", call(lambda dtype: {"attn_mask": learned.to(dtype)})
    yield "terms of distance and content", call(_terms)
    image = bias.Decomposed2d(torch.ones(B, H, L, L // 4), torch.ones(B, H, L, 4))
    yield "a bias of an image", call(lambda dtype: {"relative_bias": image})
    yield "dropout", call(lambda dtype: {"dropout_p": 0.1})
    yield "the weights returned", call(lambda dtype: {"need_weights": True})
    yield "lse returned", call(lambda dtype: {"return_lse": True})
    yield "grouped heads", call(lambda dtype: {"enable_gqa": True}, heads=2)
    yield "Dv ≠ D", call(lambda dtype: {}, out=48)
    for width in (20, 256, 512):
        yield f"D = {width}", call(lambda dtype: {}, width=width, out=width)


def _packed() -> Iterator[tuple[str, Call]]:
    """Calls with packed sequences."""
    starts = torch.tensor([0, 20, B * L], dtype=torch.int32)

    def call(more: Callable[[torch.dtype], dict[str, Any]]) -> Call:
        def attend(dtype: torch.dtype) -> Any:
            rows = (torch.ones(B * L, H, D, dtype=dtype, requires_grad=True) for _ in range(3))
            return fastattn.varlen_attention(*rows, starts, starts, **_for_all_rows(more(dtype)))

        return attend

    for name in _options(torch.float32):
        yield name, call(lambda dtype, name=name: _options(dtype)[name])
    yield "terms of distance and content", call(_terms)
    yield "dropout", call(lambda dtype: {"dropout_p": 0.1})


def _terms(dtype: torch.dtype) -> dict[str, Any]:
    """A relative bias that depends on the content."""
    table = torch.ones(9, H, D, dtype=dtype, requires_grad=True)
    return {"relative_bias": bias.Disentangled(table, table)}


def _for_all_rows(options: dict[str, Any]) -> dict[str, Any]:
    """A table of distances must reach over the longest sequence."""
    table = options.get("relative_bias")
    if isinstance(table, Tensor):
        options["relative_bias"] = table.detach().repeat(1, 3).requires_grad_()
        options["relative_bias"] = options["relative_bias"][:, : 4 * L - 1]
    return options


def _cached() -> Iterator[tuple[str, Call]]:
    """Calls with a cache."""
    pages = torch.arange(B * 2, dtype=torch.int32).view(B, 2)

    def call(more: Callable[[torch.dtype], dict[str, Any]], paged: bool = False) -> Call:
        def attend(dtype: torch.dtype) -> Any:
            shape = (2 * B, H, L // 2, D) if paged else (B, H, L, D)
            query = torch.ones(B, H, 1, D, dtype=dtype)
            keys, values = torch.ones(shape, dtype=dtype), torch.ones(shape, dtype=dtype)
            paging = {"block_table": pages} if paged else {}
            options = {k: _constant(v) for k, v in more(dtype).items()}
            return fastattn.decode_attention(query, keys, values, L, **paging, **options)

        return attend

    for name in _options(torch.float32):
        yield name, call(lambda dtype, name=name: _options(dtype)[name])
    yield "a paged cache", call(lambda dtype: {}, paged=True)
    yield "padding before a sequence", call(lambda dtype: {"cache_leftpad": torch.ones(B).int()})
    yield "entries of a larger cache", call(lambda dtype: {"cache_batch_idx": torch.arange(B)})
    tree = masks.draft_tree(torch.ones(1, 1).bool())
    yield "a draft tree", call(lambda dtype: {"mask": tree})
    yield "new rows", _appending({}, None)
    turns = torch.ones(L, D // 2)
    rotation = {"rotary_cos": turns, "rotary_sin": turns}
    yield "new rows, rotary embedding", _appending(rotation, None)
    for name, quantised in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
        yield f"new rows, a cache in {name}", _appending({}, quantised)


def _appending(more: dict[str, Any], quantised: torch.dtype | None) -> Call:
    """A call that appends to a cache."""

    def attend(dtype: torch.dtype) -> Any:
        new = torch.ones(B, H, 1, D, dtype=dtype)
        keys, values = (torch.ones(B, H, L, D).to(quantised or dtype) for _ in range(2))
        options = dict(more)
        if quantised is not None:
            options |= {f"{name}_scales": torch.ones(B, H, L) for name in ("key", "value")}
        return fastattn.decode_attention(new, keys, values, L - 1, key=new, value=new, **options)

    return attend


def _constant(x: Any) -> Any:
    """A tensor without a gradient."""
    return x.detach() if isinstance(x, Tensor) else x


def _call(function: Any, shapes: dict[str, tuple[int, ...]], **options: Any) -> Call:
    """A call whose operands have these shapes and require a gradient."""

    def run(dtype: torch.dtype) -> Any:
        ones = {n: torch.ones(s, dtype=dtype, requires_grad=True) for n, s in shapes.items()}
        return function(**ones, **options)

    return run


def _additive() -> Iterator[tuple[str, Call]]:
    """Calls of additive attention."""
    rows, op = (B, L, D), fastattn.additive_attention
    shapes: dict[str, tuple[int, ...]] = {"query": rows, "key": rows, "value": rows, "v": (D,)}
    yield "no option", _call(op, shapes)
    yield "a bias", _call(op, shapes | {"bias": (D,)})
    yield "causal", _call(op, shapes, is_causal=True)
    yield "a boolean mask", _call(op, shapes, attn_mask=torch.ones(L, L).bool())
    yield "a learned mask", _call(op, shapes | {"attn_mask": (L, L)})
    yield "padding of keys", _call(op, shapes, key_padding_mask=torch.zeros(B, L).bool())
    yield "dropout", _call(op, shapes, dropout_p=0.1)
    yield "the weights returned", _call(op, shapes, need_weights=True)


def _luong() -> Iterator[tuple[str, Call]]:
    """Calls of Luong attention."""
    rows, op = (B, L, D), fastattn.luong_attention
    shapes: dict[str, tuple[int, ...]] = {"query": rows, "key": rows, "value": rows}
    yield "dot, global", _call(op, shapes)
    yield "general, global", _call(op, shapes | {"weight": (D, D)}, method="general")
    for window in ("local-m", "local-p"):
        yield f"dot, {window}", _call(op, shapes | {"positions": (B, L)}, window=window)
    yield (
        "concat, global",
        lambda dtype: op(
            *(torch.ones(rows, dtype=dtype, requires_grad=True) for _ in range(3)),
            method="concat",
            weight=(torch.ones(D, 2 * D, dtype=dtype), torch.ones(D, dtype=dtype)),
        ),
    )
    weights = {"window": "local-p", "need_weights": True}
    yield "local-p, the weights returned", _call(op, shapes | {"positions": (B, L)}, **weights)


def _hops() -> Iterator[tuple[str, Call]]:
    """Calls of memory hops."""
    memory, op = (B, L, D), fastattn.memory_hop_attention
    shapes: dict[str, tuple[int, ...]] = {"query": (B, D), "in_memory": memory}
    both = shapes | {"out_memory": memory}
    yield "three hops", _call(op, both, hops=3)
    yield "one memory for both", _call(op, shapes, hops=3)
    yield "a memory a hop", _call(op, shapes | {"in_memory": (B, 4, L, D)}, hops=3)
    yield "a memory for all queries", _call(op, both | {"query": (B, H, D)}, hops=3)
    yield "a projection", _call(op, both | {"hop_proj": (D, D)}, hops=3)
    yield "a mask", _call(op, both, hops=3, memory_mask=torch.ones(B, L).bool())
    yield "a learned bias", _call(op, both | {"memory_bias": (B, L)}, hops=3)
    yield "an activation", _call(op, both, hops=3, activation="relu")
    yield "without softmax", _call(op, both, hops=3, normalize="none")
    yield "the weights returned", _call(op, both, hops=3, need_weights=True)


def _hopfield() -> Iterator[tuple[str, Call]]:
    """Calls of Hopfield retrieval."""
    rows, op = (B, H, L, D), fastattn.hopfield_retrieve
    shapes: dict[str, tuple[int, ...]] = {"state": rows, "stored": rows}
    yield "one step", _call(op, shapes, update_steps_max=1)
    yield "three steps", _call(op, shapes, update_steps_max=3)
    yield "until all rest", _call(op, shapes)
    yield "heads that stop together", _call(op, shapes, stop="head")
    yield "a projection", _call(op, shapes | {"projection": rows}, update_steps_max=3)
    for grad in ("implicit", "one_step"):
        yield f"the gradient `{grad}`", _call(op, shapes, update_steps_max=3, grad=grad)
    mask = torch.ones(L, L).bool()
    yield "a boolean mask", _call(op, shapes, update_steps_max=3, attn_mask=mask)
    yield "a learned mask", _call(op, shapes | {"attn_mask": (L, L)}, update_steps_max=3)
    yield "dropout", _call(op, shapes, update_steps_max=3, dropout_p=0.1)
    yield "the weights returned", _call(op, shapes, update_steps_max=3, need_weights=True)


def _encoded() -> Iterator[tuple[str, Call]]:
    """Calls of sentence encoding."""
    shapes: dict[str, tuple[int, ...]] = {"weight": (L, D)}
    given = {"tokens": torch.ones(B, L, 8).long()}
    op = fastattn.encode_memory
    yield "positions", _call(op, shapes, **given)
    yield "a bag of words", _call(op, shapes, **given, encoding="bow")
    yield "a temporal encoding", _call(op, shapes | {"temporal": (L, D)}, **given)
    yield "a learned encoding", _call(op, shapes | {"encoding": (8, D)}, **given)
    yield "a table a hop", _call(op, {"weight": (3, L, D)}, **given)


def _positions() -> Iterator[tuple[str, Call]]:
    """Calls of the sinusoidal encoding."""
    shapes: dict[str, tuple[int, ...]] = {"x": (B, L, D)}
    op = fastattn.sinusoidal_encoding
    yield "no option", _call(op, shapes)
    yield "an offset a sequence", _call(op, shapes, offset=torch.arange(B))
    yield "positions", _call(op, shapes, positions=torch.arange(L))
    yield "padding", _call(op, shapes, positions=torch.arange(L), padding_idx=0)
    yield "a scale", _call(op, shapes, scale=8.0)


def _merge(dtype: torch.dtype) -> Any:
    """A call that merges two states."""
    rows = (B, H, L, D)
    outs = [torch.ones(rows, dtype=dtype, requires_grad=True) for _ in range(2)]
    wide = torch.promote_types(dtype, torch.float32)
    lses = [torch.ones(rows[:3], dtype=wide, requires_grad=True) for _ in range(2)]
    return fastattn.merge_states(outs[0], lses[0], outs[1], lses[1])


def reasons(call: Call, dtype: torch.dtype, backends: dict[str, Any]) -> dict[str, list[str]]:
    """What each backend has against the kernel calls of a public call."""
    found: list[Any] = []

    def note(function: Any, args: Any, kwargs: Any) -> Any:
        operator = operators.get(function)
        if operator is not None:
            found.append((operator.name, *operator.split(args)))
        elif function is torch.ops.fastattn.append_to_cache.default:
            *tensors, interleaved = args
            found.append(("append_to_cache", tensors, AppendOptions(interleaved)))
        return function(*args, **kwargs)

    with (
        compat.through_the_dispatcher(),
        Intercepting(note),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        call(dtype)
    against: dict[str, list[str]] = {name: [] for name in backends}
    for op, tensors, options in found:
        for name, backend in backends.items():
            if hasattr(backend, op):
                against[name] += dispatch.reasons_against(backend, op, tensors, options)
            else:
                against[name].append(f"has no {op}")
    return against


def tables() -> str:
    """The tables in Markdown, with the reasons below each."""
    modules = backends()
    return "\n\n".join(f"## `{op}`\n\n{_table(of_op, modules)}" for op, of_op in calls().items())


def _table(calls: dict[str, Call], modules: dict[str, Any]) -> str:
    """One row a call, one column for each backend that serves any."""
    found = {
        label: {name: reasons(call, dtype, modules) for name, dtype in DTYPES.items()}
        for label, call in calls.items()
    }
    columns = [b for b in BACKENDS if any(not f[b] for row in found.values() for f in row.values())]
    titles = [BACKENDS[backend] for backend in columns]
    lines = [f"| | {' | '.join(titles)} |", "| --- |" + " --- |" * len(columns)]
    for label, row in found.items():
        served = [[name for name in row if not row[name][backend]] for backend in columns]
        cells = ["all" if len(s) == len(DTYPES) else " ".join(s) or "–" for s in served]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    against = [
        f"- {BACKENDS[backend]}: {reason}"
        for backend in columns
        for row in found.values()
        for name in row
        for reason in row[name][backend]
        if reason.removeprefix("has no ") not in calls
    ]
    return "\n".join([*lines, "", *dict.fromkeys(against)])


class Support(SphinxDirective):
    """The directive `support`."""

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(tables(), allow_section_headings=True)


if __name__ == "__main__":
    print(tables())
