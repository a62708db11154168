"""``scaled_dot_product_attention`` of PyTorch itself on our kernels."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as imported_before
from torch.testing._internal.common_methods_invocations import op_db

from fastattn.compat import stock_attention
from fastattn.integrations.torch import activate
from fastattn.ops.sdpa import plans

(OP,) = [op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention"]


def attend(*tensors: Any, **options: Any) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(*tensors, **options)


@pytest.fixture
def active() -> Iterator[None]:
    with activate():
        yield


def make(*shape: int, dtype: torch.dtype = torch.float64, requires_grad: bool = True) -> Any:
    """Three random tensors of one shape."""
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, requires_grad=requires_grad) for _ in range(3)]


def is_ours(out: Tensor) -> bool:
    """By the graph: PyTorch names nodes after its fused kernel, or after other operations."""
    names, nodes = set(), [out.grad_fn]
    while nodes:
        node = nodes.pop()
        assert node is not None
        names.add(node.name())
        nodes.extend(parent for parent, _ in node.next_functions if parent is not None)
    stock = any("ScaledDotProduct" in name or "Softmax" in name for name in names)
    ours = any("ttentionBackward" in name for name in names)
    assert ours != stock, names
    return ours


def results(function: Any, tensors: Any, options: Any) -> list[Tensor]:
    """The output and the gradients of all inputs that require one."""
    leaves = [
        t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t
        for t in tensors
    ]
    out = function(*leaves, **options)
    wanted = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    return [out, *torch.autograd.grad(out, wanted, grad)]


# --- which calls are served -----------------------------------------------------------------------


def test_every_route_to_the_operator_is_served(active: None) -> None:
    q, k, v = make(2, 2, 5, 8)
    for function in (
        torch.nn.functional.scaled_dot_product_attention,
        imported_before,
        torch._C._nn.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention,
        torch.jit.script(_scripted),
    ):
        assert is_ours(function(q, k, v))


def _scripted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def test_inference_mode_is_served(active: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, find = [], plans.find

    def counted(*args: Any) -> Any:
        calls.append(args)
        return find(*args)

    monkeypatch.setattr(plans, "find", counted)
    q, k, v = make(2, 2, 5, 8, requires_grad=False)
    with torch.inference_mode():
        out = attend(q, k, v)
    assert out.is_inference()
    assert len(calls) == 1
    torch.testing.assert_close(out, attend(q, k, v))


def test_modules_of_pytorch_are_served(active: None) -> None:
    layer = nn.MultiheadAttention(16, 2, batch_first=True, dtype=torch.float64)
    out, _ = layer(*make(2, 5, 16), need_weights=False)
    assert is_ours(out)


@pytest.mark.parametrize(
    "options",
    [
        {"dropout_p": 0.5},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": torch.ones(5, 5, dtype=torch.bool).tril()},
        {"attn_mask": torch.zeros(2, 1, 5, 5, dtype=torch.float64, requires_grad=True)},
    ],
    ids=lambda options: "-".join(options),
)
def test_options_are_served(active: None, options: dict[str, Any]) -> None:
    assert is_ours(attend(*make(2, 2, 5, 8), **options))


def test_unsupported_calls_stay_pytorchs(active: None) -> None:
    q, k, v = make(2, 2, 5, 8)
    with sdpa_kernel(SDPBackend.MATH):
        expected = attend(q, k, v)
    assert not is_ours(expected)
    torch.testing.assert_close(attend(q, k, v), expected)
    mask = torch.ones(5, 5, dtype=torch.bool)
    assert not is_ours(attend(q, k, v, mask, is_causal=True))  # our function raises an error


@pytest.mark.parametrize("backends", [[SDPBackend.FLASH_ATTENTION], [SDPBackend.MATH]])
def test_a_key_without_heads_does_not_crash(active: None, backends: Any) -> None:
    query, key, value = (torch.ones(2, heads, 3, 8) for heads in (4, 0, 2))
    with sdpa_kernel(backends), pytest.raises(RuntimeError, match="key must have heads"):
        attend(query, key, value, enable_gqa=True)


@pytest.mark.parametrize("lengths", [(9, 10), (10, 9), (9, 0)])
def test_a_value_of_another_length_than_key_is_not_read(
    active: None, lengths: tuple[int, int]
) -> None:
    key, value = (torch.ones(2, 4, length, 8) for length in lengths)
    with pytest.raises(RuntimeError, match="key and value must have the same length"):
        attend(torch.ones(2, 4, 7, 8), key, value)


def outcome(function: Any, tensors: list[torch.Tensor]) -> Any:
    """The result of a call, or the text of its error."""
    try:
        return function(*tensors)
    except RuntimeError as error:
        return str(error)


def test_empty_tensors_give_pytorchs_results(active: None) -> None:
    sizes = (0, 1, 2)
    for heads in itertools.product(sizes, sizes, sizes):
        for batch in ((2, 2, 2), (0, 0, 0), (0, 1, 0), (1, 0, 1)):
            tensors = [
                torch.ones(n, h, length, 8)
                for n, h, length in zip(batch, heads, (3, 5, 5), strict=True)
            ]
            if all(x.numel() for x in tensors):
                continue
            ours, stock = outcome(attend, tensors), outcome(stock_attention, tensors)
            if isinstance(stock, str):
                assert ours == stock
            else:
                torch.testing.assert_close(ours, stock)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda q, k, v: ((q, k[..., :4], v), {}),
        lambda q, k, v: ((q, k.float(), v), {}),
        lambda q, k, v: ((q, k, v, torch.ones(7, 5).bool()), {}),
        lambda q, k, v: ((q, k, v, torch.ones(5).bool()), {}),
        lambda q, k, v: ((q, k, v, torch.ones(()).double()), {}),
        lambda q, k, v: ((q[0, 0, 0], k, v), {}),
        lambda q, k, v: ([x.to(torch.complex128) for x in (q, k, v)], {}),
    ],
)
def test_errors_equal_pytorchs(break_it: Any) -> None:
    tensors, options = break_it(*make(2, 2, 5, 8))
    with pytest.raises(Exception) as stock:
        attend(*tensors, **options)
    with activate(), pytest.raises(stock.type) as ours:
        attend(*tensors, **options)
    assert str(ours.value) == str(stock.value)


# --- the results ----------------------------------------------------------------------------------


def test_samples_of_pytorch(active: None) -> None:
    served = 0
    for call in samples():
        ours = results(attend, *call)
        served += is_ours(ours[0])
        with sdpa_kernel(SDPBackend.MATH):
            stock = results(attend, *call)
        torch.testing.assert_close(ours, stock, rtol=1e-10, atol=1e-12)
    assert served >= 8


def samples() -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """The arguments of each sample of PyTorch that draws nothing."""
    for sample in OP.sample_inputs("cpu", torch.float64, requires_grad=True):
        if not sample.kwargs.get("dropout_p"):
            yield [sample.input, *sample.args], sample.kwargs


def test_dropout_follows_the_generator(active: None) -> None:
    q, k, v = make(1, 2, 64, 8)
    torch.manual_seed(3)
    first = attend(q, k, v, dropout_p=0.5)
    assert not torch.equal(first, attend(q, k, v, dropout_p=0.5))
    torch.manual_seed(3)
    assert torch.equal(first, attend(q, k, v, dropout_p=0.5))


def test_transforms(active: None) -> None:
    q, k, v = make(3, 1, 2, 5, 8, requires_grad=False)

    def total(*tensors: Tensor) -> Tensor:
        return attend(*tensors, is_causal=True).sin().sum()

    def grads(*tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        return torch.autograd.grad(total(*leaves), leaves)

    for got, expected in zip(
        torch.func.grad(total, (0, 1, 2))(q[0], k[0], v[0]), grads(q[0], k[0], v[0]), strict=True
    ):
        torch.testing.assert_close(got, expected)
    each = torch.stack([attend(*x) for x in zip(q, k, v, strict=True)])
    shared = torch.stack([attend(x, k[0], v[0]) for x in q])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch's kernel has no batching rule, and warns
        torch.testing.assert_close(torch.vmap(attend)(q, k, v), each)
        torch.testing.assert_close(torch.vmap(attend, (0, None, None))(q, k[0], v[0]), shared)
        of_each = torch.vmap(torch.func.grad(total, (0, 1, 2)))(q, k, v)
    torch.testing.assert_close(of_each, grads(q, k, v))


def test_dropout_in_vmap(active: None) -> None:
    q, k, v = make(3, 1, 2, 5, 8, requires_grad=False)

    def call(*tensors: Tensor) -> Tensor:
        return attend(*tensors, dropout_p=0.5)

    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(call)(q, k, v)
    same = torch.vmap(call, randomness="same")(*(x[:1].expand_as(x) for x in (q, k, v)))
    assert torch.equal(same[0], same[1])
    other = torch.vmap(call, randomness="different")(*(x[:1].expand_as(x) for x in (q, k, v)))
    assert not torch.equal(other[0], other[1])


def test_autocast(active: None) -> None:
    q, k, v = make(2, 2, 5, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(q, k, v)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert q.grad.dtype == torch.float32


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.25}])
def test_compiled(active: None, options: dict[str, Any]) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q * 2, k, v, **options) + 1

    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    compiled = torch.compile(call, backend=aot_autograd(fw_compiler=backend), fullgraph=True)
    tensors = make(2, 2, 5, 8)
    torch.manual_seed(0)
    expected = results(call, tensors, {})
    torch.manual_seed(0)
    got = results(compiled, tensors, {})
    assert any("fastattn.scaled_dot_product_attention" in name for name in seen)
    if not options.get("dropout_p"):  # the compiler draws from a generator of its own
        torch.testing.assert_close(got, expected)


# --- activation and undo --------------------------------------------------------------------------


def test_activations_end_in_any_order() -> None:
    q, k, v = make(1, 2, 5, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = activate(), activate()
        assert is_ours(attend(q, k, v))
        first.undo()
        first.undo()
        assert is_ours(attend(q, k, v))
        second.undo()
        assert not is_ours(attend(q, k, v))
        with activate():
            assert is_ours(attend(q, k, v))
        assert not is_ours(attend(q, k, v))


def test_an_activation_can_be_entered_again() -> None:
    q, k, v = make(1, 2, 5, 8)
    activation = activate()
    activation.undo()
    with activation:
        assert is_ours(attend(q, k, v))
    assert not is_ours(attend(q, k, v))


def test_undo_while_other_threads_call() -> None:
    """PyTorch frees a function that is unregistered, even while it runs."""
    x = torch.randn(1, 8, 256, 64)
    stop = threading.Event()

    def call() -> None:
        while not stop.is_set():
            attend(x, x, x)

    running = [threading.Thread(target=call) for _ in range(3)]
    for thread in running:
        thread.start()
    for _ in range(300):
        activate().undo()
    stop.set()
    for thread in running:
        thread.join()


class _Wrapper(torch.Tensor):
    """A tensor with rules of its own for the operators of PyTorch, as DTensor has."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> _Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(func._schema.name)
        plain = [x.inner if isinstance(x, _Wrapper) else x for x in args]
        return func(*plain, **(kwargs or {}))


seen: list[str] = []


def test_a_tensor_subclass_receives_pytorchs_operators(active: None) -> None:
    wrapped = [_Wrapper(x) for x in make(1, 2, 5, 8, requires_grad=False)]
    seen.clear()
    attend(*wrapped)
    assert seen
    assert all(name.startswith("aten::") for name in seen)


def test_an_error_within_the_block_ends_it() -> None:
    q, k, v = make(1, 2, 5, 8)
    with pytest.raises(KeyError), activate():
        raise KeyError
    assert not is_ours(attend(q, k, v))


def test_a_backward_after_the_block_runs_on_our_kernels() -> None:
    q, k, v = make(1, 2, 5, 8)
    with activate():
        out = attend(q, k, v)
    out.sum().backward()
    assert q.grad is not None


def test_threads_are_served(active: None) -> None:
    q, k, v = make(1, 2, 5, 8)
    outs: list[Tensor] = []
    threads = [threading.Thread(target=lambda: outs.append(attend(q, k, v))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outs) == 4
    assert all(is_ours(out) for out in outs)


class _Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v)


def test_an_exported_program_has_pytorchs_operator(active: None) -> None:
    tensors = tuple(make(2, 2, 5, 8, requires_grad=False))
    program = torch.export.export(_Attention(), tensors)
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert called == [torch.ops.aten.scaled_dot_product_attention.default]
    torch.testing.assert_close(program.module()(*tensors), attend(*tensors))
