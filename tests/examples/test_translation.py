"""examples/translation.py in a small form: the reader, the made-up language, training, resuming."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fastattn

EXAMPLES = Path(__file__).parents[2] / "examples"
MODELS = ["bahdanau", "luong", "transformer"]


@pytest.fixture(scope="module")
def translation() -> Iterator[ModuleType]:
    sys.path.insert(0, str(EXAMPLES))
    try:
        import translation

        yield translation
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture
def data(translation: ModuleType) -> ModuleType:
    return sys.modules["translation_data"]


@pytest.fixture
def models(translation: ModuleType) -> ModuleType:
    return sys.modules["translation_models"]


def test_reads_pairs(data: ModuleType) -> None:
    lines = ["Go now!\tVa  vite !\tCC-BY\n", "\n", "I'm here.\tJe suis là.\n", "a b c\tx\n"]
    first, second = data.parse(lines[:3])
    assert first == data.Pair(("go", "now", "!"), ("va", "vite", "!"))
    assert (second.source[0], second.target) == ("i'm", ("je", "suis", "là", "."))
    assert len(data.parse(lines, longest=4)) == 3
    with pytest.raises(ValueError, match="f: no pair of at most 1 words in it"):
        data.parse(lines, "f", longest=1)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("no tab here", "f:2: a tab between two sentences expected, found none"),
        ("\tx", "f:2: the first sentence has no word"),
        ("x\t  ", "f:2: the second sentence has no word"),
    ],
)
def test_bad_lines_are_named(data: ModuleType, line: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        data.parse(["a\tb", line], "f")


def test_the_made_up_language(data: ModuleType) -> None:
    assert data.invent(3, seed=1) == data.invent(3, seed=1)
    article = {"the": "ta", "a": "un"}
    for pair in data.invent(200):
        words = [pair.source[n] for n in pair.alignment]
        assert len(words) == len(pair.target)
        # One word for one word, always the same; the verb is last, what denies it before.
        for english, foreign in zip(words, pair.target, strict=True):
            assert article.get(english, foreign) == foreign
        assert pair.target[-1].endswith("as")
        assert ("not" in pair.source) == (pair.target[-2] == "ne")
        used = set(pair.alignment)
        left = [word for n, word in enumerate(pair.source) if n not in used]
        assert left == ["does"] * ("not" in pair.source)


def test_tensors_of_pairs(data: ModuleType) -> None:
    pairs = [data.Pair(("a", "b", "c"), ("x",)), data.Pair(("b",), ("y", "z", "y"))]
    source = data.Vocabulary((pair.source for pair in pairs), least=2)
    target = data.Vocabulary(pair.target for pair in pairs)
    assert source.words[4:] == ["b"]
    made = data.Pairs.of(pairs, source, target)
    b, (x, y, z) = 4, (4, 5, 6)
    assert made.source.tolist() == [[data.UNK, b, data.UNK, 2], [b, 2, 0, 0]]
    assert made.target.tolist() == [[1, x, 2, 0, 0], [1, y, z, y, 2]]
    assert [part.shape[1] for part in made.take(slice(0, 1))] == [4, 3]
    assert target.text([y, z, data.EOS, x]) == ["y", "z"]


SMALL = "--sentences 150 --epochs 2 --width 16 --batch 32 --rate 0.01".split()


@pytest.mark.parametrize("model", MODELS)
def test_the_twin_learns_the_same(translation: ModuleType, model: str, tmp_path: Path) -> None:
    """In float64, with dropout: 10 steps of both."""
    options = ["--model", model, "--twin", "--double", "--json", str(tmp_path / "r.json")]
    report = translation.main([*SMALL, *options])
    assert report["steps"] == 10
    assert report["difference"] < 1e-12
    losses = report["losses"][0]
    assert sum(losses[5:]) < sum(losses[:5])
    assert json.loads((tmp_path / "r.json").read_text())["difference"] == report["difference"]


@pytest.mark.parametrize("model", MODELS)
def test_draws_the_alignment(
    translation: ModuleType, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, page = tmp_path / "alignment.png", tmp_path / "alignment.html"
    report = translation.main(
        [*SMALL, "--model", model, "--picture", str(picture), "--page", str(page)]
    )
    printed = capsys.readouterr().out
    for expected in ("epoch 2: training loss", "test: loss", "<- ", "the word it comes from"):
        assert expected in printed
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "multihead_attn" in page.read_text() or model != "transformer"
    assert len(report["aligned"]) == (2 if model == "transformer" else 1)


def test_resumes_where_it_was_stopped(
    translation: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = translation.main([*SMALL, "--twin"])
    keep = ["--twin", "--checkpoint", str(tmp_path / "kept.pt")]
    write = translation.Checkpoint.write

    def write_and_stop(self: Any, name: str, state: dict[str, Any]) -> None:
        write(self, name, state)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(translation.Checkpoint, "write", write_and_stop)
        with pytest.raises(KeyboardInterrupt):
            translation.main([*SMALL, *keep])
    resumed = translation.main([*SMALL, *keep])
    assert resumed["losses"] == whole["losses"]
    assert translation.main([*SMALL, *keep])["losses"] == whole["losses"]  # nothing is left to do
    with pytest.raises(ValueError, match="belongs to another run"):
        translation.main([*SMALL, *keep, "--seed", "1"])


def test_reads_a_file(translation: ModuleType, data: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "pairs.tsv"
    pairs = data.invent(60)
    text = "".join(f"{' '.join(pair.source)}\t{' '.join(pair.target)}\n" for pair in pairs)
    file.write_text(text)
    report = translation.main(["--data", str(file), *SMALL])
    assert "aligned" not in report  # the file does not say which word comes from which
    file.write_text("a\tb\n")
    with pytest.raises(ValueError, match=r"pairs\.tsv: 1 pairs are too few"):
        translation.main(["--data", str(file), *SMALL])


@torch.no_grad()
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("plain", [False, True])
def test_generate_is_greedy(models: ModuleType, model: str, plain: bool) -> None:
    torch.manual_seed(3)
    network = models.make(model, (20, 9), 16, 0.1, plain=plain).eval()
    source = torch.randint(4, 20, (3, 6))
    source[1, 4:] = 0
    out = network.generate(source, bos_idx=1, eos_idx=2, max_length=5)
    assert out.shape[1] <= 5
    target = torch.cat((torch.ones(3, 1, dtype=torch.int64), out[:, :-1]), 1)
    best = network(source, target).argmax(-1)
    ended = (target == 2).cumsum(1) > 0
    assert torch.equal(out, best.masked_fill(ended, 0))


@pytest.mark.parametrize("model", MODELS)
def test_padding_changes_nothing(models: ModuleType, model: str) -> None:
    network = models.make(model, (20, 9), 16, 0.1).eval()
    source, target = torch.randint(4, 20, (2, 5)), torch.randint(4, 9, (2, 4))
    expected = network(source, target)
    padded = torch.nn.functional.pad(source, (0, 3)), torch.nn.functional.pad(target, (0, 2))
    torch.testing.assert_close(network(*padded)[:, :4], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_plain_uses_nothing_of_ours(
    models: ModuleType, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No attention of the library runs in the twin."""
    network = models.make(model, (20, 9), 16, 0.1, plain=True)

    def forbidden(*args: Any, **given: Any) -> None:
        raise AssertionError("the library's attention ran")

    monkeypatch.setattr(fastattn, "luong_attention", forbidden)
    monkeypatch.setattr("fastattn.nn.additive.additive_attention", forbidden)
    monkeypatch.setattr("fastattn.nn.mha.scaled_dot_product_attention", forbidden)
    pair = torch.randint(4, 20, (2, 5)), torch.randint(4, 9, (2, 4))
    network(*pair).sum().backward()
    ours = models.make(model, (20, 9), 16, 0.1)
    with pytest.raises(AssertionError, match="the library's attention ran"):
        ours(*pair)
