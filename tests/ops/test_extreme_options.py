"""Options of any size: the result of the reference, or an error that names the argument.

Kernels add limits to positions, so the integers are those at which such sums leave 32 or 64 bits.
The build with UBSan reports an overflow even where the result is right (`make test-sanitized`).
Kernels divide by scales and softcaps, so the floats are those near the ends of float32 and double.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn import flash_attn, masks
from fastattn.bias import T5, Disentangled

LARGEST = 2**63 - 1
NUMBERS = (2**31 - 1, 2**31, 2**60, 2**61, 2**62, LARGEST - 1, LARGEST)
NUMBERS = (*NUMBERS, -(2**31), -(2**62), ~LARGEST)
OUTSIDE = (LARGEST + 1, 2**70, ~LARGEST - 1, -(2**70))

Run = Callable[..., Any]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


QUERY, KEY, VALUE = normal(1, 4, 7, 16), normal(1, 2, 9, 16), normal(1, 2, 9, 8)
LONG = (normal(1, 2, 70, 16), normal(1, 2, 75, 16))
PACKED = (normal(7, 4, 16), normal(9, 2, 16), normal(9, 2, 8))
STARTS = (torch.tensor([0, 3, 3, 7]), torch.tensor([0, 5, 6, 9]))
SLOPES = torch.tensor([0.5, 0.25])
ROWS = (normal(2, 3, 4), normal(2, 7, 4))
POSITIONS = torch.tensor([[1.5, -3.0, 20.0], [0.0, 5.0, 1e18]])
TOKENS = torch.tensor([[[1, 2], [0, 3]]])
BOTTOM_RIGHT = {"causal_alignment": "bottom_right"}


sdpa, varlen = fastattn.scaled_dot_product_attention, fastattn.varlen_attention
decode, luong, stats = fastattn.decode_attention, fastattn.luong_attention, fastattn.attention_stats
LOCAL: dict[str, Any] = {"method": "dot", "window": "local-p", "positions": POSITIONS}
WEIGHTS: dict[str, Any] = {"need_weights": True, "return_lse": True, **BOTTOM_RIGHT}

# name: (the call as a function of the number and of the tensors, the tensors to differentiate by)
CALLS: dict[str, tuple[Run, tuple[Tensor, ...]]] = {
    "window": (lambda n, q, k: sdpa(q, k, k, window=(n, n)), LONG),
    "window-weights": (lambda n, q, k: sdpa(q, k, k, window=(n, 0), **WEIGHTS), LONG),
    "window-slopes": (
        lambda n, q, k: sdpa(q, k, k, window=(0, n), alibi_slopes=SLOPES, **BOTTOM_RIGHT), LONG
    ),
    "window-varlen": (
        lambda n, *x: varlen(*x, *STARTS, window=(n, n), return_lse=True, **BOTTOM_RIGHT), PACKED
    ),
    "max_seqlen": (lambda n, *x: varlen(*x, *STARTS, n, n), PACKED),
    "window-decode": (lambda n: decode(QUERY, KEY, VALUE, 8, window=(n, n)), ()),
    "cache_seqlens": (lambda n: decode(QUERY, KEY, VALUE, n), ()),
    "window-flash": (
        lambda n, *x: flash_attn.flash_attn_varlen_func(*x, *STARTS, 4, 5, window_size=(n, n)),
        PACKED,
    ),
    "window-stats": (lambda n: stats(*LONG, window=(n, 0)).entropy, ()),
    "top_k": (lambda n: stats(*LONG, top_k=n).lse, ()),
    "rows": (lambda n: stats(*LONG, rows=(n,)).lse, ()),
    "max_distance": (
        lambda n, q, k, table: sdpa(q, k, k, relative_bias=T5(table, True, n)),
        (*LONG, normal(8, 2)),
    ),
    "max_distance-of-terms": (
        lambda n, q, k, *tables: sdpa(q, k, k, relative_bias=Disentangled(*tables, None, None, n)),
        (*LONG, normal(9, 2, 16), normal(9, 2, 16)),
    ),
    "hops": (lambda n, u, m: fastattn.memory_hop_attention(u, m, m, hops=n), ROWS),
    "update_steps_max": (
        lambda n, x, m: fastattn.hopfield_retrieve(x, m, update_steps_max=n, update_steps_eps=0.1),
        ROWS,
    ),
    "D-local-m": (lambda n, q, k: luong(q, k, k, method="dot", window="local-m", D=n), ROWS),
    "D-local-p": (lambda n, q, k: luong(q, k, k, D=n, need_weights=True, **LOCAL), ROWS),
    "padding_idx": (
        lambda n, weight: fastattn.encode_memory(TOKENS, weight, padding_idx=n),
        (normal(5, 4),),
    ),
    "offset": (lambda n, x: fastattn.sinusoidal_encoding(x, offset=n), (ROWS[0],)),
    "padding_idx-positions": (
        lambda n, x: fastattn.sinusoidal_encoding(
            x, positions=torch.tensor([LARGEST, 0, ~LARGEST]), padding_idx=n
        ),
        (ROWS[0],),
    ),
    "left": (
        lambda n, q, k: sdpa(q, k, k, mask=masks.sliding_window(n, 0), **BOTTOM_RIGHT), LONG
    ),
    "size": (lambda n, q, k: sdpa(q, k, k, mask=masks.chunked(n)), LONG),
    "lengths": (lambda n, q, k: sdpa(q, k, k, mask=masks.prefix_lm(n)), LONG),
}  # fmt: skip


def results(run: Run, number: int, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """The results of a call, and its gradients."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    found = run(number, *leaves)
    found = [found] if isinstance(found, Tensor) else list(found)
    if leaves:
        loss = torch.stack([x.double().sin().sum() for x in found if x.requires_grad]).sum()
        found += torch.autograd.grad(loss, leaves)
    return [x.detach() for x in found]


def outcome(run: Run, number: int, tensors: tuple[Tensor, ...]) -> list[Tensor] | Exception:
    """The results of a run, or its ValueError."""
    try:
        return results(run, number, tensors)
    except ValueError as error:
        return error


def assert_same_outcome(ours: Any, want: Any, name: str) -> None:
    """Both must have the same results, or the same error, which names the option."""
    if isinstance(want, ValueError):
        assert isinstance(ours, ValueError)
        assert str(ours) == str(want)
        assert name in str(ours)
        return
    torch.testing.assert_close(ours, want, rtol=1e-5, atol=2e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CALLS)
def test_a_number_of_any_size(name: str, choice: str) -> None:
    run, tensors = CALLS[name]
    for number in NUMBERS:
        with fastattn.use_backend("reference"):
            want = outcome(run, number, tensors)
        assert_same_outcome(outcome(run, number, tensors), want, name.partition("-")[0])


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("number", OUTSIDE)
def test_a_number_that_does_not_fit_is_named(name: str, number: int) -> None:
    run, tensors = CALLS[name]
    with pytest.raises(ValueError, match=name.partition("-")[0]):
        results(run, number, tensors)


@pytest.mark.parametrize("limit", [2**60, 2**61, LARGEST])
def test_a_limit_beyond_all_keys_has_no_effect(limit: int, choice: str) -> None:
    for name in ("window", "window-varlen", "window-decode", "window-flash"):
        run, tensors = CALLS[name]
        torch.testing.assert_close(
            results(run, limit, tensors), results(run, -1, tensors), rtol=0, atol=0
        )


@pytest.mark.parametrize("D", [10, 2**31, LARGEST])
def test_a_local_window_of_all_keys_is_global_attention(D: int, choice: str) -> None:
    query, key = ROWS
    everywhere = fastattn.luong_attention(query, key, key, method="dot", need_weights=True)
    for positions in (None, torch.tensor([0.0, 3.25, 8.0])):
        options = {"window": "local-m", "D": D, "positions": positions}
        local = luong(query, key, key, method="dot", need_weights=True, **options)
        torch.testing.assert_close(local, everywhere, rtol=1e-5, atol=1e-6)


# --- floats ---------------------------------------------------------------------------------------

SMALLEST = 5e-324
TINY = (1e-19, 1e-25, 1e-36, 1e-38, 1e-39, 1e-40, 1e-45, 1e-50, 1e-300, SMALLEST)
HUGE = (2.0**100, 1e31, 1e38, 1e39, 1e300, 1.7e308)
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
CLOSE: dict[torch.dtype, dict[str, Any]] = {
    dtype: {"rtol": tolerance, "atol": tolerance}
    for dtype, tolerance in zip(FLOATS, (2e-5, 2e-2, 4e-3, 1e-10), strict=True)
}
SINKS = torch.tensor([0.5, -0.25])
WIDE = (normal(1, 2, 150, 64), normal(1, 2, 160, 64))
TOGETHER = (normal(70, 2, 16), normal(71, 2, 16))
FEW = (normal(1, 2, 5, 16), LONG[1])
STARTS_TOGETHER = (torch.tensor([0, 30, 70]), torch.tensor([0, 31, 71]))

# The calls as functions of the scale, or of the option of that name.
SCALES: dict[str, tuple[Run, tuple[Tensor, ...]]] = {
    "scale": (lambda x, q, k: sdpa(q, k, k, scale=x, return_lse=True), LONG),
    "scale-wide": (lambda x, q, k: sdpa(q, k, k, scale=x, return_lse=True), WIDE),
    "scale-small": (
        lambda x, q, k: sdpa(q, k, k, scale=x), (normal(1, 2, 7, 16), normal(1, 2, 9, 16))
    ),
    "scale-one": (
        lambda x, q, k: sdpa(q, k, k, scale=x), (normal(1, 2, 1, 64), normal(1, 2, 300, 64))
    ),
    "scale-causal": (
        lambda x, q, k: sdpa(q, k, k, scale=x, is_causal=True, sinks=SINKS, need_weights=True),
        LONG,
    ),
    "scale-varlen": (lambda x, q, k: varlen(q, k, k, *STARTS_TOGETHER, scale=x), TOGETHER),
    "scale-decode": (lambda x, q, k: decode(q, k, k, 60, scale=x, window=(20, 0)), FEW),
    "scale-stats": (lambda x, q, k: stats(q, k, scale=x).entropy, LONG),
    "beta": (lambda x, q, k: fastattn.hopfield_retrieve(q, k, beta=x, update_steps_max=3), ROWS),
}  # fmt: skip
SOFTCAPS: dict[str, tuple[Run, tuple[Tensor, ...]]] = {
    "softcap": (lambda x, q, k: sdpa(q, k, k, softcap=x, is_causal=True, return_lse=True), LONG),
    "softcap-wide": (lambda x, q, k: sdpa(q, k, k, softcap=x), WIDE),
    "softcap-varlen": (lambda x, q, k: varlen(q, k, k, *STARTS_TOGETHER, softcap=x), TOGETHER),
    "softcap-decode": (lambda x, q, k: decode(q, k, k, 60, softcap=x), FEW),
}
WITHOUT_GRADIENT = ("scale-decode", "scale-stats", "softcap-decode")


def results_in(
    dtype: torch.dtype, name: str, run: Run, number: float | None, tensors: tuple[Tensor, ...]
) -> list[Tensor]:
    """The results of a run in a dtype; only the outputs for operators without a gradient."""
    tensors = tuple(x.to(dtype) for x in tensors)
    if name not in WITHOUT_GRADIENT:
        return results(run, number, tensors)
    return [run(number, *tensors)]


def assert_close_in(dtype: torch.dtype, ours: list[Tensor], want: list[Tensor]) -> None:
    """Finite results, equal up to the rounding of the dtype."""
    for x, y in zip(ours, want, strict=True):
        assert y.isfinite().all()
        torch.testing.assert_close(x, y, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", SCALES)
def test_a_tiny_scale_makes_weights_equal(name: str, dtype: torch.dtype, choice: str) -> None:
    run, tensors = SCALES[name]
    for number in TINY:
        with fastattn.use_backend("reference"):
            want = results_in(dtype, name, run, number, tensors)
        assert_close_in(dtype, results_in(dtype, name, run, number, tensors), want)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_scale_beyond_float32_has_the_references_nan(dtype: torch.dtype, choice: str) -> None:
    query, key = (x.to(dtype) for x in LONG)
    for number in (1e19, 1e25, 1e39, 1e300):

        def run(scale: float = number) -> Tensor:
            return sdpa(query, key, key, scale=scale, is_causal=True)

        with fastattn.use_backend("reference"):
            want = run()
        numbers = want.isfinite()
        torch.testing.assert_close(run()[numbers], want[numbers], **CLOSE[dtype])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", SOFTCAPS)
def test_a_huge_softcap_has_no_effect(name: str, dtype: torch.dtype, choice: str) -> None:
    run, tensors = SOFTCAPS[name]
    without = results_in(dtype, name, run, None, tensors)
    for number in HUGE:
        assert_close_in(dtype, results_in(dtype, name, run, number, tensors), without)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", SOFTCAPS)
def test_a_tiny_softcap_makes_weights_equal(name: str, dtype: torch.dtype, choice: str) -> None:
    run, tensors = SOFTCAPS[name]
    query, *others = tensors
    equal = results_in(dtype, name, run, 1.0, (torch.zeros_like(query), *others))
    for number in TINY:
        ours = results_in(dtype, name, run, number, tensors)
        assert_close_in(dtype, ours[:1], equal[:1])
        if len(ours) > 1:
            assert not ours[-2].any()  # the gradient of the query
            assert ours[-1].isfinite().all()


ROWS_OF_FIVE = (normal(2, 5, 4), ROWS[1])
SEEN = torch.arange(7) != 3
# By the scale; queries of zeros have scores 0 * inf.
NOT_FINITE: dict[str, tuple[Run, tuple[Tensor, ...]]] = {
    **{
        name: call
        for name, call in SCALES.items()
        if name not in ("beta", "scale-causal", "scale-stats")
    },
    "scale-one-softcap": (
        lambda x, q, k: fastattn.scaled_dot_product_attention(q, k, k, scale=x, softcap=2.0),
        LONG,
    ),
    "scale-sinusoidal": (lambda x, q, k: fastattn.sinusoidal_encoding(q, scale=x), ROWS),
    **{
        f"scale-hops-{normalize}-{len(rows[0][0])}": (
            lambda x, q, k, normalize=normalize: fastattn.memory_hop_attention(
                q, k, k, memory_mask=SEEN, normalize=normalize, scale=x
            ),
            rows,
        )
        for normalize in ("softmax", "none")
        for rows in (ROWS, ROWS_OF_FIVE)
    },
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", NOT_FINITE)
def test_a_scale_that_is_not_finite_acts_as_in_the_reference(
    name: str, dtype: torch.dtype, choice: str
) -> None:
    run, (query, *others) = NOT_FINITE[name]
    for first in (query, torch.zeros_like(query)):
        tensors = [x.to(dtype) for x in (first, *others)]
        for number in (torch.inf, -torch.inf, torch.nan):
            with fastattn.use_backend("reference"):
                want = run(number, *tensors)
            ours = run(number, *tensors)
            torch.testing.assert_close(ours, want, equal_nan=True, **CLOSE[dtype])


def test_an_infinite_score_is_a_weight_of_linear_hops(choice: str) -> None:
    for queries in (1, 5):
        query, memory = torch.ones(2, queries, 4), torch.ones(2, 3, 4)
        memory[:, 1] = -torch.inf
        out, weights = fastattn.memory_hop_attention(
            query, memory, torch.ones(2, 3, 4), normalize="none", need_weights=True
        )
        assert (out == -torch.inf).all()
        assert torch.equal(weights[0, 0, 0], torch.tensor([4.0, -torch.inf, 4.0]))


HUGE_INTEGERS: dict[str, Run] = {
    "scale": lambda n: fastattn.scaled_dot_product_attention(*LONG[:1] * 3, scale=n),
    "softcap": lambda n: fastattn.varlen_attention(*TOGETHER, TOGETHER[1], *STARTS, softcap=n),
    "dropout_p": lambda n: flash_attn.flash_attn_func(*LONG[:1] * 3, n, return_attn_probs=True),
    "scale-hops": lambda n: fastattn.memory_hop_attention(*ROWS, scale=n),
    "scale-sinusoidal": lambda n: fastattn.sinusoidal_encoding(ROWS[0], scale=n),
    "max_timescale": lambda n: fastattn.sinusoidal_encoding(ROWS[0], max_timescale=n),
    "update_steps_eps": lambda n: fastattn.hopfield_retrieve(*ROWS, update_steps_eps=n),
}


@pytest.mark.parametrize("name", HUGE_INTEGERS)
def test_an_integer_beyond_all_floats_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=name.partition("-")[0]):
        HUGE_INTEGERS[name](10**400)


@pytest.mark.parametrize("dropout_p", [None, "0.5", [0.1], 1j])
def test_a_dropout_of_another_type_is_named(dropout_p: Any) -> None:
    with pytest.raises(TypeError, match="dropout_p"):
        flash_attn.flash_attn_func(*LONG[:1] * 3, dropout_p, return_attn_probs=True)


def test_a_tiny_softcap_of_equal_scores(choice: str) -> None:
    key = normal(1, 2, 9, 16)
    for dtype in FLOATS:
        query = torch.zeros(1, 2, 7, 16, dtype=dtype)
        out = sdpa(query, key.to(dtype), key.to(dtype), softcap=SMALLEST)
        mean = key.to(dtype).mean(2, keepdim=True).expand_as(out)
        torch.testing.assert_close(out, mean, **CLOSE[dtype])
