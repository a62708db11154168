"""`fastattn tune`: measure the fastest choices on this machine, and use them.

On a CPU: the backend, the instruction set and the GEMM of each dtype. On a GPU: the order of the
backends of each operator; fastattn's kernels take part only if the case table verifies them.
Candidates run in turn, so a change of the clock frequency affects all of them. The default choice
stays unless another one is faster by more than 3 %. The result is written as the user's rows of
``fastattn.evidence``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fastattn import dispatch, evidence, spelling
from fastattn.bench import machine, ops
from fastattn.bench.cells import DTYPES, make_inputs
from fastattn.bench.providers import run_passes
from fastattn.bench.selection import cells_in, parse_line
from fastattn.evidence import ATTENTION, Gemm, Row
from fastattn.testing import PROOFS, OnGpu, Target
from fastattn.verify import results_of

# Operator: the measured call, as ``fastattn bench run --shapes`` takes it.
MEASURED = {
    ATTENTION: "sdpa B=2,H=16,L=4096,D=128 mask=causal",
    "varlen_attention": "varlen B=16,H=16,L=512,D=128 mask=causal",
    "decode_attention": "decode B=32,H=32,Hkv=8,Lk=4096,D=128",
    "additive_attention": "additive B=16,Lq=256,A=256",
    "memory_hop_attention": "memory_hops B=256",
    "hopfield_retrieve": "hopfield B=16",
    "encode_memory": "encode_memory B=256",
    "merge_states": "merge_states B=16,H=16,L=2048,D=128",
    "sinusoidal_encoding": "sinusoidal B=32",
}
ON_CPU = "sdpa B=1,H=8,L=512,D=64"
_LEAST_QUERIES = 16  # the measurement on a CPU does not apply to single queries
# M, K, N of linear layers.
_LARGE, _SMALL, _FEW_ROWS = (1024, 768, 2304), (64, 768, 768), (4, 2048, 2048)
_OURS_UP_TO = 2**24 - 1
_LAYER_UP_TO = 2**26  # rows·E·F of a native layer on vectors, where MKL is fast
_FASTER = 0.97  # required ratio of times; a smaller gain is noise
_ROUNDS, _SECONDS = 7, 3.0  # the minimum rounds and seconds of a race
_DTYPES = ("bfloat16", "float16", "float32")

_Call = Callable[[], Any]
_On = Callable[[], contextlib.AbstractContextManager[Any]]  # selects a candidate within its block


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), help="the device (default: cuda if available)")
    add("--reset", action="store_true", help="delete the measurements, then exit")
    spelling.add_list(parser, "--op", f"cuda: only these operators: {', '.join(MEASURED)}")
    spelling.add_list(parser, "--dtype", f"only these dtypes: {', '.join(_DTYPES)}")


def run(args: argparse.Namespace) -> int:
    if args.reset:
        path = evidence.own_file()
        print(f"removed {path}" if path.exists() else f"nothing to remove in {path}")
        path.unlink(missing_ok=True)
        evidence.forget()
        return 0
    operators = spelling.operators(args.op, MEASURED)
    dtypes = [getattr(torch, name) for name in spelling.dtypes(args.dtype, _DTYPES) or _DTYPES]
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu" and operators:
        raise ValueError("--op is for --device cuda, but this is --device cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("PyTorch sees no GPU here")
    rows = on_cpu(dtypes) if device == "cpu" else on_gpu(operators or list(MEASURED), dtypes)
    written = {evidence.set_own(each) for each in rows}  # at once: a later one may end the process
    if not written:
        print("nothing was measured, so nothing is written")
        return 1
    print(f"written to {written.pop()}; new Python processes will use it. To undo this: "
          "fastattn tune --reset")  # fmt: skip
    return 0


# -- measuring -------------------------------------------------------------------------------------


def race(what: str, candidates: Mapping[str, _Call]) -> dict[str, float]:
    """Run the calls in turn; return the median seconds of each call that succeeds."""
    times: dict[str, list[float]] = {n: [] for n, call in candidates.items() if _runs(n, call)}
    end, rounds = time.perf_counter() + _SECONDS, 0
    while times and (rounds < _ROUNDS or time.perf_counter() < end):
        rounds += 1
        for name, samples in times.items():
            start = time.perf_counter()
            candidates[name]()
            samples.append(time.perf_counter() - start)
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    print(f"{what}: {_milliseconds(medians)}")
    return medians


def _runs(name: str, call: _Call) -> bool:
    try:
        call()
    except Exception as error:  # compilers and launchers raise their own exceptions
        print(f"{name} does not run: {type(error).__name__}: {error}".split("\n")[0])
        return False
    return True


def clearly_fastest(times: dict[str, float], usual: str) -> str:
    """Return the fastest candidate, or the default one if the difference is within the noise."""
    best = min(times, key=lambda name: times[name])
    return usual if usual in times and not times[best] < _FASTER * times[usual] else best


def seconds(
    what: str, line: str, dtype: torch.dtype, device: torch.device, on: Mapping[str, _On]
) -> dict[str, float]:
    """The time of each candidate that can run: the geometric mean of forward and of both passes."""
    kinds, means = spelling.dtypes([str(dtype)], DTYPES), dict.fromkeys(on, 1.0)
    cells = cells_in(parse_line(line), {"dtype": kinds}, preset="tune")  # with their usual passes
    for cell in (replace(cell, device=device.type) for cell in cells):
        inputs = ops.Inputs({name: x.to(device) for name, x in make_inputs(cell, 0).items()})
        call = run_passes(cell, ops.get(cell.op).ours(cell, inputs), inputs)
        calls = {name: functools.partial(_call, call, on[name], device.type) for name in means}
        times = race(f"{what}, {cell.passes}", calls)
        means = {name: means[name] * times[name] ** (1 / len(cells)) for name in times}
    return means


def _call(run: _Call, on: _On, device: str) -> None:
    with on():
        run()
        machine.synchronize(device)


def _milliseconds(times: dict[str, float]) -> str:
    return ", ".join(f"{name} {1000 * x:.3g} ms" for name, x in times.items())


def _row(choice: str, device: torch.device, dtype: torch.dtype, use: Any, usual: Any,
         times: dict[str, float], op: str = "", least_queries: int = 0) -> Row:  # fmt: skip
    spelled = ", ".join(map(str, use)) if isinstance(use, (list, tuple)) else use
    print(f"  -> {choice}: {spelled}" + " (as before)" * (use == usual))
    on, kind = evidence.processor(device.type, device.index or 0).key, str(dtype)[6:]
    source = f"{_milliseconds(times)}; torch {torch.__version__}, "
    source += f"{torch.get_num_threads()} threads, {time.strftime('%Y-%m-%d')}"
    return Row(choice, on, kind, use, source, op, least_queries)


# -- a GPU -----------------------------------------------------------------------------------------


def on_gpu(operators: Sequence[str], dtypes: Sequence[torch.dtype]) -> Iterator[list[Row]]:
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"{evidence.processor('cuda').name}; Triton compiles for some minutes")
    for op, dtype in itertools.product(operators, dtypes):
        if (row := order(op, dtype, device)) is not None:
            yield [row]


def order(op: str, dtype: torch.dtype, device: torch.device) -> Row | None:
    """The row of an operator's backends, fastest first; None if no backend is correct here."""
    what, names = f"{op} {str(dtype)[6:]}", ("torch", *dispatch.ON_GPU)
    right = [name for name in names if is_right(name, op, dtype, device)]
    on = {name: functools.partial(dispatch.use_backend, name) for name in right}
    times = seconds(what, MEASURED[op], dtype, device, on)
    if not times:
        print(f"{what}: no backend runs it here")
        return None
    usual = evidence.choose("backends", "cuda", op, dtype, index=device.index or 0).use
    first = clearly_fastest(times, usual[0])
    use = sorted(times, key=lambda name: (name != first, times[name]))
    return _row("backends", device, dtype, use, usual, times, op)


def is_right(name: str, op: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a backend is built and, except PyTorch's, passes the operator's case table."""
    module = dispatch.load(name)
    if isinstance(module, str) or not hasattr(module, op):
        return False
    if name == "torch":
        return True
    target, kind = OnGpu(name, device=device.type), str(dtype)[6:]
    work = [
        (one, case, kind, target)
        for one in ((op, "append_to_cache") if op == "decode_attention" else (op,))
        for case in PROOFS[one].cases
        if dtype in case.dtypes and not case.slow
    ]
    faults = [f"{r.op} {r.name}: {x}" for r in results_of(work, 1) for x in r.verdict.faults]
    for fault in faults:
        print(f"FAIL {fault}")
    print(f"{op} {kind}, {name}: {len(work)} cases, {len(faults)} faults")
    return not faults


# -- a CPU -----------------------------------------------------------------------------------------

_CPU = torch.device("cpu")


def on_cpu(dtypes: Sequence[torch.dtype]) -> list[list[Row]]:
    if isinstance(native := dispatch.load("cpu"), str):
        raise RuntimeError(f"the CPU kernels are {native}")
    name = evidence.processor("cpu").name or "this processor"
    print(f"{name}, {torch.get_num_threads()} threads; under a minute")
    return [[row for x in dtypes for row in (*attention(x), linear_layers(x))]]


def attention(dtype: torch.dtype) -> list[Row]:
    """The rows of instruction set and backend."""
    supported = importlib.import_module("fastattn._cpu").build_info()["supported"]
    isas = [isa for isa in supported if isa != "baseline"] or supported
    usual_isa = evidence.choose("isa", "cpu", dtype=dtype, own=False).use
    usual_isa = usual_isa if usual_isa in supported else supported[-1]
    usual = evidence.choose("backends", "cpu", ATTENTION, dtype, own=False).use

    @contextlib.contextmanager
    def on(isa: str) -> Iterator[None]:
        with dispatch.use_backend("cpu"), Target("cpu", isa).active():
            yield

    candidates: dict[str, _On] = {name: functools.partial(on, name) for name in isas}
    candidates["torch"] = functools.partial(dispatch.use_backend, "torch")
    times = seconds(f"attention {str(dtype)[6:]}", ON_CPU, dtype, _CPU, candidates)
    by_torch = {name: times.pop(name) for name in ("torch",) if name in times}
    isa = clearly_fastest(times, usual_isa)
    rivals = {"cpu": times[isa], **by_torch}
    first = clearly_fastest(rivals, usual[0])
    use, least = (["torch", "cpu"], _LEAST_QUERIES) if first == "torch" else (["cpu"], 0)
    return [
        _row("backends", _CPU, dtype, use, usual, rivals, ATTENTION, least),
        _row("isa", _CPU, dtype, isa, usual_isa, times),
    ]


def linear_layers(dtype: torch.dtype) -> Row:
    """The row of the GEMMs of linear layers."""
    backend: Any = dispatch.load("cpu")
    usual: Gemm = evidence.choose("gemm", "cpu", dtype=dtype, own=False).use
    times: dict[str, dict[str, float]] = {}

    def fastest(product: str, usual: str, m: int, k: int, n: int) -> str:
        x, weight, grad = (torch.randn(shape).to(dtype) for shape in ((m, k), (n, k), (m, n)))
        factors = {"dx": (grad, weight.t()), "dw": (grad.t(), x.t())}.get(product, (x, weight))
        calls = {
            name: functools.partial(gemm, *factors, None)
            for name, gemm in backend.gemms_of(dtype).items()
            if product in Gemm._fields or name != "onednn"
        }
        times[product] = race(f"linear {str(dtype)[6:]}, {product}", calls)
        return clearly_fastest(times[product], usual if usual in times[product] else "torch")

    few = fastest("few rows", "ours", *_FEW_ROWS) == "ours"
    use = usual._replace(
        y=fastest("y", usual.y, *_LARGE),
        dx=fastest("dx", usual.dx, *_LARGE),
        dw=fastest("dw", usual.dw, *_LARGE),
        few=(usual.few or 32) * few,
    )
    if usual.y == "tiles" != use.y:  # then native layers run on vectors, which pays for fewer rows
        use = use._replace(layer_up_to=_LAYER_UP_TO)
    if use.y != "ours":
        small = fastest("small", "ours" if usual.ours_up_to else "torch", *_SMALL) == "ours"
        use = use._replace(ours_up_to=(usual.ours_up_to or _OURS_UP_TO) * small)
    return _row("gemm", _CPU, dtype, use, usual, times["y"])
