"""The properties that docs/numerics.md promises, of every backend, forward and backward."""

from __future__ import annotations

import importlib
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType

import extended
import pytest
import torch
from torch import Tensor
from within_bound import assert_within_bound

from fastattn.testing import Case, Noise, Target, check, targets
from fastattn.testing.calls import Operands
from fastattn.testing.cases import mixed
from fastattn.testing.inputs import make_inputs

INF = float("inf")
NAN = float("nan")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NATIVE = targets()
EVERY = [*NATIVE, Target("reference")]

floats = pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: str(dtype)[6:])


@pytest.fixture(params=NATIVE, ids=str)
def native_backend(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    with request.param.active() as module:
        yield module


@pytest.fixture(params=EVERY, ids=str)
def any_backend(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    with request.param.active() as module:
        yield module


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """All results must be equal bit by bit; NaN equals NaN."""
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].shape == b[name].shape, name
        same = (a[name] == b[name]) | (a[name].isnan() & b[name].isnan())
        assert same.all(), f"{name}: {int((~same).sum())} of {same.numel()} elements differ"


def is_on_tiles(backend: ModuleType) -> bool:
    """Whether the kernels of this backend run on tiles."""
    isa = importlib.import_module("fastattn._cpu").build_info()["isa"] if NATIVE else ""
    return backend.__name__ == "fastattn.backends.cpu" and isa.startswith("amx")


def judge(found: dict[str, Tensor], inputs: Operands) -> None:
    """The error bound, for results that do not come from a single call."""
    is_double = inputs.query.dtype == torch.float64
    exact = extended.exact(inputs) if is_double else inputs.definition()
    moved = Noise(inputs.definition, exact, inputs.query.dtype)
    for name, result in found.items():
        eps_of = inputs.query.dtype if name == "lse" else None
        assert_within_bound(result, exact[name], moved[name], name, eps_of)


# Shapes that take different paths through a kernel: blocks with tails, decoding, groups, one row.
WAYS = {
    "square": Case("square", heads=3, q_len=200, k_len=200, head_dim=32),
    "causal": Case("causal", q_len=300, k_len=300, head_dim=64, causal="upper_left"),
    "grouped": Case("grouped", heads=6, kv_heads=2, q_len=70, k_len=150, causal="bottom_right"),
    "decode": Case("decode", heads=4, kv_heads=2, q_len=1, k_len=3000, head_dim=64),
    "small": Case("small", batch=9, heads=8, q_len=17, k_len=40, head_dim=32),
    "few": Case("few", q_len=3, k_len=1500, head_dim=64, causal="bottom_right"),
    "mask": Case("mask", mask="float_inf", mask_dims="bhqk", mask_grad=True, q_len=130, k_len=140),
    "bias": Case("bias", mask="float", mask_dims="k", mask_grad=True, q_len=130, k_len=290),
    "bias-heads": Case("bias-heads", heads=4, mask="float_inf", mask_dims="hqk", mask_grad=True),
    "bias-one": Case("bias-one", heads=4, mask="float", mask_dims="", mask_grad=True, q_len=150),
    "padding": Case("padding", batch=4, mask="padding", mask_dims="bk", q_len=90, k_len=400),
    "window": Case("window", q_len=300, k_len=300, window=(50, 20), softcap=5.0, alibi="bh"),
    "averaged": Case("averaged", heads=6, kv_heads=3, q_len=100, k_len=260, weights=2),
    "weights": Case("weights", q_len=100, k_len=260, weights=1, causal="upper_left"),
    "dropout": Case("dropout", q_len=200, k_len=200, dropout_p=0.2, weights=1),
    "biased-window": Case("biased-window", heads=8, q_len=256, k_len=256, head_dim=64, mask="float",
                          mask_dims="qk", mask_grad=True, window=(100, 50), weights=1),
    "everything": Case("everything", heads=8, q_len=256, k_len=256, head_dim=64, mask="float",
                       mask_dims="qk", mask_grad=True, window=(100, 50), weights=1, dropout_p=0.3),
    "wide": Case("wide", head_dim=200, value_dim=136, q_len=70, k_len=70),
}  # fmt: skip


def with_all_gradients(case: Case) -> Case:
    """The case with gradients of all results."""
    names = ("out", "lse", "weights") if case.weights else ("out", "lse")
    return replace(case, grads=names)


ways = pytest.mark.parametrize("case", [with_all_gradients(c) for c in WAYS.values()], ids=WAYS)


# -- determinism ----------------------------------------------------------------------------------


@pytest.mark.sampled
@floats
@ways
def test_same_bits_in_every_run_and_for_every_thread_count(
    native_backend: ModuleType,
    threads: Callable[[int], None],
    case: Case,
    dtype: torch.dtype,
) -> None:
    inputs = make_inputs(case, dtype)
    threads(1)
    first = inputs.results(native_backend)
    for count in (1, 2, 3, 7):
        threads(count)
        assert_same_bits(first, inputs.results(native_backend))


def only(inputs: Operands, b: int) -> Operands:
    """The inputs of one sequence."""

    def pick(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.dim() == 0 or x.shape[0] == 1 else x[b : b + 1]

    tensors = {name: pick(tensor) for name, tensor in inputs.watched().items()}
    return inputs.changed(**tensors)


@pytest.mark.sampled
@floats
@ways
def test_a_sequence_does_not_depend_on_its_batch_mates(
    native_backend: ModuleType, case: Case, dtype: torch.dtype
) -> None:
    if case.dropout_p:
        case = replace(case, dropout_p=0.0)  # the draws depend on the place in the batch
    inputs = make_inputs(case, dtype)
    whole = inputs.results(native_backend)
    shared = {"grad_attn_mask"} if "b" not in case.mask_dims else set()  # a sum over the batch
    for b in range(case.batch):
        alone = only(inputs, b).results(native_backend)
        mine = {name: x[b : b + 1] for name, x in whole.items() if name not in shared}
        assert_same_bits({name: alone[name] for name in mine}, mine)


@floats
def test_a_sequence_does_not_see_nan_in_its_batch_mates(
    native_backend: ModuleType, dtype: torch.dtype
) -> None:
    inputs = make_inputs(with_all_gradients(WAYS["padding"]), dtype)
    before = inputs.results(native_backend)
    for tensor in (inputs.query, inputs.key, inputs.value):
        tensor[2] = NAN
    after = inputs.results(native_backend)
    for b in (0, 1, 3):
        assert_same_bits(
            {name: x[b] for name, x in before.items()}, {name: x[b] for name, x in after.items()}
        )


@floats
@pytest.mark.parametrize("q_len", [1, 5, 40, 200])
def test_a_query_does_not_depend_on_keys_it_does_not_see(
    native_backend: ModuleType, dtype: torch.dtype, q_len: int
) -> None:
    case = Case("future", q_len=q_len, k_len=q_len + 3, head_dim=32, causal="upper_left", weights=1)
    inputs = make_inputs(case, dtype)
    before = inputs.results(native_backend)
    seen = q_len // 2 + 1  # the queries up to this one do not see the keys from here on
    inputs.key[:, :, seen:] = 100.0
    inputs.value[:, :, seen:] = -100.0
    after = inputs.results(native_backend)
    for name in ("out", "lse", "weights", "grad_query"):
        assert_same_bits({name: before[name][:, :, :seen]}, {name: after[name][:, :, :seen]})


# -- mathematics ----------------------------------------------------------------------------------


@floats
def test_lse_is_saved_in_float64(any_backend: ModuleType, dtype: torch.dtype) -> None:
    """Backward computes the weights from it: rounded to float32 it would make them all wrong."""
    inputs = make_inputs(WAYS["square"], dtype)
    lse = any_backend.scaled_dot_product_attention(*inputs.args, options=inputs.options)[1]
    assert lse.dtype == torch.float64


@floats
def test_a_gradient_of_zero_gives_zero(any_backend: ModuleType, dtype: torch.dtype) -> None:
    inputs = make_inputs(with_all_gradients(WAYS["mask"]), dtype)
    for grad in inputs.grads.values():
        if grad is not None:
            grad.zero_()
    for name, found in inputs.results(any_backend).items():
        if name.startswith("grad"):
            assert (found == 0).all(), name


# -- fully masked rows, NaN and inf ---------------------------------------------------------------


@floats
@pytest.mark.parametrize("q_len", [1, 3, 70])
@pytest.mark.parametrize("kind", ["bool", "additive", "window"])
def test_a_fully_masked_row(
    any_backend: ModuleType, dtype: torch.dtype, kind: str, q_len: int
) -> None:
    """Its output is 0, its lse -inf, and it passes no gradient, even if its cotangent is NaN."""
    case = with_all_gradients(Case("nothing", q_len=q_len, k_len=90, weights=1, head_dim=32))
    if kind == "window":
        case = replace(case, window=(5, 0), k_len=max(q_len // 2, 1))
    inputs = make_inputs(case, dtype)
    if kind == "window":
        # Masks the last rows, or the only one.
        inputs = inputs.changed(options=replace(inputs.options, offset=10))
        empty = torch.arange(q_len) + 10 - 5 >= case.k_len
    else:
        empty = torch.arange(q_len) % 3 == 0
        seen = ~empty[:, None].expand(q_len, 90)
        mask = seen if kind == "bool" else torch.where(seen, 0.25, -INF).to(dtype)
        inputs = inputs.changed(attn_mask=mask[None, None], needs_mask_grad=kind == "additive")
    assert empty.any()
    for grad in inputs.grads.values():
        assert grad is not None
        grad[:, :, empty] = NAN
    found = inputs.results(any_backend)
    for name in ("out", "weights", "grad_query"):
        assert (found[name][:, :, empty] == 0).all(), name
    assert (found["lse"][:, :, empty] == -INF).all()
    for name, result in found.items():
        assert name == "lse" or torch.isfinite(result).all(), name


@pytest.mark.sampled
@floats
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("tensor", ["key", "value"])
@pytest.mark.parametrize("q_len", [2, 9, 150])
def test_a_nonfinite_key_or_value_affects_only_queries_that_see_it(
    any_backend: ModuleType, dtype: torch.dtype, bad: float, tensor: str, q_len: int
) -> None:
    """Under a causal mask, so that the bad one stands among keys that are seen."""
    case = Case("bad", q_len=q_len, k_len=q_len, head_dim=32, causal="upper_left", weights=1)
    inputs = make_inputs(case, dtype)
    before = inputs.results(any_backend)
    first = q_len // 2  # the first query that sees it
    getattr(inputs, tensor)[:, :, first, 3] = bad
    after = inputs.results(any_backend)
    for name in ("out", "lse", "weights", "grad_query"):
        clean, dirty = before[name][:, :, :first], after[name][:, :, :first]
        bounds = {}
        if name == "grad_query" and is_on_tiles(any_backend) and dtype == torch.bfloat16:
            # The weights of its block are rounded before a sum that cancels.
            size = torch.finfo(dtype).eps * float(clean.abs().amax())
            bounds = {"rtol": 1.6e-2, "atol": size}
        torch.testing.assert_close(
            dirty, clean, msg=lambda text, name=name: f"{name}: {text}", **bounds
        )
    if tensor == "value" or math.isnan(bad):
        reached = after["out"][:, :, first:, 3]
        assert not torch.isfinite(reached).any()
        if tensor == "value" and not math.isnan(bad):
            assert (reached == bad).all()
    if tensor == "key" and math.isnan(bad):
        for name in ("lse", "weights", "grad_query"):
            reached = after[name][:, :, first:]
            assert reached.isnan().flatten(3 if reached.dim() > 3 else 2).any(-1).all(), name


@floats
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_bad_query_of_a_masked_row_does_not_change_the_gradients_of_keys(
    any_backend: ModuleType, dtype: torch.dtype, bad: float
) -> None:
    inputs = make_inputs(Case("bad-query", mask="bool_rows", q_len=40, grads=("out", "lse")), dtype)
    before = inputs.results(any_backend)
    assert inputs.attn_mask is not None
    empty = ~inputs.attn_mask.any(-1)
    inputs.query[empty] = bad
    after = inputs.results(any_backend)
    for name in before:
        torch.testing.assert_close(
            after[name], before[name], msg=lambda text, n=name: f"{n}: {text}"
        )


@floats
def test_a_visible_nan_reaches_the_result(any_backend: ModuleType, dtype: torch.dtype) -> None:
    for name in ("query", "key", "value", "attn_mask"):
        inputs = make_inputs(Case("visible", mask="float", q_len=40), dtype)
        getattr(inputs, name)[0, 1, 7, 5] = NAN
        found = inputs.results(any_backend)
        assert found["out"][0, 1].isnan().any(), name
        assert not found["out"][1].isnan().any(), name
        assert found["grad_query"][0, 1].isnan().any(), name


# -- extremes -------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@floats
@pytest.mark.parametrize("q_len", [1, 70])
def test_a_row_of_finfo_min_is_uniform(
    any_backend: ModuleType, dtype: torch.dtype, q_len: int
) -> None:
    case = Case("finfo", q_len=q_len, k_len=130, weights=1, grads=("out", "weights"), heads=3)
    inputs = make_inputs(case, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    mask = torch.full((1, 1, q_len, 130), torch.finfo(wide).min, dtype=wide)
    inputs = inputs.changed(attn_mask=mask, needs_mask_grad=True)
    found = inputs.results(any_backend)
    torch.testing.assert_close(found["weights"], torch.full_like(found["weights"], 1 / 130))
    judge({name: x for name, x in found.items() if name != "lse"}, inputs)


@pytest.mark.sampled
@floats
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("q_len", [1, 40])
def test_huge_scores_do_not_overflow(
    any_backend: ModuleType, dtype: torch.dtype, sign: float, q_len: int
) -> None:
    """Scores of +-1e9, or as large as float16 can make them: the largest takes all."""
    inputs = make_inputs(Case("huge", q_len=q_len, head_dim=8, weights=1, scale=sign), dtype)
    large = 3e3 if dtype == torch.float16 else 1e4
    inputs.query.mul_(large)
    inputs.key.mul_(large)
    best = sign * (inputs.query.double() @ inputs.key.double().mT)
    found = inputs.results(any_backend)
    assert torch.equal(found["weights"].argmax(-1), best.argmax(-1))
    assert (found["weights"].amax(-1) == 1).all()
    torch.testing.assert_close(found["lse"].double(), best.amax(-1), rtol=1e-5, atol=0)
    for name, result in found.items():
        assert torch.isfinite(result).all(), name
    judge({name: found[name] for name in ("out", "grad_value")}, inputs)


@floats
def test_all_scores_very_low(any_backend: ModuleType, dtype: torch.dtype) -> None:
    """exp of every score is 0, the weights are not."""
    inputs = make_inputs(Case("low", mask="float", weights=1, head_dim=8), dtype)
    assert inputs.attn_mask is not None
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    inputs = inputs.changed(attn_mask=inputs.attn_mask.to(wide) - 5000.0)
    found = inputs.results(any_backend)
    total = found["weights"].double().sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=0.02)
    judge({"out": found["out"], "weights": found["weights"]}, inputs)


# -- anything at all ------------------------------------------------------------------------------


@pytest.mark.slow
def test_many_random_cases() -> None:
    """The cases differ in every run."""
    name = f"random-{random.randrange(10**6)}"
    for case in mixed(name, 500):
        for dtype, target in zip(case.dtypes, itertools.cycle(NATIVE)):
            verdict = check(case, dtype, target)
            assert verdict.ok, (case, dtype, target, verdict.faults)
