"""``MultiheadAttention`` against ``torch.nn.MultiheadAttention``: values, gradients, warnings."""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from within_bound import assert_right

from fastattn.nn import MultiheadAttention

EMBED, HEADS, BATCH, LENGTH, SOURCE = 32, 4, 3, 11, 13


@dataclass(frozen=True)
class Call:
    """One point of the grid: a constructor, inputs, masks, and the requested results."""

    bias: bool = True
    add_bias_kv: bool = False
    add_zero_attn: bool = False
    kdim: int | None = None
    vdim: int | None = None
    batch_first: bool = True
    batched: bool = True
    inputs: str = "three"  # "self": one tensor, "shared": key is value
    padding: str = "none"  # or bool, float, exclude: floating, of 0 and -inf
    mask: str = "none"  # or bool2, float2, bool3, float3, causal
    is_causal: bool = False
    need_weights: bool = True
    average: bool = True
    training: bool = True
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        defaults = Call()
        changed = [
            f"{name}={str(value).removeprefix('torch.')}"
            for name, value in vars(self).items()
            if value != getattr(defaults, name)
        ]
        return ",".join(changed) or "defaults"

    @property
    def possible(self) -> bool:
        same_width = self.inputs == "three" or (self.kdim is None and self.vdim is None)
        return same_width and (not self.is_causal or self.mask == "causal")

    def module(self, cls: type[nn.MultiheadAttention]) -> nn.MultiheadAttention:
        """A module of the class, with the options of the call."""
        module = cls(
            EMBED,
            HEADS,
            bias=self.bias,
            add_bias_kv=self.add_bias_kv,
            add_zero_attn=self.add_zero_attn,
            kdim=self.kdim,
            vdim=self.vdim,
            batch_first=self.batch_first,
        )
        return module.train(self.training)

    def tensors(self, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """The query, key and value of the call, in its layout and dtype."""

        def draw(length: int, width: int) -> Tensor:
            shape = (BATCH, length) if self.batch_first else (length, BATCH)
            x = torch.randn((*(shape if self.batched else (length,)), width), generator=generator)
            return x.to(self.dtype)

        query = draw(LENGTH, EMBED)
        if self.inputs == "self":
            return query, query, query
        key = draw(SOURCE, self.kdim or EMBED)
        return query, key, key if self.inputs == "shared" else draw(SOURCE, self.vdim or EMBED)

    def masks(self, source: int, generator: torch.Generator) -> dict[str, Tensor | None]:
        """No row is fully masked: PyTorch has no valid result for it."""
        batch = BATCH if self.batched else 1
        padding = torch.rand(batch, source, generator=generator) < 0.4
        shape = (LENGTH, source) if self.mask[-1:] == "2" else (batch * HEADS, LENGTH, source)
        hidden = torch.rand(shape, generator=generator) < 0.4
        padding[..., 0] = hidden[..., 0] = False
        future = torch.ones(LENGTH, source, dtype=torch.bool).triu(1)

        def added(mask: Tensor) -> Tensor:
            bias = torch.randn(mask.shape, generator=generator).to(self.dtype)
            return bias.masked_fill(mask, float("-inf"))

        key_padding_mask = {
            "none": lambda: None,
            "bool": lambda: padding,
            "float": lambda: added(padding),
            "exclude": lambda: (
                torch.zeros(padding.shape).to(self.dtype).masked_fill(padding, float("-inf"))
            ),
        }[self.padding]()
        attn_mask = {"none": lambda: None, "b": lambda: hidden, "f": lambda: added(hidden)}[
            "none" if self.mask in ("none", "causal") else self.mask[0]
        ]()
        if self.mask == "causal":
            attn_mask = future
        if key_padding_mask is not None and not self.batched:
            key_padding_mask = key_padding_mask[0]
        return {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}


AXES: dict[str, tuple[Any, ...]] = {
    "bias": (True, False),
    "add_bias_kv": (False, True),
    "add_zero_attn": (False, True),
    "kdim": (None, 10),
    "vdim": (None, 6),
    "batch_first": (True, False),
    "batched": (True, False),
    "inputs": ("three", "self", "shared"),
    "padding": ("none", "bool", "float", "exclude"),
    "mask": ("none", "bool2", "float2", "bool3", "float3", "causal"),
    "is_causal": (False, True),
    "need_weights": (True, False),
    "average": (True, False),
    "training": (True, False),
    "dtype": (torch.float32, torch.float64, torch.bfloat16, torch.float16),
}


def sample(count: int) -> list[Call]:
    """Random points; first, points that add a new pair of values of two axes."""
    rng = random.Random(0)
    seen: set[Any] = set()
    fresh, rest = [], []
    while len(fresh) + len(rest) < max(count, 2000):
        call = Call(**{name: rng.choice(values) for name, values in AXES.items()})
        if call.possible:
            pairs = set(itertools.combinations(vars(call).items(), 2))
            (rest if pairs <= seen else fresh).append(call)
            seen |= pairs
    return list(dict.fromkeys(fresh + rest))[:count]


def run(
    module: nn.MultiheadAttention, call: Call, tensors: tuple[Tensor, ...], masks: dict[str, Any]
) -> tuple[dict[str, Tensor], list[str]]:
    """The output, the weights, and the gradient of everything; the warnings."""
    leaves: dict[int, Tensor] = {id(x): x.clone().requires_grad_() for x in tensors}
    query, key, value = (leaves[id(x)] for x in tensors)
    learned = {
        name: mask.clone().requires_grad_()
        for name, mask in masks.items()
        if mask is not None and mask.is_floating_point() and not mask.isinf().all()
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out, weights = module(
            query,
            key,
            value,
            **{**masks, **learned},
            need_weights=call.need_weights,
            average_attn_weights=call.average,
            is_causal=call.is_causal,
        )
    assert (weights is None) == (not call.need_weights)
    results = {"out": out} | ({} if weights is None else {"weights": weights})
    noise = torch.Generator().manual_seed(1)
    loss = sum(
        (x.double() * torch.randn(x.shape, generator=noise, dtype=torch.float64)).sum()
        for x in results.values()
    )
    loss.backward()
    named = {
        "query": query,
        "key": key,
        "value": value,
        **dict(module.named_parameters()),
        **learned,
    }
    gradients = {f"grad {name}": x.grad for name, x in named.items() if x.grad is not None}
    return results | gradients, [str(w.message) for w in caught]


def cast(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A floating tensor in a dtype; masks stay boolean."""
    return x if x is None or x.dtype == torch.bool else x.to(dtype)


def compare(call: Call, generator: torch.Generator) -> None:
    """Hold ``MultiheadAttention`` to the bound; the definition is PyTorch's in float64."""
    stock = call.module(nn.MultiheadAttention)
    for parameter in stock.parameters():  # biases, too
        nn.init.normal_(parameter, std=0.3, generator=generator)
    stock = stock.to(call.dtype)
    fused = call.module(MultiheadAttention).to(call.dtype)
    fused.load_state_dict(stock.state_dict())
    tensors = call.tensors(generator)
    source = tensors[1].shape[-2 if call.batch_first or not call.batched else 0]
    masks = call.masks(source, generator)

    def run_stock(dtype: torch.dtype) -> tuple[dict[str, Tensor], list[str]]:
        by_id = {id(x): x.to(dtype) for x in tensors}
        inputs = tuple(by_id[id(x)] for x in tensors)  # equal tensors stay the same object
        narrow = {name: cast(mask, dtype) for name, mask in masks.items()}
        return run(copy.deepcopy(stock).to(dtype), call, inputs, narrow)

    def definition() -> dict[str, Tensor]:
        with sdpa_kernel(SDPBackend.MATH):
            return run_stock(torch.float64)[0]

    ours, we_said = run(fused, call, tensors, masks)
    assert we_said == run_stock(call.dtype)[1]
    assert all(x.dtype == call.dtype for x in ours.values())
    assert_right(ours, definition)


@pytest.mark.sampled
@pytest.mark.parametrize("call", sample(120), ids=str)
def test_agrees_with_pytorch(call: Call, generator: torch.Generator) -> None:
    compare(call, generator)


@pytest.mark.slow
def test_agrees_with_pytorch_on_a_large_grid(generator: torch.Generator) -> None:
    for call in sample(2000):
        compare(call, generator)


@pytest.mark.sampled
@pytest.mark.parametrize("padding", ["none", "bool", "exclude"])
@pytest.mark.parametrize("mask", ["none", "bool2", "causal", "bool3"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_agrees_with_every_backend(
    mask: str, padding: str, need_weights: bool, backend: str, generator: torch.Generator
) -> None:
    call = Call(inputs="self", mask=mask, padding=padding, need_weights=need_weights)
    compare(call, generator)
    compare(replace(call, add_bias_kv=True, is_causal=mask == "causal"), generator)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("shape", [(0, 7, 9), (3, 0, 9), (3, 7, 0), (0, 0, 0)])
@pytest.mark.parametrize("need_weights", [True, False])
def test_sizes_of_zero(shape: tuple[int, int, int], batch_first: bool, need_weights: bool) -> None:
    n, length, source = shape
    fused = MultiheadAttention(EMBED, HEADS, batch_first=batch_first)
    nn.init.normal_(fused.out_proj.bias)
    sizes = ((n, length, EMBED), (n, source, EMBED))
    query, key = (torch.randn(s if batch_first else (s[1], s[0], s[2])) for s in sizes)
    out, weights = fused(query, key, key, need_weights=need_weights)
    assert out.shape == query.shape
    if need_weights:
        assert weights.shape == (n, length, source)
    out.sum().backward()
    if source == 0:  # without keys, rows are fully masked
        assert torch.equal(out, fused.out_proj.bias.expand_as(out))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("how", ["attn_mask", "key_padding_mask", "both", "floating", "merged"])
def test_a_fully_masked_row(how: str, need_weights: bool, backend: str) -> None:
    """Attention 0, so out_proj.bias; weights 0; no gradient through the row, and none is NaN."""
    torch.manual_seed(0)
    fused = MultiheadAttention(EMBED, HEADS, batch_first=True)
    nn.init.normal_(fused.out_proj.bias)
    x = torch.randn(2, 5, EMBED, requires_grad=True)
    padding, mask = torch.zeros(2, 5, dtype=torch.bool), torch.zeros(5, 5, dtype=torch.bool)
    rows: Any = (0, slice(None))
    if how in ("key_padding_mask", "both"):
        padding[0] = True
    elif how == "merged":  # each leaves some keys, both together none
        padding[0, :3], mask[1, 3:], rows = True, True, (0, 1)
    else:
        mask[2], rows = True, (slice(None), 2)
    masks: dict[str, Tensor] = {}
    if how != "attn_mask" and how != "floating":
        masks["key_padding_mask"] = padding
    if how != "key_padding_mask":
        masks["attn_mask"] = mask
    if how == "floating":
        masks["attn_mask"] = torch.zeros(5, 5).masked_fill(mask, float("-inf"))
    out, weights = fused(x, x, x, **masks, need_weights=need_weights)
    assert torch.isfinite(out).all()
    bias = fused.out_proj.bias.detach()
    assert torch.allclose(out[rows], bias.expand_as(out[rows]), atol=0, rtol=0)
    if need_weights:
        assert (weights[rows] == 0).all()
    grads = torch.autograd.grad(
        out[rows].square().sum(), list(fused.parameters()), retain_graph=True
    )
    for (name, _), grad in zip(fused.named_parameters(), grads, strict=True):
        assert name == "out_proj.bias" or (grad == 0).all(), name
    out.square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in (x, *fused.parameters()))


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_row_of_the_smallest_number_is_uniform(
    need_weights: bool, backend: str, generator: torch.Generator
) -> None:
    """A finite mask on all keys hides none: the mean of the values, not 0, not NaN."""
    call = Call(inputs="self", need_weights=need_weights)
    x, _, _ = call.tensors(generator)
    mask = torch.zeros(LENGTH, LENGTH)
    mask[2] = torch.finfo(torch.float32).min
    stock = call.module(nn.MultiheadAttention)
    fused = call.module(MultiheadAttention)
    fused.load_state_dict(stock.state_dict())
    want, _ = stock(x, x, x, attn_mask=mask)
    got, weights = fused(x, x, x, attn_mask=mask, need_weights=need_weights)
    assert torch.allclose(got, want, atol=1e-6)
    if need_weights:
        assert torch.allclose(weights[:, 2], torch.tensor(1 / LENGTH))
