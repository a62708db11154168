"""Train an End-To-End Memory Network on the bAbI tasks, as its paper does, and compare.

    python examples/babi.py --data DIR                   # all tasks by one model (joint)
    python examples/babi.py --data DIR --recipe single   # a model for each task
    python examples/babi.py                              # no data: stories are made up

Sukhbaatar et al. 2015, https://arxiv.org/abs/1503.08895: 3 hops, position encoding (PE), linear
start (LS), random noise (RN). SGD with batches of 32, gradients clipped at norm 40 for each matrix;
the learning rate 0.01 is halved every 25 of 100 epochs (joint: every 15 of 60). Before that, with
0.005 and without softmax, the linear start: the paper has it end when the validation loss stops
falling, which it does in leaps, so here it lasts 20 epochs (joint: 40; --patience ends it sooner).
A tenth of the training questions is for validation. The network is trained from several starting
points, and the restart with the lowest training error is the result.

All restarts train at once: ``torch.func.vmap`` over their stacked parameters, so that each kernel
is called once for all of them. The linear start ends for all at once, by their mean loss.
The last lines of the output for made-up stories (docs/memn2n.md has the results on the data):

    joint softmax epoch 60: validation loss 0.0016, error 0.0 % (best restart 0.0 %), ... s

    test error in percent; made-up stories
    task                                here   paper   supporting sentence has the largest weight
                                                          hop 1   hop 2   hop 3
     1 single supporting fact            0.0               100%    100%    100%
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))

from babi_data import PAPER, TASKS, Questions, invent, read_tasks, vectorize
from babi_plain import PlainMemN2N
from babi_report import Result, by_task, draw, show, supported
from common import Checkpoint, shown

from fastattn.nn import MemN2N, insert_empty_memories
from fastattn.ops.encode_memory import ENCODINGS

MEMORY = 50  # sentences
BATCH = 32
CLIP = 40.0
EVALUATED = 128  # questions at once for each restart


@dataclass(frozen=True)
class Recipe:
    """How one network is trained; the defaults of a recipe are the paper's."""

    dim: int
    epochs: int
    halved_every: int
    linear_epochs: int  # of the linear start, at most
    patience: int = 20  # epochs without a new lowest validation loss that end it sooner
    hops: int = 3
    tying: str = "adjacent"
    encoding: str = "centered"
    noise: float = 0.1
    rate: float = 0.01
    linear_rate: float = 0.005
    restarts: int = 10
    seed: int = 0
    plain: bool = False  # in plain PyTorch, without the library's kernels


RECIPES = {
    "joint": Recipe(dim=50, epochs=60, halved_every=15, linear_epochs=40),
    "single": Recipe(dim=20, epochs=100, halved_every=25, linear_epochs=20),
}


class Restarts:
    """Networks of one shape: the stacked parameters of as many MemN2N modules."""

    def __init__(self, recipe: Recipe, vocabulary: int) -> None:
        module = PlainMemN2N if recipe.plain else MemN2N
        self.plain, self.count = recipe.plain, recipe.restarts
        self.model = module(
            vocabulary,
            recipe.dim,
            hops=recipe.hops,
            memory_size=MEMORY,
            weight_tying=recipe.tying,
            encoding=recipe.encoding,
        )
        draw = torch.Generator().manual_seed(recipe.seed)
        self.parameters = {
            name: 0.1 * torch.randn(recipe.restarts, *p.shape, generator=draw)
            for name, p in self.model.named_parameters()
        }

    def __call__(self, stories: Tensor, asked: Tensor, *, shared: bool = False) -> Tensor:
        """Logits [R, B, V] for stories [R, B, N, J], or for [B, N, J] that all restarts share."""

        def run(parameters: dict[str, Tensor], stories: Tensor, asked: Tensor) -> Tensor:
            return functional_call(self.model, parameters, (stories, asked))

        dim = None if shared else 0
        if self.plain:  # a plain loop over the networks
            logits = [
                run({name: p[r] for name, p in self.parameters.items()}, *inputs)
                for r, inputs in enumerate(
                    [(stories, asked)] * self.count if shared else zip(stories, asked, strict=True)
                )
            ]
            return torch.stack(logits)
        return vmap(run, in_dims=(0, dim, dim))(self.parameters, stories, asked)

    def step(self, stories: Tensor, asked: Tensor, answers: Tensor, rate: float) -> None:
        """One step of SGD, for each restart on a batch of its own; the loss is a sum."""
        for p in self.parameters.values():
            p.requires_grad_().grad = None
        logits = self(stories, asked)
        F.cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="sum").backward()
        with torch.no_grad():
            for p in self.parameters.values():
                norm = torch.linalg.vector_norm(p.grad, dim=(-2, -1), keepdim=True)
                p -= rate * p.grad * (CLIP / norm).clamp(max=1.0)
                p.requires_grad_(False)

    @torch.no_grad()
    def judge(self, data: Questions) -> tuple[Tensor, Tensor]:
        """Return the mean loss [R], and which answers are wrong [R, Q]."""
        loss, wrong = 0.0, []
        for start in range(0, len(data), EVALUATED):
            batch = data.take(slice(start, start + EVALUATED))
            logits = self(batch.stories, batch.asked, shared=True)
            answers = batch.answers.expand(logits.shape[0], -1)
            losses = F.cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="none")
            loss = loss + losses.view(answers.shape).sum(1)
            wrong.append(logits.argmax(-1) != answers)
        return loss / len(data), torch.cat(wrong, 1)

    @torch.no_grad()
    def attention(self, data: Questions, restart: int) -> Tensor:
        """Return the weights of one restart in each hop [Q, K, N]."""
        parameters = {name: p[restart] for name, p in self.parameters.items()}
        weights = []
        for start in range(0, len(data), EVALUATED):
            batch = data.take(slice(start, start + EVALUATED))
            options = {"need_weights": True}
            story = (batch.stories, batch.asked)
            weights.append(functional_call(self.model, parameters, story, options)[1])
        return torch.cat(weights)


@dataclass
class Progress:
    """The state of a training that a checkpoint holds besides the parameters."""

    phase: str = "linear"
    epoch: int = 0  # of the phase
    steps: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)  # on the validation questions, of the phase


class Training:
    """One training of all restarts; ``state`` and ``load`` at the end of any epoch."""

    def __init__(self, recipe: Recipe, training: Questions, validation: Questions, words: int):
        self.recipe, self.data, self.validation = recipe, training, validation
        self.networks = Restarts(recipe, words)
        self.draw = torch.Generator().manual_seed(recipe.seed + 1)
        self.progress = Progress(phase="linear" if recipe.linear_epochs else "softmax")

    def run(self, name: str, checkpoint: Checkpoint) -> None:
        """Train to the end, and write a checkpoint after each epoch."""
        while self.progress.phase != "done":
            started = time.perf_counter()
            progress = self.progress
            label = f"{name} {progress.phase} epoch {progress.epoch + 1}"
            self.networks.model.linear_start = progress.phase == "linear"
            self.epoch(label)
            loss, wrong = self.networks.judge(self.validation)
            progress.epoch += 1
            progress.losses.append(float(loss.mean()))
            progress.seconds += time.perf_counter() - started
            print(
                f"{label}: validation loss {progress.losses[-1]:.4f}, error "
                f"{100 * wrong.float().mean():.1f} % (best restart "
                f"{100 * wrong.float().mean(1).min():.1f} %), {progress.seconds:.0f} s",
                flush=True,
            )
            self.turn_page()
            checkpoint.write(name, self.state())
        self.networks.model.linear_start = False

    def turn_page(self) -> None:
        """End a phase after its last epoch, the linear start also by ``patience``."""
        progress, recipe = self.progress, self.recipe
        if progress.phase == "linear":
            lowest = progress.losses.index(min(progress.losses)) + 1  # the epoch, from 1
            if progress.epoch - lowest >= recipe.patience or progress.epoch >= recipe.linear_epochs:
                progress.phase, progress.epoch, progress.losses = "softmax", 0, []
        elif progress.epoch >= recipe.epochs:
            progress.phase = "done"

    def rate(self) -> float:
        """The learning rate of this epoch."""
        progress, recipe = self.progress, self.recipe
        if progress.phase == "linear":
            return recipe.linear_rate
        return recipe.rate * 0.5 ** (progress.epoch // recipe.halved_every)

    def epoch(self, label: str) -> None:
        """One pass over the questions, in another random order for each restart."""
        rate, count = self.rate(), len(self.data)
        order = torch.rand(self.recipe.restarts, count, generator=self.draw).argsort(1)
        for start in shown(range(0, count, BATCH), label):
            self.networks.step(*self.batch(order[:, start : start + BATCH]), rate)
            self.progress.steps += 1

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The questions [R, B] of an index, with random noise in their stories."""
        stories = self.data.stories[index]
        if self.recipe.noise > 0:
            stories = insert_empty_memories(
                stories.flatten(0, 1), self.recipe.noise, generator=self.draw
            ).unflatten(0, index.shape)
        return stories, self.data.asked[index], self.data.answers[index]

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {
            "parameters": self.networks.parameters,
            "draw": self.draw.get_state(),
            "progress": asdict(self.progress),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.networks.parameters = state["parameters"]
        self.draw.set_state(state["draw"])
        self.progress = Progress(**state["progress"])


def train(
    name: str,
    recipe: Recipe,
    known_and_test: tuple[Questions, Questions],
    words: int,
    checkpoint: Checkpoint,
) -> tuple[Result, Training]:
    """Train, or resume, and evaluate all restarts on all questions."""
    train_questions, test = known_and_test
    training, validation = split(train_questions)
    run = Training(recipe, training, validation, words)
    if name in checkpoint.states:
        run.load(checkpoint.states[name])
    run.run(name, checkpoint)
    tasks = sorted(set(train_questions.tasks.tolist()))
    errors = {
        name_of_set: by_task(run.networks.judge(data)[1], data, tasks)
        for name_of_set, data in (
            ("training", training),
            ("validation", validation),
            ("test", test),
        )
    }
    mean = [sum(row) for row in errors["training"]]
    best = mean.index(min(mean))
    hits = supported(run.networks.attention(test, best), test, tasks)
    progress = run.progress
    counts = {"steps": progress.steps, "seconds": progress.seconds}
    return Result(name, tasks, **errors, best=best, hits=hits, **counts), run


def split(data: Questions) -> tuple[Questions, Questions]:
    """Keep the last tenth of each task's questions for validation."""
    position = torch.zeros(len(data))
    for task in data.tasks.unique():
        of_task = data.tasks == task
        position[of_task] = torch.arange(int(of_task.sum())) / of_task.sum()
    return data.take(position < 0.9), data.take(position >= 0.9)


def seconds_a_step(run: Training, plain: bool, steps: int) -> float:
    """The median time of one training step, with the kernels or in plain PyTorch."""
    if len(run.data) < BATCH:
        return float("nan")
    networks = Restarts(
        Recipe(**{**asdict(run.recipe), "plain": plain}), run.networks.model.vocab_size
    )
    times = []
    for n in range(steps + 1):
        index = torch.randint(len(run.data), (run.recipe.restarts, BATCH))
        batch = run.batch(index)
        started = time.perf_counter()
        networks.step(*batch, 0.001)
        if n:
            times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]


def parse_tasks(text: str) -> list[int]:
    """``1-3,7`` -> [1, 2, 3, 7]."""
    tasks: set[int] = set()
    for span in text.split(","):
        numbers = re.fullmatch(r"(\d+)(?:-(\d+))?", span)
        if numbers is None:
            raise argparse.ArgumentTypeError(f"numbers such as 1-3,7 expected, got {text!r}")
        first, last = numbers.groups()
        tasks |= set(range(int(first), int(last or first) + 1))
    if not tasks or not tasks <= set(TASKS):
        raise argparse.ArgumentTypeError(f"tasks are 1 to 20, got {text!r}")
    return sorted(tasks)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of the tasks; without: made-up stories")
    parser.add_argument("--recipe", choices=RECIPES, default="joint")
    parser.add_argument("--tasks", type=parse_tasks, default=list(TASKS), help="such as 1-3,7")
    parser.add_argument("--questions", type=int, default=500, help="without --data")
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--tying", choices=("adjacent", "layerwise"), default="adjacent")
    parser.add_argument("--encoding", choices=ENCODINGS, default="centered")
    parser.add_argument("--hops", type=int, default=3)
    parser.add_argument("--dim", type=int, help="50, single: 20")
    parser.add_argument("--epochs", type=int, help="60, single: 100")
    parser.add_argument("--linear-epochs", type=int, help="at most; 0: no linear start")
    parser.add_argument("--patience", type=int, help="of the linear start, in epochs")
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--linear-rate", type=float, default=0.005)
    parser.add_argument("--noise", type=float, default=0.1, help="part of empty time steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="train in plain PyTorch")
    parser.add_argument(
        "--timed-steps", type=int, default=20, help="of each way; 0: do not compare"
    )
    parser.add_argument("--checkpoint", type=Path, help="written after every epoch, resumed from")
    parser.add_argument("--picture", type=Path, help="where the hops of a question are drawn")
    parser.add_argument("--json", type=Path, help="where the results go too")
    return parser.parse_args(argv)


def recipe_of(args: argparse.Namespace) -> Recipe:
    """The recipe by its name, with the options that differ."""
    base = asdict(RECIPES[args.recipe])
    changes = {name: value for name, value in vars(args).items() if name in base}
    base |= {name: value for name, value in changes.items() if value is not None}
    return Recipe(**base | {"plain": args.eager})


def column_of(args: argparse.Namespace, recipe: Recipe) -> tuple[list[float] | None, str]:
    """The paper's errors for this recipe, if it has them, and their source."""
    if args.data is None:
        return None, "made-up stories"
    if recipe.tying == "layerwise":
        if args.recipe == "joint":
            return PAPER["layerwise"], "paper: 1k joint, PE LS LW (without random noise)"
        return None, "the paper has no such column"
    return PAPER[args.recipe], f"paper: 1k {args.recipe}, PE LS RN, 3 hops"


def main(argv: list[str] | None = None) -> list[Result]:
    """Train one network, or one for each task; print the errors beside the paper's."""
    args = arguments(argv)
    recipe = recipe_of(args)
    tasks = args.tasks
    if args.data is None:
        tasks = [1]
        known, test = ({1: invent(args.questions, seed)} for seed in (args.seed, args.seed + 1))
    else:
        known, test = (read_tasks(args.data, part, tasks) for part in ("train", "test"))
    groups = {"joint": tasks} if args.recipe == "joint" else {f"task {t}": [t] for t in tasks}
    checkpoint = Checkpoint(args.checkpoint, {"recipe": asdict(recipe), "tasks": tasks})
    results = []
    for name, group in groups.items():
        pair = [[q for task in group for q in part[task]] for part in (known, test)]
        parts, words = vectorize(pair, MEMORY)
        result, run = train(name, recipe, tuple(parts), len(words), checkpoint)
        results.append(result)
    show(results, *column_of(args, recipe))
    if args.picture is not None:
        test = parts[1]  # of the last network
        wrong = run.networks.judge(test)[1][result.best]
        chosen = int(wrong.int().argmin())  # the first right answer, if there is one
        weights = run.networks.attention(test.take(slice(chosen, chosen + 1)), result.best)
        draw(test, chosen, weights[0], words, args.picture)
    steps, seconds = (sum(getattr(r, total) for r in results) for total in ("steps", "seconds"))
    print(f"\n{recipe.restarts} restarts at once, {steps} steps in {seconds:.0f} s")
    if args.timed_steps:
        fused, plain = (
            seconds_a_step(run, is_plain, args.timed_steps) for is_plain in (False, True)
        )
        print(
            f"a step (median of {args.timed_steps}): {1e3 * fused:.1f} ms; plain PyTorch "
            f"{1e3 * plain:.1f} ms, {plain / fused:.1f} times as long"
        )
    if args.json is not None:
        report = {"recipe": asdict(recipe), "results": [asdict(result) for result in results]}
        args.json.write_text(json.dumps(report, indent=1))
    return results


if __name__ == "__main__":
    main()
