"""Where the time of a small call goes: the call, and ever smaller parts of it.

A part inside the real call is measured by wrapping the functions that bound it in a stopwatch, for
this sample only. :func:`budget` has the differences of the parts, which add up to the call. The
result file has the format of the other benchmarks, with a part in place of a provider.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from fastattn import dispatch, evidence, library
from fastattn._table import as_text
from fastattn.bench import ops
from fastattn.bench.cells import Cell, bytes_touched, make_inputs, output_names
from fastattn.bench.machine import describe_environment
from fastattn.bench.ops._base import Stopwatch
from fastattn.bench.providers import run_passes
from fastattn.bench.results import CellResult, Outcome, Result, Round
from fastattn.bench.runner import Oracle

SAMPLE_SECONDS = 0.002
_ALLOCATORS = (
    *((torch, name) for name in ("empty", "empty_like", "empty_strided", "zeros")),
    (Tensor, "new_empty"),
)
Calls = dict[str, Callable[[], Any]]


class Part(NamedTuple):
    """`inside` lists the functions that are timed within the pass; empty: the pass itself."""

    within: str  # call, forward, plain, floor or torch, see PARTS
    inside: Callable[[], Sequence[tuple[Any, str]]] = tuple
    emptied: bool = False
    one_thread: bool = False


def _natives() -> list[tuple[Any, str]]:
    """The functions of the core, and the backend's names for them."""
    module: Any = dispatch.load("cpu")
    skipped = ("_", "signature")
    functions = (item for item in vars(module._cpu).items() if callable(item[1]))
    core = {name: x for name, x in functions if not name.startswith(skipped)}
    same = [name for name, x in vars(module).items() if core.get(name) is x]
    return [(module._cpu, name) for name in core] + [(module, name) for name in same]


def _adapters() -> list[tuple[Any, str]]:
    """The functions of the backend, and of the core, which a plan may call directly."""
    module: Any = dispatch.load("cpu")
    names = [x.name for x in library.operators.values() if hasattr(module, x.name)]
    return list(dict.fromkeys([*((module, name) for name in names), *_natives()]))


# forward: recorded by autograd. plain: not recorded. arguments: for a batch of 0 they are read, and
# the core allocates its own results. floor: an `autograd.Function` of as many tensors that does
# nothing. torch: the same pass in PyTorch.
PARTS = {
    "call": Part("call"),
    "forward": Part("forward"),
    "plain": Part("plain"),
    "plain adapter": Part("plain", _adapters),
    "forward adapter": Part("forward", _adapters),
    "adapter": Part("call", _adapters),
    "allocation": Part("call", lambda: _ALLOCATORS),
    "native": Part("call", _natives),
    "arguments": Part("call", _natives, emptied=True),
    "one thread": Part("call", _natives, one_thread=True),
    "floor": Part("floor"),
    "torch": Part("torch"),
}
# The times shown beside the items of a budget.
BESIDE = ("call", "floor", "torch")

# The items of a budget, in the order of a call.
BUDGET = {
    "checks": "checks, and PyTorch's own operations",
    "Function.apply": "Function.apply",
    "engine": "the engine of autograd",
    "adapter": "adapter",
    "allocation": "allocation",
    "arguments": "reading the arguments, and results that the core allocates",
    "threads": "entering threads, less what they save",
    "kernel": "kernel",
}
COLUMNS = (*BUDGET, *BESIDE)


def budget(ms: Mapping[str, float]) -> dict[str, float]:
    """The items of BUDGET from the times of PARTS, in the same unit; their sum is the call."""
    checks = ms["plain"] - ms["plain adapter"]
    backward_adapter = ms["adapter"] - ms["forward adapter"]
    return {
        "checks": checks,
        "Function.apply": ms["forward"] - ms["forward adapter"] - checks,
        "engine": ms["call"] - ms["forward"] - backward_adapter,
        "adapter": ms["adapter"] - ms["allocation"] - ms["native"],
        "allocation": ms["allocation"],
        "arguments": ms["arguments"],
        "threads": ms["native"] - ms["one thread"],
        "kernel": ms["one thread"] - ms["arguments"],
    }


def microseconds(measured: CellResult) -> dict[str, float]:
    """The budget of a cell and the times beside it, as far as they were measured.

    Uses the least time of each part, because interruptions last longer than a small call.
    """
    names = measured.rounds[0].ms
    ms = {name: min(turn.ms[name] for turn in measured.rounds) for name in names}
    times = budget(ms) | {name: ms[name] for name in BESIDE if name in ms}
    return {name: 1e3 * time for name, time in times.items()}


def table(result: Result) -> str:
    """The budgets as a table, in microseconds."""
    rows = [[*COLUMNS, "us of"]]
    for measured in (cell for cell in result.cells if cell.rounds):
        times = microseconds(measured)
        rows.append([*(f"{times.get(name, math.nan):.1f}" for name in COLUMNS), measured.cell.name])
    return as_text(rows)


def measure(cells: Sequence[Cell], *, threads: int, rounds: int, seed: int = 0) -> Result:
    """Measure every part of every cell, in rounds of random order, in this process."""
    torch.set_num_threads(threads)
    settings = {"threads": threads, "rounds": rounds, "seed": seed, "baseline": "call"}
    environment = describe_environment() | {"threads": threads}
    result = Result(environment, settings, {name: {"status": "ok"} for name in PARTS})
    order = random.Random(seed)
    with dispatch.use_backend("cpu"):
        for cell in cells:
            measured = CellResult(cell, 0, bytes_touched(cell))  # parts have no count of operations
            result.cells.append(measured)
            calls = _calls(cell, seed)
            outputs = dict(zip(output_names(cell), ops.as_tuple(calls["call"]()), strict=True))
            measured.outcomes["call"] = Oracle(cell, seed).check(outputs)
            if measured.outcomes["call"].ok:
                _measure(measured, calls, rounds, order)
    return result


def _measure(measured: CellResult, calls: Calls, rounds: int, order: random.Random) -> None:
    cell = measured.cell
    # Parts that equal another part of this call.
    same = {"one thread": "native"} if torch.get_num_threads() == 1 else {}
    if cell.passes == "fwd":
        same |= {"forward": "call", "plain": "call"}
        same |= {"forward adapter": "adapter", "plain adapter": "adapter"}
    parts = {name: p for name, p in PARTS.items() if p.within in calls and name not in same}

    def seconds(name: str, count: int) -> float:
        part = parts[name]
        gradient = cell.passes != "fwd" and part.within != "plain"
        with torch.set_grad_enabled(gradient):
            return _seconds(part, calls[part.within], count)

    for name in parts:
        # The minimum, because the first calls of a part may be much slower than later calls.
        least = min(seconds(name, 1) for _ in range(5))
        count = max(1, min(10_000, math.ceil(SAMPLE_SECONDS / max(least, 1e-6))))
        measured.outcomes.setdefault(name, Outcome()).inner = count
    for _ in range(rounds):
        turn = Round((0.0, 0.0), {})
        for name in order.sample(list(parts), len(parts)):
            turn.ms[name] = seconds(name, measured.outcomes[name].inner or 1) * 1e3
        turn.ms |= {name: turn.ms[other] for name, other in same.items()}
        measured.rounds.append(turn)


def _calls(cell: Cell, seed: int) -> Calls:
    """The calls named by `Part.within`."""
    op, x, stock_inputs = ops.get(cell.op), make_inputs(cell, seed), make_inputs(cell, seed)
    forward = op.ours(cell, x)
    calls: Calls = dict.fromkeys(("call", "forward", "plain"), forward)
    calls["floor"] = tuple
    if cell.passes != "fwd":
        out, leaves = ops.as_tuple(forward())[0].detach(), [x[n] for n in op.leaf_names(cell)]
        calls["call"] = run_passes(cell, forward, x)
        calls["floor"] = lambda: torch.autograd.grad(
            _Nothing.apply(out, *leaves), leaves, x.grad_out
        )
    if not op.why_not_stock(cell):
        calls["torch"] = run_passes(cell, op.stock(cell, stock_inputs), stock_inputs)
    return calls


def _seconds(part: Part, call: Callable[[], Any], count: int) -> float:
    """The mean time of a part in `count` calls."""
    watch = Stopwatch()
    with contextlib.ExitStack() as stack:
        for owner, function in part.inside():
            timed = _timed(getattr(owner, function), watch, part.emptied)
            stack.enter_context(mock.patch.object(owner, function, timed))
        if part.one_thread:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
        if part.inside is not tuple:  # plans keep the functions that they call
            stack.callback(evidence.forget)
            evidence.forget()
        call()
        watch.seconds = 0.0
        start = time.perf_counter()
        for _ in range(count):
            call()
        total = time.perf_counter() - start
    # At least a nanosecond, even if no function of a part is called: rates divide by it.
    return max(1e-9, (total if part.inside is tuple else watch.seconds) / count)


def _timed(function: Callable[..., Any], watch: Stopwatch, emptied: bool) -> Callable[..., Any]:
    own = _own_seconds()

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if watch.is_running:  # within another function of the part
            return function(*args, **kwargs)
        timed_args, timed_kwargs = _emptied(args, kwargs) if emptied else (args, kwargs)
        watch.start()
        result = function(*timed_args, **timed_kwargs)
        watch.stop()
        watch.seconds -= own
        return function(*args, **kwargs) if emptied else result

    return timed


@functools.cache
def _own_seconds() -> float:
    """The overhead of a stopwatch."""
    watches = [Stopwatch() for _ in range(1000)]
    for watch in watches:
        watch.start()
        watch.stop()
    return min(watch.seconds for watch in watches)


def _emptied(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a native function with a batch of 0.

    A vector has no batch, unless it is an array of states, whose length no other tensor has.
    """
    values = (*args, *kwargs.values())
    tensors = [x for x in values if isinstance(x, Tensor)]
    sizes = {size for x in tensors if x.dim() > 1 for size in x.shape}
    batched = {id(x) for x in tensors if x.dim() > 1 or x.is_floating_point()}
    batched -= {id(x) for x in tensors if x.dim() == 1 and len(x) in sizes}
    empty = [x[:0] if id(x) in batched and x.dim() else x for x in values]
    return empty[: len(args)], dict(zip(kwargs, empty[len(args) :], strict=True))


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, *leaves: Tensor) -> Tensor:
        ctx.save_for_backward(*leaves)
        return torch.empty_like(out)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.saved_tensors
