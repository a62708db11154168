"""``accelerate`` on one model or more of each library: outputs and all gradients in float64."""

from __future__ import annotations

import pytest
import torch
import transformers
from diffusers_models import draw, flux, unet
from libraries import library
from library_models import WIDTH, open_clip_model, torchvision_model, whisper_model
from library_runs import Adapted, accelerated, compared, initialized
from transformers_models import ENTRIES
from transformers_runs import assert_same, with_gradients

import fastattn
from fastattn.integrations.diffusers import NAME

# --- libraries with a registry --------------------------------------------------------------------


def test_diffusers() -> None:
    for build, calls in ((flux, "diffusers' registry"), (unet, "scaled_dot_product_attention")):
        model, inputs = build()
        initialized(model)
        with accelerated(model, calls), fastattn.trace() as seen, torch.no_grad():
            model(**inputs)
        assert {call.backend for call in seen} == {"cpu"}
        with fastattn.trace() as seen, torch.no_grad():
            model(**inputs)
        assert {call.backend for call in seen} == {""}


def test_accelerate_keeps_the_users_backend_of_diffusers() -> None:
    model, _ = flux()
    model.transformer_blocks[0].attn.set_attention_backend("_native_math")
    report = fastattn.accelerate(model)
    (part,) = report.unserved
    assert part.modules == ("transformer_blocks.0.attn",)
    assert "_native_math" in part.reason
    assert [part.modules for part in report.served] == [("single_transformer_blocks.0.attn",)]
    fastattn.restore(model)
    assert NAME not in library("diffusers").AttentionBackendName.__members__.values()
    processors = [module.processor for module in model.modules() if hasattr(module, "processor")]
    assert [x._attention_backend for x in processors] == ["_native_math", None]


ENTRY = {entry.name: entry for entry in ENTRIES}


def test_transformers() -> None:
    entry = ENTRY["LlamaForCausalLM"]
    model, inputs = entry.build(), entry.example()
    want = with_gradients(model, inputs)
    assert model.config._attn_implementation == "eager"
    # Some of its tensors are float32 for any dtype.
    with accelerated(model, "transformers' registry"):
        got = with_gradients(model, inputs)
        assert model.config._attn_implementation == "fastattn"
        with fastattn.trace() as seen, torch.no_grad():
            model(**inputs)
        assert {call.backend for call in seen} == {"cpu"}
    assert_same(got, want, 1e-6)
    assert model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="fastattn"):
        model.set_attn_implementation("fastattn")


def test_lora_on_transformers() -> None:
    peft = pytest.importorskip("peft")
    entry = ENTRY["LlamaForCausalLM"]
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model, inputs = peft.get_peft_model(entry.build(), config).double(), entry.example()
    for name, weight in model.named_parameters():
        if "lora_" in name:  # large ones would multiply the rounding of its norms in float32
            torch.nn.init.normal_(weight, std=0.02)
    want = with_gradients(model, inputs)
    with accelerated(model, "transformers' registry"):
        assert_same(with_gradients(model, inputs), want, 1e-6)
    assert model.config._attn_implementation == "eager"


def test_restore_gives_each_part_of_a_model_its_own_setting() -> None:
    config = transformers.CLIPConfig(
        text_config={"vocab_size": 99, "hidden_size": 16, "num_attention_heads": 2}
        | {"num_hidden_layers": 1, "intermediate_size": 16},
        vision_config={"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
        | {"intermediate_size": 16, "image_size": 32, "patch_size": 16},
    )
    config._attn_implementation = {"text_config": "eager", "vision_config": "sdpa"}
    model = transformers.CLIPModel(config)
    parts = (model, model.text_model, model.vision_model)
    before = [part.config._attn_implementation for part in parts]
    assert before[1:] == ["eager", "sdpa"]
    report = fastattn.accelerate(model)
    assert len(report.served[0].modules) == 2
    assert not report.unserved
    assert [part.config._attn_implementation for part in parts] == ["fastattn"] * 3
    fastattn.restore(model)
    assert [part.config._attn_implementation for part in parts] == before
    del model.vision_model  # transformers sets the configuration of a part that it does not find
    fastattn.accelerate(model)
    assert config.vision_config._attn_implementation == "fastattn"
    fastattn.restore(model)
    assert config.vision_config._attn_implementation == "sdpa"


def test_restore_keeps_later_settings_of_the_user() -> None:
    model = ENTRY["LlamaForCausalLM"].build()
    model.set_attn_implementation("sdpa")
    fastattn.accelerate(model)
    model.set_attn_implementation("eager")
    (part,) = fastattn.accelerate(model).parts
    assert part.backend
    model.set_attn_implementation("eager")
    fastattn.restore(model)
    assert model.config._attn_implementation == "eager"


def test_a_model_of_transformers_with_attention_of_its_own() -> None:
    config = transformers.BloomConfig(vocab_size=20, hidden_size=16, n_layer=1, n_head=2)
    model = transformers.BloomModel(config)
    (part,) = fastattn.accelerate(model).unserved
    assert part.modules == ("h.0.self_attention",)
    assert part.calls == "a product and a softmax"
    fastattn.restore(model)


def test_a_library_out_of_range_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ImportError("too old")

    model = ENTRY["LlamaForCausalLM"].build()
    monkeypatch.setattr("fastattn.integrations.transformers.register", refuse)
    (part,) = fastattn.accelerate(model).unserved
    assert part.reason == "ImportError: too old"
    assert model.config._attn_implementation == "eager"


# --- libraries without one ------------------------------------------------------------------------


def test_timm() -> None:
    model = library("timm").create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=16, embed_dim=16, depth=1, num_heads=2
    )
    initialized(model)
    adapted = Adapted(model, lambda model, x: model(x))
    compared(adapted, {"x": draw(2, 3, 32, 32)}, accelerated(model, "scaled_dot_product_attention"))
    swin = library("timm").create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1))
    (part,) = fastattn.accelerate(swin).unserved
    assert part.reason == "its fused_attn is False, so it computes attention step by step"


def test_open_clip() -> None:
    """A vision transformer and a text transformer of nn.MultiheadAttention."""
    model = open_clip_model()
    initialized(model)
    inputs = {"image": draw(2, 3, 32, 32), "text": torch.tensor([[1, 2, 3, 4, 19, 0]] * 2)}
    adapted = Adapted(model, lambda model, **inputs: model(**inputs)[:2])
    compared(adapted, inputs, accelerated(model, "nn.MultiheadAttention"))


def test_the_attention_pooling_of_open_clip() -> None:
    """Its ResNet calls the function of nn.MultiheadAttention, not the module."""
    library("open_clip")
    pool = library("open_clip.modified_resnet").AttentionPool2d(2, WIDTH, 2, 8)
    initialized(pool)
    adapted = Adapted(pool, lambda pool, x: pool(x))
    compared(
        adapted, {"x": draw(2, WIDTH, 2, 2)}, accelerated(pool, "multi_head_attention_forward")
    )


def test_whisper() -> None:
    model = whisper_model()
    initialized(model)
    inputs = {"mel": draw(2, 4, 10), "tokens": torch.tensor([[3, 1, 4, 1, 5, 9]] * 2)}
    compared(
        Adapted(model, lambda model, **inputs: model(**inputs)),
        inputs,
        accelerated(model, "scaled_dot_product_attention"),
    )


def test_x_transformers() -> None:
    library_ = library("x_transformers")
    decoder = library_.Decoder(dim=16, depth=1, heads=2, attn_dim_head=8, attn_flash=True)
    model = library_.TransformerWrapper(num_tokens=20, max_seq_len=8, attn_layers=decoder)
    initialized(model)
    inputs = {"x": torch.tensor([[3, 1, 4, 1, 5]] * 2)}
    compared(
        Adapted(model, lambda model, x: model(x)),
        inputs,
        accelerated(model, "scaled_dot_product_attention"),
    )
    without = library_.Decoder(dim=16, depth=1, heads=2, attn_dim_head=8)
    (part,) = fastattn.accelerate(without).unserved
    assert part.reason == "its flash is False, so it computes attention step by step"


def test_torchvision() -> None:
    model = torchvision_model()
    initialized(model)
    adapted = Adapted(model, lambda model, x: model(x))
    compared(adapted, {"x": draw(2, 3, 32, 32)}, accelerated(model, "nn.MultiheadAttention"))


def test_the_attention_of_windows_of_torchvision_is_not_served() -> None:
    swin = library("torchvision").models.SwinTransformer([4, 4], 8, [1, 1], [2, 2], [2, 2])
    (part,) = fastattn.accelerate(swin).unserved
    assert part.modules == ("features.1.0.attn", "features.3.0.attn")
    assert part.calls == "a product and a softmax"
    fastattn.restore(swin)
