"""Jagged NestedTensors: each sequence by itself, in attention and in MultiheadAttention."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn import MultiheadAttention, masks, scaled_dot_product_attention
from fastattn.bias import T5, Window2d

LENGTHS = (3, 0, 7, 1)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        yield


def jagged(sequences: Sequence[Tensor]) -> Any:
    """A jagged tensor of the sequences."""
    return torch.nested.nested_tensor(list(sequences), layout=torch.jagged)


def draw(lengths: Sequence[int], *size: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Random sequences of the given lengths."""
    g = torch.Generator().manual_seed(sum(lengths) + len(size))
    return [torch.randn(n, *size, generator=g, dtype=torch.float64).to(dtype) for n in lengths]


def in_heads(sequences: Sequence[Tensor]) -> Any:
    """[L_b, H, D] each -> [B, H, *, D]"""
    return jagged(sequences).transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "scale": 0.3},
        {"window": (2, 1), "softcap": 3.0, "causal_alignment": "bottom_right"},
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])},
        {"relative_bias": torch.linspace(-1, 1, 4 * 15).view(4, 15), "is_causal": True},
        {"mask": ~masks.chunked(2) | masks.causal(), "causal_alignment": "bottom_right"},
    ],
    ids=["plain", "causal", "window", "alibi", "relative", "mask"],
)
def test_every_sequence_is_attended_alone(
    dtype: torch.dtype, options: dict[str, Any], backend: str
) -> None:
    q = draw(LENGTHS, 4, 6, dtype=dtype)
    k = draw((5, 2, 7, 0), 2, 6, dtype=dtype)
    v = draw((5, 2, 7, 0), 2, 3, dtype=dtype)
    key, value = in_heads(k), in_heads(v)
    out, lse = scaled_dot_product_attention(
        in_heads(q), key, value, enable_gqa=True, return_lse=True, **options
    )
    assert out.shape[:2] == lse.shape[:2] == (4, 4)
    assert out.shape[3] == 3
    outs, lses = out.transpose(1, 2).unbind(), lse.transpose(1, 2).unbind()
    for b in range(4):
        one = (x[b].transpose(0, 1)[None] for x in (q, k, v))
        want, want_lse = scaled_dot_product_attention(
            *one, enable_gqa=True, return_lse=True, **options
        )
        if backend == "cpu":  # the same bits; the reference sums other rows too
            assert torch.equal(outs[b], want[0].transpose(0, 1))
            assert torch.equal(lses[b], want_lse[0].mT)
        else:
            torch.testing.assert_close(outs[b], want[0].transpose(0, 1))
            torch.testing.assert_close(lses[b], want_lse[0].mT)


def test_gradients_and_pytorchs_own_attention() -> None:
    def run(f: Any) -> list[Tensor]:
        leaves = [jagged(draw((3, 7, 1), 2, 4)).requires_grad_() for _ in range(3)]
        out = f(*(x.transpose(1, 2) for x in leaves))
        out = out.transpose(1, 2).values()
        out.square().sum().backward()
        return [out.detach(), *(x.grad.values() for x in leaves)]

    ours = run(scaled_dot_product_attention)
    stock = run(torch.nn.functional.scaled_dot_product_attention)
    torch.testing.assert_close(ours, stock, rtol=1e-10, atol=1e-10)


def test_masks_and_biases_equal_packed_sequences() -> None:
    rows, table = draw((3, 7, 1), 2, 4), torch.randn(8, 2, dtype=torch.float64).requires_grad_()
    starts, ids = torch.tensor([0, 3, 10, 11]), torch.arange(11) % 2
    mask = masks.document(ids) | masks.prefix_lm(torch.tensor([1, 3, 0]))
    options = {"mask": mask, "relative_bias": T5(table, max_distance=5)}
    x, packed = in_heads(rows), torch.cat(rows)
    out = scaled_dot_product_attention(x, x, x, **options).transpose(1, 2).values()
    want = fastattn.varlen_attention(packed, packed, packed, starts, starts, **options)
    assert torch.equal(out, want)
    grads = (torch.autograd.grad(y.square().sum(), table)[0] for y in (out, want))
    assert torch.equal(*grads)


def test_the_result_has_the_ragged_size_of_query() -> None:
    x = in_heads(draw(LENGTHS, 2, 4))
    out = scaled_dot_product_attention(x, x, x)
    assert out.shape == x.shape
    assert (out + x).shape == x.shape
    flat = jagged(draw(LENGTHS, 4))
    assert scaled_dot_product_attention(flat, flat, flat).shape == flat.shape


def test_dropout_draws_as_packed_sequences_do() -> None:
    rows = draw(LENGTHS, 2, 4, dtype=torch.float32)
    x, packed = in_heads(rows), torch.cat(rows)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    generator = torch.Generator()
    out = scaled_dot_product_attention(x, x, x, dropout_p=0.4, generator=generator.manual_seed(3))
    want = fastattn.varlen_attention(
        packed, packed, packed, starts, starts, dropout_p=0.4, generator=generator.manual_seed(3)
    )
    assert torch.equal(out.transpose(1, 2).values(), want)


def test_rows_between_sequences_are_ignored() -> None:
    x = torch.randn(3, 10, 2, 4, dtype=torch.float64)
    begins, lengths = torch.tensor([0, 1, 2]), torch.tensor([2, 3, 1])
    holes = torch.nested.narrow(x, 1, begins, lengths, layout=torch.jagged).transpose(1, 2)
    whole = in_heads(
        [x[b, i : i + n] for b, (i, n) in enumerate(zip(begins, lengths, strict=True))]
    )
    out = scaled_dot_product_attention(holes, holes, holes)
    want = scaled_dot_product_attention(whole, whole, whole)
    assert torch.equal(out.transpose(1, 2).values(), want.transpose(1, 2).values())


@pytest.mark.complete
def test_compile() -> None:
    x = in_heads(draw(LENGTHS, 2, 4))
    layer = MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    y = jagged(draw(LENGTHS, 8))

    def attend(x: Any) -> Any:
        return scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2).values()

    def layered(x: Any) -> Any:
        return layer(x, x, x, need_weights=False)[0].values()

    for f, given in ((attend, x), (layered, y)):
        torch.testing.assert_close(torch.compile(f, fullgraph=True)(given), f(given))


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("kind", ["self", "cross", "no bias", "widths"])
def test_multihead_attention(kind: str, need_weights: bool, backend: str) -> None:
    torch.manual_seed(0)
    widths = {"kdim": 5, "vdim": 3} if kind == "widths" else {}
    made = {"batch_first": True, "dtype": torch.float64, "bias": kind != "no bias", **widths}
    layer = MultiheadAttention(8, 2, **made)
    q = draw(LENGTHS, 8)
    k, v = q, q
    if kind != "self":
        lengths = (5, 2, 1, 4)
        k, v = draw(lengths, layer.kdim), draw(lengths, layer.vdim)
    query = jagged(q).requires_grad_()
    key, value = (query, query) if kind == "self" else (jagged(k), jagged(v))
    out, weights = layer(query, key, value, need_weights=need_weights)
    assert out.shape == query.shape
    out.values().sum().backward()
    grads = query.grad.unbind()
    for b, x in enumerate(q):
        leaf = x[None].clone().requires_grad_()
        others = (leaf, leaf) if kind == "self" else (k[b][None], v[b][None])
        want, want_weights = layer(leaf, *others)
        want.sum().backward()
        torch.testing.assert_close(out.unbind()[b], want[0])
        torch.testing.assert_close(grads[b], leaf.grad[0])
        if need_weights:
            torch.testing.assert_close(weights[b, : len(x), : len(k[b])], want_weights[0])
            assert not weights[b, len(x) :].any()
            assert not weights[b, :, len(k[b]) :].any()


def test_the_module_is_causal_without_a_mask() -> None:
    layer = MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    x = draw(LENGTHS, 8)
    for need_weights in (False, True):
        out, _ = layer(*[jagged(x)] * 3, need_weights=need_weights, is_causal=True)
        for one, got in zip(x, out.unbind(), strict=True):
            mask = torch.ones(len(one), len(one), dtype=torch.bool).triu(1)
            want = layer(*[one[None]] * 3, attn_mask=mask)[0][0] if len(one) else one
            torch.testing.assert_close(got, want)


A, B = draw(LENGTHS, 2, 4), draw((1, 2, 3, 4), 2, 4)
BAD = {
    "mask": (lambda: [in_heads(A)] * 3, {"attn_mask": torch.ones(1, 1)}, "attn_mask must be None"),
    "weights": (lambda: [in_heads(A)] * 3, {"need_weights": True}, "need_weights must be False"),
    "lengths of a prefix": (
        lambda: [in_heads(A)] * 3,
        {"mask": masks.prefix_lm(torch.tensor([1, 2, 3]))},
        "lengths must be of batch size 1 or 4, got 3",
    ),
    "short table": (
        lambda: [in_heads(A)] * 3,
        {"relative_bias": torch.zeros(2, 11)},
        "n odd and at least 13 for a sequence of 7 rows",
    ),
    "dense key": (lambda: [in_heads(A), A[0][None], A[0][None]], {}, "key must be jagged"),
    "layout": (lambda: [jagged(A)] * 3, {}, r"a jagged query must be \[B, H, \*, D\]"),
    "rank": (lambda: [in_heads(A), jagged(draw(LENGTHS, 4)), in_heads(A)], {}, "a jagged key must"),
    "batch": (lambda: [in_heads(A), in_heads(A[:2]), in_heads(A[:2])], {}, "same number of seq"),
    "lengths": (lambda: [in_heads(A), in_heads(A), in_heads(B)], {}, "the same lengths"),
    "heads": (
        lambda: [in_heads(A), *[in_heads(draw(LENGTHS, 1, 4))] * 2],
        {},
        "without enable_gqa=True, got 2 and 1",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    make, options, message = BAD[name]
    packed = "mask" in options or "relative_bias" in options  # checked as packed rows
    op = "varlen_attention" if packed else "scaled_dot_product_attention"
    with pytest.raises(RuntimeError, match=f"{op}: .*{message}"):
        scaled_dot_product_attention(*make(), **options)


def test_a_window_of_two_dimensions_is_refused() -> None:
    x = in_heads(draw((4, 4), 2, 4))
    with pytest.raises(TypeError, match=r"relative_bias.* must be Tensor or T5 \(Window2d needs"):
        scaled_dot_product_attention(x, x, x, relative_bias=Window2d(torch.zeros(9, 2), (2, 2)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_padding_mask": torch.ones(4, 7, dtype=torch.bool)}, "key_padding_mask must be None"),
        ({"attn_mask": torch.ones(7, 7, dtype=torch.bool)}, "attn_mask must be None"),
        ({"key": torch.zeros(4, 7, 8)}, "key must be jagged"),
        ({"key": jagged(draw(LENGTHS, 6))}, r"a jagged key must be \[N, \*, 8\]"),
        ({"value": jagged(draw((1, 2, 3, 4), 8))}, "key and value must have the same lengths"),
        ({"key": jagged(draw((1, 2), 8))}, "the same number of sequences"),
        ({"add_zero_attn": True}, "add_zero_attn must be False"),
        ({"add_bias_kv": True}, "add_bias_kv must be False"),
    ],
)
def test_bad_input_of_the_module(change: dict[str, Any], message: str) -> None:
    own = {name: change.pop(name) for name in ("add_zero_attn", "add_bias_kv") if name in change}
    layer = MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64, **own)
    x = jagged(draw(LENGTHS, 8))
    with pytest.raises(AssertionError, match=f"MultiheadAttention: .*{message}"):
        layer(**{"query": x, "key": x, "value": x, **change})
