"""Every dimension of every operator may be 0: the result of the reference, or its error.

Fresh memory is NaN, which shows results and gradients that no kernel writes.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn import flash_attn, masks
from fastattn.bias import T5, Decomposed2d, Disentangled
from fastattn.testing import Target

SIZES = {"B": 2, "H": 4, "K": 2, "L": 3, "S": 5, "D": 8, "V": 6, "N": 3, "J": 2}

HEADS = "BHKLSDV"
Operands = tuple[Tensor, ...]


def normal(*shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=draw).requires_grad_()


def heads(d: Any) -> Operands:
    """Query, key and value of the given sizes."""
    return normal(d.B, d.H, d.L, d.D), normal(d.B, d.K, d.S, d.D), normal(d.B, d.K, d.S, d.V)


def twice(x: Tensor) -> Tensor:
    """Each element twice, so that every second one has a stride of 2."""
    return torch.stack([x, x], -1).flatten(-2)


def packed(d: Any) -> Operands:
    """Packed queries, keys and values."""
    return normal(d.L, d.H, d.D), normal(d.S, d.K, d.D), normal(d.S, d.K, d.V)


def starts(d: Any) -> tuple[Tensor, Tensor]:
    """Where each packed sequence begins."""
    parts = torch.arange(d.B + 1)
    return parts * d.L // max(d.B, 1), parts * d.S // max(d.B, 1)


def rows(d: Any) -> Operands:
    """Queries and keys without heads."""
    return normal(d.B, d.L, d.D), normal(d.B, d.S, d.D), normal(d.B, d.S, d.V)


def nothing(d: Any) -> Operands:
    """No tensors."""
    return ()


def cache(d: Any) -> Operands:
    """A query and a cache."""
    return tuple(x.detach() for x in heads(d))


sdpa = functools.partial(fastattn.scaled_dot_product_attention, enable_gqa=True)
varlen, decode = fastattn.varlen_attention, fastattn.decode_attention
luong, hopfield = fastattn.luong_attention, fastattn.hopfield_retrieve
hops, additive = fastattn.memory_hop_attention, fastattn.additive_attention
OPTIONS: dict[str, Any] = {"window": (2, 1), "softcap": 2.0}
LOCAL: dict[str, Any] = {"window": "local-p"}


def pages(d: Any) -> Any:
    """Decoding on pages."""
    caches = (normal(6, d.K, d.S, x).detach() for x in (d.D, d.V))
    table = torch.arange(d.B * d.N).view(d.B, d.N)
    return decode(cache(d)[0], *caches, min(2, d.S * d.N), block_table=table)


def fewer_pages(d: Any) -> Any:
    """Decoding with fewer pages than the table names, for sequences without keys."""
    tensors = (x[:n] for x, n in zip(cache(d), (d.B, 1, 1), strict=True))
    return decode(*tensors, 0, block_table=torch.zeros(d.B, d.N, dtype=torch.int64))


def concat(d: Any, *x: Tensor) -> Any:
    """Luong attention by concatenation, at given positions."""
    weight, at = (normal(4, 2 * d.D).detach(), normal(4).detach()), torch.ones(d.B, d.L)
    return luong(*x, method="concat", weight=weight, positions=at, need_weights=True, **LOCAL)


# name: (the dimensions, the operands to differentiate by, the call)
CALLS: dict[str, tuple[str, Callable[[Any], Operands], Callable[..., Any]]] = {
    "attention": (HEADS, heads, lambda d, *x: sdpa(*x, return_lse=True, need_weights=True)),
    "attention-biases": (
        HEADS,
        lambda d: (*heads(d), normal(d.L, d.S), normal(8, d.H)),
        lambda d, *x: sdpa(*x[:4], sinks=torch.ones(d.H), relative_bias=T5(x[4]), **OPTIONS),
    ),
    "attention-terms": (
        HEADS,
        lambda d: (
            *heads(d), *(normal(7, d.H, d.D) for _ in "RP"), *(normal(d.H, d.D) for _ in "uv")
        ),
        lambda d, *x: sdpa(*x[:3], relative_bias=Disentangled(*x[3:], 9), return_lse=True),
    ),
    "attention-image": (
        HEADS,
        lambda d: (*heads(d), normal(d.B, d.H, d.L, d.S), normal(d.B, d.H, d.L, 1)),
        lambda d, *x: sdpa(*x[:3], relative_bias=Decomposed2d(*x[3:]), **OPTIONS),
    ),
    "varlen-terms": (
        HEADS,
        lambda d: (*packed(d), *(normal(7, d.H, d.D) for _ in "RP")),
        lambda d, *x: varlen(*x[:3], *starts(d), relative_bias=Disentangled(*x[3:])),
    ),
    "attention-averaged": (
        *(HEADS, heads), lambda d, *x: sdpa(*x, need_weights=True, average_weights=True)
    ),
    "attention-columns-apart": (
        HEADS,
        lambda d: tuple(twice(x)[..., ::2].detach().requires_grad_() for x in heads(d)),
        lambda d, *x: sdpa(*x),
    ),
    "attention-mask": (
        *(HEADS, heads), lambda d, *x: sdpa(*x, mask=masks.causal() | masks.chunked(2))
    ),
    "varlen": (
        *(HEADS, packed), lambda d, *x: varlen(*x, *starts(d), is_causal=True, return_lse=True)
    ),
    "varlen-biases": (
        HEADS,
        lambda d: (*packed(d), normal(8, d.H)),
        lambda d, *x: varlen(
            *x[:3], *starts(d), relative_bias=T5(x[3]), sinks=torch.ones(d.H)
        ),
    ),
    "varlen-slopes": (
        *(HEADS, packed),
        lambda d, *x: varlen(*x, *starts(d), alibi_slopes=torch.ones(d.B, d.H)),
    ),
    "decode": (HEADS, nothing, lambda d: decode(*cache(d), min(2, d.S), return_lse=True)),
    "decode-pages": (HEADS + "N", nothing, pages),
    "decode-fewer-pages": (HEADS + "N", nothing, fewer_pages),
    "flash": (
        *(HEADS, heads),
        lambda d, *x: flash_attn.flash_attn_func(*(y.transpose(1, 2) for y in x), causal=True),
    ),
    "memory-hops": (
        "BLSDN",
        lambda d: (normal(d.B, d.L, d.D), normal(d.B, d.S, d.D), normal(d.D, d.D)),
        lambda d, u, m, h: hops(u, m, m, hops=d.N, hop_proj=h),
    ),
    "additive": (
        "BLSDV",
        lambda d: (*rows(d), normal(d.D)),
        lambda d, *x: additive(*x, need_weights=True),
    ),
    "luong": (
        *("BLSDV", rows),
        lambda d, *x: luong(*x, method="dot", positions=torch.ones(d.B, d.L), **LOCAL),
    ),
    "luong-concat": ("BLSDV", rows, concat),
    "hopfield": (
        "BKLSD",
        lambda d: (normal(d.B, d.K, d.L, d.D), normal(d.B, d.K, d.S, d.D)),
        lambda d, *x: hopfield(*x, update_steps_max=2, need_weights=True),
    ),
    "hopfield-shared": (
        "BKLSD",
        lambda d: (normal(d.B, d.K, d.L, d.D), normal(1, d.K, d.S, d.D), normal(d.B, 1, 1, d.S)),
        lambda d, x, m, mask: hopfield(
            x, m, update_steps_max=2, attn_mask=mask, grad="implicit"
        ),
    ),
    "encode-memory": (
        "BNJSD",
        lambda d: (normal(d.S, d.D), normal(d.N, d.D)),
        lambda d, w, t: fastattn.encode_memory(
            torch.zeros(d.B, d.N, d.J, dtype=torch.int64), w, temporal=t, padding_idx=0
        ),
    ),
    "sinusoidal": (
        "BLD",
        lambda d: (normal(d.B, d.L, d.D),),
        lambda d, x: fastattn.sinusoidal_encoding(x, padding_idx=2),
    ),
    "merge-states": (
        "BKLV",
        lambda d: (normal(d.B, d.K, d.L, d.V), normal(d.B, d.K, d.L)) * 2,
        lambda d, *x: fastattn.merge_states(*x),
    ),
}  # fmt: skip


def zeros(dimensions: str) -> Iterator[tuple[str, ...]]:
    """The dimensions that are 0: none, one, two or all."""
    for count in (0, 1, 2, len(dimensions)):
        yield from itertools.combinations(dimensions, count)


def outcome(name: str, empty: tuple[str, ...]) -> list[Tensor] | Exception:
    """The results and the gradients, or the error."""
    _, operands, call = CALLS[name]
    sizes = SimpleNamespace(**{**SIZES, **dict.fromkeys(empty, 0)})
    leaves = operands(sizes)
    try:
        found = call(sizes, *leaves)
        found = [found] if isinstance(found, Tensor) else list(found)
        parts = [x.double().sin().sum() for x in found if x.requires_grad]
        if parts:
            grads = torch.autograd.grad(torch.stack(parts).sum(), leaves, materialize_grads=True)
            found += grads
    except (IndexError, RuntimeError, ValueError) as error:
        return error
    return [x.detach() for x in found]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CALLS)
def test_sizes_of_zero(name: str, engine: Target) -> None:
    for empty in zeros(CALLS[name][0]):
        ours = outcome(name, empty)
        with fastattn.use_backend("reference"):
            expected = outcome(name, empty)
        if isinstance(expected, Exception):
            assert isinstance(ours, type(expected)), f"{empty}: {ours!r}"
            assert str(ours) == str(expected)
            assert re.search("must (be|not|divide)", str(expected))
        else:
            assert not isinstance(ours, Exception), f"{empty}: {ours!r}"
            for x, y in zip(ours, expected, strict=True):
                assert x.shape == y.shape, empty
                # Of float32 on both sides: relative to the largest element, as sums cancel.
                largest = max([1.0, *y[y.isfinite()].abs().flatten().tolist()])
                assert torch.allclose(x, y, rtol=1e-5, atol=1e-5 * largest), empty


@pytest.mark.parametrize("heads", [(0, 0, 2), (0, 2, 0), (0, 0, 0), (0, 2, 2)])
def test_grouped_queries_without_heads(heads: tuple[int, int, int], choice: str) -> None:
    query, key, value = (
        normal(2, n, length, 8) for n, length in zip(heads, (3, 5, 5), strict=True)
    )
    out = fastattn.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    assert out.shape == (2, 0, 3, 8)
    assert not any(x.any() for x in torch.autograd.grad(out.sum(), (query, key, value)))
