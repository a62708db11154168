"""Registering attention with transformers, and undoing it. Models: test_transformers.py."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers_inputs import IMAGES, TEXT
from transformers_models import ENTRIES, Inputs
from transformers_runs import assert_same, outputs, with_gradients

import fastattn
from fastattn.integrations.transformers import _registry, register

ENTRY = {entry.name: entry for entry in ENTRIES}


def served() -> dict[str, tuple[Any, Any]]:
    """The entries of both registries under each name that we may change."""
    registries = ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS
    return {
        name: tuple(dict(registry.items()).get(name) for registry in registries)
        for name in ("fastattn", "sdpa", "flex_attention")
    }


BEFORE = served()


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    """Each test ends with what transformers itself had registered."""
    assert BEFORE["fastattn"] == (None, None)
    yield
    assert served() == BEFORE


def test_a_name_is_served_within_the_block() -> None:
    with register() as registration:
        attention, mask = served()["fastattn"]
        assert attention is not None
        assert mask is not None
        assert served() == BEFORE | {"fastattn": (attention, mask)}
    assert served() == BEFORE
    registration.undo()


def test_an_error_in_the_block_undoes_it() -> None:
    with pytest.raises(RuntimeError, match="of a model"), register(override="sdpa"):
        raise RuntimeError("of a model")


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_undo_in_any_order_any_number_of_times(order: tuple[int, ...]) -> None:
    overrides = [None, "sdpa", "sdpa"]
    left = [register(override=override) for override in overrides]
    ours = served()["fastattn"]
    undone: set[int] = set()
    for which in order:
        undone.add(which)
        for _ in range(2):
            left[which].undo()
            remaining = [overrides[i] for i in range(3) if i not in undone]
            assert served()["fastattn"] == (ours if remaining else (None, None))
            assert served()["sdpa"] == (ours if "sdpa" in remaining else BEFORE["sdpa"])


def test_undo_keeps_foreign_registrations() -> None:
    def foreign(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("never called")

    registration = register(override="sdpa")
    AttentionInterface.register("sdpa", foreign)
    registration.undo()
    assert served()["sdpa"] == (foreign, BEFORE["sdpa"][1])
    AttentionInterface.register("sdpa", BEFORE["sdpa"][0])


@pytest.mark.parametrize("override", ["eager", "flash_attention_2", ""])
def test_only_sdpa_can_be_overridden(override: str) -> None:
    with pytest.raises(ValueError, match=f"must be None or 'sdpa', got {override!r}"):
        register(override=override)


def test_models_that_run_on_sdpa_are_served_by_the_override() -> None:
    """The weights show which function runs: PyTorch's returns none."""
    entry = ENTRY["LlamaForCausalLM"]
    model, inputs = entry.build(), entry.example() | {"output_attentions": True}
    model.set_attn_implementation("sdpa")
    want = outputs(model, inputs)
    with register(override="sdpa"):
        got = outputs(model, inputs)
    weights = {"attentions[0]", "attentions[1]"}
    assert got.keys() - want.keys() == weights
    assert_same({name: got[name] for name in want}, want)
    assert outputs(model, inputs).keys() == want.keys()


def test_after_undo_the_name_is_unknown_to_models() -> None:
    model = ENTRY["LlamaForCausalLM"].build()
    with register():
        model.set_attn_implementation("fastattn")
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="fastattn"):
        model.set_attn_implementation("fastattn")


def test_accelerate_serves_copies_of_a_configuration() -> None:
    """Attention across the frames of X-CLIP has a copy of the configuration of its images."""
    frames = {"num_frames": 2, "mit_hidden_size": 32, "mit_num_attention_heads": 4}
    config = transformers.XCLIPConfig(
        text_config=TEXT | {"eos_token_id": 2}, vision_config=IMAGES | frames, projection_dim=32
    )
    model = transformers.XCLIPModel(config).double().eval()
    inputs = {"pixel_values": torch.randn(1, 2, 3, 16, 16, dtype=torch.float64)}
    inputs["input_ids"] = torch.tensor([[5, 6, 2]])
    copied = model.mit.encoder.layers[0].self_attn.config
    want, before = outputs(model, inputs), copied._attn_implementation
    assert not fastattn.accelerate(model).unserved
    assert copied._attn_implementation == "fastattn"
    assert_same(outputs(model, inputs), want)
    fastattn.restore(model)
    assert copied._attn_implementation == before


def test_an_unknown_argument_is_named() -> None:
    """An argument that could change the result is never dropped silently; None changes nothing."""
    q = torch.randn(1, 2, 3, 4)
    with register():
        attend = ALL_ATTENTION_FUNCTIONS["fastattn"]
    module = torch.nn.Module()
    attend(module, q, q, q, None, logit_bias=None)
    with pytest.raises(TypeError, match="does not know the argument 'logit_bias' of Module"):
        attend(module, q, q, q, None, logit_bias=q)


@pytest.fixture
def nothing_is_loaded() -> Iterator[None]:
    """Forget the registries of transformers before and after a test."""
    _registry._registries.cache_clear()
    yield
    _registry._registries.cache_clear()


@pytest.mark.usefixtures("nothing_is_loaded")
def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"(?s)transformers>=5.0,<6.*fastattn\[transformers\]"):
        register()


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize("version", ["4.57.6", "6.0.0", "6.1.0.dev0", "unknown"])
def test_a_version_out_of_range(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("transformers")  # it replaces itself while it is used
    monkeypatch.setattr(module, "__version__", version)
    with pytest.raises(ImportError, match=rf"{version} is installed.*fastattn\[transformers\]"):
        register()


def test_import_loads_no_library() -> None:
    program = (
        "import sys, fastattn, fastattn.integrations.transformers\n"
        "import fastattn.integrations.diffusers\n"
        "fastattn.accelerate(fastattn.MultiheadAttention(8, 2))\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "assert not loaded & {'transformers', 'diffusers', 'peft', 'tokenizers'}, loaded"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


LONG = 1024  # a mask of all pairs, a byte each, is larger than anything else in the models here
SAID = "LlamaForCausalLM MistralForCausalLM Gemma2ForCausalLM ModernBertModel BertModel".split()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SAID)
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_no_tensor_of_all_pairs(name: str, side: str | None) -> None:
    """Padding, causality and a window need no tensor of all pairs, forward and backward."""
    entry = ENTRY[name]
    entry = dataclasses.replace(entry, config=entry.config | {"max_position_embeddings": LONG})
    tokens = torch.randint(3, 67, (1, LONG), generator=entry.generator())
    mask = torch.ones_like(tokens)
    if side is not None:
        mask[:, :9] = 0
    if side == "right":
        mask = mask.flip(-1)
    inputs = {"input_ids": tokens, "attention_mask": mask}
    model = entry.build().float()
    assert largest_allocation(model, inputs) >= LONG * LONG
    with register():
        model.set_attn_implementation("fastattn")
        assert largest_allocation(model, inputs) < LONG * LONG


def largest_allocation(model: torch.nn.Module, inputs: Inputs) -> int:
    """The most bytes that one operation of PyTorch allocates in a step of training."""
    with torch.profiler.profile(profile_memory=True) as profile:
        with_gradients(model, inputs)
    return max(event.self_cpu_memory_usage for event in profile.events())
