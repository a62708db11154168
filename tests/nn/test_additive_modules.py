"""BahdanauAttention and AdditiveAttention: results, parameters and state."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor

from fastattn.nn import AdditiveAttention, BahdanauAttention


def bahdanau(module: BahdanauAttention, query: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """The equation, in plain PyTorch."""
    hidden = module.query_layer(query)[:, :, None] + module.memory_layer(memory)[:, None]
    v = module.v
    if module.g is not None:
        hidden, v = hidden + module.bias, module.g * v / v.norm()
    weights = torch.softmax(torch.tanh(hidden) @ v, -1)
    return weights @ memory, weights


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
def test_bahdanau_equals_its_equation(backend: str, normalize: bool, lazy: bool) -> None:
    sizes = {} if lazy else {"query_size": 6, "memory_size": 4}
    module = BahdanauAttention(5, normalize, dtype=torch.float64, **sizes)
    query, memory = torch.randn(2, 3, 6).double(), torch.randn(2, 7, 4).double()
    got = module(query, memory)
    if normalize:
        torch.nn.init.normal_(module.bias)
        got = module(query, memory)
    torch.testing.assert_close(got, bahdanau(module, query, memory))
    got[0].square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
    names = {"v", "query_layer.weight", "memory_layer.weight"}
    assert set(module.state_dict()) == names | ({"g", "bias"} if normalize else set())


def test_bahdanau_one_step_of_a_decoder(backend: str) -> None:
    module = BahdanauAttention(5, query_size=6, memory_size=4)
    query, memory, value = torch.randn(2, 3, 6), torch.randn(2, 7, 4), torch.randn(2, 7, 2)
    padding = torch.arange(7) >= torch.tensor([[7], [3]])
    context, weights = module(query, memory, value, key_padding_mask=padding)
    assert weights[1, :, 3:].eq(0).all()
    keys = module.memory_layer(memory)
    for t in range(3):
        step, w = module(query[:, t], memory, value, keys=keys, key_padding_mask=padding)
        torch.testing.assert_close(step, context[:, t])
        torch.testing.assert_close(w, weights[:, t])
    assert module(query, memory, need_weights=False)[1] is None
    seen = torch.ones(3, 7, dtype=torch.bool).tril()
    assert module(query, memory, attn_mask=seen)[1][:, 0, 1:].eq(0).all()


def test_normalized_v_has_the_length_g() -> None:
    module = BahdanauAttention(16, normalize=True, query_size=3, memory_size=3)
    assert module.g.item() == 0.25
    assert module.bias.eq(0).all()
    before = module(torch.ones(1, 1, 3), torch.arange(12.0).view(1, 4, 3))[1]
    with torch.no_grad():
        module.v *= 3
    torch.testing.assert_close(
        module(torch.ones(1, 1, 3), torch.arange(12.0).view(1, 4, 3))[1], before
    )


def test_dropout_only_in_training(backend: str) -> None:
    query, memory = torch.randn(2, 3, 6), torch.randn(2, 50, 6)
    for module in (
        BahdanauAttention(5, query_size=6, memory_size=6, dropout=0.5),
        AdditiveAttention(dropout=0.5, dim=6),
    ):
        options = {} if isinstance(module, BahdanauAttention) else {"return_attention_scores": True}
        assert module(query, memory, **options)[1].eq(0).any()
        module.eval()
        assert not module(query, memory, **options)[1].eq(0).any()


@pytest.mark.parametrize("use_scale", [False, True])
def test_additive_has_the_arguments_of_keras(backend: str, use_scale: bool) -> None:
    module = AdditiveAttention(use_scale, dtype=torch.float64)
    query, value, key = (torch.randn(2, n, 4).double() for n in (3, 5, 5))
    query_mask = torch.tensor([[True, True, False], [True, False, True]])
    value_mask = torch.tensor([[True] * 5, [True, True, True, False, False]])
    out, weights = module(
        query,
        value,
        key,
        query_mask=query_mask,
        value_mask=value_mask,
        use_causal_mask=True,
        return_attention_scores=True,
    )
    scale = module.scale if use_scale else torch.ones(4).double()
    scores = (scale * torch.tanh(query[:, :, None] + key[:, None])).sum(-1)
    seen = value_mask[:, None] & torch.ones(3, 5, dtype=torch.bool).tril()
    want = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
    torch.testing.assert_close(weights, want)
    torch.testing.assert_close(out, (want @ value) * query_mask[..., None])
    torch.testing.assert_close(module(query, value), module(query, value, value))
    assert [*module.state_dict()] == (["scale"] if use_scale else [])


def test_lazy_modules_are_saved_and_loaded() -> None:
    query, memory = torch.randn(2, 3, 6), torch.randn(2, 5, 6)
    for make in (lambda: BahdanauAttention(4, True), AdditiveAttention):
        first, second = make(), make()
        copy.deepcopy(first)
        want = first.eval()(query, memory)
        buffer = io.BytesIO()
        torch.save(first.state_dict(), buffer)
        buffer.seek(0)
        second.load_state_dict(torch.load(buffer))
        got = second.eval()(query, memory)
        for x, y in zip(got, want, strict=True):
            assert torch.equal(x, y)
        compiled = torch.compile(second, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(query, memory), got)


def test_mixed_precision(backend: str) -> None:
    module = BahdanauAttention(5, True, query_size=6, memory_size=6)
    with torch.autocast("cpu", torch.bfloat16):
        context, weights = module(torch.randn(2, 3, 6), torch.randn(2, 7, 6))
    assert context.dtype == weights.dtype == torch.bfloat16
    context.float().sum().backward()
    assert module.v.grad.dtype == torch.float32
