"""The fast path of plain Hopfield retrieval gives, bit for bit, what the general way gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fast_paths import check_both_ways
from torch import Tensor

import fastattn
from fastattn import hopfield_retrieve
from fastattn.ops._hopfield_plain import retrieve_plainly

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def tensors(queries: int, dtype: torch.dtype, projected: bool) -> list[Tensor | None]:
    """Of a batch whose heads lie beside each other."""
    draw = torch.Generator().manual_seed(3)

    def some(length: int, width: int) -> Tensor:
        return (0.7 * torch.randn(2, length, 3, width, generator=draw)).to(dtype).transpose(1, 2)

    return [some(queries, 20), some(30, 20), some(30, 9) if projected else None]


def run(
    queries: int, dtype: torch.dtype, steps: int | None, projected: bool, wants: str
) -> list[Tensor | None]:
    given = tensors(queries, dtype, projected)
    for name, x in zip("rxv", given, strict=True):
        if x is not None:
            x.requires_grad_(name in wants)
    # Some queries rest before the last step.
    out = hopfield_retrieve(*given, beta=3.0, update_steps_max=steps, update_steps_eps=0.3)
    if not out.requires_grad:
        return [out]
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(dtype))
    return [out.detach(), *(None if x is None else x.grad for x in given)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("queries", [2, 7, 40])
@pytest.mark.parametrize("steps", [3, 9, None])
@pytest.mark.parametrize(
    ("projected", "wants"),
    [(False, "rx"), (False, "r"), (True, "rxv"), (True, "v"), (False, "")],
)
def test_both_ways_agree_to_the_bit(
    dtype: torch.dtype,
    queries: int,
    steps: int | None,
    projected: bool,
    wants: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_both_ways(
        monkeypatch, "plain_retrieval", lambda: run(queries, dtype, steps, projected, wants)
    )


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("queries", [2, 6])
def test_derivatives(queries: int, projected: bool) -> None:
    """By finite differences, twice; the steps are part of both."""
    state, stored, projection = (
        None if x is None else x[:1, :1, ..., :3].detach().requires_grad_()
        for x in tensors(queries, torch.float64, projected)
    )

    def f(*leaves: Tensor) -> Tensor:
        return hopfield_retrieve(  # type: ignore[no-any-return]
            *leaves, beta=0.5, update_steps_max=2, update_steps_eps=0.0
        )

    leaves = [x for x in (state, stored, projection) if x is not None]
    assert "plain_retrieval" in str(f(*leaves).grad_fn)
    assert torch.autograd.gradcheck(f, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, leaves, fast_mode=True)


class _Own(Tensor):
    pass


def test_what_the_fast_path_cannot_do_is_left_to_the_general_one() -> None:
    state, stored = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 6, 5)
    value = torch.randn(2, 3, 6, 7)
    given = (state, stored, value, 0.5, 2, 0.0)
    assert retrieve_plainly(*given) is not None
    assert retrieve_plainly(state, stored, None, None, None, 0.1) is not None
    assert retrieve_plainly(torch.nn.Parameter(state), *given[1:]) is not None
    for place, other in (
        (0, state[0]),
        (0, state.bfloat16()),
        (0, state.to("meta")),
        (0, state[:, :, :0]),
        (0, None),
        (0, state.as_subclass(_Own)),
        (1, stored[:1]),
        (1, stored[:1].expand(2, 3, 6, 5)),  # patterns for all
        (1, stored.mT.contiguous().mT),  # rows apart
        (1, stored[..., :4]),
        (1, stored.to_sparse()),
        (2, value[:, :, :5]),
        (2, value.double()),
        (3, 1),
        (3, -1.0),
        (3, torch.tensor(0.5)),
        (4, 0),
        (4, True),
        (5, -1.0),
        (5, 0),
    ):
        args: list[Any] = list(given)
        args[place] = other
        assert retrieve_plainly(*args) is None, (place, other)
    with torch.autocast("cpu", torch.bfloat16):
        assert retrieve_plainly(*given) is None
    with fastattn.use_backend("reference"):
        assert retrieve_plainly(*given) is None
