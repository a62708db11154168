"""`fastattn tune` on a GPU: the order of its backends, PyTorch's own kernel among them.

Ours take part only where they are right: the first-use check (``fastattn/testing/selftest.py``)
comes first, whatever is recorded. Then the backends run in turn and are compared by their medians,
as on a CPU. The result is written as the user's own entries for this GPU, see
``fastattn.evidence``.
"""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastattn import dispatch, evidence, selftest
from fastattn.bench import ops
from fastattn.bench.cells import Cell
from fastattn.bench.inputs import TORCH_DTYPES, make_inputs
from fastattn.bench.shapes import parse_shapes
from fastattn.testing.selftest import faults
from fastattn.tune_cpu import clearly_fastest, measure

__all__ = ["MEASURED", "order", "run"]

_BACKENDS = ("torch", *selftest.CHECKED)
# Operator: its name in ``fastattn.bench``, the sizes that differ from the defaults there, its mask.
MEASURED = {
    "scaled_dot_product_attention": ("sdpa", "B=2,H=16,L=4096,D=128", "causal"),
    "varlen_attention": ("varlen", "B=16,H=16,L=512,D=128", "causal"),
    "decode_attention": ("decode", "B=32,H=32,Hkv=8,Lk=4096,D=128", "none"),
    "additive_attention": ("additive", "B=16,Lq=256,A=256", "none"),
    "memory_hop_attention": ("memory_hops", "B=256", "none"),
    "hopfield_retrieve": ("hopfield", "B=16", "none"),
    "encode_memory": ("encode_memory", "B=256", "none"),
    "merge_states": ("merge_states", "B=16,H=16,L=2048,D=128", "none"),
    "sinusoidal_encoding": ("sinusoidal", "B=32", "none"),
}
_Call = Callable[[], Any]
_Measure = Callable[[str, dict[str, _Call]], dict[str, float]]


def run(operators: Sequence[str], dtypes: Sequence[torch.dtype]) -> int:
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"{_gpu(device).name}; some minutes, of which Triton compiles the most")
    path = None
    for op, dtype in itertools.product(operators, dtypes):
        entry = order(op, dtype, measure, device)
        if entry is not None:  # written at once: a later operator may end the process
            path = evidence.set_own([entry])
    if path is None:
        print("nothing was measured, so nothing is written")
        return 1
    print(
        f"written to {path}\n"
        "New Python processes will use it on this GPU. To undo this: fastattn tune --reset"
    )
    return 0


def order(
    op: str, dtype: torch.dtype, measure: _Measure, device: torch.device
) -> dict[str, Any] | None:
    """The entry of an operator's backends, fastest first; None if none of them is right here.

    A time is the geometric mean of those of the forward pass and of both passes.
    """
    kind = str(dtype).removeprefix("torch.")
    what = f"{op} {kind}"
    right = [name for name in _BACKENDS if _is_right(name, op, dtype, device)]
    with selftest.switched_off():
        passes = _passes(op, dtype, device, right)
        names = [name for name in right if all(name in calls for calls in passes.values())]
        if not names:
            print(f"{what}: none of {', '.join(_BACKENDS)} runs it here")
            return None
        measured = {
            of_pass: measure(f"{what}, {of_pass}", {name: calls[name] for name in names})
            for of_pass, calls in passes.items()
        }
    for name, seconds in measured.items():
        print(f"{what}, {name}: {_milliseconds(seconds)}")
    means = {
        name: math.prod(seconds[name] for seconds in measured.values()) ** (1 / len(measured))
        for name in names
    }
    usual = evidence.choose("backends", "cuda", op, dtype, index=device.index or 0, own=False)
    before = usual.use if usual else selftest.CHECKED
    first = clearly_fastest(means, before[0])
    use = sorted(means, key=lambda name: (name != first, means[name]))
    print(f"  -> {', '.join(use)}" + " (as before)" * (first == before[0]))
    on = _gpu(device)
    return {
        "choice": "backends",
        "device": "cuda",
        "vendor": [on.vendor],
        "name": [on.name],
        "op": op,
        "dtype": [kind],
        "use": use,
        "source": f"{_milliseconds(means)}; torch {torch.__version__}",
        "date": datetime.date.today().isoformat(),
    }


def _gpu(device: torch.device) -> evidence.Processor:
    processor = selftest.gpu(device)
    assert processor is not None
    return processor


def _is_right(name: str, op: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a backend is built and, if it is ours, passes its check; keeps the verdict."""
    module = dispatch.load(name)
    if isinstance(module, str) or not hasattr(module, op):
        return False
    if name == "torch":
        return True
    try:
        with selftest.switched_off():
            found = faults(name, op, dtype, device)
    except selftest.Inconclusive as why:
        print(f"{name} is not measured, its check could not run: {why}")
        return False
    about = selftest.identity(name, op, dtype, _gpu(device), module)
    selftest.record(about, found)
    for fault in found:
        print(f"FAIL {name}: {fault}")
    return not found


def _passes(
    op: str, dtype: torch.dtype, device: torch.device, names: Sequence[str]
) -> dict[str, dict[str, _Call]]:
    """The calls to measure: {"forward": {backend: call}, "with backward": {backend: call}}."""
    stem, sizes, mask = MEASURED[op]
    kind = next(name for name, x in TORCH_DTYPES.items() if x == dtype)
    known = ops.get(stem)
    shape = parse_shapes(sizes, known.SIZES)[0]
    passes = {"forward": "fwd"}
    if "fwd+bwd" in known.PASSES:
        passes["with backward"] = "fwd+bwd"
    calls: dict[str, dict[str, _Call]] = {}
    for what, of_pass in passes.items():
        cell = Cell(stem, shape, dtype=kind, passes=of_pass, mask=mask, device=device.type)
        inputs = {name: x.to(device) for name, x in make_inputs(cell, 0).items()}
        forward, leaves = known.ours(cell, inputs)
        for leaf in leaves:
            leaf.requires_grad_(of_pass != "fwd")
        on_each = {
            name: _call(name, forward, leaves if of_pass != "fwd" else (), inputs, device)
            for name in names
        }
        calls[what] = {name: call for name, call in on_each.items() if _runs(name, call)}
    return calls


def _call(
    name: str,
    forward: _Call,
    leaves: Sequence[torch.Tensor],
    inputs: Any,
    device: torch.device,
) -> _Call:
    def call() -> None:
        with dispatch.use_backend(name):
            out = forward()[0]
            if leaves:
                torch.autograd.grad(out, leaves, inputs["grad_out"].to(out.dtype))
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return call


def _runs(name: str, call: _Call) -> bool:
    try:
        call()
    except Exception as error:  # compilers and launchers have exceptions of their own
        print(f"{name} does not run: {type(error).__name__}: {error}".split("\n")[0])
        return False
    return True


def _milliseconds(times: dict[str, float]) -> str:
    return ", ".join(f"{name} {1000 * taken:.3g} ms" for name, taken in times.items())
