"""The Transformer: equal to PyTorch's and the paper's; one pass and many steps agree."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fastattn
from fastattn.nn import (
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from fastattn.nn._causal import LayerAttention

E, H, FEED = 16, 4, 24
SIZES = (E, H, FEED)
DOUBLE: dict[str, Any] = {"dtype": torch.float64}
FUTURE = nn.Transformer.generate_square_subsequent_mask
PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2, [False] * 3 + [True] * 3])


def draw(*shape: int) -> Tensor:
    """Random numbers in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), **DOUBLE)


SOURCE, TARGET = draw(3, 6, E), draw(3, 5, E)

OPTIONS = {
    "plain": {},
    "norm first": {"norm_first": True},
    "gelu": {"activation": "gelu"},
    "silu": {"activation": F.silu},
    "no bias": {"bias": False},
    "sequence first": {"batch_first": False},
    "eps": {"layer_norm_eps": 0.1},
}


def pair(make: Callable[[Any], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Ours and PyTorch's, from one seed."""
    made = []
    for library in (fastattn.nn, nn):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "enable_nested_tensor")
            made.append(make(library))
    return made[0], made[1]


def stacks(library: Any, **options: Any) -> nn.Module:
    """A Transformer of two layers of fastattn.nn or torch.nn."""
    given = {"dropout": 0.0, "batch_first": True, **DOUBLE, **options}
    return library.Transformer(E, H, 2, 2, FEED, **given)


CALLS: dict[str, Callable[[Any, Callable[[Tensor], Tensor]], Tensor]] = {
    "no mask": lambda m, f: m(f(SOURCE), f(TARGET)),
    "causal": lambda m, f: m(f(SOURCE), f(TARGET), tgt_mask=FUTURE(5, **DOUBLE)),
    "padding": lambda m, f: m(
        f(SOURCE),
        f(TARGET),
        tgt_mask=FUTURE(5, **DOUBLE),
        src_key_padding_mask=PADDING,
        tgt_key_padding_mask=PADDING[:, :5],
        memory_key_padding_mask=PADDING,
    ),
    "masks": lambda m, f: m(
        f(SOURCE), f(TARGET), draw(6, 6).relu(), draw(12, 5, 5), draw(5, 6), tgt_is_causal=False
    ),
    "unbatched": lambda m, f: m(SOURCE[0], TARGET[0]),
}


@pytest.mark.sampled
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("training", [False, True])
def test_agrees_with_pytorch(call: str, options: str, training: bool) -> None:
    ours, stock = pair(lambda library: stacks(library, **OPTIONS[options]).train(training))
    flip = OPTIONS[options].get("batch_first", True)

    def results(model: nn.Module) -> tuple[Tensor, list[Any]]:
        with torch.set_grad_enabled(training):
            out = CALLS[call](model, lambda x: x if flip else x.transpose(0, 1))
        if training:
            out.square().sum().backward()
        return out, [p.grad for p in model.parameters()]

    out, grads = results(ours)
    # PyTorch's fast path reads a floating mask as a boolean one: entries but 0 are hidden.
    torch.backends.mha.set_fastpath_enabled(call != "masks")
    try:
        expected, wanted = results(stock)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(grads, wanted, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    "make",
    [
        lambda nn: stacks(nn),
        lambda nn: nn.TransformerEncoderLayer(E, H, FEED, 0.3, "gelu", 1e-3, True, True, False),
        lambda nn: nn.TransformerDecoderLayer(E, H, norm_first=True),
        lambda nn: nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, batch_first=True), 3),
        lambda nn: nn.TransformerDecoder(
            nn.TransformerDecoderLayer(E, H), 3, norm=torch.nn.LayerNorm(E)
        ),
    ],
)
def test_parameters_equal_pytorchs_in_name_and_value(make: Callable[[Any], nn.Module]) -> None:
    ours, stock = pair(make)
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert all(map(torch.equal, ours.state_dict().values(), stock.state_dict().values()))
    stock.load_state_dict(ours.state_dict())
    ours.load_state_dict(stock.state_dict())
    assert isinstance(ours, type(stock))
    for module in ours.modules():
        if isinstance(module, nn.MultiheadAttention):
            assert isinstance(module, fastattn.MultiheadAttention)


def test_a_stack_takes_pytorchs_layers() -> None:
    layer = nn.TransformerEncoderLayer(E, H, batch_first=True)
    encoder = TransformerEncoder(layer, 2)
    assert all(isinstance(each.self_attn, fastattn.MultiheadAttention) for each in encoder.layers)
    assert type(layer.self_attn) is nn.MultiheadAttention  # the given layer is unchanged
    decoder = TransformerDecoder(nn.TransformerDecoderLayer(E, H), 2)
    with pytest.raises(TypeError, match=r"fastattn\.nn\.TransformerDecoderLayer, got Transf"):
        decoder.new_cache()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.parametrize("length", [6, 40])
def test_causal_needs_no_mask(training: bool, padding: Tensor | None, length: int) -> None:
    """Small and large sizes; with padding in eval mode, on NestedTensors."""
    x = draw(3, length, E)
    if padding is not None and length > 6:
        padding = F.pad(padding, (0, length - 6), value=True)
    layer = TransformerEncoderLayer(E, H, FEED, 0.0, batch_first=True, **DOUBLE).train(training)
    encoder = TransformerEncoder(layer, 2)
    stock = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(E, H, FEED, 0.0, batch_first=True, **DOUBLE).train(), 2
    )
    stock.load_state_dict(encoder.state_dict())
    with torch.set_grad_enabled(training):
        out = encoder(x, src_key_padding_mask=padding, is_causal=True)
        expected = stock(x, FUTURE(length, **DOUBLE), padding)
    real = ... if padding is None else ~padding
    torch.testing.assert_close(out[real], expected[real], rtol=1e-9, atol=1e-9)


def test_padding_is_not_read() -> None:
    model = stacks(fastattn.nn)
    hidden = SOURCE.masked_fill(PADDING[..., None], float("nan"))
    padding = {"src_key_padding_mask": PADDING, "memory_key_padding_mask": PADDING}
    expected = model(SOURCE, TARGET, **padding)
    memory = model.encode(SOURCE, None, PADDING).masked_fill(PADDING[..., None], float("nan"))
    assert torch.equal(model.decode(TARGET, memory, memory_key_padding_mask=PADDING), expected)
    assert model.eval().encode(hidden, None, PADDING)[~PADDING].isfinite().all()


@pytest.mark.parametrize("length", [6, 0])
@pytest.mark.parametrize("kind", ["boolean", "minus infinity"])
@pytest.mark.parametrize("options", ["plain", "norm first", "sequence first"])
def test_a_batch_of_padding_only(options: str, kind: str, length: int) -> None:
    """Attention is 0 in every mode: a position depends on itself alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "enable_nested_tensor")
        sizes = {"batch_first": True, **OPTIONS[options], **DOUBLE}
        encoder = TransformerEncoder(TransformerEncoderLayer(E, H, FEED, 0.0, **sizes), 2)
    x = SOURCE[:, :length] if sizes["batch_first"] else SOURCE[:, :length].transpose(0, 1)
    padding = torch.ones(3, length, dtype=torch.bool)
    if kind == "minus infinity":
        padding = torch.zeros(3, length, **DOUBLE).masked_fill(padding, -math.inf)
    expected = encoder(x, src_key_padding_mask=padding)
    alone = encoder(x.flatten(0, 1)[:, None] if sizes["batch_first"] else x.flatten(0, 1)[None],
                    src_key_padding_mask=padding.flatten()[:, None])  # fmt: skip
    torch.testing.assert_close(expected.flatten(), alone.flatten())
    assert expected.isfinite().all()
    for training, grad in itertools.product((True, False), repeat=2):
        encoder.train(training)
        with torch.set_grad_enabled(grad):
            out = encoder(x, src_key_padding_mask=padding)
        torch.testing.assert_close(out, expected)


def test_padding_of_other_numbers_is_added_in_eval_mode_too() -> None:
    """PyTorch takes every number but 0 for padding there."""
    layer = TransformerEncoderLayer(E, H, FEED, 0.0, batch_first=True, **DOUBLE)
    encoder = TransformerEncoder(layer, 2)
    padding = torch.zeros(3, 6, **DOUBLE).masked_fill(PADDING, -1.0)
    expected = encoder(SOURCE, src_key_padding_mask=padding)
    with torch.no_grad():
        torch.testing.assert_close(encoder.eval()(SOURCE, src_key_padding_mask=padding), expected)


# --- step by step ----------------------------------------------------------------------------


def in_steps(
    model: Any, sizes: list[int], target: Tensor, memory: Tensor, dim: int = 1, **masks: Any
) -> Tensor:
    """The decoder's output computed in steps of the given sizes, with a cache."""
    cache = model.new_cache()
    parts, start = [], 0
    for step in target.split(sizes, dim):
        end = start + step.shape[dim]
        given = {
            name: mask[..., start:end, :end] if name == "tgt_mask" else mask[:, :end]
            for name, mask in masks.items()
            if name.startswith("tgt")
        }
        rest = {name: mask for name, mask in masks.items() if name not in given}
        parts.append(model(step, memory, **given, **rest, tgt_is_causal=not given, cache=cache))
        start = end
        assert cache.length == end
    return torch.cat(parts, dim)


@pytest.mark.parametrize("sizes", [[1] * 5, [2, 3], [5], [3, 1, 1], [1, 0, 4]])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("options", ["plain", "norm first", "no bias", "sequence first"])
def test_steps_agree_with_one_pass(sizes: list[int], grad: bool, options: str) -> None:
    model = stacks(fastattn.nn, **OPTIONS[options]).decoder
    dim = 0 if options == "sequence first" else 1
    target, memory = (x if dim else x.transpose(0, 1) for x in (TARGET, SOURCE))
    with torch.set_grad_enabled(grad):
        expected = model(target, memory, tgt_is_causal=True)
        out = in_steps(model, sizes, target, memory, dim)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    if grad:
        wanted = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
        grads = torch.autograd.grad(out.square().sum(), list(model.parameters()))
        torch.testing.assert_close(grads, wanted, rtol=1e-8, atol=1e-8)


def test_steps_with_masks() -> None:
    model = stacks(fastattn.nn).decoder
    lookback = FUTURE(5, **DOUBLE) + draw(5, 5)
    for masks in (
        {"tgt_mask": lookback},
        {"tgt_mask": lookback, "tgt_key_padding_mask": PADDING[:, :5].flip(1)},
        {"tgt_mask": lookback.isinf(), "memory_key_padding_mask": PADDING},
    ):
        expected = model(TARGET, SOURCE, **masks)
        out = in_steps(model, [2, 1, 2], TARGET, SOURCE, **masks)
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


def test_steps_unbatched() -> None:
    model = stacks(fastattn.nn).decoder
    expected = model(TARGET[0], SOURCE[0], tgt_is_causal=True)
    out = in_steps(model, [1, 2, 2], TARGET[0], SOURCE[0], 0)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_a_selected_cache_continues_its_own_sequences() -> None:
    model = stacks(fastattn.nn).decoder
    index = torch.tensor([2, 0, 2, 1])
    cache = model.new_cache()
    model(TARGET[:, :3], SOURCE, tgt_is_causal=True, cache=cache)
    cache.select(index)
    out = model(TARGET[index, 3:], SOURCE[index], tgt_is_causal=True, cache=cache)
    expected = model(TARGET[index], SOURCE[index], tgt_is_causal=True)[:, 3:]
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_captured_steps_equal_plain_steps() -> None:
    model = stacks(fastattn.nn).decoder
    expected = in_steps(model, [2, 1, 2], TARGET, SOURCE)
    with fastattn.capture(model) as weights:
        out = in_steps(model, [2, 1, 2], TARGET, SOURCE)
    assert torch.equal(out, expected)
    with fastattn.capture(model) as whole:
        model(TARGET, SOURCE, tgt_is_causal=True)
    for name, calls in weights.items():
        padded = [F.pad(each, (0, 5 - each.shape[-1])) for each in calls if "self" in name]
        torch.testing.assert_close(torch.cat(padded or calls, 2), whole[name][0])


def test_errors_of_the_cache() -> None:
    model = stacks(fastattn.nn)
    other = fastattn.nn.Transformer(E, H, 1, 1, FEED, batch_first=True, **DOUBLE)
    with pytest.raises(ValueError, match="cache has 1 layers, but the decoder has 2"):
        model.decode(TARGET, SOURCE, cache=other.decoder.new_cache())
    cache = model.decoder.new_cache()
    with pytest.raises(ValueError, match="memory_is_causal is not supported with a cache"):
        model.decode(TARGET, SOURCE, memory_is_causal=True, cache=cache)
    model.decode(TARGET, SOURCE, cache=cache)
    with pytest.raises(ValueError, match="cache has batch size 3, got 2"):
        model.decode(TARGET[:2], SOURCE[:2], cache=cache)
    with pytest.raises(RuntimeError, match="2D attn_mask is"):
        model.decode(TARGET, SOURCE, FUTURE(5, **DOUBLE), cache=cache)


STACKS: dict[str, Callable[[], nn.Module]] = {
    "encoder-layer": lambda: TransformerEncoderLayer(*SIZES, batch_first=True),
    "encoder": lambda: TransformerEncoder(TransformerEncoderLayer(*SIZES, batch_first=True), 2),
    "decoder-layer": lambda: TransformerDecoderLayer(*SIZES, batch_first=True),
    "decoder": lambda: TransformerDecoder(TransformerDecoderLayer(*SIZES, batch_first=True), 2),
    "both": lambda: Transformer(E, H, 1, 1, FEED, batch_first=True),
    "tokens": lambda: Transformer(E, H, 1, 1, FEED, batch_first=True, vocab_size=9),
}


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_is_one_node_of_a_symbolic_trace(name: str) -> None:
    inputs = 1 if "encoder" in name else 2

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = STACKS[name]()

        def forward(self, x: Tensor) -> Any:
            causal = {"is_causal" if inputs == 1 else "tgt_is_causal": True}
            return self.stack(*[x] * inputs, **causal)

    model = Model().eval()
    traced = torch.fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["stack"]
    x = torch.arange(12).view(2, 6) % 9 if name == "tokens" else SOURCE.float()
    assert torch.equal(traced(x), model(x))


def test_layer_attention_behaves_as_our_module() -> None:
    attention = stacks(fastattn.nn).decoder.layers[0].self_attn
    assert type(attention) is LayerAttention
    assert fastattn.restore_mha(attention) == []
    with pytest.raises(RuntimeError, match="cannot compile"):
        torch.jit.script(attention)
    layer = TransformerDecoderLayer(E, H)
    assert copy.deepcopy(layer).self_attn._forward_pre_hooks


@pytest.mark.parametrize("tokens", [False, True])
def test_padding_of_too_many_rows_is_refused_without_being_read(tokens: bool) -> None:
    padding = torch.zeros(1, 5, dtype=torch.bool).expand(2**40, 5)
    options: dict[str, Any] = {"vocab_size": 7} if tokens else {}
    model = fastattn.nn.Transformer(16, 2, 1, 1, 16, batch_first=True, **options).eval()
    src = torch.ones(2, 5, dtype=torch.long) if tokens else torch.ones(2, 5, 16)
    with torch.no_grad(), pytest.raises((AssertionError, RuntimeError)):
        model(src, src, src_key_padding_mask=padding)
