"""luong_attention: against its definition on whole matrices of scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from case_table import refuses
from torch import Tensor

from fastattn import luong_attention

NAN = float("nan")
METHODS = ("dot", "general", "concat")


def operands(
    method: str, tq: int = 9, tk: int = 14, grad: bool = False, width: int = 5
) -> tuple[Any, ...]:
    """query, key, value and weight; a key is narrower than a query where the method allows it."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=draw, dtype=torch.float64)
        return x.requires_grad_(grad)

    dq, dk = width, width if method == "dot" else width - 1
    query, key, value = normal(2, tq, dq), normal(2, tk, dk), normal(2, tk, width - 2)
    weight = {"dot": None, "general": normal(dq, dk)}.get(method)
    if method == "concat":
        return query, key, value, (normal(width + 1, dq + dk), normal(width + 1))
    return query, key, value, weight


def definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    method: str,
    weight: Any,
    window: str,
    width: int,
    positions: Tensor | None,
    padding: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Luong attention by its equations, in plain PyTorch."""
    tq, tk = query.shape[1], key.shape[1]
    if method == "concat":
        q = query[:, :, None].expand(-1, -1, tk, -1)
        k = key[:, None].expand(-1, tq, -1, -1)
        scores = torch.tanh(torch.cat([q, k], -1) @ weight[0].T) @ weight[1]
    else:
        scores = (query if weight is None else query @ weight) @ key.mT
    p = torch.arange(tq).double() if positions is None else positions
    distance = torch.arange(tk) - p.expand(2, tq)[..., None]
    seen = torch.ones(2, tq, tk, dtype=torch.bool)
    if window != "global":
        seen = distance.abs() <= width
    if padding is not None:
        seen = seen & ~padding[:, None]
    scores = scores.masked_fill(~seen, -1e9)
    weights = torch.where(seen, torch.softmax(scores, -1), 0.0)
    if window == "local-p":
        weights = weights * torch.exp(-(distance**2) / (2 * (width / 2) ** 2))
    return weights @ value, weights


PLACES = torch.tensor(
    [[0.0, 0.4, 3.5, 6.0, 6.9, 9.1, 12.99, 13.0, -1.5], [14.2, 2, 2, 2, 5.5, 7, 8, 1, 40.0]],
    dtype=torch.float64,
)
CASES = [
    ("global", None),
    ("local-m", None),
    ("local-m", PLACES),
    ("local-m", torch.arange(3, 12)),
    ("local-p", PLACES),
    ("local-p", PLACES[1:]),
]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("window", "positions"), CASES)
@pytest.mark.parametrize("method", METHODS)
def test_luong_attention_equals_its_definition(
    backend: str, method: str, window: str, positions: Tensor | None, padded: bool
) -> None:
    *qkv, weight = operands(method)
    padding = torch.arange(14) >= torch.tensor([[14], [6]]) if padded else None
    for width in (1, 2, 20):
        want = definition(*qkv, method, weight, window, width, positions, padding)
        options: dict[str, Any] = {"method": method, "weight": weight, "window": window}
        options |= {"D": width, "positions": positions, "key_padding_mask": padding}
        got = luong_attention(*qkv, **options, need_weights=True)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(luong_attention(*qkv, **options), want[0])


def test_keys_outside_every_window_are_not_read(backend: str) -> None:
    query, key, value, weight = operands("concat", tq=2, grad=False)
    key[:, 8:], value[:, 8:] = NAN, NAN
    places = torch.tensor([1.0, 4.5], dtype=torch.float64)
    for window in ("local-m", "local-p"):
        options: dict[str, Any] = {"window": window, "positions": places, "D": 3}
        got = luong_attention(query, key, value, method="concat", weight=weight, **options)
        assert got.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("window", ["local-m", "local-p"])
@pytest.mark.parametrize("method", METHODS)
def test_a_query_at_nan_is_nan(
    choice: str, method: str, window: str, need_weights: bool, dtype: torch.dtype
) -> None:
    query, key, value, weight = operands(method)
    weight = (weight,) if isinstance(weight, Tensor) else weight or ()
    query, key, value, *weight = (
        x.to(dtype).requires_grad_() for x in (query, key, value, *weight)
    )
    positions = torch.linspace(0, 13, 18).view(2, 9)
    positions[0, 4] = NAN
    positions.requires_grad_()
    padding = torch.zeros(2, 14, dtype=torch.bool)
    padding[:, :3] = True
    given = {0: None, 1: weight and weight[0], 2: tuple(weight)}[len(weight)]
    options: dict[str, Any] = {"method": method, "weight": given, "window": window, "D": 2}
    options |= {"positions": positions, "key_padding_mask": padding, "need_weights": need_weights}
    results = luong_attention(query, key, value, **options)
    results = results if need_weights else (results,)
    for x in results:
        assert torch.equal(x.isnan().any(-1), positions.isnan())
    assert results[0][0, 4].isnan().all()
    if need_weights:
        assert torch.equal(results[1][0, 4].isnan(), ~padding[0])
    leaves = (query, key, value, *weight, *((positions,) if window == "local-p" else ()))
    of_query, of_key, of_value, *others = torch.autograd.grad(sum(x.sum() for x in results), leaves)
    assert torch.equal(of_query.isnan().any(-1), positions.isnan())
    for x in (of_key, of_value):
        assert torch.equal(x[0].isnan().any(-1), ~padding[0])
        assert not x[1].isnan().any()
    assert all(x.isnan().any() for x in others)


def test_saved_memory_grows_with_the_window_alone(backend: str) -> None:
    """Nothing that a local window saves has the length of the keys twice."""
    query, key, value, weight = operands("concat", tq=40, tk=400, grad=True)
    sizes: list[int] = []
    places = torch.linspace(0, 399, 40).double()
    options: dict[str, Any] = {"method": "concat", "window": "local-p", "D": 3}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: sizes.append(x.numel()) or x, lambda x: x
    ):
        luong_attention(query, key, value, weight=weight, positions=places, **options)
    assert max(sizes) <= 2 * max(40 * 7 * 6, 400 * 6)


def test_dropout_and_dtypes(backend: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        query, key, value, _ = (None if x is None else x.to(dtype) for x in operands("dot"))
        for window in ("global", "local-m"):
            torch.manual_seed(0)
            out, weights = luong_attention(
                query, key, value, window=window, D=3, dropout_p=0.5, need_weights=True
            )
            assert out.dtype == weights.dtype == dtype
            torch.testing.assert_close(weights @ value, out, atol=0.03, rtol=0.03)


Q, K, V = torch.zeros(2, 3, 4), torch.zeros(2, 5, 4), torch.zeros(2, 5, 6)
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query": None}, TypeError, "query must be a Tensor, got NoneType"),
    ({"query": Q[0]}, ValueError, "query must have 3 dimensions"),
    ({"key": K[:1]}, ValueError, r"query, key and value must be \[B, Tq, Dq\]"),
    ({"method": "bilinear"}, ValueError, "method must be one of dot, general, concat"),
    ({"window": "local"}, ValueError, "window must be one of global, local-m, local-p"),
    ({"D": 2.0}, TypeError, "D must be an integer, got float"),
    ({"D": 0}, ValueError, "D must be positive, got 0"),
    ({"key": K[..., :3]}, ValueError, "of one width, got 4 and 3"),
    ({"weight": Q}, ValueError, "weight must be None with method='dot'"),
    ({"method": "general"}, TypeError, r"weight must be a Tensor \[Dq, Dk\]"),
    ({"method": "general", "weight": torch.zeros(4, 3)}, ValueError, r"\(4, 4\), got \(4, 3\)"),
    ({"method": "concat", "weight": Q}, TypeError, r"weight must be \(W \[A, Dq \+ Dk\], v \[A\]"),
    ({"method": "concat", "weight": (torch.zeros(6, 7), torch.zeros(6))}, ValueError, "Dk = 8"),
    ({"window": "local-p"}, ValueError, "needs positions"),
    ({"positions": torch.zeros(3)}, ValueError, "positions need a local window"),
    ({"window": "local-m", "positions": 3}, TypeError, "positions must be a real Tensor"),
    ({"window": "local-m", "positions": torch.zeros(2)}, ValueError, r"to \[B, Tq\] = \(2, 3\)"),
    ({"key_padding_mask": torch.zeros(2, 5)}, TypeError, "of dtype torch.bool"),
    ({"key_padding_mask": torch.zeros(5).bool()}, ValueError, r"\[B, Tk\] = \(2, 5\), got \(5,\)"),
]


test_errors = refuses(luong_attention, BAD, query=Q, key=K, value=V)


@pytest.mark.parametrize(
    ("method", "weight"),
    [
        ("general", torch.empty(8, 8, device="meta")),
        ("concat", (torch.empty(8, 16), torch.empty(8, device="meta"))),
    ],
)
def test_a_weight_of_another_device_is_refused(method: str, weight: Any) -> None:
    x = torch.ones(1, 5, 8)
    with pytest.raises(ValueError, match="weight is on meta, but query is on cpu"):
        luong_attention(x, x, x, method=method, weight=weight, window="local-m", D=2)
