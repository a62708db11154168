"""nn.RelativeBias, nn.T5RelativeBias, nn.WindowRelativeBias, and attention with one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from fastattn import nn, scaled_dot_product_attention, use_backend
from fastattn.ops._relative_bias import t5_buckets

BIASES: dict[str, Callable[[], Any]] = {
    "table": lambda: nn.RelativeBias(2, 12, dtype=torch.float64),
    "t5": lambda: nn.T5RelativeBias(2, 8, 10, dtype=torch.float64),
    "t5-decoder": lambda: nn.T5RelativeBias(2, 8, 10, False, dtype=torch.float64),
    "window": lambda: nn.WindowRelativeBias(2, (3, 4), dtype=torch.float64),
}


def of_pairs(name: str, weight: Tensor) -> Tensor:
    """The bias [H, 12, 12] of a sequence of 12."""
    i = torch.arange(12)
    d = i[:, None] - i
    if name == "table":
        return weight[:, d + 11]
    if name == "window":
        index = (i[:, None] // 4 - i // 4 + 2) * 7 + i[:, None] % 4 - i % 4 + 3
        return weight[index].permute(2, 0, 1)
    return weight[t5_buckets(d, 8, name == "t5", 10)].permute(2, 0, 1)


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("training", [False, True])
def test_attention(name: str, training: bool, normal: Callable[..., Tensor]) -> None:
    bias = BIASES[name]()
    made: dict[str, Any] = {"batch_first": True, "dtype": torch.float64}
    module = nn.MultiheadAttention(8, 2, **made, relative_bias=bias).train(training)
    stock = torch.nn.MultiheadAttention(8, 2, **made).train(training)
    stock.load_state_dict(module.state_dict(), strict=False)
    torch.nn.init.normal_(bias.weight)
    x, mask = normal(3, 12, 8), normal(12, 12)
    padding = torch.zeros(3, 12).double()
    padding[:, -2:] = -torch.inf
    with torch.set_grad_enabled(training):
        for options in ({}, {"attn_mask": mask}, {"key_padding_mask": padding}):
            for need_weights in (False, True):
                dense = of_pairs(name, bias.weight) + options.get("attn_mask", 0)
                given = {**options, "attn_mask": dense.repeat(3, 1, 1)}
                got = module(x, x, x, need_weights=need_weights, **options)
                want = stock(x, x, x, need_weights=need_weights, **given)
                assert_close(got, want)
                if training:
                    found = torch.autograd.grad(got[0].square().sum(), bias.weight)
                    assert_close(found, torch.autograd.grad(want[0].square().sum(), bias.weight))


@pytest.mark.parametrize("options", [{}, {"max_distance": 9}, {"of_keys": False, "added": True}])
def test_terms_of_content(options: dict[str, Any], normal: Callable[..., Tensor]) -> None:
    bias = nn.DisentangledBias(2, 4, 6, **options, dtype=torch.float64)
    for parameter in bias.parameters():
        torch.nn.init.normal_(parameter)
    module = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64, relative_bias=bias)
    rows = [normal(n, 8) for n in (9, 1, 14)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    outs = [module(row[None], row[None], row[None])[0][0] for row in rows]
    assert_close(module(jagged, jagged, jagged)[0].values(), torch.cat(outs))
    of_rows = torch.nn.functional.linear(rows[0], module.in_proj_weight, module.in_proj_bias)
    query, key, value = of_rows.unflatten(1, (3, 2, 4)).permute(1, 2, 0, 3)[:, None]
    with use_backend("reference"):
        want = scaled_dot_product_attention(query, key, value, relative_bias=bias())
    assert_close(outs[0], module.out_proj(want[0].transpose(0, 1).flatten(1)))
    got = torch.autograd.grad(torch.cat(outs).sin().sum(), list(bias.parameters()))
    assert all(x.abs().max() > 0 for x in got)
    assert repr(bias) == f"DisentangledBias(max_distance={options.get('max_distance')})"


def test_layers_share_a_bias() -> None:
    bias = nn.T5RelativeBias(2)
    layers = torch.nn.ModuleList(nn.MultiheadAttention(8, 2, relative_bias=bias) for _ in range(2))
    names = {name for name, _ in layers.named_parameters() if "relative" in name}
    assert names == {"0.relative_bias.weight"}
    assert set(layers.state_dict()) > {"0.relative_bias.weight", "1.relative_bias.weight"}


def test_tables() -> None:
    torch.manual_seed(0)
    assert nn.RelativeBias(3, 5).weight.shape == (3, 9)
    assert repr(nn.T5RelativeBias(3)) == "T5RelativeBias(max_distance=128, bidirectional=True)"
    window = nn.WindowRelativeBias(3, (7, 5), dtype=torch.bfloat16)
    assert repr(window) == "WindowRelativeBias(window=(7, 5))"
    assert window.weight.shape == (13 * 9, 3)
    assert window().window == (7, 5)
    assert 0 < nn.RelativeBias(3, 50).weight.std() < 0.03


def test_errors() -> None:
    for option in ("add_bias_kv", "add_zero_attn"):
        with pytest.raises(ValueError, match="relative_bias must be None with add_bias_kv"):
            nn.MultiheadAttention(8, 2, relative_bias=nn.RelativeBias(2, 5), **{option: True})
    module = nn.MultiheadAttention(8, 2, relative_bias=nn.RelativeBias(2, 5), batch_first=True)
    with pytest.raises(RuntimeError, match="n odd and at least 11 for 6 queries and 6 keys"):
        module(*[torch.ones(1, 6, 8)] * 3)
    nested = torch.nested.nested_tensor([torch.ones(3, 8)])
    with pytest.raises(AssertionError, match="relative_bias only jagged ones"):
        module(nested, nested, nested)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("name", ["table", "t5"])
def test_jagged(name: str, need_weights: bool, normal: Callable[..., Tensor]) -> None:
    bias = BIASES[name]()
    torch.nn.init.normal_(bias.weight)
    module = nn.MultiheadAttention(8, 2, relative_bias=bias, batch_first=True, dtype=torch.float64)
    rows = [normal(n, 8) for n in (3, 0, 7)]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged)
    out, weights = module(x, x, x, need_weights=need_weights)
    (got,) = torch.autograd.grad(out.values().sin().sum(), bias.weight)
    single = [module(row[None], row[None], row[None]) for row in rows]
    for row, found, (want, want_weights) in zip(rows, range(3), single, strict=True):
        assert_close(out.unbind()[found], want[0])
        if need_weights:
            assert_close(weights[found, : len(row), : len(row)], want_weights[0])
    total = sum(want.sin().sum() for want, _ in single)
    assert_close(got, torch.autograd.grad(total, bias.weight)[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.RelativeBias(2, 0), "max_length must be an int of at least 1, got 0"),
        (lambda: nn.T5RelativeBias(2, 1), "num_buckets must be an int of at least 4, got 1"),
        (
            lambda: nn.T5RelativeBias(2, max_distance=-5),
            "max_distance must be an int",
        ),
        (lambda: nn.DisentangledBias(2, 4, 1, 9), "farthest must be an int of at least 2, got 1"),
        (lambda: nn.DisentangledBias(2, 4, 6, 4), "max_distance must be an int of at least 5"),
        (lambda: nn.WindowRelativeBias(2, 4), r"window must be \(height, width\), got 4"),
        (
            lambda: nn.WindowRelativeBias(2, (4, 0)),
            "the width of window must be",
        ),
    ],
)
def test_bad_sizes_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_relative_bias_must_be_a_module() -> None:
    with pytest.raises(TypeError, match=r"relative_bias must be a .* got Parameter"):
        nn.MultiheadAttention(8, 2, relative_bias=torch.nn.Parameter(torch.zeros(2, 9)))
