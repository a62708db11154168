"""An encoder layer in one native call: equal to its operators, run only if nothing observes it."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gemms import native_layers
from torch import Tensor, nn
from torch.nn.utils import prune
from within_bound import assert_right

import fastattn
from fastattn import _cpu, dispatch, evidence
from fastattn.evidence import Gemm
from fastattn.testing.cases import place

ACTIVATIONS: list[tuple[int, Callable[..., Tensor]]] = [
    (1, F.relu),
    (2, F.gelu),
    (3, functools.partial(F.gelu, approximate="tanh")),
    (4, F.silu),
]
HALF = [torch.float32, torch.bfloat16, torch.float16]


def draw(width: int, hidden: int, dtype: torch.dtype) -> list[Any]:
    """Parameters of query, key, value, output, the MLP and the norms, without factors."""
    shapes = [(width, width)] * 4 + [(hidden, width), (width, hidden)]
    parts = [(torch.randn(s) / s[1] ** 0.5, 0.1 * torch.randn(s[0])) for s in shapes]
    parts += [(torch.rand(width) + 0.5, 0.1 * torch.randn(width)) for _ in range(2)]
    return [*((weight.to(dtype), bias.to(dtype)) for weight, bias in parts), None, None]


def biases(table: Tensor, length: int) -> Tensor:
    """[heads, length, length] of a table of distances, the first position first."""
    at = torch.arange(length)
    return table[:, table.shape[1] // 2 + at[:, None] - at]


def native_layer(x: Tensor, lengths: list[int], parts: Any, *options: Any) -> Any:
    """Call the native function on a layer whose facts always hold."""
    *rest, table = options
    facts = _cpu.Facts([], [])
    plan = _cpu.EncoderPlan(facts, parts, *rest, [(2**62, 0, 96, 2**22)] * 3)
    starts = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    return _cpu.encoder_layers(x, starts, table, plans=(plan,), wants_gradients=False)


def by_operators(
    x: Tensor,
    lengths: list[int],
    parts: Any,
    heads: int,
    norm_first: bool,
    eps: tuple[float, float],
    f: Callable[[Tensor], Tensor],
    table: Tensor | None = None,
    rms: bool = False,
) -> Tensor:
    """The layer on packed rows, from PyTorch's functions alone."""

    def attend(x: Tensor) -> Tensor:
        q, k, v = (F.linear(x, *parts[n]).unflatten(-1, (heads, -1)) for n in range(3))
        outs = [
            F.scaled_dot_product_attention(
                *(t.transpose(0, 1) for t in each),
                attn_mask=None if table is None else biases(table, len(each[0])).to(x.dtype),
            ).transpose(0, 1)
            for each in zip(*(t.split(lengths) for t in (q, k, v)), strict=True)
        ]
        return scaled(F.linear(torch.cat(outs).flatten(1), *parts[3]), 8)

    def mlp(x: Tensor) -> Tensor:
        return scaled(F.linear(f(F.linear(x, *parts[4])), *parts[5]), 9)

    def scaled(x: Tensor, n: int) -> Tensor:
        return x if parts[n] is None else x * parts[n][0]

    def norm(x: Tensor, n: int) -> Tensor:
        if rms:
            return F.rms_norm(x, x.shape[-1:], parts[6 + n][0], eps[n])
        return F.layer_norm(x, x.shape[-1:], *parts[6 + n], eps[n])

    if norm_first:
        h = x + attend(norm(x, 0))
        return h + mlp(norm(h, 1))
    h = norm(x + attend(x), 0)
    return norm(h + mlp(h), 1)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", range(4))
@pytest.mark.parametrize(
    ("width", "hidden", "heads", "lengths"),
    [
        (64, 128, 4, [5, 9, 1, 30]),
        (48, 100, 3, [7, 0, 12]),
        (72, 33, 9, [3]),
        (384, 1536, 12, [40]),
    ],
    ids=str,
)
def test_the_native_layer(
    width: int,
    hidden: int,
    heads: int,
    lengths: list[int],
    activation: int,
    norm_first: bool,
    dtype: torch.dtype,
) -> None:
    number, f = ACTIVATIONS[activation]
    check(draw(width, hidden, dtype), lengths, heads, norm_first, number, f)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("option", ["scales", "table", "long table", "rms"])
def test_an_option_of_the_native_layer(option: str, norm_first: bool, dtype: torch.dtype) -> None:
    lengths, table, parts = [5, 19, 1, 40, 0], None, draw(48, 100, dtype)
    if option == "scales":
        parts[8:] = [(torch.randn(48).to(dtype), None) for _ in range(2)]
    elif option == "rms":
        parts[6:8] = [(weight, None) for weight, _ in parts[6:8]]
    else:
        table = 2 * torch.randn(3, 79 if option == "table" else 135)
    check(parts, lengths, 3, norm_first, *ACTIVATIONS[1], table, option == "rms")


def check(
    parts: list[Any],
    lengths: list[int],
    heads: int,
    norm_first: bool,
    number: int,
    f: Callable[..., Tensor],
    table: Tensor | None = None,
    rms: bool = False,
) -> None:
    """Against the operators in float64, with NaN before and after each tensor."""
    (width, _), dtype = parts[0][0].shape, parts[0][0].dtype
    eps, x = (1e-5, 1e-3), torch.randn(sum(lengths), width).to(dtype)

    def each(change: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
        return tuple(
            pair and tuple(None if t is None else change(t) for t in pair) for pair in parts
        )

    placed = None if table is None else place(table)
    y = native_layer(place(x), lengths, each(place), heads, norm_first, rms, *eps, number, placed)
    rest = (heads, norm_first, eps, f, table, rms)

    def definition() -> dict[str, Tensor]:
        return {"y": by_operators(x.double(), lengths, each(Tensor.double), *rest)}

    if dtype == torch.float32:
        assert_right({"y": y}, definition)
    # In 16 bits each step is rounded, in PyTorch's layer more often than here.
    want, eager = definition()["y"], by_operators(x, lengths, parts, *rest)
    most = 2 * (eager.double() - want).abs().max() + 4 * torch.finfo(dtype).eps * want.abs().max()
    assert (y.double() - want).abs().max() <= most


def test_one_weight_for_queries_keys_and_values() -> None:
    parts, x = draw(32, 64, torch.float32), torch.randn(9, 32)
    joint = (torch.cat([w for w, _ in parts[:3]]), torch.cat([b for _, b in parts[:3]]))
    rest = (4, False, False, 1e-5, 1e-5, 1, None)
    apart = native_layer(x, [4, 5], (*parts,), *rest)
    assert torch.equal(native_layer(x, [4, 5], (joint, None, None, *parts[3:]), *rest), apart)


def test_rows_do_not_depend_on_their_batch(same_for_any_threads: Any) -> None:
    parts = draw(64, 96, torch.float32)
    x, rest = torch.randn(60, 64), (4, True, False, 1e-5, 1e-5, 2, None)
    whole = same_for_any_threads(lambda: native_layer(x, [20, 30, 10], (*parts,), *rest))
    for start, length in ((0, 20), (20, 30), (50, 10)):
        rows = x[start : start + length].contiguous()
        assert torch.equal(
            native_layer(rows, [length], (*parts,), *rest), whole[start : start + length]
        )


def test_wrong_arguments_are_named() -> None:
    parts, x = draw(32, 64, torch.float32), torch.randn(9, 32)
    good: tuple[Any, ...] = (x, [9], (*parts,), 4, False, False, 1e-5, 1e-5, 1, None)

    def changed(place: int, value: Any) -> tuple[Any, ...]:
        return (*good[:place], value, *good[place + 1 :])

    other = [(torch.randn(64, 31), None), *parts[1:]]
    for args, words in (
        (changed(1, [10, -1]), "starts"),
        (changed(2, (*other,)), "query weight"),
        (changed(2, (parts[0], (parts[1][0], x[0, :31]), *parts[2:])), "key weight: its bias"),
        (changed(2, (*parts[:4], (parts[4][0][:, :31], None), *parts[5:])), "first weight"),
        (changed(2, (*parts[:8], (torch.randn(31), None), None)), "scale1 weight"),
        (changed(2, (*parts[:9],)), "ten pairs"),
        (changed(3, 5), "num_heads"),
        (changed(8, 9), "activation"),
        (changed(9, torch.randn(4, 15)), "relative_bias must .* at least 17"),
        (changed(9, torch.randn(4, 18)), "odd number of distances"),
        (changed(9, torch.randn(3, 17)), "relative_bias"),
    ):
        with pytest.raises((RuntimeError, ValueError, TypeError), match=words):
            native_layer(*args)
    for args in (
        changed(0, x.double()),
        changed(0, torch.randn(9, 31)),
        changed(0, x[:, None, None]),
        changed(1, [8]),
    ):
        assert native_layer(*args) is None
    assert native_layer(x[:0], [0, 0], *good[2:]).shape == (0, 32)
    columns = changed(0, torch.randn(32, 9).T)
    assert torch.equal(native_layer(*columns), native_layer(columns[0].contiguous(), *columns[1:]))


def test_facts() -> None:
    """Of each kind of fact, one that changes, and one that changes back."""
    state, module = {"a": 1, "b": None}, nn.Linear(1, 1)
    facts = _cpu.Facts([{}, state], [module])

    def changes(change: Callable[[], Any], undo: Callable[[], Any]) -> None:
        assert facts.hold()
        change()
        assert not facts.hold()
        undo()
        assert facts.hold()

    changes(lambda: state.update(a=2), lambda: state.update(a=1))
    changes(lambda: state.pop("b"), lambda: state.update(b=None))
    changes(lambda: state.update(c=state.pop("b")), lambda: state.update(b=state.pop("c")))
    changes(lambda: state.update(c=None), lambda: state.pop("c"))
    kind = type("Another", (nn.Linear,), {})
    changes(
        lambda: setattr(module, "__class__", kind), lambda: setattr(module, "__class__", nn.Linear)
    )
    with pytest.raises(ValueError, match="dictionaries"):
        _cpu.Facts([[]], [])


# -- where it runs ---------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def calls() -> Iterator[list[int]]:
    """The rows of each native call; layers of any size and dtype take it."""
    with native_layers() as called:
        yield called


def layer(**options: Any) -> nn.TransformerEncoderLayer:
    """A small encoder layer in eval mode."""
    return fastattn.nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, **options).eval()


X = torch.randn(3, 5, 16)


def same(ours: nn.Module, x: Tensor = X, **more: Any) -> None:
    """Results equal PyTorch's, from the same parameters, without its fast path."""
    stock = nn.TransformerEncoderLayer(
        16, 2, 24, batch_first=True, activation=ours.activation, norm_first=ours.norm_first
    ).to(x.dtype)
    stock.load_state_dict(ours.state_dict())
    stock.train(ours.training)
    with torch.enable_grad():
        want = stock(x, **more)
    with torch.no_grad():
        assert torch.allclose(ours(x, **more), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", F.silu, nn.GELU("tanh"), nn.ReLU()])
def test_layers_of_pytorch(activation: Any, norm_first: bool, calls: list[int]) -> None:
    ours = layer(activation=activation, norm_first=norm_first)
    same(ours)
    same(ours, X[0])
    same(ours, X.transpose(1, 2).contiguous().transpose(1, 2))
    assert calls == [15, 5, 15]


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("eps", [None, 0.1])
def test_root_mean_square_norms(eps: float | None, norm_first: bool, calls: list[int]) -> None:
    """PyTorch's layer takes them in training mode alone: in eval mode it reads their bias."""
    ours = layer(norm_first=norm_first, dropout=0.0)
    ours.norm1, ours.norm2 = nn.RMSNorm(16, eps=eps), nn.RMSNorm(16, eps=eps)
    x = 1e-3 * X
    want = ours.train()(x)
    with torch.no_grad():
        assert torch.allclose(ours.eval()(x), want, atol=1e-6, rtol=1e-5)
    assert calls == [15]


def test_calls_that_the_layers_own_forward_runs(calls: list[int]) -> None:
    ours = layer()
    same(ours, src_mask=torch.zeros(5, 5))
    same(ours, src_key_padding_mask=torch.tensor([[False] * 4 + [True]] * 3))
    same(ours.double(), X.double())
    ours.float()(X)  # with a gradient
    torch.func.vmap(ours)(X[None])
    torch.compile(ours, backend="eager")(X)
    with torch.no_grad(), torch.autocast("cpu"):
        ours(X)
    with torch.no_grad(), fastattn.trace():
        ours(X)
    ours.train()
    with torch.no_grad():
        ours(X)
    same(layer(activation=F.leaky_relu))
    assert not calls


def test_parameters_without_dense_rows_run_the_layers_own_forward(calls: list[int]) -> None:
    ours = layer()
    ours.linear1.weight = nn.Parameter(ours.linear1.weight.t().contiguous().t())
    same(ours)
    ours = layer()
    ours.norm1.bias = nn.Parameter(torch.full((1,), 0.1).expand(16))
    same(ours)
    ours.norm1.bias = nn.Parameter(torch.ones(32)[::2])
    same(ours)
    assert not calls


class Tripled(nn.TransformerEncoderLayer):
    """Attends to three times its input."""

    def _sa_block(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        return super()._sa_block(3 * x, *args, **options)


def test_a_block_that_a_subclass_or_an_instance_replaces_is_called(calls: list[int]) -> None:
    class Ours(Tripled, fastattn.nn.TransformerEncoderLayer):
        pass

    stock, ours = (kind(16, 2, 24, batch_first=True).eval() for kind in (Tripled, Ours))
    ours.load_state_dict(stock.state_dict())
    stack = nn.TransformerEncoder(stock, 2, enable_nested_tensor=False)
    want = stock(X).detach(), stack(X).detach()  # with gradients: not by PyTorch's fast path
    fastattn.accelerate(stack)
    patched: Any = layer()
    patched(X)
    patched._ff_block = torch.zeros_like
    with torch.no_grad():
        assert torch.allclose(ours(X), want[0], atol=1e-5)
        assert torch.allclose(stack(X), want[1], atol=1e-5)
        assert torch.allclose(
            patched(X),
            patched.norm2(patched.norm1(X + patched._sa_block(X, None, None))),
            atol=1e-5,
        )
    assert not calls


def doubled(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    """A hook that doubles the output."""
    return 2 * output


@pytest.mark.parametrize(
    "part", ["linear1", "norm2", "self_attn", "self_attn.out_proj", "dropout1"]
)
def test_layers_changed_by_users_run_pytorchs_forward(part: str, calls: list[int]) -> None:
    """A hook, another class, a parametrization, an own forward: PyTorch's forward runs."""

    def runs(change: Callable[[nn.Module, nn.Module], Any]) -> None:
        ours = layer()
        with torch.no_grad():
            before = ours(X)
            change(ours, ours.get_submodule(part))
            calls.clear()
            after = ours(X)
        assert not calls
        assert after.shape == before.shape

    runs(lambda ours, module: module.register_forward_hook(lambda *_: None))
    runs(lambda ours, module: module.register_forward_pre_hook(lambda *_: None))
    runs(lambda ours, module: setattr(module, "forward", module.forward))
    if part == "linear1":
        runs(lambda ours, module: module.register_forward_hook(doubled))
        runs(lambda ours, module: setattr(ours, part, nn.Sequential(module)))
        runs(lambda ours, module: nn.utils.parametrizations.weight_norm(module))
        runs(lambda ours, module: prune.l1_unstructured(module, "weight", 0.5))
    if part == "dropout1":
        runs(lambda ours, module: setattr(ours, part, nn.Sequential(module, nn.Linear(16, 16))))
        runs(lambda ours, module: setattr(ours, part, nn.Hardtanh()))
    with nn.modules.module.register_module_forward_hook(lambda *_: None), torch.no_grad():
        layer()(X)
    assert not calls


def test_a_single_dropout_in_training_mode_is_applied(calls: list[int]) -> None:
    ours = layer(dropout=0.5)
    ours.dropout1.train()
    with torch.no_grad():
        assert not torch.equal(ours(X), ours(X))
    assert not calls


@pytest.mark.parametrize(
    ("work", "few", "native"),
    [(0, 0, []), (0, 32, []), (5 * 16 * 24, 0, [5]), (5 * 16 * 24 - 1, 4, []), (1, 5, [5])],
)
def test_evidence_limits_the_size_of_native_layers(
    work: int, few: int, native: list[int], calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = Gemm("torch", "torch", "torch", few, layer_up_to=work)
    monkeypatch.setattr(dispatch.load("cpu"), "rule", lambda dtype: rule)
    evidence.forget()
    ours = layer()
    for _ in range(2):  # the second call finds the cached layer
        same(ours, X[:1])
    assert calls == 2 * native


def test_a_deleted_layer_is_freed(calls: list[int]) -> None:
    ours = layer()
    with torch.no_grad():
        ours(X)
    assert calls
    gone = weakref.ref(ours)
    del ours
    gc.collect()
    assert gone() is None


def test_new_weights_are_used_at_once(calls: list[int]) -> None:
    ours = layer()
    same(ours)
    ours.linear1.weight.data = torch.randn(24, 16)
    same(ours)
    ours.norm1 = nn.LayerNorm(16, eps=0.1)
    stock = copy.deepcopy(ours)
    with torch.no_grad():
        assert not torch.equal(ours(X), stock.linear2(torch.zeros(3, 5, 24)))
    assert calls == [15] * 3


def test_a_stack_computes_no_padding(calls: list[int]) -> None:
    stock = nn.TransformerEncoder(layer(), 3, nn.LayerNorm(16)).eval()
    ours = fastattn.nn.TransformerEncoder(layer(), 3, nn.LayerNorm(16)).eval()
    ours.load_state_dict(stock.state_dict())
    kept = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 0, 1, 1]]).bool()
    want = stock(X, src_key_padding_mask=~kept)
    calls.clear()
    with torch.no_grad():
        got = ours(X, src_key_padding_mask=~kept)
    assert calls == [11] * 3
    assert torch.allclose(got[kept], want[kept], atol=1e-5)
    assert torch.equal(got[~kept], ours.norm.bias.expand(4, -1))


def test_accelerated_stacks(calls: list[int]) -> None:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    want = model(X)
    fastattn.accelerate(model)
    with torch.no_grad():
        assert torch.allclose(model(X), want, atol=1e-5)
        assert calls == [15, 15]
        model(X, src_key_padding_mask=torch.tensor([[False] * 3 + [True] * 2] * 3))
    assert calls == [15, 15, 9, 9]
    again = copy.deepcopy(model)
    fastattn.restore(model)
    assert type(model) is nn.TransformerEncoder
    assert type(model.layers[0]) is nn.TransformerEncoderLayer
    with torch.no_grad():
        again(X)
    assert len(calls) == 6


def test_the_report_names_layers() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), layer())
    model[1].linear1.register_forward_hook(lambda *_: None)
    report = fastattn.accelerate(model)
    assert [(part.modules, part.backend) for part in report.layers] == [
        (("0",), "cpu"),
        (("1",), ""),
    ]
    assert "is watched by a hook" in report.layers[1].reason
    assert "an encoder layer" in str(report)
    (part,) = fastattn.accelerate(layer().double()).layers
    assert part.reason == "it is in float64 on cpu"
