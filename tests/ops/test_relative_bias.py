"""Relative position biases: beyond the case table."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from fastattn import scaled_dot_product_attention, use_backend
from fastattn.backends.primitives import AttentionOptions
from fastattn.bias import T5, Window2d
from fastattn.ops._disentangled import NO_TERMS
from fastattn.ops._relative_bias import t5_buckets
from fastattn.ops.sdpa import attention

pytestmark = pytest.mark.usefixtures("seeded")
BACKENDS = pytest.mark.parametrize("backend", ["cpu", "reference"])


def qkv(q_len: int = 6, k_len: int = 9, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Random queries, keys and values; two query heads share a key head."""
    return [
        torch.randn(2, heads, n, 8).to(dtype) for heads, n in ((4, q_len), (2, k_len), (2, k_len))
    ]


def attend(*args: Any, **options: Any) -> Any:
    """Attention with grouped heads."""
    return scaled_dot_product_attention(*args, enable_gqa=True, **options)


def distances(q_len: int, k_len: int, offset: int = 0) -> Tensor:
    """The position of each query minus the position of each key."""
    return torch.arange(q_len)[:, None] + offset - torch.arange(k_len)


# -- each form against the bias of all pairs, stored ----------------------------------------------


def of_table(q_len: int, k_len: int, offset: int) -> tuple[Tensor, Callable[[Tensor], Any], Any]:
    """A table with an entry for each distance, itself, and the same bias by indexing."""
    most = max(q_len - 1 + offset, k_len - 1 - offset)
    index = distances(q_len, k_len, offset) + most + 2  # two distances more than there are
    return torch.randn(4, 2 * most + 5), lambda table: table, lambda table: table[:, index]


def of_t5(
    q_len: int, k_len: int, offset: int, bidirectional: bool = True
) -> tuple[Tensor, Callable[[Tensor], Any], Any]:
    """A table of T5, the bias that reads it, and the same bias by indexing: [4, q_len, k_len]."""
    buckets = t5_buckets(distances(q_len, k_len, offset), 8, bidirectional, 20)
    form = functools.partial(T5, bidirectional=bidirectional, max_distance=20)
    return torch.randn(8, 4), form, lambda table: table[buckets].permute(2, 0, 1)


def of_window(height: int, width: int) -> tuple[Tensor, Callable[[Tensor], Any], Any]:
    """Swin's index, for each pair of tokens by itself."""
    tokens = [(y, x) for y in range(height) for x in range(width)]
    index = [
        [(y - v + height - 1) * (2 * width - 1) + x - u + width - 1 for v, u in tokens]
        for y, x in tokens
    ]
    table = torch.randn((2 * height - 1) * (2 * width - 1), 4)
    form = functools.partial(Window2d, window=(height, width))
    return table, form, lambda table: table[torch.tensor(index)].permute(2, 0, 1)


FORMS = {
    "table": (6, 9, {}, of_table(6, 9, 0)),
    "table-bottom-right": (3, 40, {"causal_alignment": "bottom_right"}, of_table(3, 40, 37)),
    "table-causal": (40, 40, {"is_causal": True}, of_table(40, 40, 0)),
    "table-more-queries": (9, 4, {"causal_alignment": "bottom_right"}, of_table(9, 4, -5)),
    "t5": (50, 40, {}, of_t5(50, 40, 0)),
    "t5-decoder": (
        4,
        40,
        {"is_causal": True, "causal_alignment": "bottom_right"},
        of_t5(4, 40, 36, False),
    ),
    "window": (12, 12, {}, of_window(3, 4)),
    "window-row": (5, 5, {}, of_window(1, 5)),
}


@BACKENDS
@pytest.mark.parametrize("name", FORMS)
def test_a_relative_bias_equals_the_bias_of_all_pairs(backend: str, name: str) -> None:
    q_len, k_len, options, (table, form, dense) = FORMS[name]
    table = table.double().requires_grad_()
    leaves = [x.requires_grad_() for x in qkv(q_len, k_len)]
    results = []
    for biased in (
        lambda: attend(*leaves, relative_bias=form(table), return_lse=True, **options),
        lambda: attend(*leaves, *causal(dense(table), q_len, k_len, options), return_lse=True),
    ):
        with use_backend(backend):
            out, lse = biased()
            grads = torch.autograd.grad(out.square().sum() + lse.sin().sum(), [*leaves, table])
        results.append((out, lse, *grads))
    assert_close(*results)


def causal(bias: Tensor, q_len: int, k_len: int, options: dict[str, Any]) -> list[Tensor]:
    """The bias with causal pairs excluded, as a mask."""
    if not options.get("is_causal"):
        return [bias]
    offset = k_len - q_len if "causal_alignment" in options else 0
    return [bias.masked_fill(distances(q_len, k_len, offset) < 0, -math.inf)]


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "most"), [(32, 128), (8, 20), (10, 9), (64, 1000)])
def test_buckets_equal_t5s(bidirectional: bool, buckets: int, most: int) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    d = torch.arange(-3000, 3001)
    want = t5.T5Attention._relative_position_bucket(-d, bidirectional, buckets, most)
    assert torch.equal(t5_buckets(d, buckets, bidirectional, most), want)


# -- the contract ---------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("k_len", [9, 40])
def test_an_entry_of_minus_inf_excludes_its_distance(backend: str, k_len: int) -> None:
    query, key, value = (x.float() for x in qkv(6, k_len))
    key[:, :, 8:], value[:, :, 8:] = math.nan, math.inf
    table = torch.randn(4, 2 * k_len - 1)
    table[:, : k_len - 1 - 2] = -math.inf  # d < -2
    table.requires_grad_()
    with use_backend(backend):
        out = attend(query, key, value, relative_bias=table)
        (found,) = torch.autograd.grad(out.sum(), table)
        want = attend(query, key[:, :, :8], value[:, :, :8], window=(-1, 2),
                      relative_bias=table[:, k_len - 8 : k_len + 7])  # fmt: skip
    assert_close(out, want)
    assert found.isfinite().all()
    assert (found[:, : k_len - 1 - 2] == 0).all()


@BACKENDS
def test_a_bias_of_inf_keeps_masked_pairs_hidden(backend: str) -> None:
    tensors, mask = qkv(), torch.randn(6, 9).double().masked_fill(distances(6, 9) < -3, -math.inf)
    table = torch.zeros(4, 17).double()
    table[:, : 8 - 3] = math.inf
    with use_backend(backend):
        assert_close(attend(*tensors, mask, relative_bias=table), attend(*tensors, mask))


def test_the_gradient_has_the_dtype_of_the_table() -> None:
    for dtype, own in ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)):
        table = torch.randn(4, 17, dtype=own, requires_grad=True)
        attend(*qkv(dtype=dtype), relative_bias=table).sum().backward()
        assert table.grad is not None
        assert table.grad.dtype is own


def test_compiled_once_for_any_length() -> None:
    table = torch.randn(8, 4)

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, key, value, relative_bias=T5(table))

    for n in (5, 6, 9):
        tensors = qkv(n, n, torch.float32)
        assert_close(call(*tensors), attend(*tensors, relative_bias=T5(table)))


@pytest.mark.parametrize(
    ("bias", "error", "message"),
    [
        ([0.0], TypeError, "'relative_bias' must be Tensor, T5, Decomposed2d, D.* not list"),
        (torch.zeros(3, 17), RuntimeError, r"relative_bias must have shape \(4, n\).*\(3, 17\)"),
        (torch.zeros(4, 16), RuntimeError, "n odd and at least 17 for 6 queries and 9 keys"),
        (torch.zeros(4, 15), RuntimeError, "n odd and at least 17 for 6 queries and 9 keys"),
        (torch.zeros(17), RuntimeError, r"got \(17,\)"),
        (torch.zeros(4, 17, device="meta"), RuntimeError, "on query's device cpu, got meta"),
        (torch.zeros(4, 17).bfloat16(), RuntimeError, "query's dtype float16, got bfloat16"),
        (torch.zeros(4, 17).int(), RuntimeError, "must be float32 or .*, got int32"),
        (T5([0.0]), TypeError, "'the table of relative_bias' must be Tensor, not list"),
        (T5(torch.zeros(32, 3)), RuntimeError, r"\(num_buckets, 4\).*got \(32, 3\)"),
        (T5(torch.zeros(3, 4)), RuntimeError, "at least 4 buckets if bidirectional is True, got 3"),
        (T5(torch.zeros(32, 4), 1), TypeError, "'bidirectional of relative_bias' must be bool"),
        (T5(torch.zeros(32, 4), True, 8), ValueError, "max_distance .* int above 8, .* got 8"),
        (Window2d(torch.zeros(25, 4), 3), TypeError, "window .* pair of positive ints, got 3"),
        (Window2d(torch.zeros(24, 4), (3, 3)), RuntimeError, r"shape \(25, 4\) for a window"),
        (Window2d(torch.zeros(25, 2), (3, 3)), RuntimeError, r"shape \(25, 4\).*got \(25, 2\)"),
        (Window2d(torch.zeros(15, 4), (2, 3)), RuntimeError, "key must have 6 rows .* got 9 and 6"),
    ],
)  # fmt: skip
def test_errors(bias: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attend(*qkv(dtype=torch.float16), relative_bias=bias)


@pytest.mark.parametrize(
    ("table", "positions", "message"),
    [
        ((4, 16), None, "odd number of columns, at least 17, got 16"),
        ((4, 15), None, "odd number of columns, at least 17, got 15"),
        ((4, 17), range(8), "an element for each of 6 queries and 9 keys, got 8"),
        ((4, 17), (0, 1, 2, 3, 4, 5, 6, 7, 9), "at least 19, got 17"),
        ((4, 17), (-9, 1, 2, 3, 4, 5, 6, 7, 8), "at least 35, got 17"),
        ((4, 17), (0, 2**31 - 1, -(2**31), 3, 4, 5, 6, 7, 8), "at least 8589934591, got 17"),
    ],
)
def test_a_table_that_is_too_small_is_not_read(table: Any, positions: Any, message: str) -> None:
    """The registered operator runs without the checks of the public function."""
    query, key, value = qkv(dtype=torch.float32)
    bias = torch.zeros(1, *table)
    where = None if positions is None else torch.tensor(positions, dtype=torch.int32)

    def call(bias: Tensor, positions: Tensor | None) -> Any:
        options = AttentionOptions(scale=1.0)
        return attention(query, key, value, *[None] * 4, bias, positions, None, *NO_TERMS, options)

    with pytest.raises(ValueError, match=message):
        call(bias, where)
    enough = torch.arange(9, dtype=torch.int32)
    call(torch.zeros(1, 4, 17), enough)
    with pytest.raises(ValueError, match="positions is not valid: it must be contiguous, of int32"):
        call(torch.zeros(1, 4, 17), enough.long())
    with pytest.raises(ValueError, match="relative_bias is not valid: it must be float32, got bf"):
        call(torch.zeros(1, 4, 17).bfloat16(), enough)


def test_t5_of_one_head_without_a_head_dimension() -> None:
    x = torch.randn(5, 8)
    table = torch.randn(1, 9)
    want = F.scaled_dot_product_attention(x, x, x, table[0, distances(5, 5) + 4])
    assert_close(scaled_dot_product_attention(x, x, x, relative_bias=table), want)
