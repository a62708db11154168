"""``capture`` returns every layer's weights and leaves the model unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastattn import capture, replace_mha
from fastattn.integrations.torch import activate
from fastattn.nn import (
    AdditiveAttention,
    BahdanauAttention,
    GlobalAttention,
    Hopfield,
    HopfieldLayer,
    HopfieldPooling,
    LuongAttention,
    MemN2N,
    MultiheadAttention,
)

EMBED, HEADS = 16, 4
PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2, [False] * 3 + [True] * 3])
SOURCE, TARGET = torch.randn(3, 6, EMBED), torch.randn(3, 5, EMBED)


class OfItself(nn.MultiheadAttention):
    """A client's class, with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


def transformer() -> nn.Module:
    return nn.Transformer(EMBED, HEADS, 2, 2, 32, batch_first=True)


def translate(model: nn.Module) -> Tensor:
    padding = {"src_key_padding_mask": PADDING, "memory_key_padding_mask": PADDING}
    return model(SOURCE, TARGET, **padding)


def network() -> MemN2N:
    return MemN2N(20, 8, hops=3, memory_size=6, random_noise=0.5)


def answer(model: nn.Module) -> Tensor:
    stories = torch.arange(60).view(3, 4, 5) % 20
    return model(stories, stories[:, 0])


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], dict[str, Any]]] = {
    "Transformer": (
        transformer,
        translate,
        {
            "encoder.layers.0.self_attn": (3, 4, 6, 6),
            "encoder.layers.1.self_attn": (3, 4, 6, 6),
            "decoder.layers.0.self_attn": (3, 4, 5, 5),
            "decoder.layers.0.multihead_attn": (3, 4, 5, 6),
            "decoder.layers.1.self_attn": (3, 4, 5, 5),
            "decoder.layers.1.multihead_attn": (3, 4, 5, 6),
        },
    ),
    "client's class": (
        lambda: OfItself(EMBED, HEADS, 0.5),
        lambda m: m(SOURCE),
        {"": (6, 4, 3, 3)},
    ),
    "MemN2N": (network, answer, {"": (3, 3, 6)}),
    "Bahdanau": (
        lambda: BahdanauAttention(8, query_size=EMBED, memory_size=EMBED, dropout=0.5),
        lambda m: m(TARGET, SOURCE, need_weights=False)[0],
        {"": (3, 5, 6)},
    ),
    "Bahdanau, one step, with weights": (
        lambda: BahdanauAttention(8, query_size=EMBED, memory_size=EMBED, dropout=0.5),
        lambda m: torch.cat([each.flatten() for each in m(TARGET[:, 0], SOURCE)]),
        {"": (3, 6)},
    ),
    "Luong": (
        lambda: LuongAttention(EMBED, dropout=0.5),
        lambda m: m(TARGET, SOURCE, need_weights=False)[0],
        {"": (3, 5, 6)},
    ),
    "always returns weights": (
        lambda: GlobalAttention(EMBED),
        lambda m: m(TARGET, SOURCE)[0],
        {"": (3, 5, 6)},
    ),
    "Keras": (
        lambda: AdditiveAttention(dim=EMBED, dropout=0.5),
        lambda m: m(TARGET, SOURCE),
        {"": (3, 5, 6)},
    ),
    "Hopfield": (
        lambda: Hopfield(EMBED, num_heads=HEADS, update_steps_max=2, dropout=0.5),
        lambda m: m((SOURCE, TARGET, SOURCE)),
        {"association_core": (3, 4, 5, 6)},
    ),
    "Hopfield, with an appended pattern and a limit a head": (
        lambda: Hopfield(
            EMBED,
            num_heads=2,
            update_steps_max=torch.tensor([0, 3]),
            concat_bias_pattern=True,
            dropout=0.5,
        ),
        lambda m: m((SOURCE, TARGET, SOURCE), stored_pattern_padding_mask=PADDING),
        {"association_core": (3, 2, 5, 7)},
    ),
    "Hopfield pooling": (
        lambda: HopfieldPooling(EMBED, num_heads=HEADS, quantity=2, dropout=0.5),
        lambda m: m(SOURCE),
        {"hopfield.association_core": (3, 4, 2, 6)},
    ),
    "Hopfield layer": (
        lambda: nn.Sequential(HopfieldLayer(EMBED, num_heads=HEADS, quantity=7, dropout=0.5)),
        lambda m: m(SOURCE),
        {"0.hopfield.association_core": (3, 4, 6, 7)},
    ),
    "per-head weights are asked for": (
        lambda: MultiheadAttention(EMBED, HEADS, 0.5),
        lambda m: m(SOURCE, SOURCE, SOURCE, average_attn_weights=False)[1],
        {"": (6, 4, 3, 3)},
    ),
    "unbatched": (
        lambda: MultiheadAttention(EMBED, HEADS),
        lambda m: m(SOURCE[0], SOURCE[1], SOURCE[1])[0],
        {"": (4, 6, 6)},
    ),
}


def state_of(model: nn.Module) -> list[dict[str, Any]]:
    """Every attribute of every module; hooks are among them."""
    return [
        {key: dict(x) if isinstance(x, dict) else x for key, x in module.__dict__.items()}
        for module in model.modules()
    ]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [False, True])
def test_outputs_and_model_are_unchanged(name: str, training: bool) -> None:
    make, run, shapes = MODELS[name]
    model = make().train(training)
    replace_mha(model)
    seed = 5
    grad = torch.enable_grad() if training else torch.no_grad()
    with grad:
        torch.manual_seed(seed)
        expected, then = run(model), torch.rand(1)
        before = state_of(model)
        torch.manual_seed(seed)
        with capture(model) as weights:
            out, next_number = run(model), torch.rand(1)
    assert torch.equal(out, expected)
    assert torch.equal(next_number, then)  # no random number was drawn
    assert out.requires_grad == training
    assert state_of(model) == before
    if name == "MemN2N" and not training:
        shapes = {"": (3, 3, 4)}  # no noise
    assert {key: tuple(each.shape) for key, (each,) in weights.items()} == shapes
    for (each,) in weights.values():
        assert not each.requires_grad
        if not training:
            sums = each.sum(-1)
            assert ((sums - 1).abs().lt(1e-5) | sums.eq(0)).all()


def test_associations_equal_the_modules() -> None:
    pooling = HopfieldPooling(EMBED, num_heads=HEADS, quantity=2, update_steps_max=3).eval()
    with capture(pooling) as weights:
        pooling(SOURCE, stored_pattern_padding_mask=PADDING)
    expected = pooling.get_association_matrix(SOURCE, PADDING)
    assert torch.equal(weights["hopfield.association_core"][0], expected)


def test_weights_have_the_dropout_of_the_call() -> None:
    """The weights reproduce the output."""
    attention = MultiheadAttention(EMBED, 1, dropout=0.5, batch_first=True)
    nn.init.eye_(attention.out_proj.weight)
    with capture(attention) as weights:
        out, none = attention(SOURCE, SOURCE, SOURCE, need_weights=False)
    assert none is None
    value = SOURCE @ attention.in_proj_weight[2 * EMBED :].T
    assert (weights[""][0] == 0).any()
    torch.testing.assert_close(out, weights[""][0][:, 0] @ value)


def test_weights_of_a_padded_batch_on_the_fast_path() -> None:
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(EMBED, HEADS, 32, batch_first=True), 2
    ).eval()
    replace_mha(encoder)
    with torch.no_grad():
        with capture(encoder) as nested:
            encoder(SOURCE, src_key_padding_mask=PADDING)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with capture(encoder) as padded:
                encoder(SOURCE, src_key_padding_mask=PADDING)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    for name, (each,) in nested.items():
        real = ~PADDING[:, None, :, None].expand_as(each)
        torch.testing.assert_close(each, padded[name][0].where(real, 0.0))


@pytest.mark.filterwarnings("ignore")  # nested tensors are a prototype
@pytest.mark.parametrize("is_causal", [False, True])
def test_weights_of_a_jagged_batch_equal_each_sequences(is_causal: bool) -> None:
    layer = MultiheadAttention(EMBED, HEADS, batch_first=True)
    rows = [SOURCE[0, :2], SOURCE[1]]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged)
    with capture(layer) as weights:
        layer(x, x, x, need_weights=False, is_causal=is_causal)
    (found,) = weights[""]
    for each, row in zip(found, rows, strict=True):
        mask = torch.ones(len(row), len(row), dtype=torch.bool).triu(1) if is_causal else None
        _, want = layer(*[row[None]] * 3, attn_mask=mask, average_attn_weights=False)
        torch.testing.assert_close(each[:, : len(row), : len(row)], want[0])


@pytest.mark.parametrize("padding", [None, PADDING])
def test_a_stock_model_is_captured_up_to_rounding(padding: Tensor | None) -> None:
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(EMBED, HEADS, 32, batch_first=True), 2
    ).eval()
    with torch.no_grad():
        expected, before = encoder(SOURCE, src_key_padding_mask=padding), state_of(encoder)
        with capture(encoder) as stock:
            out = encoder(SOURCE, src_key_padding_mask=padding)
        assert state_of(encoder) == before
        replace_mha(encoder)
        with capture(encoder) as ours:
            encoder(SOURCE, src_key_padding_mask=padding)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(stock, ours)


def test_every_call_is_kept() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(EMBED, EMBED)
            self.attention = BahdanauAttention(8)

        def forward(self, memory: Tensor) -> Tensor:
            state = memory[:, 0]
            for _ in range(4):
                state = self.cell(self.attention(state, memory, need_weights=False)[0], state)
            return state

    model = Decoder()
    expected = model(SOURCE)
    with capture(model) as weights:
        assert torch.equal(model(SOURCE), expected)
        assert len(weights["attention"]) == 4
        model(SOURCE)
    alignment = torch.stack(weights["attention"], 1)
    assert alignment.shape == (3, 8, 6)
    assert torch.equal(alignment[:, :4], alignment[:, 4:])


@pytest.mark.complete
def test_a_compiled_model_is_captured() -> None:
    model = transformer().eval()
    replace_mha(model)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        translate(compiled)
        with capture(compiled) as weights:
            translate(compiled)
    assert list(weights) == list(MODELS["Transformer"][2])


def test_an_error_leaves_the_model_unchanged() -> None:
    model = transformer()
    replace_mha(model)
    before = state_of(model)
    with pytest.raises(RuntimeError, match="must be equal"), capture(model):
        model(SOURCE, TARGET[:2])
    with pytest.raises(AssertionError), capture(model):
        model.encoder.layers[0].self_attn(SOURCE[..., :3], SOURCE, SOURCE)
    assert state_of(model) == before


class OfTheFunction(nn.Module):
    """As in timm: a projection, PyTorch's function, and nothing that returns weights."""

    def __init__(self, mask: Tensor | None = None, dropout_p: float = 0.0) -> None:
        super().__init__()
        self.qkv = nn.Linear(EMBED, 3 * EMBED)
        self.mask, self.dropout_p = mask, dropout_p

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind()

    def forward(self, x: Tensor) -> Tensor:
        out = nn.functional.scaled_dot_product_attention(
            *self.heads(x), self.mask, dropout_p=self.dropout_p, scale=0.3
        )
        return out.transpose(1, 2).flatten(-2)


def by_definition(layer: OfTheFunction, x: Tensor) -> Tensor:
    """The weights of the layer by their definition."""
    query, key, _ = layer.heads(x)
    scores = 0.3 * query @ key.mT
    return (scores if layer.mask is None else scores.where(layer.mask, -torch.inf)).softmax(-1)


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_calls_of_the_function_are_captured(served: bool, dropout_p: float) -> None:
    layers = OfTheFunction(dropout_p=dropout_p), OfTheFunction(torch.ones(6, 6).tril().bool())
    model = nn.Sequential(*layers, MultiheadSelf())
    with activate() if served else contextlib.nullcontext():
        torch.manual_seed(0)
        expected, then, before = model(SOURCE), torch.rand(1), state_of(model)
        torch.manual_seed(0)
        with capture(model) as weights:
            out, next_number = model(SOURCE), torch.rand(1)
            nn.functional.scaled_dot_product_attention(*3 * [SOURCE])  # not by the model
        assert torch.equal(out, expected)
        assert torch.equal(next_number, then)
        assert state_of(model) == before
    assert list(weights) == ["0", "1", "2.attention"]
    torch.testing.assert_close(weights["0"], [by_definition(layers[0], SOURCE).detach()])
    if dropout_p == 0:
        between = layers[0](SOURCE)
        torch.testing.assert_close(weights["1"], [by_definition(layers[1], between).detach()])
    assert weights["2.attention"][0].shape == (3, HEADS, 6, 6)
    assert not any(each.requires_grad for (each,) in weights.values())


class MultiheadSelf(nn.Module):
    """Within a layer that is recorded, the function it calls is not recorded once more."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(EMBED, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x, need_weights=False)[0]


def test_a_compiled_model_that_calls_the_function_is_captured() -> None:
    layer = OfTheFunction()
    compiled = torch.compile(nn.Sequential(layer), backend="eager")
    compiled(SOURCE)
    with capture(compiled) as weights:
        compiled(SOURCE)
    torch.testing.assert_close(weights, {"0": [by_definition(layer, SOURCE).detach()]})


def test_an_interrupt_leaves_nothing_behind() -> None:
    class Interrupted(OfTheFunction):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise KeyboardInterrupt

    model = nn.Sequential(Interrupted())
    before = state_of(model)
    with pytest.raises(KeyboardInterrupt), capture(model) as weights:
        model(SOURCE)
    assert list(weights) == ["0"]
    assert state_of(model) == before
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_call_that_has_no_weights_is_named() -> None:
    class Jagged(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    x = torch.nested.nested_tensor(
        [torch.randn(n, 2, 8) for n in (2, 3)], layout=torch.jagged
    ).transpose(1, 2)
    model = nn.ModuleDict({"layer": Jagged()})
    why = r"layer: a call of scaled_dot.*no weights"
    with pytest.raises(TypeError, match=why), capture(model):
        model["layer"](x)


def test_a_model_without_attention_is_an_error() -> None:
    why = r"no attention layer of the model ran.*fastattn.restore.*output_attentions"
    with pytest.raises(ValueError, match=why), capture(nn.Linear(EMBED, 2)) as weights:
        nn.functional.scaled_dot_product_attention(*3 * [SOURCE])
    assert weights == {}
    with pytest.raises(ZeroDivisionError), capture(nn.Linear(EMBED, 2)):
        raise ZeroDivisionError  # an error in the block takes precedence


def test_errors() -> None:
    def enter(model: Any) -> None:
        with capture(model):
            pass

    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got function"):
        enter(capture)
    with pytest.raises(ValueError, match="no attention layer"):
        enter(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"layer\.0.*OfItself.*replace_mha"):
        enter(nn.ModuleDict({"layer": nn.Sequential(OfItself(EMBED, HEADS))}))
    for attention in (MultiheadAttention(EMBED, HEADS), BahdanauAttention(3)):
        before = state_of(attention)
        with capture(attention):
            with pytest.raises(RuntimeError, match="captured already"):
                enter(attention)
            assert {"_watch", "forward"} & attention.__dict__.keys()
        assert state_of(attention) == before
