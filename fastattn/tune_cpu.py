"""`fastattn tune` on a CPU: find the fastest backend, instruction set and GEMM.

The candidates of a choice run in turn, round after round, and are compared by their medians, so a
change of the clock frequency affects all of them. The choice of the shipped evidence table stays
unless another candidate is faster by more than 3 %. The result is written as the user's own
entries, see ``fastattn.evidence``.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fastattn import dispatch, evidence
from fastattn.evidence import Gemm
from fastattn.nn import _linear

__all__ = ["attention", "clearly_fastest", "gemm", "measure", "run"]

_ATTENTION = "scaled_dot_product_attention"
_FASTER = 0.97  # required ratio of times; a smaller gain is noise
_LEAST_QUERIES = 16  # these measurements do not apply to single queries
_SHAPE = 1, 8, 512, 64  # B, H, L, D
_LARGE = 512, 768, 2304  # M, K, N
_FEW_ROWS = 16, 768, 768
_OURS_UP_TO = 2**24 - 1
_ROUNDS, _SECONDS = 7, 3.0  # the minimum rounds and seconds per choice
_DISTINGUISHING = ("avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16")

Candidates = dict[str, Callable[[], Any]]
Measure = Callable[[str, Candidates], dict[str, float]]
Entry = dict[str, Any]


def run(dtypes: Sequence[torch.dtype]) -> int:
    native = dispatch.load("cpu")
    if isinstance(native, str):
        print(f"fastattn tune: error: the CPU kernels are {native}", file=sys.stderr)
        return 2
    on = evidence.processor("cpu")
    print(f"{on.name or 'this processor'}, {torch.get_num_threads()} threads; under a minute")
    entries: list[Entry] = []
    for dtype in dtypes:
        entries += attention(dtype, measure)
        entries += gemm(dtype, measure)
    path = evidence.set_own(entries)
    print(
        f"written to {path}\n"
        "New Python processes on this processor will use it. To undo this: "
        "fastattn tune --reset"
    )
    return 0


def measure(what: str, candidates: Candidates) -> dict[str, float]:
    """Return the median seconds of each call, run in turn; progress goes to a terminal."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for call in candidates.values():
        call()
    end = time.perf_counter() + _SECONDS
    while (rounds := len(next(iter(times.values())))) < _ROUNDS or time.perf_counter() < end:
        if sys.stderr.isatty():
            print(f"\r{what}: round {rounds + 1}", end="", file=sys.stderr, flush=True)
        for name, call in candidates.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return {name: statistics.median(taken) for name, taken in times.items()}


def clearly_fastest(times: dict[str, float], usual: str) -> str:
    """Return the fastest candidate, or the usual one if the difference is within the noise."""
    best = min(times, key=lambda name: times[name])
    if usual in times and not times[best] < _FASTER * times[usual]:
        return usual
    return best


def attention(dtype: torch.dtype, measure: Measure) -> list[Entry]:
    """The entries of instruction set and backend. A time is the geometric mean of the time of the
    forward pass and the time of both passes."""
    native = importlib.import_module("fastattn._cpu")
    supported = native.build_info()["supported"]
    isas = [isa for isa in supported if isa != "baseline"] or supported
    usual = evidence.choose("isa", "cpu", dtype=dtype, own=False)
    usual_isa = usual.use if usual and usual.use in supported else supported[-1]
    order = evidence.choose("backends", "cpu", _ATTENTION, dtype, own=False)
    torch_is_usual = order is not None and order.use[0] == "torch"

    query, key, value, grad = (torch.randn(_SHAPE).to(dtype) for _ in range(4))
    plain = (None, 1 / math.sqrt(_SHAPE[3]), False)  # mask, scale, causal
    modules = {isa: dispatch.load("cpu") for isa in isas}
    by_torch: Any = dispatch.load("torch")
    if by_torch.serves_plainly(query, key, value, *plain):
        modules["torch"] = by_torch

    def candidate(name: str, backward: bool) -> Callable[[], Any]:
        module: Any = modules[name]

        def call() -> None:
            if name != "torch":
                native.set_isa(name)
            out, lse = module.plain_attention(query, key, value, *plain, backward)
            if backward:
                mask, scale, causal = plain
                module.plain_attention_backward(
                    grad, query, key, value, mask, out, lse, scale, causal
                )

        return call

    what = f"attention {_name(dtype)}"
    with _instruction_set_kept(native):
        forward = measure(f"{what}, forward", {n: candidate(n, False) for n in modules})
        both = measure(f"{what}, with backward", {n: candidate(n, True) for n in modules})
    times = {name: math.sqrt(forward[name] * both[name]) for name in modules}
    isa = clearly_fastest({name: times[name] for name in isas}, usual_isa)
    rivals = {"cpu": times[isa], **({"torch": times["torch"]} if "torch" in times else {})}
    first = clearly_fastest(rivals, "torch" if torch_is_usual else "cpu")
    for name, passes in (("forward", forward), ("with backward", both)):
        _print_times(f"{what}, {name}", passes)
    was = ("torch" if torch_is_usual and "torch" in times else "cpu", usual_isa)
    _print_choice(f"{first}, {isa}", f"{was[0]}, {was[1]}")
    use = ["torch", "cpu"] if first == "torch" else ["cpu"]
    least = {"least_queries": _LEAST_QUERIES} if first == "torch" else {}
    return [
        _entry("backends", dtype, use, _milliseconds(rivals), op=_ATTENTION, **least),
        _entry("isa", dtype, isa, _milliseconds({name: times[name] for name in isas})),
    ]


def gemm(dtype: torch.dtype, measure: Measure) -> list[Entry]:
    """The entry of the GEMM of the projections, none if there is nothing to choose."""
    onednn: Any = _linear._ONEDNN_LINEAR
    if onednn is None or dtype not in _linear._ONEDNN_DTYPES:
        return []
    found = evidence.choose("gemm", "cpu", dtype=dtype, own=False)
    usual = Gemm("torch", "torch") if found is None else Gemm(**found.use)
    m, k, n = _LARGE
    x, weight, grad = (torch.randn(shape).to(dtype) for shape in ((m, k), (n, k), (m, n)))

    def by_onednn(x: torch.Tensor, weight: torch.Tensor) -> Callable[[], Any]:
        return lambda: onednn(x, weight, None, "none", [], "")

    what = f"projection {_name(dtype)}"
    times = measure(what, {"torch": lambda: F.linear(x, weight), "onednn": by_onednn(x, weight)})
    forward = clearly_fastest(times, usual.forward)
    _print_times(what, times)
    grads = measure(
        f"{what}, gradient of the weight",
        {"torch": lambda: grad.t() @ x, "onednn": by_onednn(grad.t(), x.t())},
    )
    weight_grad = clearly_fastest(grads, usual.weight_grad)
    _print_times(f"{what}, gradient of the weight", grads)
    ours_up_to = usual.ours_up_to
    if dtype is torch.bfloat16 and forward == "onednn":
        m, k, n = _FEW_ROWS
        few, square = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
        native: Any = dispatch.load("cpu")
        rivals = measure(
            f"{what}, few rows",
            {"ours": lambda: native.linear(few, square, None), "onednn": by_onednn(few, square)},
        )
        _print_times(f"{what}, few rows", rivals)
        fastest = clearly_fastest(rivals, "ours" if ours_up_to else "onednn")
        ours_up_to = (ours_up_to or _OURS_UP_TO) if fastest == "ours" else 0
    chosen = Gemm(forward, weight_grad, ours_up_to, usual.small_up_to)
    _print_choice(_spelled(chosen), _spelled(usual))
    return [_entry("gemm", dtype, chosen._asdict(), _milliseconds(times))]


@contextlib.contextmanager
def _instruction_set_kept(native: Any) -> Iterator[None]:
    before = native.build_info()["isa"]
    try:
        yield
    finally:
        native.set_isa(before)


def _entry(choice: str, dtype: torch.dtype, use: Any, source: str, **more: Any) -> Entry:
    on = evidence.processor("cpu")
    return {
        "choice": choice,
        "device": "cpu",
        "vendor": [on.vendor],
        "name": [on.name],
        "has": [name for name in _DISTINGUISHING if name in on.features],
        "lacks": [name for name in _DISTINGUISHING if name not in on.features],
        "dtype": [_name(dtype)],
        **more,
        "use": use,
        "source": f"{source}; torch {torch.__version__}, {torch.get_num_threads()} threads",
        "date": datetime.date.today().isoformat(),
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _milliseconds(times: dict[str, float]) -> str:
    return ", ".join(f"{name} {1000 * taken:.3g} ms" for name, taken in times.items())


def _spelled(gemm: Gemm) -> str:
    ours = f", ours up to {gemm.ours_up_to} products" if gemm.ours_up_to else ""
    return f"{gemm.forward}, gradient of the weight by {gemm.weight_grad}{ours}"


def _print_times(what: str, times: dict[str, float]) -> None:
    print(f"{what}: {_milliseconds(times)}")


def _print_choice(chosen: str, usual: str) -> None:
    print(f"  -> {chosen}" + (" (as before)" if chosen == usual else f" (before: {usual})"))
