"""Every operator, and many modules, under PyTorch's transforms, against plain calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from batched_cases import OPERATORS, tupled
from batched_modules import MODULES
from recorder import Recorder
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.testing import assert_close
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from fastattn import compat, dispatch

CASES = {**OPERATORS, **MODULES}
# PyTorch's transforms cannot trace a generator, nor the state of the default one.
DRAWING = ("dropout", "hard-attention", "luong-module-concat")
UNDRAWN = [name for name in CASES if not any(word in name for word in DRAWING)]
# Compiling takes time: cases that the compiler sees as different calls.
COMPILED = (
    *("sdpa-biases", "sdpa-t5", "sdpa-window2d", "varlen-biases", "attention-stats"),
    *("sdpa-causal", "sdpa-grouped", "sdpa-bool-mask", "sdpa-bias-of-an-example", "sdpa-weights"),
    *("sdpa-lse-window-softcap", "sdpa-unbatched", "sdpa-3d", "sdpa-5d", "sdpa-broadcast"),
    *("sdpa-transposed", "sdpa-plain"),
    *("additive", "additive-everything", "additive-bool-mask", "additive-padding"),
    *("encode-memory", "encode-memory-tables", "encode-memory-all-words", "merge-states"),
    *("hops-of-many-queries", "hops-expanded", "luong-general", "luong-predictive"),
    *("hopfield-unroll", "hopfield-one_step", "hopfield-implicit", "hopfield-bias"),
    *("hopfield-settled", "sinusoidal-plain", "sinusoidal-from-five"),
    *("sinusoidal-encoding", "sinusoidal-offset", "sinusoidal-positions", "luong-monotonic"),
)
# Between them these have every tensor and option of the operators.
REGISTERED = (
    *("sdpa-plain", "sdpa-bias-of-each", "sdpa-biases", "sdpa-dropout-bias", "sdpa-weights"),
    *("sdpa-lse-window-softcap", "sdpa-alibi", "sdpa-t5", "sdpa-window2d", "varlen"),
    *("varlen-biases", "varlen-causal-alibi", "varlen-dropout", "additive-everything"),
    *("additive-dropout", "encode-memory", "encode-memory-tables", "hops-of-many-queries"),
    *("hops-stack-masked", "hops-linear", "luong-monotonic", "luong-predictive"),
    *("hopfield-unroll", "hopfield-implicit", "hopfield-projected", "sinusoidal-from-five"),
    *("sinusoidal-positions", "merge-states", "hard-attention-reinforce"),
)
# Where the reference differentiates, no operator is called.
UNCALLED = ("sdpa-alibi-learned", "encode-memory-learned-factors")
LATER = [
    pytest.param(name, marks=pytest.mark.complete)
    for name in OPERATORS
    if name not in (*REGISTERED, *UNCALLED)
]
EXPORTED = ("encode-memory-tables", "hops-of-many-queries", "hopfield-unroll")
CAST = ("sdpa-plain", "varlen", "additive", "hops-plain", "hopfield-unroll")

pytestmark = [
    pytest.mark.filterwarnings("ignore::fastattn.FallbackWarning"),
    pytest.mark.usefixtures("seeded"),
]


@pytest.fixture
def backend(choice: str, name: str) -> str:
    if "learned" in name and dispatch.forced.get() == "cpu":
        pytest.skip("the kernels of the CPU have no gradient of it")
    return choice


def scalar(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Callable[..., Tensor]:
    """The sum over the results that have a gradient."""
    has = [y.requires_grad for y in tupled(function(*inputs))]

    def call(*x: Tensor) -> Tensor:
        found = zip(tupled(function(*x)), has, strict=True)
        return torch.stack([y.sin().sum() for y, keep in found if keep]).sum()

    return call


def gradient(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Callable[..., Any]:
    return grad(scalar(function, inputs), tuple(range(len(inputs))))


# --- gradients -------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", OPERATORS)
def test_a_result_without_gradient_has_no_graph(backend: str, name: str) -> None:
    function, inputs = OPERATORS[name]()
    with torch.no_grad():
        assert not any(y.requires_grad for y in tupled(function(*inputs)))
    want = tupled(function(*(x.detach() for x in inputs)))
    assert not any(y.requires_grad for y in want)
    with torch.inference_mode():
        found = tupled(function(*(x.detach().clone() for x in inputs)))
        assert all(y.is_inference() for y in found)
        assert_close(tuple(y.clone() for y in found), want, rtol=0, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_gives_the_same_gradients(name: str) -> None:
    function, inputs = CASES[name]()
    loss = scalar(function, inputs)
    want = torch.autograd.grad(loss(*inputs), inputs, allow_unused=True)
    kept = checkpoint(loss, *inputs, use_reentrant=False)
    assert_close(torch.autograd.grad(kept, inputs, allow_unused=True), want, rtol=0, atol=0)


@pytest.mark.parametrize("name", [n for n in UNDRAWN if n in OPERATORS and "one_step" not in n])
def test_functional_derivatives(name: str) -> None:
    """Derivatives of ``torch.func`` in both modes, against autograd."""
    function, inputs = OPERATORS[name]()
    loss = scalar(function, inputs)
    primals, tangents = (tuple(f(x.detach()) for x in inputs) for f in (torch.clone, torch.cos))
    gradients = torch.autograd.grad(loss(*inputs), inputs, materialize_grads=True)
    assert_close(gradient(function, inputs)(*primals), gradients)
    value, derivative = jvp(loss, primals, tangents)
    assert_close(value, loss(*primals))
    assert_close(derivative, sum((g * t).sum() for g, t in zip(gradients, tangents, strict=True)))


# --- tensors and modes that the fast route does not take -----------------------------------------


class _Own(Tensor):
    """A subclass that changes nothing."""


def _below_a_mode(function: Callable[..., Any], *x: Tensor) -> Any:
    with Recorder():
        return function(*x)


WAYS: dict[str, Callable[..., Any]] = {
    "subclass": lambda function, *x: function(*(y.as_subclass(_Own) for y in x)),
    "lazily negated": lambda function, *x: function(*(torch._neg_view(-y) for y in x)),
    "mode": _below_a_mode,
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPERATORS)
def test_tensors_and_modes_beside_the_fast_route(backend: str, name: str, way: str) -> None:
    function, inputs = OPERATORS[name]()
    found, want = tupled(WAYS[way](function, *inputs)), tupled(function(*inputs))
    assert_close(tuple(y.as_subclass(Tensor) for y in found), want)
    gradients = [
        torch.autograd.grad(sum(y.sin().sum() for y in results), inputs, allow_unused=True)
        for results in (found, want)
    ]
    assert_close(*gradients)


# --- torch.vmap ------------------------------------------------------------------------------


def assert_maps(
    call: Callable[..., Any], inputs: Sequence[Tensor], dims: tuple[int | None, ...]
) -> None:
    """Mapped over ``dims`` of its arguments, the call gives what a loop over examples gives."""
    given = [
        x if dim is None else torch.stack([x, x + 0.1 * torch.randn_like(x)], dim)
        for x, dim in zip(inputs, dims, strict=True)
    ]
    rows = [
        call(*(x if d is None else x.select(d, n) for x, d in zip(given, dims, strict=True)))
        for n in range(2)
    ]
    want = tree_map(lambda *examples: torch.stack(examples), *rows)
    assert_close(vmap(call, in_dims=dims)(*given), want, rtol=1e-9, atol=1e-11)


def mixed(count: int) -> tuple[int | None, ...]:
    """The first or the last dimension of the arguments in turn; one may be common to all."""
    return tuple(None if 0 < n == count - 1 else (0, -1)[n % 2] for n in range(count))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [name for name in UNDRAWN if name in OPERATORS])
def test_vmap_of_values_and_gradients(backend: str, name: str) -> None:
    """Over all arguments, over each alone, and over different dimensions of them."""
    function, inputs = OPERATORS[name]()
    primals, count = [x.detach() for x in inputs], len(inputs)
    alone = [tuple(0 if m == n else None for m in range(count)) for n in range(count)]
    for dims in dict.fromkeys([(0,) * count, mixed(count), *alone]):
        assert_maps(lambda *x: tupled(function(*x)), primals, dims)
        assert_maps(gradient(function, inputs), primals, dims)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", UNDRAWN)
def test_vmap_of_forward_over_reverse(name: str) -> None:
    function, inputs = CASES[name]()
    derivative, primals = gradient(function, inputs), [x.detach() for x in inputs]
    tangents = tuple(torch.randn_like(x) for x in primals)
    assert_maps(lambda *x: jvp(derivative, x, tangents), primals, mixed(len(primals)))


# --- the compiler ----------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_without_a_graph_break(backend: str, name: str, dynamic: bool) -> None:
    function, inputs = CASES[name]()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    got, want = tupled(compiled(*inputs)), tupled(function(*inputs))
    assert_close(got, want)
    gradients = [
        torch.autograd.grad(sum(y.sin().sum() for y in found), inputs, allow_unused=True)
        for found in (got, want)
    ]
    assert_close(*gradients)
    with torch.no_grad():
        assert_close(tupled(compiled(*inputs)), want)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", ["sdpa-plain", "sdpa-bias-of-each", "hops-plain", "mha-self"])
def test_compiled_autograd(name: str) -> None:
    """A backward pass that PyTorch traces as one graph."""
    function, inputs = CASES[name]()
    loss = scalar(function, inputs)
    want = torch.autograd.grad(loss(*inputs), inputs)
    result = loss(*inputs)

    @torch.compile(backend="eager")
    def backward() -> None:
        result.backward()

    with torch._dynamo.config.patch(compiled_autograd=True), warnings.catch_warnings():
        warnings.filterwarnings("error", ".*does not know how to trace.*")
        backward()
    assert_close(tuple(x.grad for x in inputs), want)


@pytest.mark.parametrize("name", EXPORTED)
def test_exports(backend: str, name: str) -> None:
    if "encode" in name and compat._version() < (2, 8):
        pytest.skip("this version exports no tensor from outside")
    function, inputs = OPERATORS[name]()

    class Model(torch.nn.Module):
        def forward(self, *x: Tensor) -> Any:
            return function(*x)

    program = torch.export.export(Model(), tuple(x.detach() for x in inputs))
    assert_close(program.module()(*inputs), function(*inputs))


# --- the operators below -------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*REGISTERED, *LATER])
def test_opcheck(backend: str, name: str, dtype: torch.dtype) -> None:
    function, inputs = OPERATORS[name]()
    if name == "merge-states":  # whose lse is wide
        dtype = torch.promote_types(dtype, torch.float32)
    inputs = tuple(x.detach().to(dtype).requires_grad_() for x in inputs)
    with Recorder() as recorder:
        found = [y for y in tupled(function(*inputs)) if y.requires_grad]
        torch.autograd.grad(found, inputs, [torch.ones_like(y) for y in found], allow_unused=True)
    assert recorder.calls
    for operator, args in recorder.calls.items():
        forward = "backward" not in operator.name()  # second derivatives take the compiler minutes
        own = [x.detach() if isinstance(x, Tensor) else x for x in args]
        for x, given in zip(own, args, strict=True):
            if isinstance(x, Tensor) and forward:
                x.requires_grad_(given.requires_grad)
        torch.library.opcheck(operator, tuple(own))


# --- autocast --------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CAST)
def test_autocast(backend: str, name: str, first: torch.dtype) -> None:
    """Results equal a call with bfloat16 tensors; gradients have the dtypes of the inputs."""
    function, inputs = OPERATORS[name]()
    dtypes = [first, *[torch.float32] * (len(inputs) - 1)]
    inputs = tuple(x.detach().to(t).requires_grad_() for x, t in zip(inputs, dtypes, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        out = tupled(function(*inputs))[0]
    assert out.dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(out, tupled(function(*(x.bfloat16() for x in inputs)))[0])
    gradients = torch.autograd.grad(out.float().sum(), inputs)
    assert [g.dtype for g in gradients] == dtypes


@pytest.mark.parametrize(
    "name", ["additive-everything", "hops-of-many-queries", "hopfield-projected", "hopfield-bias"]
)
def test_autocast_takes_any_float_below_float64(backend: str, name: str) -> None:
    """Also for one tensor alone. Values of bfloat16 keep their bits in the other dtypes."""
    function, inputs = OPERATORS[name]()
    lower = [x.detach().bfloat16() for x in inputs]
    expected = tupled(function(*lower))[0]
    with torch.autocast("cpu", torch.bfloat16):
        for n, x in enumerate(lower):
            for dtype in (torch.float32, torch.float16):
                given = [*lower[:n], x.to(dtype), *lower[n + 1 :]]
                assert torch.equal(tupled(function(*given))[0], expected), (n, dtype)
        with pytest.raises(TypeError, match="dtype"):
            function(lower[0].double(), *lower[1:])
