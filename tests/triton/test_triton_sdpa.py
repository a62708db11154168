"""Attention on Triton through the public function."""

from __future__ import annotations

import functools
import importlib
import math
from collections import Counter
from typing import Any

import pytest
import torch
from new_option import assert_declined, assert_tensor_declined

import fastattn
from fastattn import dispatch, masks

pytestmark = pytest.mark.usefixtures("triton_interpreter")


def _qkv(generator: torch.Generator, *shape: int, grad: bool = True) -> list[torch.Tensor]:
    """A query, key and value of one shape."""
    return [
        torch.randn(shape, generator=generator, requires_grad=grad)
        for _ in range(3)
    ]  # fmt: skip


def test_forward_and_backward_run_on_triton_if_forced(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = dispatch.load("triton")
    called = []
    for name in ("scaled_dot_product_attention", "scaled_dot_product_attention_backward"):
        function = getattr(backend, name)

        @functools.wraps(function)  # its parameters say which tensors it takes
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


def test_triton_is_never_chosen_for_cpu_tensors() -> None:
    query = torch.ones(1, 1, 3, 8)
    assert (
        "triton"
        not in fastattn.explain("scaled_dot_product_attention", query, query, query).reasons
    )


@pytest.mark.complete
def test_results_are_bitwise_equal_in_every_run_and_batch(generator: torch.Generator) -> None:
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


@pytest.mark.complete
@pytest.mark.parametrize("entry", [-math.inf, torch.finfo(torch.float32).min])
def test_an_entry_of_a_relative_bias_may_hide_its_distance(
    entry: float, generator: torch.Generator
) -> None:
    table = torch.randn(2, 99, generator=generator)
    table[0] = entry  # of all distances: finfo.min then weights all keys equally
    table[1, :49] = entry
    query, key, value = _qkv(generator, 1, 2, 50, 8, grad=False)
    if entry == -math.inf:
        key[:, :, 40:] = value[:, :, 40:] = math.nan
    leaves = [x.requires_grad_() for x in (query[:, :, :40], key, value, table)]
    results = []
    for name in ("triton", "reference"):
        with fastattn.use_backend(name):
            out = fastattn.scaled_dot_product_attention(*leaves[:3], relative_bias=leaves[3])
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("mask", "tiles", "looked_at"),
    [
        (masks.causal(), 10, 4),  # tiles on the diagonal
        (masks.document(torch.arange(128) // 32), 4, 0),
        (~masks.document(torch.arange(128) // 32), 12, 0),
        (masks.from_function(lambda b, h, q, k: q // 128 == k // 128, None, None, 128, 128), 16, 0),
        (masks.chunked(64) & masks.causal() | ~masks.sliding_window(100, -1), 7, 5),
    ],
    ids=str,
)
def test_tiles_without_a_visible_pair_are_skipped(
    mask: masks.Mask,
    tiles: int,
    looked_at: int,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program is evaluated pair by pair only for partial tiles."""
    counts: Counter[str] = Counter()

    def counted(module: str, name: str, what: str, index: int | None = None) -> None:
        of_kernels: Any = importlib.import_module(f"fastattn.backends.triton.{module}")
        function = getattr(of_kernels, name)

        def called(*args: Any) -> Any:
            counts[what] += index is None or bool(args[index])
            return function(*args)

        monkeypatch.setattr(of_kernels, name, called)

    counted("_sdpa_forward", "scores", "tiles")
    counted("_mask_program", "_evaluate", "looked at", index=5)
    query, key, value = _qkv(generator, 1, 1, 128, 8, grad=False)
    outs = []
    for name in ("triton", "reference"):
        with fastattn.use_backend(name):
            outs.append(fastattn.scaled_dot_product_attention(query, key, value, mask=mask))
    assert (counts["tiles"], counts["looked at"]) == (tiles, looked_at)
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize(
    ("dtype", "width", "word"),
    [(torch.float64, 8, "float64"), (torch.float32, 513, "513 is above 512")],
)
def test_declined_calls_have_a_reason(dtype: torch.dtype, width: int, word: str) -> None:
    query = torch.ones(1, 1, 3, width, dtype=dtype)
    with (
        fastattn.use_backend("triton"),
        pytest.raises(RuntimeError, match=word),
    ):
        fastattn.scaled_dot_product_attention(query, query, query)


def test_declines_an_option_that_it_does_not_know() -> None:
    assert_declined(dispatch.load("triton"), torch.float32)
    assert_tensor_declined(dispatch.load("triton"), torch.float32)
