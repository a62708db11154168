"""Masks and relative biases of packed sequences: beyond the case table."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from case_table import refuses
from torch import Tensor
from torch.testing import assert_close

from fastattn import masks, scaled_dot_product_attention, varlen_attention
from fastattn.bias import T5, Window2d

pytestmark = pytest.mark.usefixtures("seeded")

Q_ENDS, K_ENDS = torch.tensor([0, 3, 3, 9]), torch.tensor([0, 4, 6, 11])
Q_ROWS, K_ROWS = 10, 12  # the last ones are of no sequence
IDS, KEY_IDS = torch.arange(Q_ROWS) % 3, torch.arange(K_ROWS) % 3
PREFIXES = torch.tensor([3, 1, 2])


def qkv(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Random packed queries, keys and values."""
    shapes = (Q_ROWS, 4, 8), (K_ROWS, 2, 8), (K_ROWS, 2, 8)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def one_mask(b: int) -> masks.Mask:
    """The mask of sequence b alone."""
    (q, q_end), (k, k_end) = Q_ENDS[b : b + 2], K_ENDS[b : b + 2]
    documents = masks.document(IDS[q:q_end], KEY_IDS[k:k_end])
    return documents & masks.sliding_window(3, -1) | masks.prefix_lm(int(PREFIXES[b]))


def mask_of_all() -> masks.Mask:
    """A combined mask: documents within a window, and prefixes."""
    documents = masks.document(IDS, KEY_IDS)
    return documents & masks.sliding_window(3, -1) | masks.prefix_lm(PREFIXES)


def packed(*args: Any, **options: Any) -> Any:
    """Attention of the packed sequences of this file."""
    return varlen_attention(*args, Q_ENDS, K_ENDS, **options)


@pytest.mark.parametrize("alignment", ["upper_left", "bottom_right"])
@pytest.mark.parametrize("form", ["table", "t5"])
def test_each_sequence_has_its_own_mask_and_bias(backend: str, alignment: str, form: str) -> None:
    leaves = [x.requires_grad_() for x in qkv()]
    table = torch.randn((4, 13) if form == "table" else (8, 4), dtype=torch.float64)
    table.requires_grad_()
    bias: Any = table if form == "table" else T5(table, max_distance=5)
    options: dict[str, Any] = {"causal_alignment": alignment, "relative_bias": bias}
    out, lse = packed(*leaves, mask=mask_of_all(), return_lse=True, **options)
    wanted = []
    for b in range(3):
        q, k = (slice(*(int(n) for n in ends[b : b + 2])) for ends in (Q_ENDS, K_ENDS))
        one = [x[rows].transpose(0, 1)[None] for x, rows in zip(leaves, (q, k, k), strict=True)]
        want, want_lse = scaled_dot_product_attention(
            *one, mask=one_mask(b), enable_gqa=True, return_lse=True, **options
        )
        assert_close(out[q], want[0].transpose(0, 1))
        assert_close(lse[:, q], want_lse[0])
        wanted.append(want.sin().sum())
    got = torch.autograd.grad(out[: Q_ENDS[-1]].sin().sum(), [*leaves, table])
    assert_close(got, torch.autograd.grad(sum(wanted), [*leaves, table]))


def program(mask: masks.Mask, ends: Tensor, bottom_right: bool = False) -> Tensor:
    """The mask program of packed sequences."""
    query, key, _ = qkv()
    return masks.packed_program("test", mask, query, key, (ends, K_ENDS), bottom_right)


def test_a_program_of_the_same_lengths_is_built_once() -> None:
    mask, ends = mask_of_all(), Q_ENDS.clone()
    with torch.inference_mode():
        first = program(mask, ends)
    assert not first.is_inference()
    assert program(mask, Q_ENDS) is first
    assert program(mask, ends, bottom_right=True) is not first
    for change in (ends, ends.numpy()):  # the latter does not change the tensor's version
        change[1] = 5
        other = program(mask, ends)
        assert not torch.equal(other, first)
        assert torch.equal(other, program(mask_of_all(), ends))
        change[1] = 3
        assert program(mask, ends) is first


def test_threads_share_the_programs_of_a_mask() -> None:
    mask = mask_of_all()

    def is_right(n: int) -> bool:
        ends = torch.tensor([0, n % 10, 9, 10])
        return torch.equal(program(mask, ends), program(mask_of_all(), ends))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(is_right, range(100)))


@pytest.mark.complete
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(backend: str, dynamic: bool) -> None:
    def loss(q: Tensor, table: Tensor, buckets: Tensor, ends: Tensor, ids: Tensor) -> Tensor:
        mask = masks.document(ids) & masks.chunked(4)
        out = varlen_attention(q, q, q, ends, ends, relative_bias=table, mask=mask)
        t5 = varlen_attention(q, q, q, ends, ends, 8, 8, relative_bias=T5(buckets, max_distance=5))
        return out.sin().sum() + t5.sin().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for ends in (torch.tensor([0, 2, 7]), torch.tensor([0, 1, 1, 9])):
        rows = int(ends[-1])
        leaves = [torch.randn(s, requires_grad=True) for s in ((rows, 2, 4), (2, 17), (8, 2))]
        given = (*leaves, ends, torch.arange(rows) % 2)
        got, want = (torch.autograd.grad(f(*given), leaves) for f in (compiled, loss))
        assert_close(got, want)


def test_t5s_table_covers_the_bound_of_unknown_lengths() -> None:
    q, k, v = (x.float() for x in qkv())
    buckets = torch.randn(8, 4)

    def call(*lengths: Any) -> Tensor:
        bias = T5(buckets, max_distance=5)
        return varlen_attention(q, k, v, Q_ENDS, K_ENDS, *lengths, relative_bias=bias)

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    assert_close(compiled(), call())
    assert_close(compiled(6, 5), call())
    with pytest.raises(ValueError, match="at least 11 distances for a sequence of 6 rows, got 5"):
        compiled(3, 3)


def _blocks(length: int) -> masks.Mask:
    return masks.from_function(lambda b, h, q, k: q >= k, None, None, length, length)


BAD = [
    ({"mask": torch.ones(9, 9)}, TypeError, "argument 'mask' must be Mask, not Tensor"),
    ({"mask": _blocks(9)}, RuntimeError, r"mask must be one of positions .* got from_function"),
    ({"mask": ~_blocks(9) & masks.causal()}, RuntimeError, "blocks need queries and keys"),
    ({"mask": masks.document(IDS)}, RuntimeError, "keys must have length 12, got 10"),
    ({"mask": masks.document(IDS[None].expand(3, -1), KEY_IDS)}, RuntimeError,
     "ids of the queries must be of batch size 1, got 3"),
    ({"mask": masks.prefix_lm(PREFIXES[:2])}, RuntimeError, "batch size 1 or 3, got 2"),
    ({"relative_bias": torch.zeros(4, 9)}, RuntimeError,
     "n odd and at least 11 for a sequence of 6 rows, got"),
    ({"relative_bias": torch.zeros(2, 11)}, RuntimeError, r"must have shape \(4, n\)"),
    ({"relative_bias": Window2d(torch.zeros(9, 4), (2, 2))}, TypeError,
     "'relative_bias' must be Tensor or T5"),
    ({"relative_bias": T5(torch.zeros(8, 2))}, RuntimeError, r"\(num_buckets, 4\)"),
]  # fmt: skip
test_errors = refuses(functools.partial(packed, *qkv(torch.float32)), BAD, "varlen_attention.*")
