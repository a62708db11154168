"""Sentences in two languages: read from a file, or made up.

A file has a pair on each line: the sentence, a tab, its translation. (What follows a second tab,
such as where it came from, is left out.) :func:`invent` makes pairs in English and a language
without articles in front and with the verb at the end:

    the small cat does not see a red house  ->  kato piku ta domo rogu un ne vidas
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["BOS", "EOS", "PAD", "UNK", "Pair", "Pairs", "Vocabulary", "invent", "parse", "read"]

PAD, BOS, EOS, UNK = range(4)
_SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]


@dataclass(frozen=True)
class Pair:
    """A sentence, its translation, and, where it is known, which word comes from which."""

    source: tuple[str, ...]
    target: tuple[str, ...]
    alignment: tuple[int, ...] = ()  # for each word of the target, an index into the source


def words_of(text: str) -> tuple[str, ...]:
    """The words and punctuation marks of a text, in lower case."""
    return tuple(re.findall(r"[\w']+|[^\w\s]", text.lower()))


def parse(lines: Iterable[str], name: str = "<lines>", longest: int = 30) -> list[Pair]:
    """Read pairs; ValueError names the file and the line that is wrong.

    Pairs with a side of more than ``longest`` words are left out.
    """
    pairs = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        fields = line.rstrip("\r\n").split("\t")
        if len(fields) < 2:
            raise ValueError(f"{name}:{number}: a tab between two sentences expected, found none")
        source, target = words_of(fields[0]), words_of(fields[1])
        if not source or not target:
            side = "first" if not source else "second"
            raise ValueError(f"{name}:{number}: the {side} sentence has no word")
        if max(len(source), len(target)) <= longest:
            pairs.append(Pair(source, target))
    if not pairs:
        raise ValueError(f"{name}: no pair of at most {longest} words in it")
    return pairs


def read(path: Path, longest: int = 30) -> list[Pair]:
    """Read pairs of sentences from a file, each of at most `longest` words."""
    with path.open(encoding="utf-8") as lines:
        return parse(lines, str(path), longest)


_NOUNS = {
    "cat": "kato", "dog": "hundo", "house": "domo", "tree": "arbo", "bird": "birdo",
    "man": "viro", "woman": "femino", "child": "infano", "book": "libro", "river": "rivero",
}  # fmt: skip
_ADJECTIVES = {"small": "piku", "red": "rogu", "old": "malu", "black": "nigru", "good": "bonu"}
_VERBS = {  # third person, infinitive
    "sees": ("see", "vidas"), "hears": ("hear", "audas"), "likes": ("like", "amas"),
    "finds": ("find", "trovas"), "knows": ("know", "konas"), "follows": ("follow", "sekas"),
}  # fmt: skip
_ARTICLES = {"the": "ta", "a": "un"}


def invent(count: int, seed: int = 0) -> list[Pair]:
    """Make up sentences and their translations, and tell which word comes from which."""
    draw = random.Random(seed)

    def phrase(start: int) -> tuple[list[str], list[tuple[str, int]]]:
        """An article, adjectives and a noun; their translations with the index each comes from."""
        article, noun = draw.choice(sorted(_ARTICLES)), draw.choice(sorted(_NOUNS))
        adjectives = draw.sample(sorted(_ADJECTIVES), draw.choice((0, 1, 1, 2)))
        english = [article, *adjectives, noun]
        foreign = [(_NOUNS[noun], start + len(english) - 1)]
        foreign += [(_ADJECTIVES[a], start + 1 + n) for n, a in enumerate(adjectives)]
        return english, [*foreign, (_ARTICLES[article], start)]

    pairs = []
    for _ in range(count):
        verb = draw.choice(sorted(_VERBS))
        infinitive, foreign_verb = _VERBS[verb]
        denied = draw.random() < 0.3
        subject, subject_words = phrase(0)
        predicate = ["does", "not", infinitive] if denied else [verb]
        end = len(subject) + len(predicate)
        thing, thing_words = phrase(end)
        last = [(foreign_verb, end - 1)]
        foreign = [*subject_words, *thing_words, *([("ne", end - 2)] if denied else []), *last]
        words, places = zip(*foreign, strict=True)
        pairs.append(Pair((*subject, *predicate, *thing), words, places))
    return pairs


class Vocabulary:
    """Token ids: first the special ones, then each word seen at least ``least`` times."""

    def __init__(self, sentences: Iterable[Sequence[str]], least: int = 1) -> None:
        counts = Counter(word for sentence in sentences for word in sentence)
        self.words = [*_SPECIAL, *sorted(word for word, n in counts.items() if n >= least)]
        self.number = {word: n for n, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def numbers(self, sentence: Sequence[str]) -> list[int]:
        """The ids of the words, UNK for an unknown one."""
        return [self.number.get(word, UNK) for word in sentence]

    def text(self, tokens: Iterable[int]) -> list[str]:
        """The words up to the end of the sentence."""
        words = []
        for token in tokens:
            if token in (EOS, PAD):
                break
            words.append(self.words[token])
        return words


@dataclass
class Pairs:
    """Many pairs as tensors, each filled up to the longest."""

    source: Tensor  # [Q, S] int64, with EOS at the end
    target: Tensor  # [Q, T + 2], BOS ... EOS

    @classmethod
    def of(cls, pairs: Sequence[Pair], source: Vocabulary, target: Vocabulary) -> Pairs:
        """Number the words and pad the sentences."""

        def filled(rows: list[list[int]]) -> Tensor:
            longest = max(map(len, rows))
            return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])

        return cls(
            filled([[*source.numbers(pair.source), EOS] for pair in pairs]),
            filled([[BOS, *target.numbers(pair.target), EOS] for pair in pairs]),
        )

    def __len__(self) -> int:
        return len(self.source)

    def take(self, index: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Source [B, S] and target [B, T], no wider than these pairs need."""
        rows = self.source[index], self.target[index]
        source, target = (x[:, : int((x != PAD).sum(1).max())] for x in rows)
        return source, target
