"""examples/translation.py in a small form: the reader, the made-up language, training, resuming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import translation

MODELS = ["bahdanau", "luong", "transformer"]


SMALL = "--sentences 150 --epochs 2 --width 16 --batch 32 --rate 0.01".split()


@pytest.mark.parametrize("model", MODELS)
def test_the_twin_trains_as_the_network(model: str, tmp_path: Path) -> None:
    """In float64, with dropout: 10 steps of both."""
    options = ["--model", model, "--twin", "--double", "--json", str(tmp_path / "r.json")]
    report = translation.main([*SMALL, *options])
    assert report["steps"] == 10
    assert report["difference"] < 1e-12
    losses = report["losses"][0]
    assert sum(losses[5:]) < sum(losses[:5])
    assert json.loads((tmp_path / "r.json").read_text())["difference"] == report["difference"]


@pytest.mark.parametrize("model", MODELS)
def test_the_alignment_is_drawn(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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


def test_an_interrupted_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert translation.main([*SMALL, *keep])["losses"] == whole["losses"]  # training is complete
    with pytest.raises(ValueError, match="belongs to another run"):
        translation.main([*SMALL, *keep, "--seed", "1"])


def test_reads_a_file(tmp_path: Path) -> None:
    file = tmp_path / "pairs.tsv"
    pairs = translation.invent(60)
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
def test_generate_is_greedy(model: str, plain: bool) -> None:
    torch.manual_seed(3)
    network = translation.make(model, (20, 9), 16, 0.1, plain=plain).eval()
    source = torch.randint(4, 20, (3, 6))
    source[1, 4:] = 0
    out = network.generate(source, bos_idx=1, eos_idx=2, max_length=5)
    assert out.shape[1] <= 5
    target = torch.cat((torch.ones(3, 1, dtype=torch.int64), out[:, :-1]), 1)
    best = network(source, target).argmax(-1)
    ended = (target == 2).cumsum(1) > 0
    assert torch.equal(out, best.masked_fill(ended, 0))
