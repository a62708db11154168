"""Encoders of transformers: layers as one native call, and no work on padding."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gemms import native_layers
from torch import Tensor, nn

import fastattn

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
}
IDS = torch.randint(5, 90, (4, 12))
KEPT = torch.arange(12) < torch.tensor([12, 5, 7, 3])[:, None]
IMAGE = {"pixel_values": torch.randn(2, 3, 32, 32)}
TEXT, PADDED = {"input_ids": IDS}, {"input_ids": IDS, "attention_mask": KEPT.long()}


def text(name: str, **sizes: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(vocab_size=99, **sizes)
    model: nn.Module = getattr(transformers, f"{name}Model")(config)
    return model.eval()


def whisper() -> nn.Module:
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    heads, sizes = {"encoder_attention_heads": 4}, {"encoder_layers": 3, "encoder_ffn_dim": 48}
    config = transformers.WhisperConfig(
        d_model=32, num_mel_bins=8, max_source_positions=20, **heads, **sizes
    )
    return WhisperEncoder(config).eval()


def image(name: str, **more: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(image_size=32, patch_size=8, **SIZES, **more)
    model: nn.Module = getattr(
        transformers,
        f"{name.removesuffix('Vision')}VisionModel" if "Vision" in name else f"{name}Model",
    )(config)
    return model.eval()


DISTIL = {"dim": 32, "hidden_dim": 48, "n_heads": 4, "n_layers": 3}
MODELS = {
    "bert": (lambda: text("Bert", **SIZES), PADDED),
    "roberta": (lambda: text("Roberta", **SIZES), PADDED),
    "xlm-roberta": (lambda: text("XLMRoberta", **SIZES), PADDED),
    "mpnet": (lambda: text("MPNet", **SIZES), PADDED),
    "electra": (lambda: text("Electra", embedding_size=32, **SIZES), PADDED),
    "camembert": (lambda: text("Camembert", **SIZES), PADDED),
    "distilbert": (lambda: text("DistilBert", **DISTIL), PADDED),
    "vit": (lambda: image("ViT"), IMAGE),
    "deit": (lambda: image("DeiT"), IMAGE),
    "dinov2": (lambda: image("Dinov2", layerscale_value=0.3, mlp_ratio=2), IMAGE),
    "dinov2-registers": (lambda: image("Dinov2WithRegisters", layerscale_value=0.3), IMAGE),
    "siglip": (lambda: image("SiglipVision"), IMAGE),
    "whisper": (whisper, {"input_features": torch.randn(2, 8, 40)}),
}


@pytest.fixture(autouse=True)
def calls() -> Iterator[list[int]]:
    """The rows of each native call; layers of any size and dtype take it."""
    with native_layers() as called:
        yield called


def last(model: nn.Module, given: dict[str, Tensor], **more: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**given, **more).last_hidden_state
    return out


def close(got: Tensor, want: Tensor, kept: Tensor | None = None) -> None:
    if kept is not None:
        got, want = got[kept], want[kept]
    assert torch.allclose(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_a_model(name: str, calls: list[int]) -> None:
    build, given = MODELS[name]
    model = build()
    stock = copy.deepcopy(model)
    fastattn.accelerate(model)
    kept = KEPT if given is PADDED else None
    got, want = last(model, given), last(stock, given)
    close(got, want, kept)
    assert len(calls) == 3
    if kept is not None:
        assert calls == [int(KEPT.sum())] * 3
        assert not got[~kept].any()
    with torch.no_grad():
        half = model.bfloat16()(
            **{k: v.bfloat16() if v.is_floating_point() else v for k, v in given.items()}
        )
    assert half.last_hidden_state.dtype == torch.bfloat16
    assert len(calls) == 6
    model.float()
    pickled = pickle.loads(pickle.dumps(model))
    assert torch.equal(last(pickled, given), last(model, given))
    fastattn.restore(model)
    assert [type(x) for x in model.modules()] == [type(x) for x in stock.modules()]


@pytest.mark.parametrize("name", ["bert", "distilbert", "mpnet", "vit"])
def test_hidden_states_and_weights(name: str, calls: list[int]) -> None:
    build, given = MODELS[name]
    model = build()
    stock = copy.deepcopy(model)
    stock.set_attn_implementation("eager")
    fastattn.accelerate(model)
    with torch.no_grad():
        got, want = (
            x(**given, output_hidden_states=True, output_attentions=True) for x in (model, stock)
        )
    assert not calls  # the layer gives no weights
    kept = KEPT if given is PADDED else None
    for x, y in zip(got.hidden_states, want.hidden_states, strict=True):
        close(x, y, kept)
    for x, y in zip(got.attentions, want.attentions, strict=True):
        close(x[:, :, :3], y[:, :, :3])  # every text has three tokens
    with torch.no_grad():
        got = model(**given, output_hidden_states=True)
    close(got.hidden_states[1], want.hidden_states[1], kept)
    close(last(model, given), last(stock, given), kept)  # what recording leaves behind
    assert len(calls) >= 3


def test_unpad_false_keeps_the_values_of_padding(calls: list[int]) -> None:
    model = text("Bert", **SIZES)
    want = last(model, PADDED)
    fastattn.accelerate(model, unpad=False)
    close(last(model, PADDED), want)
    assert not calls  # a layer with padding is no native call
    last(model, TEXT)
    assert calls == [48] * 3
    with pytest.raises(TypeError, match="unpad must be a bool, got int"):
        fastattn.accelerate(model, unpad=1)  # type: ignore[arg-type]


def test_what_mpnet_leaves_to_stock(calls: list[int]) -> None:
    """Masks of pairs, and of tokens between others; a hook at a layer; its table under a hook."""
    model = text("MPNet", **SIZES)
    for x in model.parameters():  # larger than those of a new model, whose biases hardly count
        nn.init.normal_(x, std=0.2)
    stock = copy.deepcopy(model)
    fastattn.accelerate(model)
    ids = torch.randint(5, 90, (2, 300))
    close(last(model, {"input_ids": ids}), last(stock, {"input_ids": ids}))
    assert calls == [600] * 3
    pairs = {"input_ids": IDS, "attention_mask": torch.ones(4, 1, 12, 12).tril().bool()}
    gap = torch.ones(4, 12).long().index_fill(1, torch.arange(4, 8), 0)
    for given, kept in ((pairs, None), ({"input_ids": IDS, "attention_mask": gap}, gap.bool())):
        close(last(model, given), last(stock, given), kept)
    for module in (model.encoder.layer[1], model.encoder.relative_attention_bias):
        hook = module.register_forward_hook(lambda *_: None)
        close(last(model, PADDED), last(stock, PADDED), KEPT)
        hook.remove()
    assert len(calls) == 3
    padding = {"input_ids": IDS, "attention_mask": torch.zeros(4, 12, dtype=torch.long)}
    assert last(model, padding).shape == (4, 12, 32)
    (part,) = fastattn.accelerate(model).layers
    assert (part.kind, part.backend) == ("MPNetEncoder", "cpu")


def test_training_and_gradients(calls: list[int]) -> None:
    model = text("Bert", **SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    stock = copy.deepcopy(model)
    fastattn.accelerate(model)
    for train in (True, False):
        for each in (model, stock):
            each.train(train).zero_grad()
            each(**PADDED).last_hidden_state[KEPT].square().sum().backward()
        for p, q in zip(model.parameters(), stock.parameters(), strict=True):
            if q.grad is not None:
                assert torch.allclose(p.grad, q.grad, atol=1e-3, rtol=1e-3)
    assert not calls


def test_what_is_changed_after_accelerate(calls: list[int]) -> None:
    """Hooks and other modules inside a layer, and another implementation of attention."""
    model = text("Bert", **SIZES)
    stock = copy.deepcopy(model)
    fastattn.accelerate(model)
    seen: list[torch.Size] = []
    layer = model.encoder.layer[1]
    hook = layer.output.dense.register_forward_hook(lambda *x: seen.append(x[2].shape))
    close(last(model, PADDED), last(stock, PADDED), KEPT)
    assert seen == [(4, 12, 32)]  # a hook inside sees the shapes of PyTorch
    hook.remove()
    calls.clear()
    close(last(model, TEXT), last(stock, TEXT))
    assert len(calls) == 3
    for each in (model, stock):
        each.encoder.layer[0].intermediate.dense = nn.Sequential(nn.Linear(32, 48))
    stock.load_state_dict(model.state_dict())
    close(last(model, TEXT), last(stock, TEXT))
    assert len(calls) == 5
    model.set_attn_implementation("eager")
    close(last(model, PADDED), last(stock, PADDED))
    assert len(calls) == 5


@pytest.mark.parametrize("name", ["bert", "distilbert", "mpnet"])
def test_all_layers_are_one_call(name: str, calls: Any) -> None:
    """With padding and without; not where a layer has a hook or a forward of its own."""
    model = MODELS[name][0]()
    stock = copy.deepcopy(model)
    fastattn.accelerate(model)
    given = (PADDED, {**PADDED, "attention_mask": torch.ones(4, 12, dtype=torch.long)})
    stack = model.encoder if name != "distilbert" else model.transformer
    for each in given:
        close(last(model, each), last(stock, each), each["attention_mask"].bool())
    assert calls.layers == [3, 3]
    hook = stack.layer[1].register_forward_pre_hook(lambda _, x: (x[0].flip(-1), *x[1:]))
    assert not torch.allclose(last(model, PADDED), last(stock, PADDED), atol=1e-2)
    hook.remove()
    stack.layer[1].forward = lambda x, *_, **__: x
    doubled = copy.deepcopy(stock)
    del (doubled.encoder if name != "distilbert" else doubled.transformer).layer[1]
    if name != "mpnet":  # its stock layers return tuples
        close(last(model, given[1]), last(doubled, given[1]))
    assert calls.layers[2:] == [1] * len(calls.layers[2:])


def test_a_decoder_is_none(calls: list[int]) -> None:
    model = text("Bert", is_decoder=True, **SIZES)
    stock = copy.deepcopy(model)
    fastattn.accelerate(model)
    close(last(model, PADDED), last(stock, PADDED), KEPT)
    close(last(model, TEXT), last(stock, TEXT))
    assert not calls


def test_other_masks_than_padding(calls: list[int]) -> None:
    model = text("Bert", **SIZES)
    stock = copy.deepcopy(model)
    fastattn.accelerate(model)
    pairs = torch.ones(4, 1, 12, 12).tril().bool()
    given = {"input_ids": IDS, "attention_mask": pairs}
    close(last(model, given), last(stock, given))
    empty = KEPT.clone()
    empty[2] = False  # a text of padding only
    given = {"input_ids": IDS, "attention_mask": empty.long()}
    close(last(model, given), last(stock, given), empty)
    assert calls == [int(empty.sum())] * 3
