"""The native linear layer of few rows, as for the next token: right, with the bits of any batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from within_bound import assert_within_bound

from fastattn import _cpu
from fastattn.testing import Noise
from fastattn.testing.cases import place
from fastattn.testing.targets import Target, fresh_memory_is_nan, targets

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# [N, K]: whole panels of the weight and ends of each length, whole cache lines and parts, odd and
# even; several blocks of the reduction; fewer columns than a panel; one column, one addend.
SIZES = [(64, 64), (65, 33), (129, 1), (130, 515), (200, 1030), (3, 70), (1, 33), (96, 7)]
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 14]

pytestmark = [
    pytest.mark.skipif(not targets(), reason="no native core"),
    pytest.mark.sampled,
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
    pytest.mark.parametrize("target", targets(), ids=str),
]


def operands(
    n: int, k: int, dtype: torch.dtype, layout: str, of_weight: str, rows: int = 40
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x [rows, K], weight [N, K] and, for an odd N, a bias, in memory full of NaN."""
    generator = torch.Generator().manual_seed(n + k)

    def draw(rows: int, columns: int, how: str) -> Tensor:
        values = torch.randn(1, 1, rows, columns, generator=generator).to(dtype)
        return place(values, how)[0, 0]

    bias = draw(1, n, "unaligned")[0] if n % 2 else None
    return draw(rows, k, layout), draw(n, k, of_weight), bias


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In extended precision, for float64."""
    wide = [t.double().numpy().astype(np.longdouble) for t in (x, weight)]
    y = torch.from_numpy((wide[0] @ wide[1].T).astype(np.float64))
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("of_weight", ["contiguous", "unaligned", "sliced", "transposed"])
@pytest.mark.parametrize("layout", ["contiguous", "every_second", "transposed"])
def test_few_rows_are_right_and_equal_many_rows_bitwise(
    layout: str, of_weight: str, target: Target, dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    for n, k in SIZES:
        x, weight, bias = operands(n, k, dtype, layout, of_weight)
        with target.active(), fresh_memory_is_nan():
            many = _cpu.linear(x, weight, bias)
            few = {}
            for count in (1, 2):
                threads(count)
                few |= {(m, count): _cpu.linear(x[5 : 5 + m], weight, bias) for m in ROWS}
        wide = [None if t is None else t.double() for t in (x, weight, bias)]
        want = {"y": exact(x, weight, bias)}
        noise = Noise(lambda w=wide: {"y": F.linear(*w)}, want, dtype)
        assert_within_bound(many, want["y"], noise["y"], f"{n}x{k}")
        for (m, count), y in few.items():
            assert torch.equal(y, many[5 : 5 + m]), f"{m}x{n}x{k} on {count} threads"


# [N, K]: rows a page of memory apart in each dtype; an x of 128 rows that leaves L2.
@pytest.mark.parametrize(("n", "k"), [(27, 2048), (25, 1024), (38, 1700)])
def test_some_rows_equal_many_rows_bitwise(
    n: int, k: int, target: Target, dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    x, weight, bias = operands(n, k, dtype, "contiguous", "contiguous", rows=150)
    with target.active(), fresh_memory_is_nan():
        many = _cpu.linear(x, weight, bias)
        some = {}
        for count in (1, 2):
            threads(count)
            some |= {(m, count): _cpu.linear(x[5 : 5 + m], weight, bias) for m in (31, 47, 128)}
    wide = [None if t is None else t.double() for t in (x, weight, bias)]
    want = {"y": exact(x, weight, bias)}
    noise = Noise(lambda: {"y": F.linear(*wide)}, want, dtype)
    assert_within_bound(many, want["y"], noise["y"], f"{n}x{k}")
    for (m, count), y in some.items():
        assert torch.equal(y, many[5 : 5 + m]), f"{m} rows on {count} threads"


def test_a_row_that_is_not_finite_changes_no_other(target: Target, dtype: torch.dtype) -> None:
    x, weight, _ = operands(130, 96, dtype, "contiguous", "contiguous")
    with target.active():
        want = _cpu.linear(x[:7], weight, None)
        changed_x, changed_weight = x[:7].clone(), weight.clone()
        changed_x[2, 95] = float("inf")
        changed_weight[129, 0] = float("nan")
        y = _cpu.linear(changed_x, changed_weight, None)
    assert not y[2].isfinite().any()
    assert y[:, 129].isnan().all()
    others = [0, 1, 3, 4, 5, 6]
    assert torch.equal(y[others, :129], want[others, :129])


@pytest.mark.parametrize("k", [1, 40])
def test_every_16_bit_weight_is_widened_exactly(k: int, target: Target, dtype: torch.dtype) -> None:
    """Subnormals, infinities and NaN included."""
    stored = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(stored).to(dtype)
    weight, x = torch.zeros(2**16, k, dtype=dtype), torch.zeros(1, k, dtype=dtype)
    weight[:, k // 3], x[:, k // 3] = every, 1
    with target.active():
        y = _cpu.linear(x, weight, None)[0]
    if dtype == torch.bfloat16:  # products of pairs flush subnormals
        every = torch.where(every.abs() < torch.finfo(dtype).tiny, y, every)
    assert torch.equal(y.isnan(), every.isnan())
    assert torch.equal(y[~y.isnan()], every[~every.isnan()])
