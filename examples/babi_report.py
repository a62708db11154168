"""The errors of a training on the bAbI tasks, beside the paper's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from babi_data import TASKS, Questions
from torch import Tensor

from fastattn import plot

__all__ = ["Result", "by_task", "draw", "show", "supported"]


@dataclass
class Result:
    """The results of one network: errors in percent, for each restart and task."""

    name: str
    tasks: list[int]
    training: list[list[float]]  # [R][task]
    validation: list[list[float]]
    test: list[list[float]]
    best: int  # by the training error
    hits: list[list[float]]  # [task][hop]: how often a supporting sentence has the largest weight
    steps: int
    seconds: float


def by_task(wrong: Tensor, data: Questions, tasks: list[int]) -> list[list[float]]:
    """Errors in percent [R][task] from wrong [R, Q]."""
    columns = [100 * wrong[:, data.tasks == task].float().mean(1) for task in tasks]
    return torch.stack(columns, 1).tolist()


def supported(weights: Tensor, data: Questions, tasks: list[int]) -> list[list[float]]:
    """How often, in percent, a hop's largest weight [Q, K, N] is on a supporting sentence."""
    top = weights.argmax(-1)  # [Q, K]
    hit = data.support.gather(1, top).float()
    return [(100 * hit[data.tasks == task].mean(0)).tolist() for task in tasks]


def draw(data: Questions, n: int, weights: Tensor, words: list[str], path: Path) -> None:
    """Draw where the hops [K, N] of question n look, in story order."""

    def text(tokens: Tensor) -> str:
        return " ".join(words[token] for token in tokens.tolist() if token)

    filled = int(data.stories[n].any(-1).sum())
    sentences = [text(sentence) for sentence in data.stories[n, :filled]]
    empty = len(data.stories[n]) - filled
    rows = torch.cat((weights[:, :filled].flip(1), weights[:, filled:].sum(1, keepdim=True)), 1)
    support = [filled - 1 - int(place) for place in data.support[n].nonzero()]
    answer = words[int(data.answers[n])]
    figure = plot.hops(
        rows,
        [*reversed(sentences), f"({empty} empty memories)"],
        support=support,
        title=f"{text(data.asked[n])}? {answer}",
    )
    figure.savefig(path, dpi=100)


def show(results: list[Result], column: list[float] | None, source: str) -> None:
    """Print the table of errors, and one line for each restart."""
    hops = len(results[0].hits[0])
    print(f"\ntest error in percent; {source}")
    head = "".join(f"{f'hop {k + 1}':>8}" for k in range(hops))
    print(f"{'task':<32}{'here':>8}{'paper':>8}   supporting sentence has the largest weight")
    print(f"{'':<51}{head}")
    errors, published = [], []
    for result in results:
        for n, task in enumerate(result.tasks):
            error = result.test[result.best][n]
            errors.append(error)
            paper = ""
            if column is not None:
                published.append(column[task - 1])
                paper = f"{published[-1]:.1f}"
            hits = "".join(f"{hit:>7.0f}%" for hit in result.hits[n])
            print(f"{f'{task:>2} {TASKS[task]}':<32}{error:>8.1f}{paper:>8}   {hits}")
    for label, value in (("mean", mean_of), ("failed (above 5 %)", failed)):
        paper = f"{value(published):.1f}" if published else ""
        print(f"{label:<32}{value(errors):>8.1f}{paper:>8}")
    print("\nevery restart, mean error in percent: training / validation / test")
    for result in results:
        rows = zip(result.training, result.validation, result.test, strict=True)
        for n, row in enumerate(rows):
            chosen = "  <- lowest training error" if n == result.best else ""
            print(f"  {result.name} {n}: {' / '.join(f'{mean_of(e):.1f}' for e in row)}{chosen}")


def mean_of(errors: list[float]) -> float:
    """The mean error, in percent."""
    return sum(errors) / len(errors)


def failed(errors: list[float]) -> float:
    """How many tasks have an error above 5 percent."""
    return float(sum(error > 5 for error in errors))
