"""Many gradients in one call of the autograd engine, against a loop over single ones.

Old style: ``torch.autograd.grad(is_grads_batched=True)``, ``torch.autograd.functional`` with
``vectorize=True``, ``gradcheck(check_batched_grad=True)``. New style: ``torch.vmap`` and
``torch.func`` around ``torch.autograd.grad``.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import batched_cases
import pytest
import torch
from batched_cases import OPERATORS, rand, tupled
from batched_modules import MODULES
from torch import Tensor
from torch._vmap_internals import _vmap
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import fastattn
from fastattn.backends.primitives import (
    AttentionBackwardOptions,
    AttentionOptions,
    MemoryHopBackwardOptions,
    MemoryHopOptions,
)
from fastattn.nn.functional import linear
from fastattn.ops.memory_hops import hop_attention
from fastattn.ops.sdpa import attention

CASES = {**OPERATORS, **MODULES}
ATTENTION = fastattn.scaled_dot_product_attention
# In float64. The kernels give the same bits for a row whatever else is in the batch, but where
# PyTorch multiplies matrices (projections; the reference) it does so in other blocks.
CLOSE: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-13}


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    """Warnings are errors, except that the reference runs, as it does in forward mode."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("ignore", fastattn.FallbackWarning)
        yield


def results_of(function: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The results that have a gradient."""
    return [y for y in tupled(function(*inputs)) if y.requires_grad]


def gradient(
    results: Sequence[Tensor], inputs: Sequence[Tensor], grads: Any, **options: Any
) -> tuple[Tensor, ...]:
    """``torch.autograd.grad``, with zeros for unused inputs, batched like the others."""
    options.setdefault("retain_graph", True)
    found = torch.autograd.grad(results, inputs, grads, allow_unused=True, **options)
    lead = grads[0].shape[:1] if options.get("is_grads_batched") else ()
    pairs = zip(found, inputs, strict=True)
    return tuple(x.new_zeros((*lead, *x.shape)) if g is None else g for g, x in pairs)


def looped(
    results: Sequence[Tensor], inputs: Sequence[Tensor], grads: Sequence[Tensor], **options: Any
) -> tuple[Tensor, ...]:
    """The batched gradients, one by one."""
    rows = [gradient(results, inputs, row, **options) for row in zip(*grads, strict=True)]
    return tuple(torch.stack(column) for column in zip(*rows, strict=True))


def grads_for(results: Sequence[Tensor], count: int, requires_grad: bool = False) -> list[Tensor]:
    """A batch of gradients of the results."""
    shapes = [((count, *y.shape), y.dtype) for y in results]
    return [
        torch.randn(shape, dtype=dtype).requires_grad_(requires_grad) for shape, dtype in shapes
    ]


def weighted(tensors: Sequence[Tensor]) -> Tensor:
    """A scalar that depends on every number."""
    terms = [(x * torch.linspace(0.5, 2, x.numel()).to(x).view_as(x)).sum() for x in tensors]
    return torch.stack(terms).sum()


# --- every operator and module ---------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_old_style(name: str) -> None:
    function, inputs = CASES[name]()
    results = results_of(function, inputs)
    grads = grads_for(results, 3)
    got = gradient(results, inputs, grads, is_grads_batched=True)
    assert_close(got, looped(results, inputs, grads), **CLOSE)


@pytest.mark.parametrize("name", CASES)
def test_new_style(name: str) -> None:
    function, inputs = CASES[name]()
    results = results_of(function, inputs)
    grads = grads_for(results, 3)
    got = torch.vmap(lambda *g: gradient(results, inputs, g))(*grads)
    assert_close(got, looped(results, inputs, grads), **CLOSE)


# Not of modules: the second derivative of PyTorch's own layer_norm is wrong under torch.vmap.
@pytest.mark.parametrize("name", OPERATORS)
def test_new_style_again(name: str) -> None:
    function, inputs = CASES[name]()
    results = results_of(function, inputs)
    grads = grads_for(results, 2, requires_grad=True)
    want = looped(results, inputs, grads, create_graph=True)
    got = torch.vmap(lambda *g: gradient(results, inputs, g, create_graph=True))(*grads)
    leaves = (*inputs, *grads)
    assert_close(gradient([weighted(got)], leaves, None), gradient([weighted(want)], leaves, None))


# Not of modules: PyTorch's gradient of an embedding, say, has no rule for it.
@pytest.mark.parametrize("name", OPERATORS)
def test_no_gradients_at_all(name: str) -> None:
    function, inputs = OPERATORS[name]()
    results = results_of(function, inputs)
    got = torch.vmap(lambda *g: gradient(results, inputs, g))(*grads_for(results, 0))
    assert [g.shape for g in got] == [(0, *x.shape) for x in inputs]


# --- gradcheck -------------------------------------------------------------------------------

# Estimators: their gradient is not the derivative of the value, by definition.
ESTIMATES = ("hopfield-one_step", "hopfield-energy", "hard-attention-gumbel")
# PyTorch draws nothing in its first vmap, and forward mode runs the function there.
DRAWING = ("dropout", "hard-attention")


def differentiable(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """The function without the results that have no derivative."""
    has = [y.requires_grad for y in tupled(function(*inputs))]

    def call(*x: Tensor) -> tuple[Tensor, ...]:
        return tuple(y for y, keep in zip(tupled(function(*x)), has, strict=True) if keep)

    return call


@pytest.mark.sampled(1)
@pytest.mark.parametrize("by", ["the default", "reference"])
@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in ESTIMATES])
def test_gradcheck(name: str, by: str) -> None:
    function, inputs = OPERATORS[name]()
    forward = not any(word in name for word in DRAWING)
    is_forced = by == "reference"
    with fastattn.use_backend(by) if is_forced else contextlib.nullcontext():
        function = differentiable(function, inputs)
        assert gradcheck(
            function,
            inputs,
            fast_mode=True,
            check_batched_grad=True,
            check_forward_ad=forward,
            check_batched_forward_grad=forward,
        )
        assert gradgradcheck(function, inputs, fast_mode=True, check_batched_grad=True)


@pytest.mark.parametrize("name", MODULES)
def test_gradcheck_of_modules(name: str) -> None:
    function, inputs = MODULES[name]()
    function = differentiable(function, inputs)
    assert gradcheck(function, inputs, fast_mode=True, check_batched_grad=True)


# --- torch.autograd.functional and torch.func ------------------------------------------------


FOLDED = {
    "sdpa-plain": (attention.backward, (10, 2, 3, 5)),
    "sdpa-bias-of-each": (attention.backward, (10, 2, 3, 5)),
    "hops-plain": (hop_attention.backward, (10, 3)),
    "hops-stack-masked": (hop_attention.backward, (10, 3)),
}


@pytest.mark.parametrize("name", FOLDED)
def test_a_batch_is_one_call_of_the_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients are folded into the operator's batch, without a loop."""
    function, inputs = OPERATORS[name]()
    results = results_of(function, inputs)
    grads = grads_for(results, 5)
    want = looped(results, inputs, grads)
    operator, shape = FOLDED[name]
    calls: list[tuple[int, ...]] = []
    run = operator._run

    def counted(backend: str, tensors: Sequence[Any], keywords: dict[str, Any]) -> Any:
        calls.append(tensors[0].shape)
        return run(backend, tensors, keywords)

    monkeypatch.setattr(operator, "_run", counted)
    assert_close(gradient(results, inputs, grads, is_grads_batched=True), want, **CLOSE)
    assert calls == [shape]


def test_forward_functions_take_batched_tensors() -> None:
    x = torch.randn(3, 2, 4, 5)
    assert torch.equal(_vmap(ATTENTION)(x, x, x), torch.stack([ATTENTION(y, y, y) for y in x]))


# --- other dtypes ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["sdpa-plain", "sdpa-bool-mask", "hops-plain", "additive"])
def test_batched_gradients_equal_single_ones_bitwise(name: str, dtype: torch.dtype) -> None:
    """The kernels compute a row independently of the rest of the batch."""
    function, inputs = OPERATORS[name]()
    inputs = tuple(x.detach().to(dtype).requires_grad_() for x in inputs)
    results = results_of(function, inputs)
    grads = grads_for(results, 3)
    got = gradient(results, inputs, grads, is_grads_batched=True)
    for x, want in zip(got, looped(results, inputs, grads), strict=True):
        assert torch.equal(x, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_projections(dtype: torch.dtype) -> None:
    """Large enough for the library to choose the GEMM."""
    shapes = (200, 160), (192, 160), (192,)
    inputs = tuple(torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)
    out = linear(*inputs)
    grads = grads_for([out], 3)
    want = looped([out], inputs, grads)
    # In float16 a single gradient is summed in float32, and PyTorch's product is not.
    close = {"rtol": 1e-2, "atol": 0.1} if dtype != torch.float32 else {"rtol": 1e-5, "atol": 1e-4}
    assert_close(gradient([out], inputs, grads, is_grads_batched=True), want, **close)
    assert_close(torch.vmap(lambda g: gradient([out], inputs, [g]))(*grads), want, **close)


# --- what cannot be --------------------------------------------------------------------------


def test_sparse_gradients_cannot_be_batched() -> None:
    weight = rand(5, 4)
    out = fastattn.encode_memory(batched_cases.TOKENS, weight, sparse=True)
    (grads,) = grads_for([out], 2)
    with pytest.raises(RuntimeError, match="sparse=True has no batched gradients"):
        torch.autograd.grad(out, weight, grads, is_grads_batched=True, retain_graph=True)
    with pytest.raises(RuntimeError, match="sparse=True has no batched gradients"):
        torch.vmap(lambda g: torch.autograd.grad(out, weight, g, retain_graph=True))(grads)


def _shared(x: Tensor) -> Tensor:
    """A batch of two that share one entry, with stride 0; NaN lies beyond it."""
    memory = torch.full((2, *x.shape), torch.nan, dtype=x.dtype)
    memory[0] = x
    return memory[0].expand(2, *x.shape[1:])


def test_saved_rows_that_a_batch_shares_are_read_once() -> None:
    """A batch of one call is folded without a copy, and kernels read what was saved in order."""
    cpu: Any = pytest.importorskip("fastattn.backends.cpu")
    q, k, v, grad = (torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(4))
    options = AttentionOptions(scale=0.5)
    out, lse, _ = cpu.scaled_dot_product_attention(q, k, v, options=options)
    backward = AttentionBackwardOptions(scale=0.5)

    def gradients(both: Callable[[Tensor], Tensor]) -> Any:
        given = (both(grad), None, None, *map(both, (q, k, v)), None, None, None)
        return cpu.scaled_dot_product_attention_backward(
            *given, both(out), both(lse), options=backward
        )

    for got, expected in zip(gradients(_shared)[:3], gradients(lambda x: x)[:3], strict=True):
        assert torch.equal(got, expected.expand_as(got))


def test_saved_hops_that_a_batch_shares_are_read_once() -> None:
    cpu: Any = pytest.importorskip("fastattn.backends.cpu")
    query, grad = (torch.randn(1, 4, dtype=torch.float64) for _ in range(2))
    memory = torch.randn(1, 6, 4, dtype=torch.float64)
    options = MemoryHopOptions(hops=2)
    _, *saved, _ = cpu.memory_hop_attention(
        query, memory, memory, None, None, None, options=options
    )

    def gradient(both: Callable[[Tensor], Tensor]) -> Tensor:
        memories = [memory.expand_as(both(memory)).clone() for _ in range(2)]
        given = (both(grad), None, both(query), *memories, None, None, None, *map(both, saved))
        of_query = MemoryHopBackwardOptions(hops=2, needed=1)
        return cpu.memory_hop_attention_backward(*given, options=of_query)[0]

    got = gradient(_shared)
    assert torch.equal(got, gradient(lambda x: x).expand_as(got))
