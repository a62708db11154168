"""attention_stats: against sums over the reference's weights in float64."""

from __future__ import annotations

import sys
from typing import Any

import naive
import pytest
import torch
from case_table import refuses
from torch import Tensor
from within_bound import assert_within_bound

from fastattn import attention_stats, scaled_dot_product_attention
from fastattn.backends import reference
from fastattn.bench.worker import peak_extra_bytes
from fastattn.testing import Noise

CASES: dict[str, tuple[tuple[int, int, int, int, int], dict[str, Any]]] = {
    # B, Hq, Hkv, Lq, Lk
    "plain": ((2, 3, 3, 40, 70), {}),
    "blocks": ((1, 2, 1, 150, 130), {"enable_gqa": True}),
    "causal": ((1, 2, 2, 130, 130), {"is_causal": True}),
    "bottom-right": (
        (2, 4, 2, 70, 200),
        {"is_causal": True, "causal_alignment": "bottom_right", "enable_gqa": True},
    ),
    "window": ((1, 2, 2, 200, 200), {"window": (9, 3), "softcap": 5.0}),
    "alibi": ((2, 2, 2, 100, 90), {"alibi_slopes": torch.tensor([0.5, 0.1]), "scale": 0.3}),
    "masked-rows": ((1, 1, 1, 130, 20), {"window": (2, 2)}),
    "no-queries": ((1, 2, 2, 0, 5), {}),
    "no-keys": ((1, 2, 2, 5, 0), {}),
}
cases = pytest.mark.parametrize(("shape", "options"), CASES.values(), ids=CASES)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def operands(shape: tuple[int, ...], dtype: torch.dtype, g: torch.Generator) -> list[Tensor]:
    """Queries and keys of the given sizes (B, Hq, Hkv, Lq, Lk)."""
    b, hq, hkv, lq, lk = shape
    query = 2 * torch.randn(b, hq, lq, 24, generator=g, dtype=torch.float64)
    return [
        query.to(dtype),
        torch.randn(b, hkv, lk, 24, generator=g, dtype=torch.float64).to(dtype),
    ]


def summed_up(w: Tensor, lse: Tensor, top_k: int, rows: list[int]) -> list[Tensor]:
    """The statistics of weights `w`, by their definitions."""
    return [
        lse,
        w.sum(2),
        torch.special.entr(w).sum(-1),
        w.topk(top_k, -1).values,
        w[:, :, rows],
    ]


@pytest.mark.sampled
@cases
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_within_the_bound(
    backend: str,
    shape: tuple[int, ...],
    options: dict[str, Any],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    query, key = operands(shape, dtype, generator)
    top_k, rows = min(5, shape[4]), [0, -1, shape[3] // 2] if shape[3] else []
    stats = attention_stats(query, key, top_k=top_k, rows=rows, **options)
    wide = torch.promote_types(dtype, torch.float32)
    # Exact: in extended precision, by the arguments of attention's primitive.
    prepare = sys.modules["fastattn.ops.attention_stats"].prepare
    _, (q, k, v, *rest, record) = prepare(query, key, **options)
    got = [stats.lse, stats.column_sums, stats.entropy, stats.top_values, stats.rows]
    names = ("lse", "column_sums", "entropy", "top_values", "rows")

    def by(module: Any) -> dict[str, Tensor]:
        tensors = (x.double() for x in (q, k, v))
        _, lse, w = module.scaled_dot_product_attention(*tensors, *rest, options=record)
        return dict(zip(names, summed_up(w, lse, top_k, rows), strict=True))

    exact = by(naive)
    moved = Noise(lambda: by(reference), exact, wide)
    for name, x in zip(names, got, strict=True):
        if x is None:
            assert not (rows if name == "rows" else top_k)
            continue
        assert x.dtype == wide, name
        assert_within_bound(x, exact[name], moved[name], name)
    if top_k:
        assert stats.top_indices is not None
        assert stats.top_indices.shape == (*shape[:2], shape[3], top_k)


@pytest.mark.parametrize("kind", ["bool", "float", "keys"])
def test_masks(backend: str, kind: str, generator: torch.Generator) -> None:
    query, key = operands((2, 2, 2, 130, 70), torch.float32, generator)
    mask = torch.randn(1, 2, 130, 70, generator=generator)
    if kind == "bool":
        mask = mask > 0.2
    if kind == "keys":
        mask = torch.rand(2, 1, 1, 70, generator=generator) > 0.3
    stats = attention_stats(query, key, mask, top_k=3, rows=[100])
    w = scaled_dot_product_attention(query, key, key, mask, need_weights=True)[1]
    assert stats.top_indices is not None
    torch.testing.assert_close(stats.column_sums, w.sum(2))
    torch.testing.assert_close(stats.rows, w[:, :, [100]])
    torch.testing.assert_close(w.gather(-1, stats.top_indices), stats.top_values)


def test_only_requested_statistics_are_computed(generator: torch.Generator) -> None:
    query, key = operands((1, 1, 1, 9, 9), torch.float32, generator)
    stats = attention_stats(query, key, column_sums=False, entropy=False)
    assert stats[1:] == (None,) * 5
    assert stats.lse.shape == (1, 1, 9)


def test_a_sequence_does_not_depend_on_its_batch_mates(
    target: Any, generator: torch.Generator
) -> None:
    query, key = operands((3, 4, 2, 150, 200), torch.float32, generator)
    given = {"is_causal": True, "enable_gqa": True, "top_k": 4, "rows": [3, 149]}
    together = attention_stats(query, key, **given)
    for b in range(3):
        alone = attention_stats(query[b : b + 1], key[b : b + 1], **given)
        for x, y in zip(together, alone, strict=True):
            assert torch.equal(x[b], y[0])


@pytest.mark.complete
def test_the_matrix_of_weights_is_never_stored(native: Any) -> None:
    query = torch.randn(1, 2, 8192, 16)
    attention_stats(query[:, :, :64], query)
    given = {"top_k": 8, "rows": [4000]}
    peak = peak_extra_bytes(lambda: attention_stats(query, query, **given))
    if peak is not None:
        assert peak < 2 * 8192 * 8192 * 4 / 4, f"{peak / 1e6:.0f} MB"


def test_a_weight_of_zero_has_a_finite_gradient_of_entropy(backend: str) -> None:
    query = torch.tensor([[[[200.0, 0.0]]]], requires_grad=True)
    key = torch.tensor([[[[1.0, 0.0], [-1.0, 0.5]]]], requires_grad=True)
    stats = attention_stats(query, key, rows=[0])
    assert stats.rows is not None
    assert stats.rows[0, 0, 0].tolist() == [1.0, 0.0]  # visible, but too small for a float32
    for gradient in torch.autograd.grad(stats.entropy.sum(), (query, key)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_differentiable(backend: str, generator: torch.Generator) -> None:
    query, key = operands((1, 2, 1, 66, 5), torch.float64, generator)
    query, key = query[:, :, :, :3].requires_grad_(), key[:, :, :, :3].requires_grad_()

    def call(query: Tensor, key: Tensor) -> list[Tensor]:
        stats = attention_stats(query, key, enable_gqa=True, top_k=2, rows=[-1])
        return [x for n, x in enumerate(stats) if n != 4 and x is not None]

    assert torch.autograd.gradcheck(call, (query[:, :, 62:].detach().requires_grad_(), key))
    wanted = torch.autograd.grad(call(query, key)[2].sum(), (query, key))
    w = scaled_dot_product_attention(query, key, key, enable_gqa=True, need_weights=True)[1]
    expected = torch.autograd.grad(torch.special.entr(w).sum(), (query, key))
    torch.testing.assert_close(wanted, expected)


BAD = [
    ({"query": torch.ones(2, 3)}, ValueError, r"query must be \[B, H, L, D\], got shape \(2, 3\)"),
    ({"key": None}, TypeError, "argument 'key'"),
    ({"top_k": 6}, ValueError, "top_k must be between 0 and the 5 keys, got 6"),
    ({"top_k": 1.0}, TypeError, "top_k must be an int, got float"),
    ({"rows": [4]}, ValueError, "rows must name some of the 4 queries, got 4"),
    ({"rows": 3}, TypeError, "rows must be a sequence of ints"),
    ({"entropy": 1}, TypeError, "entropy must be a bool, got int"),
    ({"softcap": 0.0}, ValueError, "softcap must be None or positive"),
]
OPERANDS = {"query": torch.ones(1, 2, 4, 8), "key": torch.ones(1, 2, 5, 8)}
test_errors = refuses(attention_stats, BAD, **OPERANDS)
