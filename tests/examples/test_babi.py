"""examples/babi.py in a small form: the reader, the made-up stories, and a training of seconds."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import fastattn

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def babi() -> Iterator[ModuleType]:
    sys.path.insert(0, str(EXAMPLES))
    try:
        import babi

        yield babi
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture
def data(babi: ModuleType) -> ModuleType:
    return sys.modules["babi_data"]


STORY = """\
1 Mary moved to the bathroom.
2 John went to the hallway.
3 Where is Mary? \tbathroom\t1
4 Daniel gave the apple to John.
5 What is John carrying?\tapple,milk\t4 2
1 The triangle is above the pink rectangle.
2 Is the triangle below? \tNo\t
"""


def test_reads_stories(data: ModuleType) -> None:
    first, second, third = data.parse(STORY.splitlines(), 8)
    assert first.story[0] == ("mary", "moved", "to", "the", "bathroom")
    assert first.words == ("where", "is", "mary")
    assert (first.answer, first.support) == ("bathroom", (0,))
    assert len(second.story) == 3
    assert second.story[2] == ("daniel", "gave", "the", "apple", "to", "john")
    assert (second.answer, second.support) == ("apple,milk", (2, 1))
    assert (len(third.story), third.answer, third.support) == (1, "no", ())


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        (["Mary moved."], "f:1: a line starts with its number, got 'Mary moved.'"),
        (["1 Mary moved.", "3 John went."], "f:2: line 2 of the story expected, got 3"),
        (["1 Mary moved.", "", "2 Where?\tbath"], "f:3: question, answer, support expected, got 2"),
        (["1 Mary moved.", "2 Where?\t\t1"], "f:2: a question without an answer"),
        (["1 Mary moved.", "2 ?\tbath\t1"], "f:2: a question without a word"),
        (["1 Mary moved.", "2 Where?\tbath\t2"], "f:2: the support '2' is not made of earlier"),
        (["1 Mary moved.", "2 Where?\tbath\tx"], "f:2: the support 'x' is not made of earlier"),
        (["1 ..."], "f:1: a sentence without a word"),
        (["1 Mary moved."], "f: no question in it"),
        ([], "f: no question in it"),
    ],
)
def test_bad_lines_are_named(data: ModuleType, lines: list[str], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong.replace("?", r"\?").replace(".", r"\.")):
        data.parse(lines, 1, "f")


def test_finds_the_files(data: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "en"
    folder.mkdir()
    (folder / "qa8_lists-sets_train.txt").write_text(STORY)
    assert len(data.read_tasks(tmp_path, "train", [8])[8]) == 3
    with pytest.raises(ValueError, match=r"one file qa8_\*_test.txt expected in .*, found none"):
        data.read_tasks(tmp_path, "test", [8])
    (tmp_path / "qa8_lists-sets_train.txt").write_text(STORY)
    with pytest.raises(ValueError, match=r"found .*en.*, .*train.txt"):
        data.read_tasks(tmp_path, "train", [8])


def test_the_most_recent_sentence_comes_first(data: ModuleType) -> None:
    questions = data.parse(STORY.splitlines(), 8)
    (both,), words = data.vectorize([questions], memory_size=2)
    assert words[0] == ""
    assert both.stories.shape == (3, 2, 7)
    assert data.vectorize([questions], memory_size=50)[0][0].stories.shape == (3, 4, 7)

    def sentence(n: int, slot: int) -> str:
        return " ".join(words[t] for t in both.stories[n, slot].tolist() if t)

    assert sentence(0, 0) == "john went to the hallway"
    assert sentence(0, 1) == "mary moved to the bathroom"
    assert sentence(1, 0) == "daniel gave the apple to john"  # the oldest is forgotten
    assert sentence(1, 1) == "john went to the hallway"
    assert sentence(2, 1) == ""
    assert [words[a] for a in both.answers.tolist()] == ["bathroom", "apple,milk", "no"]
    assert both.support.tolist() == [[False, True], [True, True], [False, False]]


def test_made_up_stories_are_right(data: ModuleType) -> None:
    for question in data.invent(200, seed=3):
        where: dict[str, str] = {}
        carrier: dict[str, str] = {}
        for person, verb, *rest in question.story:
            if verb == "took":
                carrier[rest[1]] = person
            else:
                where[person] = rest[-1]
        holder = carrier[question.words[-1]]
        assert question.answer == where[holder]
        taken, gone = (question.story[n] for n in question.support)
        assert taken == (holder, "took", "the", question.words[-1], "there")
        assert gone == (holder, "went", "to", "the", question.answer)
    assert data.invent(5, seed=1) == data.invent(5, seed=1)


def test_the_paper_s_columns(data: ModuleType) -> None:
    means = {name: round(sum(column) / 20, 1) for name, column in data.PAPER.items()}
    assert means == {"joint": 12.4, "single": 13.9, "layerwise": 15.2}


def test_draws_what_the_hops_look_at(
    babi: ModuleType, data: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (both,), words = data.vectorize([data.parse(STORY.splitlines(), 8)], memory_size=50)
    report, given = sys.modules["babi_report"], {}

    def hops(weights: Any, sentences: Any, **options: Any) -> Any:
        given.update(weights=weights, sentences=sentences, **options)
        return fastattn.plot.hops(weights, sentences, **options)

    monkeypatch.setattr(report, "plot", SimpleNamespace(hops=hops))
    weights = torch.tensor([[0.4, 0.3, 0.2, 0.1]])  # the most recent sentence first
    report.draw(both, 1, weights, words, tmp_path / "hops.png")
    assert given["sentences"] == [
        "mary moved to the bathroom",
        "john went to the hallway",
        "daniel gave the apple to john",
        "(1 empty memories)",
    ]
    torch.testing.assert_close(given["weights"], torch.tensor([[0.2, 0.3, 0.4, 0.1]]))
    assert sorted(given["support"]) == [1, 2]
    assert given["title"] == "what is john carrying? apple,milk"


SMALL = "--recipe single --questions 90 --restarts 2 --epochs 3 --linear-epochs 2 --dim 8".split()


def test_runs_without_data(
    babi: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = ["--picture", str(tmp_path / "hops.png")]
    json_to = ["--json", str(tmp_path / "r.json")]
    (result,) = babi.main([*SMALL, "--timed-steps", "2", *json_to, *picture])
    assert (tmp_path / "hops.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    printed = capsys.readouterr().out
    for expected in ("task 1 linear epoch 2", "task 1 softmax epoch 3", "every restart", "a step"):
        assert expected in printed
    assert result.steps == 5 * 3  # epochs of ceil(81 / 32) batches
    assert len(result.test) == 2
    assert sum(result.training[result.best]) == min(map(sum, result.training))
    assert json.loads((tmp_path / "r.json").read_text())["results"][0]["best"] == result.best


def test_resumes_where_it_was_stopped(
    babi: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (whole,) = babi.main([*SMALL, "--timed-steps", "0"])
    keep = ["--checkpoint", str(tmp_path / "kept.pt"), "--timed-steps", "0"]
    write, written = babi.Checkpoint.write, []

    def write_three(self: Any, name: str, state: dict[str, Any]) -> None:
        write(self, name, state)
        written.append(name)
        if len(written) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(babi.Checkpoint, "write", write_three)
        with pytest.raises(KeyboardInterrupt):
            babi.main([*SMALL, *keep])
    (resumed,) = babi.main([*SMALL, *keep])
    assert replace(resumed, seconds=0.0) == replace(whole, seconds=0.0)
    (again,) = babi.main([*SMALL, *keep])  # nothing is left to train
    assert again == resumed
    with pytest.raises(ValueError, match="belongs to another run"):
        babi.main([*SMALL, *keep, "--seed", "1"])


def trained(babi: ModuleType, steps: int, **options: Any) -> dict[str, torch.Tensor]:
    (questions,), words = sys.modules["babi_data"].vectorize([babi.invent(64)], 50)
    recipe = replace(babi.RECIPES["single"], dim=8, restarts=3, **options)
    run = babi.Training(recipe, questions, questions, len(words))
    for n in range(steps):
        index = torch.arange(96).view(3, 32).add(n) % 64
        run.networks.step(*run.batch(index), 0.01)
    return run.networks.parameters


@pytest.mark.parametrize("tying", ["adjacent", "layerwise"])
def test_the_eager_network_learns_the_same(babi: ModuleType, tying: str) -> None:
    ours, plain = (trained(babi, 3, tying=tying, plain=plain) for plain in (False, True))
    for name, p in ours.items():
        torch.testing.assert_close(p, plain[name], rtol=1e-4, atol=1e-5)


def test_clips_each_matrix(babi: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    before = trained(babi, 0)
    monkeypatch.setattr(babi, "CLIP", 0.5)
    after = trained(babi, 1)
    for name, p in after.items():
        moved = torch.linalg.vector_norm(p - before[name], dim=(-2, -1))
        assert (moved <= 0.01 * 0.5 * 1.001).all()
    assert (torch.linalg.vector_norm(after["embedding"] - before["embedding"]) > 0.005).all()


def test_the_rate_is_halved(babi: ModuleType) -> None:
    (questions,), words = sys.modules["babi_data"].vectorize([babi.invent(20)], 50)
    run = babi.Training(babi.RECIPES["joint"], questions, questions, len(words))
    assert run.rate() == 0.005
    run.progress.phase = "softmax"
    for epoch, rate in ((0, 0.01), (14, 0.01), (15, 0.005), (59, 0.00125)):
        run.progress.epoch = epoch
        assert run.rate() == rate


def test_the_linear_start_ends_when_the_loss_stops_falling(babi: ModuleType) -> None:
    (questions,), words = sys.modules["babi_data"].vectorize([babi.invent(20)], 50)
    recipe = replace(babi.RECIPES["joint"], patience=2)
    run = babi.Training(recipe, questions, questions, len(words))
    at = run.progress
    for epoch, loss in enumerate((3.0, 2.0, 2.5, 1.9, 2.0, 1.9), 1):
        assert at.phase == "linear"
        at.epoch, at.losses = epoch, [*at.losses, loss]
        run.turn_page()
    assert (at.phase, at.epoch, at.losses) == ("softmax", 0, [])


@pytest.mark.parametrize("wrong", ["0", "21", "1-", "a", "", "3-1"])
def test_task_numbers(babi: ModuleType, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert babi.parse_tasks("1-3,7") == [1, 2, 3, 7]
    with pytest.raises(SystemExit):
        babi.arguments(["--tasks", wrong])
    assert "--tasks" in capsys.readouterr().err
