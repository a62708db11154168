"""The mask function of the integration with transformers, against its own sdpa_mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import masking_utils as hf

import fastattn
from fastattn.integrations.transformers._attention import attention_forward
from fastattn.integrations.transformers._masks import StructuredMask, attention_mask
from fastattn.integrations.transformers._patterns import Pattern, pattern_of

if not hasattr(hf, "packed_sequence_compatibility_function"):
    pytest.skip(
        "mask functions of older releases have other arguments; tests of models cover them",
        allow_module_level=True,
    )

SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 1, 1, 1, 1, 2, 3]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [4, 5, 0, 1, 2, 3, 0, 7]])


def _packed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A mask function within packed sequences."""
    return hf.packed_sequence_compatibility_function(function, POSITIONS, SEGMENTS)


READ = {
    "causal": (hf.causal_mask_function, Pattern(right=0)),
    "bidirectional": (hf.bidirectional_mask_function, Pattern()),
    "window": (hf.sliding_window_causal_mask_function(3), Pattern(left=2, right=0)),
    "window-both-ways": (
        hf.sliding_window_bidirectional_mask_function(3),
        Pattern(left=3, right=3),
    ),
    "packed": (_packed(hf.causal_mask_function), Pattern(right=0, segments=SEGMENTS)),
    "packed-window": (
        _packed(hf.sliding_window_causal_mask_function(2)),
        Pattern(left=1, right=0, segments=SEGMENTS),
    ),
    "of-ones-own": (
        hf.and_masks(hf.causal_mask_function, lambda b, h, q, k: q - k < 5),
        Pattern(left=4, right=0),
    ),
    "backwards": (lambda b, h, q, k: (k - q >= -2) & (k <= q + 1), Pattern(left=2, right=1)),
    "diagonal": (lambda b, h, q, k: q == k, Pattern(left=0, right=0)),
}


@pytest.mark.parametrize("name", READ)
def test_a_mask_function_is_read(name: str) -> None:
    function, pattern = READ[name]
    read = pattern_of(function)
    assert read is not None
    assert (read.left, read.right) == (pattern.left, pattern.right)
    assert read.segments is pattern.segments


NOT_READ = {
    "a union": hf.or_masks(hf.causal_mask_function, hf.bidirectional_mask_function),
    "chunks": hf.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int)),
    "a prefix": hf.or_masks(hf.causal_mask_function, lambda b, h, q, k: k < 3),
    "keys only": lambda b, h, q, k: k < 3,
    "not the past": lambda b, h, q, k: q - k <= -1,
    "positions that skip": hf.packed_sequence_compatibility_function(
        hf.sliding_window_causal_mask_function(2), 2 * POSITIONS, SEGMENTS
    ),
    "positions without segments": hf.remap_positions_for_packed_sequence(
        hf.causal_mask_function, POSITIONS
    ),
    "segments that return": hf.and_masks(
        hf.causal_mask_function, hf.packed_sequence_mask_function(SEGMENTS % 2)
    ),
    "two kinds of segments": hf.and_masks(
        hf.packed_sequence_mask_function(SEGMENTS),
        hf.packed_sequence_mask_function(SEGMENTS.clone()),
    ),
    "a stride": lambda b, h, q, k: (q - k) % 2 == 0,
    "heads": lambda b, h, q, k: (k <= q) & (h < 2),
    "a padding mask": hf.padding_mask_function(torch.ones(2, 8, dtype=torch.bool)),
    "never": lambda b, h, q, k: False,
    "an error": lambda b, h, q, k: 1 / 0,
}


@pytest.mark.parametrize("name", NOT_READ)
def test_unknown_mask_functions_have_no_pattern(name: str) -> None:
    assert pattern_of(NOT_READ[name]) is None


def _as_tensor(mask: Tensor | None, shape: tuple[int, ...], causal: bool) -> Tensor:
    """The mask that the attention function applies to a causal, or another, layer."""
    if mask is not None:
        return mask.dense() if isinstance(mask, StructuredMask) else mask
    full = torch.ones(shape, dtype=torch.bool)
    return full.tril() if causal and shape[2] > 1 else full


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_mask_equals_sdpas(data: st.DataObject) -> None:
    """Offsets of every kind of cache, padding on both sides, masks that are too long or short."""
    draw = data.draw
    causal = draw(st.booleans(), "causal")
    q_len, before = draw(st.integers(1, 6), "q_len"), draw(st.integers(0, 5), "before")
    kv_offset = draw(st.integers(0, before), "kv_offset")
    k_len = before + q_len - kv_offset + draw(st.integers(0, 3), "slots of the cache not in use")
    window = draw(st.one_of(st.none(), st.integers(1, 6)), "window")
    if causal:
        functions = [hf.causal_mask_function]
        functions += [] if window is None else [hf.sliding_window_overlay(window)]
    else:
        functions = [hf.bidirectional_mask_function]
        functions += [] if window is None else [hf.sliding_window_bidirectional_overlay(window)]
    padding = None
    if draw(st.booleans(), "padded"):
        length = draw(st.integers(before + q_len, kv_offset + k_len + 2), "mask")
        padding = torch.tensor(
            draw(
                st.lists(
                    st.lists(st.booleans(), min_size=length, max_size=length),
                    min_size=2,
                    max_size=2,
                )
            )
        )
    given_ = {
        "batch_size": 2,
        "q_length": q_len,
        "kv_length": k_len,
        "q_offset": before,
        "kv_offset": kv_offset,
        "mask_function": hf.and_masks(*functions),
        "attention_mask": padding,
        "local_size": window,
    }
    skip = {"allow_is_causal_skip": causal, "allow_is_bidirectional_skip": not causal}
    exact = hf.sdpa_mask(**given_, allow_is_causal_skip=False)
    ours = attention_mask(**given_, **skip)
    shape = (2, 1, q_len, k_len)
    assert ours is None or (ours.shape == shape and ours.dtype is torch.bool)
    torch.testing.assert_close(_as_tensor(ours, shape, causal), exact)
    kept = attention_mask(**given_, allow_is_causal_skip=False)
    assert kept is not None  # the caller will compute with it
    torch.testing.assert_close(kept & True, exact)

    # and the attention function reads it
    layer = nn.Module()
    layer.is_causal = causal
    query = torch.randn(2, 4, q_len, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, k_len, 8, dtype=torch.float64)
    out, _ = attention_forward(layer, query, key, value, ours)
    expected, _ = attention_forward(layer, query, key, value, exact)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("window", [None, 2])
def test_masks_of_packed_sequences_equal_sdpas(window: int | None) -> None:
    function = hf.causal_mask_function
    if window is not None:
        function = hf.sliding_window_causal_mask_function(window)
    given_ = {"batch_size": 2, "q_length": 8, "kv_length": 8, "mask_function": _packed(function)}
    exact = hf.sdpa_mask(**given_, allow_is_causal_skip=False)
    ours = attention_mask(**given_, allow_is_causal_skip=False)
    assert isinstance(ours, StructuredMask)
    torch.testing.assert_close(ours & True, exact)

    layer = nn.Module()
    query = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, 8, 8, dtype=torch.float64)
    bias = torch.randn(1, 4, 8, 8, dtype=torch.float64)
    for more in ({}, {"output_attentions": True}, {"position_bias": bias}, {"softcap": 2.0}):
        out, weights = attention_forward(layer, query, key, value, ours, **more)
        expected, expected_weights = attention_forward(layer, query, key, value, exact, **more)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(weights, expected_weights)


def test_a_pattern_makes_no_matrix_of_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: StructuredMask) -> Tensor:
        raise AssertionError("a mask [B, 1, Lq, Lk] was made")

    monkeypatch.setattr(StructuredMask, "dense", refuse)
    padding = torch.arange(8) >= torch.tensor([[0], [3]])
    layer = nn.Module()
    query, key, value = torch.randn(3, 2, 4, 8, 8)
    function = hf.sliding_window_causal_mask_function(3)
    for more, operator in (
        ({"mask_function": function, "attention_mask": padding}, "scaled_dot_product_attention"),
        ({"mask_function": _packed(function)}, "varlen_attention"),
    ):
        mask = attention_mask(batch_size=2, q_length=8, kv_length=8, **more)
        assert isinstance(mask, StructuredMask)
        attention_forward(layer, query, key, value, mask)
        with fastattn.trace() as calls:  # it changes no mask
            mask = attention_mask(batch_size=2, q_length=8, kv_length=8, **more)
            assert isinstance(mask, StructuredMask)
            attention_forward(layer, query, key, value, mask)
        assert [call.operator for call in calls] == [operator]
    with pytest.raises(AssertionError, match="was made"):
        mask & True


def test_a_slice_of_all_keys_makes_no_matrix() -> None:
    mask = attention_mask(2, 8, 8)
    assert isinstance(mask, StructuredMask)
    assert isinstance(mask[:, :, :, :8], StructuredMask)
    assert isinstance(mask[:, :, :, :9], StructuredMask)
    torch.testing.assert_close(mask[:, :, -3:, 1:5] & True, mask.dense()[:, :, -3:, 1:5])


def test_causality_is_in_the_mask() -> None:
    """Gemma 4 leaves out the first queries in its last layers."""
    mask = attention_mask(1, 8, 8)
    assert mask is not None
    query, key, value = torch.randn(3, 1, 2, 8, 8, dtype=torch.float64)
    layer = nn.Module()
    layer.is_causal = True
    out, _ = attention_forward(layer, query, key, value, mask)
    last, _ = attention_forward(layer, query[:, :, -3:], key, value, mask[:, :, -3:])
    torch.testing.assert_close(last, out[:, -3:])


def test_a_mask_that_is_equal_for_all_queries_has_one_row() -> None:
    padding = torch.arange(1000) >= torch.tensor([[0], [3]])
    function = hf.bidirectional_mask_function
    mask = attention_mask(2, 1000, 1000, mask_function=function, attention_mask=padding)
    assert mask is not None
    assert mask.stride(2) == 0


# --- the attention function -----------------------------------------------------------------------


def _exact(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The output and the weights by the definition, with a boolean mask and sinks."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT / query.shape[3] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.expand(*scores.shape[:3], sink.shape[-1])], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2), weights


@pytest.mark.parametrize("kind", ["s_aux", "sinks"])
def test_sinks_take_part_in_the_softmax(kind: str) -> None:
    query = torch.randn(2, 4, 5, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(2, 2, 7, 8, dtype=torch.float64, requires_grad=True) for _ in "kv")
    sink = torch.randn((4,) if kind == "s_aux" else (2, 4, 5, 3), dtype=torch.float64)
    sink.requires_grad_()
    mask = torch.rand(2, 1, 5, 7) > 0.3
    out, weights = attention_forward(
        nn.Module(), query, key, value, mask, **{kind: sink}, output_attentions=True
    )
    inputs = (query, key, value, sink)
    whole = sink.view(1, 4, 1, 1) if kind == "s_aux" else sink
    expected, expected_weights = _exact(query, key, value, mask, whole)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(weights, expected_weights)
    seed = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, inputs, seed), torch.autograd.grad(expected, inputs, seed)
    )


@pytest.mark.parametrize("packed", [False, True])
def test_infinite_sinks_of_queries(packed: bool) -> None:
    """-inf acts as no sink, and inf leaves the keys no weight, as for sinks of heads."""
    leaves = [torch.randn(2, 4, 8, 8, dtype=torch.float64, requires_grad=True) for _ in "qkv"]
    of_heads = torch.tensor([torch.inf, -torch.inf, 0.5, 1.0], dtype=torch.float64)
    of_queries = torch.full((2, 4, 8, 2), -torch.inf, dtype=torch.float64)
    of_queries[..., 0] = of_heads.view(4, 1)
    of_queries[:, 0, :, 1] = 1.0
    of_queries.requires_grad_()
    rule = _packed(hf.causal_mask_function) if packed else hf.causal_mask_function
    mask = attention_mask(2, 8, 8, mask_function=rule)
    results = []
    for sinks in ({"s_aux": of_heads}, {"sinks": of_queries}):
        out, _ = attention_forward(nn.Module(), *leaves, mask, **sinks)
        results.append((out, *torch.autograd.grad(out.sin().sum(), leaves, retain_graph=True)))
    torch.testing.assert_close(results[1], results[0])
    (grad,) = torch.autograd.grad(out.sum(), of_queries)
    assert grad.isfinite().all()
    assert not grad[:, :2].any()


@pytest.mark.parametrize("kind", ["s_aux", "sinks"])
def test_packed_sequences_with_sinks(kind: str) -> None:
    query, key, value = torch.randn(3, 2, 4, 8, 8, dtype=torch.float64)
    sink = torch.randn((4,) if kind == "s_aux" else (2, 4, 8, 3), dtype=torch.float64)
    mask = attention_mask(2, 8, 8, mask_function=_packed(hf.causal_mask_function))
    assert mask is not None
    out, _ = attention_forward(nn.Module(), query, key, value, mask, **{kind: sink})
    whole = sink.view(1, 4, 1, 1) if kind == "s_aux" else sink
    expected, _ = _exact(query, key, value, mask & True, whole)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("more", [{}, {"output_attentions": True}])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("mask", [None, "causal"])
def test_cumulative_lengths(more: dict[str, Any], window: int | None, mask: str | None) -> None:
    """Two sequences of 5 and 7 rows; with a mask given, both count."""
    starts = torch.tensor([0, 5, 12], dtype=torch.int32)
    group = torch.arange(12) >= 5
    distance = torch.arange(12)[:, None] - torch.arange(12)
    keep = (group[:, None] == group) & (distance >= 0)
    given_mask = None if mask is None else torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    if window is not None and mask is None:
        keep = keep & (distance < window)
    query = torch.randn(1, 4, 12, 8, dtype=torch.float64)
    key, value = torch.randn(2, 1, 2, 12, 8, dtype=torch.float64)
    out, weights = attention_forward(
        nn.Module(),
        query,
        key,
        value,
        given_mask,
        sliding_window=window,
        cu_seq_lens_q=starts,
        cu_seq_lens_k=starts,
        **more,
    )
    expected, expected_weights = _exact(query, key, value, keep, None)
    torch.testing.assert_close(out, expected)
    if more:
        torch.testing.assert_close(weights, expected_weights)


def test_selected_keys() -> None:
    query, key, value = torch.randn(3, 2, 4, 6, 8, dtype=torch.float64)
    indices = torch.stack([torch.randperm(6)[:3] for _ in range(12)]).view(2, 6, 3)
    keep = torch.zeros(2, 6, 6, dtype=torch.bool).scatter(-1, indices, True)[:, None]
    layer = nn.Module()
    layer.is_causal = False
    floating = torch.where(torch.rand(2, 1, 6, 6) > 0.3, 0.0, -torch.inf).double()
    out, _ = attention_forward(layer, query, key, value, floating, indices=indices)
    torch.testing.assert_close(
        out, _exact(query, key, value, keep & (floating == 0), None)[0].nan_to_num()
    )


def test_the_output_is_contiguous_without_a_copy() -> None:
    rows = torch.randn(2, 5, 4, 8)
    query = rows.transpose(1, 2)
    out, weights = attention_forward(nn.Module(), query, query, query, None)
    assert out.shape == rows.shape
    assert out.is_contiguous()
    assert weights is None
