"""varlen_attention: on every backend and instruction set, against attention of single sequences."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from attention_cases import VARLEN_CASES
from case_table import refuses, within_the_bound
from torch import Tensor

from fastattn import scaled_dot_product_attention, varlen_attention
from fastattn.testing import targets
from fastattn.testing.packed import VarlenCase, check_varlen

test_case = within_the_bound("varlen_attention", 1, keep=("relative", "program-documents"))


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in VARLEN_CASES if c.slow], ids=lambda case: case.name)
def test_slow_case(case: VarlenCase) -> None:
    for dtype, target in product(case.dtypes, targets(emulated=True)):
        if not target.has_own_kernel("varlen_attention", dtype):
            continue
        verdict = check_varlen(case, dtype, target)
        assert verdict.ok, (target, verdict.faults)


# --- the public function ---------------------------------------------------------------------


@pytest.fixture
def packed(generator: torch.Generator) -> tuple[list[Tensor], Tensor]:
    """query, key and value of three sequences, and where they end."""
    tensors = [torch.randn(12, 2, 8, generator=generator) for _ in range(3)]
    return tensors, torch.tensor([0, 5, 5, 12], dtype=torch.int32)


def test_dropout_draws_from_the_generator_as_in_a_batch(
    backend: str, packed: tuple[list[Tensor], Tensor]
) -> None:
    tensors, _ = packed
    ends = torch.tensor([0, 6, 12])

    def seeded() -> torch.Generator:
        return torch.Generator().manual_seed(3)

    out = varlen_attention(*tensors, ends, ends, dropout_p=0.4, generator=seeded())
    batch = [x.unflatten(0, (2, 6)).transpose(1, 2) for x in tensors]
    want = scaled_dot_product_attention(*batch, dropout_p=0.4, generator=seeded())
    torch.testing.assert_close(out, want.transpose(1, 2).flatten(0, 1))
    assert not torch.equal(out, varlen_attention(*tensors, ends, ends))


X, ENDS = torch.zeros(4, 2, 8), torch.tensor([0, 1, 4])
BAD = [
    ({"query": [1.0]}, TypeError, "argument 'query' must be Tensor, not list"),
    ({"query": X[0]}, ValueError, r"query must be \[T, Hq, D\], got shape \(2, 8\)"),
    ({"key": X.double()}, RuntimeError, "must have the same dtype, got float32, float64"),
    ({"key": X[..., :4]}, ValueError, "query and key must have the same last dimension"),
    ({"value": X[:3]}, ValueError, "the same number of rows, got shapes"),
    ({"query": X[:, :1].expand(4, 3, 8)}, ValueError, "must divide that of query .*2 and 3"),
    ({"value": X[:, :1]}, ValueError, "the same number of heads"),
    ({"query": X.to("meta")}, RuntimeError, "key must be on query's device meta, got cpu"),
    ({"cu_seqlens_q": None}, TypeError, "argument 'cu_seqlens_q' must be Tensor"),
    ({"cu_seqlens_q": ENDS.float()}, TypeError, "cu_seqlens_q must be int32 or int64"),
    ({"cu_seqlens_q": ENDS[None]}, ValueError, r"cu_seqlens_q must be \[B \+ 1\]"),
    ({"cu_seqlens_q": ENDS[:0]}, ValueError, r"must be \[B \+ 1\], got shape \(0,\)"),
    ({"cu_seqlens_q": ENDS + 1}, ValueError, "cu_seqlens_q must begin with 0, got 1"),
    ({"cu_seqlens_k": torch.tensor([0, 4, 1])}, ValueError, "cu_seqlens_k must not decrease"),
    ({"cu_seqlens_k": 2 * ENDS}, ValueError, "not end beyond the 4 rows, got 8"),
    ({"cu_seqlens_q": ENDS[:2]}, ValueError, "must have the same length, got 2 and 3"),
    ({"max_seqlen_q": 2}, ValueError, "max_seqlen_q must be at least the longest sequence, 3"),
    (
        {"cu_seqlens_q": ENDS[:1], "cu_seqlens_k": ENDS[:1], "max_seqlen_q": -1},
        ValueError,
        "max_seqlen_q must be at least the longest sequence, 0, got -1",
    ),
    ({"max_seqlen_k": 2.5}, TypeError, "argument 'max_seqlen_k' must be int or None"),
    ({"dropout_p": 1.5}, RuntimeError, "varlen_attention: dropout_p must be between 0 and 1"),
    ({"is_causal": 1}, TypeError, "argument 'is_causal' must be bool, not int"),
    ({"window": 3}, TypeError, "varlen_attention: window must be None or a pair"),
    ({"softcap": -1.0}, ValueError, "varlen_attention: softcap must be None or positive"),
    ({"causal_alignment": "left"}, ValueError, "causal_alignment must be 'upper_left' or"),
    ({"alibi_slopes": torch.ones(3)}, ValueError, r"must have shape \(2,\) or \(2, 2\)"),
    ({"alibi_slopes": torch.ones(2).long()}, TypeError, "alibi_slopes must be floating"),
    ({"alibi_slopes": torch.ones(2).to_sparse()}, RuntimeError, "must be a dense tensor"),
    ({"generator": 1}, TypeError, "argument 'generator' must be torch.Generator"),
]
OPERANDS = {"query": X, "key": X, "value": X, "cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS}
test_errors = refuses(varlen_attention, BAD, **OPERANDS)


# --- torch.func ------------------------------------------------------------------------------


def rows() -> list[Tensor]:
    """Random packed queries, keys and values."""
    draw = torch.Generator().manual_seed(0)
    shapes = ((5, 2, 3), (9, 1, 3), (9, 1, 2))
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


@pytest.mark.filterwarnings("ignore::fastattn.FallbackWarning")
def test_slopes_have_a_gradient_by_the_reference() -> None:
    slopes = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    ends = torch.tensor([0, 3, 3, 4]), torch.tensor([0, 2, 4, 9])
    assert torch.autograd.gradcheck(
        lambda s: varlen_attention(*rows(), *ends, alibi_slopes=s), (slopes,)
    )


def test_vmap_of_gradients_over_the_ends(backend: str) -> None:
    tensors = [torch.stack([x, -x]) for x in rows()]
    ends, k_ends = torch.tensor([[0, 3, 3, 4], [0, 1, 2, 5]]), torch.tensor([0, 2, 4, 9])

    def loss(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
        return varlen_attention(q, k, v, ends, k_ends, is_causal=True).sin().sum()

    gradient = torch.func.grad(loss, argnums=(0, 1, 2))
    want = [gradient(*(x[n] for x in tensors), ends[n]) for n in range(2)]
    got = torch.vmap(gradient)(*tensors, ends)
    torch.testing.assert_close(got, tuple(map(torch.stack, zip(*want, strict=True))))
