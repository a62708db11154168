"""The names of flash-attn, against the operators they stand for."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

from fastattn import (
    decode_attention,
    flash_attn,
    masks,
    scaled_dot_product_attention,
    varlen_attention,
)

# Of flash-attn 2.8, in order: https://github.com/Dao-AILab/flash-attention
_COMMON = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
SIGNATURES = {
    "flash_attn_func": f"q k v {_COMMON} return_attn_probs",
    "flash_attn_qkvpacked_func": f"qkv {_COMMON} return_attn_probs",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
    f"{_COMMON} return_attn_probs block_table",
    "flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens "
    "cache_batch_idx cache_leftpad block_table softmax_scale causal window_size softcap "
    "rotary_interleaved alibi_slopes num_splits return_softmax_lse",
}
# By name, at the end.
ADDED = {
    "flash_attn_func": "s_aux",
    "flash_attn_qkvpacked_func": "",
    "flash_attn_varlen_func": "s_aux",
    "flash_attn_with_kvcache": "rotary_positions key_scales value_scales relative_bias mask s_aux",
}


@pytest.fixture
def qkv(generator: torch.Generator) -> list[Tensor]:
    shapes = ((2, 5, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def transposed(tensors: list[Tensor]) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_equal_flash_attns(name: str) -> None:
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    by_name = [n for n, x in parameters.items() if x.kind is inspect.Parameter.KEYWORD_ONLY]
    assert by_name == ADDED[name].split()
    assert list(parameters) == SIGNATURES[name].split() + by_name


def test_func_is_bottom_right_and_grouped(qkv: list[Tensor]) -> None:
    out, lse, probabilities = flash_attn.flash_attn_func(
        *qkv, 0.0, 0.3, True, (4, -1), 5.0, torch.rand(4), True, True
    )
    assert probabilities is None
    assert out.shape == (2, 5, 4, 8)
    assert out.is_contiguous()
    assert lse.shape == (2, 4, 5)
    want = scaled_dot_product_attention(
        *transposed(qkv), is_causal=True, enable_gqa=True, causal_alignment="bottom_right"
    )
    got = flash_attn.flash_attn_func(*qkv, causal=True)
    assert torch.equal(got.transpose(1, 2), want)


def test_qkvpacked_equals_func(qkv: list[Tensor]) -> None:
    packed = torch.stack([qkv[0], -qkv[0], 2 * qkv[0]], 2).requires_grad_()
    out = flash_attn.flash_attn_qkvpacked_func(packed, causal=True)
    assert torch.equal(out, flash_attn.flash_attn_func(*packed.unbind(2), causal=True))
    out.sum().backward()
    assert packed.grad is not None


def test_varlen_equals_func_of_each_sequence(qkv: list[Tensor]) -> None:
    flat = [x.flatten(0, 1) for x in qkv]
    q_ends, k_ends = torch.tensor([0, 5, 10]).int(), torch.tensor([0, 9, 18]).int()
    args = (*flat, q_ends, k_ends, 5, 9)
    out, lse, _ = flash_attn.flash_attn_varlen_func(*args, causal=True, return_attn_probs=True)
    want, want_lse, _ = flash_attn.flash_attn_func(*qkv, causal=True, return_attn_probs=True)
    assert torch.equal(out.unflatten(0, (2, 5)), want)
    assert torch.equal(lse.unflatten(1, (2, 5)).transpose(0, 1), want_lse)
    longest = [(ends[1:] - ends[:-1]).max() for ends in (q_ends, k_ends)]
    found = flash_attn.flash_attn_varlen_func(*args[:-2], *longest, causal=True)
    assert torch.equal(found, out)
    wide = varlen_attention(*args, softcap=2.0, causal_alignment="bottom_right", window=(3, 1))
    got = flash_attn.flash_attn_varlen_func(*args, softcap=2.0, window_size=(3, 1))
    assert torch.equal(got, wide)


def test_with_kvcache_appends_and_equals_func_of_the_cache(qkv: list[Tensor]) -> None:
    q, k, v = qkv
    caches = [torch.full((3, 20, 2, 8), torch.nan) for _ in range(2)]
    entries, lengths = torch.tensor([2, 0]).int(), torch.tensor([4, 4]).int()
    for cache, x in zip(caches, (k, v), strict=True):
        cache[entries.long(), :4] = x[:, :4]
    out, lse = flash_attn.flash_attn_with_kvcache(
        q,
        *caches,
        k[:, 4:],
        v[:, 4:],
        cache_seqlens=lengths,
        cache_batch_idx=entries,
        causal=True,
        return_softmax_lse=True,
    )
    want, want_lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    assert torch.equal(caches[0][entries.long(), :9], k)
    assert out.is_contiguous()
    with pytest.raises(NotImplementedError, match="several queries needs causal, a window"):
        flash_attn.flash_attn_with_kvcache(q, *caches, rotary_cos=q)
    with pytest.raises(TypeError, match="window must be None or a pair of ints, got 3"):
        flash_attn.flash_attn_with_kvcache(q, *caches, window_size=3)
    with pytest.raises(ValueError, match="q and k must be tensors of shape"):
        flash_attn.flash_attn_with_kvcache([q], *caches)
    with pytest.raises(NotImplementedError, match="got 5 queries and 4 new keys"):
        flash_attn.flash_attn_with_kvcache(q, *caches, k[:, :4], v[:, :4], rotary_cos=q)
    padded = flash_attn.flash_attn_with_kvcache(
        q, *caches, cache_seqlens=lengths + 5, cache_batch_idx=entries, causal=True,
        cache_leftpad=torch.tensor([2, 2]),
    )  # fmt: skip
    torch.testing.assert_close(
        padded[:, -1:], flash_attn.flash_attn_func(q[:, -1:], k[:, 2:], v[:, 2:])
    )


@pytest.mark.parametrize("interleaved", [True, False])
def test_with_kvcache_rotates(qkv: list[Tensor], interleaved: bool) -> None:
    q, k, v = qkv
    caches = [torch.zeros(2, 20, 2, 8) for _ in range(2)]
    turns = torch.randn(20, 4)
    tables = {"rotary_cos": turns.cos(), "rotary_sin": turns.sin()}
    given = {"is_causal": True, "layout": "bnhd", "rotary_interleaved": interleaved}
    new = {"key": k[:, :5], "value": v[:, :5]}
    lengths = torch.tensor([4, 15])
    want = decode_attention(q, *caches, lengths, **new, **tables, **given)
    got = flash_attn.flash_attn_with_kvcache(
        q, *caches, *new.values(), *tables.values(), lengths, causal=True,
        rotary_interleaved=interleaved,
    )  # fmt: skip
    assert torch.equal(got, want)


def test_sinks_are_s_aux(qkv: list[Tensor]) -> None:
    sinks = torch.randn(4)
    out = flash_attn.flash_attn_func(*qkv, causal=True, s_aux=sinks)
    given = {"enable_gqa": True, "causal_alignment": "bottom_right", "sinks": sinks}
    want = scaled_dot_product_attention(*transposed(qkv), is_causal=True, **given)
    assert torch.equal(out.transpose(1, 2), want)
    q_ends, k_ends = torch.tensor([0, 5, 10]), torch.tensor([0, 9, 18])
    flat = (*(x.flatten(0, 1) for x in qkv), q_ends, k_ends, 5, 9)
    packed = flash_attn.flash_attn_varlen_func(*flat, causal=True, s_aux=sinks)
    assert torch.equal(packed.unflatten(0, (2, 5)), out)
    cached = flash_attn.flash_attn_with_kvcache(*qkv, causal=True, s_aux=sinks)
    torch.testing.assert_close(cached, out)


def test_with_kvcache_takes_the_options_of_decoding(qkv: list[Tensor]) -> None:
    q, k, v = qkv
    tree = masks.draft_tree(torch.eye(5, dtype=torch.bool))
    turns = torch.randn(20, 4)
    given = {
        "rotary_cos": turns.cos(),
        "rotary_sin": turns.sin(),
        "rotary_positions": torch.tensor([4, 5, 5, 5, 5]),
        "relative_bias": torch.randn(4, 2 * 9 - 1),
        "mask": tree,
    }
    found = []
    for name in ("decode_attention", "flash_attn_with_kvcache"):
        caches = [torch.zeros(2, 20, 2, 8, dtype=torch.int8) for _ in range(2)]
        scales = {f"{kind}_scales": torch.ones(2, 20, 2) for kind in ("key", "value")}
        if name == "decode_attention":
            new = {"key": k[:, :5], "value": v[:, :5], "layout": "bnhd"}
            out = decode_attention(q, *caches, 4, **new, **scales, **given, sinks=turns[0])
        else:
            new = {"k": k[:, :5], "v": v[:, :5], "cache_seqlens": 4, "rotary_interleaved": False}
            out = flash_attn.flash_attn_with_kvcache(
                q, *caches, **new, **scales, **given, s_aux=turns[0]
            )
        found.append((out, *caches, *scales.values()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_unsupported_calls_are_clear_errors(qkv: list[Tensor]) -> None:
    with pytest.raises(NotImplementedError, match="return_attn_probs must be False with dropout"):
        flash_attn.flash_attn_func(*qkv, dropout_p=0.1, return_attn_probs=True)
    with pytest.raises(ValueError, match=r"\[B, L, H, D\]"):
        flash_attn.flash_attn_func(*(x[0] for x in qkv))
    with pytest.raises(ValueError, match=r"\[B, L, 3, H, D\]"):
        flash_attn.flash_attn_qkvpacked_func(qkv[0])
