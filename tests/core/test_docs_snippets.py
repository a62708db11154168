"""The Python blocks of README's start and of docs/integrations do what the text says.

The blocks of a page run one after the other, as in one session. Models that they would
download are made here, tiny and with random weights. tests/models has the pages of libraries that
only it installs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gemms import native_layers
from snippets import blocks, run
from torch import nn

import fastattn
from fastattn import cli
from fastattn.integrations import transformers as integration
from fastattn.integrations.transformers import _attention

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
DECODER = {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    "google-bert/bert-base-uncased": ("bert", {}),
    "meta-llama/Llama-3.2-1B": ("llama", DECODER),
}
CALLS_MODEL = re.compile(r"\b(model|generate_batch|judged)\(")
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.fixture(autouse=True)
def registrations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What the snippets register; it is undone after the test."""
    made: list[Any] = []
    register = integration.register

    def remembered(*args: Any, **kwargs: Any) -> Any:
        made.append(register(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(integration, "register", remembered)
    yield made
    for registration in made:
        registration.undo()


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the operators that the attention function has called."""
    called: list[str] = []
    for name in ("scaled_dot_product_attention", "varlen_attention"):
        operator = getattr(_attention, name)

        def noted(*args: Any, name: str = name, operator: Any = operator, **kwargs: Any) -> Any:
            called.append(name)
            return operator(*args, **kwargs)

        monkeypatch.setattr(_attention, name, noted)
    return called


@pytest.fixture(autouse=True)
def without_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make small random models in place of downloads."""

    def from_pretrained(cls: Any, name: str, **kwargs: Any) -> nn.Module:
        kind, more = MODELS[name]
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind, **SIZES, **more)
        return cls.from_config(config, **kwargs).eval()

    for auto in (transformers.AutoModel, transformers.AutoModelForCausalLM):
        monkeypatch.setattr(auto, "from_pretrained", classmethod(from_pretrained))


def padded_tokens() -> dict[str, torch.Tensor]:
    """Two sequences, of 10 tokens and of 6."""
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 6:] = 0
    tokens = torch.randint(3, 100, (2, 10), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "attention_mask": mask}


def check_transformers(names: dict[str, Any], fused: list[str]) -> None:
    """The results that docs/integrations/transformers.md states."""
    model, tokens = names["model"], names["tokens"]
    assert "varlen_attention" in fused, "packed sequences were not taken as such"

    model.set_attn_implementation("eager")
    alone = [model(part).logits for part in tokens.split([4, 6], dim=1)]
    torch.testing.assert_close(names["logits"], torch.cat(alone, dim=1))
    expected = model(tokens, output_attentions=True).attentions
    torch.testing.assert_close(names["attentions"], expected)

    assert names["difference"] < 1.3e-6  # what torch.testing grants float32

    model.set_attn_implementation("sdpa")
    for request in names["generated"].values():
        prompt = torch.tensor([request.prompt_ids])
        text = model.generate(prompt, generation_config=names["settings"])
        assert request.generated_tokens == text[0, prompt.shape[1] :].tolist()
        assert request.generated_tokens

    assert cli.main(["explain", "--shapes", "@shapes.txt"]) == 0

    registration = names["registration"]
    with pytest.raises(ValueError, match="fastattn"):
        model.set_attn_implementation("fastattn")
    registration.undo()


def check_torch(names: dict[str, Any], fused: list[str]) -> None:
    """fastattn's attention must have run, and PyTorch's after it was undone."""
    out, query, key, value = (names[name] for name in ("out", "query", "key", "value"))
    assert torch.equal(out, names["out_too"])
    after = names["F"].scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(out, after)
    ours = "scaled_dot_product_attentionBackward"
    assert out.grad_fn.name() == names["out_too"].grad_fn.name() == ours != after.grad_fn.name()


CHECKS: dict[str, Callable[[dict[str, Any], list[str]], None]] = {
    "torch": check_torch,
    "transformers": check_transformers,
}


@pytest.mark.parametrize(
    "page", [ROOT / f"docs/integrations/{name}.md" for name in CHECKS], ids=lambda page: page.stem
)
def test_integrations(
    page: Path, fused: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Before, continuous batching asks for another name, as the page says.
    pytest.importorskip("transformers", minversion="5.20")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"inputs": padded_tokens()}
    for block in blocks(page):
        before = len(fused)
        run(page, block, names)
        if CALLS_MODEL.search(block[1]):
            assert len(fused) > before, f"no fused attention ran from line {block[0]} on"
    CHECKS[page.stem](names, fused)


def columns(line: str) -> list[str]:
    """The count, class, calls and backend in a line of a report."""
    count, *others = re.split(" {2,}", line.strip())
    return [count, *others[1:4]]


@pytest.mark.complete
@pytest.mark.parametrize("name", ["first_model", "vit_weights"])
def test_tutorial(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    page, names = ROOT / f"docs/{name}.md", dict[str, Any]()
    for block in blocks(page):
        run(page, block, names)
    printed = capsys.readouterr().out.splitlines()
    after = page.read_text().partition("```python")[2]
    (shown,) = re.findall(r"\n\n```\n(.*?)```", after, re.DOTALL)
    # Names and reasons of a report are shortened in the text.
    for line, expected in zip(printed, shown.splitlines(), strict=False):
        assert columns(line) == columns(expected)
    if name == "first_model":
        assert names["loss"].isfinite()
        assert {call.backend for call in names["calls"]} == {"cpu"}
        assert names["model"].config._attn_implementation == "sdpa"
    else:
        assert list(names["weights"]) == [f"layers.{n}.attention" for n in range(4)]
        torch.testing.assert_close(names["rollout"].sum(1), torch.ones(197))
        assert (tmp_path / "heads.png").exists()
        assert "layers.3" in (tmp_path / "attention.html").read_text()


def test_first_example_of_readme(capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "README.md"
    names: dict[str, Any] = {}
    with native_layers() as called:
        run(page, blocks(page)[0], names)
    assert called.layers == [SIZES["num_hidden_layers"]]
    model, output = names["model"], names["output"]
    row = "encoder.layer.*.attention.self  BertSelfAttention  transformers' registry  cpu"
    assert row in re.sub(r" {2,}", "  ", capsys.readouterr().out)
    fastattn.restore(model)
    expected = model(**model.dummy_inputs).last_hidden_state
    torch.testing.assert_close(output.last_hidden_state, expected)


def test_the_call_of_readme_with_every_option() -> None:
    page = ROOT / "README.md"
    query, key, value = torch.randn(2, 8, 5, 16), torch.randn(2, 2, 7, 16), torch.randn(2, 2, 7, 4)
    names: dict[str, Any] = {"query": query, "key": key, "value": value}
    names |= {"bias": torch.randn(5, 7), "slopes": torch.rand(8), "sinks": torch.randn(8)}
    run(page, blocks(page)[1], names | {"table": torch.randn(8, 27)})
