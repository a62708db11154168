"""Attention on Triton: the case table, interpreted on the CPU where there is no GPU."""

from __future__ import annotations

import pytest
import torch

import fastattn
from fastattn import dispatch
from fastattn.testing import CASES, Case, Target, check

pytestmark = pytest.mark.usefixtures("triton_interpreter")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TABLE = [
    case
    for case in CASES["scaled_dot_product_attention"]
    if max(case.head_dim, case.value_dim or 0) <= 512 and set(DTYPES) & set(case.dtypes)
]
TILE = 32  # of the interpreter's launches


def _work(case: Case) -> int:
    """Tiles of pairs; the interpreter takes some 15 ms for each, forward and backward."""
    return case.batch * case.heads * -(-case.q_len // TILE) * -(-case.k_len // TILE)


# One after the other, in one dtype after the other.
SMALL = [case for case in TABLE if not case.slow and _work(case) <= 24]
WORK = [(case, DTYPES[n % 3]) for n, case in enumerate(SMALL[::5]) if DTYPES[n % 3] in case.dtypes]
# Whatever else is chosen: the options that meet in these are met nowhere else.
NAMED = {
    "empty-heads": torch.float16,
    "gqa-mask-heads": torch.float32,
    "alibi-bh-window": torch.float32,
    "mask-padding-poison": torch.float32,
    "mask-nan-queries": torch.float32,
    "mask-one_key-poison": torch.bfloat16,
    "mask-float32-hq": torch.bfloat16,
    "mask-float-one": torch.float32,
    "mask-finfo-min": torch.float16,
    "window-3-5-65x65-full": torch.float32,
    "window-3--1-40x130-bottom_right": torch.bfloat16,
    "window-sees-nothing": torch.float32,
    "layout-expanded_rows-causal-wide": torch.float32,
    "dropout-0.5-mask": torch.float32,
    "head_dim-512": torch.float32,
}
WORK += [(case, NAMED[case.name]) for case in TABLE if case.name in NAMED]


def _name(value: object) -> str:
    return value.name if isinstance(value, Case) else str(value).removeprefix("torch.")


@pytest.mark.parametrize(("case", "dtype"), WORK, ids=_name)
def test_case(case: Case, dtype: torch.dtype) -> None:
    verdict = check(case, dtype, Target("triton"))
    assert not verdict.declined, verdict.declined
    assert verdict.ok, "\n".join(verdict.faults)


def _dtype(n: int, case: Case) -> torch.dtype:
    """The dtypes take turns: neighbours in the table differ in one option, and each meets all."""
    known = [dtype for dtype in DTYPES if dtype in case.dtypes]
    return known[n % len(known)]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_every_case(part: int) -> None:
    """In one dtype each; in every dtype on a GPU, those too that take the interpreter minutes."""
    faults = [
        f"{case.name} {dtype}: {fault}"
        for n, case in list(enumerate(TABLE))[part::20]
        for dtype in [_dtype(n, case)]
        if _work(case) <= 1000
        for fault in check(case, dtype, Target("triton")).faults
    ]
    assert not faults, "\n".join(faults)


def test_every_named_case_is_there() -> None:
    assert {case.name for case in TABLE} >= set(NAMED)


# -- through the public function ------------------------------------------------------------------


def _qkv(generator: torch.Generator, *shape: int, grad: bool = True) -> list[torch.Tensor]:
    return [
        torch.randn(shape, generator=generator, requires_grad=grad)
        for _ in range(3)
    ]  # fmt: skip


def test_forward_and_backward_run_on_triton_when_it_is_asked_for(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = dispatch.load("triton")
    called = []
    for name in ("scaled_dot_product_attention", "scaled_dot_product_attention_backward"):
        function = getattr(backend, name)

        def noted(*args, name=name, function=function, **kwargs):  # type: ignore[no-untyped-def]
            called.append(name.removeprefix("scaled_dot_product_"))
            return function(*args, **kwargs)

        monkeypatch.setattr(backend, name, noted)
    query, key, value = _qkv(generator, 1, 2, 5, 8)
    with fastattn.use_backend("triton"):
        out = fastattn.scaled_dot_product_attention(query, key, value, is_causal=True)
        out.sum().backward()
    assert called == ["attention", "attention_backward"]
    want = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(out, want)
    assert query.grad is not None


def test_it_is_never_chosen_for_cpu_tensors() -> None:
    query = torch.ones(1, 1, 3, 8)
    assert (
        "triton"
        not in fastattn.explain("scaled_dot_product_attention", query, query, query).reasons
    )


def test_it_is_the_same_bits_again_and_alone(generator: torch.Generator) -> None:
    query, key, value = _qkv(generator, 3, 2, 40, 16)
    grad = torch.randn(3, 2, 40, 16, generator=generator)

    def run(rows: slice) -> list[torch.Tensor]:
        leaves = [x[rows].detach().requires_grad_() for x in (query, key, value)]
        with fastattn.use_backend("triton"):
            out = fastattn.scaled_dot_product_attention(*leaves, window=(9, 3))
        return [out, *torch.autograd.grad(out, leaves, grad[rows])]

    everything, again, alone = run(slice(0, 3)), run(slice(0, 3)), run(slice(1, 2))
    for first, second, one in zip(everything, again, alone, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first[1:2], one)


def test_dropout_keeps_what_the_reference_keeps(generator: torch.Generator) -> None:
    query, key, value = _qkv(generator, 2, 2, 33, 16, grad=False)
    kept = []
    for name in ("triton", "reference"):
        with fastattn.use_backend(name):
            _, weights = fastattn.scaled_dot_product_attention(
                query, key, value, dropout_p=0.4, need_weights=True, average_weights=False,
                generator=torch.Generator().manual_seed(5),
            )  # fmt: skip
        kept.append(weights != 0)
    assert torch.equal(*kept)
    assert 0.5 < kept[0].double().mean() < 0.7


@pytest.mark.parametrize(
    ("dtype", "width", "word"),
    [(torch.float64, 8, "float64"), (torch.float32, 513, "513 is above 512")],
)
def test_it_says_what_it_cannot_run(dtype: torch.dtype, width: int, word: str) -> None:
    query = torch.ones(1, 1, 3, width, dtype=dtype)
    with (
        fastattn.use_backend("triton"),
        pytest.raises(RuntimeError, match=word),
    ):
        fastattn.scaled_dot_product_attention(query, query, query)
