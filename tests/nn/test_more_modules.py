"""nn.LuongAttention, nn.GlobalAttention, nn.KeyValueMemory and nonlinear_heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn import luong_attention, nn

# --- Luong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dot", "general", "concat"])
@pytest.mark.parametrize("window", ["global", "local-m", "local-p"])
def test_luong_holds_the_weights(method: str, window: str, normal: Callable[..., Tensor]) -> None:
    module = nn.LuongAttention(6, None, method, window, 2, dtype=torch.float64)
    query, key = normal(2, 3, 6), normal(2, 9, 6)
    weight: Any = (module.weight, module.v) if method == "concat" else module.weight
    positions = None
    if window == "local-p":
        hidden = torch.tanh(query @ module.position_weight.T)
        positions = 9 * torch.sigmoid(hidden @ module.position_v)
    want = luong_attention(
        query, key, key, method=method, weight=weight, window=window, D=2, positions=positions,
        need_weights=True,
    )  # fmt: skip
    torch.testing.assert_close(module(query, key), want)
    key.requires_grad_()
    module(query, key)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    key = key.detach()
    step = module(query[:, 0], key)
    if window != "local-m":
        torch.testing.assert_close(step[0], want[0][:, 0])
    assert step[1].shape == (2, 9)


def test_luong_predicts_within_the_sentence(normal: Callable[..., Tensor]) -> None:
    module = nn.LuongAttention(6, window="local-p", D=1, dtype=torch.float64)
    query, key = normal(2, 3, 6), normal(2, 9, 6)
    padding = torch.arange(9) >= torch.tensor([[4], [9]])
    whole = module(query, key, key_padding_mask=padding)[0][0]
    short = module(query[:1], key[:1, :4])[0][0]
    torch.testing.assert_close(whole, short)


@pytest.mark.parametrize("attn_type", ["dot", "general", "mlp"])
@pytest.mark.parametrize("covered", [False, True])
def test_global_attention(
    attn_type: str, covered: bool, normal: Callable[..., Tensor], generator: torch.Generator
) -> None:
    module = nn.GlobalAttention(6, covered, attn_type, dtype=torch.float64)
    source, memory = normal(2, 3, 6), normal(2, 5, 6)
    lengths = torch.tensor([2, 5])
    coverage = torch.rand(2, 5, generator=generator).double() if covered else None
    bank = memory
    if coverage is not None:
        bank = torch.tanh(memory + coverage[..., None] * module.linear_cover.weight[:, 0])
    if attn_type == "mlp":
        hidden = module.linear_query(source)[:, :, None] + module.linear_context(bank)[:, None]
        scores = torch.tanh(hidden) @ module.v.weight[0]
    else:
        q = module.linear_in(source) if attn_type == "general" else source
        scores = q @ bank.mT
    hidden_rows = torch.arange(5) >= lengths[:, None]
    weights = torch.softmax(scores.masked_fill(hidden_rows[:, None], -torch.inf), -1)
    want = module.linear_out(torch.cat([weights @ bank, source], -1))
    want = want if attn_type == "mlp" else torch.tanh(want)
    out, got = module(source, memory, lengths, coverage)
    torch.testing.assert_close(got, weights)
    torch.testing.assert_close(out, want)
    step = module(source[:, 0], memory, lengths, coverage)
    torch.testing.assert_close(step[0], want[:, 0])
    torch.testing.assert_close(step[1], weights[:, 0])
    names = {"general": {"linear_in.weight"}, "dot": set()}.get(
        attn_type,
        {"linear_context.weight", "linear_query.weight", "linear_query.bias", "v.weight",
         "linear_out.bias"},
    )  # fmt: skip
    cover = {"linear_cover.weight"} if covered else set()
    assert set(module.state_dict()) == {"linear_out.weight", *names, *cover}


def test_coverage_must_be_asked_for() -> None:
    x = torch.zeros(1, 2, 4)
    with pytest.raises(ValueError, match="coverage needs"):
        nn.GlobalAttention(4)(x, x, coverage=torch.zeros(1, 2))
    with pytest.raises(ValueError, match="attn_type must be one of dot, general, mlp"):
        nn.GlobalAttention(4, attn_type="luong")
    with pytest.raises(ValueError, match="window must be one of"):
        nn.LuongAttention(4, window="local")
    with pytest.raises(ValueError, match="needs query and key of one width"):
        nn.LuongAttention(4, 5, "dot")


# --- the memory ----------------------------------------------------------------------------------


def test_a_memory_is_read_by_attention(normal: Callable[..., Tensor]) -> None:
    memory = nn.KeyValueMemory(5, 4, 3, batch_size=2, dtype=torch.float64)
    query = normal(2, 6, 4)
    assert not memory.read(query).any()
    key, value = normal(2, 3, 4), normal(2, 3, 3)
    memory.append(key, value)
    out, weights = memory(query, need_weights=True)
    want = torch.softmax(query @ key.mT / 2, -1)
    torch.testing.assert_close(weights[..., :3], want)
    assert not weights[..., 3:].any()
    torch.testing.assert_close(out, want @ value)


def test_a_full_memory_overwrites_its_oldest_row(generator: torch.Generator) -> None:
    memory = nn.KeyValueMemory(3, 1, dtype=torch.float64)
    for row in range(5):
        one = torch.full((1, 1, 1), float(row)).double()
        memory.append(one, one)
    assert sorted(memory.keys.flatten().tolist()) == [2.0, 3.0, 4.0]
    many = torch.arange(10.0, 20.0).double().view(1, 10, 1)
    memory.append(many, many)
    assert sorted(memory.keys.flatten().tolist()) == [17.0, 18.0, 19.0]
    memory.append(torch.full((1, 1, 1), 20.0).double(), torch.zeros(1, 1, 1).double())
    assert sorted(memory.keys.flatten().tolist()) == [18.0, 19.0, 20.0]


def test_the_most_similar_row_is_overwritten(generator: torch.Generator) -> None:
    memory = nn.KeyValueMemory(4, 3, batch_size=2, dtype=torch.float64)
    first = memory.overwrite(torch.zeros(2, 3).double(), torch.ones(2, 3).double())
    assert first.tolist() == [0, 0]
    memory.reset()
    eye = torch.eye(3).double().expand(2, 3, 3)
    memory.append(eye, eye)
    key = torch.tensor([[0.1, 5.0, 0.0], [0.0, 0.2, 7.0]]).double()
    assert memory.overwrite(key, 2 * key).tolist() == [1, 2]
    assert torch.equal(memory.values[0, 1], 2 * key[0])
    assert torch.equal(memory.values[1, 1], eye[1, 1])
    assert memory.overwrite(key, key, torch.tensor([3, 0])).tolist() == [3, 0]
    assert memory.used.tolist() == [[True] * 4, [True, True, True, False]]


def test_gradients_flow_through_the_memory(normal: Callable[..., Tensor]) -> None:
    """From reads into written rows; a later write does not change an earlier read."""
    memory = nn.KeyValueMemory(4, 3, dtype=torch.float64)
    key, value = (normal(1, 2, 3).requires_grad_() for _ in range(2))
    query = normal(1, 2, 3)
    memory.append(key, value)
    before = memory.read(query)
    memory.overwrite(key[:, 0].detach() + 1, value[:, 0].detach(), torch.tensor([0]))
    after = memory.read(query)
    want = torch.softmax(query @ key.mT / 3**0.5, -1) @ value
    for got, expected in zip(
        torch.autograd.grad(before.sum(), (key, value), retain_graph=True),
        torch.autograd.grad(want.sum(), (key, value)),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)
    assert not torch.autograd.grad(after.sum(), value)[0][:, 0].any()
    memory.detach_()
    assert not memory.read(query).requires_grad


def test_a_memory_is_state() -> None:
    memory = nn.KeyValueMemory(4, 3)
    memory.append(torch.ones(1, 2, 3), torch.ones(1, 2, 3))
    other = nn.KeyValueMemory(4, 3)
    other.load_state_dict(memory.state_dict())
    query = torch.ones(1, 1, 3)
    assert torch.equal(other.read(query), memory.read(query))
    assert other.written == 2


def test_bad_writes_are_named() -> None:
    memory, x = nn.KeyValueMemory(4, 3), torch.ones(1, 2, 3)
    with pytest.raises(ValueError, match="key must have batch size 1, width 3"):
        memory.append(torch.ones(2, 2, 3), x)
    with pytest.raises(ValueError, match="must have batch size 1, width 3, and as many rows"):
        memory.append(x, torch.ones(1, 3, 3))
    with pytest.raises(TypeError, match=r"value must be torch\.float32"):
        memory.append(x, x.double())
    with pytest.raises(IndexError, match=r"slot must be in \[0, 4\)"):
        memory.overwrite(x[:, 0], x[:, 0], torch.tensor([4]))
    with pytest.raises(ValueError, match="query must be"):
        memory.read(torch.ones(1, 2, 4))
    with pytest.raises(ValueError, match="slots must be a positive integer"):
        nn.KeyValueMemory(0, 3)


# --- a network for each head ---------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
def test_nonlinear_heads(training: bool, normal: Callable[..., Tensor]) -> None:
    """out = [g_1(head_1), ...] W_o + b_o, on the small path of inference too."""
    module = nn.MultiheadAttention(8, 2, batch_first=True, nonlinear_heads=5, dtype=torch.float64)
    module.train(training)
    x = normal(2, 3, 8)
    q, k, v = F.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    heads = []
    for h in range(2):
        at = slice(4 * h, 4 * h + 4)
        p = torch.softmax(q[..., at] @ k[..., at].mT / 2, -1)
        net = module.head_network
        hidden = torch.relu(F.linear(p @ v[..., at], net.weight1[h], net.bias1[h]))
        heads.append(F.linear(hidden, net.weight2[h], net.bias2[h]))
    want = module.out_proj(torch.cat(heads, -1))
    with torch.set_grad_enabled(training):
        for need_weights in (False, True):
            torch.testing.assert_close(module(x, x, x, need_weights=need_weights)[0], want)
    if training:
        module(x, x, x)[0].sum().backward()
        assert all(parameter.grad is not None for parameter in module.parameters())


def test_without_nonlinear_heads_nothing_changes() -> None:
    names = set(torch.nn.MultiheadAttention(8, 2).state_dict())
    assert set(nn.MultiheadAttention(8, 2).state_dict()) == names
    with_them = set(nn.MultiheadAttention(8, 2, nonlinear_heads=3).state_dict())
    assert {name.split(".")[0] for name in with_them - names} == {"head_network"}
    with pytest.raises(ValueError, match="nonlinear_heads must be a positive integer, got 0"):
        nn.MultiheadAttention(8, 2, nonlinear_heads=0)


# --- errors --------------------------------------------------------------------------------------

TOKENS = nn.Transformer(
    8, 2, 1, 1, 8, vocab_size=5, batch_first=True, dropout=0.0, dtype=torch.float64
).eval()
X = torch.zeros(2, 3, 6)
# By the word that the error must have; a letter after it tells calls apart.
INVALID: dict[str, tuple[Callable[[Any], Any], tuple[Any, ...]]] = {
    "units": (nn.BahdanauAttention, (0, -1, 2.0, True)),
    "query_size": (lambda n: nn.BahdanauAttention(4, query_size=n), (0, -1, 1.0, "3", True)),
    "memory_size": (lambda n: nn.BahdanauAttention(4, memory_size=n), (0, 1.0)),
    "dim": (lambda n: nn.AdditiveAttention(dim=n), (0, -1, "3")),
    "dropout": (lambda n: nn.LuongAttention(4, dropout=n), (2.0, "0.5", None, 1j)),
    "dropout b": (lambda n: nn.BahdanauAttention(3, dropout=n), (2,)),
    "dropout c": (lambda n: nn.AdditiveAttention(dropout=n), (2,)),
    "key_size": (lambda n: nn.LuongAttention(4, n), (0, -(2**31), 1.0)),
    "attention_size": (lambda n: nn.LuongAttention(4, attention_size=n), (0, [1])),
    "value_dim": (lambda n: nn.KeyValueMemory(4, 4, n), (0, -1, "3")),
    "head_dim": (lambda n: nn.HeadNetwork(2, n, 4), (0, -1, None)),
    "hidden_size": (lambda n: nn.Hopfield(4, n), (0, -1, 1.0)),
    "pattern_size": (lambda n: nn.HopfieldLayer(4, pattern_size=n), (0, "3")),
    "d_model": (lambda n: nn.SinusoidalPositionalEncoding(n), (0, -1, None, 4.0)),
    "num_embeddings": (lambda n: nn.LearnedPositionalEncoding(n, 4), (0, -1, None)),
    "padding_idx": (lambda n: nn.Transformer(vocab_size=5, padding_idx=n), (None, "3", 1.0, -1)),
    "beams": (
        lambda n: TOKENS.generate(X[0].long(), bos_idx=1, eos_idx=2, max_length=2, beams=n),
        (None, "3", 0, 1.5, 2**64),
    ),
    "eos_idx": (
        lambda n: TOKENS.generate(X[0].long(), bos_idx=1, eos_idx=n, max_length=2),
        (None, 2**64, 1.0),
    ),
    "query": (lambda x: nn.BahdanauAttention(4, query_size=6, memory_size=6)(x, X), (None, [1.0])),
    "memory_bank": (lambda x: nn.GlobalAttention(6)(X, x), (None, 1.0)),
    "source": (lambda x: nn.GlobalAttention(6)(x, X), (None, 1.0)),
    "key": (lambda x: nn.LuongAttention(6)(X, x), (None, "x")),
    "x": (lambda x: nn.LearnedPositionalEncoding(9, 6)(x), (None, [0.0])),
    "src": (lambda x: TOKENS(x, X[0].long()), (None, [0])),
    "attn_mask": (lambda x: nn.MultiheadAttention(6, 2)(X, X, X, attn_mask=x), ([True], 1.0)),
}


@pytest.mark.parametrize("name", INVALID)
def test_a_wrong_argument_is_named(name: str) -> None:
    call, values = INVALID[name]
    for value in values:
        with pytest.raises((TypeError, ValueError), match=rf"\b{name.split()[0]}\b"):
            call(value)


def test_generate_for_an_empty_batch_is_empty() -> None:
    for beams in (1, 3):
        empty = torch.zeros(0, 4, dtype=torch.long)
        found = TOKENS.generate(empty, bos_idx=1, eos_idx=2, max_length=3, beams=beams)
        assert found.shape[0] == 0
        assert found.dtype == torch.long
