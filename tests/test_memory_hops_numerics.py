"""memory_hop_attention: every kernel against the float64 oracle, in hostile memory."""

from __future__ import annotations

import multiprocessing
import os
import zlib
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn import memory_hop_attention
from fastattn.backends.reference import hop_states as reference_steps
from fastattn.ops.memory_hops import prepare
from fastattn.testing import Target, assert_within_bound
from fastattn.testing.memory import LAYOUTS, Watch, place
from fastattn.testing.memory_hops import results_and_gradients

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """Sizes, and which of the arguments there are, in which shape."""

    batch: int = 3
    queries: int | None = None  # None: query [B, D]
    rows: int = 11
    width: int = 7
    hops: int = 2
    in_memory: str = "BN"  # dimensions before D: "BN", "1N", "BKN", "1KN", or "BSN", a stack
    out_memory: str | None = "BN"
    hop_proj: str | None = None  # "", or "K"
    mask: str | None = None  # dimensions
    bias: str | None = None
    activation: str | None = None
    normalize: str = "softmax"
    scale: float = 0.8
    weights: bool = False

    def __str__(self) -> str:
        changed = [
            f"{name}={value}" for name, value in vars(self).items() if value != getattr(PLAIN, name)
        ]
        return "-".join(changed) or "plain"


PLAIN = Case()
LINEAR = Case(normalize="none", scale=0.2)
CASES = [
    PLAIN,
    Case(batch=1, rows=1, width=1, hops=1),
    Case(rows=50, width=20, hops=3, out_memory=None),
    Case(rows=64, width=16, in_memory="BKN", out_memory="BKN", hops=3),
    Case(rows=65, width=33, in_memory="BSN", out_memory=None, hops=3, hop_proj=""),
    Case(rows=130, width=64, in_memory="BN", out_memory="BKN", hop_proj="K", activation="tanh"),
    Case(rows=17, width=15, in_memory="BKN", activation="relu", hop_proj=""),
    Case(rows=17, width=31, activation="sigmoid", weights=True),
    Case(rows=63, width=100, mask="BN", bias="BKN", weights=True),
    Case(queries=2, rows=70, width=48, mask="BQN", bias="N", weights=True),
    Case(queries=3, rows=40, width=129, bias="BQKN", mask="N", hop_proj="K"),
    Case(queries=3, rows=30, width=9, in_memory="BSN", out_memory=None, bias="BQ1N"),
    Case(batch=5, in_memory="1N", out_memory="1N", rows=90, width=24, weights=True),
    Case(batch=5, in_memory="1N", out_memory="BN", rows=20, width=12),
    Case(batch=2, in_memory="BN", out_memory="1KN", rows=20, width=12),
    Case(batch=9, queries=5, in_memory="1N", out_memory=None, rows=97, width=40, mask="BN"),
    Case(batch=40, in_memory="1SN", out_memory=None, rows=77, width=20, bias="BKN", weights=True),
    Case(batch=70, in_memory="1KN", out_memory="1KN", rows=33, width=65, bias="N"),
    Case(batch=2, queries=37, rows=41, width=18, hops=3, mask="BQN", hop_proj="", weights=True),
    Case(batch=1, rows=3000, width=6, mask="BN", weights=True),
    Case(batch=2, rows=1100, width=5, in_memory="BSN", out_memory=None, bias="BN"),
    Case(batch=20, rows=2100, width=19, in_memory="1N", out_memory=None, hops=1),
    LINEAR,
    replace(LINEAR, rows=50, width=20, hops=3, mask="BN", bias="BN", weights=True, scale=0.05),
    replace(
        LINEAR, batch=33, in_memory="1N", out_memory="1N", mask="BKN", bias="BKN", weights=True
    ),
    replace(LINEAR, rows=20, in_memory="BSN", out_memory=None, hop_proj="K", activation="tanh"),
]


@dataclass
class Inputs:
    tensors: dict[str, Tensor | None]
    options: dict[str, Any]
    grad: Tensor
    grad_weights: Tensor | None


def make_inputs(
    case: Case, dtype: torch.dtype, layout: str = "contiguous", fence: bool = False
) -> Inputs:
    draw = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))
    sizes = {"B": case.batch, "Q": case.queries or 1, "K": case.hops, "N": case.rows}
    sizes |= {"S": case.hops + 1, "1": 1}

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    def placed(values: Tensor, as_dtype: torch.dtype = dtype) -> Tensor:
        lead = (1,) * (4 - values.ndim)
        laid = place(values.view(*lead, *values.shape).to(as_dtype), layout, fence=fence)
        return laid[(0,) * len(lead)]

    def shape(dims: str) -> tuple[int, ...]:
        return tuple(sizes[dim] for dim in dims)

    d = case.width
    lead = (case.batch,) if case.queries is None else (case.batch, case.queries)
    tensors: dict[str, Tensor | None] = {
        "query": placed(normal(*lead, d)),
        "in_memory": placed(normal(*shape(case.in_memory), d) * 2 / d**0.5),
        "out_memory": None,
        "hop_proj": None,
        "memory_mask": None,
        "memory_bias": None,
    }
    if case.out_memory is not None:
        tensors["out_memory"] = placed(normal(*shape(case.out_memory), d))
    if case.hop_proj is not None:
        tensors["hop_proj"] = placed(normal(*shape(case.hop_proj), d, d) / d**0.5)
    if case.mask is not None:
        mask = torch.rand(shape(case.mask), generator=draw) < 0.6
        mask[(1 if mask.shape[0] > 1 else slice(0), *([0] * (mask.ndim - 2)))] = False
        tensors["memory_mask"] = placed(mask, torch.bool)
    if case.bias is not None:
        tensors["memory_bias"] = placed(normal(*shape(case.bias)))
    options = {
        "hops": case.hops,
        "activation": case.activation,
        "normalize": case.normalize,
        "scale": case.scale,
        "need_weights": case.weights,
    }
    weights = None
    if case.weights:
        weights = placed(normal(*lead, case.hops, case.rows))
    return Inputs(tensors, options, placed(normal(*lead, d)), weights)


def with_gradients(inputs: Inputs, rounding: torch.dtype | None = None) -> dict[str, Tensor]:
    """The results and the gradients, by the library; with ``rounding``, by rounded plain steps."""
    arguments: dict[str, Any] = {
        name: x.detach().requires_grad_() if x is not None and x.is_floating_point() else x
        for name, x in inputs.tensors.items()
    }
    leaves = {name: x for name, x in arguments.items() if x is not None and x.requires_grad}
    function = memory_hop_attention if rounding is None else eager(rounding)
    out = function(**arguments, **inputs.options)
    named = dict(zip(("out", "weights"), out if isinstance(out, tuple) else (out,), strict=False))
    given = [inputs.grad, inputs.grad_weights][: len(named)]
    grads = torch.autograd.grad(tuple(named.values()), tuple(leaves.values()), given)
    results = {name: x.detach() for name, x in named.items()}
    return results | {f"grad of {name}": g for name, g in zip(leaves, grads, strict=True)}


def eager(dtype: torch.dtype) -> Any:
    """Plain PyTorch in ``dtype``: each operation rounded."""

    def function(need_weights: bool, **arguments: Any) -> Any:
        _, primitive = prepare(**arguments)
        options = dict(
            zip(("hops", "activation", "normalize", "scale"), primitive[6:], strict=False)
        )
        trace, _, p = reference_steps(
            *primitive[:6], **options, rounded=lambda x: x.to(dtype).to(x.dtype)
        )
        out, weights = trace[-1].to(dtype), torch.stack(p, -2).to(dtype)
        return (out, weights) if need_weights else out

    return function


def exact(inputs: Inputs) -> dict[str, Tensor]:
    """The results and the gradients in extended precision, in the shapes of the arguments."""
    _, primitive = prepare(**inputs.tensors, **inputs.options)  # type: ignore[arg-type]
    unbatched = inputs.grad.ndim == 2
    grad = inputs.grad.unsqueeze(1) if unbatched else inputs.grad
    grad_weights = inputs.grad_weights
    if grad_weights is not None and unbatched:
        grad_weights = grad_weights.unsqueeze(1)
    query, m, c, hop_proj, *rest = primitive
    results = results_and_gradients(
        query if query.ndim == 3 else query.unsqueeze(1),
        m if m.ndim == 4 else m.unsqueeze(1),
        c if c is None or c.ndim == 4 else c.unsqueeze(1),
        hop_proj if hop_proj is None or hop_proj.ndim == 3 else hop_proj.unsqueeze(0),
        *rest,
        grad,
        grad_weights,
    )
    shapes: dict[str, torch.Size] = {
        f"grad of {name}": x.shape for name, x in inputs.tensors.items() if x is not None
    }
    shapes["out"] = inputs.grad.shape
    if inputs.grad_weights is not None:
        shapes["weights"] = inputs.grad_weights.shape
    return {name: x.reshape(shapes[name]) for name, x in results.items()}


def check(target: Target, case: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype)
    watch = Watch(**inputs.tensors)
    with fastattn.use_backend(target.backend):
        got = with_gradients(inputs)
    assert not watch.written()
    want, plain = exact(inputs), with_gradients(inputs, rounding=dtype)
    assert got.keys() == want.keys()
    for name, x in got.items():
        assert x.dtype == dtype
        assert_within_bound(x, plain[name], want[name], f"{case} {name}")


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_within_the_bound(target: Target, case: Case, dtype: torch.dtype) -> None:
    if not target.is_current() and dtype == torch.float16 and case.rows > 1000:
        case = replace(case, rows=case.rows - 1000)  # converted one by one, the long way
    check(target, case, dtype)


# Every schedule: memories shared among threads, chunks of one memory, panels of queries.
SCHEDULES = [
    Case(batch=40, rows=50, width=20, hops=3, out_memory=None, hop_proj=""),
    Case(batch=1, rows=2500, width=40, in_memory="BSN", out_memory=None, mask="BN", weights=True),
    Case(batch=90, rows=1100, width=24, in_memory="1N", out_memory="1N", hop_proj="K"),
    Case(batch=2, queries=70, rows=700, width=33, mask="BQN", bias="BQKN", weights=True),
    Case(batch=20, queries=9, rows=130, width=48, in_memory="BSN", out_memory=None),
]


@pytest.mark.parametrize("case", SCHEDULES, ids=str)
def test_threads_give_the_same_bits(target: Target, case: Case) -> None:
    inputs = make_inputs(case, torch.float32)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 7, 2):
            torch.set_num_threads(threads)
            results.append(with_gradients(inputs))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for name, x in other.items():
            assert torch.equal(x, results[0][name]), name


@pytest.mark.parametrize("queries", [None, 3, 40])
def test_a_query_does_not_depend_on_its_batch(target: Target, queries: int | None) -> None:
    case = Case(batch=4, queries=queries, rows=90, width=21, mask="BN", weights=True)
    inputs = make_inputs(case, torch.float32)
    whole = with_gradients(inputs)
    for b in range(case.batch):
        tensors = {name: None if x is None else x[b : b + 1] for name, x in inputs.tensors.items()}
        assert inputs.grad_weights is not None
        one = replace(
            inputs,
            tensors=tensors,
            grad=inputs.grad[b : b + 1],
            grad_weights=inputs.grad_weights[b : b + 1],
        )
        for name, x in with_gradients(one).items():
            assert torch.equal(x[0], whole[name][b]), name


LAID = [
    Case(queries=3, rows=20, width=18, in_memory="BKN", out_memory="BN", hop_proj="K", bias="BQKN"),
    Case(queries=9, rows=40, width=13, in_memory="BSN", out_memory=None, mask="BQN", weights=True),
]


@pytest.mark.parametrize("case", LAID, ids=["stream", "panels"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if not name.startswith("expanded")])
def test_any_strides(target: Target, layout: str, case: Case) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        want = with_gradients(make_inputs(case, dtype))
        inputs = make_inputs(case, dtype, layout)
        watch = Watch(**inputs.tensors)
        got = with_gradients(inputs)
        assert not watch.written()
        for name, x in got.items():
            assert torch.equal(x, want[name]), name


def test_nothing_is_read_past_the_end(target: Target) -> None:
    """Every tensor ends where memory ends: one read more and the child dies."""

    def child() -> None:
        torch.set_num_threads(1)
        for case in (*LAID, *SCHEDULES[2:4], *CASES[:3]):
            for dtype in (torch.float32, torch.float16):
                with_gradients(make_inputs(case, dtype, fence=True))
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode == 0


@pytest.mark.parametrize("queries", [1, 8])
def test_huge_biases_are_uniform(target: Target, queries: int) -> None:
    """A row of finfo.min sees every row alike, and finite gradients come back."""
    bias = torch.full((1, 10), torch.finfo(torch.float32).min)
    query = torch.randn(1, queries, 6, requires_grad=True)
    m, c = torch.randn(1, 10, 6), torch.randn(1, 10, 6, requires_grad=True)
    u, p = memory_hop_attention(query, m, c, memory_bias=bias, need_weights=True)
    torch.testing.assert_close(p, torch.full_like(p, 0.1))
    (grad,) = torch.autograd.grad(u.sum(), c)
    torch.testing.assert_close(grad, torch.full_like(grad, queries / 10))


@pytest.mark.parametrize("queries", [1, 8])
def test_a_query_of_nan_stays_alone(target: Target, queries: int) -> None:
    """One that sees nothing reaches no gradient; one of a row that is hidden, not that row's."""
    query = torch.randn(2, queries, 6)
    query[0] = float("nan")
    query.requires_grad_()
    memory = torch.randn(2, 9, 6, requires_grad=True)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0] = False
    out = memory_hop_attention(query, memory, hops=2, memory_mask=mask)
    (grad,) = torch.autograd.grad(out[1].sum() + out[0].nansum(), memory)
    assert not grad[0].any()
    assert torch.isfinite(grad[1]).all()
