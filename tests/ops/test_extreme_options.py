"""Integer options of any size: the result of the reference, or an error that names the argument.

Kernels add limits to positions, so the numbers are those at which such sums leave 32 or 64 bits.
The build with UBSan reports an overflow even where the result is right (`make test-sanitized`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn import flash_attn, masks
from fastattn.autograd.decode import decode
from fastattn.autograd.sdpa import attention
from fastattn.autograd.varlen import packed_attention
from fastattn.backends.primitives import AttentionOptions, DecodeOptions, VarlenOptions
from fastattn.bias import T5

LARGEST = 2**63 - 1
NUMBERS = (
    2**31 - 1,
    2**31,
    2**60,
    2**61,
    2**62,
    LARGEST - 1,
    LARGEST,
    -(2**31),
    -(2**62),
    ~LARGEST,
)
OUTSIDE = (LARGEST + 1, 2**70, ~LARGEST - 1, -(2**70))

Run = Callable[..., Any]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


QUERY, KEY, VALUE = normal(1, 4, 7, 16), normal(1, 2, 9, 16), normal(1, 2, 9, 8)
LONG = (normal(1, 2, 70, 16), normal(1, 2, 75, 16))
PACKED = (normal(7, 4, 16), normal(9, 2, 16), normal(9, 2, 8))
STARTS = (torch.tensor([0, 3, 3, 7]), torch.tensor([0, 5, 6, 9]))
SLOPES = torch.tensor([0.5, 0.25])
ROWS = (normal(2, 3, 4), normal(2, 7, 4))
POSITIONS = torch.tensor([[1.5, -3.0, 20.0], [0.0, 5.0, 1e18]])
TOKENS = torch.tensor([[[1, 2], [0, 3]]])
BOTTOM_RIGHT = {"causal_alignment": "bottom_right"}


# name: (the call as a function of the number and of the tensors, the tensors to differentiate by)
CALLS: dict[str, tuple[Run, tuple[Tensor, ...]]] = {
    "window": (
        lambda n, q, k: fastattn.scaled_dot_product_attention(q, k, k, window=(n, n)),
        LONG,
    ),
    "window-weights": (
        lambda n, q, k: fastattn.scaled_dot_product_attention(
            q, k, k, window=(n, 0), need_weights=True, return_lse=True, **BOTTOM_RIGHT
        ),
        LONG,
    ),
    "window-slopes": (
        lambda n, q, k: fastattn.scaled_dot_product_attention(
            q, k, k, window=(0, n), alibi_slopes=SLOPES, **BOTTOM_RIGHT
        ),
        LONG,
    ),
    "window-varlen": (
        lambda n, q, k, v: fastattn.varlen_attention(
            q, k, v, *STARTS, window=(n, n), return_lse=True, **BOTTOM_RIGHT
        ),
        PACKED,
    ),
    "max_seqlen": (
        lambda n, q, k, v: fastattn.varlen_attention(q, k, v, *STARTS, n, n),
        PACKED,
    ),
    "window-decode": (
        lambda n: fastattn.decode_attention(QUERY, KEY, VALUE, 8, window=(n, n)),
        (),
    ),
    "cache_seqlens": (lambda n: fastattn.decode_attention(QUERY, KEY, VALUE, n), ()),
    "window-flash": (
        lambda n, q, k, v: flash_attn.flash_attn_varlen_func(
            q, k, v, *STARTS, 4, 5, window_size=(n, n)
        ),
        PACKED,
    ),
    "window-stats": (lambda n: fastattn.attention_stats(*LONG, window=(n, 0)).entropy, ()),
    "top_k": (lambda n: fastattn.attention_stats(*LONG, top_k=n).lse, ()),
    "rows": (lambda n: fastattn.attention_stats(*LONG, rows=(n,)).lse, ()),
    "max_distance": (
        lambda n, q, k, table: fastattn.scaled_dot_product_attention(
            q, k, k, relative_bias=T5(table, True, n)
        ),
        (*LONG, normal(8, 2)),
    ),
    "hops": (lambda n, u, m: fastattn.memory_hop_attention(u, m, m, hops=n), ROWS),
    "update_steps_max": (
        lambda n, x, m: fastattn.hopfield_retrieve(x, m, update_steps_max=n, update_steps_eps=0.1),
        ROWS,
    ),
    "D-local-m": (
        lambda n, q, k: fastattn.luong_attention(q, k, k, method="dot", window="local-m", D=n),
        ROWS,
    ),
    "D-local-p": (
        lambda n, q, k: fastattn.luong_attention(
            q, k, k, method="dot", window="local-p", D=n, positions=POSITIONS, need_weights=True
        ),
        ROWS,
    ),
    "padding_idx": (
        lambda n, weight: fastattn.encode_memory(TOKENS, weight, padding_idx=n),
        (normal(5, 4),),
    ),
    "offset": (lambda n, x: fastattn.sinusoidal_encoding(x, offset=n), (ROWS[0],)),
    "padding_idx-positions": (
        lambda n, x: fastattn.sinusoidal_encoding(
            x, positions=torch.tensor([LARGEST, 0, ~LARGEST]), padding_idx=n
        ),
        (ROWS[0],),
    ),
    "left": (
        lambda n, q, k: fastattn.scaled_dot_product_attention(
            q, k, k, mask=masks.sliding_window(n, 0), **BOTTOM_RIGHT
        ),
        LONG,
    ),
    "size": (
        lambda n, q, k: fastattn.scaled_dot_product_attention(q, k, k, mask=masks.chunked(n)),
        LONG,
    ),
    "lengths": (
        lambda n, q, k: fastattn.scaled_dot_product_attention(q, k, k, mask=masks.prefix_lm(n)),
        LONG,
    ),
}

# The primitives get the numbers themselves, as they do from compiled code.
PRIMITIVES: dict[str, tuple[Run, tuple[Tensor, ...]]] = {
    "AttentionOptions": (
        lambda n, q, k: attention(
            q,
            k,
            k,
            *(None,) * 7,
            AttentionOptions(scale=0.25, offset=5, window_left=n, window_right=n),
        )[0],
        LONG,
    ),
    "offset of AttentionOptions": (
        lambda n, q, k: attention(
            q, k, k, *(None,) * 7, AttentionOptions(scale=0.25, offset=n, window_right=0)
        )[0],
        LONG,
    ),
    "VarlenOptions": (
        lambda n, q, k, v: packed_attention(
            q,
            k,
            v,
            *STARTS,
            *(None,) * 5,
            VarlenOptions(scale=0.25, bottom_right=True, window_left=n, window_right=n),
        )[0],
        PACKED,
    ),
    "DecodeOptions": (
        lambda n: decode(
            QUERY,
            KEY,
            VALUE,
            torch.tensor([8]),
            *(None,) * 9,
            DecodeOptions(scale=0.25, window_left=n, window_right=n),
        ),
        (),
    ),
}


def results(run: Run, number: int, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """The results of a call, and its gradients."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    found = run(number, *leaves)
    found = [found] if isinstance(found, Tensor) else list(found)
    if leaves:
        loss = torch.stack([x.double().sin().sum() for x in found if x.requires_grad]).sum()
        found += torch.autograd.grad(loss, leaves)
    return [x.detach() for x in found]


def outcome(run: Run, number: int, tensors: tuple[Tensor, ...]) -> list[Tensor] | Exception:
    try:
        return results(run, number, tensors)
    except ValueError as error:
        return error


def assert_same_outcome(ours: Any, theirs: Any, name: str) -> None:
    if isinstance(theirs, ValueError):
        assert isinstance(ours, ValueError)
        assert str(ours) == str(theirs)
        assert name in str(ours)
        return
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=2e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CALLS)
def test_a_number_of_any_size(name: str, choice: str) -> None:
    run, tensors = CALLS[name]
    for number in NUMBERS:
        with fastattn.use_backend("reference"):
            theirs = outcome(run, number, tensors)
        assert_same_outcome(outcome(run, number, tensors), theirs, name.partition("-")[0])


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("number", OUTSIDE)
def test_a_number_that_does_not_fit_is_named(name: str, number: int) -> None:
    run, tensors = CALLS[name]
    with pytest.raises(ValueError, match=name.partition("-")[0]):
        results(run, number, tensors)


@pytest.mark.parametrize("name", PRIMITIVES)
def test_a_kernel_reads_a_number_of_any_size(name: str, target: Any) -> None:
    run, tensors = PRIMITIVES[name]
    for number in NUMBERS:
        with fastattn.use_backend(target.backend):
            ours = outcome(run, number, tensors)
        if isinstance(ours, ValueError):
            assert name.startswith("offset")
            assert f"{name} must be within" in str(ours)
            continue
        with fastattn.use_backend("reference"):
            assert_same_outcome(ours, outcome(run, number, tensors), name)


@pytest.mark.parametrize("limit", [2**60, 2**61, LARGEST])
def test_a_limit_that_no_key_reaches_is_none(limit: int, choice: str) -> None:
    for name in ("window", "window-varlen", "window-decode", "window-flash"):
        run, tensors = CALLS[name]
        for ours, none in zip(results(run, limit, tensors), results(run, -1, tensors), strict=True):
            torch.testing.assert_close(ours, none, rtol=0, atol=0)


@pytest.mark.parametrize("D", [10, 2**31, LARGEST])
def test_a_local_window_of_all_keys_is_global_attention(D: int, choice: str) -> None:
    query, key = ROWS
    everywhere = fastattn.luong_attention(query, key, key, method="dot", need_weights=True)
    for positions in (None, torch.tensor([0.0, 3.25, 8.0])):
        local = fastattn.luong_attention(
            query,
            key,
            key,
            method="dot",
            window="local-m",
            D=D,
            positions=positions,
            need_weights=True,
        )
        torch.testing.assert_close(local, everywhere, rtol=1e-5, atol=1e-6)
