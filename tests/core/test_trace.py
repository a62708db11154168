"""``fastattn.trace`` records each call and the kernel that ran it."""

from __future__ import annotations

import contextlib

import pytest
import torch

import fastattn
from fastattn.integrations.torch import activate


def seen(calls: fastattn._trace.Calls) -> list[tuple[str, str, int]]:
    """The operator, backend and count of each call."""
    return [(call.operator, call.backend, call.count) for call in calls]


def test_forward_and_backward_count_apart() -> None:
    q, k, v = (torch.randn(1, 2, n, 8, requires_grad=True) for n in (5, 7, 7))
    with fastattn.trace() as calls, fastattn.use_backend("reference"):
        for _ in range(3):
            fastattn.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        fastattn.scaled_dot_product_attention(q[..., :3, :], k, v)
    fastattn.scaled_dot_product_attention(q, k, v)  # outside
    assert seen(calls) == [
        ("scaled_dot_product_attention", "reference", 3),
        ("scaled_dot_product_attention_backward", "reference", 3),
        ("scaled_dot_product_attention", "reference", 1),
    ]
    assert calls[0].shapes == ((1, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8))
    assert calls[2].shapes[0] == (1, 2, 3, 8)
    assert calls[0].dtype == torch.float32
    assert calls[0].seconds == 0.0


@pytest.mark.usefixtures("native")
def test_the_backend_and_the_reason() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    with fastattn.trace() as calls:
        fastattn.scaled_dot_product_attention(q, k, v)
        fastattn.memory_hop_attention(q[0, :, 0], k[0], v[0], hops=2)
        fastattn.scaled_dot_product_attention(*(x.to("meta") for x in (q, k, v)))
    (first, second, third) = calls
    assert (first.backend, first.reason) == ("cpu", "")
    assert (second.operator, second.backend) == ("memory_hop_attention", "cpu")
    assert third.backend == "reference"


def test_a_reason_agrees_with_explain() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 8, dtype=torch.float64)
    wide = [torch.cat([x] * 400, -1) for x in (q, k, v)]
    explanation = fastattn.explain("scaled_dot_product_attention", *wide)
    with fastattn.trace() as calls:
        fastattn.scaled_dot_product_attention(*wide)
    (call,) = calls
    assert call.backend == explanation.runs
    before = list(explanation.reasons)[: list(explanation.reasons).index(call.backend)]
    for name in before:
        assert f"{name}: {', '.join(explanation.reasons[name])}" in call.reason


def test_attention_that_did_not_reach_fastattn() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 8, requires_grad=True)

    def attend() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v).sum().backward()

    with fastattn.trace() as calls:
        attend()
    assert [call.backend for call in calls] == ["", ""]
    assert all("flash_attention_for_cpu" in call.operator for call in calls)
    with fastattn.trace() as calls, activate():
        attend()
    assert all(call.backend for call in calls)
    assert len(calls) == 2


@pytest.mark.parametrize("activated", [False, True])
def test_inference_mode(activated: bool) -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    activation = activate() if activated else contextlib.nullcontext()
    with activation, torch.inference_mode(), fastattn.trace() as calls:
        torch.nn.functional.scaled_dot_product_attention(q, k, v)
    (call,) = calls
    assert bool(call.backend) == activated


def test_operators_that_take_functions_run() -> None:
    x = torch.ones(3)
    with fastattn.trace() as calls:
        out = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
    assert torch.equal(out, x.sin())
    assert len(calls) == 0


def test_the_dtype_is_the_attentions() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 8, dtype=torch.bfloat16, requires_grad=True)
    with fastattn.trace() as calls:
        fastattn.scaled_dot_product_attention(q, k, v, return_lse=True)[1].sum().backward()
    assert [call.dtype for call in calls] == [torch.bfloat16] * 2


def test_overlapping_traces_restore_the_compiler() -> None:
    compiled = torch.compile(torch.sin, backend="aot_eager", fullgraph=True)
    compiled(torch.ones(2))
    first, second = fastattn.trace(), fastattn.trace()
    first.__enter__()
    second.__enter__()
    second.__exit__(None, None, None)
    first.__exit__(None, None, None)
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_compiled_code_runs_uncompiled() -> None:
    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return fastattn.scaled_dot_product_attention(*tensors) * 2

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    tensors = torch.randn(3, 1, 2, 5, 8)
    expected = compiled(*tensors)
    with fastattn.trace() as calls:
        out = compiled(*tensors)
    assert calls[0].count == 1
    assert torch.equal(out, expected)


def test_timed_calls_have_seconds() -> None:
    q, k, v = torch.randn(3, 1, 2, 64, 8)
    with fastattn.trace(timed=True) as calls:
        for _ in range(2):
            fastattn.scaled_dot_product_attention(q, k, v)
    (call,) = calls
    assert call.count == 2
    assert 0 < call.seconds < 60


def test_the_table() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    with fastattn.trace(timed=True) as calls, fastattn.use_backend("reference"):
        fastattn.scaled_dot_product_attention(q, k, v)
    head, row = str(calls).splitlines()
    assert head.split() == ["calls", "ms", "operator", "shapes", "dtype", "backend", "reason"]
    for cell in ("1 ", "scaled_dot_product_attention", "1×2×5×8 1×2×5×8", "float32", "reference"):
        assert cell in row
    page = calls._repr_html_()
    assert page.count("<tr>") == 2
    assert "<td>scaled_dot_product_attention</td>" in page
    with fastattn.trace() as nothing:
        pass
    assert str(nothing).split() == ["calls", "operator", "shapes", "dtype", "backend", "reason"]
    assert len(nothing) == 0


def test_an_error_names_the_argument() -> None:
    with (
        pytest.raises(TypeError, match="trace: timed must be a bool, got int"),
        fastattn.trace(1),  # type: ignore[arg-type]
    ):
        pass


@pytest.mark.filterwarnings("ignore:.*runs on the slow reference")
def test_calls_that_fall_back_to_the_reference_have_a_reason() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    slopes = torch.ones(2, requires_grad=True)
    with fastattn.trace(timed=True) as outer, fastattn.trace() as calls:
        fastattn.scaled_dot_product_attention(q, k, v, alibi_slopes=slopes).sum().backward()
        torch.func.jvp(lambda x: fastattn.scaled_dot_product_attention(x, k, v), (q,), (q,))
    fastattn.scaled_dot_product_attention(q, k, v, alibi_slopes=slopes)  # outside
    assert seen(calls) == [("scaled_dot_product_attention", "reference", 1)] * 2
    assert "alibi_slopes requires a gradient" in calls[0].reason
    assert "forward-mode" in calls[1].reason
    assert seen(outer) == seen(calls)
    assert all(call.seconds > 0 for call in outer)
