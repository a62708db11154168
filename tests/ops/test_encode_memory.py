"""encode_memory: against its definition in float64, on every backend and instruction set."""

from __future__ import annotations

import pytest
import torch
from case_table import refuses, within_the_bound
from torch import Tensor
from torch.func import vmap

from fastattn import encode_memory
from fastattn.ops.encode_memory import encoding_factors
from fastattn.testing import Target
from fastattn.testing.memories import draw_sentences

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

test_case = within_the_bound("encode_memory")
NAN = float("nan")


def test_by_hand(engine: Target) -> None:
    """J = 2, D = 2: l = [[1/2, 1/2], [1/2, 1]]."""
    weight = torch.tensor([[100.0, 100.0], [2.0, 4.0], [6.0, 8.0]])
    tokens = torch.tensor([[[1, 2], [2, 0], [0, 0]]])
    got = encode_memory(tokens, weight)
    assert got.tolist() == [[[4.0, 10.0], [3.0, 4.0], [0.0, 0.0]]]
    temporal = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    got = encode_memory(tokens, weight, encoding="bow", temporal=temporal)
    assert got.tolist() == [[[9.0, 13.0], [8.0, 10.0], [0.0, 0.0]]]
    got = encode_memory(tokens, weight, encoding="bow", padding_idx=None)
    assert got.tolist() == [[[8.0, 12.0], [106.0, 108.0], [200.0, 200.0]]]


def test_factors_follow_their_formulas() -> None:
    words, dim = 5, 7
    position, centered, bow = (
        encoding_factors(name, words, dim, dtype=torch.float64)
        for name in ("position", "centered", "bow")
    )
    for j in range(1, words + 1):
        for k in range(1, dim + 1):
            want = (1 - j / words) - (k / dim) * (1 - 2 * j / words)
            assert abs(float(position[j - 1, k - 1]) - want) < 1e-15
            want = 1 + 4 * (j - (words + 1) / 2) * (k - (dim + 1) / 2) / (words * dim)
            assert abs(float(centered[j - 1, k - 1]) - want) < 1e-15
            assert bow[j - 1, k - 1] == 1
    assert abs(float(centered.mean()) - 1) < 1e-15
    assert encoding_factors("position", 0, 3).shape == (0, 3)
    assert encoding_factors("centered", 3, 0).shape == (3, 0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_padding_is_not_read(
    engine: Target, dtype: torch.dtype, generator: torch.Generator
) -> None:
    tokens, weight, temporal = draw_sentences((3, 4, 5, 11, 20, None), dtype, generator)
    want = encode_memory(tokens, weight, temporal=temporal)
    weight[0] = NAN
    factors = encoding_factors("position", 5, 20, dtype=torch.float64)
    assert torch.equal(encode_memory(tokens, weight, temporal=temporal), want)
    tokens[..., 3:] = 0
    factors[3:] = NAN  # a position without a word in any sentence
    assert encode_memory(tokens, weight, encoding=factors).isfinite().all()
    weight.requires_grad_()
    encode_memory(tokens, weight, encoding=factors).sum().backward()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()
    assert not weight.grad[0].any()


def test_padding_need_not_be_a_row(engine: Target, generator: torch.Generator) -> None:
    tokens, weight, temporal = draw_sentences((3, 4, 5, 11, 20, None), torch.float32, generator)
    want = encode_memory(tokens, weight, temporal=temporal)
    for padding in (-1, -100, 11, 2**62, -(2**63)):
        moved = torch.where(tokens == 0, padding, tokens)
        assert torch.equal(
            encode_memory(moved, weight, temporal=temporal, padding_idx=padding), want
        )
    nothing = torch.full((2, 3, 4), -1)
    assert not encode_memory(nothing, torch.empty(0, 6), padding_idx=-1).any()


def test_several_tables_give_the_bits_of_each(engine: Target, generator: torch.Generator) -> None:
    tokens, weight, temporal = draw_sentences((3, 4, 5, 11, 50, 3), torch.float32, generator)
    together = encode_memory(tokens, weight, temporal=temporal)
    for g in range(3):
        alone = encode_memory(tokens, weight[g], temporal=temporal[g])
        assert torch.equal(together[:, g], alone)


def test_tokens_of_any_kind(engine: Target, generator: torch.Generator) -> None:
    tokens, weight, temporal = draw_sentences((3, 4, 5, 11, 21, 2), torch.float32, generator)
    want = encode_memory(tokens, weight, temporal=temporal)
    assert torch.equal(encode_memory(tokens.int(), weight, temporal=temporal), want)
    one = tokens[:1, 1:2].expand(3, 4, 5)
    row = weight[:, :1].expand(2, 11, 21)
    torch.testing.assert_close(
        encode_memory(one, row), encode_memory(one.contiguous(), row.contiguous())
    )


@pytest.mark.parametrize(
    ("wrong", "place_", "padding"),
    [
        *((11, (1, 2, 3), 0), (-1, (0, 0, 0), 0), (2**40, (2, 3, 4), 0), (-(2**63), (0, 0, 0), 0)),
        (0, (1, 0, 2), None),
    ],
)
def test_tokens_outside_the_table(
    engine: Target, wrong: int, place_: tuple[int, ...], padding: int | None
) -> None:
    tokens = torch.ones(3, 4, 5, dtype=torch.int64)
    tokens[place_] = wrong
    weight = torch.ones(11 if padding == 0 else 0, 6, requires_grad=True)
    if padding is None:
        tokens.zero_()
        place_ = (0, 0, 0)
    rows = len(weight)
    index = ", ".join(map(str, place_))
    with pytest.raises(IndexError, match=rf"tokens\[{index}\] is {wrong}, but weight has {rows}"):
        encode_memory(tokens, weight, padding_idx=padding)
    right = torch.ones(3, 4, 5, dtype=torch.int64)
    if padding == 0:
        out = encode_memory(right, weight)
        right.data[place_] = wrong  # unseen by autograd
        with pytest.raises(IndexError, match=rf"is {wrong}, but weight has {rows} rows"):
            out.sum().backward()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("tables", [None, 3])
@pytest.mark.parametrize("padding", [0, 3, -7, None])
def test_the_sparse_gradient_has_the_bits_of_the_dense(
    tables: int | None, padding: int | None, dtype: torch.dtype, generator: torch.Generator
) -> None:
    shape = (50, 6) if tables is None else (tables, 50, 6)
    weight = torch.randn(shape, generator=generator, dtype=dtype)
    temporal = torch.randn(*shape[:-2], 4, 6, generator=generator, dtype=dtype)
    tokens = torch.randint(0, 9, (2, 4, 5), generator=generator, dtype=torch.int32) * 5
    if padding is not None:
        tokens[tokens == 5] = padding
    grads = []
    for sparse in (False, True):
        leaves = [x.clone().requires_grad_() for x in (weight, temporal)]
        out = encode_memory(
            tokens, leaves[0], temporal=leaves[1], padding_idx=padding, sparse=sparse
        )
        (out * torch.arange(6).to(dtype)).sum().backward()
        grads.append((out, *(leaf.grad for leaf in leaves)))
    for dense, sparse_ in zip(*grads, strict=True):
        assert torch.equal(dense, sparse_.to_dense())
    gradient = grads[1][1]
    assert gradient.is_sparse
    words_read = set(tokens.flatten().tolist()) - {padding}
    assert gradient._nnz() == len(words_read) * (tables or 1)
    once = gradient.coalesce()
    assert once._nnz() == gradient._nnz()
    torch.sparse_coo_tensor(once.indices(), once.values(), shape, check_invariants=True)


def test_a_sparse_gradient_trains(generator: torch.Generator) -> None:
    tokens = torch.randint(1, 9, (2, 4, 5), generator=generator)
    trained = []
    for sparse in (False, True):
        weight = torch.ones(30, 6, requires_grad=True)
        optimizer = torch.optim.Adagrad([weight], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            encode_memory(tokens, weight, sparse=sparse).square().sum().backward()
            optimizer.step()
        trained.append(weight.detach())
    torch.testing.assert_close(*trained)


def test_sparse_of_nothing_and_of_padding() -> None:
    weight = torch.ones(4, 3, requires_grad=True)
    for tokens in (
        torch.zeros(2, 3, 4, dtype=torch.int64),
        torch.zeros(0, 3, 4, dtype=torch.int64),
    ):
        out = encode_memory(tokens, weight, sparse=True)
        assert torch.equal(out, torch.zeros(len(tokens), 3, 3))
        out.sum().backward()
        assert weight.grad is not None
        assert weight.grad._nnz() == 0
        weight.grad = None


@pytest.mark.complete
def test_sparse_in_a_compiled_function(generator: torch.Generator) -> None:
    tokens = torch.randint(0, 9, (2, 4, 5), generator=generator)
    weight = torch.randn(30, 6, generator=generator, requires_grad=True)
    compiled = torch.compile(
        lambda tokens, weight: encode_memory(tokens, weight, sparse=True) * 2, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(tokens, weight), 2 * encode_memory(tokens, weight))


T3 = torch.zeros(2, 3, 4, dtype=torch.int64)
W = torch.zeros(5, 6)
BAD = [
    (([[[1]]], W), {}, TypeError, "tokens must be a Tensor, got list"),
    ((T3, [[1.0]]), {}, TypeError, "weight must be a Tensor, got list"),
    ((T3.float(), W), {}, TypeError, "tokens must be int64 or int32, got torch.float32"),
    ((T3, W.int()), {}, TypeError, "weight must be float32, float64, bfloat16 or float16"),
    ((T3[0], W), {}, ValueError, r"tokens must be \[B, N, J\], got shape \(3, 4\)"),
    ((T3, W[0]), {}, ValueError, r"weight must be \[V, D\] or \[G, V, D\], got shape \(6,\)"),
    ((T3, W.to("meta")), {}, ValueError, "tokens is on cpu, but weight is on meta"),
    ((T3, W), {"padding_idx": 1.0}, TypeError, "padding_idx must be an integer or None"),
    ((T3, W), {"padding_idx": True}, TypeError, "padding_idx must be an integer or None"),
    ((T3, W), {"sparse": 1}, TypeError, "sparse must be a bool, got int"),
    ((T3 + 5, W), {"sparse": True}, IndexError, r"tokens\[0, 0, 0\] is 5, but weight has 5 rows"),
    ((T3 - 1, W), {"sparse": True}, IndexError, "is -1, but weight has 5 rows"),
    ((T3, W), {"encoding": "pos"}, ValueError, "encoding must be one of position, centered, bow"),
    ((T3, W), {"encoding": None}, TypeError, "encoding must be a str or a Tensor"),
    ((T3, W), {"encoding": torch.ones(6, 4)}, ValueError, r"encoding must be \[J, D\] = \[4, 6\]"),
    ((T3, W), {"encoding": torch.ones(4, 6).int()}, TypeError, "encoding must be floating"),
    ((T3, W), {"temporal": [1.0]}, TypeError, "temporal must be a Tensor or None, got list"),
    ((T3, W), {"temporal": torch.ones(3, 6).double()}, TypeError, "temporal is torch.float64"),
    ((T3, W), {"temporal": torch.ones(4, 6)}, ValueError, r"temporal must be \[N, D\] = \[3, 6\]"),
    ((T3, W[None]), {"temporal": torch.ones(3, 6)}, ValueError, r"\[G, N, D\] = \[1, 3, 6\]"),
]


test_errors = refuses(encode_memory, BAD)


# -- autograd, torch.func and torch.export --------------------------------------------------------


def inputs(tables: int | None, *lead: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, embeddings and temporal encoding of a memory, with leading dimensions `lead`."""
    draw = torch.Generator().manual_seed(5)
    table = () if tables is None else (tables,)
    tokens = torch.randint(0, 6, (*lead, 2, 3, 4), generator=draw)
    weight = torch.randn(*lead, *table, 6, 5, dtype=torch.float64, generator=draw)
    temporal = torch.randn(*lead, *table, 3, 5, dtype=torch.float64, generator=draw)
    return tokens, weight, temporal


def encode(tokens: Tensor, weight: Tensor, temporal: Tensor) -> Tensor:
    return encode_memory(tokens, weight, temporal=temporal)


def test_only_what_is_needed_is_saved(backend: str) -> None:
    tokens, weight, temporal = inputs(2)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda s: s):  # type: ignore[arg-type, return-value]
        encode(tokens, weight.requires_grad_(), temporal)
    assert sorted(s.numel() for s in saved) == [20, 24]  # factors and tokens


def test_only_the_temporal_rows_are_trained(backend: str) -> None:
    tokens, weight, temporal = inputs(2)
    temporal.requires_grad_()
    encode(tokens, weight, temporal).sum().backward()
    assert weight.grad is None
    assert temporal.grad is not None
    filled = (tokens != 0).any(-1).sum(0).double()  # sentences that have a word
    assert torch.equal(temporal.grad, filled[None, :, None].expand(2, 3, 5))


def test_tokens_are_checked_inside_transforms(backend: str) -> None:
    tokens, weight, temporal = inputs(2, 3)
    tokens[2, 1, 0, 0] = 6
    error = IndexError if backend == "cpu" else (IndexError, RuntimeError)
    with pytest.raises(error):
        vmap(encode)(tokens, weight, temporal)


def test_inference_mode_leaves_nothing_behind(backend: str) -> None:
    """Cached factors are ordinary tensors, even if inference mode made them."""
    tokens = torch.ones(1, 1, 13, dtype=torch.int64)
    weight = torch.randn(3, 17, requires_grad=True)
    with torch.inference_mode():
        encode_memory(tokens, weight)
    encode_memory(tokens, weight).sum().backward()
    assert weight.grad is not None
