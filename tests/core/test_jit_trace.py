"""Graphs of ``torch.jit.trace`` at sizes other than the traced ones: right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import fastattn
from fastattn import masks
from fastattn.bias import T5, Disentangled, Window2d

pytestmark = [
    pytest.mark.usefixtures("seeded"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning"),
]
draw = torch.Generator().manual_seed(0)


def normal(*size: int) -> Tensor:
    return torch.randn(size, generator=draw)


def traced(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Any:
    return torch.jit.trace(function, inputs, check_trace=False)


def assert_follows_sizes(
    function: Callable[..., Any], of_trace: tuple[Tensor, ...], *others: tuple[Tensor, ...]
) -> None:
    """A traced function must be right for inputs of other sizes."""
    graph = traced(function, of_trace)
    for inputs in (of_trace, *others):
        assert_close(graph(*inputs), function(*inputs))


def qkv(q_len: int, k_len: int, batch: int = 1, width: int = 8) -> tuple[Tensor, ...]:
    sizes = (4, q_len), (2, k_len), (2, k_len)
    return tuple(normal(batch, heads, n, width) for heads, n in sizes)


ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (2, 1)},
    "alibi": {"alibi_slopes": normal(4).abs()},
    "relative bias": {"relative_bias": normal(4, 39)},
    "T5": {"relative_bias": T5(normal(32, 4), True, 128)},
    "disentangled": {"relative_bias": Disentangled(normal(9, 2, 8), normal(9, 4, 8), normal(4, 8))},
    "softcap and sinks": {"softcap": 2.0, "sinks": normal(4)},
    "weights": {"need_weights": True, "return_lse": True},
}


@pytest.mark.parametrize("alignment", ["upper_left", "bottom_right"])
@pytest.mark.parametrize("options", list(ATTENTION))
def test_attention(options: str, alignment: str, choice: str) -> None:
    def call(*x: Tensor) -> Any:
        more = {"causal_alignment": alignment, "enable_gqa": True}
        return fastattn.scaled_dot_product_attention(*x, **ATTENTION[options], **more)

    others = () if options == "disentangled" else (qkv(7, 9, width=6),)
    assert_follows_sizes(call, qkv(4, 4), qkv(1, 9), qkv(6, 3), qkv(5, 5, batch=3), *others)


@pytest.mark.parametrize("options", ["causal", "T5", "disentangled"])
def test_gradients_of_a_graph(options: str, backend: str) -> None:
    def call(*x: Tensor) -> Any:
        more = {"causal_alignment": "bottom_right", "enable_gqa": True}
        return fastattn.scaled_dot_product_attention(*x, **ATTENTION[options], **more)

    graph = traced(call, qkv(4, 4))
    leaves = [x.requires_grad_() for x in qkv(2, 9)]
    got, want = (torch.autograd.grad(f(*leaves).sin().sum(), leaves) for f in (graph, call))
    assert_close(got, want)


@pytest.mark.parametrize(
    "options", ["plain", "causal", "window", "relative bias", "T5", "disentangled"]
)
def test_packed_sequences(options: str, backend: str) -> None:
    def call(q: Tensor, k: Tensor, starts: Tensor, others: Tensor) -> Any:
        more = {"causal_alignment": "bottom_right"}
        return fastattn.varlen_attention(q, k, k, starts, others, **ATTENTION[options], **more)

    def inputs(q: list[int], k: list[int]) -> tuple[Tensor, ...]:
        return normal(q[-1], 4, 8), normal(k[-1], 2, 8), torch.tensor(q), torch.tensor(k)

    same = inputs([0, 2, 5], [0, 2, 5])
    others = inputs([0, 1, 3], [0, 9, 12]), inputs([0, 1, 4, 9], [0, 3, 9, 11])
    assert_follows_sizes(call, same, *others)


@pytest.mark.parametrize("options", ["causal", "window", "alibi", "relative bias", "T5"])
def test_caches(options: str, backend: str) -> None:
    def call(q: Tensor, cache: Tensor, lengths: Tensor) -> Any:
        return fastattn.decode_attention(q, cache, cache, lengths, **ATTENTION[options])

    assert_follows_sizes(
        call,
        (normal(2, 4, 1, 8), normal(2, 2, 8, 8), torch.tensor([3, 5])),
        (normal(3, 4, 2, 8), normal(3, 2, 19, 8), torch.tensor([9, 17, 2])),
    )


@pytest.mark.parametrize("method", ["dot", "concat"])
def test_local_windows(method: str) -> None:
    weight = (normal(5, 16), normal(5)) if method == "concat" else None

    def call(q: Tensor, k: Tensor, positions: Tensor) -> Any:
        options = {"method": method, "weight": weight, "window": "local-p", "D": 2}
        return fastattn.luong_attention(q, k, k, positions=positions, need_weights=True, **options)

    def inputs(batch: int, q_len: int, k_len: int) -> tuple[Tensor, ...]:
        positions = torch.rand(batch, q_len, generator=draw) * k_len
        return normal(batch, q_len, 8), normal(batch, k_len, 8), positions

    assert_follows_sizes(call, inputs(2, 4, 9), inputs(3, 7, 20), inputs(1, 2, 3))


def test_dropout_draws_again_in_each_run() -> None:
    graph = traced(
        lambda *x: fastattn.scaled_dot_product_attention(*x, dropout_p=0.5, enable_gqa=True),
        qkv(4, 4),
    )
    inputs = qkv(30, 30)
    torch.manual_seed(1)
    first, second = graph(*inputs), graph(*inputs)
    torch.manual_seed(1)
    assert torch.equal(graph(*inputs), first)
    assert not torch.equal(first, second)


def test_a_window_keeps_its_number_of_keys() -> None:
    bias = Window2d(normal(9, 4), (2, 2))
    call = lambda *x: fastattn.scaled_dot_product_attention(  # noqa: E731
        *x, relative_bias=bias, enable_gqa=True
    )
    assert_follows_sizes(call, qkv(4, 4), qkv(3, 4, batch=2))
    with pytest.raises(RuntimeError, match="invalid for input of size 4"):
        traced(call, qkv(4, 4))(*qkv(4, 9))


def test_retrieval_that_stops_by_heads_is_refused() -> None:
    state, stored = normal(1, 1, 4, 8), normal(1, 1, 5, 8)
    call = lambda *x: fastattn.hopfield_retrieve(  # noqa: E731
        *x, stop="head", update_steps_max=3
    )
    with pytest.raises(RuntimeError, match=r"stop='head': use torch\.export or torch\.compile"):
        traced(call, (state, stored))


def test_stats_at_the_last_keys_are_refused() -> None:
    def call(query: Tensor, key: Tensor) -> Tensor:
        options = {"is_causal": True, "causal_alignment": "bottom_right"}
        return fastattn.attention_stats(query, key, **options).lse

    with pytest.raises(RuntimeError, match=r"bottom_right': use torch\.export or torch\.compile"):
        traced(call, (normal(1, 2, 4, 8), normal(1, 2, 6, 8)))


# --- masks ---------------------------------------------------------------------------------------

MASKS = {
    "causal": masks.causal(),
    "not causal": ~masks.causal() | masks.chunked(2),
    "window": masks.sliding_window(2, 1) & masks.causal(),
    "chunks": masks.causal() | masks.chunked(3),
    "prefix": masks.prefix_lm(2) | masks.sliding_window(1, 0),
}


@pytest.mark.sampled
@pytest.mark.parametrize("alignment", ["upper_left", "bottom_right"])
@pytest.mark.parametrize("mask", list(MASKS))
def test_masks_of_positions(mask: str, alignment: str, backend: str) -> None:
    options = {"mask": MASKS[mask], "causal_alignment": alignment}
    assert_follows_sizes(
        lambda *x: fastattn.scaled_dot_product_attention(*x, enable_gqa=True, **options),
        qkv(4, 4), qkv(1, 9), qkv(70, 130), qkv(5, 3, batch=3),
    )  # fmt: skip
    rows, more = normal(5, 2, 8), normal(90, 2, 8)
    assert_follows_sizes(
        lambda x, starts: fastattn.varlen_attention(x, x, x, starts, starts, **options),
        (rows, torch.tensor([0, 2, 5])),
        (more, torch.tensor([0, 70, 90])),
        (more, torch.tensor([0, 7, 20, 90])),
    )
    assert_follows_sizes(
        lambda q, cache, n: fastattn.decode_attention(q, cache, cache, n, mask=MASKS[mask]),
        (normal(2, 2, 1, 8), normal(2, 2, 8, 8), torch.tensor([3, 5])),
        (normal(3, 2, 2, 8), normal(3, 2, 90, 8), torch.tensor([9, 77, 2])),
    )


def test_masks_whose_numbers_enter_the_graph(backend: str) -> None:
    def of_documents(x: Tensor, ids: Tensor) -> Tensor:
        mask = masks.document(ids) | masks.causal()
        return fastattn.scaled_dot_product_attention(x, x, x, mask=mask)

    def ids(*size: int) -> Tensor:
        return torch.randint(0, 3, size, generator=draw)

    assert_follows_sizes(
        of_documents,
        (normal(2, 2, 4, 8), ids(2, 4)),
        (normal(2, 2, 70, 8), ids(2, 70)),
        (normal(3, 2, 3, 8), ids(3, 3)),
    )

    def of_prefixes(x: Tensor, starts: Tensor, lengths: Tensor) -> Any:
        mask = masks.prefix_lm(lengths)
        return fastattn.varlen_attention(x, x, x, starts, starts, mask=mask)

    assert_follows_sizes(
        of_prefixes,
        (normal(5, 2, 8), torch.tensor([0, 2, 5]), torch.tensor([1, 2])),
        (normal(9, 2, 8), torch.tensor([0, 4, 5, 9]), torch.tensor([3, 1, 2])),
    )

    def of_trees(q: Tensor, cache: Tensor, lengths: Tensor, tree: Tensor) -> Any:
        return fastattn.decode_attention(q, cache, cache, lengths, mask=masks.draft_tree(tree))

    def inputs(tokens: int, capacity: int, lengths: list[int]) -> tuple[Tensor, ...]:
        """Queries, a cache, its lengths and a tree of draft tokens."""
        tree = torch.randint(0, 2, (tokens, tokens), generator=draw).bool().tril()
        n = len(lengths)
        q, cache = normal(n, 2, tokens, 8), normal(n, 2, capacity, 8)
        return q, cache, torch.tensor(lengths), tree | torch.eye(tokens).bool()

    assert_follows_sizes(
        of_trees, inputs(3, 16, [3, 5]), inputs(5, 130, [9, 107]), inputs(70, 160, [90, 70, 75])
    )


def packed(*starts: int) -> tuple[Tensor, ...]:
    """Packed rows and where the sequences begin."""
    return normal(starts[-1], 2, 8), torch.tensor(starts)


def cached(q_len: int) -> tuple[Tensor, ...]:
    """Queries, a cache and its lengths."""
    return normal(2, 2, q_len, 8), normal(2, 2, 16, 8), torch.tensor([5, 7])


def varlen(mask: masks.Mask) -> Callable[..., Any]:
    return lambda x, starts: fastattn.varlen_attention(x, x, x, starts, starts, mask=mask)


def attend(mask: masks.Mask) -> Callable[..., Any]:
    return lambda *x: fastattn.scaled_dot_product_attention(*x, mask=mask, enable_gqa=True)


def decode(mask: masks.Mask) -> Callable[..., Any]:
    return lambda q, cache, n: fastattn.decode_attention(q, cache, cache, n, mask=mask)


IDS = torch.tensor([1, 1, 2, 2])
TREE = torch.ones(3, 3).bool().tril()
CONSTANTS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], tuple[Tensor, ...]]] = {
    "more rows than ids": (attend(masks.document(IDS)), qkv(4, 4), qkv(6, 6)),
    "fewer rows than ids": (attend(masks.document(IDS)), qkv(4, 4), qkv(3, 3)),
    "more rows than one id": (attend(masks.document(IDS[:1])), qkv(1, 1), qkv(6, 6)),
    "as many ids in fewer rows": (
        attend(masks.document(IDS.view(2, 2))), qkv(2, 2, batch=2), qkv(4, 4, batch=2)
    ),
    "more keys than ids": (attend(masks.document(IDS, IDS)), qkv(4, 4), qkv(4, 6)),
    "more sequences than prefixes": (
        attend(masks.prefix_lm(IDS[1:3])), qkv(4, 4, batch=2), qkv(4, 4, batch=3)
    ),
    "more packed rows than ids": (varlen(masks.document(IDS)), packed(0, 2, 4), packed(0, 2, 6)),
    "more packed sequences than prefixes": (
        varlen(masks.prefix_lm(IDS[1:3])), packed(0, 2, 4), packed(0, 2, 4, 6)
    ),
    "fewer tokens than a tree": (decode(masks.draft_tree(TREE)), cached(3), cached(2)),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CONSTANTS))
def test_constants_of_a_mask_refuse_other_sizes(name: str) -> None:
    call, of_trace, others = CONSTANTS[name]
    graph = traced(call, of_trace)
    assert_close(graph(*of_trace), call(*of_trace))
    with pytest.raises(RuntimeError):
        graph(*others)


def test_blocks_of_a_mask_are_refused() -> None:
    mask = masks.from_function(lambda b, h, q, k: q >= k, None, None, 4, 4)
    with pytest.raises(
        RuntimeError, match=r"keep the lengths of mask=from_function.+torch\.export"
    ):
        traced(attend(mask), qkv(4, 4))


# --- modules -------------------------------------------------------------------------------------


def words(*size: int) -> Tensor:
    return torch.randint(0, 20, size, generator=draw)


@pytest.mark.parametrize("training", [False, True])
def test_an_encoder_with_padding(training: bool) -> None:
    layer = fastattn.nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)
    encoder = fastattn.nn.TransformerEncoder(layer, 2).train(training).requires_grad_(False)

    def inputs(*lengths: int) -> tuple[Tensor, Tensor]:
        real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        return normal(len(lengths), max(lengths), 16), ~real

    with torch.no_grad():
        call = lambda x, hidden: encoder(x, src_key_padding_mask=hidden)[~hidden]  # noqa: E731
        assert_follows_sizes(call, inputs(5, 3), inputs(9, 9, 4), inputs(2))


def test_a_transformer_of_tokens() -> None:
    model = fastattn.nn.Transformer(16, 4, 1, 1, 32, batch_first=True, vocab_size=20)
    model.eval().requires_grad_(False)
    with torch.no_grad():
        assert_follows_sizes(
            lambda source, target: model(source, target),
            (words(2, 5), words(2, 4)), (words(3, 9), words(3, 2)), (words(1, 1), words(1, 7)),
        )  # fmt: skip
