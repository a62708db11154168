"""The Transformer beside ``torch.nn.Transformer``: a training step, a pass, and decoding.

    python benchmarks/bench_transformer.py [--rounds 9]         # interleaved, medians and ratios
    python -m pytest benchmarks/bench_transformer.py            # with pytest-benchmark

A training step is forward and backward, with causal targets and padded sources. Decoding makes the
targets one position at a time: with our cache; by ``torch.nn``, which has none, from the start.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import fastattn

warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")


class Shape(NamedTuple):
    batch: int
    length: int
    width: int
    heads: int
    layers: int


SHAPES = {"small": Shape(16, 32, 128, 4, 2), "base": Shape(8, 64, 512, 8, 6)}
KINDS = {"fastattn": fastattn.nn.Transformer, "torch": torch.nn.Transformer}


def cases(shape: Shape, kind: str) -> dict[str, Callable[[], Any]]:
    """What is timed, on the same parameters and inputs for both kinds."""
    torch.manual_seed(0)
    width, layers = shape.width, shape.layers
    model = KINDS[kind](width, shape.heads, layers, layers, 4 * width, 0.0, batch_first=True)
    source = torch.randn(shape.batch, shape.length, width)
    target = torch.randn(shape.batch, shape.length, width)
    lengths = torch.linspace(shape.length // 4, shape.length, shape.batch).long()
    hidden = torch.arange(shape.length) >= lengths[:, None]
    future = model.generate_square_subsequent_mask(shape.length)

    def forward() -> torch.Tensor:
        causal = {"tgt_is_causal": True, "tgt_mask": None if kind == "fastattn" else future}
        padding = {"src_key_padding_mask": hidden, "memory_key_padding_mask": hidden}
        return model(source, target, **causal, **padding)

    def training_step() -> None:
        model.train()
        forward().square().mean().backward()

    @torch.no_grad()
    def one_pass() -> None:
        model.eval()
        forward()

    @torch.no_grad()
    def decode() -> None:
        model.eval()
        memory = model.encoder(source, src_key_padding_mask=hidden)
        if kind == "fastattn":
            cache = model.decoder.new_cache()
            for step in target.split(1, 1):
                model.decode(step, memory, memory_key_padding_mask=hidden, cache=cache)
            return
        for end in range(1, shape.length + 1):
            causal = {"tgt_is_causal": True, "tgt_mask": future[:end, :end]}
            model.decoder(target[:, :end], memory, **causal, memory_key_padding_mask=hidden)

    return {"training step": training_step, "pass": one_pass, "decoding": decode}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["training step", "pass", "decoding"])
def bench_transformer(benchmark: Any, case: str, kind: str) -> None:
    benchmark.group = case
    benchmark(cases(SHAPES["small"], kind)[case])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{'shape':<10}{'case':<16}{'fastattn ms':>12}{'torch ms':>10}{'ratio':>7}")
    for name in args.shapes:
        both = {kind: cases(SHAPES[name], kind) for kind in KINDS}
        for case in both["torch"]:
            seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for n in range(args.rounds + 1):
                for kind, timed in both.items():
                    start = time.perf_counter()
                    timed[case]()
                    if n:  # the first warms up
                        seconds[kind].append(time.perf_counter() - start)
            ours, theirs = (1e3 * statistics.median(seconds[kind]) for kind in KINDS)
            ratio = statistics.median(
                t / f for f, t in zip(seconds["fastattn"], seconds["torch"], strict=True)
            )
            print(f"{name:<10}{case:<16}{ours:>12.1f}{theirs:>10.1f}{ratio:>7.2f}")


if __name__ == "__main__":
    main()
