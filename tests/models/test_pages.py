"""The Python blocks of these pages do what the text says. The pages of docs/integrations need
libraries that are installed for tests/models alone.

The blocks of a page run one after the other, as in one session. Models that they would download
are made here, tiny and with random weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers_models import Build, flux, unet
from libraries import library
from library_models import (
    open_clip_model,
    sentence_modules,
    tabpfn_model,
    torchvision_model,
    whisper_model,
)
from library_runs import initialized
from snippets import blocks, run
from torch import nn

import fastattn

DOCS = Path(__file__).resolve().parents[2] / "docs"
ELSEWHERE = {"torch", "transformers"}  # tests/core/test_docs_snippets.py


def pipeline(build: Build, part: str) -> Any:
    """A pipeline that runs one step of its model, and gives the model's output as images."""
    model, inputs = build()
    initialized(model)
    made = SimpleNamespace(**{part: model})

    class Pipeline(SimpleNamespace):
        def __call__(self, prompt: str) -> Any:
            return SimpleNamespace(images=model(**inputs).sample.detach())

    return Pipeline(**vars(made))


def prepare_diffusers(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Small models in place of the pipelines that the page downloads."""
    models = {
        "black-forest-labs/FLUX.1-schnell": (flux, "transformer"),
        "stable-diffusion-v1-5/stable-diffusion-v1-5": (unet, "unet"),
    }
    diffusers = library("diffusers")
    patch.setattr(
        diffusers.DiffusionPipeline,
        "from_pretrained",
        staticmethod(lambda name: pipeline(*models[name])),
    )
    return {}


def check_diffusers(names: dict[str, Any]) -> None:
    """The stock pipeline must draw the same images, and is restored."""
    for ours in ("images", "more_images"):
        torch.testing.assert_close(names[ours], names[f"stock_{ours}"])
    with fastattn.trace() as calls:
        names["pipe"]("a cat")
    assert not any(call.backend for call in calls), "something is still served"


def prepare_timm(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Small models in place of the pretrained ones."""
    timm = library("timm")
    create_model = timm.create_model

    def tiny(name: str, pretrained: bool) -> nn.Module:
        torch.manual_seed(0)
        layers: dict[str, Any] = {"depth": 1, "num_heads": 3}
        if "swin" in name:
            layers = {"depths": (1, 1, 1, 1), "num_heads": (3, 3, 3, 3)}
        return create_model(name, embed_dim=24, num_classes=5, **layers).eval()

    patch.setattr(timm, "create_model", tiny)
    return {}


def check_timm(names: dict[str, Any]) -> None:
    """All attention is served, until the model is restored."""
    assert all(call.backend for call in names["calls"])
    assert sum(call.count for call in names["calls"]) == 4
    torch.testing.assert_close(names["logits"], names["swin"](names["images"]))
    with fastattn.trace() as calls:
        names["swin"](names["images"])
    assert not any(call.backend for call in calls), "something is still served"


def prepare_other_libraries(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A small sentence encoder in place of the pretrained one."""
    sentences = library("sentence_transformers")
    build = sentences.SentenceTransformer

    def sentence_transformer(name: str, device: str) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            return build(modules=sentence_modules(Path(folder)), device=device)

    patch.setattr(sentences, "SentenceTransformer", sentence_transformer)
    clip, speech = open_clip_model(), whisper_model()
    patch.setattr(library("open_clip"), "create_model", lambda name, pretrained: clip)
    patch.setattr(library("whisper"), "load_model", lambda name: speech)
    vision = torchvision_model()
    patch.setattr(library("torchvision").models, "vit_b_16", lambda weights: vision)
    library("x_transformers")
    return prepare_tabpfn(patch)


def check_other_libraries(names: dict[str, Any]) -> None:
    """Every model is accelerated, restored, and gives the stock results."""
    sentences = ["What runs here?", "The attention of a model of transformers, on fused kernels."]
    for model in ("model", "clip", "speech", "decoder", "vision"):
        report = fastattn.accelerate(names[model])
        assert report.served
        assert not report.unserved
        fastattn.restore(names[model])
    stock = names["model"].encode(sentences)
    for ours in ("embeddings", "packed"):
        torch.testing.assert_close(torch.tensor(names[ours]), torch.tensor(stock))
    check_tabpfn(names)


def prepare_tabpfn(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A small model behind the interface of TabPFN's classifier."""
    model = tabpfn_model()

    class Classifier:
        def __init__(self, device: str) -> None:
            self.models_ = [model]

        def fit(self, x: Any, labels: Any) -> None:
            self._trained = x, labels

        def predict_proba(self, x: Any) -> Any:
            trained, labels = self._trained
            rows = torch.cat([torch.from_numpy(trained), torch.from_numpy(x)])[:, None]
            logits = model(rows, torch.tensor(labels)[:, None].double(), task_type="multiclass")
            return logits.softmax(-1).detach().numpy()

    patch.setattr(library("tabpfn"), "TabPFNClassifier", Classifier, raising=False)
    return {}


def check_tabpfn(names: dict[str, Any]) -> None:
    """The probabilities equal the stock ones."""
    (model,) = names["classifier"].models_
    fastattn.restore(model)
    stock = names["classifier"].predict_proba(names["x"][100:])
    torch.testing.assert_close(*map(torch.from_numpy, (names["probabilities"], stock)))


class Mixed(nn.Module):
    """Supported and unsupported attention, in the dtype of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True)
        self.talks = TalkingHeads()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.talks(self.attn(x, x, x)[0])


class TalkingHeads(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.mT).softmax(-1) @ x


def prepare_mixed(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A model with attention that is served and attention that is not."""
    torch.manual_seed(0)
    return {"model": Mixed(), "inputs": torch.randn(2, 5, 16)}


def check_accelerate(names: dict[str, Any]) -> None:
    """One part is not served, as the page says."""
    (part,) = names["report"].unserved
    assert part.modules == ("talks",)
    assert [call.backend for call in names["calls"]] == ["cpu"]
    fastattn.restore(names["model"])


def check_migration(names: dict[str, Any]) -> None:
    """The outputs in 16 bits are near the exact ones."""
    exact = names["model"].float()(names["inputs"])
    for result in ("output", "output_16"):
        assert names[result].dtype is torch.bfloat16
        torch.testing.assert_close(names[result].float(), exact, rtol=0, atol=0.1)
    fastattn.restore(names["model"])
    query, key, value = (x[4:].transpose(0, 1) for x in map(names.get, ("query", "key", "value")))
    alone = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(names["packed"][4:], alone.transpose(0, 1))
    # The keys before are 0: 20 of them and the new one, of value `new_value`.
    score = (names["new_query"] * names["new_key"]).sum(-1, keepdim=True)[0] / 8
    weight = score.exp() / (20 + score.exp())
    torch.testing.assert_close(names["decoded"][0], weight * names["new_value"][0])


Page = tuple[Callable[[pytest.MonkeyPatch], dict[str, Any]], Callable[[dict[str, Any]], None]]
PAGES: dict[str, Page] = {
    "accelerate": (prepare_mixed, check_accelerate),
    "integrations/diffusers": (prepare_diffusers, check_diffusers),
    "integrations/other_libraries": (prepare_other_libraries, check_other_libraries),
    "integrations/timm": (prepare_timm, check_timm),
    "migration": (prepare_mixed, check_migration),
}


@pytest.mark.parametrize("name", PAGES)
def test_pages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, check = PAGES[name]
    page = DOCS / f"{name}.md"
    names = prepare(monkeypatch)
    for block in blocks(page):
        run(page, block, names)
    check(names)


def test_every_page_is_run() -> None:
    pages = {f"integrations/{page.stem}" for page in (DOCS / "integrations").glob("*.md")}
    assert pages <= PAGES.keys() | {f"integrations/{name}" for name in ELSEWHERE}
