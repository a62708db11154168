"""``mask=`` of MultiheadAttention: masks that are not stored pair by pair."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from fastattn import capture, masks
from fastattn.nn import MultiheadAttention

IDS = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1], [3, 3, 3, 3, 0, 0]])
MASK = masks.document(IDS) & ~masks.sliding_window(1, 0) | masks.causal()


def pairs() -> Tensor:
    """The same mask in the polarity of the module, [3 * 2, 6, 6]: True is not allowed."""
    d = torch.arange(6)[:, None] - torch.arange(6)
    seen = (IDS[:, :, None] == IDS[:, None]) & ((d < 0) | (d > 1)) | (d >= 0)
    return ~seen.repeat_interleave(2, 0)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_equals_the_stored_mask(
    need_weights: bool, padded: bool, normal: Callable[..., Tensor]
) -> None:
    layer = MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    x = normal(3, 6, 8)
    options: dict[str, Any] = {"need_weights": need_weights}
    if padded:
        options["key_padding_mask"] = torch.arange(6) >= torch.tensor([[6], [4], [5]])
    results = []
    for given in ({"mask": MASK}, {"attn_mask": pairs()}):
        out, weights = layer(x, x, x, **given, **options)
        results.append((out, weights, *torch.autograd.grad(out.sum(), layer.in_proj_weight)))
    assert_close(*results)


def test_both_masks_exclude(normal: Callable[..., Tensor]) -> None:
    layer = MultiheadAttention(8, 2, dtype=torch.float64)
    x, future = normal(6, 3, 8), torch.ones(6, 6, dtype=torch.bool).triu(1)
    got, _ = layer(x, x, x, attn_mask=future, is_causal=True, need_weights=False, mask=MASK)
    want, _ = layer(x, x, x, attn_mask=future | pairs(), need_weights=False)
    assert_close(got, want)


def test_jagged(normal: Callable[..., Tensor]) -> None:
    layer = MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    rows = [normal(n, 8) for n in (3, 5)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        x = torch.nested.nested_tensor(rows, layout=torch.jagged)
        strided = torch.nested.nested_tensor(rows)
    mask = masks.chunked(2) & masks.causal()
    got, _ = layer(x, x, x, need_weights=False, mask=mask)
    for one, row in zip(got.unbind(), rows, strict=True):
        assert_close(one, layer(row, row, row, need_weights=False, mask=mask)[0])
    with pytest.raises(AssertionError, match="need_weights must be False with mask and Nested"):
        layer(x, x, x, mask=mask)
    with torch.no_grad(), pytest.raises(AssertionError, match="query must be jagged with mask"):
        layer.eval()(strided, strided, strided, need_weights=False, mask=mask)


def test_compiled_and_captured(normal: Callable[..., Tensor]) -> None:
    layer = MultiheadAttention(8, 2, batch_first=True)
    x = normal(3, 6, 8).float()
    want, weights = layer(x, x, x, mask=MASK, average_attn_weights=False)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert_close(compiled(x, x, x, mask=MASK)[0], want)
    with capture(layer) as captured:
        layer(x, x, x, need_weights=False, mask=MASK)
    (found,) = captured.values()
    assert_close(found[0], weights)


def test_errors(normal: Callable[..., Tensor]) -> None:
    x = normal(3, 6, 8)
    for option in ("add_bias_kv", "add_zero_attn"):
        layer: Any = MultiheadAttention(8, 2, **{option: True}, dtype=torch.float64)
        with pytest.raises(ValueError, match="mask must be None with add_bias_kv or add_zero_attn"):
            layer(x, x, x, mask=MASK)
    layer = MultiheadAttention(8, 2, dtype=torch.float64)
    with pytest.raises(TypeError, match="argument 'mask' must be Mask or BlockMask"):
        layer(x, x, x, mask=torch.ones(6, 6))
    with pytest.raises(RuntimeError, match="ids of the queries must have length 3, got 6"):
        layer(x, x, x, mask=MASK)
