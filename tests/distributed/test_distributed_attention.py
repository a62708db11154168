"""Attention over ranks against attention on one process, and its layouts and plans."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import rank_group
import torch
from distributed_cases import (
    CASES,
    MASKS,
    RANDOM_CASES,
    REFERENCE_CASES,
    Case,
    L,
    definition,
    generator,
    joined,
    layout_of,
    whole,
)
from distributed_runs import check_cases
from within_bound import assert_right

import fastattn
from fastattn.distributed import Layout, Share, plan


def check_attention(case: Case, parts: list[dict[str, torch.Tensor]]) -> None:
    """The joined results of all ranks must be within the error bound."""
    total = joined(case, parts)
    assert_right(total, lambda: definition(case), case.dtype)
    if case.method == "ulysses":  # one call for all rows and keys, as on one process
        check_same_bits(case, total)


def check_groups(groups: list[list[Any]], cases: Sequence[Case]) -> None:
    """Check the results of all cases, by group of ranks and rank."""
    for group in groups:
        check_cases(group, [case for case in cases if case.fits(len(group))], check_attention)


def check_same_bits(case: Case, found: dict[str, torch.Tensor]) -> None:
    """The forward has the bits of one process."""
    given = {n: x.clone() for n, x in whole(case).items() if not n.startswith("grad")}
    if case.slopes == "differentiated":  # by the reference, there as here
        given["alibi_slopes"].requires_grad_()
    mask = MASKS[case.mask]() if case.mask else None
    out, lse = fastattn.scaled_dot_product_attention(
        **given,
        **case.options,
        **generator(case),
        mask=mask,
        enable_gqa=case.heads[0] != case.heads[1],
        return_lse=True,
    )
    assert torch.equal(found["out"], out), "out has other bits than on one process"
    assert torch.equal(found["lse"], lse), "lse has other bits than on one process"


@pytest.mark.parametrize("numbers", [(3,), pytest.param((1, 2, 4), marks=pytest.mark.complete)])
def test_every_case(tmp_path: Path, numbers: tuple[int, ...]) -> None:
    jobs = [("distributed_cases:run_cases", ranks) for ranks in numbers]
    check_groups(rank_group.run(tmp_path, jobs), CASES)


@pytest.mark.complete
def test_modules_and_traffic_on_four_ranks(tmp_path: Path) -> None:
    names = ["distributed_uses:run_uses", "distributed_counts:run_counts"]
    names.append("distributed_counts:run_memories")
    every = rank_group.run(tmp_path, [(name, 4) for name in names])
    assert all(result is not None for group in every for result in group)
    uses, counts, memories = every
    for found in uses:
        check_pairs(found)
    for found in counts:
        check_counts(found)
    for found in memories:
        for name, (sent, wanted) in found.items():
            assert sent == wanted, f"{name}: {sent} bytes, {wanted} expected"


def check_pairs(uses: dict[str, list[tuple[torch.Tensor, torch.Tensor]]]) -> None:
    """Both tensors of each pair must be close."""
    for name, pairs in uses.items():
        for found, want in pairs:
            torch.testing.assert_close(found, want, msg=lambda text, name=name: f"{name}: {text}")


def check_counts(found: dict[str, tuple[Share, Share, list[str]]]) -> None:
    """Traffic and work are as planned, and a ring sends while it computes."""
    for name, (counted, planned, trace) in found.items():
        assert counted == planned, f"{name}: counted {counted}, planned {planned}"
        if "ring" not in name:
            continue
        for passing in ("forward", "backward"):
            steps = [line for line in trace if line.endswith(f"the {passing} ring")]
            for start, end in zip(steps[::2], steps[1::2], strict=True):
                assert (start[:5], end[:3], start[6:]) == ("start", "end", end[4:])
    everything = found["counts-ring"][2]
    for step in range(1, 4):
        name = f"step {step} of 4 of the forward ring"
        within = everything[everything.index(f"start {name}") : everything.index(f"end {name}")]
        assert within.count("compute") == 1, everything


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compiled", "inductor"])
def test_within_a_compiled_function(name: str, tmp_path: Path) -> None:
    (found,) = rank_group.run(tmp_path, [(f"distributed_uses:{name}", 4)], seconds=120)
    for pairs in found:
        check_pairs({name: pairs})


@pytest.mark.slow
def test_the_reference(tmp_path: Path) -> None:
    jobs = [("distributed_cases:run_reference_cases", ranks) for ranks in (2, 3, 4)]
    check_groups(rank_group.run(tmp_path, jobs, seconds=120), REFERENCE_CASES)


@pytest.mark.slow
def test_random_cases(tmp_path: Path) -> None:
    jobs = [("distributed_cases:run_random_cases", ranks) for ranks in (2, 3, 4, 5)]
    check_groups(rank_group.run(tmp_path, jobs, seconds=120), RANDOM_CASES)


# --- layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[4, 4], [5, 0, 3], [1], [0, 0], [2, 7, 4, 1]])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_a_layout_holds_every_position_once(kind: str, lengths: list[int]) -> None:
    layout = getattr(Layout, kind)(lengths)
    positions = [layout.positions(rank) for rank in range(len(lengths))]
    assert [x.numel() for x in positions] == list(layout.lengths) == lengths
    assert torch.cat(positions).sort().values.tolist() == list(range(sum(lengths)))
    assert Layout.of_positions(positions) == layout


def test_runs_are_as_long_as_possible() -> None:
    layout = Layout.of_positions([torch.tensor([3, 4, 0, 1, 2]), torch.tensor([5, 6])])
    assert [tuple(run) for run in layout.runs[0]] == [(0, 3, 2), (2, 0, 3)]
    assert [tuple(run) for run in layout.runs[1]] == [(0, 5, 2)]


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([[0, 1], [1, 2]], "position 1 is held twice"),
        ([[0, 1], [3]], "position 2 is missing"),
        ([[1], [2]], "position 0 is missing"),
    ],
)
def test_positions_must_be_complete(positions: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout.of_positions([torch.tensor(x) for x in positions])


def test_wrong_layouts() -> None:
    with pytest.raises(ValueError, match="lengths must not be negative"):
        Layout.zigzag([2, -1])
    with pytest.raises(TypeError, match="'lengths' must be a sequence of ints, not int"):
        Layout.contiguous(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="positions must be 1-D and int32 or int64"):
        Layout.of_positions([torch.zeros(2)])


# --- plans ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (0, 0), (7, 3), (-1, 4), (2, -1)])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "shuffled"])
def test_a_plan_counts_the_visible_pairs(layout: str, window: tuple[int, int]) -> None:
    found = layout_of(Case("", layout=layout, lengths="uneven"), 4)
    left, right = window
    every = torch.arange(L)
    shares = plan(found, heads=3, head_dim=2, value_dim=5, window=window).shares["ring"]
    for rank, share in enumerate(shares):
        distance = found.positions(rank)[:, None] - every
        seen = torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            seen &= distance <= left
        if right >= 0:
            seen &= -distance <= right
        assert share.flops == int(seen.sum()) * 2 * (2 + 5) * 3


def test_a_plan_of_four_ranks() -> None:
    n, heads, kv_heads, width, length = 4, 8, 4, 64, 128
    layout = Layout.contiguous([length] * n)
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": width}
    found = plan(layout, **sizes)
    keys, queries = (2 * length * h * width * 2 for h in (kv_heads, heads))  # bytes of a rank
    assert {s.received for s in found.shares["ring"]} == {(n - 1) * keys}
    assert {s.sent for s in found.shares["allgather"]} == {(n - 1) * keys}
    lse = length * heads * 8
    heads_for_rows = (n - 1) * (keys + queries + lse) // n
    assert {(s.sent, s.received) for s in found.shares["ulysses"]} == {(heads_for_rows,) * 2}
    assert found.method == "ulysses"
    assert "ulysses" in str(found).splitlines()[3]
    assert "<- auto" in str(found).splitlines()[3]

    both = plan(layout, **sizes, backward=True)
    assert both.shares["ring"][0].received == (n - 1) * keys * 4  # keys twice, float32 gradients
    assert both.shares["ulysses"][0].received == heads_for_rows * 2
    flops = {name: shares[0].flops for name, shares in found.shares.items()}
    for name in flops:
        assert both.shares[name][0].flops * 2 == flops[name] * 7

    near = plan(layout, **sizes, window=(16, 0))
    assert [s.received for s in near.shares["ring"]] == [0, keys, keys, keys]
    assert near.method == "ring" if keys < heads_for_rows else "ulysses"
    assert "ulysses" not in plan(layout, heads=6, head_dim=8).shares


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_a_plan_of_many_ranks(kind: str) -> None:
    """Planning takes less than a second of CPU time; a window of one block needs the same bytes."""
    layout = getattr(Layout, kind)([1024 + rank % 3 for rank in range(4096)])
    begin = time.process_time()
    shares = plan(layout, heads=8, head_dim=64, is_causal=True).shares["ring"]
    assert time.process_time() - begin < 3  # a second, on a machine with other work
    total = layout.total
    assert sum(share.flops for share in shares) == total * (total + 1) // 2 * 2 * (64 + 64) * 8


def test_zigzag_balances_causal_work() -> None:
    for lengths in ([512] * 8, [512, 500, 490, 512]):
        shares = plan(Layout.zigzag(lengths), heads=3, head_dim=8, is_causal=True).shares["ring"]
        assert sum(share.idle for share in shares) / len(shares) < 0.05
    contiguous = plan(Layout.contiguous([512] * 8), heads=3, head_dim=8, is_causal=True)
    idle = [share.idle for share in contiguous.shares["ring"]]
    assert math.isclose(sum(idle) / 8, 1 - 32 / 60, abs_tol=0.01)  # 32 of 8 times 7.5 blocks
