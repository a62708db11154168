"""The case tables on a GPU: `python -m pytest tests/gpu`. Skipped as a whole where there is none.

The inputs are those of the CPU's tests, copied to the GPU before each call; so is the bound.
"""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import fastattn
from fastattn import dispatch
from fastattn.testing import CASES, Case, Target, check
from fastattn.testing.additive import ADDITIVE_CASES, AdditiveCase, check_additive
from fastattn.testing.decode import DECODE_CASES, DecodeCase, check_decode
from fastattn.testing.encode_memory import ENCODE_CASES, EncodeCase, check_encoding
from fastattn.testing.hopfield import HOPFIELD_CASES, HopfieldCase, check_hopfield
from fastattn.testing.memory_hop_cases import HOP_CASES, HopCase, check_hops
from fastattn.testing.sinusoidal import SINUSOIDAL_CASES, SinusoidalCase, check_sinusoidal
from fastattn.testing.varlen import VARLEN_CASES, VarlenCase, check_varlen

if not torch.cuda.is_available():
    pytest.skip("PyTorch sees no GPU here", allow_module_level=True)
pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 512


def _moved(x: Any, device: str) -> Any:
    """x on another device, with its strides, stride 0 included."""
    if isinstance(x, tuple):
        return tuple(_moved(item, device) for item in x)
    if not isinstance(x, torch.Tensor):
        return x
    size = x.untyped_storage().nbytes() // x.element_size()
    memory = x.as_strided((size,), (1,), 0).to(device)
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


def _on_gpu(function: Any) -> Any:
    def call(*tensors: Any, **options: Any) -> Any:
        return _moved(function(*_moved(tensors, "cuda"), **options), "cpu")

    return call


@pytest.fixture(autouse=True)
def backend_on_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("fastattn.backends.triton")
    functions = {name: _on_gpu(getattr(module, name)) for name in module.__all__ if name.islower()}
    functions["why_not"] = lambda op, *tensors, **options: module.why_not(
        op, *_moved(tensors, "cuda"), **options
    )
    monkeypatch.setattr(
        Target, "module", property(lambda _: SimpleNamespace(**functions)), raising=True
    )
    # For the cases that go through the public functions: it then takes CPU tensors, as interpreted.
    if "through_dispatch" in request.fixturenames:
        proxy, load = SimpleNamespace(**functions, INTERPRETED=True), dispatch.load
        monkeypatch.setattr(
            dispatch, "load", lambda name: proxy if name == "triton" else load(name)
        )


@pytest.fixture
def through_dispatch() -> None:
    """Asks the fixture above for this."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES["scaled_dot_product_attention"], ids=lambda case: case.name)
def test_attention(case: Case, dtype: torch.dtype) -> None:
    if dtype not in case.dtypes or max(case.head_dim, case.value_dim or 0) > WIDEST:
        pytest.skip("not of this backend")
    verdict = check(case, dtype, Target("triton"))
    assert verdict.ok, "\n".join(verdict.faults)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ADDITIVE_CASES, ids=lambda case: case.name)
def test_additive_attention(case: AdditiveCase, dtype: torch.dtype) -> None:
    verdict = check_additive(case, dtype, Target("triton"))
    assert verdict.ok, "\n".join(verdict.faults)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SINUSOIDAL_CASES, ids=lambda case: case.name)
def test_sinusoidal_encoding(case: SinusoidalCase, dtype: torch.dtype) -> None:
    verdict = check_sinusoidal(case, dtype, Target("triton"))
    assert verdict.ok, "\n".join(verdict.faults)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", VARLEN_CASES, ids=lambda case: case.name)
def test_packed_sequences(case: VarlenCase, dtype: torch.dtype) -> None:
    verdict = check_varlen(case, dtype, Target("triton"))
    assert verdict.ok, "\n".join(verdict.faults)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", DECODE_CASES, ids=lambda case: case.name)
def test_decoding(case: DecodeCase, dtype: torch.dtype) -> None:
    if max(case.head_dim, case.value_dim or 0) > WIDEST:
        pytest.skip("not of this backend")
    verdict = check_decode(case, dtype, Target("triton"))
    assert verdict.ok, "\n".join(verdict.faults)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ENCODE_CASES, ids=str)
def test_memory_encoding(case: EncodeCase, dtype: torch.dtype, through_dispatch: None) -> None:
    verdict = check_encoding(case, dtype, Target("triton"))
    assert verdict.ok, "\n".join(verdict.faults)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", HOP_CASES, ids=str)
def test_memory_hops(case: HopCase, dtype: torch.dtype, through_dispatch: None) -> None:
    verdict = check_hops(case, dtype, Target("triton"))
    assert verdict.ok, "\n".join(verdict.faults)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", HOPFIELD_CASES, ids=str)
def test_retrieval(case: HopfieldCase, dtype: torch.dtype, through_dispatch: None) -> None:
    verdict = check_hopfield(case, dtype, Target("triton"))
    assert verdict.ok, "\n".join(verdict.faults)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.1}], ids=str)
def test_a_race_would_show_in_some_of_many_runs(options: dict[str, Any]) -> None:
    leaves = [
        torch.randn(2, 4, 700, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]

    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        out = fastattn.scaled_dot_product_attention(*leaves, **options)
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    first = run()
    for _ in range(50):
        for one, other in zip(first, run(), strict=True):
            assert torch.equal(one, other)


def test_a_call_runs_on_its_own_stream_and_in_a_graph() -> None:
    query = torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16)
    want = fastattn.scaled_dot_product_attention(query, query, query)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):  # on a stream of its own
        out = fastattn.scaled_dot_product_attention(query, query, query)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)


def test_multihead_attention_has_the_contract_of_torch() -> None:
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(64, 4, batch_first=True, device="cuda")
    ours = fastattn.MultiheadAttention(64, 4, batch_first=True, device="cuda")
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 50, 64, device="cuda")
    padding = torch.arange(50, device="cuda").expand(2, 50) >= torch.tensor([[50], [31]]).cuda()
    want, want_weights = theirs(x, x, x, key_padding_mask=padding)
    got, weights = ours(x, x, x, key_padding_mask=padding)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights, want_weights, rtol=1e-4, atol=1e-5)


def test_the_backend_is_chosen_by_itself() -> None:
    query = torch.randn(1, 1, 8, 16, device="cuda")
    explanation = fastattn.explain("scaled_dot_product_attention", query, query, query)
    assert isinstance(importlib.import_module("fastattn.backends.triton"), ModuleType)
    assert explanation.runs in ("cuda", "triton")
