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
    SinusoidalPositionalEncoding,
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


# --- the paper's network: tokens -------------------------------------------------------------

V = 11
SRC = torch.tensor([[5, 3, 9, 2, 7], [4, 8, 2, 0, 0], [6, 2, 0, 0, 0]])
TGT = torch.tensor([[1, 5, 6, 7], [1, 8, 9, 0], [1, 3, 0, 0]])


def small(**options: Any) -> Any:
    torch.manual_seed(1)
    given = {"dropout": 0.0, "batch_first": True, "vocab_size": V, **DOUBLE, **options}
    return Transformer(E, H, 2, 2, FEED, **given)


def test_the_defaults_are_the_papers() -> None:
    with torch.device("meta"):
        model = Transformer(vocab_size=37000)
    assert (len(model.encoder.layers), len(model.decoder.layers)) == (6, 6)
    assert (model.d_model, model.nhead, model.positional.layout) == (512, 8, "interleaved")
    layer = model.decoder.layers[5]
    assert (layer.linear1.out_features, layer.dropout.p, layer.norm_first) == (2048, 0.1, False)
    # Three matrices are one: 63 million parameters, of which 19 million are words.
    tables = (model.src_embedding.weight, model.tgt_embedding.weight, model.output.weight)
    assert len(set(map(id, tables))) == 1
    assert 63e6 < sum(p.numel() for p in model.parameters()) < 64e6


@pytest.mark.parametrize("vocabulary", [V, (V, V), (V + 3, V)])
@pytest.mark.parametrize("tie", [True, False])
def test_tied_embedding_tables(vocabulary: Any, tie: bool) -> None:
    model = small(vocab_size=vocabulary, tie_embeddings=tie)
    shared = tie and isinstance(vocabulary, int)
    assert (model.src_embedding is model.tgt_embedding) == shared
    assert (model.output.weight is model.tgt_embedding.weight) == tie
    again = copy.deepcopy(model)
    assert (again.output.weight is again.tgt_embedding.weight) == tie
    assert model(SRC, TGT).shape == (3, 4, V)


@pytest.mark.parametrize("first", [True, False])
def test_logits_equal_their_formula(first: bool) -> None:
    """Written out, with PyTorch's own stacks."""
    model = small(batch_first=first)
    stock = nn.Transformer(E, H, 2, 2, FEED, 0.0, batch_first=True, **DOUBLE)
    own = {k: v for k, v in model.state_dict().items() if k.split(".")[0] in ("encoder", "decoder")}
    stock.load_state_dict(own)
    table, encode = model.output.weight, SinusoidalPositionalEncoding(E)
    src, tgt = (encode(math.sqrt(E) * table[tokens]) for tokens in (SRC, TGT))
    vectors = stock(
        src,
        tgt,
        tgt_mask=FUTURE(4, **DOUBLE),
        src_key_padding_mask=SRC == 0,
        memory_key_padding_mask=SRC == 0,
    )
    out = model(SRC, TGT) if first else model(SRC.T, TGT.T).transpose(0, 1)
    real = TGT != 0
    torch.testing.assert_close(out[real], (vectors @ table.T)[real], rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_padding_changes_nothing() -> None:
    model = small().eval()
    expected = model(SRC[1:2, :3], TGT[1:2, :3])
    for more in (0, 2, 30):
        out = model(F.pad(SRC[1:2, :3], (0, more)), F.pad(TGT[1:2, :3], (0, more)))
        torch.testing.assert_close(out[:, :3], expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("first", [True, False])
def test_tokens_in_steps(first: bool) -> None:
    """Padding in front, of prompts of several lengths, is remembered."""
    model = small(batch_first=first).eval()
    target, dim = TGT.flip(1), 1
    src = SRC
    if not first:
        src, target, dim = SRC.T, target.T, 0
    expected, memory = model(src, target), model.encode(src)
    for sizes in ([1] * 4, [2, 2], [3, 1]):
        cache = model.decoder.new_cache()
        out = [
            model.decode(step, memory, memory_key_padding_mask=model.padding_of(src), cache=cache)
            for step in target.split(sizes, dim)
        ]
        torch.testing.assert_close(torch.cat(out, dim), expected, rtol=1e-9, atol=1e-9)


def naive(model: Any, src: Tensor, length: int, beams: int) -> list[list[int]]:
    """Beam search by whole passes, one sequence at a time."""
    results = []
    for row in src:
        kept = [((1,), 0.0)]
        for _ in range(length):
            grown = []
            for words, score in kept:
                if words[-1] in (2, 0):
                    grown.append(((*words, 0), score))
                    continue
                out = model(row[None], torch.tensor([words]))[0, -1].log_softmax(-1)
                grown += [((*words, word), score + float(p)) for word, p in enumerate(out)]
            kept = sorted(grown, key=lambda pair: -pair[1])[:beams]
            if all(words[-1] in (2, 0) for words, _ in kept):
                break
        best = max(kept, key=lambda pair: pair[1] / max(sum(w != 0 for w in pair[0][1:]), 1))
        results.append(list(best[0][1:]))
    longest = max(map(len, results))
    return [each + [0] * (longest - len(each)) for each in results]


@torch.no_grad()
@pytest.mark.parametrize("beams", [1, 3, V + 1])
@pytest.mark.parametrize("first", [True, False])
def test_generate_equals_beam_search_by_whole_passes(beams: int, first: bool) -> None:
    model = small().eval()
    for parameter in model.parameters():
        parameter *= 1.7  # so that more than one repeated word is generated
    model.output.weight[0] -= 9.0 * model.decoder.norm.bias  # never generate padding
    model.output.bias = nn.Parameter(torch.zeros(V, **DOUBLE))
    model.output.bias[0] = -100.0
    expected = torch.tensor(naive(model, SRC, 6, beams))
    for part in (model, model.encoder, model.decoder):
        part.batch_first = first
    if not first:
        flat = small(batch_first=False).eval()
        flat.output.bias = nn.Parameter(torch.zeros(V, **DOUBLE))
        flat.load_state_dict(model.state_dict())
        model = flat
    given = {"bos_idx": 1, "eos_idx": 2, "max_length": 6, "beams": beams}
    out = model.generate(SRC, **given) if first else model.generate(SRC.T, **given).T
    assert out.tolist() == expected.tolist()


def test_bad_tokens() -> None:
    model = small()
    for src, tgt, error, message in (
        (SRC, TGT + V, IndexError, "tgt holds a token .* not below its vocab_size 11"),
        (SRC - 1, TGT, IndexError, "src holds a token that is negative"),
        (SRC.double(), TGT, ValueError, "src must be tokens, int64 or int32.*float64"),
        (SRC, TGT > 0, ValueError, "tgt must be tokens.*bool"),
        (SRC[None], TGT, ValueError, r"src must be tokens.*\(1, 3, 5\)"),
        (SRC[:2], TGT, RuntimeError, "batch number of src and tgt must be equal"),
    ):
        with pytest.raises(error, match=message):
            model(src, tgt)


def test_bad_arguments() -> None:
    for given, error, message in (
        ({"vocab_size": 0}, ValueError, "vocab_size must be at least 1, got 0"),
        (
            {"vocab_size": 2.5},
            TypeError,
            "must be an integer or a pair of them, got 2.5",
        ),
        ({"vocab_size": (1, 2, 3)}, TypeError, "or a pair"),
        ({"vocab_size": 5, "padding_idx": 5}, ValueError, r"padding_idx must be in \[0, vocab_siz"),
    ):
        with pytest.raises(error, match=message):
            Transformer(E, H, 1, 1, FEED, **given)
    options = {"bos_idx": 1, "eos_idx": 2, "max_length": 3}
    with pytest.raises(RuntimeError, match="generate needs tokens"):
        stacks(fastattn.nn).generate(SRC, **options)
    for given, message in (
        ({"src": SRC[0]}, "src must be a batch of tokens"),
        ({"beams": 0}, "beams must be at least 1, got 0"),
        ({"max_length": 0}, "max_length must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            small().generate(**{"src": SRC, **options, **given})


def test_training_in_bfloat16_is_close_to_float32() -> None:
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        model = small(dtype=torch.float32).to(dtype)
        loss = F.cross_entropy(model(SRC, TGT).float().flatten(0, 1), TGT.flatten())
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def compiled_agrees(model: Any, backend: str) -> None:
    """The compiled model must give the outputs and gradients of the model."""

    def results(network: Any) -> tuple[Tensor, list[Tensor]]:
        out = network(SRC, TGT)
        return out, list(torch.autograd.grad(out.square().mean(), list(model.parameters())))

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    torch.testing.assert_close(results(compiled), results(model), rtol=1e-4, atol=1e-5)


def test_compiles_as_one_graph() -> None:
    torch.manual_seed(0)
    compiled_agrees(Transformer(E, H, 1, 1, FEED, 0.0, batch_first=True, vocab_size=V), "aot_eager")


@pytest.mark.slow
def test_compiles_with_inductor() -> None:
    model = small(dtype=torch.float32)
    compiled_agrees(model, "inductor")
    compiled = torch.compile(model.eval(), fullgraph=True)
    with torch.no_grad():
        real = TGT != 0
        torch.testing.assert_close(compiled(SRC, TGT)[real], model(SRC, TGT)[real])


@pytest.mark.slow
def test_steps_compile() -> None:
    model = small(dtype=torch.float32).eval()
    expected = model(SRC, TGT)
    step = torch.compile(model.decode, backend="aot_eager")
    with torch.no_grad():
        memory, cache = model.encode(SRC), model.decoder.new_cache()
        out = [
            step(each, memory, memory_key_padding_mask=SRC == 0, cache=cache)
            for each in TGT.split(1, 1)
        ]
    real = TGT != 0
    torch.testing.assert_close(torch.cat(out, 1)[real], expected[real])


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
