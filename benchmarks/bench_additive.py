"""`additive_attention` beside the same equation in plain PyTorch.

    python benchmarks/bench_additive.py [--threads N] [--rounds N] [--dtype float32]

prints one interleaved run: medians, the median of the ratios within rounds, and by how much each
peaked above its inputs. With pytest-benchmark, `bench_additive` times each provider by itself.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn.bench.memory import peak_extra_bytes
from fastattn.spelling import one_dtype
from fastattn.testing import assert_within_bound

# B, Tq, Tk, A, Dv: translation as in the paper's decoder (all steps at once, and one step), and the
# size that the documentation quotes.
SIZES = {"quoted": (8, 256, 256, 256, 256), "seq2seq": (64, 30, 30, 512, 512)}
STEPS = {"step": (64, 1, 50, 512, 512)}
RESULTS = ("out", "query", "key", "value", "v", "bias")


def plain(query: Tensor, key: Tensor, value: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """The equation as every tutorial writes it."""
    scores = torch.tanh(query[:, :, None] + key[:, None] + bias) @ v
    return torch.softmax(scores, -1) @ value


PROVIDERS: dict[str, Callable[..., Tensor]] = {
    "fastattn": fastattn.additive_attention,
    "torch": plain,
}


def operands(sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    b, q, k, a, d = sizes
    draw = torch.Generator().manual_seed(0)
    shapes = ((b, q, a), (b, k, a), (b, k, d), (a,), (a,), (b, q, d))
    *args, grad = (torch.randn(s, generator=draw, dtype=dtype) for s in shapes)
    args[3] /= a**0.5
    return [x.requires_grad_() for x in args], grad


def call(provider: str, args: list[Tensor], grad: Tensor | None) -> tuple[Tensor, ...]:
    if grad is None:
        with torch.no_grad():
            return (PROVIDERS[provider](*args),)
    out = PROVIDERS[provider](*args)
    return (out.detach(), *torch.autograd.grad(out, args, grad))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("backward", [False, True], ids=["fwd", "fwd+bwd"])
@pytest.mark.parametrize("name", [*SIZES, *STEPS])
def bench_additive(benchmark: Any, name: str, backward: bool, provider: str) -> None:
    args, grad = operands({**SIZES, **STEPS}[name], torch.float32)
    benchmark.group = f"{name} {'fwd+bwd' if backward else 'fwd'}"
    benchmark(call, provider, args, grad if backward else None)


def compare(name: str, sizes: tuple[int, ...], dtype: torch.dtype, rounds: int) -> None:
    """Print both providers' memory and time, after their answers were found right."""
    for provider in PROVIDERS:  # what a first call takes once is not this call's
        call(provider, *operands((2, 2, 2, 2, 2), dtype))
    args, grad = operands(sizes, dtype)
    peaks: dict[str, int | None] = {}
    found = {}
    for provider in PROVIDERS:
        found[provider], peaks[provider] = peak_extra_bytes(lambda p=provider: call(p, args, grad))
    if sizes[1] * sizes[2] * sizes[3] < 2**22:
        wide = [x.detach().double().requires_grad_() for x in args]
        exact = call("torch", wide, grad.double())
        for label, mine, theirs, want in zip(RESULTS, *found.values(), exact, strict=True):
            assert_within_bound(mine, theirs, want, label)
    for given, label in ((None, "fwd"), (grad, "fwd+bwd")):
        times: dict[str, list[float]] = {provider: [] for provider in PROVIDERS}
        for _ in range(rounds):
            for provider in random.sample(list(PROVIDERS), len(PROVIDERS)):
                start = time.perf_counter()
                call(provider, args, given)
                times[provider].append(1e3 * (time.perf_counter() - start))
        ours, theirs = times.values()
        ratio = statistics.median(t / o for o, t in zip(ours, theirs, strict=True))
        print(
            f"{name:8} {label:8} fastattn {statistics.median(ours):9.2f} ms   "
            f"torch {statistics.median(theirs):9.2f} ms   {ratio:6.1f} x"
        )
    mine, theirs = peaks["fastattn"], peaks["torch"]
    if mine is not None and theirs:
        print(
            f"{name:8} peak     fastattn {mine / 2**20:9.2f} MiB  "
            f"torch {theirs / 2**20:9.2f} MiB  {100 * mine / theirs:6.2f} %"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--dtype", default="float32", type=one_dtype(["float32", "bfloat16", "float64"])
    )
    parser.add_argument("--size", choices=[*SIZES, *STEPS], help="only this one")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name, sizes in {**SIZES, **STEPS}.items():
        if options.size in (None, name):
            compare(name, sizes, getattr(torch, options.dtype), options.rounds)


if __name__ == "__main__":
    main()
