"""The case tables on a GPU, on each backend that is there for one: `python -m pytest tests/gpu`.

The inputs are those of the CPU's tests, copied to the GPU before each call; so is the bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastattn import dispatch
from fastattn.testing import CASES, Case, OnGpu, check
from fastattn.testing.additive import ADDITIVE_CASES, AdditiveCase, check_additive
from fastattn.testing.decode import DECODE_CASES, DecodeCase, check_decode
from fastattn.testing.encode_memory import ENCODE_CASES, EncodeCase, check_encoding
from fastattn.testing.hopfield import HOPFIELD_CASES, HopfieldCase, check_hopfield
from fastattn.testing.memory_hops import HOP_CASES, HopCase, check_hops
from fastattn.testing.sinusoidal import SINUSOIDAL_CASES, SinusoidalCase, check_sinusoidal
from fastattn.testing.varlen import VARLEN_CASES, VarlenCase, check_varlen

if not torch.cuda.is_available():
    pytest.skip("PyTorch sees no GPU here", allow_module_level=True)
pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


@pytest.fixture(params=["cuda", "triton"])
def target(request: pytest.FixtureRequest) -> OnGpu:
    backend = dispatch.load(request.param)
    if isinstance(backend, str):
        pytest.skip(f"{request.param}: {backend}")
    return OnGpu(request.param)


def _judge(judge: Callable[..., Any], case: Any, dtype: torch.dtype, target: OnGpu) -> None:
    verdict = judge(case, dtype, target)
    if verdict.declined:
        pytest.skip("; ".join(verdict.declined))
    assert verdict.ok, "\n".join(verdict.faults)


@dtypes
@pytest.mark.parametrize("case", CASES["scaled_dot_product_attention"], ids=lambda case: case.name)
def test_attention(case: Case, dtype: torch.dtype, target: OnGpu) -> None:
    if dtype not in case.dtypes:
        pytest.skip("not a case of this dtype")
    _judge(check, case, dtype, target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES["scaled_dot_product_attention"], ids=lambda case: case.name)
def test_attention_by_pytorch(case: Case, dtype: torch.dtype) -> None:
    if dtype not in case.dtypes:
        pytest.skip("not a case of this dtype")
    _judge(check, case, dtype, OnGpu("torch"))


@dtypes
@pytest.mark.parametrize("case", VARLEN_CASES, ids=lambda case: case.name)
def test_packed_sequences(case: VarlenCase, dtype: torch.dtype, target: OnGpu) -> None:
    _judge(check_varlen, case, dtype, target)


@dtypes
@pytest.mark.parametrize("case", DECODE_CASES, ids=lambda case: case.name)
def test_decoding(case: DecodeCase, dtype: torch.dtype, target: OnGpu) -> None:
    _judge(check_decode, case, dtype, target)


@dtypes
@pytest.mark.parametrize("case", ADDITIVE_CASES, ids=lambda case: case.name)
def test_additive_attention(case: AdditiveCase, dtype: torch.dtype, target: OnGpu) -> None:
    _judge(check_additive, case, dtype, target)


@dtypes
@pytest.mark.parametrize("case", SINUSOIDAL_CASES, ids=lambda case: case.name)
def test_sinusoidal_encoding(case: SinusoidalCase, dtype: torch.dtype, target: OnGpu) -> None:
    _judge(check_sinusoidal, case, dtype, target)


@dtypes
@pytest.mark.parametrize("case", ENCODE_CASES, ids=str)
def test_memory_encoding(case: EncodeCase, dtype: torch.dtype, target: OnGpu) -> None:
    _judge(check_encoding, case, dtype, target)


@dtypes
@pytest.mark.parametrize("case", HOP_CASES, ids=str)
def test_memory_hops(case: HopCase, dtype: torch.dtype, target: OnGpu) -> None:
    _judge(check_hops, case, dtype, target)


@dtypes
@pytest.mark.parametrize("case", HOPFIELD_CASES, ids=str)
def test_retrieval(case: HopfieldCase, dtype: torch.dtype, target: OnGpu) -> None:
    _judge(check_hopfield, case, dtype, target)
