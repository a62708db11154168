"""flex_attention: programs against the same function on stored scores, and its contract."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from case_table import refuses
from flex_cases import (
    BATCH,
    CASES,
    HEADS,
    K_LEN,
    Q_LEN,
    WIDTH,
    Mod,
    judged,
    results,
    tensors_of,
)
from hypothesis import given as given_by
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import and_masks, create_block_mask, noop_mask, or_masks

from fastattn import explain, masks
from fastattn.backends.primitives import FlexOptions
from fastattn.ops import flex
from fastattn.ops._score_trace import Tracer

pytestmark = pytest.mark.usefixtures("seeded")

flex_attention: Any = flex.flex_attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_equal_the_function_on_stored_scores(
    name: str, dtype: torch.dtype, engine: Any
) -> None:
    judged(*CASES[name], dtype)


def written(r: random.Random, depth: int, kind: str = "s") -> str:
    """A random expression of the numbers of a pair and of captured tensors."""
    if depth == 0 and kind == "i":
        return r.choice(("b", "h", "q", "k", "(q - k)", "(q * 0 + 3)"))
    if depth == 0:
        gathered = f"d[{written(r, 1, 'i')} % 7]"
        return r.choice(("s", "s", "a[h]", "c[q, k]", gathered, "e[b, h, k]"))
    x, y = (written(r, depth - 1, kind) for _ in range(2))
    shared = f"({x} + {y})", f"({x} - {y})", f"abs({x})", f"torch.maximum({x} + 0 * {y}, {y})"
    m, n = written(r, depth - 1, "i"), written(r, 0, "i")
    if kind == "i":
        bits = f"({x} & 6)", f"({x} ^ {y})", f"(~{x} >> 1)"
        return r.choice((*shared, *bits, f"({x} * 2)", f"({x} // 3)", f"({x} % ({n} * 0 + 5))"))
    test = f"({m} {r.choice(('<', '<=', '>', '!='))} {n}) {r.choice('&|^')} ({x} < {y})"
    of_one = (f"torch.{name}({x})" for name in ("tanh", "sigmoid", "relu"))
    of_one = (*of_one, *(f"torch.{name}({x})" for name in ("sin", "cos", "erf", "atan")))
    bounded = f"torch.exp(torch.tanh({x}))", f"torch.log(2 + torch.tanh({x}))", f"-({x})"
    bounded = *bounded, f"torch.tan(torch.tanh({x}))", f"torch.log1p(abs({x}))"
    bounded = *bounded, f"torch.expm1(-abs({x}))", f"torch.exp2(torch.tanh({x}))"
    powers = f"(1 + abs({x})) ** torch.tanh({y})", f"torch.atan2({x}, 1 + abs({y}))"
    others = *powers, f"({x} * {y})", f"({x} / (2 + abs({y})))", f"torch.where({test}, {x}, {y})"
    return r.choice((*shared, *of_one, *bounded, *others, f"({x}).clamp(-1, 0.7)"))


@settings(max_examples=25, deadline=None, derandomize=True)
@given_by(seed=st.integers(0, 2**20))
def test_random_programs(native: ModuleType, seed: int) -> None:
    r = random.Random(torch.manual_seed(seed).initial_seed())
    text = f"s * 0.5 + 2 * torch.tanh({written(r, r.choice((1, 2, 3)))})"
    if r.random() < 0.3:
        text = f"torch.where((q - k) % 3 != 2, {text}, -math.inf)"
    captured = {"a": (HEADS,), "c": (Q_LEN, K_LEN), "d": (7,), "e": (BATCH, HEADS, K_LEN)}

    def make(**tensors: Tensor) -> Mod:
        return eval(f"lambda s, b, h, q, k: {text}", {**globals(), **tensors})

    judged(make, captured, r.choice((torch.float32, torch.bfloat16)))


@pytest.mark.parametrize("name", ["two_terms", "documents"])
def test_a_block_mask_selects_after_the_function(name: str, engine: Any) -> None:
    seen = torch.arange(Q_LEN)[:, None] * 2 >= torch.arange(K_LEN)
    blocks = create_block_mask(lambda b, h, q, k: q * 2 >= k, None, None, Q_LEN, K_LEN, "cpu")
    judged(*CASES[name], torch.float32, seen, block_mask=blocks)
    own = masks.causal() | masks.sliding_window(2, 1)
    distance = torch.arange(Q_LEN)[:, None] - torch.arange(K_LEN)
    judged(*CASES[name], torch.float32, (distance >= -1), block_mask=own)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e2, 1e4, 1e6, 1e8, 1e30])
@pytest.mark.parametrize("name", "sin cos tan exp2 expm1 log1p erf atan sinh".split())
def test_functions_of_any_argument(name: str, size: float, engine: Any) -> None:
    function = getattr(torch, name)
    for dtype in (torch.float32, torch.float64):
        x = torch.linspace(-1, 1, 997, dtype=torch.float64) * size
        if name in ("exp2", "expm1", "sinh"):
            x = x.clamp(-80, 80)
        x = x.clamp(-0.75) if name == "log1p" else x
        x = x.to(dtype)[None, None, :, None].requires_grad_()
        one = x.new_ones(1, 1, 1, 1)
        _, lse = flex_attention(x, one, one, lambda s, *_: function(s), scale=1, return_lse=True)
        exact = x.detach().double().requires_grad_()
        want = function(exact)[..., 0]
        seen = want.isfinite()
        grads = (
            torch.autograd.grad(lse[seen].sum(), x),
            torch.autograd.grad(want[seen].sum(), exact),
        )
        for found, wanted in ((lse[seen], want[seen]), *zip(*grads, strict=True)):
            assert (found - wanted).abs().max() <= 3 * torch.finfo(dtype).eps * wanted.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_log_sum_exp_of_16_bits_is_as_exact_as_in_float32(
    dtype: torch.dtype, engine: Any
) -> None:
    query, key, value = (torch.randn(2, 2, 100, 64).to(dtype) for _ in range(3))
    _, lse = flex_attention(query, key, value, return_lse=True)
    exact = (query.double() @ key.double().mT / 8).logsumexp(-1)
    assert (lse - exact).abs().max() <= 1e-5


EXACT: dict[str, Callable[[Any], Any]] = {
    name: getattr(torch, name) for name in "sign trunc round frac ceil floor".split()
} | {
    "fmod": lambda x: torch.fmod(x, 1.5),
    "remainder": lambda x: x % 1.5,
    "div": lambda x: torch.div(x, 0.5, rounding_mode="trunc"),
    "clamp": lambda x: torch.clamp_min(x, -1.5).clamp_max(2) + torch.nn.functional.hardtanh(x),
    "leaky_relu": lambda x: torch.nn.functional.leaky_relu(x, 0.25) ** 3,
    "tests": lambda x: torch.where(torch.isnan(1 / x * 0) | torch.isinf(x), 1.0, x),
    "rows": lambda x: x * (torch.arange(3) + 1.0).mean() + torch.arange(3.0).dot(torch.ones(3)),
}


@pytest.mark.parametrize("name", EXACT)
def test_functions_without_rounding(name: str, engine: Any) -> None:
    x = torch.arange(-20, 21)[None, None, :, None] * 0.25
    one = x.new_ones(1, 1, 1, 1)
    _, lse = flex_attention(x, one, one, lambda s, *_: EXACT[name](s), scale=1, return_lse=True)
    assert torch.equal(lse, EXACT[name](x)[..., 0])


def operands(*sizes: int) -> list[Tensor]:
    return [torch.randn(1, 2, n, 8) for n in sizes]


def test_no_bit_depends_on_the_threads(native: ModuleType, same_for_any_threads: Any) -> None:
    x = [torch.randn(3, 4, 300, 16) for _ in range(4)]
    table, bias, each = torch.randn(9), torch.randn(300), torch.randn(4, 300)

    def run() -> Any:
        leaves = [t.detach().requires_grad_() for t in (*x[:3], table, bias, each)]

        def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return s * leaves[3][(q + k) % 9] + leaves[4][k] * leaves[5][h, q]

        out = flex_attention(*leaves[:3], mod)
        grads = torch.autograd.grad(out, leaves, x[3])
        with torch.no_grad():
            one = flex_attention(*(t[1:2] for t in leaves[:3]), mod)
        assert torch.equal(one, out[1:2])  # a row does not depend on the batch
        return out, *grads

    same_for_any_threads(run)


def test_a_pair_without_weight_passes_no_nan(engine: Any) -> None:
    query, key, value = operands(20, 30)[:1] + operands(30, 30)
    key[:, :, 9], value[:, :, 9] = math.nan, math.inf
    bias = torch.zeros(30)
    bias[9] = math.nan
    leaves = [x.requires_grad_() for x in (query, key, value, bias)]

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.where((k == 9) | (q == 3), -math.inf, s + bias[k])

    out, lse = flex_attention(*leaves[:3], mod, return_lse=True)
    assert (out[:, :, 3] == 0).all()
    assert (lse[:, :, 3] == -math.inf).all()
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(x.isfinite().all() for x in (out, *grads[:3]))


@pytest.mark.parametrize("name", ["alibi", "two_terms", "documents"])
@pytest.mark.parametrize("empty", ["batch", "heads", "queries", "keys", "width", "all"])
def test_nothing_to_attend_to_gives_zeros(name: str, empty: str, engine: Any) -> None:
    make, captured = CASES[name]
    tensors = [x.detach() for x in tensors_of(captured, torch.float32).values()]
    sizes = {"batch": BATCH, "heads": 2, "queries": Q_LEN, "keys": K_LEN, "width": WIDTH}
    sizes |= {n: 0 for n in sizes if empty in (n, "all")}
    b, h, q, k, dv = sizes.values()
    leaves = [torch.randn(b, h, *size, requires_grad=True) for size in ((q, 8), (k, 8), (k, dv))]
    leaves += [x.requires_grad_() for x in tensors[3:] if x.is_floating_point()]
    out, lse = flex_attention(*leaves[:3], make(*tensors[3:]), return_lse=True)
    assert out.shape == (b, h, q, dv)
    assert out.count_nonzero() == 0
    assert empty != "keys" or (lse == -math.inf).all()
    for x, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert grad.shape == x.shape
        assert grad.count_nonzero() == 0


@pytest.mark.parametrize("factor", [1e-30, 1e4, 1e18, 3e37])
def test_scores_of_any_size(factor: float, engine: Any) -> None:
    query, key, value = operands(9, 40, 40)
    bias = torch.linspace(-1, 1, 40, requires_grad=True)
    mod = lambda s, b, h, q, k: s * factor + bias[k] * factor  # noqa: E731
    out, lse = flex_attention(query, key, value, mod, return_lse=True)
    s = (query @ key.mT * 8**-0.5 + bias).double() * factor
    torch.testing.assert_close(lse, s.logsumexp(-1).float(), rtol=1e-5, atol=1e-5)
    assert out.isfinite().all()
    assert torch.autograd.grad(lse.sum(), bias)[0].isfinite().all()


def test_indices_outside_are_clamped_and_negative_ones_count_from_the_end(engine: Any) -> None:
    query, key, value = operands(5, 7, 7)
    table = torch.randn(4, requires_grad=True)
    wide = lambda s, b, h, q, k: s + table[k - 3]  # noqa: E731
    out = flex_attention(query, key, value, wide)
    index = torch.tensor([1, 2, 3, 0, 1, 2, 3])
    want = flex_attention(query, key, value, lambda s, b, h, q, k: s + table[index[k]])
    torch.testing.assert_close(out, want)
    out = flex_attention(query, key, value, lambda s, b, h, q, k: s + table[k * 1000 - 1000])
    index = torch.tensor([0, 0, 3, 3, 3, 3, 3])
    want = flex_attention(query, key, value, lambda s, b, h, q, k: s + table[index[k]])
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), table)[0] for x in (out, want)))


# -- what a trace depends on ----------------------------------------------------------------------


def test_a_function_is_traced_again_when_what_it_reads_changes(monkeypatch: Any) -> None:
    query, key, value = operands(6, 6, 6)
    factor, bias, traced = 2.0, torch.randn(6), []
    trace = Tracer.trace

    def counted(self: Any, mod: Any) -> int:
        traced.append(mod)
        return trace(self, mod)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * factor + bias[k % bias.shape[0]]

    def check(times: int) -> None:
        out = flex_attention(query, key, value, mod)
        s = query @ key.mT * 8**-0.5 * factor + bias[torch.arange(6) % len(bias)]
        torch.testing.assert_close(out, s.softmax(-1) @ value)
        assert len(traced) == times

    monkeypatch.setattr(Tracer, "trace", counted)
    check(1)
    bias += 1  # values of tensors are read in each call
    check(1)
    bias = torch.randn(6)
    check(1)
    factor = 3.0
    check(2)
    bias = torch.randn(4)
    check(3)
    factor, bias = 2.0, torch.randn(6)
    check(3)


def test_computed_and_constant_tensors_are_read_in_each_call() -> None:
    query, key, value = operands(6, 6, 6)
    weight = torch.randn(6, requires_grad=True)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * torch.tensor(2.0) + weight.exp()[k]

    for _ in range(2):
        out = flex_attention(query, key, value, mod)
        s = query @ key.mT * 8**-0.5 * 2 + weight.exp()
        want = s.softmax(-1) @ value
        torch.testing.assert_close(out, want)
        pair = [torch.autograd.grad(x.square().sum(), weight)[0] for x in (out, want)]
        torch.testing.assert_close(*pair)
        with torch.no_grad():
            weight *= 2


# -- the contract ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mod", "message"),
    [
        (lambda s, b, h, q, k: s.lgamma(), r"lgamma\(\) in .*test_flex\.py:\d+, which has no"),
        (
            lambda s, b, h, q, k: s if q > k else s + 1,
            r"bool\(\) in .*test_flex.* use torch\.where",
        ),
        (lambda s, b, h, q, k: math.exp(s), r"float\(\) in .*test_flex"),
        (lambda s, b, h, q, k: torch.where(s, s, 1), r"where\(\) with .* must be boolean"),
        (lambda s, b, h, q, k: s + (q << k), r"lshift\(\) with .* by a number of bits"),
        (lambda s, b, h, q, k: s + torch.ones(6)[s], ".*which must be integers"),
        (lambda s, b, h, q, k: torch.ones(6, 65)[q] * s, r"a part of shape \(65,\) .* 64"),
        (lambda s, b, h, q, k: (torch.ones(6, 5)[q] * torch.ones(6)).sum(), r"mul.*\[5, 6\]"),
        (lambda s, b, h, q, k: s + torch.ones(6, 5)[q].sum(k), r"sum\(\) with"),
        (lambda s, b, h, q, k: s + torch.ones(0)[q], r"a captured tensor of torch\.float32"),
        (lambda s, b, h, q, k: s + 2**40 * q, ".*does not fit int32"),
    ],
)
def test_what_has_no_kernel_is_an_error_with_its_line(mod: Mod, message: str) -> None:
    with pytest.raises(NotImplementedError, match=f"flex_attention: score_mod uses {message}"):
        flex_attention(*operands(6, 6, 6), mod)


X = torch.ones(1, 2, 6, 8)
BAD = [
    ({"score_mod": lambda *_: None}, TypeError, "must return a tensor without dim"),
    ({"score_mod": lambda s, b, h, q, k: torch.ones(6, 5)[q] * s}, TypeError,
     r"without dimensions, got shape \(5,\)"),
    ({"score_mod": 3}, TypeError, "argument 'score_mod' must be a function"),
    ({"key": torch.ones(1, 1, 6, 8)}, ValueError, "same number of heads"),
    ({"value": torch.ones(1, 2, 7, 8)}, ValueError, "same batch"),
    ({"query": torch.ones(1, 2, 6, 9)}, ValueError, "same last dimension"),
    ({"query": torch.ones(2, 6, 8)}, ValueError, r"must be \[B, H, L, D\]"),
    ({"query": X.double()}, RuntimeError, "same dtype"),
    ({"block_mask": masks.from_function(lambda b, h, q, k: q > k, None, None, 5, 6)}, RuntimeError,
     "must be of 6 queries"),
]  # fmt: skip
test_errors = refuses(
    flex_attention, BAD, query=X, key=X, value=X, score_mod=lambda s, b, h, q, k: s
)


def test_results_match_the_signature_of_pytorch() -> None:
    aux = pytest.importorskip("torch.nn.attention.flex_attention")
    x, mod = operands(6, 6, 6), (lambda s, b, h, q, k: s * 2)
    out, lse = flex_attention(*x, mod, None, None, False, True, {"BLOCK_M": 64})
    assert lse.dtype == torch.float32
    torch.testing.assert_close(flex_attention(*x), flex_attention(*x, lambda s, b, h, q, k: s))
    if hasattr(aux, "AuxRequest"):
        result, found = flex_attention(*x, mod, return_aux=aux.AuxRequest(lse=True))
        assert torch.equal(result, out)
        assert torch.equal(found.lse, lse)
        with pytest.raises(NotImplementedError, match="max_scores"):
            flex_attention(*x, mod, return_aux=aux.AuxRequest(max_scores=True))
    with torch.autocast("cpu", torch.bfloat16):
        assert flex_attention(*x, mod).dtype == torch.bfloat16


@pytest.mark.parametrize("name", CASES)
def test_explain_says_what_a_function_is(name: str) -> None:
    make, captured = CASES[name]
    query, key, value, *others = tensors_of(captured, torch.float32).values()
    options = {"enable_gqa": True, "kernel_options": {"BLOCK_M": 64}}
    found = explain(flex_attention, query, key, value, make(*others), **options)
    table = "a table of distances"
    kinds = dict.fromkeys(("alibi", "by_head", "distances"), table)
    kinds |= {"softcap": "a softcap", "learned": "a bias", "far": f"a softcap and {table}"}
    kind = kinds.get(name)
    assert found.op == ("scaled_dot_product_attention" if kind else "flex_attention")
    assert found.notes[0].startswith("kernel_options are ignored")
    why = f"score_mod is {kind}, an option of {found.op}"
    assert found.notes[1:] == (why if kind else "second derivatives run on the reference",)
    assert all(note in str(found) for note in found.notes)


def test_explain_says_that_other_devices_have_no_kernel() -> None:
    x = [t.to("meta") for t in operands(6, 6, 6)]
    found = explain(flex_attention, x[0], x[1], x[2], lambda s, *_: s * s)
    assert found.notes[0] == "only the CPU has kernels: on meta the reference stores all scores"


@pytest.mark.parametrize("name", ["learned", "gathers", "shared", "documents", "far"])
def test_compiled_code_is_one_graph_for_all_lengths(name: str) -> None:
    make, captured = CASES[name]
    counted = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()

    def attend(query: Tensor, key: Tensor, value: Tensor, mod: Mod) -> Any:
        return flex_attention(query * 2, key, value, mod, enable_gqa=True, return_lse=True)

    compiled = torch.compile(
        lambda *x, **rest: attend(*x, make(**rest)), backend=counted, fullgraph=True
    )
    for k_len in (K_LEN, K_LEN - 7, K_LEN - 9):
        tensors = tensors_of(captured, torch.float32)
        for n, x in tensors.items():  # those with one row a key get shorter
            tensors[n] = x[..., :k_len, :] if n in ("key", "value") else x
            if x.dim() and x.shape[-1] == K_LEN:
                tensors[n] = x[..., :k_len]
        grads = torch.randn(BATCH, HEADS, Q_LEN, WIDTH), torch.rand(BATCH, HEADS, Q_LEN)
        run = lambda *x: compiled(*x[:3], **x[3])  # noqa: E731
        found = results(run, dict, tensors, grads)
        torch.testing.assert_close(found, results(attend, make, tensors, grads))
    assert counted.frame_count == 2  # the second one has a size that changes


@pytest.mark.parametrize("scaled", [False, True])
def test_compiled_code_evaluates_block_masks(scaled: bool) -> None:
    x, ids = [t.requires_grad_() for t in operands(90, 90, 90)], torch.arange(90) // 20
    inside = and_masks(lambda b, h, q, k: ids[q] == ids[k], lambda b, h, q, k: q >= k)
    mod = (lambda s, b, h, q, k: s * (1.5 - h)) if scaled else None
    run = lambda *x: flex_attention(x[0] * 2, *x[1:3], mod, x[3], return_lse=True)  # noqa: E731
    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for mask in (inside, or_masks(inside, lambda b, h, q, k: (k < 3) & (h == 1)), noop_mask):
        blocks = create_block_mask(mask, None, 2, 90, 90, "cpu", BLOCK_SIZE=(32, 16))
        found, want = ((*t, *torch.autograd.grad(t[0].sum() + t[1].sum(), x))
                       for t in (f(*x, blocks) for f in (compiled, run)))  # fmt: skip
        torch.testing.assert_close(found, want)


@pytest.mark.filterwarnings("ignore:Dynamo does not know")
def test_compiled_code_raises_the_errors_of_a_trace() -> None:
    run = torch.compile(lambda *x: flex_attention(*x).sin(), backend="eager")
    mods: list[Mod] = [lambda s, b, h, q, k: ~(q < k) * s, lambda s, b, h, q, k: s.lgamma()]
    torch.testing.assert_close(
        run(*(x := operands(6, 6, 6)), mods[0]), flex_attention(*x, mods[0]).sin()
    )
    with pytest.raises(NotImplementedError, match=r"uses lgamma\(\) in .*test_flex\.py:\d+"):
        run(*x, mods[1])


def test_the_examples_of_vmap_are_not_batch_entries() -> None:
    query, key, value = torch.randn(3, 4, 2, 2, 9, 8)
    bias = torch.randn(2)
    mod = lambda s, b, h, q, k: s * bias[b]  # noqa: E731
    out = torch.vmap(lambda *x: flex_attention(*x, mod))(query, key, value)
    for n in range(4):
        torch.testing.assert_close(out[n], flex_attention(query[n], key[n], value[n], mod))


def test_a_program_that_points_outside_is_refused(native: ModuleType) -> None:
    table, ids = torch.randn(6), torch.arange(6)
    x: Any = operands(6, 6, 6)
    mod = lambda s, b, h, q, k: s + table[ids[k] % 3] * torch.exp(s)  # noqa: E731
    _, call, _ = flex.prepare(x[0], x[1], x[2], mod)
    program, data = call[3:5]
    generator, refused = torch.Generator().manual_seed(5), 0
    for _ in range(2000):
        wrong = program.clone()
        at = torch.randint(len(wrong) - 6, (2,), generator=generator)
        wrong[at] = torch.randint(-3, 60, (2,), generator=generator, dtype=torch.int32)
        try:
            native.flex_attention(*x, wrong, data, options=FlexOptions(1.0))
        except ValueError as error:
            refused += "score_program is not valid" in str(error)
    assert refused > 300
    for wrong in (program[:-1], program[:12]):
        with pytest.raises(ValueError, match="score_program is not valid"):
            native.flex_attention(*x, wrong, data, options=FlexOptions(1.0))
    with pytest.raises(ValueError, match="score_program is not valid: an element"):
        native.flex_attention(*x, program, data[:-1], options=FlexOptions(1.0))
