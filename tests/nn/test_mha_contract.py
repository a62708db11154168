"""The contract beyond values: state, random numbers, layout, and masks passed to attention."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from fastattn import scaled_dot_product_attention
from fastattn.nn import MultiheadAttention, _projections, mha

EMBED, HEADS = 16, 4
X = torch.randn(3, 6, EMBED, generator=torch.Generator().manual_seed(0))
OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"kdim": 6, "vdim": 10},
    {"add_bias_kv": True, "add_zero_attn": True},
    {"kdim": 6, "add_bias_kv": True, "dtype": torch.float64},
]


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keyword arguments of each call of attention."""
    seen: list[dict[str, Any]] = []

    def spy(*args: Any, **keywords: Any) -> Any:
        seen.append(keywords)
        return scaled_dot_product_attention(*args, **keywords)

    monkeypatch.setattr(mha, "scaled_dot_product_attention", spy)
    return seen


def pair(**options: Any) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    """PyTorch's module and ours with the same parameters."""
    stock = nn.MultiheadAttention(EMBED, HEADS, **options)
    fused = MultiheadAttention(EMBED, HEADS, **options)
    fused.load_state_dict(stock.state_dict())
    return stock, fused


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_state_dicts_load_in_both_directions(options: dict[str, Any]) -> None:
    stock, fused = (
        cls(EMBED, HEADS, **options) for cls in (nn.MultiheadAttention, MultiheadAttention)
    )
    assert list(fused.state_dict()) == list(stock.state_dict())
    assert [n for n, _ in fused.named_parameters()] == [n for n, _ in stock.named_parameters()]
    for source, target in ((stock, fused), (fused, stock)):
        for parameter in source.parameters():
            nn.init.normal_(parameter)
        target.load_state_dict(source.state_dict(), strict=True)
        for a, b in zip(source.parameters(), target.parameters(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_attributes_equal_pytorchs(options: dict[str, Any]) -> None:
    stock, fused = pair(**options)
    assert fused.__dict__.keys() == stock.__dict__.keys()
    assert (fused.bias_k is None) == (stock.bias_k is None)
    assert (fused.in_proj_weight is None) == (stock.in_proj_weight is None)
    for name in ("head_dim", "num_heads", "_qkv_same_embed_dim", "batch_first", "add_zero_attn"):
        assert getattr(fused, name) == getattr(stock, name)
    assert fused.extra_repr() == stock.extra_repr()
    assert fused.merge_masks(None, None, X) == (None, None)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_seed_gives_the_initial_values_of_pytorch(options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    stock = nn.MultiheadAttention(EMBED, HEADS, **options)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    fused = MultiheadAttention(EMBED, HEADS, **options)
    assert torch.equal(torch.get_rng_state(), after)
    for a, b in zip(stock.parameters(), fused.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(("dropout", "training"), [(0.0, True), (0.5, False), (0.5, True)])
def test_random_numbers_are_drawn_for_dropout_only(
    dropout: float, training: bool, need_weights: bool
) -> None:
    fused = MultiheadAttention(EMBED, HEADS, dropout=dropout).train(training)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, _ = fused(X, X, X, need_weights=need_weights)
    dropped = dropout > 0 and training
    assert torch.equal(torch.get_rng_state(), before) == (not dropped)
    second, _ = fused(X, X, X, need_weights=need_weights)
    assert torch.equal(first, second) == (not dropped)
    torch.manual_seed(5)
    assert torch.equal(fused(X, X, X, need_weights=need_weights)[0], first)


def test_returned_weights_include_dropout() -> None:
    torch.manual_seed(0)
    fused = MultiheadAttention(64, 1, dropout=0.5, batch_first=True)
    x = torch.randn(2, 40, 64)
    out, weights = fused(x, x, x)
    value = F.linear(x, *(t.chunk(3)[2] for t in (fused.in_proj_weight, fused.in_proj_bias)))
    assert 0.4 < (weights == 0).float().mean() < 0.6
    again = F.linear(weights @ value, fused.out_proj.weight, fused.out_proj.bias)
    assert torch.allclose(out, again, atol=1e-5)


@pytest.mark.parametrize("batched", [True, False])
def test_equal_inputs_share_one_product(batched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        widths.append(len(weight) // EMBED)
        return F.linear(x, weight, bias)

    monkeypatch.setattr(_projections, "linear", counted)
    fused = MultiheadAttention(EMBED, HEADS)
    a, b, c = (x if batched else x[0] for x in (X, X.clone(), X.clone()))
    for inputs, products in (((a, a, a), [3]), ((a, b, b), [1, 2]), ((a, b, c), [1, 1, 1])):
        fused(*inputs)
        assert widths == [*products, 1]
        widths.clear()


@pytest.mark.parametrize("batch_first", [True, False])
def test_no_tensor_is_copied(batch_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are views of the projections; the output has the layout that the next one reads."""
    memory: list[int] = []

    def projected(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        memory.append(x.data_ptr())
        memory.append((y := F.linear(x, weight, bias)).data_ptr())
        return y

    def attended(q: Tensor, *args: Any, **keywords: Any) -> Any:
        memory.append(q.data_ptr())
        memory.append((out := scaled_dot_product_attention(q, *args, **keywords)).data_ptr())
        return out

    monkeypatch.setattr(_projections, "linear", projected)
    monkeypatch.setattr(mha, "scaled_dot_product_attention", attended)
    MultiheadAttention(EMBED, HEADS, batch_first=batch_first)(X, X, X, need_weights=False)
    x, packed, query, out, rows, _ = memory
    assert (x, query, rows) == (X.data_ptr(), packed, out)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("inputs", ["self", "three"])
@pytest.mark.parametrize("training", [True, False])
def test_the_output_is_contiguous(batch_first: bool, inputs: str, training: bool) -> None:
    fused = MultiheadAttention(EMBED, HEADS, batch_first=batch_first).train(training)
    key = X if inputs == "self" else X.clone()
    with torch.set_grad_enabled(training):
        out, _ = fused(X, key, key)
    assert out.is_contiguous()
    out, _ = fused(X[0], key[0], key[0])
    assert out.is_contiguous()


def test_weights_are_read_at_every_call() -> None:
    stock, fused = pair()

    def same() -> bool:
        return all(
            torch.allclose(a, b, atol=1e-6)
            for a, b in zip(stock(X, X, X), fused(X, X, X), strict=True)
        )

    assert same()
    for module in (stock, fused):
        module.in_proj_weight.data = module.in_proj_weight.data.flip(0).clone()
        module.out_proj.bias.data.fill_(3)
    assert same()
    for module in (stock, fused):
        prune.l1_unstructured(module, "in_proj_weight", 0.5)
        prune.l1_unstructured(module.out_proj, "weight", 0.5)
    assert same()
    for module in (stock, fused):
        prune.remove(module, "in_proj_weight")
        prune.remove(module.out_proj, "weight")
        module.in_proj_weight = nn.Parameter(module.in_proj_weight.t().contiguous().t())
        torch.manual_seed(0)
        parametrizations.spectral_norm(module, "in_proj_weight")
        parametrizations.weight_norm(module.out_proj, "weight")
        module.eval()  # in training, spectral_norm changes the weight each time it is read
    assert same()


class Recorder(nn.Module):
    """An adapter as clients put around ``out_proj``: it is read, never called."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    @property
    def weight(self) -> Tensor:
        return self.inner.weight * 2

    @property
    def bias(self) -> Tensor:
        return self.inner.bias + 1


def test_out_proj_is_read_and_never_called() -> None:
    stock, fused = pair()
    for module in (stock, fused):
        module.out_proj = Recorder(module.out_proj)
    got, want = (module(X, X, X)[0] for module in (fused, stock))
    assert torch.allclose(got, want, atol=1e-6)


def test_copies_and_pickles() -> None:
    fused = MultiheadAttention(EMBED, HEADS, add_bias_kv=True)
    for other in (copy.deepcopy(fused), copy.copy(fused), pickle.loads(pickle.dumps(fused))):
        assert type(other) is MultiheadAttention
        assert torch.equal(other(X, X, X)[0], fused(X, X, X)[0])
        assert len(other._forward_pre_hooks) == 1


def test_state_of_old_versions_is_loaded() -> None:
    fused = MultiheadAttention(EMBED, HEADS)
    state = fused.__dict__.copy()
    del state["_qkv_same_embed_dim"]
    other = MultiheadAttention.__new__(MultiheadAttention)
    other.__setstate__(state)
    assert torch.equal(other(X, X, X)[0], fused(X, X, X)[0])


def test_padding_is_passed_as_a_small_boolean_mask(passed: list[dict[str, Any]]) -> None:
    """[N, 1, 1, S], True is visible, even if a layer of PyTorch converted it to 0 and -inf."""
    fused = MultiheadAttention(EMBED, HEADS, batch_first=True)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2, [True] + [False] * 5])
    added = torch.zeros(3, 6).masked_fill(padding, float("-inf"))
    for mask in (padding, added):
        fused(X, X, X, key_padding_mask=mask)
        assert torch.equal(passed.pop()["attn_mask"], ~padding[:, None, None, :])
    learned = added.clone().requires_grad_()  # has a gradient, so stays what it is
    fused(X, X, X, key_padding_mask=learned)
    assert passed.pop()["attn_mask"].requires_grad


def test_masks_are_never_expanded(passed: list[dict[str, Any]]) -> None:
    fused = MultiheadAttention(EMBED, HEADS, batch_first=True)
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[1, 4:] = True
    past = torch.rand(6, 6)
    for masks, shape in (
        ({"attn_mask": future}, (1, 1, 6, 6)),
        ({"attn_mask": past}, (1, 1, 6, 6)),
        ({"attn_mask": past, "key_padding_mask": padding}, (3, 1, 6, 6)),
        ({"attn_mask": torch.rand(12, 6, 6)}, (3, 4, 6, 6)),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fused(X, X, X, **masks)
        assert passed.pop()["attn_mask"].shape == shape


@pytest.mark.parametrize("floating", [False, True])
def test_a_correct_hint_replaces_the_mask(floating: bool, passed: list[dict[str, Any]]) -> None:
    """With padding or weights PyTorch reads the mask; we need not read a causal one."""
    fused = MultiheadAttention(EMBED, HEADS, batch_first=True)
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[1, 4:] = True
    masks = {"attn_mask": future, "key_padding_mask": padding}
    if floating:
        masks = {k: torch.zeros(m.shape).masked_fill(m, float("-inf")) for k, m in masks.items()}
    hinted = fused(X, X, X, **masks, is_causal=True)
    keywords = passed.pop()
    assert keywords["window"] == (-1, 0)
    assert keywords["attn_mask"].shape == (3, 1, 1, 6)
    plain = fused(X, X, X, **masks)
    assert passed.pop()["window"] is None
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(hinted, plain, strict=True))


@pytest.mark.parametrize("add_bias_kv", [False, True])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_a_wrong_hint_is_trusted_where_pytorch_trusts_it(
    padded: bool, need_weights: bool, add_bias_kv: bool
) -> None:
    stock, fused = pair(add_bias_kv=add_bias_kv)
    wrong = torch.zeros(3, 3, dtype=torch.bool)
    wrong[0, 1] = True
    masks = {"attn_mask": wrong}
    if padded:
        masks["key_padding_mask"] = torch.zeros(6, 3, dtype=torch.bool)
    want, got = (
        module(X, X, X, **masks, need_weights=need_weights, is_causal=True)[0]
        for module in (stock, fused)
    )
    assert torch.allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_nested_tensors(need_weights: bool, average: bool, backend: str) -> None:
    stock, fused = (module.eval() for module in pair(batch_first=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([X[0, :2], X[1], X[2, :1]])
    options = {"need_weights": need_weights, "average_attn_weights": average}
    with torch.no_grad():
        want, want_weights = stock(nested, nested, nested, **options)
        got, weights = fused(nested, nested, nested, **options)
    assert got.is_nested
    for a, b in zip(got.unbind(), want.unbind(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    assert (weights is None) == (want_weights is None)
    if weights is not None:
        assert weights.shape == want_weights.shape
        for n, length in enumerate((2, 6, 1)):
            block = (n, ..., slice(length), slice(length))
            assert torch.allclose(weights[block], want_weights[block], atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.train(),
        lambda m: setattr(m, "batch_first", False),
        lambda m: setattr(m, "num_heads", 1),
        lambda m: setattr(m, "add_zero_attn", True),
        lambda m: setattr(m, "in_proj_weight", None),
        lambda m: m.requires_grad_(),
    ],
)
def test_nested_tensors_are_refused_where_pytorch_refuses_them(change: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([X[0, :2], X[1]])
    texts = []
    for module in pair(batch_first=True):
        module.eval().requires_grad_(False)
        change(module)
        with pytest.raises(AssertionError) as caught:
            module(nested, nested, nested)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
