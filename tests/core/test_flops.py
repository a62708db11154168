"""FLOPs as ``torch.utils.flop_counter.FlopCounterMode`` counts them: of visible pairs."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

import fastattn
from fastattn import _flops, compat, library, masks
from fastattn.bias import Disentangled
from fastattn.integrations.torch import activate

pytestmark = pytest.mark.usefixtures("seeded")


def counted(call: Callable[[], Any]) -> dict[str, int]:
    """The FLOPs of each of our operators, and of all others together."""
    with FlopCounterMode(display=False) as counter:
        call()
    totals = {"others": 0}
    for operator, flops in counter.get_flop_counts().get("Global", {}).items():
        library_name, _, name = str(operator).partition(".")
        name = name if library_name == "fastattn" else "others"
        totals[name] = totals.get(name, 0) + flops
    return totals


def passes(call: Callable[..., Any], *tensors: Tensor) -> list[int]:
    """The products of our operators forward, and in backward."""
    leaves = [x.requires_grad_() for x in tensors]

    def run() -> Tensor:
        out = call(*leaves)
        return (out[0] if isinstance(out, tuple) else out).sum()

    forward, both = counted(run), counted(lambda: run().backward())
    forward.pop("others"), both.pop("others")
    return [sum(forward.values()), sum(both.values()) - sum(forward.values())]


def sdpa(**options: Any) -> Callable[..., Any]:
    return lambda q, k, v: fastattn.scaled_dot_product_attention(
        q, k, v, enable_gqa=True, **options
    )


B, H, LQ, LK, D, DV = 2, 4, 5, 9, 8, 6


@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize("window", [None, (-1, 0), (2, 1), (0, -1), (100, 100), (2**62, 2**62)])
def test_attention_counts_visible_pairs(
    window: tuple[int, int] | None, bottom_right: bool, backend: str
) -> None:
    alignment = "bottom_right" if bottom_right else "upper_left"
    left, right = window or (-1, -1)
    offset = LK - LQ if bottom_right else 0
    pairs = B * H * sum(
        (left < 0 or i + offset - j <= left) and (right < 0 or j - i - offset <= right)
        for i, j in itertools.product(range(LQ), range(LK))
    )  # fmt: skip
    tensors = torch.randn(B, H, LQ, D), torch.randn(B, 2, LK, D), torch.randn(B, 2, LK, DV)
    got = passes(sdpa(window=window, causal_alignment=alignment), *tensors)
    assert got == [pairs * (2 * D + 2 * DV), pairs * (6 * D + 4 * DV)]


def test_tables_of_relative_attention_count(backend: str) -> None:
    tensors = torch.randn(B, H, LQ, D), torch.randn(B, 2, LK, D), torch.randn(B, 2, LK, DV)
    table, pairs = torch.randn(5, H, D), B * H * LQ * LK
    for tables, count in (((table,), 1), ((table, table), 2)):
        got = passes(sdpa(relative_bias=Disentangled(*tables)), *tensors)
        forward, backward = 2 * D * (1 + count) + 2 * DV, 6 * D * (1 + count) + 4 * DV
        assert got == [pairs * forward, pairs * backward]
        x = torch.randn(3, 9, H, D).unbind(0)
        got = passes(varlen(torch.tensor([0, 3, 9]), relative_bias=Disentangled(*tables)), *x)
        assert got == [H * 45 * 2 * D * (2 + count), H * 45 * D * (10 + 6 * count)]


def test_a_backward_is_counted_after_an_uncounted_forward() -> None:
    """On the fast path, directly to a kernel; and with options."""
    x = torch.randn(1, 2, LQ, D, requires_grad=True)
    for options in ({}, {"softcap": 2.0}, {"dropout_p": 0.5}):
        out = sdpa(**options)(x, x, x)
        got = counted(out.sum().backward)["scaled_dot_product_attention_backward"]
        assert got == 2 * LQ * LQ * 10 * D


def test_masks_count_as_if_all_pairs_were_visible() -> None:
    """Their values are not read."""
    x = torch.randn(1, 2, LQ, D)
    for options in (
        {"attn_mask": torch.ones(LQ, LQ, dtype=torch.bool).tril()},
        {"mask": masks.causal()},
        {"dropout_p": 0.5},
        {"return_lse": True, "need_weights": True},
    ):
        y = x.detach()
        assert passes(sdpa(**options), x, y, y.clone()) == [
            2 * LQ * LQ * 4 * D, 2 * LQ * LQ * 10 * D
        ]  # fmt: skip


def varlen(starts: Tensor, **options: Any) -> Callable[..., Any]:
    return lambda q, k, v: fastattn.varlen_attention(q, k, v, starts, starts, **options)


def test_packed_sequences_count_their_own_pairs() -> None:
    starts = torch.tensor([0, 3, 3, 9])
    tensors = [torch.randn(9, H, D) for _ in range(3)]
    whole, causal = H * (9 + 36), H * (6 + 21)
    assert passes(varlen(starts), *tensors) == [whole * 4 * D, whole * 10 * D]
    assert passes(varlen(starts, is_causal=True), *tensors) == [causal * 4 * D, causal * 10 * D]


def test_caches_count_the_keys_that_they_hold() -> None:
    query, cache = torch.randn(2, H, 3, D), torch.randn(2, 2, 16, D)
    lengths, pad = torch.tensor([4, 10]), torch.tensor([0, 2])
    table = torch.tensor([[0], [1]], dtype=torch.int32)

    def decode(**options: Any) -> int:
        call = lambda: fastattn.decode_attention(query, cache, cache, lengths, **options)  # noqa: E731
        return counted(call)["decode_attention"]

    def causal(length: int) -> int:
        return sum(range(length - 2, length + 1))

    assert decode(is_causal=False) == H * 3 * (4 + 10) * 4 * D
    assert decode(is_causal=True) == H * (causal(4) + causal(10)) * 4 * D
    assert decode(is_causal=True, cache_leftpad=pad) == H * (causal(4) + causal(8)) * 4 * D
    assert decode(is_causal=False, block_table=table) == H * 3 * (4 + 10) * 4 * D
    new = torch.randn(2, 2, 3, D)
    appended = counted(
        lambda: fastattn.decode_attention(
            query, cache.clone(), cache.clone(), lengths, key=new, value=new, is_causal=False
        )
    )
    assert appended["append_to_cache"] == 0
    assert appended["decode_attention"] == H * 3 * (7 + 13) * 4 * D


def others() -> dict[str, tuple[Callable[..., Any], list[Tensor], list[int]]]:
    """Other operators: a call, its tensors, the operations of forward and backward."""
    x, rows = torch.randn(2, 5, D), torch.randn(2, 7, D)
    pairs, units = 2 * 5 * 7, torch.randn(D)
    tokens = torch.randint(0, 9, (2, 3, 4))
    windows, center = 2 * 5 * 5 * D, torch.full((2, 5), 3.0)
    return {
        "additive": (
            fastattn.additive_attention,
            [x, rows, torch.randn(2, 7, DV), units],
            [pairs * (4 * D + 2 * DV), pairs * (8 * D + 4 * DV)],
        ),
        "additive-causal": (
            lambda *y: fastattn.additive_attention(*y, is_causal=True),
            [x, rows, torch.randn(2, 7, DV), units],
            [2 * 15 * (4 * D + 2 * DV), 2 * 15 * (8 * D + 4 * DV)],
        ),
        "hops": (
            lambda *y: fastattn.memory_hop_attention(*y, hops=3),
            [x, rows, torch.randn(2, 7, D)],
            [3 * pairs * 4 * D, 3 * pairs * 10 * D],
        ),
        "hops-projected": (
            lambda *y: fastattn.memory_hop_attention(*y[:2], hops=3, hop_proj=y[2]),
            [x, rows, torch.randn(D, D)],
            [3 * (pairs * 4 * D + 10 * 2 * D * D), 3 * (pairs * 10 * D + 10 * 4 * D * D)],
        ),
        "local": (
            lambda *y: fastattn.luong_attention(*y, window="local-p", D=2, positions=center),
            [x, rows, torch.randn(2, 7, D)],
            [windows * 4, windows * 10],
        ),
        "encode-memory": (
            lambda y: fastattn.encode_memory(tokens, y),
            [torch.randn(9, D)],
            [2 * 3 * D * 9, 2 * 3 * D * 9],
        ),
        "hopfield": (  # two steps, and the final read
            lambda *y: fastattn.hopfield_retrieve(*y, update_steps_max=2),
            [x[:, None], rows[:, None]],
            [3 * pairs * 4 * D, 3 * pairs * 10 * D],
        ),
        "merge-states": (
            lambda a, b: fastattn.merge_states(a, a[..., 0], b, b[..., 0]),
            [x, torch.randn(2, 5, D)],
            [4 * x.numel(), 8 * x.numel()],
        ),
        "sinusoids": (fastattn.sinusoidal_encoding, [x], [2 * x.numel(), 0]),
    }


@pytest.mark.parametrize("name", list(others()))
def test_every_operator_counts(name: str, backend: str) -> None:
    call, tensors, flops = others()[name]
    assert passes(call, *tensors) == flops


def test_only_steps_taken_are_counted() -> None:
    """Without a limit, the first of two groups converges after one step."""
    stored = 100 * torch.eye(4)[None, None].repeat(2, 1, 1, 1)
    state = stored.clone()
    call = lambda: fastattn.hopfield_retrieve(state, stored, update_steps_max=None)  # noqa: E731
    assert counted(call)["hopfield_retrieve"] == 2 * 4 * 4 * 4 * 4


def test_every_operator_has_a_formula() -> None:
    packets = [operator.overloadpacket for operator in library.operators]
    packets.append(torch.ops.fastattn.append_to_cache)
    missing = [p for p in packets if p not in flop_counter.flop_registry]
    assert len(packets) > 15
    assert not missing


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_a_replaced_module_counts_as_pytorch_does(weights: bool, padded: bool) -> None:
    """With weights, where PyTorch computes by products that it counts itself.

    In backward it has stored the weights, which we recompute: 10 D a pair, not 8 D.
    """
    stock = nn.MultiheadAttention(16, 4, batch_first=True)
    ours = copy.deepcopy(stock)
    fastattn.replace_mha(ours)
    x = torch.randn(2, 6, 16, requires_grad=True)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2]) if padded else None

    def run(module: nn.Module, needed: bool) -> Tensor:
        return module(x, x, x, key_padding_mask=padding, need_weights=needed)[0]

    expected, got = counted(lambda: run(stock, True)), counted(lambda: run(ours, weights))
    assert sum(got.values()) == expected["others"]
    pairs = 2 * 4 * 6 * 6
    expected, got = (
        counted(run(*call).sum().backward) for call in ((stock, True), (ours, weights))
    )
    assert sum(got.values()) == expected["others"] + 2 * 4 * pairs
    for training, grad in itertools.product((True, False), repeat=2):
        ours.train(training)
        with torch.set_grad_enabled(grad):
            assert sum(counted(lambda: run(ours, weights)).values()) == pairs * 16 + 12 * 2 * 1024


def test_an_accelerated_call_counts() -> None:
    x = torch.randn(1, 2, 6, 8, requires_grad=True)
    call = torch.nn.functional.scaled_dot_product_attention
    with activate():
        got = counted(lambda: call(x, x, x).sum().backward())
    assert got["scaled_dot_product_attention"] == 2 * 36 * 4 * 8
    assert got["scaled_dot_product_attention_backward"] == 2 * 36 * 10 * 8


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_tensors_without_memory_count_as_others(kind: str) -> None:
    with torch.device("meta") if kind == "meta" else compat.tensors_without_memory():
        x, rows = torch.randn(1, 2, 6, 8), torch.randn(12, 2, 8)
        starts, lengths = torch.zeros(3, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        with torch.no_grad():
            assert sum(counted(lambda: sdpa(is_causal=True)(x, x, x)).values()) == 2 * 21 * 4 * 8
            # Lengths that nothing can read are equal, and caches are full.
            got = counted(lambda: varlen(starts)(rows, rows, rows))
            assert got["varlen_attention"] == 2 * 2 * 36 * 4 * 8
            got = counted(lambda: fastattn.decode_attention(x, x, x, lengths, is_causal=False))
            assert got["decode_attention"] == 2 * 36 * 4 * 8
            got = counted(lambda: fastattn.hopfield_retrieve(x, x, update_steps_max=2))
            assert got["hopfield_retrieve"] == 2 * 2 * 36 * 4 * 8


@pytest.mark.parametrize(("rows", "columns"), [(0, 4), (4, 0), (5, 9), (9, 5)])
def test_pairs_are_counted_exactly(rows: int, columns: int) -> None:
    for offset, left, right in itertools.product((-11, -2, 0, 4), (-1, 0, 3, 50), (-1, 0, 2, 50)):
        pairs = itertools.product(range(rows), range(columns))
        expected = sum(
            (left < 0 or i + offset - j <= left) and (right < 0 or j - i - offset <= right)
            for i, j in pairs
        )
        assert _flops.visible_pairs(rows, columns, offset, left, right) == expected
