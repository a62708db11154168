"""`hopfield_retrieve` against the same steps in plain PyTorch, forward and backward.

    python benchmarks/bench_hopfield.py [--threads 2] [--seconds 3]

Three candidates take K steps and read: plain PyTorch, which never looks whether a query rests; a
loop in Python over our attention that stops each query for itself; and the fused steps. They run in
turn, so that they share whatever else the machine does; a ratio is the median over these rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import fastattn


@dataclass(frozen=True)
class Row:
    name: str
    batch: int
    heads: int
    queries: int
    rows: int
    width: int
    steps: int
    shared: bool = False


ROWS = (
    Row("a small memory a query", 32, 1, 1, 50, 32, 4),
    Row("pooling of 1000", 256, 1, 1, 1000, 64, 3),
    Row("digits", 1, 1, 100, 1797, 64, 5),
    Row("a layer: patterns for all", 64, 4, 8, 256, 32, 3, shared=True),
    Row("self-association", 1, 8, 512, 512, 64, 3),
)


def plain(state: Tensor, stored: Tensor, steps: int) -> Tensor:
    for _ in range(steps + 1):
        state = torch.softmax(state @ stored.mT, -1) @ stored
    return state


def looped(state: Tensor, stored: Tensor, steps: int) -> Tensor:
    moving = torch.ones(state.shape[:-1], dtype=torch.bool)
    for _ in range(steps):
        new = fastattn.scaled_dot_product_attention(state, stored, stored, scale=1.0)
        moves = (new - state).detach().square().sum(-1) > 0
        state = torch.where(moving[..., None], new, state)
        moving = moving & moves
        if not moving.any():
            break
    return fastattn.scaled_dot_product_attention(state, stored, stored, scale=1.0)


def fused(state: Tensor, stored: Tensor, steps: int) -> Tensor:
    return fastattn.hopfield_retrieve(  # type: ignore[no-any-return]
        state, stored, beta=1.0, update_steps_max=steps, update_steps_eps=0.0
    )


def timed(run: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


def measure(row: Row, backward: bool, seconds: float) -> str:
    memories = 1 if row.shared else row.batch
    state = torch.randn(row.batch, row.heads, row.queries, row.width).requires_grad_(backward)
    stored = (0.3 * torch.randn(memories, row.heads, row.rows, row.width)).requires_grad_(backward)
    grad = torch.randn(state.shape)

    def call(function: Callable[[Tensor, Tensor, int], Tensor]) -> Callable[[], object]:
        if not backward:
            return lambda: function(state, stored, row.steps)
        return lambda: torch.autograd.grad(
            function(state, stored, row.steps), (state, stored), grad
        )

    candidates = [call(function) for function in (plain, looped, fused)]
    for run in candidates:
        run()
    repeats = max(1, int(0.01 / timed(candidates[0], 1)))
    times: list[list[float]] = [[], [], []]
    end = time.perf_counter() + seconds
    while len(times[0]) < 3 or time.perf_counter() < end:
        for own, run in zip(times, candidates, strict=True):
            own.append(timed(run, repeats))
    medians = [statistics.median(own) * 1e3 for own in times]
    ratios = [
        statistics.median(a / b for a, b in zip(own, times[2], strict=True)) for own in times[:2]
    ]
    return (
        f"{row.name:<26} B={row.batch:<3} H={row.heads} L={row.queries:<3} N={row.rows:<4} "
        f"D={row.width} K={row.steps} {'fwd+bwd' if backward else 'fwd':<7} plain {medians[0]:.3f} "
        f"loop {medians[1]:8.3f} fused {medians[2]:8.3f} ms  {ratios[0]:5.2f}x plain, "
        f"{ratios[1]:5.2f}x the loop"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=3.0, help="for each line")
    parser.add_argument("--rows", type=int, nargs="*", default=range(len(ROWS)))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, float32, {options.threads} threads")
    for n in options.rows:
        for backward in (False, True):
            print(measure(ROWS[n], backward, options.seconds), flush=True)


if __name__ == "__main__":
    main()
