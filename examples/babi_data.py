"""The bAbI tasks (Weston et al. 2015, https://arxiv.org/abs/1502.05698) as tensors.

A file of a task holds stories, one line each sentence, numbered from 1; a line with tabs is a
question, its answer and the numbers of the sentences that support it:

    1 Mary moved to the bathroom.
    2 John went to the hallway.
    3 Where is Mary? <tab> bathroom <tab> 1

:func:`invent` makes such questions up, for a run without the data.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["PAPER", "TASKS", "Question", "Questions", "invent", "parse", "read_tasks", "vectorize"]

PADDING = 0

# Names as in the data's own files.
TASKS = {
    1: "single supporting fact",
    2: "two supporting facts",
    3: "three supporting facts",
    4: "two arg relations",
    5: "three arg relations",
    6: "yes/no questions",
    7: "counting",
    8: "lists/sets",
    9: "simple negation",
    10: "indefinite knowledge",
    11: "basic coreference",
    12: "conjunction",
    13: "compound coreference",
    14: "time reasoning",
    15: "basic deduction",
    16: "basic induction",
    17: "positional reasoning",
    18: "size reasoning",
    19: "path finding",
    20: "agent's motivation",
}

# Test errors in percent of tasks 1 to 20, 1000 training questions a task, position encoding, linear
# start and random noise (PE LS RN), 3 hops: Sukhbaatar et al. 2015, arXiv:1503.08895, table 1. The
# joint column is quoted by public repositories; the two others were typed from memory and agree
# with the paper's means (16: "layerwise" is PE LS LW, without random noise).
PAPER = {
    "joint": [
        0.0, 11.4, 21.9, 13.4, 14.4, 2.8, 18.3, 9.3, 1.9, 6.5,
        0.3, 0.1, 0.2, 6.9, 0.0, 2.7, 40.4, 9.4, 88.0, 0.0,
    ],
    "single": [
        0.0, 8.3, 40.3, 2.8, 13.1, 7.6, 17.3, 10.0, 13.2, 15.1,
        0.9, 0.2, 0.4, 1.7, 0.0, 1.3, 51.0, 11.1, 82.8, 0.0,
    ],
    "layerwise": [
        0.1, 18.8, 31.7, 17.5, 12.9, 2.0, 10.1, 6.1, 1.5, 2.6,
        3.3, 0.0, 0.5, 2.0, 1.8, 51.0, 42.6, 9.2, 90.6, 0.2,
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Question:
    """A question, the story before it, and the sentences that answer it."""

    task: int
    story: tuple[tuple[str, ...], ...]  # sentences in their order
    words: tuple[str, ...]
    answer: str
    support: tuple[int, ...]  # indices into the story


def words_of(sentence: str) -> tuple[str, ...]:
    """The words in lower case, without punctuation."""
    return tuple(re.findall(r"[\w'-]+", sentence.lower()))


def parse(lines: Iterable[str], task: int, name: str = "<lines>") -> list[Question]:
    """Read the questions of one file; ValueError names the file and the line that is wrong."""
    questions: list[Question] = []
    story: list[tuple[str, ...]] = []
    index_of: dict[int, int] = {}  # a sentence's number -> its index in the story
    last = 0

    def need(valid: bool, line_number: int, message: str) -> None:
        """Raise an error that names the line, unless ``valid``."""
        if not valid:
            raise ValueError(f"{name}:{line_number}: {message}")

    for line_number, raw in enumerate(lines, 1):
        line = raw.strip(" \r\n")  # a last field may be empty
        if not line:
            continue
        label, _, text = line.partition(" ")
        need(label.isdecimal(), line_number, f"a line starts with its number, got {line[:40]!r}")
        if int(label) == 1:
            story, index_of = [], {}
        else:
            need(
                int(label) == last + 1,
                line_number,
                f"line {last + 1} of the story expected, got {label}",
            )
        last = int(label)
        if "\t" not in text:
            need(bool(words_of(text)), line_number, "a sentence without a word")
            index_of[last] = len(story)
            story.append(words_of(text))
            continue
        fields = [field.strip() for field in text.split("\t")]
        need(
            len(fields) == 3,
            line_number,
            f"question, answer, support expected, got {len(fields)} fields",
        )
        asked, answer, support = fields
        need(bool(words_of(asked)), line_number, "a question without a word")
        need(bool(answer), line_number, "a question without an answer")
        facts = support.split()
        supported = all(fact.isdecimal() and int(fact) in index_of for fact in facts)
        need(supported, line_number, f"the support {support!r} is not made of earlier sentences")
        indices = tuple(index_of[int(fact)] for fact in facts)
        questions.append(Question(task, tuple(story), words_of(asked), answer.lower(), indices))
    if not questions:
        raise ValueError(f"{name}: no question in it")
    return questions


def read_tasks(folder: Path, set_name: str, tasks: Sequence[int]) -> dict[int, list[Question]]:
    """Read ``qa<task>_*_<part>.txt`` of each task, from the folder or one below it."""
    questions = {}
    for task in tasks:
        paths = sorted(folder.rglob(f"qa{task}_*_{set_name}.txt"))
        if len(paths) != 1:
            what = ", ".join(map(str, paths)) or "none"
            raise ValueError(
                f"one file qa{task}_*_{set_name}.txt expected in {folder}, found {what}"
            )
        with paths[0].open(encoding="utf-8") as lines:
            questions[task] = parse(lines, task, str(paths[0]))
    return questions


def invent(count: int, seed: int = 0) -> list[Question]:
    """Make up questions such as "where is the milk?": who carries a thing takes it along."""
    draw = random.Random(seed)
    people, places, things = (
        "mary john sandra daniel".split(),
        "kitchen garden office hallway bedroom".split(),
        "milk apple football".split(),
    )
    questions = []
    while len(questions) < count:
        story: list[tuple[str, ...]] = []
        location: dict[str, tuple[str, int]] = {}  # a person's place, and the sentence of the move
        carrier: dict[str, tuple[str, int]] = {}
        for _ in range(draw.randint(4, 9)):
            person = draw.choice(people)
            free = [thing for thing in things if thing not in carrier]
            if person in location and free and draw.random() < 0.4:
                thing = draw.choice(free)
                carrier[thing] = (person, len(story))
                story.append((person, "took", "the", thing, "there"))
            else:
                room = draw.choice(places)
                location[person] = (room, len(story))
                story.append((person, "went", "to", "the", room))
        if not carrier:
            continue
        thing = draw.choice(sorted(carrier))
        person, took = carrier[thing]
        room, moved = location[person]
        asked = ("where", "is", "the", thing)
        questions.append(Question(1, tuple(story), asked, room, (took, moved)))
    return questions


@dataclass
class Questions:
    """Many questions as tensors; a story's most recent sentence comes first."""

    stories: Tensor  # [Q, N, J] int32, PADDING beyond a sentence and beyond a story
    asked: Tensor  # [Q, J] int32
    answers: Tensor  # [Q] int64
    support: Tensor  # [Q, N] bool
    tasks: Tensor  # [Q] int64

    def __len__(self) -> int:
        return len(self.answers)

    def take(self, index: Tensor | slice) -> Questions:
        """The questions at these indices."""
        return Questions(
            self.stories[index],
            self.asked[index],
            self.answers[index],
            self.support[index],
            self.tasks[index],
        )


def vectorize(
    sets: Sequence[Sequence[Question]], memory_size: int
) -> tuple[list[Questions], list[str]]:
    """Number the words of all parts; return their tensors and the words (0 is padding).

    Of a longer story the last ``memory_size`` sentences are kept. A shorter one is filled up with
    empty sentences to the longest, and a tenth more: the room for random noise.
    """
    all_questions = [question for questions in sets for question in questions]
    vocabulary = {
        word for q in all_questions for sentence in (*q.story, q.words) for word in sentence
    }
    words = ["", *sorted(vocabulary | {q.answer for q in all_questions})]
    token_of = {word: n for n, word in enumerate(words)}
    width = max(len(sentence) for q in all_questions for sentence in (*q.story, q.words))
    slots = min(memory_size, math.ceil(1.1 * max(len(q.story) for q in all_questions)))

    def tensors(questions: Sequence[Question]) -> Questions:
        """The questions of one set, padded to the sizes of all."""
        stories = torch.full((len(questions), slots, width), PADDING, dtype=torch.int32)
        asked = torch.full((len(questions), width), PADDING, dtype=torch.int32)
        support = torch.zeros((len(questions), slots), dtype=torch.bool)
        for n, q in enumerate(questions):
            sentences = [[token_of[word] for word in sentence] for sentence in q.story[-slots:]]
            for slot, sentence in enumerate(reversed(sentences)):
                stories[n, slot, : len(sentence)] = torch.tensor(sentence)
            asked[n, : len(q.words)] = torch.tensor([token_of[word] for word in q.words])
            for fact in q.support:
                if len(q.story) - 1 - fact < slots:
                    support[n, len(q.story) - 1 - fact] = True
        answers = torch.tensor([token_of[q.answer] for q in questions])
        return Questions(
            stories, asked, answers, support, torch.tensor([q.task for q in questions])
        )

    return [tensors(questions) for questions in sets], words
