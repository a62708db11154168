"""What test_compat.py runs with every promised version of PyTorch, and without each of its
private names: each way that a call can take, once, against an equation.

    python tests/support/compat_tier.py                        # all of it
    python tests/support/compat_tier.py torch._C._any_requires_grad torch.Tensor()._base

With names, the quick part runs for each of them in a process that is forked before fastattn is
imported, where PyTorch does not have that name while `fastattn.compat` looks for it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import multiprocessing
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

# --- taking names away ----------------------------------------------------------------------------


class _Gone:
    """An attribute of a class that no instance has."""

    def __get__(self, instance: Any, owner: Any) -> Any:
        raise AttributeError("taken away by a test")

    def __set__(self, instance: Any, value: Any) -> None:
        pass


_GONE = _Gone()


class _Without:
    """Another object, but for one attribute."""

    def __init__(self, whole: Any, name: str) -> None:
        self._whole, self._name = whole, name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise AttributeError(name)
        return getattr(self._whole, name)


@contextlib.contextmanager
def without(path: str) -> Iterator[None]:
    """Take a name of PyTorch away. PyTorch itself needs most of them: give it back soon."""
    *owners, name = path.removesuffix(".default").split(".")
    holder: Any = None
    owner: Any = torch
    for part in owners[1:]:
        holder, owner = owner, getattr(owner, part.removesuffix("()"))
    if owners[-1].endswith("()"):
        own = vars(owner).get(name, _GONE)
        setattr(owner, name, _GONE)
        try:
            yield
        finally:
            delattr(owner, name) if own is _GONE else setattr(owner, name, own)
    elif owners[:2] == ["torch", "ops"]:  # looked up again on every access
        setattr(holder, owners[-1], _Without(owner, name))
        try:
            yield
        finally:
            setattr(holder, owners[-1], owner)
    else:
        value = getattr(owner, name)
        delattr(owner, name)
        try:
            yield
        finally:
            setattr(owner, name, value)


# --- the operators and their equations ------------------------------------------------------------


def _rand(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(hash(shape) % 1000 + seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def _softmax_over(scores: Tensor, value: Tensor, keep: Tensor | None = None) -> Tensor:
    if keep is not None:
        scores = torch.where(keep, scores, scores.new_full((), float("-inf")))
    return scores.softmax(-1) @ value


_LENGTHS = (2, 3)  # of the packed sequences, and of the filled part of each cache
_TOKENS = [[[1, 2, 0], [3, 1, 2]]]  # no tensor: export of torch 2.6 and 2.7 takes none from outside
_FACTORS = _rand(3, 4, seed=1).tolist()


def _keep() -> Tensor:
    return torch.ones(4, 5, dtype=torch.bool).tril(2)


def _varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    parts = []
    for a, b in ((0, 2), (2, 5)):
        heads = [x[a:b].transpose(0, 1) for x in (q, k, v)]
        out = _softmax_over(heads[0] @ heads[1].mT / q.shape[-1] ** 0.5, heads[2])
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


def _decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    seen = torch.arange(k.shape[2]) < torch.tensor(_LENGTHS)[:, None, None, None]
    return _softmax_over(q @ k.mT / q.shape[-1] ** 0.5, v, seen)


def _hops(u: Tensor, memory: Tensor, out: Tensor) -> Tensor:
    for _ in range(2):
        u = u + _softmax_over((memory @ u[..., None])[..., 0][:, None], out)[:, 0]
    return u


def _hopfield(state: Tensor, stored: Tensor) -> Tensor:
    for _ in range(3):  # two steps, and the attention that reads the end of them
        state = _softmax_over(0.5 * state @ stored.mT, stored)
    return state


def _sinusoids(x: Tensor) -> Tensor:
    angle = torch.arange(x.shape[-2])[:, None] / 10000.0 ** (torch.arange(0, 4, 2) / 4).double()
    return 2.0 * x + torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)


def _merged(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
    a, b = torch.stack([lse_a, lse_b]).softmax(0)[..., None]
    return a * out_a + b * out_b


def _local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
    return _softmax_over(q @ k.mT, v, distance.abs() <= 1)


def _additive(q: Tensor, k: Tensor, value: Tensor, v: Tensor) -> Tensor:
    return _softmax_over((q[:, :, None] + k[:, None]).tanh() @ v, value)


def operators() -> dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]]:
    """Each public operator: a call, its equation, and the tensors to differentiate by."""
    import fastattn as fa

    attention = [_rand(2, 2, 4, 3), _rand(2, 2, 5, 3), _rand(2, 2, 5, 3, seed=1)]
    packed = [_rand(5, 2, 3, seed=n) for n in range(3)]
    sequence = [_rand(2, 4, 3, seed=n) for n in range(3)]
    return {
        "sdpa": (
            lambda q, k, v: fa.scaled_dot_product_attention(q, k, v, _keep()),
            lambda q, k, v: _softmax_over(q @ k.mT / 3**0.5, v, _keep()),
            attention,
        ),
        "sdpa-general": (
            lambda q, k, v: fa.scaled_dot_product_attention(q, k, v, softcap=2.0, scale=0.7),
            lambda q, k, v: _softmax_over(2.0 * (0.35 * q @ k.mT).tanh(), v),
            attention,
        ),
        "varlen": (
            lambda q, k, v: fa.varlen_attention(q, k, v, *[torch.tensor([0, 2, 5])] * 2),
            _varlen,
            packed,
        ),
        "decode": (
            lambda q, k, v: fa.decode_attention(q, k, v, torch.tensor(_LENGTHS)),
            _decode,
            [_rand(2, 2, 1, 3), *attention[1:]],
        ),
        "merge": (
            lambda *states: fa.merge_states(*states)[0],
            _merged,
            [_rand(2, 4, 3), _rand(2, 4), _rand(2, 4, 3, seed=1), _rand(2, 4, seed=1)],
        ),
        "additive": (fa.additive_attention, _additive, [*sequence, _rand(3)]),
        "luong": (
            lambda q, k, v: fa.luong_attention(q, k, v, window="local-m", D=1),
            _local,
            sequence,
        ),
        "hops": (
            lambda u, m, c: fa.memory_hop_attention(u, m, c, hops=2),
            _hops,
            [_rand(2, 3), *sequence[1:]],
        ),
        "hopfield": (
            lambda s, x: fa.hopfield_retrieve(
                s, x, beta=0.5, update_steps_max=2, update_steps_eps=0
            ),
            _hopfield,
            sequence[:2],
        ),
        "encode": (
            lambda w: fa.encode_memory(
                torch.tensor(_TOKENS),
                w,
                encoding=torch.tensor(_FACTORS, dtype=w.dtype),
                padding_idx=None,
            ),
            lambda w: (w[torch.tensor(_TOKENS)] * torch.tensor(_FACTORS, dtype=w.dtype)).sum(-2),
            [_rand(4, 4)],
        ),
        "sinusoidal": (
            lambda x: fa.sinusoidal_encoding(x, scale=2.0),
            _sinusoids,
            [_rand(2, 4, 4)],
        ),
    }


def _loss(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *leaves: f(*leaves).sin().sum()


# --- the ways that a call can take: each is a function of a function and its leaves ---------------


def plainly(f: Callable[..., Tensor], leaves: list[Tensor]) -> Any:
    return f(*leaves)


def in_inference_mode(f: Callable[..., Tensor], leaves: list[Tensor]) -> Any:
    with torch.inference_mode():
        return f(*leaves).clone()


def with_gradients(f: Callable[..., Tensor], leaves: list[Tensor]) -> Any:
    leaves = [x.clone().requires_grad_() for x in leaves]
    return torch.autograd.grad(_loss(f)(*leaves), leaves)


def twice_differentiated(f: Callable[..., Tensor], leaves: list[Tensor]) -> Any:
    leaves = [x.clone().requires_grad_() for x in leaves]
    first = torch.autograd.grad(_loss(f)(*leaves), leaves, create_graph=True)
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
    return torch.func.grad(_loss(f), tuple(range(len(leaves))))(*leaves)


def vmap_of_func(f: Callable[..., Tensor], leaves: list[Tensor]) -> Any:
    return torch.func.vmap(f)(*(torch.stack([x, -x]) for x in leaves))


def vmap_of_grad(f: Callable[..., Tensor], leaves: list[Tensor]) -> Any:
    grad = torch.func.grad(_loss(f), tuple(range(len(leaves))))
    return torch.func.vmap(grad)(*(torch.stack([x, -x]) for x in leaves))


def jvp_of_func(f: Callable[..., Tensor], leaves: list[Tensor]) -> Any:
    return torch.func.jvp(f, tuple(leaves), tuple(x.cos() for x in leaves))


def hvp_of_func(f: Callable[..., Tensor], leaves: list[Tensor]) -> Any:
    grad = torch.func.grad(_loss(f))
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
    return make_fx(lambda *xs: torch.autograd.grad(_loss(f)(*xs), xs))(*leaves)(*leaves)


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
    loss = torch.compile(_loss(f), backend="aot_eager", fullgraph=True)
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
_WITHOUT_VALUES = {without_memory, in_a_graph}


def check_operator(name: str, way: Callable[..., Any]) -> None:
    from fastattn import compat

    ours, equation, leaves = operators()[name]
    if way in FORWARD_ALONE.get(name, ()):
        return
    if name == "hopfield" and compat.autograd_obstacles and way in _WITHOUT_VALUES:
        # Its reference stops by the values that it finds: an error then, not a wrong result.
        with pytest.raises(Exception, match=r"data-dependent|_local_scalar_dense"):
            way(ours, leaves)
        return
    assert_close(way(ours, leaves), way(equation, leaves))


# --- the modules and the tools --------------------------------------------------------------------


def _layer() -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)


def a_layer_of_an_encoder() -> None:
    import fastattn as fa

    layer, x = _layer(), _rand(2, 5, 8)
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    parameters = list(layer.parameters())

    def run() -> Any:
        out = layer(x, src_key_padding_mask=padding)
        with torch.no_grad():
            inferred = layer.eval()(x)
        layer.train()
        return out, inferred, torch.autograd.grad(out.sin().sum(), parameters)

    expected = run()
    assert fa.replace_mha(layer) == ["self_attn"]
    assert isinstance(layer.self_attn, fa.MultiheadAttention)
    assert_close(run(), expected)
    assert fa.restore_mha(layer) == ["self_attn"]
    assert type(layer.self_attn) is nn.MultiheadAttention
    assert_close(run(), expected)


def a_layer_of_a_decoder() -> None:
    import fastattn as fa

    torch.manual_seed(0)
    options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64}
    for norm_first in (False, True):
        stock = nn.TransformerDecoderLayer(8, 2, 16, norm_first=norm_first, **options)
        ours = fa.nn.TransformerDecoderLayer(8, 2, 16, norm_first=norm_first, **options)
        ours.load_state_dict(stock.state_dict())
        x, memory = _rand(2, 5, 8), _rand(2, 3, 8)
        assert_close(ours(x, memory), stock(x, memory))


def small_self_attention() -> None:
    import fastattn as fa

    torch.manual_seed(0)
    stock = nn.MultiheadAttention(16, 2, batch_first=True)
    ours = fa.MultiheadAttention(16, 2, batch_first=True)
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(2, 9, 16)
    with torch.no_grad():
        assert_close(ours(x, x, x, need_weights=False), stock(x, x, x, need_weights=False))


def wrong_arguments_of_multihead_attention() -> None:
    import fastattn as fa

    ours, x = fa.MultiheadAttention(8, 2), torch.randn(3, 1, 8)
    mask = torch.zeros(3, 3)
    ours(x, x, x, attn_mask=mask, key_padding_mask=torch.zeros(1, 3))
    for wrong in (
        (torch.randn(2, 3, 1, 8), x, x),
        (x, x[0], x),
        (x, x, x, torch.zeros(3)),
        (x[:, 0], x[:, 0], x[:, 0], None, True, torch.zeros(5, 3, 3)),
        (x, x, x, None, True, torch.zeros(3, 3, dtype=torch.int32)),
        (x, x, x, torch.zeros(1, 3, dtype=torch.int64)),
    ):
        with pytest.raises(AssertionError, match=r"query|key|attn_mask|mask"):
            ours(*wrong)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours(x, x, x, attn_mask=mask, key_padding_mask=torch.zeros(1, 3, dtype=torch.bool))
    assert any("key_padding_mask" in str(w.message) for w in caught)
    padding = torch.tensor([[False, False, True]])
    expected = ours(x[:2], x[:2], x[:2])[0]
    assert_close(ours(x, x, x, padding)[0][:2], expected)


def the_projections() -> None:
    from fastattn.nn._linear import linear

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, w, b = (torch.randn(*shape).to(dtype) for shape in ((512, 96), (192, 96), (192,)))
        leaves = [t.requires_grad_() for t in (x, w, b)]
        ours = linear(*leaves)
        wide = F.linear(*(t.detach().double() for t in (x, w, b)))
        close = {"rtol": 0.05, "atol": 0.05}  # the way is asked about, not the rounding
        assert_close(ours.double(), wide, **close)
        grads = torch.autograd.grad(ours.float().sum(), leaves)
        assert_close(grads[2].double(), torch.full((192,), 512.0).double(), **close)


def explained() -> None:
    from fastattn import cli

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert cli.main(["explain", "--shapes", "B=1,H=2,L=8,D=4"]) == 0
    assert "scaled_dot_product_attention" in printed.getvalue()


def recorded() -> None:
    from fastattn.bench import record

    with record() as recording:
        for name in ("sdpa", "additive", "hops"):
            ours, _, leaves = operators()[name]
            ours(*(x.float() for x in leaves))
    assert len(recording.lines) == 3, recording.lines


def captured() -> None:
    import fastattn as fa

    layer, x = _layer(), _rand(2, 5, 8)
    with fa.capture(layer) as weights:
        layer(x)
    assert list(weights) == ["self_attn"]


def a_mask_for_transformers() -> None:
    from fastattn.integrations.transformers._masks import structured_mask
    from fastattn.integrations.transformers._patterns import Pattern

    padding = torch.tensor([[True, True, True, True], [False, True, True, True]])
    pattern = Pattern(left=2, right=0)
    mask = structured_mask((2, 1, 3, 4), pattern, 1, padding, torch.device("cpu"))
    distance = torch.arange(3)[:, None] + 1 - torch.arange(4)
    expected = (distance >= 0) & (distance <= 2) & padding[:, None, None]
    assert mask.shape == expected.shape
    assert_close(mask & True, expected)
    assert_close(torch.cat([mask.detach(), mask]), torch.cat([expected, expected]))


TOOLS: list[Callable[[], None]] = [
    a_layer_of_an_encoder,
    a_layer_of_a_decoder,
    small_self_attention,
    wrong_arguments_of_multihead_attention,
    the_projections,
    explained,
    recorded,
    captured,
    a_mask_for_transformers,
]

# --- without a name -------------------------------------------------------------------------------


def _import_without(path: str) -> None:
    """Import fastattn, where `fastattn.compat` finds no such name in PyTorch."""
    spec = importlib.util.find_spec("fastattn")
    assert spec is not None
    assert spec.loader is not None
    package = sys.modules["fastattn"] = importlib.util.module_from_spec(spec)
    with without(path):  # all else is imported with PyTorch whole
        compat = importlib.import_module("fastattn.compat")
    spec.loader.exec_module(package)
    assert package.compat is compat
    assert compat.NAMES[path] is False


def failures_without(path: str) -> list[str]:
    """What goes wrong without that name, in a process of its own."""
    _import_without(path)
    tasks: list[tuple[Callable[..., Any], Any]] = [(tool, ()) for tool in TOOLS]
    tasks += [(check_operator, (name, way)) for way in QUICK for name in operators()]
    failed = []
    for task, arguments in tasks:
        try:
            task(*arguments)
        except Exception:  # noqa: PERF203
            names = [getattr(x, "__name__", x) for x in (task, *arguments)]
            failed.append(f"without {path}: {names}\n{traceback.format_exc()}")
    return failed


def _modules_that_are_imported_late() -> list[str]:
    """What PyTorch imports when it is first asked for something, in the order in which it does."""
    before = set(sys.modules)
    for way in set(QUICK) - {by_the_reference_below_a_mode}:
        way(lambda *xs: _softmax_over(xs[0], xs[0].mT), [_rand(2, 3)])
    return [name for name in sys.modules if name not in before]


def main(paths: list[str]) -> int:
    warnings.simplefilter("ignore")
    # Imported once for all of them. Found out in a process of its own, since some versions of
    # PyTorch take no backward pass in a fork of a process that has made one.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as elsewhere:
        late = elsewhere.submit(_modules_that_are_imported_late).result()
    for name in late:
        if not name.startswith("fastattn"):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    failed = 0
    for path in paths:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            status = 2
            try:
                failures = failures_without(path)
                print(*failures[:9], f"{path}: {len(failures)} failed", sep="\n", flush=True)
                status = bool(failures)
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(status)
        failed += os.waitpid(child, 0)[1] != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
