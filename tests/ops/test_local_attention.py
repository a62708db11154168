"""Local attention: the kernel under luong_attention's windows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn.autograd.local_attention import local_attention, local_attention_backward
from fastattn.testing import Target, targets
from fastattn.testing.luong import LUONG_CASES, LuongCase, check_luong

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", LUONG_CASES, ids=str)
@pytest.mark.parametrize("chosen", targets(), ids=str)
def test_within_the_bound(chosen: Target, case: LuongCase, dtype: torch.dtype) -> None:
    verdict = check_luong(case, dtype, chosen)
    assert verdict.ok, verdict.faults
    results = 4 + case.weights + (case.window == "local-p")
    assert len(verdict.deviations) == results


def operands(dtype: torch.dtype = torch.float64, grad: bool = True) -> tuple[Tensor, ...]:
    """query, key, value, first, seen, factor: windows of 4 keys, of which some do not exist."""
    draw = torch.Generator().manual_seed(0)
    query, key, value, factor = (
        torch.randn(2, *size, dtype=torch.float64, generator=draw).to(dtype).requires_grad_(grad)
        for size in [(5, 3), (7, 3), (7, 2), (5, 4)]
    )
    first = torch.tensor([[-2, 0, 3, 5, 20], [-9, 1, 1, 6, 2]])
    seen = torch.rand(2, 5, 4, generator=draw) < 0.8
    return query, key, value, first, seen, factor


def test_rows_that_do_not_exist_are_not_seen(target: Target) -> None:
    query, key, value, first, seen, factor = operands()
    everything = torch.ones_like(seen)
    j = first[..., None] + torch.arange(4)
    with fastattn.use_backend(target.backend):
        got = local_attention(query, key, value, first, everything, factor)
        want = local_attention(query, key, value, first, (j >= 0) & (j < 7), factor)
        leaves = (query, key, value, factor)
        for x, y in zip(got, want, strict=True):
            assert torch.equal(x, y)
            grads = [torch.autograd.grad(r.sum(), leaves, retain_graph=True, allow_unused=True)
                     for r in (x, y)]  # fmt: skip
            assert all(a is b or torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_nan_reaches_only_the_keys_of_its_window(backend: str) -> None:
    query, key, value, first, seen, factor = operands()
    query.data[0, 2] = float("nan")  # whose window is of keys 3 to 6
    seen[0, 2] = torch.tensor([True, False, True, False])
    out, weights = local_attention(query, key, value, first, seen, factor)
    assert out[0, 2].isnan().all()
    assert not out[0, [0, 1, 3, 4]].isnan().any()
    for grad in torch.autograd.grad(out.sum() + weights.sum(), (key, value)):
        assert grad[0, [3, 5]].isnan().all()
        assert not grad[0, [0, 1, 2, 4, 6]].isnan().any()


def test_derivatives(backend: str) -> None:
    query, key, value, first, seen, factor = operands()

    def f(*leaves: Tensor) -> Any:
        return local_attention(*leaves[:3], first, seen, leaves[3])

    leaves = (query, key, value, factor)
    assert torch.autograd.gradcheck(f, leaves)
    assert torch.autograd.gradgradcheck(f, leaves)


@pytest.mark.parametrize("factored", [False, True])
def test_opcheck(factored: bool) -> None:
    args = list(operands(torch.float32))
    if not factored:
        args[5] = None  # type: ignore[call-overload]
    torch.library.opcheck(local_attention.op, (*args, ""))
    constants = [None if x is None else x.detach() for x in args]
    out, weights = local_attention.op(*constants, "")
    given = (torch.ones_like(out), torch.ones_like(weights))
    torch.library.opcheck(local_attention_backward.op, (*given, *constants, weights, ""))


def test_compiles(backend: str) -> None:
    query, key, value, first, seen, factor = operands()

    def f(query: Tensor, factor: Tensor) -> Tensor:
        return local_attention(query, key, value, first, seen, factor)[0].sin()

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=True)
    out, want = compiled(query, factor), f(query, factor)
    torch.testing.assert_close(out, want)
    leaves = (query, key, value, factor)
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(want.sum(), leaves)
    )


def test_bits_do_not_depend_on_threads_or_batch_mates(same_for_any_threads: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(6, n, 64, generator=draw) for n in (90, 300, 300))
    positions = 300 * torch.rand(6, 90, generator=draw)
    given = [x.requires_grad_() for x in (query, key, value, positions)]

    def run(rows: slice) -> list[Tensor]:
        leaves = [x.detach()[rows].requires_grad_() for x in given]
        out = fastattn.luong_attention(*leaves[:3], window="local-p", positions=leaves[3])
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    whole = same_for_any_threads(lambda: run(slice(None)))
    assert all(torch.equal(x, y[2:3]) for x, y in zip(run(slice(2, 3)), whole, strict=True))
