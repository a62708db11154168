"""`fastattn tune --launches`: search the launch parameters of the Triton kernels.

The search starts at the table's launch and moves to the fastest neighbour, with one number halved
or doubled, until none is faster. It writes the result to a JSON file, for
``FASTATTN_TRITON_TABLE``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fastattn.backends.primitives import (
    AdditiveOptions,
    AttentionBackwardOptions,
    AttentionOptions,
    DecodeOptions,
    MemoryHopBackwardOptions,
    extended,
)

_FASTER = 0.98  # required ratio of times; a smaller gain is noise
_Call = Callable[[], Any]


def search(
    operators: Sequence[str], dtypes: Sequence[torch.dtype], widths: Sequence[int], out: Path
) -> None:
    """Measure launches and write them to ``out``; other entries of an existing file are kept."""
    import triton

    from fastattn.backends.triton import _launch, _table

    if unknown := sorted(set(operators) - set(_CALLS)):
        raise ValueError(f"--op {unknown[0]}: with --launches allowed are {', '.join(_CALLS)}")
    architecture = _launch.architecture_of(torch.device("cuda", torch.cuda.current_device()))
    table = json.loads(out.read_text()) if out.exists() else {}

    def measure(call: _Call) -> float:
        return float(triton.testing.do_bench(call, warmup=10, rep=50, return_mode="median"))

    for op in operators or sorted(_CALLS):
        for dtype in dtypes or (torch.bfloat16, torch.float32):
            for width in widths:
                for kernel, call in _CALLS[op](dtype, width):
                    bits = 8 * dtype.itemsize
                    start = _table.choose(architecture, kernel, bits, width)
                    best = fastest(kernel, start, call, measure, print)
                    by_bits = table.setdefault(architecture, {}).setdefault(kernel, {})
                    rows = dict(by_bits.get(str(bits), ()))
                    rows[width] = list(best)
                    by_bits[str(bits)] = sorted(map(list, rows.items()))
                    out.write_text(json.dumps(table, indent=1) + "\n")
    print(f"written to {out}; to use it, set FASTATTN_TRITON_TABLE={out.resolve()}")


def fastest(
    kernel: str,
    start: Any,
    call: _Call,
    measure: Callable[[_Call], float],
    report: Callable[[str], None],
) -> Any:
    """Return the launch at which the descent from ``start`` ends; report every trial."""
    from fastattn.backends.triton._table import trying

    times: dict[Any, float] = {}

    def time_of(launch: Any) -> float:
        """The measured seconds of a launch, inf if it does not run; each is measured once."""
        if launch not in times:
            try:
                with trying(kernel, launch):
                    times[launch] = measure(call)
                outcome = f"{1000 * times[launch]:.1f} us"
            except Exception as error:  # needs too many resources, or does not compile
                times[launch] = float("inf")
                outcome = f"does not run: {type(error).__name__}"
            report(f"{kernel} {tuple(launch)}: {outcome}")
        return times[launch]

    best = start
    time_of(best)
    while True:
        nearest = min(_neighbours(best), key=time_of)
        if not time_of(nearest) < _FASTER * time_of(best):
            return best
        best = nearest


def _neighbours(launch: Any) -> Iterator[Any]:
    """The launches with one parameter halved, doubled, or changed by one step."""
    for rows in (launch.BM // 2, launch.BM * 2):
        if 16 <= rows <= 128:
            yield launch._replace(BM=rows)
    for keys in (launch.BN // 2, launch.BN * 2):
        if 16 <= keys <= 128:
            yield launch._replace(BN=keys)
    yield launch._replace(warps=4 if launch.warps == 8 else 8)
    for stages in (launch.stages - 1, launch.stages + 1):
        if 1 <= stages <= 4:
            yield launch._replace(stages=stages)


# The measured calls: for each operator its kernels, and a call that uses each of them.


def _attention(dtype: torch.dtype, width: int) -> Iterator[tuple[str, _Call]]:
    """2 causal sequences of 4096, 16 heads."""
    from fastattn.backends import triton as backend

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device="cuda")

    query, key, value, grad = (normal(2, 16, 4096, width) for _ in range(4))
    bias = normal(1, 16, 4096, 4096)
    causal = AttentionOptions(scale=width**-0.5, window_right=0)

    def backward_of(mask: torch.Tensor | None) -> _Call:
        """A call of the backward pass, with or without a mask."""
        args = (query, key, value, mask, None, None)
        out, lse, _ = backend.scaled_dot_product_attention(*args, options=causal)
        options = extended(AttentionBackwardOptions, causal, needs_mask_grad=mask is not None)
        return lambda: backend.scaled_dot_product_attention_backward(
            grad, None, None, *args, out, lse, options=options
        )

    attend = functools.partial(
        backend.scaled_dot_product_attention, query, key, value, options=causal
    )
    yield "forward", attend
    yield "forward_masked", functools.partial(attend, bias)
    without_mask, with_mask = backward_of(None), backward_of(bias)
    yield "statistics", without_mask
    yield "backward_query", without_mask
    yield "backward_key_value", without_mask
    yield "backward_query_masked", with_mask
    yield "backward_key_value_masked", with_mask
    yield "backward_mask", with_mask


def _decode(dtype: torch.dtype, width: int) -> Iterator[tuple[str, _Call]]:
    """Steps of 64 sequences of 4096 keys, 32 heads and 8 key heads, with 1 and with 16 queries."""
    from fastattn.backends import triton as backend

    keys, values = (torch.randn(64, 8, 4096, width, dtype=dtype, device="cuda") for _ in range(2))
    lengths = torch.full((64,), 4096, device="cuda")
    options = DecodeOptions(scale=width**-0.5, window_right=0)
    for kernel, queries in (("decode", 1), ("decode_rows", 16)):
        query = torch.randn(64, 32, queries, width, dtype=dtype, device="cuda")
        args = (query, keys, values, lengths)
        yield kernel, functools.partial(backend.decode_attention, *args, options=options)


def _hops(dtype: torch.dtype, width: int) -> Iterator[tuple[str, _Call]]:
    """3 hops of 256 queries on memories of 500 rows."""
    from fastattn.backends import triton as backend

    if width > 256:
        return
    query = torch.randn(256, width, dtype=dtype, device="cuda")
    memory = torch.randn(256, 4, 500, width, dtype=dtype, device="cuda") / width**0.5
    args = (query, memory, None, None, None, None)
    options = MemoryHopBackwardOptions(hops=3, needed=2)
    _, trace, stats, _ = backend.memory_hop_attention(*args, options=options)
    yield "hops", lambda: backend.memory_hop_attention(*args, options=options)
    yield (
        "hops_backward",
        lambda: backend.memory_hop_attention_backward(
            query, None, *args, trace, stats, options=options
        ),
    )


def _additive(dtype: torch.dtype, width: int) -> Iterator[tuple[str, _Call]]:
    """16 sequences of 512."""
    from fastattn.backends import triton as backend

    x = torch.randn(16, 512, width, dtype=dtype, device="cuda")
    v = torch.randn(width, dtype=dtype, device="cuda")
    args = (x, x, x, v, None, None, None)
    yield "additive", lambda: backend.additive_attention(*args, options=AdditiveOptions())


_CALLS: dict[str, Callable[[torch.dtype, int], Iterator[tuple[str, _Call]]]] = {
    "scaled_dot_product_attention": _attention,
    "decode_attention": _decode,
    "memory_hop_attention": _hops,
    "additive_attention": _additive,
}
