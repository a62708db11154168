"""The Python blocks of docs/integrations do what the text says, where they take a library that is
installed for tests/models alone.

The blocks of a page run one after the other, as in one session. What they would download is made
here, tiny and with random weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers_models import Build, flux, unet
from libraries import library
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
    for ours in ("images", "more_images"):
        torch.testing.assert_close(names[ours], names[f"stock_{ours}"])
    with fastattn.trace() as calls:
        names["pipe"]("a cat")
    assert not any(call.backend for call in calls), "something is still served"


def prepare_timm(patch: pytest.MonkeyPatch) -> dict[str, Any]:
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
    assert all(call.backend for call in names["calls"])
    assert sum(call.count for call in names["calls"]) == 4
    torch.testing.assert_close(names["logits"], names["swin"](names["images"]))
    with fastattn.trace() as calls:
        names["swin"](names["images"])
    assert not any(call.backend for call in calls), "something is still served"


Page = tuple[Callable[[pytest.MonkeyPatch], dict[str, Any]], Callable[[dict[str, Any]], None]]
PAGES: dict[str, Page] = {
    "diffusers": (prepare_diffusers, check_diffusers),
    "timm": (prepare_timm, check_timm),
}


@pytest.mark.parametrize("name", PAGES)
def test_pages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, check = PAGES[name]
    page = DOCS / "integrations" / f"{name}.md"
    names = prepare(monkeypatch)
    for block in blocks(page):
        run(page, block, names)
    check(names)


def test_every_page_is_run() -> None:
    pages = {page.stem for page in (DOCS / "integrations").glob("*.md")}
    assert pages == PAGES.keys() | ELSEWHERE
