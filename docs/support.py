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
from fastattn.bench import ops
from fastattn.bench.inputs import make_inputs
from fastattn.bench.recording import Calls
from fastattn.bench.selection import preset_cells

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
    found = re.search(pattern, (CUDA / file).read_text())
    assert found is not None
    return [int(number) for number in found[1].split(",")]


def calls() -> dict[str, dict[str, Call]]:
    """By the name of an operator and of what is special about a call."""
    return {
        "scaled_dot_product_attention": dict(_dense()),
        "varlen_attention": dict(_packed()),
        "decode_attention": dict(_cached()),
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
    yield "dropout", call(lambda dtype: {"dropout_p": 0.1})
    yield "the weights returned", call(lambda dtype: {"need_weights": True})
    yield "lse returned", call(lambda dtype: {"return_lse": True})
    yield "grouped heads", call(lambda dtype: {"enable_gqa": True}, heads=2)
    yield "Dv ≠ D", call(lambda dtype: {}, out=48)
    for width in (20, 256, 512):
        yield f"D = {width}", call(lambda dtype: {}, width=width, out=width)


def _packed() -> Iterator[tuple[str, Call]]:
    starts = torch.tensor([0, 20, B * L], dtype=torch.int32)

    def call(more: Callable[[torch.dtype], dict[str, Any]]) -> Call:
        def attend(dtype: torch.dtype) -> Any:
            rows = (torch.ones(B * L, H, D, dtype=dtype, requires_grad=True) for _ in range(3))
            return fastattn.varlen_attention(*rows, starts, starts, **_for_all_rows(more(dtype)))

        return attend

    for name in _options(torch.float32):
        yield name, call(lambda dtype, name=name: _options(dtype)[name])
    yield "dropout", call(lambda dtype: {"dropout_p": 0.1})


def _for_all_rows(options: dict[str, Any]) -> dict[str, Any]:
    """A table of distances must reach over the longest sequence."""
    table = options.get("relative_bias")
    if isinstance(table, Tensor):
        options["relative_bias"] = table.detach().repeat(1, 3).requires_grad_()
        options["relative_bias"] = options["relative_bias"][:, : 4 * L - 1]
    return options


def _cached() -> Iterator[tuple[str, Call]]:
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


def _constant(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def reasons(call: Call, dtype: torch.dtype, backends: dict[str, Any]) -> dict[str, list[str]]:
    """What each backend has against the kernel calls of a public call."""
    found: list[Any] = []
    with (
        compat.through_the_dispatcher(),
        Calls(lambda *one: found.append(one)),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        call(dtype)
    against: dict[str, list[str]] = {name: [] for name in backends}
    for op, tensors, options in found:
        for name, backend in backends.items():
            if hasattr(backend, op):
                against[name] += dispatch.reasons_of(backend, op, tensors, options)
            else:
                against[name].append(f"has no {op}")
    return against


def _others() -> dict[str, Callable[[torch.dtype], Any]]:
    """One call of each other operator with kernels, at a size of the benchmark."""

    def call(op: str) -> Call:
        def run(dtype: torch.dtype) -> Any:
            name = next(name for name, d in DTYPES.items() if d is dtype)
            cell = next(c for c in preset_cells("all", [name], ["fwd"]) if c.op == op)
            forward, _ = ops.get(op).ours(cell, make_inputs(cell, 0))
            forward()

        return run

    names = "additive hopfield memory_hops encode_memory merge_states sinusoidal luong".split()
    return {ops.get(name).FUNCTION: call(name) for name in names}


def tables() -> str:
    """The tables in Markdown, with the reasons below each."""
    modules = backends()
    every = {f"`{op}`": of_op for op, of_op in calls().items()} | {"The other operators": _others()}
    return "\n\n".join(f"## {title}\n\n{_table(of_op, modules)}" for title, of_op in every.items())


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
