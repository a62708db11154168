"""Find entities of any type with a small model of GLiNER's shape, and measure it beside stock.

    python examples/zero_shot_entities.py                        # 512 and 2048 tokens
    python examples/zero_shot_entities.py --tokens 512 --layers 12 --width 768

GLiNER (Zaratiana et al. 2024, https://arxiv.org/abs/2311.08526) encodes the names of the types and
the text as one sequence, by DeBERTa v3. A span of words is of a type if the product of their two
vectors is large: the score of span (i, j) and type t is ``sigmoid(ffn([h_i, h_j]) . ffn(p_t))``.
Here all weights are random, so the entities mean nothing; time and memory are as for a trained
model. Stock DeBERTa stores four matrices of pairs a head and layer, ``fastattn.accelerate`` none.
The output for 512 tokens (docs/relative_bias.md has times and memory):

    words 255 to 257: place (0.93)
    words 59 to 59: organisation (0.92)
    words 11 to 13: place (0.91)
    512 tokens: scores deviate from stock's by 6.6e-07
    512 tokens, fastattn: ... s, ... MB
    512 tokens, stock: ... s, ... MB
"""

from __future__ import annotations

import argparse
import copy
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fastattn

TYPES = ("person", "place", "organisation", "date")
LONGEST = 4  # words of a span


class EntityModel(nn.Module):
    """An encoder, and the vectors of spans and types."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        import transformers

        config = transformers.DebertaV2Config(
            vocab_size=4096,
            hidden_size=width,
            intermediate_size=4 * width,
            num_attention_heads=width // 64,
            num_hidden_layers=layers,
            relative_attention=True,
            position_buckets=256,
            max_position_embeddings=512,
            position_biased_input=False,
            pos_att_type=["p2c", "c2p"],
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            type_vocab_size=0,
        )
        self.encoder = transformers.DebertaV2Model(config)
        self.of_spans = nn.Sequential(
            nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, width)
        )
        self.of_types = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, types: Tensor, words: Tensor) -> Tensor:
        """Scores [words, LONGEST, types]: of the spans from each word on, by their lengths."""
        states = self.encoder(input_ids=torch.cat([types, words])[None]).last_hidden_state[0]
        names, rows = states[: len(types)], states[len(types) :]
        ends = (torch.arange(len(words))[:, None] + torch.arange(LONGEST)).clamp(max=len(words) - 1)
        spans = torch.cat([rows[:, None].expand(-1, LONGEST, -1), rows[ends]], -1)
        return (self.of_spans(spans) @ self.of_types(names).mT).sigmoid()


def entities(scores: Tensor, count: int) -> list[tuple[int, int, str, float]]:
    """The spans with the highest scores that do not overlap: first and last word, type, score."""
    order = scores.flatten().argsort(descending=True).tolist()
    covered, spans = set[int](), list[tuple[int, int, str, float]]()
    for index in order:
        start, within_word = divmod(index, LONGEST * len(TYPES))
        length, kind = divmod(within_word, len(TYPES))
        span = range(start, start + length + 1)
        if span.stop <= len(scores) and covered.isdisjoint(span):
            covered.update(span)
            spans.append((start, span.stop - 1, TYPES[kind], float(scores[start, length, kind])))
        if len(spans) == count:
            break
    return spans


class Peak:
    """The growth of this process's memory within a block, in MB (Linux)."""

    def __enter__(self) -> Peak:
        self._before = self.largest = _resident()
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._look)
        self._watch.start()
        return self

    def _look(self) -> None:
        """Sample the memory every 2 ms."""
        while not self._ended.wait(0.002):
            self.largest = max(self.largest, _resident())

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self._watch.join()

    @property
    def grown(self) -> float:
        return (self.largest - self._before) / 2**20


def _resident() -> int:
    """The resident memory of this process in bytes; 0 if it cannot be read."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


def measure(model: EntityModel, types: Tensor, words: Tensor, rounds: int) -> tuple[float, float]:
    """The shortest time of a call in seconds, and the largest growth of memory in MB."""
    times, grown = [], []
    for _ in range(rounds):
        with Peak() as peak:
            start = time.perf_counter()
            model(types, words)
            times.append(time.perf_counter() - start)
        grown.append(peak.grown)
    return min(times), max(grown)


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> list[dict[str, float]]:
    """Measure both models at each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    stock = EntityModel(options.layers, options.width).eval()
    model = copy.deepcopy(stock)
    fastattn.accelerate(model)
    types, rows = torch.arange(10, 10 + len(TYPES)), []
    for tokens in options.tokens:
        words = torch.randint(100, 4096, (tokens - len(types),))
        scores = model(types, words)
        for first, last, kind, score in entities(scores, 3):
            print(f"words {first} to {last}: {kind} ({score:.2f})")
        row = {"tokens": tokens, "deviation": float((scores - stock(types, words)).abs().max())}
        print(f"{tokens} tokens: scores deviate from stock's by {row['deviation']:.1e}", flush=True)
        for name, network in (("fastattn", model), ("stock", stock)):
            seconds, grown = measure(network, types, words, options.rounds)
            row |= {f"{name} s": seconds, f"{name} MB": grown}
            print(f"{tokens} tokens, {name}: {seconds:.2f} s, {grown:.0f} MB", flush=True)
        rows.append(row)
    fastattn.restore(model)
    return rows


if __name__ == "__main__":
    main()
