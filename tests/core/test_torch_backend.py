"""PyTorch's fused attention as a backend: right for the calls it takes, the others declined."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_cases import ATTENTION_CASES
from processors import on_a_gpu
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastattn
from fastattn import dispatch, evidence, explain, use_backend
from fastattn.backends import _torch_cuda, reference
from fastattn.backends import torch as backend
from fastattn.backends.primitives import AttentionBackwardOptions, AttentionOptions
from fastattn.evidence import Row
from fastattn.testing import Target, check
from fastattn.testing.inputs import make_inputs

attention = fastattn.scaled_dot_product_attention
OP = "scaled_dot_product_attention"
HALVES = [torch.bfloat16, torch.float16]
pytestmark = pytest.mark.skipif(backend._forward is None, reason="not in this PyTorch")

PLAIN = AttentionBackwardOptions(scale=0.25)


def qkv(q_len: int = 20, k_len: int = 20, width: int = 16, **options: Any) -> list[Tensor]:
    """Random queries, keys and values in bfloat16."""
    dtype = options.pop("dtype", torch.bfloat16)
    return [torch.randn(2, 4, n, width).to(dtype).requires_grad_(**options) if options else
            torch.randn(2, 4, n, width).to(dtype) for n in (q_len, k_len, k_len)]  # fmt: skip


@pytest.fixture
def torch_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As if `fastattn tune` had found PyTorch's kernel faster in bfloat16, from 16 queries on."""
    monkeypatch.setenv("FASTATTN_CACHE_DIR", str(tmp_path))
    key = evidence.processor("cpu").key
    order = Row("backends", key, "bfloat16", ["torch", "cpu"], "this test", OP, least_queries=16)
    evidence.set_own([order])
    yield
    monkeypatch.undo()
    evidence.forget()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of PyTorch's fused operators were called."""
    made: list[str] = []
    backend._zeroes_masked_rows()  # it calls them once
    for name in ("_forward", "_backward"):
        real = getattr(backend, name)

        def called(*args: Any, real: Any = real, name: str = name, **options: Any) -> Any:
            made.append(name)
            return real(*args, **options)

        monkeypatch.setattr(backend, name, called)
    return made


# -- what it serves -------------------------------------------------------------------------------


@pytest.mark.complete
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("part", range(4))
def test_every_case_that_pytorchs_kernel_takes(part: int, dtype: torch.dtype) -> None:
    taken, faults = 0, []
    for case in ATTENTION_CASES[part::4]:
        if dtype not in case.dtypes or case.slow or case.partial:
            continue
        case = replace(case, grads=("out",))  # with a gradient of lse, another backend runs
        inputs = make_inputs(case, dtype)
        if not dispatch.reasons_against(backend, OP, inputs.args, inputs.options):
            taken += 1
            verdict = check(case, dtype, Target("torch"))
            faults += [f"{case.name}: {fault}" for fault in verdict.faults]
    assert not faults, "\n".join(faults)
    assert taken > 20


LENGTHS = torch.tensor([7, 20]).view(2, 1, 1, 1)
SERVED = {
    "plain": {},
    "causal": {"is_causal": True},
    "padding": {"attn_mask": torch.arange(20) < LENGTHS},
    "a fully masked row": {"attn_mask": torch.arange(20)[:, None].expand(20, 20) != 3},
    "scaled": {"scale": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_the_function_where_it_is_first(name: str, torch_first: None, calls: list[str]) -> None:
    """The fast path and the general one, with gradients, give what the reference gives."""
    options = SERVED[name]
    inputs = qkv(requires_grad=True)
    cotangent = torch.randn(2, 4, 20, 16).bfloat16()
    with use_backend("reference"):
        want = attention(*inputs, **options)
        wanted = torch.autograd.grad(want, inputs, cotangent)
    for extra in ({}, {"return_lse": True}):  # the fast path; the general one
        calls.clear()
        out = attention(*inputs, **options, **extra)
        out = out[0] if extra else out
        grads = torch.autograd.grad(out, inputs, cotangent)
        assert calls == ["_forward", "_backward"]
        for got, expected in zip((out, *grads), (want, *wanted), strict=True):
            assert torch.allclose(got.float(), expected.float(), atol=0.05, rtol=0.05)
            assert got.stride() == expected.stride()
    assert explain(attention, *inputs, **options).runs == "torch"


def test_gradients_of_some_keys_run_on_our_kernels() -> None:
    """PyTorch's kernel assumes that out and lse belong to the keys it gets."""
    given = dict(zip(("query", "key", "value"), qkv(), strict=True))
    assert not backend.why_not(f"{OP}_backward", given, PLAIN)
    assert backend.why_not(f"{OP}_backward", given, replace(PLAIN, partial=True)) == [
        "has no partial"
    ]


def test_grouped_heads(torch_first: None, calls: list[str]) -> None:
    query, key = torch.randn(1, 4, 20, 16).bfloat16(), torch.randn(1, 2, 20, 16).bfloat16()
    out = attention(query, key, key, enable_gqa=True)
    repeated = key.repeat_interleave(2, 1)
    with use_backend("reference"):
        want = attention(query, repeated, repeated)
    assert calls == ["_forward"]
    assert torch.allclose(out.float(), want.float(), atol=0.02)


def test_lse_is_float64_and_minus_inf_in_fully_masked_rows() -> None:
    query, key, value = qkv()
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool)
    mask[:, :, 5] = False
    out, lse, _ = backend.scaled_dot_product_attention(query, key, value, mask, options=PLAIN)
    _, want, _ = reference.scaled_dot_product_attention(query, key, value, mask, options=PLAIN)
    assert lse.dtype == torch.float64
    assert lse.is_contiguous()
    assert (lse[:, :, 5] == -math.inf).all()
    assert torch.allclose(lse, want.double(), atol=1e-2)
    assert (out[:, :, 5] == 0).all()


def test_a_fully_masked_row_passes_no_gradient_and_no_nan() -> None:
    query, key, value = qkv()
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool)
    mask[:, :, 5] = False
    out, lse, _ = backend.scaled_dot_product_attention(query, key, value, mask, options=PLAIN)
    grad = torch.randn_like(out)
    grad[:, :, 5] = math.nan
    rest = (query, key, value, mask, None, None, out, lse)
    *grads, _ = backend.scaled_dot_product_attention_backward(
        grad, None, None, *rest, options=PLAIN
    )
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][:, :, 5] == 0).all()


# -- what it declines -----------------------------------------------------------------------------

MASK = torch.ones(1, 1, 20, 20, dtype=torch.bool)
DECLINED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "weights": ({}, {"need_weights": True}, "weights are wanted"),
    "dropout": ({}, {"dropout_p": 0.5}, "dropout draws other numbers"),
    "softcap": ({}, {"softcap": 1.0}, "softcap"),
    "alibi": ({}, {"alibi_slopes": torch.ones(4)}, "ALiBi"),
    "window": ({}, {"window": (3, 0)}, "a window"),
    "a window ahead": ({}, {"window": (-1, 2)}, "a window"),
    "mask and causal": ({}, {"attn_mask": MASK, "window": (-1, 0)}, "together"),
    "bottom right": (
        {"k_len": 21}, {"is_causal": True, "causal_alignment": "bottom_right"}, "upper left",
    ),
    "hidden keys": ({"k_len": 21}, {"is_causal": True}, "hides the last keys"),
    "a bias": ({}, {"attn_mask": torch.zeros(20, 20)}, "a floating mask"),
    "a learnt bias": (
        {}, {"attn_mask": torch.zeros(20, 20, requires_grad=True)}, "a floating mask",
    ),
    "negative scale": ({}, {"scale": -1.0}, "positive"),
    "no scale": ({}, {"scale": 0.0, "is_causal": True}, "positive"),
    "float32": ({"dtype": torch.float32}, {}, "exceed the error bound"),
    "float64": ({"dtype": torch.float64}, {}, "exceed the error bound"),
    "no keys": ({"k_len": 0}, {}, "a size of 0"),
    "no queries": ({"q_len": 0}, {}, "a size of 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", DECLINED)
def test_declined_calls_skip_pytorch(name: str, torch_first: None, calls: list[str]) -> None:
    shape, options, reason = DECLINED[name]
    inputs = qkv(**shape)
    found = explain(attention, *inputs, **options)
    assert found.runs != "torch"
    attention(*inputs, **options)
    assert calls == []
    with use_backend("torch"), pytest.raises(RuntimeError, match=f"'torch' cannot run .*{reason}"):
        attention(*inputs, **options)
    assert calls == []


def test_unsupported_strides_and_widths_are_declined(torch_first: None, calls: list[str]) -> None:
    query, key, value = qkv()
    for inputs, reason in (
        ((query.mT.contiguous().mT, key, value), "not contiguous"),
        ((query, key, value[..., :8]), "different widths"),
    ):
        attention(*inputs)
        with use_backend("torch"), pytest.raises(RuntimeError, match=reason):
            attention(*inputs)
    assert calls == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [1, 2])
def test_a_masked_nan_reaches_only_queries_that_see_it(
    bad: float, where: int, torch_first: None, calls: list[str]
) -> None:
    for options in ({"is_causal": True}, {"attn_mask": torch.ones(20, 20).tril().bool()}):
        inputs = qkv()
        inputs[where][:, :, 12] = bad
        out = attention(*inputs, **options)
        assert out[:, :, :12].isfinite().all()
        assert "NaN or inf" in str(explain(attention, *inputs, **options))
    assert calls == []
    attention(*inputs)  # every query sees every key
    assert calls == ["_forward"]


def test_no_math_path_where_pytorch_has_the_fused_kernel_switched_off(
    torch_first: None, calls: list[str]
) -> None:
    inputs = qkv()
    with sdpa_kernel(SDPBackend.MATH):
        attention(*inputs)
        assert "would not take its fused kernel" in str(explain(attention, *inputs))
    assert calls == []


def test_accepted_calls_run_on_pytorchs_fused_kernel() -> None:
    for q_len, k_len, width in ((1, 1, 1), (7, 300, 65), (33, 33, 256), (513, 40, 8)):
        inputs = qkv(q_len, k_len, width)
        options = AttentionOptions(scale=1.0)
        if backend.why_not(OP, dict(zip(("query", "key", "value"), inputs, strict=True)), options):
            continue
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # raises where it would fall back
            want = F.scaled_dot_product_attention(*inputs, scale=1.0)
        assert torch.equal(backend.scaled_dot_product_attention(*inputs, options=options)[0], want)


def test_without_the_operator(monkeypatch: pytest.MonkeyPatch, torch_first: None) -> None:
    monkeypatch.setattr(backend, "_forward", None)
    found = explain(attention, *qkv())
    assert "has no fused attention operator" in found.reasons["torch"][0]
    assert found.runs != "torch"


def test_a_pytorch_that_gives_nan_for_fully_masked_rows(
    torch_first: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = backend._forward

    def wrong(*args: Any, attn_mask: Any, **options: Any) -> Any:
        out, lse = real(*args, attn_mask=attn_mask, **options)
        if attn_mask is not None:
            out[(attn_mask == -math.inf).all(-1).expand(out.shape[:3])] = math.nan
        return out, lse

    monkeypatch.setattr(backend, "_forward", wrong)
    backend._zeroes_masked_rows.cache_clear()
    inputs, mask = qkv(), MASK & (torch.arange(20) != 3)[:, None]
    assert attention(*inputs, attn_mask=mask).isfinite().all()
    assert "does not give 0 for fully masked rows" in str(
        explain(attention, *inputs, attn_mask=mask)
    )
    assert explain(attention, *inputs).runs == "torch"
    monkeypatch.undo()
    backend._zeroes_masked_rows.cache_clear()


# -- what is only known in the backward pass ------------------------------------------------------


def gradients_agree(
    inputs: list[Tensor], cotangent: Tensor, lse_grad: bool, **options: Any
) -> None:
    """Gradients on PyTorch's kernel must agree with the reference."""
    results = []
    for forced in ("torch", "reference"):
        with use_backend(forced):
            out, lse = attention(*inputs, return_lse=True, **options)
        outputs = ([out, lse], [cotangent, torch.ones_like(lse)]) if lse_grad else (out, cotangent)
        results.append(torch.autograd.grad(outputs[0], inputs, outputs[1]))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.allclose(got.float(), want.float(), atol=0.05, rtol=0.05, equal_nan=True)


def test_a_gradient_of_lse() -> None:
    gradients_agree(qkv(requires_grad=True), torch.randn(2, 4, 20, 16).bfloat16(), True)


def test_a_gradient_of_lse_takes_the_next_backend_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU, too: the reference would keep a matrix of all scores."""
    ran: list[str] = []

    class Kernels(ModuleType):
        def why_not(self, *args: Any) -> list[str]:
            return []

        def __getattr__(self, name: str) -> Any:
            def run(*args: Any, **options: Any) -> Any:
                ran.append(name)
                return getattr(reference, name)(*args, **options)

            if not name.startswith(OP):
                raise AttributeError(name)
            return run

    def gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
        out, lse = attention(*inputs, return_lse=True)
        return torch.autograd.grad(out.sum() + lse.sum(), inputs)

    inputs = qkv(requires_grad=True)
    with use_backend("reference"):
        want = gradients(*inputs)
    order = ("torch", "triton", "reference")
    with on_a_gpu(Kernels("kernels"), monkeypatch, "triton", torch=backend):
        monkeypatch.setattr(dispatch, "_order", lambda *_: order)
        found = [gradients(*inputs)]
        with use_backend("torch"):
            found.append(gradients(*inputs))
    assert ran == 2 * [OP, f"{OP}_backward"]
    for got in found:
        for x, y in zip(got, want, strict=True):
            assert torch.allclose(x.float(), y.float(), atol=0.05, rtol=0.05)


def test_a_nan_in_the_gradient_stays_with_the_keys_of_its_query() -> None:
    """PyTorch's kernel would spread it to all keys; in our kernels the tiles decide which values of
    other keys become NaN, as zero times NaN."""
    cotangent = torch.randn(2, 4, 20, 16).bfloat16()
    cotangent[:, :, 4] = math.nan
    inputs = qkv(requires_grad=True)
    with use_backend("torch"):
        out = attention(*inputs, is_causal=True)
    grad_query, grad_key, grad_value = torch.autograd.grad(out, inputs, cotangent)
    position = torch.arange(20)
    assert torch.equal(grad_query.isnan().any(-1)[0, 0], position == 4)
    assert torch.equal(grad_key.isnan().any(-1)[0, 0], position <= 4)
    assert grad_value[:, :, :5].isnan().all()


def test_scores_so_large_that_a_float32_lse_is_not_enough() -> None:
    """Two equal keys share a weight of 1; lse = s + log 2 is s in float32, if s is large."""
    query, key, value = qkv()
    key[:, :, 1::2] = key[:, :, ::2]
    value.requires_grad_()
    cotangent, grads = torch.randn(2, 4, 20, 16).bfloat16(), []
    for forced in ("torch", "reference"):
        with use_backend(forced):
            out = attention((3000 * query).bfloat16(), (3000 * key).bfloat16(), value, scale=1.0)
        grads.append(torch.autograd.grad(out, value, cotangent)[0].float())
    assert torch.allclose(*grads, atol=0.05, rtol=0.05)


def test_second_derivatives() -> None:
    inputs = qkv(requires_grad=True)
    with use_backend("torch"):
        out = attention(*inputs)
    (first,) = torch.autograd.grad(out.float().pow(2).sum(), inputs[0], create_graph=True)
    second = torch.autograd.grad(first.float().pow(2).sum(), inputs)
    assert all(g.isfinite().all() for g in second)


# -- a few queries, forced backends, the GPU ------------------------------------------------------


def test_a_few_queries_stay_with_our_kernels(torch_first: None, calls: list[str]) -> None:
    for q_len, expected in ((15, []), (16, ["_forward"])):
        attention(*qkv(q_len))
        assert calls == expected
        attention(*qkv(q_len), return_lse=True)
        assert calls == 2 * expected
        calls.clear()


def test_forcing_another_backend_wins(torch_first: None, calls: list[str]) -> None:
    for forced in ("cpu", "reference"):
        if isinstance(dispatch.load(forced), str):
            continue
        with use_backend(forced):
            attention(*qkv())
            attention(*qkv(), return_lse=True)
    assert calls == []


def test_without_a_native_core(torch_first: None, calls: list[str], monkeypatch: Any) -> None:
    """Declined calls run on the reference without a warning, as without any native core."""
    load = dispatch.load.__wrapped__
    monkeypatch.setattr(dispatch, "load", lambda n: "not built" if n == "cpu" else load(n))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(*qkv())
        assert calls == ["_forward"]
        attention(*qkv(), need_weights=True)
    assert calls == ["_forward"]


def test_a_layer_uses_pytorchs_kernel(torch_first: None, calls: list[str]) -> None:
    layer = fastattn.nn.MultiheadAttention(64, 4, batch_first=True).bfloat16()
    x = torch.randn(8, 64, 64).bfloat16()
    layer(x, x, x, need_weights=False)[0].sum().backward()
    assert calls == ["_forward", "_backward"]


def test_compiled(torch_first: None, calls: list[str]) -> None:
    inputs = qkv()
    want = attention(*inputs, is_causal=True)
    calls.clear()
    compiled = torch.compile(lambda *x: attention(*x, is_causal=True), backend="eager")
    assert torch.equal(compiled(*inputs), want)
    assert calls == ["_forward"]


def test_the_gpu_kernels_are_called_as_their_signatures_say() -> None:
    with FakeTensorMode():
        query = torch.empty(2, 4, 16, 64, dtype=torch.bfloat16, device="cuda")
        key = torch.empty(2, 2, 16, 64, dtype=torch.bfloat16, device="cuda")
        out, lse = _torch_cuda.forward(query, key, key, 0.125, True)
        assert (out.shape, out.dtype) == (query.shape, query.dtype)
        assert (lse.shape, lse.dtype) == (query.shape[:3], torch.float32)
        grads = _torch_cuda.backward(out, query, key, key, out, lse.double(), 0.125, True)
        assert [g.shape for g in grads] == [query.shape, key.shape, key.shape]
        for mask, causal, reason in (
            (torch.ones(1, dtype=torch.bool, device="cuda"), False, "under a mask"),
            (None, True, "bottom right"),
        ):
            fewer = torch.empty(2, 2, 8, 64, dtype=torch.bfloat16, device="cuda")
            (why,) = _torch_cuda.why_not(query, fewer, fewer, mask, causal)
            assert reason in why
