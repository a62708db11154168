"""examples/babi.py in a small form: the reader, the made-up stories, and a training of seconds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import babi
import babi_data as data
import pytest
import torch

STORY = """\
1 Mary moved to the bathroom.
2 John went to the hallway.
3 Where is Mary? \tbathroom\t1
4 Daniel gave the apple to John.
5 What is John carrying?\tapple,milk\t4 2
1 The triangle is above the pink rectangle.
2 Is the triangle below? \tNo\t
"""


def test_reads_stories() -> None:
    first, second, third = data.parse(STORY.splitlines(), 8)
    assert first.story[0] == ("mary", "moved", "to", "the", "bathroom")
    assert first.words == ("where", "is", "mary")
    assert (first.answer, first.support) == ("bathroom", (0,))
    assert len(second.story) == 3
    assert second.story[2] == ("daniel", "gave", "the", "apple", "to", "john")
    assert (second.answer, second.support) == ("apple,milk", (2, 1))
    assert (len(third.story), third.answer, third.support) == (1, "no", ())


def test_made_up_stories_are_right() -> None:
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


SMALL = "--recipe single --questions 90 --restarts 2 --epochs 3 --linear-epochs 2 --dim 8".split()


def test_runs_without_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_an_interrupted_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    (again,) = babi.main([*SMALL, *keep])  # training is complete
    assert again == resumed
    with pytest.raises(ValueError, match="belongs to another run"):
        babi.main([*SMALL, *keep, "--seed", "1"])


def trained(steps: int, **options: Any) -> dict[str, torch.Tensor]:
    """The parameters after training on 64 invented questions."""
    (questions,), words = data.vectorize([babi.invent(64)], 50)
    recipe = replace(babi.RECIPES["single"], dim=8, restarts=3, **options)
    run = babi.Training(recipe, questions, questions, len(words))
    for n in range(steps):
        index = torch.arange(96).view(3, 32).add(n) % 64
        run.networks.step(*run.batch(index), 0.01)
    return run.networks.parameters


@pytest.mark.parametrize("tying", ["adjacent", "layerwise"])
def test_the_kernels_train_as_plain_pytorch(tying: str) -> None:
    ours, plain = (trained(3, tying=tying, plain=plain) for plain in (False, True))
    for name, p in ours.items():
        torch.testing.assert_close(p, plain[name], rtol=1e-4, atol=1e-5)
