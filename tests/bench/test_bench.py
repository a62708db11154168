"""The benchmark: its grammar, its arithmetic, its statistics, its check, its files."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bench_results import TINY, a_result, bench, cell_of, parse

import fastattn
from fastattn import dispatch
from fastattn.bench import cli, display, inputs, measuring, ops, selection, stats, summary
from fastattn.bench.cells import (
    MASKS,
    Cell,
    bytes_touched,
    flops,
    padding_lengths,
    visible_pairs,
)
from fastattn.bench.oracle import Oracle
from fastattn.bench.peaks import kind_of
from fastattn.bench.presets import PRESETS, preset_cells
from fastattn.bench.providers import PROVIDERS, fastattn_, load, torch_default
from fastattn.bench.providers.passes import leave
from fastattn.bench.results import Round
from fastattn.bench.shapes import parse_shapes, shape_text

# One small shape of each operator.
SMALL = {
    "sdpa": "B=2,H=4,Hkv=2,Lq=5,Lk=7,D=8,Dv=6",
    "mha": "B=2,L=6,E=16,H=2",
    "encoder_layer": "B=2,L=6,E=16,H=2,F=24",
    "encoder": "B=2,L=6,E=16,H=2,F=24",
    "decoder": "B=2,L=6,S=5,E=16,H=2,F=24",
    "varlen": "B=3,H=4,Hkv=2,L=12,D=8",
    "decode": "B=2,H=4,Hkv=2,Lq=2,Lk=9,D=8",
    "merge_states": "B=2,H=4,L=5,D=8",
    "additive": "B=2,Lq=5,Lk=7,A=9,Dv=6",
    "bahdanau": "B=2,Lq=5,Lk=7,E=9,A=6",
    "luong": "B=2,Lq=5,Lk=7,D=9,Dv=6,W=2",
    "attention_stats": "B=2,H=4,Hkv=2,Lq=5,Lk=7,D=8",
    "hopfield": "B=2,H=2,L=3,N=5,D=8,K=2",
    "hopfield_energy": "B=2,H=2,L=3,N=5,D=8",
    "memory_hops": "B=3,N=7,D=5,K=2",
    "encode_memory": "B=2,N=5,J=4,V=9,D=6",
    "memn2n": "B=2,N=5,J=4,V=9,D=6,K=2",
    "sinusoidal": "B=2,L=6,E=9",
    "learned": "B=2,L=5,E=6",
    "decoder_layer": "B=2,L=6,S=5,E=16,H=2,F=24",
    "transformer": "B=2,L=6,S=5,E=16,H=2,F=24",
    "hard": "B=2,H=4,Lq=5,Lk=7,D=8,Dv=6",
    "head_network": "B=2,H=3,L=5,D=4,F=6",
    "additive_module": "B=2,Lq=5,Lk=7,A=9",
    "luong_module": "B=2,Lq=5,Lk=7,D=9",
    "global_attention": "B=2,Lq=5,Lk=7,D=9",
    "hopfield_module": "B=2,L=3,N=5,E=16,H=2,K=2",
    "hopfield_layer": "B=2,L=3,N=5,E=16,H=2,K=2",
    "hopfield_pooling": "B=2,L=3,N=5,E=16,H=2,K=2",
    "key_value_memory": "B=2,L=3,N=5,D=8,Dv=6",
    "sinusoidal_table": "L=6,E=9",
    "positional": "B=2,L=6,E=9",
}


# Sizes that are 0 unless given, and memories of one for all.
MORE = [
    ("luong", SMALL["luong"] + ",P=1"),
    ("varlen", SMALL["varlen"] + ",S=2"),
    ("decode", SMALL["decode"] + ",P=3"),
    ("attention_stats", SMALL["attention_stats"] + ",K=3"),
    ("hopfield", SMALL["hopfield"] + ",S=1"),
]


# Shapes

SDPA, MHA = (ops.get(name).SIZES for name in ("sdpa", "mha"))


def test_shape_fills_in_what_is_left_out() -> None:
    assert parse_shapes("B=2,H=4,Lq=3,D=16", SDPA) == [
        {"B": 2, "H": 4, "Hkv": 4, "Lq": 3, "Lk": 3, "D": 16, "Dv": 16}
    ]
    assert parse_shapes("E=768,H=12,L=128", SDPA)[0]["D"] == 64
    assert parse_shapes("H=12,D=64,L=128", MHA) == [{"B": 1, "L": 128, "E": 768, "H": 12}]


def test_a_cache_has_one_query_unless_more_are_given() -> None:
    sizes = ops.get("decode").SIZES
    assert parse_shapes("Lk=64", sizes)[0]["Lq"] == 1
    assert parse_shapes("Lk=64", SDPA)[0]["Lq"] == 64
    (square,) = parse_shapes("Lq=64,Lk=64", sizes)
    assert parse_shapes(shape_text(square, sizes), sizes) == [square]
    assert {cell["Lq"] for cell in preset_cells("decode")} == {1}


def test_ranges_lists_and_references() -> None:
    assert [s["Lq"] for s in parse_shapes("Lq=128:1024:x2", SDPA)] == [128, 256, 512, 1024]
    assert [s["Lq"] for s in parse_shapes("Lq=100:250:+50", SDPA)] == [100, 150, 200, 250]
    assert [s["Lk"] for s in parse_shapes("Lq=1|3,Lk=Lq", SDPA)] == [1, 3]
    pairs = [(s["B"], s["Lq"]) for s in parse_shapes("B=1|2,L=8:16:x2", SDPA)]
    assert pairs == list(itertools.product((1, 2), (8, 16)))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("B", "'B'"),
        ("Q=3", "'Q'"),
        ("B=0", "B=0"),
        ("B=x", "B=x"),
        ("B=1,B=2", "B is given twice"),
        ("L=8,Lq=8", "either L or"),
        ("L=64:8:x2", "upwards"),
        ("L=8:64:x1", "upwards"),
        ("Lk=Lq", "Lq is not given"),
        ("E=10,H=4", "E=10"),
        ("E=64,H=4,D=8", "E=64"),
        ("B=1:1000:+1,L=1:1000:+1", "1000000 combinations"),
    ],
)
def test_wrong_shapes_name_what_is_wrong(text: str, named: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_shapes(text, SDPA)
    assert named in str(error.value)


@pytest.mark.parametrize("op", ops.OPS)
def test_a_shape_is_written_as_it_is_read(op: str) -> None:
    sizes = ops.get(op).SIZES
    shape = parse_shapes(SMALL[op], sizes)[0]
    assert parse_shapes(shape_text(shape, sizes), sizes) == [shape]


def test_shapes_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "shapes.txt"
    path.write_text("""# recorded
mha B=2,L=8|16,E=8,H=2 dtype=bf16 pass=fwd+bwd mask=padding weights=average  # layer 1

sdpa L=4
sdpa L=4 mask=causal option=softcap
""")
    cells = selection.cells_of(parse("run", "--shapes", f"@{path}", "--shapes", "additive L=3"))
    assert [c.name for c in cells] == [
        "mha B=2,L=8,E=8,H=2 bf16 fwd+bwd padding, average weights",
        "mha B=2,L=16,E=8,H=2 bf16 fwd+bwd padding, average weights",
        "sdpa B=1,H=8,L=4,D=64 fp32 fwd",
        "sdpa B=1,H=8,L=4,D=64 fp32 fwd causal, softcap",
        "additive B=8,L=3,A=256 fp32 fwd",
    ]
    assert cells[0].label == "layer 1"
    only = selection.cells_of(
        parse("run", "--shapes", f"@{path}", "--op", "sdpa", "--dtype", "fp16")
    )
    assert [c.name for c in only] == [
        "sdpa B=1,H=8,L=4,D=64 fp16 fwd",
        "sdpa B=1,H=8,L=4,D=64 fp16 fwd causal, softcap",
    ]
    other = selection.cells_of(parse("run", "--shapes", "sdpa L=4", "--option", "alibi"))
    assert [c.option for c in other] == ["alibi"]
    path.write_text("sdpa L=4\nmha L=4 mask\n")
    with pytest.raises(ValueError, match=r"shapes\.txt, line 2: .*'mask' does not belong"):
        selection.cells_of(parse("run", "--shapes", f"@{path}"))


# Grammar


def test_arguments_make_cells() -> None:
    args = parse("run", "--shapes", "B=1,H=2,L=8|16,D=4", "--dtype", "fp32,bf16", "--pass", "fwd")
    cells = selection.cells_of(args)
    assert [(c["Lq"], c.dtype) for c in cells] == [
        (8, "fp32"),
        (8, "bf16"),
        (16, "fp32"),
        (16, "bf16"),
    ]
    assert {c.op for c in cells} == {"sdpa"}


def test_a_preset_can_be_narrowed() -> None:
    cells = selection.cells_of(
        parse("run", "--preset", "bert", "--op", "mha", "--pass", "bwd", "--mask", "causal")
    )
    assert {(c.op, c.passes, c.mask) for c in cells} == {("mha", "bwd", "causal")}


def test_a_size_is_0_only_where_that_is_what_it_is_unless_given() -> None:
    (cell,) = selection.cells_of(parse("run", "--op", "luong", "--shapes", "L=4,P=0"))
    assert cell["P"] == 0
    with pytest.raises(ValueError, match="W=0 must be at least 1"):
        selection.cells_of(parse("run", "--op", "luong", "--shapes", "L=4,W=0"))


@pytest.mark.parametrize("op", ops.OPS)
def test_every_operator_has_a_preset_and_both_its_names(op: str) -> None:
    cells = selection.cells_of(parse("run", "--op", op))
    assert cells
    assert {c.op for c in cells} == {op}
    assert ops.resolve(ops.get(op).FUNCTION) == op


def test_every_operator_and_module_of_the_library_can_be_measured() -> None:
    tools = {"FallbackWarning", "__version__", "capture", "explain", "nn", "plot", "replace_mha"}
    tools |= {
        "restore_mha",
        "trace",
        "use_backend",
        "insert_empty_memories",
    }  # the last changes stories
    public = {*fastattn.__all__, *fastattn.nn.__all__} - tools
    assert {ops.get(op).FUNCTION.removeprefix("nn.") for op in ops.OPS} == public


@pytest.mark.parametrize("name", [*PRESETS, "all"])
def test_presets_are_cells_with_a_name_of_their_own(name: str) -> None:
    cells = preset_cells(name)
    assert len({c.name for c in cells}) == len(cells) > 0
    assert all(c.label for c in cells)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--dtype", "fp8"], "'fp8'"),
        (["--pass", "sideways"], "'sideways'"),
        (["--preset", "alexnet"], "'alexnet'"),
        (["--preset", "gpt", "--op", "mha"], "no cell"),
        (["--preset", "gpt", "--shapes", "L=4"], "either"),
        (["--shapes", "H=3,Hkv=2,L=4"], "Hkv=2"),
        (["--shapes", "mha E=10,H=4"], "E=10"),
        (["--shapes", "@/no/such/file"], "/no/such/file"),
        (["--shapes", "dtype=fp32"], "no KEY=VALUE"),
        (["--shapes", "L=4 dtype=fp8"], "'fp8'"),
        (["--op", "abacus"], "'abacus'"),
        (["--shapes", "decode", "--pass", "bwd"], "decode has fwd"),
        (["--shapes", "decode Lk=100,P=16"], "Lk=100 is not a multiple of P=16"),
        (["--shapes", "attention_stats L=8,K=9"], "K=9 is more than the Lk=8 keys"),
        (["--shapes", "varlen L=8,S=9"], "S=9, the shortest, is more than L=8"),
        (["--shapes", "hopfield B=4,S=2"], "S=2 must be 1 or B=4"),
        (["--shapes", "mha option=alibi"], "allowed for mha are none"),
        (["--shapes", "sdpa option=window mask=bias"], "option=window: with a bias mask"),
        (["--shapes", "sdpa Lq=9,Lk=8 option=window"], "option=window: Lq=9"),
        (["--shapes", "sdpa option=learnable"], "option=learnable: needs mask=bias"),
        (["--shapes", "transformer option=stepwise pass=fwd+bwd"], "no backward"),
        (["--op", "os.path"], "'os.path' has no OP"),
        (["--op", "sinusoidal", "--mask", "causal"], "allowed for sinusoidal are none"),
        (["--providers", "abacus"], "'abacus'"),
        (["--providers", "torch@avx2"], "variants of torch are torch@math"),
        (["--providers", "jax@"], "variants of jax are none"),
        (["--providers", "fastattn", "--baseline", "torch"], "'torch'"),
        (["--threads", "0"], "--threads 0"),
        (["--threads", "1000000"], "--threads 1000000: from 1 to"),
        (["--time-budget", "-1"], "--time-budget"),
        (["--time-budget", "nan"], "--time-budget nan"),
        (["--timeout", "inf"], "--timeout inf"),
        (["--rounds", "0"], "--rounds 0"),
        (["--plot", "picture.xyz"], "picture.xyz: the name must end with .png, .svg, .pdf"),
        (["--shapes", "@/"], "/: Is a directory"),
        (["--out", "/dev/null/out"], "/dev/null/out: Not a directory"),
        (["--resume"], "give the --out DIR"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("run", *arguments) == cli.USAGE
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--op", "--dtype", "--pass", "--providers", "--metric"])
@pytest.mark.parametrize("text", ["", " , "])
def test_a_list_that_names_nothing_is_refused(
    flag: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench("run", flag, text)
    assert ended.value.code == cli.USAGE
    assert f"argument {flag}: {text!r} names nothing" in capsys.readouterr().err


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench() == cli.USAGE
    printed = capsys.readouterr().err
    assert all(name in printed for name in ("run", "compare", "record", "list"))


def test_list_names_every_provider(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("list") == cli.OK
    printed = capsys.readouterr().out
    assert all(name in printed for name in [*PROVIDERS, *PRESETS])


# Arithmetic


def sees(cell: Cell, i: int, j: int, b: int, mask: torch.Tensor | None) -> bool:
    if cell.option == "window" and abs(i - j) > max(1, cell["Lk"] // 4):
        return False
    if cell.mask == "causal":
        return j <= i
    if cell.mask == "padding":
        return j < padding_lengths(cell["B"], cell["Lk"])[b]
    return bool(mask[i, j]) if mask is not None and cell.mask == "bool" else True


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 7), (7, 5), (1, 9)])
def test_flops_are_counted_for_visible_pairs_only(mask: str, q_len: int, kv_len: int) -> None:
    cell = dataclasses.replace(TINY, mask=mask, sizes={**TINY.sizes, "Lq": q_len, "Lk": kv_len})
    drawn = inputs.make_inputs(cell, 3).get("attn_mask")
    pairs = sum(
        sees(cell, i, j, b, drawn)
        for b in range(cell["B"])
        for _ in range(cell["H"])
        for i in range(q_len)
        for j in range(kv_len)
    )
    count = inputs.true_in_mask(cell, 3)
    assert cell["H"] * visible_pairs(cell, count) == pairs
    assert flops(cell, count) == pairs * (2 * 8 + 2 * 6)
    both = dataclasses.replace(cell, passes="fwd+bwd")
    assert flops(both, count) == pairs * (2 * 8 + 2 * 6 + 6 * 8 + 4 * 6)


def test_the_cells_of_a_shape_share_their_forward_pass() -> None:
    """By which the answers of one are found for the others; an option must not be in the way."""
    for option in ops.get("sdpa").OPTIONS:
        mask = "bias" if option == "learnable" else "none"
        cell = cell_of("sdpa", SMALL["sdpa"], option=option, mask=mask, passes="bwd")
        assert dataclasses.replace(cell, passes="fwd") != cell


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 7), (16, 16), (1, 9), (3, 3)])
def test_pairs_within_a_window_are_counted(mask: str, q_len: int, kv_len: int) -> None:
    sizes = {**TINY.sizes, "Lq": q_len, "Lk": kv_len}
    cell = dataclasses.replace(TINY, mask=mask, sizes=sizes, option="window")
    pairs = [(i, j) for i in range(q_len) for j in range(kv_len) if sees(cell, i, j, 0, None)]
    assert visible_pairs(cell) == cell["B"] * len(pairs)
    whole = dataclasses.replace(cell, option="none")
    unread = kv_len - len({j for _, j in pairs}) if mask == "none" else max(0, kv_len - q_len)
    width = cell["B"] * cell["Hkv"] * (cell["D"] + cell["Dv"])
    assert bytes_touched(whole) - bytes_touched(cell) == 4 * width * unread


def test_flops_per_pair_are_four_and_ten_times_d() -> None:
    cell = cell_of("sdpa", "H=1,L=1")
    assert flops(cell) == 4 * 64
    assert flops(dataclasses.replace(cell, passes="bwd")) == 10 * 64


def test_a_module_costs_its_projections_too() -> None:
    cell = cell_of("mha", "B=2,L=10,E=32,H=4")
    embed, tokens = 32, 20
    attention = 2 * 4 * 10 * 10 * 4 * 8
    assert flops(cell) == 4 * 2 * tokens * embed * embed + attention


def test_half_of_a_padded_batch_is_padding() -> None:
    cell = cell_of("sdpa", "B=16,H=1,L=256", mask="padding")
    assert sum(padding_lengths(16, 256)) == 16 * 128
    mask = inputs.make_inputs(cell, 0)["attn_mask"]
    assert mask.sum(-1).flatten().tolist() == padding_lengths(16, 256)


def test_packed_sequences_grow_by_a_factor_from_the_shortest() -> None:
    ends = inputs.make_inputs(cell_of("varlen", "B=4,H=1,L=800,S=100,D=1"), 0)["ends"]
    assert ends.diff().tolist() == [800, 400, 200, 100]
    ends = inputs.make_inputs(cell_of("varlen", "B=1,H=1,L=8,S=2,D=1"), 0)["ends"]
    assert ends.diff().tolist() == [8]


def test_pages_of_a_cache_are_in_random_order() -> None:
    cell = cell_of("decode", "B=3,H=2,Hkv=1,Lk=32,D=4,P=4")
    drawn = inputs.make_inputs(cell, 0)
    (_, keys, _), options = ops.get("decode").arguments(cell, drawn)
    table = options["block_table"].long()
    assert sorted(table.flatten().tolist()) == list(range(24)) != table.flatten().tolist()
    # [pages, Hkv, P, D]: those of a sequence, in its order, are its keys.
    assert torch.equal(keys[table].transpose(1, 2).flatten(2, 3), drawn["key"])


def test_a_cell_of_a_result_may_be_older_than_a_size() -> None:
    cell = cell_of("hopfield", SMALL["hopfield"])
    data = cell.to_json()
    del data["sizes"]["S"]
    assert Cell.from_json(data) == cell
    assert "S=" not in cell.name
    assert "P=0" not in cell_of("decode", SMALL["decode"]).name


def test_a_module_gets_a_mask_of_what_to_ignore() -> None:
    cell = cell_of("mha", "B=3,L=8,E=8,H=2", mask="padding")
    ignored = inputs.make_inputs(cell, 0)["key_padding_mask"]
    assert (8 - ignored.sum(-1)).tolist() == padding_lengths(3, 8)
    causal = inputs.make_inputs(dataclasses.replace(cell, mask="causal"), 0)["attn_mask"]
    assert all(bool(causal[i, j]) == (j > i) for i in range(8) for j in range(8))
    random = dataclasses.replace(cell, mask="bool")
    visible = ~inputs.make_inputs(random, 0)["attn_mask"]
    assert int(visible.sum()) == inputs.true_in_mask(random, 0)


# Statistics


def test_quantiles_of_known_samples() -> None:
    samples = [4.0, 1.0, 3.0, 2.0]
    assert stats.median(samples) == 2.5
    assert stats.quantile(samples, 0.25) == 1.75
    assert stats.quantile([7.0], 0.9) == 7.0
    with pytest.raises(ValueError):
        stats.median([])


def test_the_bootstrap_interval_covers_the_median() -> None:
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for seed in range(60):
        samples = torch.randn(25, generator=generator).tolist()
        low, high = stats.bootstrap_interval(samples, seed=seed)
        covered += low <= 0 <= high
    assert covered >= 50  # of 60; 57 are expected at 95 %
    assert stats.bootstrap_interval([2.0] * 9) == (2.0, 2.0)


def test_a_speedup_is_the_median_of_ratios_within_rounds() -> None:
    # The machine slows down by 10 in the middle; both do, and the ratio does not notice.
    ratio, low, high = stats.speedup([2.0, 20.0, 2.0, 20.0], [1.0, 10.0, 1.0, 10.0])
    assert (ratio, low, high) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.5, 1.9, "FASTER"),
        (0.5, 0.9, "SLOWER"),
        (0.99, 1.01, "SAME"),
        (0.8, 1.3, "UNSURE"),
        (1.01, 1.2, "UNSURE"),
    ],
)
def test_verdicts(low: float, high: float, verdict: str) -> None:
    assert stats.verdict(low, high) == verdict


# From rounds to rows


def test_metrics_of_known_rounds() -> None:
    rounds = [Round((1e3, 990.0), {"torch": 4.0, "ours": 2.0}) for _ in range(5)]
    torch_row, ours = summary.summarise(a_result(rounds))
    assert ours["ms"] == 2.0
    assert ours["gflops"] == pytest.approx(500)
    assert ours["percent_of_peak"] == pytest.approx(50)
    assert ours["peak_gflops"] == pytest.approx(1e3)
    assert (ours["speedup"], ours["verdict"], ours["rounds"]) == (2.0, "FASTER", 5)
    assert torch_row["speedup"] is None


def test_rounds_of_a_busy_machine_are_discarded_and_counted() -> None:
    quiet = [Round((100.0, 98.0), {"torch": 4.0, "ours": 2.0}) for _ in range(4)]
    busy = [Round((100.0, 60.0), {"torch": 40.0, "ours": 2.0}) for _ in range(3)]
    busy += [Round((70.0, 70.0), {"torch": 40.0, "ours": 2.0}) for _ in range(2)]
    busy += [Round((100.0, 98.0), {"torch": 40.0, "ours": 2.0}, share=0.7)]
    row = summary.summarise(a_result(quiet + busy))[1]
    assert (row["rounds"], row["discarded"], row["busy"]) == (4, 6, False)
    assert row["speedup"] == 2.0


def test_a_machine_that_is_never_quiet_is_not_judged() -> None:
    rounds = [Round((100.0, 50.0), {"torch": 4.0, "ours": 2.0}) for _ in range(6)]
    row = summary.summarise(a_result(rounds))[1]
    assert row["busy"]
    assert row["verdict"] == "UNSURE"


def test_the_share_of_the_peak_is_that_of_the_peak_beside_it() -> None:
    """A clock that halves in the middle of a cell, or is lower than elsewhere in the run."""
    fast = [Round((1e3, 1e3), {"torch": 4.0, "ours": 1.25}) for _ in range(3)]
    slow = [Round((800.0, 790.0), {"torch": 5.0, "ours": 1.25 * 1e3 / 800}) for _ in range(3)]
    row = summary.summarise(a_result(fast + slow))[1]
    assert (row["rounds"], row["busy"]) == (6, False)
    assert row["percent_of_peak"] == pytest.approx(80)
    assert (row["percent_low"], row["percent_high"]) == (pytest.approx(80), pytest.approx(80))


def test_beyond_the_measured_peak_is_impossible(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = [Round((400.0, 390.0), {"torch": 4.0, "ours": 2.0}) for _ in range(3)]
    result = a_result(rounds)
    rows = torch_row, ours = summary.summarise(result)
    assert ours["impossible"]
    assert not torch_row["impossible"]
    assert "IMPOSSIBLE" in display.plain_table([ours])
    assert "1 row IMPOSSIBLE" in " ".join(display.closing(result, rows))
    assert measuring.exit_code("complete", rows) == cli.FAULTS
    assert measuring.exit_code("complete", rows[:1]) == cli.OK
    printed = capsys.readouterr().err
    assert "ours ran at 125 % of the peak measured beside it, 95 % interval 125 to 125 %" in printed
    estimate = summary.summarise(a_result(rounds, method="torch.mm estimate"))[1]
    assert not estimate["impossible"]


def test_above_the_peak_within_the_interval_is_not_impossible() -> None:
    rounds = [Round((490.0, 490.0), {"torch": 4.0, "ours": ms}) for ms in (2.0, 2.01, 2.05, 2.1)]
    row = summary.summarise(a_result(rounds))[1]
    assert row["percent_low"] < 100 < row["percent_high"]
    assert not row["impossible"]


def test_the_dtypes_of_old_files_have_the_peaks_that_they_had() -> None:
    assert kind_of("fp16", {"fma_f32": 1, "dot_bf16": 2}) == "fma_f32"
    assert kind_of("fp16", {"fma_f32": 1, "dot_f16": 2}) == "dot_f16"
    assert kind_of("bf16", {}) == "dot_bf16"


# The check before the timing


def all_of(op: str) -> str:
    """The pass that computes most."""
    return "fwd+bwd" if "fwd+bwd" in ops.get(op).PASSES else "fwd"


def cells_to_check() -> list[Cell]:
    """Every operator with its masks, weights and options, in turn in each dtype; forward and
    backward where they have one.
    """
    dtypes = itertools.cycle(("fp32", "bf16", "fp16"))
    return [
        cell_of(op, shape, passes=all_of(op), mask=mask, weights=weights, dtype=next(dtypes))
        for op, shape in (*SMALL.items(), *MORE)
        for mask in ops.get(op).MASKS
        for weights in ops.get(op).WEIGHTS
    ] + [
        cell_of("transformer", SMALL["transformer"], option="stepwise"),
        *(
            cell_of("memn2n", SMALL["memn2n"], option="layerwise", passes=passes)
            for passes in ops.get("memn2n").PASSES
        ),
        *(
            cell_of("sdpa", shape, passes=passes, mask=mask, option=option, dtype=next(dtypes))
            for option in ops.get("sdpa").OPTIONS[1:]
            for mask in ("causal", "bias" if option != "window" else "none")
            if option != "learnable" or mask == "bias"
            for passes in ("bwd", "fwd+bwd")
            for shape in (SMALL["sdpa"], "B=2,H=4,L=40,D=8")
        ),
    ]


def answer(provider: str, cell: Cell) -> dict[str, torch.Tensor]:
    arrays = load(provider).prepare(cell, inputs.make_inputs(cell, 1))()
    return dict(zip(inputs.output_names(cell), arrays, strict=True))


@pytest.fixture(autouse=True)
def leave_what_a_provider_stays_in() -> Iterator[None]:
    yield
    leave()


def test_a_variant_is_in_force_while_its_provider_runs() -> None:
    cell = cell_of("sdpa", SMALL["sdpa"])
    call = load("fastattn@reference").prepare(cell, inputs.make_inputs(cell, 0))
    gc.collect()
    assert dispatch.forced.get() == "reference"
    call()
    load("torch@math")
    gc.collect()
    assert dispatch.forced.get() == ""
    assert not torch.backends.cuda.flash_sdp_enabled()
    leave()
    assert torch.backends.cuda.flash_sdp_enabled()


def test_the_kernels_for_hopper_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[bool] = []
    native = SimpleNamespace(allow_hopper=allowed.append)
    monkeypatch.setitem(sys.modules, "fastattn._cuda", native)
    monkeypatch.setattr(fastattn_, "load", lambda name: native)
    monkeypatch.setattr(fastattn_, "_forced", "")  # which the next line changes
    provider = load("fastattn@sm_80")
    assert allowed == [False]
    assert not provider.why_not(cell_of("sdpa", SMALL["sdpa"]))
    monkeypatch.setattr(fastattn_, "load", lambda name: f"{name}: not built")
    assert provider.why_not(cell_of("sdpa", SMALL["sdpa"])) == [
        "the backend cuda is cuda: not built"
    ]


@pytest.mark.parametrize("cell", cells_to_check(), ids=lambda cell: cell.name)
def test_providers_agree_with_the_oracle(cell: Cell) -> None:
    oracle = Oracle(cell, 1)
    for provider in ("fastattn@reference", "torch", "torch-eager"):
        if not load(provider).why_not(cell):
            found = oracle.check(answer(provider, cell))
            assert found.ok, found.reason
    assert flops(cell, inputs.true_in_mask(cell, 1)) > 0
    assert bytes_touched(cell) > 0


@pytest.mark.parametrize("mask", ops.get("varlen").MASKS)
def test_a_loop_over_packed_sequences_agrees_too(
    mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_default, "_variant", "")  # which the next line changes
    loop = load("torch@loop")
    assert loop.why_not(cell_of("sdpa", SMALL["sdpa"])) == [
        "it has no packed sequences to loop over"
    ]
    cell = cell_of("varlen", SMALL["varlen"], passes="fwd+bwd", mask=mask)
    assert not loop.why_not(cell)
    found = Oracle(cell, 1).check(answer("torch@loop", cell))
    assert found.ok, found.reason


def test_of_keys_beyond_the_windows_only_the_gradients_are_touched() -> None:
    whole = cell_of("luong", "B=2,Lq=3,Lk=1000,D=8,Dv=4", dtype="fp32")
    inputs, outputs = 2 * (3 * 8 + 1000 * 12) + 64, 2 * 3 * 4
    assert bytes_touched(whole) == 4 * (inputs + outputs)
    for window, seen in (("W=10,P=1", 63), ("W=10", 13), ("W=400,P=1", 1000)):
        read = inputs + outputs - 2 * (1000 - seen) * 12
        shape = f"B=2,Lq=3,Lk=1000,D=8,Dv=4,{window}"
        assert bytes_touched(cell_of("luong", shape, dtype="fp32")) == 4 * read
        both = cell_of("luong", shape, dtype="fp32", passes="fwd+bwd")
        assert bytes_touched(both) == 4 * (2 * read + inputs + outputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in PROVIDERS if n not in ("fastattn", "torch")])
@pytest.mark.parametrize("shape", ["B=2,H=4,Lq=16,Lk=24", "B=2,H=4,Hkv=2,L=16", "H=4,L=16,Dv=8"])
def test_peers_agree_with_the_oracle_where_they_are_installed(name: str, shape: str) -> None:
    provider = load(name)
    try:
        provider.versions()
    except ImportError as error:
        pytest.skip(str(error))
    # Compilers take their time: in 16 bits the first shape alone.
    dtypes = ("fp32", "bf16") if "Lk" in shape else ("fp32",)
    for mask, passes in itertools.product(MASKS, ("fwd", "fwd+bwd")):
        for dtype in dtypes:
            cell = cell_of("sdpa", shape, mask=mask, passes=passes, dtype=dtype)
            if not provider.why_not(cell):
                arrays = provider.prepare(cell, inputs.make_inputs(cell, 1))()
                names = inputs.output_names(cell)
                found = Oracle(cell, 1).check(
                    {n: torch.as_tensor(x) for n, x in zip(names, arrays, strict=True)}
                )
                assert found.ok, f"{cell.name}: {found.reason}"


@pytest.mark.parametrize("op", ops.OPS)
def test_a_wrong_answer_does_not(op: str) -> None:
    cell = cell_of(op, SMALL[op], passes=all_of(op))
    oracle = Oracle(cell, 1)
    # The reference itself, rounded, in the layout of an answer.
    outputs = {
        name: oracle.reference[name].to(x.dtype).view_as(x)
        for name, x in answer("torch", cell).items()
    }
    assert oracle.check(outputs).ok
    for name in [*outputs][:25]:  # the layers of a stack are alike
        wrong = outputs | {name: outputs[name].detach() * 1.1}
        found = oracle.check(wrong)
        assert (found.ok, found.tensor) == (False, name)
        nan = outputs | {name: torch.full_like(outputs[name], torch.nan)}
        assert not oracle.check(nan).ok


def test_an_output_has_the_dtype_that_its_operator_gives_it() -> None:
    cell = cell_of("merge_states", SMALL["merge_states"], passes="fwd+bwd", dtype="bf16")
    oracle, outputs = Oracle(cell, 1), answer("fastattn@reference", cell)
    assert outputs["grad_out_a"].dtype == torch.bfloat16
    assert oracle.check(outputs).ok
    found = oracle.check(outputs | {"grad_lse_a": outputs["grad_lse_a"].bfloat16()})
    assert not found.ok
    assert "grad_lse_a is torch.bfloat16" in found.reason
    assert not oracle.check(outputs | {"grad_lse_a": outputs["grad_lse_a"] * 1.1}).ok


def test_a_long_cell_is_checked_by_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastattn.bench.ops.sdpa.PAIRS_CHECKED", 2 * 2 * 5 * 7)
    monkeypatch.setattr("fastattn.bench.ops.sdpa._SCORES_AT_ONCE", 2 * 7 * 2)  # two rows of queries
    cell = dataclasses.replace(TINY, mask="causal", passes="fwd+bwd")
    oracle = Oracle(cell, 0)
    assert oracle.compared == "2 of 4 (sequence, head)"
    arrays = load("torch").prepare(cell, inputs.make_inputs(cell, 0))()
    outputs = dict(zip(inputs.output_names(cell), arrays, strict=True))
    assert oracle.check(outputs).ok
    assert not oracle.check(outputs | {"grad_key": -outputs["grad_key"]}).ok


# Files


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("not json", "not a result"),
        ("{}", "not a result"),
        ('{"format": "fastattn-bench", "version": 99}', "version 99"),
        ('{"format": "fastattn-bench", "version": 2}', "not a result"),
        ('{"format": "fastattn-bench", "version": 1}', "not a result"),
        ('{"record": "header"}\n', "not a result"),
        ("\x89PNG", "not a result of fastattn bench (UnicodeDecodeError"),
    ],
)
def test_a_foreign_result_file_is_named(
    text: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "strange.json"
    path.write_text(text, encoding="latin-1")
    assert bench("plot", str(path)) == cli.USAGE
    printed = capsys.readouterr().err
    assert "strange.json" in printed
    assert named in printed


def test_env_shows_what_decides_speed(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("env") == cli.OK
    printed = json.loads(capsys.readouterr().out)
    assert printed["torch"] == torch.__version__
    assert printed["cpu"]
