"""A whole training step of MemN2N beside the same network in plain PyTorch.

    python benchmarks/bench_memn2n.py [--rounds 30]             # interleaved, medians and ratios
    python -m pytest benchmarks/bench_memn2n.py                 # with pytest-benchmark

A step is the forward pass, the loss, the backward pass, the clipping and SGD.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastattn.nn import MemN2N
from fastattn.testing.memn2n import PlainMemN2N


class Shape(NamedTuple):
    batch: int
    sentences: int
    words: int
    vocabulary: int
    dim: int
    hops: int
    tying: str = "adjacent"


SHAPES = {
    "bAbI, one task": Shape(32, 10, 7, 23, 20, 3),
    "bAbI, joint": Shape(32, 50, 11, 175, 50, 3),
    "bAbI, joint, layerwise": Shape(32, 50, 11, 175, 50, 3, "layerwise"),
    "bAbI, joint, batch 320": Shape(320, 50, 11, 175, 50, 3),
    "large vocabulary": Shape(64, 100, 20, 10000, 128, 3),
}
NETWORKS = {"fastattn": MemN2N, "plain": PlainMemN2N}


def inputs(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Stories half full of sentences half full of words, and questions with their answers."""
    draw = torch.Generator().manual_seed(0)
    batch, sentences, words = shape[:3]
    stories = torch.randint(1, shape.vocabulary, shape[:3], generator=draw)
    lengths = torch.randint(words // 4, words + 1, (batch, sentences, 1), generator=draw)
    told = torch.randint(1, sentences + 1, (batch, 1, 1), generator=draw)
    stories *= torch.arange(words) < lengths
    stories *= torch.arange(sentences).unsqueeze(-1) < told
    questions = torch.randint(0, shape.vocabulary, (batch, words), generator=draw)
    return stories, questions, torch.randint(1, shape.vocabulary, (batch,), generator=draw)


def training_step(shape: Shape, kind: str) -> tuple[MemN2N, Callable[[], None]]:
    """A network, always with the same parameters, and what trains it for one step."""
    torch.manual_seed(0)
    network = NETWORKS[kind](
        shape.vocabulary,
        shape.dim,
        hops=shape.hops,
        memory_size=shape.sentences,
        weight_tying=shape.tying,
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=0.001)
    stories, questions, answers = inputs(shape)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(network(stories, questions), answers, reduction="sum").backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 40.0)
        optimizer.step()

    return network, step


def check(shape: Shape) -> None:
    """Both networks are the same after a step."""
    (ours, step), (plain, plain_step) = (training_step(shape, kind) for kind in NETWORKS)
    step()
    plain_step()
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("name", SHAPES)
def bench_memn2n(benchmark: Any, name: str, kind: str) -> None:
    check(SHAPES[name])
    benchmark.group = name
    benchmark(training_step(SHAPES[name], kind)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    print(f"{torch.get_num_threads()} threads, median of {rounds} rounds, ms")
    print(f"{'':<24}{'fastattn':>10}{'plain':>10}{'ratio':>8}")
    for name, shape in SHAPES.items():
        check(shape)
        steps = [training_step(shape, kind)[1] for kind in NETWORKS]
        times: list[list[float]] = [[], []]
        for _ in range(rounds + 2):
            for step, taken in zip(steps, times, strict=True):
                started = time.perf_counter()
                step()
                taken.append(1e3 * (time.perf_counter() - started))
        ours, plain = (statistics.median(taken[2:]) for taken in times)
        print(f"{name:<24}{ours:>10.2f}{plain:>10.2f}{plain / ours:>8.1f}")


if __name__ == "__main__":
    main()
