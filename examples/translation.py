"""Train a translator: a GRU encoder-decoder with attention, or a Transformer.

    python examples/translation.py                             # a made-up language, Bahdanau
    python examples/translation.py --model transformer --twin  # beside plain PyTorch
    python examples/translation.py --data pairs.tsv --model luong --width 512

Models: "bahdanau" (Bahdanau et al. 2015, https://arxiv.org/abs/1409.0473), "luong" (Luong et al.
2015, https://arxiv.org/abs/1508.04025, global and general), both with a bidirectional GRU as
encoder, and "transformer" (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762; two layers of
each). Adam; gradients clipped at norm 1; the rate rises over the first steps and then falls as
1 / sqrt(step). A twentieth of the pairs is for validation, another for the test.

With --twin the same network in plain PyTorch is trained beside it, from the same parameters, on the
same batches, with the same random numbers, and the two loss curves are compared. (In float32,
rounding errors grow in training as they do from any other order of summation; with --double they
stay.) At the end the alignment of one test sentence is printed, and drawn (--picture, --page).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))

from common import Checkpoint, shown
from translation_data import BOS, EOS, PAD, Pair, Pairs, Vocabulary, invent, read
from translation_models import MODELS, make

import fastattn

CLIP = 1.0
WARM = 200  # steps in which the rate rises
EVALUATED = 256  # sentences at once


@dataclass(frozen=True)
class Recipe:
    model: str
    width: int
    epochs: int
    batch: int
    rate: float
    dropout: float
    seed: int
    twin: bool
    eager: bool
    double: bool
    data: str


@dataclass
class Progress:
    epoch: int = 0
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])  # of the network, of the twin
    losses: list[list[float]] = field(default_factory=lambda: [[], []])  # of every step


class Training:
    """One network, or a network and its twin; ``state`` and ``load`` at the end of any epoch."""

    def __init__(self, recipe: Recipe, sizes: tuple[int, int]) -> None:
        self.recipe, self.progress = recipe, Progress()
        torch.manual_seed(recipe.seed)
        shape = (recipe.model, sizes, recipe.width, recipe.dropout)
        kinds = [recipe.eager, not recipe.eager] if recipe.twin else [recipe.eager]
        dtype = torch.float64 if recipe.double else torch.float32
        self.networks = [make(*shape, plain=plain).to(dtype) for plain in kinds]
        for network in self.networks[1:]:
            network.load_state_dict(self.networks[0].state_dict())
        self.optimizers = [
            torch.optim.Adam(network.parameters(), recipe.rate, betas=(0.9, 0.98))
            for network in self.networks
        ]

    def run(self, training: Pairs, validation: Pairs, checkpoint: Checkpoint) -> None:
        """Train to the last epoch, and write a checkpoint after each."""
        progress = self.progress
        while progress.epoch < self.recipe.epochs:
            label = f"epoch {progress.epoch + 1}"
            order = torch.randperm(len(training), generator=self._drawn(progress.epoch))
            for index in shown(order.split(self.recipe.batch), label):
                self.step(*training.take(index))
            progress.epoch += 1
            loss, right = self.judge(validation)
            print(
                f"{label}: training loss {self._recent(len(training)):.4f}, validation loss "
                f"{loss:.4f}, words right {100 * right:.1f} %, {progress.seconds[0]:.0f} s",
                flush=True,
            )
            checkpoint.write("training", self.state())

    def step(self, source: Tensor, target: Tensor) -> None:
        """One step of each network, with the same random numbers."""
        progress, n = self.progress, len(self.progress.losses[0])
        rate = self.recipe.rate * min((n + 1) / WARM, math.sqrt(WARM / (n + 1)))
        for index, (network, optimizer) in enumerate(
            zip(self.networks, self.optimizers, strict=True)
        ):
            torch.manual_seed(self.recipe.seed + n)
            started = time.perf_counter()
            optimizer.param_groups[0]["lr"] = rate
            network.train()
            optimizer.zero_grad()
            loss = loss_of(network(source, target[:, :-1]), target[:, 1:])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP)
            optimizer.step()
            progress.losses[index].append(loss.item())
            progress.seconds[index] += time.perf_counter() - started

    @torch.no_grad()
    def judge(self, pairs: Pairs) -> tuple[float, float]:
        """Mean loss per word, and the share of words predicted right from the words before."""
        network = self.networks[0].eval()
        loss, right, words = 0.0, 0, 0
        for start in range(0, len(pairs), EVALUATED):
            source, target = pairs.take(slice(start, start + EVALUATED))
            logits, next_words = network(source, target[:, :-1]), target[:, 1:]
            valid = next_words != PAD
            words += int(valid.sum())
            loss += float(loss_of(logits, next_words)) * int(valid.sum())
            right += int(((logits.argmax(-1) == next_words) & valid).sum())
        return loss / words, right / words

    def difference(self) -> float:
        """The largest distance of the two loss curves."""
        return max(abs(a - b) for a, b in zip(*self.progress.losses, strict=True))

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {
            "networks": [network.state_dict() for network in self.networks],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": asdict(self.progress),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        for name, objects in (("networks", self.networks), ("optimizers", self.optimizers)):
            for target, saved in zip(objects, state[name], strict=True):
                target.load_state_dict(saved)
        self.progress = Progress(**state["progress"])

    def _drawn(self, epoch: int) -> torch.Generator:
        """The generator of an epoch's order, the same after a resume."""
        return torch.Generator().manual_seed(1000 * self.recipe.seed + epoch)

    def _recent(self, count: int) -> float:
        """The mean loss of the last ``count`` sentences."""
        steps = math.ceil(count / self.recipe.batch)
        return sum(self.progress.losses[0][-steps:]) / steps


def loss_of(logits: Tensor, next_words: Tensor) -> Tensor:
    """The mean loss per word, without padding."""
    return F.cross_entropy(logits.flatten(0, 1), next_words.flatten(), ignore_index=PAD)


def translate(network: Any, pairs: Pairs, vocabulary: Vocabulary) -> list[list[str]]:
    """Greedy translations of all sources, as words."""
    longest = 2 * pairs.source.shape[1] + 5
    translations = []
    for start in range(0, len(pairs), EVALUATED):
        source, _ = pairs.take(slice(start, start + EVALUATED))
        out = network.eval().generate(source, bos_idx=BOS, eos_idx=EOS, max_length=longest)
        translations += [vocabulary.text(row) for row in out.tolist()]
    return translations


@torch.no_grad()
def look(network: Any, source: Tensor, target: Tensor) -> dict[str, Tensor]:
    """The weights [N, H, T, S] with which each layer looks from the target at the source."""
    with fastattn.capture(network.eval()) as weights:
        network(source, target)
    if "attention" in weights:
        calls = weights["attention"]  # [N, T, S], or [N, S] for each word
        each = calls[0] if len(calls) == 1 and calls[0].ndim == 3 else torch.stack(calls, 1)
        return {"attention": each[:, None]}
    return {name: calls[0] for name, calls in weights.items() if "multihead_attn" in name}


def aligned(network: Any, pairs: Sequence[Pair], data: Pairs) -> dict[str, float]:
    """How often, in percent, a word's largest weight is on the word it comes from, by layer."""
    hits: dict[str, list[bool]] = {}
    for start in range(0, len(data), EVALUATED):
        source, target = data.take(slice(start, start + EVALUATED))
        for name, weights in look(network, source, target[:, :-1]).items():
            top = weights.mean(1).argmax(-1).tolist()  # [N, T]
            for pair, row in zip(pairs[start : start + EVALUATED], top, strict=True):
                places = zip(row, pair.alignment, strict=False)  # without the end token
                hits.setdefault(name, []).extend(a == b for a, b in places)
    return {name: 100 * sum(each) / len(each) for name, each in hits.items()}


def draw(
    network: Any, pair: Pair, words: Sequence[str], tokens: tuple[Tensor, Tensor], args: Any
) -> None:
    """The alignment of one sentence with its translation, as text and as pictures."""
    weights = {name: each[0] for name, each in look(network, *tokens).items()}  # [H, T, S]
    x, y = [*pair.source, "<eos>"], [*words, "<eos>"]
    name, last = list(weights.items())[-1]
    print(f"\n{' '.join(pair.source)}  ->  {' '.join(words)}")
    for word, row in zip(y, last.mean(0), strict=True):
        best = row.argmax().item()
        print(f"  {word:<14}<- {x[best]:<14}{row[best]:.2f}")
    if args.picture is not None:
        ax = fastattn.plot.heatmap(last.mean(0), x, y, title=f"{args.model}: {name}")
        ax.figure.savefig(args.picture, dpi=100)
    if args.page is not None:
        fastattn.plot.html(weights, x, y, path=args.page, title=" ".join(pair.source))


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a pair a line, tab between; without: made up")
    parser.add_argument("--model", choices=MODELS, default="bahdanau")
    parser.add_argument("--sentences", type=int, default=5000, help="without --data")
    parser.add_argument("--longest", type=int, default=30, help="words; longer pairs are left out")
    parser.add_argument("--least", type=int, default=1, help="how often a word occurs at least")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=0.003, help="the largest")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--twin", action="store_true", help="train in plain PyTorch beside it")
    parser.add_argument("--eager", action="store_true", help="train in plain PyTorch only")
    parser.add_argument("--double", action="store_true", help="in float64")
    parser.add_argument("--checkpoint", type=Path, help="written after every epoch, resumed from")
    parser.add_argument("--picture", type=Path, help="where the alignment is drawn, .png or .pdf")
    parser.add_argument("--page", type=Path, help="where a page of all layers and heads goes")
    parser.add_argument("--json", type=Path, help="where the results go too")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train, evaluate on the test sentences, and print one alignment."""
    args = arguments(argv)
    if args.data is None:
        every, name = invent(args.sentences, args.seed), f"{args.sentences} made-up sentences"
    else:
        every, name = read(args.data, args.longest), str(args.data)
        order = torch.randperm(len(every), generator=torch.Generator().manual_seed(args.seed))
        every = [every[n] for n in order.tolist()]
    held_out = max(1, len(every) // 20)
    test, validation, training = (
        every[:held_out],
        every[held_out : 2 * held_out],
        every[2 * held_out :],
    )
    if not training:
        raise ValueError(f"{name}: {len(every)} pairs are too few: at least 3 are needed")
    source = Vocabulary((pair.source for pair in training), args.least)
    target = Vocabulary((pair.target for pair in training), args.least)
    sets = [Pairs.of(pairs, source, target) for pairs in (training, validation, test)]
    options = {key: value for key, value in vars(args).items() if key in Recipe.__annotations__}
    recipe = Recipe(**options | {"data": name})
    print(f"{name}: {len(training)} to train with, {len(source)} and {len(target)} words")

    run = Training(recipe, (len(source), len(target)))
    checkpoint = Checkpoint(args.checkpoint, asdict(recipe))
    if "training" in checkpoint.states:
        run.load(checkpoint.states["training"])
    run.run(sets[0], sets[1], checkpoint)

    network, progress = run.networks[0], run.progress
    loss, right = run.judge(sets[2])
    translations = translate(network, sets[2], target)
    exact = (
        100 * sum(tuple(a) == b.target for a, b in zip(translations, test, strict=True)) / len(test)
    )
    report: dict[str, Any] = {
        "recipe": asdict(recipe), "test loss": loss, "words right": 100 * right, "exact": exact,
        "steps": len(progress.losses[0]), "seconds": progress.seconds, "losses": progress.losses,
    }  # fmt: skip
    print(
        f"\ntest: loss {loss:.4f}, words right {100 * right:.1f} %, sentences right {exact:.1f} %"
    )
    if all(pair.alignment for pair in test):
        report["aligned"] = aligned(network, test, sets[2])
        for layer, percent in report["aligned"].items():
            print(f"{layer}: the largest weight is on the word it comes from: {percent:.1f} %")
    if recipe.twin:
        report["difference"] = run.difference()
        print(
            f"loss curves of {len(progress.losses[0])} steps differ by at most "
            f"{run.difference():.1e}; {progress.seconds[0]:.0f} s, "
            f"the twin {progress.seconds[1]:.0f} s"
        )
    chosen = min(range(len(test)), key=lambda n: abs(len(test[n].source) - 9))
    words = translations[chosen]
    source_tokens, _ = sets[2].take(slice(chosen, chosen + 1))
    target_tokens = torch.tensor([[BOS, *target.numbers(words)]])
    draw(network, test[chosen], words, (source_tokens, target_tokens), args)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1))
    return report


if __name__ == "__main__":
    main()
