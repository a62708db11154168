"""The Transformer of the paper, from tokens to logits: embeddings, beam search, errors."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastattn.nn import SinusoidalPositionalEncoding, Transformer

E, H, FEED = 16, 4, 24
DOUBLE: dict[str, Any] = {"dtype": torch.float64}
V = 11
SRC = torch.tensor([[5, 3, 9, 2, 7], [4, 8, 2, 0, 0], [6, 2, 0, 0, 0]])
TGT = torch.tensor([[1, 5, 6, 7], [1, 8, 9, 0], [1, 3, 0, 0]])


def small(**options: Any) -> Any:
    """A Transformer of two layers for tokens."""
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
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(4, **DOUBLE),
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
        Transformer(E, H, 1, 1, FEED).generate(SRC, **options)
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
