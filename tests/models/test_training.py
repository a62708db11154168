"""Training steps and ``torch.compile`` of accelerated models, one or more of each library."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers_models import dit, draw, flux, qwen_image, unet, wan
from libraries import library
from library_models import open_clip_model, sentence_modules, torchvision_model, whisper_model
from library_runs import Adapted, initialized
from test_timm import MODELS as TIMM
from torch import Tensor, nn
from transformers_runs import Results, assert_same, tensors, weighted_sum, with_gradients

import fastattn

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4  # all is in float32; a key too many in a window makes a difference of 0.07 or more
Example = tuple[nn.Module, dict[str, Any]]


def of_images(model: nn.Module, size: int) -> Example:
    """The model and two random images."""
    return Adapted(model, lambda model, x: model(x)), {"x": draw(2, 3, size, size)}


def of_timm(name: str) -> Example:
    """A small timm model that calls fused attention, with images."""
    timm = library("timm")
    timm.layers.set_fused_attn(True, experimental=True)  # read when a module is made
    model = timm.create_model(name, **TIMM[name])
    timm.layers.set_fused_attn(True)
    return of_images(model, TIMM[name]["img_size"])


def open_clip() -> Example:
    """A small CLIP model with images and texts."""
    inputs = {"image": draw(2, 3, 32, 32), "text": torch.tensor([[1, 2, 3, 4, 19, 0]] * 2)}
    return Adapted(open_clip_model(), lambda model, **inputs: model(**inputs)[:2]), inputs


def whisper() -> Example:
    """A small Whisper model with spectrograms and tokens."""
    inputs = {"mel": draw(2, 4, 10), "tokens": torch.tensor([[3, 1, 4, 1, 5, 9]] * 2)}
    return Adapted(whisper_model(), lambda model, **inputs: model(**inputs)), inputs


def x_transformers() -> Example:
    """A small decoder of x-transformers, with tokens."""
    library_ = library("x_transformers")
    decoder = library_.Decoder(dim=16, depth=1, heads=2, attn_dim_head=8, attn_flash=True)
    model = library_.TransformerWrapper(num_tokens=20, max_seq_len=8, attn_layers=decoder)
    return Adapted(model, lambda model, x: model(x)), {"x": torch.tensor([[3, 1, 4, 1, 5]] * 2)}


def sentence_transformers(folder: Path) -> Example:
    """A small sentence encoder, with padded tokens."""
    model = nn.Sequential(*sentence_modules(folder))
    inputs = {
        "input_ids": torch.tensor([[2, 4, 5, 3], [2, 6, 3, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
    }

    def embed(model: nn.Module, **inputs: Tensor) -> Tensor:
        return model(dict(inputs))["sentence_embedding"]

    return Adapted(model, embed), inputs


EXAMPLES: dict[str, Callable[..., Example]] = {
    build.__name__: build
    for build in (flux, qwen_image, wan, dit, unet, open_clip, whisper, x_transformers)
} | {"torchvision": lambda: of_images(torchvision_model(), 32)}


@pytest.fixture(params=[*EXAMPLES, "sentence_transformers", *TIMM])
def example(request: pytest.FixtureRequest, tmp_path: Path) -> Example:
    """A model of the parametrized library in float32, with its inputs."""
    name = request.param
    if name == "sentence_transformers":
        model, inputs = sentence_transformers(tmp_path)
    else:
        model, inputs = of_timm(name) if name in TIMM else EXAMPLES[name]()
    initialized(model)
    return model.float(), {name: as_float(x) for name, x in inputs.items()}


def as_float(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x


def test_training_steps(example: Example) -> None:
    model, inputs = example
    before = {name: x.clone() for name, x in model.state_dict().items()}
    want = trained(model, inputs)
    model.load_state_dict(before)
    with served(model):
        got = trained(model, inputs)
    assert_same(got, want, TOLERANCE)


def trained(model: nn.Module, inputs: dict[str, Any]) -> Results:
    """The parameters after three steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        weighted_sum(dict(tensors(model(**inputs)))).backward()
        optimizer.step()
    return {name: x.detach().clone() for name, x in model.named_parameters()}


def test_a_compiled_model(example: Example) -> None:
    model, inputs = example
    want = with_gradients(model, inputs)
    torch._dynamo.reset()
    with served(model):
        got = with_gradients(torch.compile(model, backend="aot_eager"), inputs)
    prefix = "_orig_mod."
    assert_same({name.replace(prefix, ""): x for name, x in got.items()}, want, TOLERANCE)


@contextlib.contextmanager
def served(model: nn.Module) -> Any:
    """Accelerate the model; all of its attention must be served."""
    report = fastattn.accelerate(model)
    try:
        assert report.served
        assert not report.unserved, report
        yield
    finally:
        fastattn.restore(model)
