"""The arithmetic of the benchmark: FLOPs, statistics, and summarising rounds as rows."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from bench_results import TINY, a_result, cell_of

from fastattn.bench import cli, ops, results, summary
from fastattn.bench.cells import (
    Cell,
    bytes_touched,
    flops,
    make_inputs,
    visible_pairs,
)
from fastattn.bench.results import Round


def seen(cell: Cell, rows: range, queries: int, keys: int) -> list[tuple[int, int]]:
    """The visible pairs of the queries at these positions, one by one."""
    width = max(1, keys // 4)
    sees = {
        "causal": lambda i, j: j <= i,
        "documents": lambda i, j: 8 * i // queries == 8 * j // keys,
        "prefix": lambda i, j: j <= i or j < keys // 2,
        "window": lambda i, j: i - width <= j <= i,
    }.get(cell.mask, lambda i, j: True)
    pairs = [(i, j) for i, j in itertools.product(rows, range(keys)) if sees(i, j)]
    return [(i, j) for i, j in pairs if cell.option != "window" or abs(i - j) <= width]


@pytest.mark.parametrize(
    ("mask", "option"),
    [*((mask, "none") for mask in ops.get("sdpa").MASKS), ("none", "window"), ("causal", "window")],
)
@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 7), (7, 7), (1, 9)])
def test_work_is_counted_for_visible_pairs_only(
    mask: str, option: str, q_len: int, kv_len: int
) -> None:
    sizes = {**TINY.sizes, "Lq": q_len, "Lk": kv_len}
    cell = dataclasses.replace(TINY, mask=mask, option=option, sizes=sizes)
    drawn, visible = make_inputs(cell, 3).get("attn_mask"), seen(cell, range(q_len), q_len, kv_len)
    pairs = cell["B"] * len(visible)
    if mask == "padding":
        pairs = q_len * sum(cell.padded(kv_len))
    elif mask == "bool":
        assert drawn is not None
        pairs = cell["B"] * int(drawn.sum())
    assert visible_pairs(cell, 3) == pairs
    assert flops(cell, 3) == cell["H"] * pairs * (2 * 8 + 2 * 6)
    both = dataclasses.replace(cell, passes="fwd+bwd")
    assert flops(both, 3) == cell["H"] * pairs * (2 * 8 + 2 * 6 + 6 * 8 + 4 * 6)
    keys = [j for _, j in visible]
    unread = kv_len - (max(keys) + 1 - min(keys))
    width = cell["B"] * cell["Hkv"] * (cell["D"] + cell["Dv"])
    whole = dataclasses.replace(cell, option="none", mask="none")
    assert bytes_touched(whole) - bytes_touched(cell) == 4 * width * unread


@pytest.mark.parametrize("mask", ops.get("varlen").MASKS)
def test_pairs_of_sequences_and_caches_are_counted_within_each(mask: str) -> None:
    cell = cell_of("varlen", "B=3,H=2,L=29,S=5,D=4", mask=mask)
    lengths = make_inputs(cell, 0)["cu_seqlens_q"].diff().tolist()
    assert flops(dataclasses.replace(cell, mask="none")) == 32 * sum(n * n for n in lengths)
    for queries in (1, 3, 21):
        cell = cell_of("decode", f"B=2,H=4,Hkv=2,Lq={queries},Lk=21,D=4", mask=mask)
        pairs = seen(cell, range(21 - queries, 21), 21, 21)
        assert flops(cell) == 2 * 4 * 4 * 4 * len(pairs)


def test_flops_of_pairs_and_projections() -> None:
    assert flops(cell_of("sdpa", "H=1,L=1", passes="bwd")) == 10 * 64
    attention = 2 * 4 * 10 * 10 * 4 * 8
    assert flops(cell_of("mha", "B=2,L=10,E=32,H=4")) == 4 * 2 * 20 * 32 * 32 + attention


# Statistics


def test_median_interval_ends_at_binomial_quantiles() -> None:
    for count, cut in ((1, 0), (2, 0), (6, 0), (8, 0), (9, 1), (11, 1), (12, 2), (15, 3), (25, 7)):
        samples = [float(n) for n in range(1, count + 1)]
        assert results.median_interval(samples[::-1]) == (1 + cut, count - cut)
    assert results.median_interval([2.0] * 4) == pytest.approx((2, 2))
    low, high = results.median_interval([1.0, 2.0, 4.0])  # 2 times and over 2^(4.303 / sqrt(3))
    assert (low, high) == pytest.approx((2 / 5.595, 2 * 5.595), rel=1e-3)
    assert results.median_interval([0.0] * 3) == (0, 0)


# From rounds to rows

FASTER = {"torch": 4.0, "ours": 2.0}


def rows_of(*rounds: Round) -> list[summary.Row]:
    """The table of a result with the given rounds."""
    return summary.summarise(a_result([*rounds]))


def test_metrics_of_known_rounds() -> None:
    torch_row, ours = rows_of(*[Round((1e3, 990.0), FASTER)] * 5)
    expected = {"ms": 2, "gflops": 500, "percent_of_peak": 50, "peak_gflops": 1e3, "speedup": 2}
    assert {name: ours[name] for name in expected} == pytest.approx(expected)
    assert (ours["verdict"], ours["rounds"], torch_row["speedup"]) == ("FASTER", 5, None)
    assert rows_of(*[Round((1e3, 990.0), FASTER)] * 2)[1]["verdict"] == "UNSURE"  # too few
    # The machine slows down by 10 in the middle; both do, and the ratio does not notice.
    row = rows_of(*(Round((1.0, 1.0), {"torch": 2 * x, "ours": x}) for x in (1.0, 10.0) * 3))[1]
    assert (row["speedup"], row["speedup_low"], row["speedup_high"]) == (2, 2, 2)


def test_rounds_of_a_busy_machine_are_discarded_and_counted() -> None:
    quiet, slow = [Round((100.0, 98.0), FASTER)] * 4, {"torch": 40.0, "ours": 2.0}
    busy = [Round((100.0, 60.0), slow)] * 3 + [Round((70.0, 70.0), slow)] * 2
    row = rows_of(*quiet, *busy, Round((100.0, 98.0), slow, share=0.7))[1]
    assert (row["rounds"], row["discarded"], row["busy"]) == (4, 6, False)
    assert row["speedup"] == 2.0


def test_verdicts_of_a_busy_machine_are_marked() -> None:
    result = a_result([Round((100.0, 50.0), FASTER)] * 6)
    rows = summary.summarise(result)
    assert rows[1]["busy"]
    assert (rows[1]["verdict"], rows[1]["comparable"]) == ("FASTER", False)
    assert summary.lines(rows, ["time"])[2][4] == "busy 2"
    text = " ".join(summary.closing(result, rows))
    assert "2 rows are busy" in text
    assert "1 speed-ups are of disturbed rounds" in text


def test_shares_use_the_peak_measured_in_the_same_round() -> None:
    """The clock slows down in the middle of a cell; another process takes half the bandwidth."""
    fast = [Round((1e3, 1e3), {"torch": 4.0, "ours": 1.25})] * 3
    slow = [Round((800.0, 790.0), {"torch": 5.0, "ours": 1.25 * 1e3 / 800})] * 3
    row = rows_of(*fast, *slow)[1]
    assert (row["rounds"], row["busy"]) == (6, False)
    for name in ("percent_of_peak", "percent_low", "percent_high"):
        assert row[name] == pytest.approx(80)
    alone = [Round((1e3, 1e3), FASTER, read=40.0)] * 3
    shared = [Round((1e3, 1e3), {"torch": 8.0, "ours": 4.0}, read=20.0)] * 3
    result = a_result([*alone, *shared])
    result.environment["last_cache"] = 1  # all data comes from memory
    touched = result.cells[0].bytes_touched
    share = summary.summarise(result)[1]["percent_of_bandwidth"]
    assert share == pytest.approx(100 * touched / 2e-3 / 40e9)


def test_a_rate_above_the_measured_peak_is_impossible(capsys: pytest.CaptureFixture[str]) -> None:
    result = a_result(rounds := [Round((400.0, 390.0), FASTER)] * 3)
    rows = torch_row, ours = summary.summarise(result)
    assert ours["impossible"]
    assert not torch_row["impossible"]
    assert "IMPOSSIBLE" in summary.table([ours])
    assert "1 IMPOSSIBLE" in " ".join(summary.closing(result, rows))
    assert cli.exit_code("complete", rows) == cli.FAULTS
    assert cli.exit_code("complete", rows[:1]) == cli.OK
    printed = capsys.readouterr().err
    assert "ours ran at 125 % of the peak measured beside it, 95 % interval 125 to 125 %" in printed
    assert not summary.summarise(a_result(rounds, method="torch.mm estimate"))[1]["impossible"]
    result.environment["cpu_flags"] = ["avx512f", "amx_bf16"]  # multiplies bf16 parts
    assert not summary.summarise(result)[1]["impossible"]
    # Above the peak within the interval
    within = [Round((490.0, 490.0), {"torch": 4.0, "ours": ms}) for ms in (2.0, 2.01, 2.05, 2.1)]
    row = rows_of(*within)[1]
    assert row["percent_low"] < 100 < row["percent_high"]
    assert not row["impossible"]
