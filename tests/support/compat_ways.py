"""The ways that a call can take, each a function of a function and its leaves."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from compat_cases import loss_of, operators
from torch import Tensor, nn
from torch.testing import assert_close


def plainly(f: Callable[..., Tensor], leaves: list[Tensor]) -> Any:
    return f(*leaves)


def in_inference_mode(f: Callable[..., Tensor], leaves: list[Tensor]) -> Any:
    with torch.inference_mode():
        return f(*leaves).clone()


def with_gradients(f: Callable[..., Tensor], leaves: list[Tensor]) -> Any:
    leaves = [x.clone().requires_grad_() for x in leaves]
    return torch.autograd.grad(loss_of(f)(*leaves), leaves)


def twice_differentiated(f: Callable[..., Tensor], leaves: list[Tensor]) -> Any:
    leaves = [x.clone().requires_grad_() for x in leaves]
    first = torch.autograd.grad(loss_of(f)(*leaves), leaves, create_graph=True)
    return torch.autograd.grad(sum(g.sin().sum() for g in first), leaves)


def in_batches_of_gradients(f: Callable[..., Tensor], leaves: list[Tensor]) -> Any:
    leaves = [x.clone().requires_grad_() for x in leaves]
    out = f(*leaves)
    grads = torch.stack([out.detach(), out.detach().cos()])
    old = torch.autograd.grad(out, leaves, grads, is_grads_batched=True, retain_graph=True)

    def one(g: Tensor) -> Any:
        return torch.autograd.grad(out, leaves, g, retain_graph=True)

    return old, torch.func.vmap(one)(grads)


def through_a_view_that_promises_minus(f: Callable[..., Tensor], leaves: list[Tensor]) -> Any:
    def negative(x: Tensor) -> Tensor:
        return torch.complex(torch.zeros_like(x), -x).conj().imag  # lazy: its memory holds -x

    assert all(negative(x).is_neg() for x in leaves)
    return f(*map(negative, leaves))


def grad_of_func(f: Callable[..., Tensor], leaves: list[Tensor]) -> Any:
    return torch.func.grad(loss_of(f), tuple(range(len(leaves))))(*leaves)


def vmap_of_func(f: Callable[..., Tensor], leaves: list[Tensor]) -> Any:
    return torch.func.vmap(f)(*(torch.stack([x, -x]) for x in leaves))


def vmap_of_grad(f: Callable[..., Tensor], leaves: list[Tensor]) -> Any:
    grad = torch.func.grad(loss_of(f), tuple(range(len(leaves))))
    return torch.func.vmap(grad)(*(torch.stack([x, -x]) for x in leaves))


def jvp_of_func(f: Callable[..., Tensor], leaves: list[Tensor]) -> Any:
    return torch.func.jvp(f, tuple(leaves), tuple(x.cos() for x in leaves))


def hvp_of_func(f: Callable[..., Tensor], leaves: list[Tensor]) -> Any:
    grad = torch.func.grad(loss_of(f))
    return torch.func.jvp(lambda x: grad(x, *leaves[1:]), (leaves[0],), (leaves[0].cos(),))


def forward_mode(f: Callable[..., Tensor], leaves: list[Tensor]) -> Any:
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, x.cos()) for x in leaves]
        return tuple(forward_ad.unpack_dual(f(*duals)))


def below_a_mode(f: Callable[..., Tensor], leaves: list[Tensor]) -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.seen += 1
            return func(*args, **(kwargs or {}))

    with Counting() as mode:
        result = with_gradients(f, leaves)
    assert mode.seen > 3
    return result


def by_the_reference_below_a_mode(f: Callable[..., Tensor], leaves: list[Tensor]) -> Any:
    import fastattn as fa

    with fa.use_backend("reference"):  # its derivatives ask torch.func, which modes switch off
        return below_a_mode(f, leaves)


def without_memory(f: Callable[..., Tensor], leaves: list[Tensor]) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        results = with_gradients(f, [mode.from_tensor(x) for x in leaves])
    return [torch.zeros(x.shape, dtype=x.dtype) for x in results]  # what is known of them


def in_a_graph(f: Callable[..., Tensor], leaves: list[Tensor]) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    leaves = [x.clone().requires_grad_() for x in leaves]
    return make_fx(lambda *xs: torch.autograd.grad(loss_of(f)(*xs), xs))(*leaves)(*leaves)


class _Subclass(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def of_a_subclass(f: Callable[..., Tensor], leaves: list[Tensor]) -> Any:
    return f(*(x.as_subclass(_Subclass) for x in leaves)).as_subclass(Tensor)


def under_autocast(f: Callable[..., Tensor], leaves: list[Tensor]) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return f(*leaves).double()


def traced(f: Callable[..., Tensor], leaves: list[Tensor]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tracing, which PyTorch deprecates
        graph = torch.jit.trace(lambda *xs: f(*xs), tuple(leaves), check_trace=False)
    return graph(*(-x for x in leaves))


def compiled(f: Callable[..., Tensor], leaves: list[Tensor]) -> Any:
    torch.compiler.reset()
    leaves = [x.clone().requires_grad_() for x in leaves]
    loss = torch.compile(loss_of(f), backend="aot_eager", fullgraph=True)
    return torch.autograd.grad(loss(*leaves), leaves)


def exported(f: Callable[..., Tensor], leaves: list[Tensor]) -> Any:
    class Module(nn.Module):
        def forward(self, *leaves: Tensor) -> Tensor:
            return f(*leaves)

    return torch.export.export(Module(), tuple(leaves)).module()(*leaves)


QUICK: list[Callable[..., Any]] = [
    plainly,
    in_inference_mode,
    with_gradients,
    twice_differentiated,
    in_batches_of_gradients,
    through_a_view_that_promises_minus,
    grad_of_func,
    vmap_of_func,
    vmap_of_grad,
    jvp_of_func,
    hvp_of_func,
    forward_mode,
    below_a_mode,
    by_the_reference_below_a_mode,
    without_memory,
    in_a_graph,
    of_a_subclass,
    under_autocast,
    traced,
]
SLOW: list[Callable[..., Any]] = [compiled, exported]
# Decoding has no gradient.
FORWARD_ALONE = {"decode": {with_gradients, twice_differentiated, grad_of_func, vmap_of_grad}}
FORWARD_ALONE["decode"] |= {hvp_of_func, below_a_mode, by_the_reference_below_a_mode}
FORWARD_ALONE["decode"] |= {without_memory, in_a_graph, compiled, in_batches_of_gradients}
_EXPORTS_TENSORS_FROM_OUTSIDE = torch.__version__ >= "2.8"  # those of a mask


def check_operator(name: str, way: Callable[..., Any]) -> None:
    ours, _, leaves = operators()[name]
    if way in FORWARD_ALONE.get(name, ()):
        return
    if name == "sdpa-mask" and way is exported and not _EXPORTS_TENSORS_FROM_OUTSIDE:
        return
    assert_close(way(ours, leaves), expected(name, way))


# By the names of the operator and the way.
EXPECTED: dict[tuple[str, str], Any] = {}


def expected(name: str, way: Callable[..., Any]) -> Any:
    """What a way returns for the equation of an operator."""
    key = name, way.__name__
    if key not in EXPECTED:
        _, equation, leaves = operators()[name]
        EXPECTED[key] = way(equation, leaves)
    return EXPECTED[key]
