"""The operators beside attention on a GPU: a step of benchmarks/gpu.py.

Their case tables against the oracle, the same bits in every run, then speed: a backend's kernels
and the same call in plain PyTorch (the reference backend), one after the other in each round; the
sinusoids beside a copy, too.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import fastattn
from fastattn import dispatch
from fastattn.testing.additive import check_additive
from fastattn.testing.encode_memory import check_encoding
from fastattn.testing.hopfield import check_hopfield
from fastattn.testing.memory_hops import check_hops
from fastattn.testing.sinusoidal import check_sinusoidal

PROOFS = (check_sinusoidal, check_additive, check_hops, check_encoding, check_hopfield)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Through:
    """A target: CPU tensors in and out, a backend's kernels between; found by the library, too."""

    backend: str
    adapter: SimpleNamespace

    @contextlib.contextmanager
    def active(self) -> Iterator[Any]:
        real = dispatch.load

        def load(name: str) -> Any:
            return self.adapter if name == self.backend else real(name)

        order = {"cpu": (self.backend, "reference")}
        with mock.patch.object(dispatch, "load", load), mock.patch.dict(dispatch.PRIORITY, order):
            yield self.adapter


def through(backend: str, on_gpu: Callable[[Any], Any]) -> Through:
    module = dispatch.load(backend)

    def moved(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            results = function(*map(on_gpu, args), **options)
            if isinstance(results, Tensor):
                return results.cpu()
            return tuple(x.cpu() if isinstance(x, Tensor) else x for x in results)

        return call

    def why_not(op: str, *args: Any, **options: Any) -> list[str]:
        return module.why_not(op, *map(on_gpu, args), **options)

    names = [name for name in module.__all__ if name.islower() and name != "why_not"]
    functions = {name: moved(getattr(module, name)) for name in names}
    return Through(backend, SimpleNamespace(why_not=why_not, **functions))


def correctness(backend: str, on_gpu: Callable[[Any], Any]) -> dict[str, Any]:
    target, faults, ran = through(backend, on_gpu), [], 0
    for proof in PROOFS:
        for case in proof.cases:
            for dtype in DTYPES:
                verdict = proof(case, dtype, target)
                ran += not verdict.declined
                faults += [f"{proof.operator} {case.name} {dtype}: {f}" for f in verdict.faults]
    return {"cases": ran, "faults": faults[:100]}


def calls(dtype: torch.dtype) -> dict[str, tuple[Callable[..., Tensor], list[Tensor]]]:
    """Name -> a call of the library and the tensors that it is differentiated by."""

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        x = torch.randn(*shape, device="cuda") * scale
        return x.to(dtype).requires_grad_()

    found: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {}
    for layout in ("interleaved", "marian"):
        found[f"sinusoidal-{layout}"] = (
            lambda x, layout=layout: fastattn.sinusoidal_encoding(x, layout=layout, scale=32.0),
            [normal(32, 2048, 1024)],
        )
    for b, q, k, a in ((8, 256, 256, 256), (64, 30, 30, 512), (64, 1, 50, 512)):
        found[f"additive-{b}x{q}x{k}x{a}"] = (
            fastattn.additive_attention,
            [normal(b, q, a), normal(b, k, a), normal(b, k, a), normal(a)],
        )
    for b, n, d in ((32, 50, 20), (1024, 50, 20), (64, 320, 128), (4, 100_000, 64)):
        found[f"hops-{b}x{n}x{d}"] = (
            lambda u, m: fastattn.memory_hop_attention(u, m, hops=3),
            [normal(b, d), normal(b, 4, n, d, scale=0.1)],
        )
    for b, n, j, v, d in ((32, 50, 11, 200, 20), (1024, 50, 11, 20_000, 64)):
        tokens = torch.randint(1, v, (b, n, j), device="cuda")
        found[f"encode-{b}x{n}x{j}x{v}x{d}"] = (
            lambda weight, tokens=tokens: fastattn.encode_memory(tokens, weight),
            [normal(v, d)],
        )
    for b, h, q, n, d in ((8, 8, 32, 256, 64), (1, 1, 64, 10_000, 64)):
        found[f"hopfield-{b}x{h}x{q}x{n}x{d}"] = (
            lambda xi, stored: fastattn.hopfield_retrieve(xi, stored, beta=0.2, update_steps_max=3),
            [normal(b, h, q, d), normal(b, h, n, d)],
        )
    return found


def results_of(call: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def races(backend: str, repeats: int) -> dict[str, Any]:
    faults = []
    for dtype in DTYPES:
        for name, (call, leaves) in calls(dtype).items():
            with fastattn.use_backend(backend):
                first = results_of(call, leaves)
                for n in range(repeats):
                    found = results_of(call, leaves)
                    if not all(torch.equal(a, b) for a, b in zip(first, found, strict=True)):
                        faults.append(f"{name} {dtype}: run {n + 1} differs from the first")
                        break
    return {"repeats": repeats, "faults": faults}


def speed(
    backend: str, rounds: int, milliseconds: Callable[[Callable[[], Any]], float]
) -> list[dict[str, Any]]:
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for name, (call, leaves) in calls(dtype).items():
            times: dict[str, list[float]] = {}
            for round_ in range(rounds + 1):  # the first one warms up
                for which in (backend, "reference"):
                    with fastattn.use_backend(which):
                        with torch.no_grad():
                            forward = milliseconds(lambda c=call, x=leaves: c(*x))
                        both = milliseconds(lambda c=call, x=leaves: results_of(c, x))
                    if round_ > 0:
                        times.setdefault(f"{which}-forward", []).append(forward)
                        times.setdefault(f"{which}-both", []).append(both)
                if name.startswith("sinusoidal") and round_ > 0:
                    copy = milliseconds(lambda x=leaves: x[0].detach().clone())
                    times.setdefault("copy", []).append(copy)
            medians = {kind: statistics.median(of_kind) for kind, of_kind in times.items()}
            rows.append({"call": name, "dtype": str(dtype), "milliseconds": medians})
    return rows
