"""Encoders of transformers: layers as one native call, and no work on padding."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gemms import native_layers
from torch import Tensor, nn

import fastattn

transformers = pytest.importorskip("transformers", minversion="5.4")  # older layers return tuples

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
    """A small text model of the given architecture."""
    config = getattr(transformers, f"{name}Config")(vocab_size=99, **sizes)
    model: nn.Module = getattr(transformers, f"{name}Model")(config)
    return model.eval()


def whisper() -> nn.Module:
    """A small Whisper encoder."""
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    heads, sizes = {"encoder_attention_heads": 4}, {"encoder_layers": 3, "encoder_ffn_dim": 48}
    config = transformers.WhisperConfig(
        d_model=32, num_mel_bins=8, max_source_positions=20, **heads, **sizes
    )
    return WhisperEncoder(config).eval()


def image(name: str, **more: Any) -> nn.Module:
    """A small vision model of the given architecture."""
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
    "data2vec": (lambda: text("Data2VecText", **SIZES), PADDED),
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
    """The last hidden state."""
    with torch.no_grad():
        out: Tensor = model(**given, **more).last_hidden_state
    return out


def close(got: Tensor, want: Tensor, kept: Tensor | None = None) -> None:
    """Compare two hidden states, only where `kept` is True."""
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["bert", "roberta", "electra", "distilbert", "data2vec"])
def test_the_arguments_of_a_model_of_texts(name: str, dtype: torch.dtype, calls: Any) -> None:
    """Embeddings and layers are one call: types, positions, padding, packed texts, the pooler."""
    model = MODELS[name][0]().to(dtype)
    if name != "distilbert":
        model.embeddings.token_type_embeddings.weight = nn.Parameter(torch.randn(2, 32).to(dtype))
        model.embeddings.token_type_ids[:, 5:] = 1
    stock = copy.deepcopy(model)
    fastattn.accelerate(model)
    ids = IDS.clone()
    ids[0, 3] = ids[1, :2] = 1  # RoBERTa's padding, which has no position
    positions, types = torch.randint(2, 12, (4, 12)), torch.randint(0, 2, (4, 12))
    each: list[dict[str, Tensor]] = [{}, {"attention_mask": KEPT}, {"position_ids": positions[:1]}]
    each += [{"position_ids": positions, "attention_mask": KEPT.long().flip(1)}]
    each += [{"token_type_ids": types, "attention_mask": KEPT}] * (name != "distilbert")
    atol = 32 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    for more in each:
        with torch.no_grad():
            got, want = (x(input_ids=ids, **more) for x in (model, stock))
        kept = more.get("attention_mask", torch.ones(4, 12)).bool()
        assert type(got) is type(want)
        assert got.keys() == want.keys()
        assert torch.allclose(got[0][kept], want[0][kept], atol=atol)
        assert not got[0][~kept].any()
        if "pooler_output" in want and kept[:, 0].all():
            assert torch.allclose(got.pooler_output, want.pooler_output, atol=atol)
    starts = torch.nn.functional.pad(KEPT.sum(1), (1, 0)).cumsum(0, dtype=torch.int32)
    packed = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), starts)
    packed |= dict.fromkeys(("max_length_q", "max_length_k"), 12)
    packed["position_ids"] = positions[KEPT][None]
    got = last(model, {"input_ids": IDS[KEPT][None]}, **packed)
    want = last(stock, {**PADDED, "position_ids": positions})[KEPT]
    assert torch.allclose(got[0], want, atol=atol)
    assert calls.layers == [3] * (len(each) + 1)


def replaced(part: str, **attributes: Any) -> Any:
    """A change of attributes of a part of a model, and what undoes it."""

    def change(model: nn.Module) -> Any:
        module: Any = model.get_submodule(part) if part != "config" else model.config
        before = {name: getattr(module, name) for name in attributes}
        for name, value in attributes.items():
            setattr(module, name, value)
        return lambda: [setattr(module, name, value) for name, value in before.items()]

    return change


def hooked(part: str) -> Any:
    """A change of a model: a hook at one of its parts."""
    return lambda model: model.get_submodule(part).register_forward_pre_hook(lambda _, x: x).remove


@pytest.mark.parametrize(
    "change",
    [
        hooked("embeddings.word_embeddings"),
        hooked("embeddings"),
        hooked("encoder"),
        lambda _: nn.modules.module.register_module_forward_hook(lambda *_: None).remove,
        replaced("embeddings", LayerNorm=nn.Sequential(nn.LayerNorm(32))),
        replaced("embeddings.word_embeddings", max_norm=0.01),
        replaced("embeddings.dropout", training=True, p=0.5),
        replaced("encoder.layer.1.output.dropout", training=True, p=0.5),
        replaced("config", return_dict=False),
        replaced("config", output_hidden_states=True),
    ],
)
def test_what_changes_around_the_layers(change: Any, calls: Any) -> None:
    model, given = text("Bert", **SIZES), {"input_ids": IDS[:2]}
    stock = copy.deepcopy(model)
    fastattn.accelerate(model)
    with torch.no_grad():
        model(**given)
        undo = [change(each) for each in (model, stock)]
        torch.manual_seed(0)
        got = model(**given)
        torch.manual_seed(0)
        want = stock(**given)
    assert type(got) is type(want)
    close(got[0], want[0])
    assert 3 not in calls.layers[1:]
    for each in undo:
        each()
    close(last(model, given), last(stock, given))
    assert (calls.layers[0], calls.layers[-1]) == (3, 3)


def test_calls_of_a_text_model_that_run_its_own_forward(calls: Any) -> None:
    """Other arguments and errors; what reads its ``forward`` or is around it."""
    model = text("Bert", **SIZES)
    stock = copy.deepcopy(model)
    fastattn.accelerate(model)
    embeds = model.embeddings.word_embeddings(IDS).detach()
    mask = torch.ones(4, 1, 12, 12, dtype=torch.bool)
    for given in (
        {"inputs_embeds": embeds},
        {"input_ids": IDS.int()},
        {"input_ids": IDS, "attention_mask": mask},
        {"input_ids": IDS, "attention_mask": torch.ones(4, 12)},
        {"input_ids": IDS, "output_hidden_states": True},
    ):
        close(last(model, given), last(stock, given))
    with torch.no_grad():
        close(model(IDS, None, return_dict=False)[0], last(stock, TEXT))
        close(model(IDS, KEPT, torch.zeros_like(IDS))[0], last(stock, PADDED), KEPT)
    for wrong, error in (({"input_ids": IDS + 99}, IndexError), ({"input_ids": -IDS}, IndexError)):
        with pytest.raises(error):
            last(model, wrong)
    for wrong, error in (({}, ValueError), ({"position_ids": IDS}, ValueError)):
        with pytest.raises(error, match="exactly one of input_ids or inputs_embeds"):
            last(model, wrong)
    assert 3 not in calls.layers
    assert inspect.signature(model.forward) == inspect.signature(stock.forward)
    head = transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=99, **SIZES)
    ).eval()
    with torch.no_grad():
        want = head(**PADDED)[0]
        report = fastattn.accelerate(head)
        close(head(**PADDED)[0], want)
        assert calls.layers[-1] == 3
        part = report.layers[0]
        assert (part.modules, part.calls, part.backend) == (("bert",), "a text encoder", "cpu")
        head.bert.embeddings.LayerNorm.register_forward_hook(lambda *_: None)
        assert "hooks" in fastattn.accelerate(head).layers[0].reason


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


def test_calls_of_mpnet_that_run_stock_attention(calls: list[int]) -> None:
    """Masks of pairs, and of tokens between others; a hook at a layer; its table under a hook."""
    model = text("MPNet", **SIZES)
    for x in model.parameters():  # larger than in a new model, whose biases hardly count
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


def test_a_decoder_does_not_run_as_one_native_call(calls: list[int]) -> None:
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
