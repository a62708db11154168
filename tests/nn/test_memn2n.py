"""MemN2N against its equations in plain PyTorch, and the contract of a module."""

from __future__ import annotations

import copy
import io
import pickle
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from case_table import refuses
from torch import Tensor
from within_bound import assert_right

from fastattn.nn import MemN2N, insert_empty_memories

pytestmark = pytest.mark.usefixtures("seeded")
EXAMPLE = Path(__file__).parents[2] / "examples/babi_plain.py"
PlainMemN2N = runpy.run_path(str(EXAMPLE))["PlainMemN2N"]
TYINGS = ["adjacent", "layerwise"]


def examples(batch: int = 4, slots: int = 7, words: int = 6) -> tuple[Tensor, Tensor]:
    """Stories of different lengths, of sentences of different lengths, and questions."""
    stories = torch.randint(1, 20, (batch, slots, words))
    for b in range(batch):
        stories[b, slots - b :] = 0
        stories[b, :, words - b :] = 0
    return stories, torch.randint(0, 20, (batch, words))


def pair(**options: Any) -> tuple[MemN2N, MemN2N]:
    """A network, and the same one in plain PyTorch."""
    ours, plain = (cls(20, 8, memory_size=9, **options).double() for cls in (MemN2N, PlainMemN2N))
    plain.load_state_dict(ours.state_dict())
    return ours, plain


@pytest.mark.parametrize("linear_start", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hops": 1, "encoding": "bow", "mask_empty": True},
        {"weight_tying": "layerwise", "encoding": "centered"},
        {"weight_tying": "layerwise", "activation": "relu", "temporal": False},
        {"temporal": False, "activation": "tanh", "hops": 2},
    ],
    ids=str,
)
def test_the_equations(backend: str, options: dict[str, Any], linear_start: bool) -> None:
    ours, plain = pair(**options)
    ours.linear_start = plain.linear_start = linear_start
    stories, questions = examples()
    logits, weights = ours(stories, questions, need_weights=True)
    want, want_weights = plain(stories, questions, need_weights=True)
    assert weights.shape == (4, ours.hops, 7)
    torch.testing.assert_close(logits, want)
    torch.testing.assert_close(weights, want_weights)
    assert torch.equal(ours(stories, questions), logits)
    (logits**2).sum().backward()
    (want**2).sum().backward()
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tying", TYINGS)
def test_within_the_bound(backend: str, tying: str, dtype: torch.dtype) -> None:
    exact_ours, exact = pair(weight_tying=tying, init_std=0.5)
    rounded = {name: p.to(dtype) for name, p in exact_ours.state_dict().items()}
    exact.load_state_dict(rounded)
    stories, questions = examples()
    network = MemN2N(20, 8, memory_size=9, weight_tying=tying, dtype=dtype)
    network.load_state_dict(rounded)
    logits = network(stories, questions)
    assert_right({"logits": logits}, lambda: {"logits": exact(stories, questions)})


def test_a_padded_story_gives_the_same_answer(backend: str) -> None:
    network = MemN2N(20, 8, mask_empty=True)
    stories, questions = examples()
    longer = torch.cat([stories, torch.zeros(4, 20, 6, dtype=torch.int64)], 1)
    torch.testing.assert_close(network(longer, questions), network(stories, questions))


@pytest.mark.parametrize("mask_empty", [False, True])
def test_an_empty_story_has_finite_results(backend: str, mask_empty: bool) -> None:
    network = MemN2N(20, 8, mask_empty=mask_empty)
    _, questions = examples()
    for slots in (0, 3):
        logits = network(torch.zeros(4, slots, 6, dtype=torch.int64), questions)
        logits.sum().backward()
        assert logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in network.parameters() if p.grad is not None)


def test_sparse_gradients_equal_dense_ones(backend: str) -> None:
    options: dict[str, Any] = {"weight_tying": "layerwise", "memory_size": 9}
    dense, sparse = MemN2N(500, 8, **options), MemN2N(500, 8, sparse=True, **options)
    sparse.load_state_dict(dense.state_dict())
    tables = ["embedding", "question"]
    stories, questions = examples()
    for model in (dense, sparse):
        model(stories, questions).square().sum().backward()
    for name, p in sparse.named_parameters():
        expected = dense.get_parameter(name).grad
        assert p.grad is not None
        assert p.grad.is_sparse == (name in tables)
        assert torch.equal(p.grad.to_dense() if p.grad.is_sparse else p.grad, expected)


@pytest.mark.parametrize("tying", TYINGS)
def test_state_dict(tying: str) -> None:
    network = MemN2N(20, 8, hops=2, memory_size=9, weight_tying=tying)
    shapes = {name: tuple(p.shape) for name, p in network.state_dict().items()}
    if tying == "adjacent":
        assert shapes == {"embedding": (3, 20, 8), "temporal": (3, 9, 8)}
    else:
        assert shapes == {
            "embedding": (2, 20, 8),
            "temporal": (2, 9, 8),
            "question": (20, 8),
            "answer": (20, 8),
            "hop_proj": (8, 8),
        }
    file = io.BytesIO()
    torch.save(network.state_dict(), file)
    file.seek(0)
    other = MemN2N(20, 8, hops=2, memory_size=9, weight_tying=tying)
    other.load_state_dict(torch.load(file, weights_only=True))
    for twin in (other, copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        stories, questions = examples()
        assert torch.equal(twin(stories, questions), network(stories, questions))


def test_parameters_come_from_the_normal_distribution() -> None:
    network = MemN2N(500, 40, weight_tying="layerwise", init_std=0.1)
    for p in network.parameters():
        assert abs(float(p.detach().std()) - 0.1) < 0.01
        assert abs(float(p.detach().mean())) < 0.01


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tying", TYINGS)
def test_compiles_without_a_break(backend: str, tying: str) -> None:
    torch._dynamo.reset()
    network = MemN2N(20, 8, weight_tying=tying)
    stories, questions = examples()
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(stories, questions), network(stories, questions))


def test_empty_memories_keep_the_order() -> None:
    stories = torch.zeros(2000, 10, 2, dtype=torch.int64)
    lengths = torch.randint(0, 11, (2000,))
    for b, n in enumerate(lengths.tolist()):
        stories[b, :n] = torch.arange(1, n + 1).unsqueeze(-1)
    noisy = insert_empty_memories(stories, 0.2, limit=12)
    assert noisy.shape == (2000, 12, 2)
    filled = noisy[..., 0] > 0
    assert torch.equal(filled.sum(1), lengths)
    span = filled.long() * torch.arange(1, 13)
    inserted = (span.amax(1) - lengths).clamp(min=0)
    assert (inserted <= (0.2 * lengths).ceil()).all()
    assert set(inserted[lengths == 10].tolist()) == {0, 1, 2}
    for b, n in enumerate(lengths.tolist()):
        assert noisy[b][filled[b]][:, 0].tolist() == list(range(1, n + 1))
    # Empty places, a tenth, are uniformly distributed.
    full = noisy[lengths == 10][:, :10]
    empty = (full[..., 0] == 0).float().mean(0)
    assert float(empty.max() - empty.min()) < 0.15


def test_empty_memories_beyond_the_last_place_are_cut() -> None:
    stories = torch.arange(1, 6).view(1, 5, 1).expand(300, 5, 1)
    noisy = insert_empty_memories(stories, 0.4)
    assert noisy.shape == stories.shape
    assert (noisy[:, 0] <= 1).all()
    assert (noisy == 0).any()
    assert torch.equal(insert_empty_memories(stories, 0.0), stories)
    again = [
        insert_empty_memories(stories, 0.4, generator=torch.Generator().manual_seed(3))
        for _ in range(2)
    ]
    assert torch.equal(*again)
    assert insert_empty_memories(stories, 0.4, limit=9).shape == (300, 9, 1)


def test_random_noise_only_in_training(backend: str) -> None:
    network = MemN2N(20, 8, memory_size=12, random_noise=1.0)
    stories, questions = examples()
    first, second = (network(stories, questions) for _ in range(2))
    assert not torch.equal(first, second)
    network.eval()
    assert torch.equal(network(stories, questions), network(stories, questions))


BAD = [
    ((0, 4), ValueError, "vocab_size must be at least 1, got 0"),
    ((4, 2.0), TypeError, "dim must be an int, got float"),
    ((4, 4), {"hops": 0}, ValueError, "hops must be at least 1"),
    ((4, 4), {"memory_size": True}, TypeError, "memory_size must be an int, got bool"),
    ((4, 4), {"weight_tying": "none"}, ValueError, "weight_tying must be one of adjacent"),
    ((4, 4), {"encoding": "pe"}, ValueError, "encoding must be one of position, centered, bow"),
    ((4, 4), {"random_noise": 1.5}, ValueError, "random_noise must be from 0 to 1"),
    ((4, 4), {"random_noise": "10%"}, TypeError, "random_noise must be a number"),
    ((4, 4), {"activation": "gelu"}, ValueError, "activation must be"),
    ((4, 4), {"sparse": 1}, TypeError, "sparse must be a bool, got int"),
    ((4, 4), {"sparse": True}, ValueError, "sparse=True needs weight_tying='layerwise'"),
]
test_constructor_errors = refuses(MemN2N, BAD)


def test_forward_errors() -> None:
    network = MemN2N(20, 8, memory_size=9)
    stories, questions = examples()
    with pytest.raises(ValueError, match="memory_size = 9, got shape"):
        network(stories.repeat(1, 2, 1), questions)
    with pytest.raises(ValueError, match=r"questions must be \[B, J\] = \[4, 6\], got shape"):
        network(stories, questions[:, :3])
    with pytest.raises(IndexError, match="but weight has 20 rows"):
        network(stories + 20, questions)
