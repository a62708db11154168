"""Linear layers on the tiles of AMX, float32 and float16 as parts of bfloat16."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gemms import native_layers
from torch import Tensor
from within_bound import assert_right

import fastattn
from fastattn.testing.cases import place

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Around whole tiles, and several blocks of the reduced index.
SIZES = [(1, 1, 1), (33, 31, 17), (15, 65, 95), (70, 40, 1100), (300, 33, 64), (64, 2100, 40)]
LAYOUTS = ["contiguous", "unaligned", "transposed", "sliced"]

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@pytest.fixture
def on_tiles(tiles: str, native: ModuleType) -> Linear:
    return lambda x, weight, bias: native.linear(x, weight, bias, on_tiles=True)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_like_double(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    wide = [None if t is None else t.double() for t in (x, weight, bias)]
    assert_right({"y": y}, lambda: {"y": F.linear(*wide)})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_any_size_and_layout(
    m: int, n: int, k: int, layout: str, dtype: torch.dtype, on_tiles: Linear
) -> None:
    x = place(draw(m, k, dtype=dtype), layout)
    weight = place(draw(n, k, dtype=dtype, seed=1), layout)
    bias = draw(n, dtype=dtype, seed=2) if n % 2 else None
    assert_like_double(on_tiles(x, weight, bias), x, weight, bias)


def test_rows_of_several_groups(on_tiles: Linear) -> None:
    """With the sums of more than 2048 rows beside y, which is in 16 bits."""
    x, weight = draw(2100, 800, dtype=torch.float16), draw(5, 800, dtype=torch.float16, seed=1)
    assert_like_double(on_tiles(x, weight, None), x, weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_threads(
    dtype: torch.dtype, on_tiles: Linear, same_for_any_threads: Any
) -> None:
    x, weight = draw(600, 700, dtype=dtype), draw(70, 700, dtype=dtype, seed=1)
    whole = same_for_any_threads(lambda: on_tiles(x, weight, None))
    for rows in (slice(0, 1), slice(3, 40), slice(150, 450), slice(590, 600)):
        assert torch.equal(on_tiles(x[rows], weight, None), whole[rows])


def test_each_part_of_a_float_decides(on_tiles: Linear) -> None:
    """Products whose sums cancel up to the last bit of the third part."""
    parts = torch.tensor([1.0, 1.0 + 2.0**-9, 1.0 + 2.0**-17, 1.0 - 2.0**-23])
    weight = torch.stack([torch.ones(4), parts])
    for signs in itertools.product([1.0, -1.0], repeat=4):
        x = (parts * torch.tensor(signs)).repeat(3, 1)
        y = on_tiles(x, weight, None).double()
        scale = x.double().abs() @ weight.double().abs().T
        assert ((y - x.double() @ weight.double().T).abs() <= 2.0**-22 * scale).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("side", ["x", "weight"])
def test_values_that_are_not_finite_stay_in_their_row(
    side: str, value: float, dtype: torch.dtype, on_tiles: Linear
) -> None:
    x, weight = draw(70, 45, dtype=dtype), draw(41, 45, dtype=dtype, seed=1)
    bias = draw(41, dtype=dtype, seed=2)
    clean = on_tiles(x, weight, bias)
    (x if side == "x" else weight)[[3, 4, 38], 44] = value
    y = on_tiles(x, weight, bias)
    torch.testing.assert_close(y, F.linear(x.float(), weight.float(), bias.float()).to(dtype),
                               equal_nan=True, rtol=1e-2, atol=1e-2)  # fmt: skip
    others = torch.ones(70 if side == "x" else 41, dtype=torch.bool)
    others[[3, 4, 38]] = False
    same = (y[others], clean[others]) if side == "x" else (y[:, others], clean[:, others])
    assert torch.equal(*same)


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-33, 1e-26, 1e-23, 1e-7, 1e16, 1e18, 1e37])
@pytest.mark.parametrize("side", ["x", "weight"])
def test_rows_of_small_and_of_large_floats(side: str, size: float, on_tiles: Linear) -> None:
    """Tiles flush subnormal parts to zero, and large products would overflow."""
    x, weight = draw(40, 70, dtype=torch.float32), draw(45, 70, dtype=torch.float32, seed=1)
    (x if side == "x" else weight)[[1, 2, 33]] *= size
    y = on_tiles(x, weight, None).double()
    scale = x.double().abs() @ weight.double().abs().T
    error = (y - x.double() @ weight.double().T).abs()
    assert (error <= 1e-6 * scale + torch.finfo(torch.float32).tiny * 2.0**-20).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_native_encoder_layer(dtype: torch.dtype, tiles: str) -> None:
    """Its linear layers run on tiles, with activation and bias, where the evidence says so."""
    layer = torch.nn.TransformerEncoderLayer(128, 4, 512, activation="gelu", batch_first=True)
    layer = layer.eval().to(dtype)
    x = draw(4, 32, 128, dtype=dtype)
    results = {}
    for gemm in ("tiles", "torch"):
        with native_layers(gemm) as called, torch.no_grad():
            accelerated = copy.deepcopy(layer)
            fastattn.accelerate(accelerated, linear=False)
            results[gemm] = accelerated(x)
        assert called == [128]
    with torch.no_grad():
        eager = layer(x).double()
        want = layer.double()(x.double())
    most = 2 * (eager - want).abs().max() + 4 * torch.finfo(dtype).eps * want.abs().max()
    for y in results.values():
        assert (y.double() - want).abs().max() <= most
    assert not torch.equal(*results.values()), "the evidence changed nothing"
