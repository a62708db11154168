"""Models of transformers whose attention has a bias of content, beside stock."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fastattn

transformers = pytest.importorskip("transformers")
_relative = pytest.importorskip("fastattn.integrations.transformers._relative")
pytestmark = pytest.mark.usefixtures("seeded")

IDS = torch.randint(5, 90, (3, 70))
KEPT = torch.arange(70) < torch.tensor([70, 33, 5])[:, None]
TEXT = {"input_ids": IDS, "attention_mask": KEPT.long()}


def deberta(**more: Any) -> nn.Module:
    """A small DeBERTa encoder."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    terms = {"relative_attention": True, "position_buckets": 8, "max_position_embeddings": 40,
             "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm", "share_att_key": True,
             "num_hidden_layers": 3, "type_vocab_size": 0,
             "position_biased_input": False}  # fmt: skip
    model = transformers.DebertaV2Model(
        transformers.DebertaV2Config(vocab_size=99, **{**sizes, **terms, **more})
    )
    return with_weights(model)


def with_weights(model: nn.Module) -> nn.Module:
    """With larger weights than a new model has, whose attention is nearly a mean."""
    for x in model.parameters():
        nn.init.normal_(x, std=0.2)
    return model.eval()


def conformer(**more: Any) -> nn.Module:
    """A small encoder of Wav2Vec2-Conformer."""
    from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import (
        Wav2Vec2ConformerEncoder,
    )

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = transformers.Wav2Vec2ConformerConfig(
        num_hidden_layers=2, layerdrop=0.0, conv_depthwise_kernel_size=3, **sizes, **more
    )
    return with_weights(Wav2Vec2ConformerEncoder(config))


def parakeet() -> nn.Module:
    """A small Parakeet encoder."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = transformers.ParakeetEncoderConfig(
        num_hidden_layers=2, num_mel_bins=16, subsampling_conv_channels=8, layerdrop=0.0, **sizes
    )
    return with_weights(transformers.ParakeetEncoder(config))


def sam(name: str = "Sam", **more: Any) -> nn.Module:
    """A small vision encoder of Segment Anything, with windows and global attention."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "mlp_dim": 48}
    image = {"image_size": 64, "patch_size": 8, "window_size": 3, "global_attn_indexes": [1]}
    config = getattr(transformers, f"{name}VisionConfig")(output_channels=8, **sizes, **image)
    kind = getattr(transformers, f"{name}VisionModel")
    return with_weights(kind._from_config(config, **more))


def blip() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = transformers.BlipVisionConfig(
        num_hidden_layers=3, image_size=64, patch_size=8, **sizes
    )
    return with_weights(transformers.BlipVisionModel(config))


SOUND = {"hidden_states": torch.randn(3, 70, 32), "attention_mask": KEPT.long()}
FRAMES = torch.arange(300) < torch.tensor([300, 120, 33])[:, None]
SPECTRUM = {"input_features": torch.randn(3, 300, 16), "attention_mask": FRAMES.long()}
IMAGE = {"pixel_values": torch.randn(2, 3, 64, 64)}
OTHERS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "conformer": (conformer, SOUND),
    "conformer-unpadded": (conformer, {"hidden_states": SOUND["hidden_states"]}),
    "conformer-rotary": (lambda: conformer(position_embeddings_type="rotary"), SOUND),
    "parakeet": (parakeet, SPECTRUM),
    "parakeet-unpadded": (parakeet, {"input_features": SPECTRUM["input_features"]}),
    "sam": (sam, IMAGE),
    "sam-eager": (lambda: sam(attn_implementation="eager"), IMAGE),
    "sam-hq": (lambda: sam("SamHQ"), IMAGE),
    "blip": (blip, IMAGE),
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "v3": deberta,
    "v2-xlarge": lambda: deberta(conv_kernel_size=3, share_att_key=False),
    "linear": lambda: deberta(position_buckets=-1, max_relative_positions=12),
    "v3-some-rows": lambda: deberta(position_buckets=64, max_position_embeddings=512),
    "v3-few-rows": lambda: deberta(position_buckets=256, max_position_embeddings=512),
    "linear-few-rows": lambda: deberta(position_buckets=-1, max_relative_positions=99),
    "c2p": lambda: deberta(pos_att_type=["c2p"]),
    "p2c": lambda: deberta(pos_att_type=["p2c"], share_att_key=False),
    "none": lambda: deberta(pos_att_type=[]),
    "absolute": lambda: deberta(relative_attention=False),
}


def results(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    """The output without padding, and the gradients of all parameters."""
    out = model(**inputs).last_hidden_state
    if "attention_mask" in inputs:
        kept = inputs["attention_mask"].sum(1) * out.shape[1] // inputs["attention_mask"].shape[1]
        out = out[torch.arange(out.shape[1]) < kept[:, None]]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    parameters = [x for x in model.parameters() if x.requires_grad]
    grads = torch.autograd.grad((out * weights).sum(), parameters, allow_unused=True)
    return [out, *(x for x in grads if x is not None)]


@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_outputs_and_gradients_equal_stock(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, inputs = OTHERS[name] if name in OTHERS else (MODELS[name], TEXT)
    model = make()
    stock = copy.deepcopy(model)
    report = fastattn.accelerate(model, linear=False)
    assert {part.backend for part in report.parts} == {"cpu"}
    calls: list[Any] = []

    for function in (fastattn.scaled_dot_product_attention, fastattn.varlen_attention):

        def attend(*args: Any, function: Any = function, **options: Any) -> Any:
            calls.append(function)
            return function(*args, **options)

        monkeypatch.setattr(_relative, function.__name__, attend)
    found = results(model, inputs)
    layers = len(model.encoder.layer) if name in MODELS else 3 if inputs is IMAGE else 2
    packs = name in MODELS and name != "v2-xlarge"  # which has a convolution over the tokens
    function = fastattn.varlen_attention if packs else fastattn.scaled_dot_product_attention
    assert calls == ([] if name == "conformer-rotary" else layers * [function])
    want = results(stock, inputs)
    for x, y in zip(found, want, strict=True):
        assert_close(x, y, rtol=1e-3, atol=1e-3 * y.detach().abs().max().item() + 1e-5)
    if "conformer" not in name:  # its parametrized convolution cannot be pickled
        assert_close(results(pickle.loads(pickle.dumps(model)), inputs)[0], found[0])
    fastattn.restore(model)
    assert_close(results(model, inputs), want, rtol=0, atol=0)
    assert [type(x) for x in model.modules()] == [type(x) for x in stock.modules()]


def transcribed(model: Any) -> Any:
    """The tokens that a speech model generates."""
    out: Any = model.generate(SPECTRUM["input_features"].double(), FRAMES.long())
    return out if isinstance(out, Tensor) else out.sequences


def segmented(model: nn.Module) -> Tensor:
    """The masks that an image model predicts for points."""
    points = torch.tensor([[[[20.0, 30.0]]], [[[50.0, 10.0]]]]).double()
    return model(pixel_values=IMAGE["pixel_values"].double(), input_points=points).pred_masks > 0


@pytest.mark.parametrize("name", ["parakeet", "sam"])
def test_transcripts_and_masks_equal_stock(name: str) -> None:
    """In float64, where rounding does not decide between two tokens."""
    if name == "sam":
        parts = {"vision_config": {**sam().config.to_dict(), "num_pos_feats": 4}}
        for part in ("prompt_encoder_config", "mask_decoder_config"):
            parts[part] = {"hidden_size": 8, "image_size": 64, "patch_size": 8}
        parts["mask_decoder_config"] |= {"num_attention_heads": 2, "mlp_dim": 16}
        model, run = transformers.SamModel(transformers.SamConfig(**parts)), segmented
    else:
        config = transformers.ParakeetCTCConfig(
            vocab_size=30,
            pad_token_id=29,
            encoder_config=parakeet().config.to_dict(),
        )
        model, run = transformers.ParakeetForCTC(config), transcribed
    model = with_weights(model).double()
    with torch.no_grad():
        want = run(model)
        fastattn.accelerate(model)
        found = run(model)
    assert want.unique().numel() > 1
    assert torch.equal(found, want)


def test_tables_are_kept_until_a_value_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deberta(position_buckets=64, num_hidden_layers=1)
    stock = copy.deepcopy(model)
    fastattn.accelerate(model, linear=False)
    rows: list[int] = []
    key = model.encoder.layer[0].attention.self.key_proj

    def runs(text: Tensor = IDS) -> int:
        """How often a table was computed."""
        rows.clear()
        outs = [m(input_ids=text).last_hidden_state for m in (model, stock)]
        assert_close(*outs, rtol=1e-3, atol=1e-4)
        return sum(n == 2 * 64 + 1 for n in rows)

    counted = torch.nn.functional.linear
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda x, *w: (rows.append(x.shape[-2]), counted(x, *w))[1]
    )
    with torch.no_grad():
        assert [runs(), runs(), runs(IDS[:, :9])] == [2, 0, 0]
        for change in (
            lambda m: m.encoder.layer[0].attention.self.key_proj.weight.data[0].neg_(),
            lambda m: m.encoder.layer[0].attention.self.query_proj.bias.add_(1),
            lambda m: m.encoder.rel_embeddings.weight.data.mul_(2),
            lambda m: m.encoder.LayerNorm.bias.data.add_(1),
        ):
            change(model), change(stock)
            assert [runs(), runs()] == [2, 0]
        hook = key.register_forward_hook(lambda *_: None)
        assert [runs(), runs()] == [2, 2]
        hook.remove()
    with torch.inference_mode():
        assert [runs(), runs()] == [0, 0]
    assert model(input_ids=IDS).last_hidden_state.requires_grad
    assert len(_relative._tables_of) == 1
    fastattn.restore(model)
    assert not len(_relative._tables_of)


def test_no_matrix_of_pairs_is_stored() -> None:
    """Neither of scores nor of distances, while stock has both."""
    sizes = set()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            sizes.add(max((x.numel() for x in (result,) if isinstance(x, Tensor)), default=0))
            return result

    model, text = deberta(), {"input_ids": torch.randint(5, 90, (1, 600))}
    fastattn.accelerate(model)
    with Watch(), torch.no_grad():
        model(**text)
    assert max(sizes) < 600 * 600


@torch.no_grad()
def test_padding_is_not_computed() -> None:
    model = deberta()
    stock = copy.deepcopy(model)
    fastattn.accelerate(model)
    rows: list[int] = []
    # Its first tensor has the rows of a call; such a hook on a layer would want all of them.
    dense = model.encoder.layer[1].intermediate.dense
    counted, packed = torch.nn.functional.linear, 70 + 33 + 5
    gaps = KEPT.long() * (torch.arange(70) != 3)  # tokens are where they were
    kinds = [(KEPT.long(), packed), (KEPT.long().flip(1), packed), (gaps, 3 * 70)]
    for mask, count in kinds:
        for options in ({}, {"output_hidden_states": True}, {"output_attentions": True}):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    fastattn.nn.linear,
                    "linear",
                    lambda x, weight, bias: (
                        weight is dense.weight and rows.append(x.shape[:-1].numel()),
                        counted(x, weight, bias),
                    )[1],
                )
                got = model(IDS, mask, **options)
            want, kept = stock(IDS, mask, **options), mask.bool()
            assert rows.pop() == (3 * 70 if "output_attentions" in options else count)
            states = [(x.last_hidden_state, *(x.hidden_states or ())) for x in (got, want)]
            for x, y in zip(*states, strict=True):
                assert_close(x[kept], y[kept], rtol=1e-3, atol=1e-3)
            if count == packed and "output_attentions" not in options:
                assert not got.last_hidden_state[~kept].any()
    fastattn.restore(model)
    fastattn.accelerate(model, unpad=False)
    assert model(**TEXT).last_hidden_state[1, 40:].any()


def test_weights_and_dropout_and_other_arguments() -> None:
    model = deberta(attention_probs_dropout_prob=0.5)
    stock = copy.deepcopy(model)
    fastattn.accelerate(model)
    found, want = (m(**TEXT, output_attentions=True).attentions for m in (model, stock))
    for x, y in zip(found, want, strict=True):
        assert_close(x[0], y[0], rtol=1e-3, atol=1e-5)
    # A matrix of visible pairs, which hides no key from all.
    pairs = (torch.rand(3, 70, 70) < 0.7) | torch.eye(70, dtype=torch.bool)
    inputs = {"input_ids": IDS, "attention_mask": pairs.long()}
    with torch.no_grad():
        emb = stock.embeddings(IDS)
        outs = [m.encoder(emb, inputs["attention_mask"]).last_hidden_state for m in (model, stock)]
    assert_close(*outs, rtol=1e-3, atol=1e-3)
    model.train()
    out = model(**TEXT).last_hidden_state
    assert not torch.equal(out, model(**TEXT).last_hidden_state)
    assert out.isfinite().all()
