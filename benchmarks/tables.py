"""The tables of measurements in the documentation; `render` writes them into their pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fastattn.bench import breakdown, summary
from fastattn.bench.results import Result

COLUMNS = [("fp32", "fwd"), ("fp32", "fwd+bwd"), ("bf16", "fwd"), ("bf16", "fwd+bwd")]
WIDEST = 8  # columns of a table
PASSES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward + backward"}

Row = dict[str, Any]


def markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]], words: int = 1) -> str:
    """A table whose first `words` columns are text and the others numbers."""
    rule = ["---"] * words + ["---:"] * (len(header) - words)
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *lines])


class Table(NamedTuple):
    """A table of one processor: the headings of its lines and values, and the lines."""

    words: list[str]
    values: list[str]
    lines: dict[tuple[str, ...], list[str]]


def side_by_side(tables: dict[str, Table]) -> str:
    """One table with a column for each value and processor, or, if it is too wide, several."""
    if len(tables) == 1:
        (table,) = tables.values()
        lines = [[*words, *values] for words, values in table.lines.items()]
        return markdown_table([*table.words, *table.values], lines, words=len(table.words))
    values = list(dict.fromkeys(v for table in tables.values() for v in table.values))
    if len(next(iter(tables.values())).words) + len(values) * len(tables) > WIDEST:
        return "\n\n".join(f"`{name}`:\n\n{side_by_side({'': of})}" for name, of in tables.items())
    header = [f"{value}<br>{name}" for value in values for name in tables]
    keys = dict.fromkeys(key for table in tables.values() for key in table.lines)
    cells = {
        (key, value, name): text
        for name, table in tables.items()
        for key, texts in table.lines.items()
        for value, text in zip(table.values, texts, strict=True)
    }
    lines = [
        [*key, *(cells.get((key, value, name), "–") for value in values for name in tables)]
        for key in keys
    ]
    words = next(iter(tables.values())).words
    return markdown_table([*words, *header], lines, words=len(words))


# The cells of figures.txt on the first screen of README.md, with their shapes in words.
FIRST_CELLS = {
    "128 tokens": "attention, 8 × 128 tokens, 12 heads of 64",
    "512 tokens": "attention, 8 × 512 tokens, 12 heads of 64",
    "2048 tokens, causal": "causal attention, 2048 tokens, 16 heads of 64",
    "next token, 4 queries a key head": "decoding a token, cache of 4096, 32 heads on 8 key heads",
    "MultiheadAttention": "MultiheadAttention, 8 × 512 tokens, 768 wide",
    "tinier": "attention, 16 tokens, 4 heads of 16",
}


DTYPES = ("fp32", "bf16")
Speeds = dict[tuple[str, ...], dict[str, float]]  # by cell and pass, by dtype


def first_speeds(result: Result) -> Speeds:
    """Speed-ups from comparable rounds, of the cells of FIRST_CELLS, or of all if none."""
    rows = [row for row in ours_compared(summary.summarise(result)) if row["comparable"]]
    named = {row["label"] for row in rows} & FIRST_CELLS.keys()
    speeds: Speeds = {}
    for row in rows:
        if row["label"] in named or not named:
            line = FIRST_CELLS.get(row["label"], row["label"]), PASSES[row["pass"]]
            speeds.setdefault(line, {})[row["dtype"]] = row["speedup"]
    return speeds


def first_table(speeds: dict[str, Speeds]) -> str:
    """One line per cell and pass, one column per processor."""
    lines = [
        [", ".join(line), *(_dtypes(of.get(line, {})) for of in speeds.values())]
        for line in dict.fromkeys(line for of in speeds.values() for line in of)
    ]
    title = f"times as fast as torch, {' / '.join(DTYPES)}"
    return markdown_table([title, *(PROCESSORS.get(name, name) for name in speeds)], lines)


# Whole models on the first screen of README.md, by their labels in models.json.
FIRST_MODELS = {
    "BERT-base, 128 tokens": "BERT-base, 8 texts of 128 tokens",
    "MiniLM, half padding": "MiniLM, 32 texts, half of their tokens padding",
    "ViT-B/16, 224 pixels": "ViT-B/16, 8 images",
    "TinyLlama 1.1B, prompt of 512": "TinyLlama 1.1B, a prompt of 512 tokens",
    "TinyLlama 1.1B, next token, cache 2048": "TinyLlama 1.1B, next token",
}
PROCESSORS = {
    "amd-epyc-zen4-avx512_bf16": "AMD EPYC, Zen 4",
    "amd-epyc-zen5-avx512_bf16": "AMD EPYC, Zen 5",
    "intel-xeon-emerald-rapids-amx_bf16": "Intel Xeon, Emerald Rapids (AMX)",
}


class Gain(NamedTuple):
    """The speed-up of a whole model, and whether its 95 % interval excludes 1."""

    speedup: float
    certain: bool

    def __str__(self) -> str:
        return f"{'' if self.certain else '≈ '}{self.speedup:.2f}"


def gains(result: Result) -> dict[str, dict[str, Gain]]:
    """The gain of the forward pass of each model, by label and dtype."""
    lines: dict[str, dict[str, Gain]] = {}
    for (label, passes, dtype), (_, ours) in stock_and_ours(result).items():
        if passes == "fwd" and ours["comparable"] and label in FIRST_MODELS:
            certain = not ours["speedup_low"] <= 1 <= ours["speedup_high"]
            lines.setdefault(label, {})[dtype] = Gain(ours["speedup"], certain)
    return lines


def gain_table(by_processor: dict[str, dict[str, dict[str, Gain]]]) -> str:
    """One line per model, one column per processor."""
    lines = [
        [words, *(_dtypes(of.get(label, {})) for of in by_processor.values())]
        for label, words in FIRST_MODELS.items()
        if any(label in of for of in by_processor.values())
    ]
    title = f"times as fast, {' / '.join(DTYPES)}"
    return markdown_table([title, *(PROCESSORS.get(name, name) for name in by_processor)], lines)


def _dtypes(of: Mapping[str, float | Gain]) -> str:
    """The speed-ups of a cell, in the order of DTYPES."""
    texts = (of.get(dtype, "–") for dtype in DTYPES)
    return " / ".join(f"{text:.2f}" if isinstance(text, float) else str(text) for text in texts)


def full_table(rows: Sequence[Row]) -> str:
    header = ["cell", "dtype", "pass", "provider", "ms", "95 % interval", "GFLOP/s", "% of peak"]
    header += ["peak MB", "rel. error", "times as fast", "95 % interval", "rounds"]
    lines = []
    for row in rows:
        line = [_name_of(row), row["dtype"], PASSES[row["pass"]], row["provider"]]
        if row["ms"] is None:
            lines.append([*line, row["status"], *[""] * 8])
            continue
        speedup = ["", ""]
        if row["speedup"] is not None:
            speedup = [
                f"{row['speedup']:.2f}×",
                f"{row['speedup_low']:.2f} – {row['speedup_high']:.2f}",
            ]
        memory = "" if row["peak_mb"] is None else f"{row['peak_mb']:.1f}"
        line += [f"{row['ms']:.4g}", f"{row['ms_low']:.4g} – {row['ms_high']:.4g}"]
        line += [f"{row['gflops']:.0f}", f"{row['percent_of_peak']:.0f} %", memory]
        line += [f"{row['relative_error']:.1e}", *speedup, str(row["rounds"])]
        lines.append(line)
    return markdown_table(header, lines, words=4)


def speedup_text(row: Row) -> str:
    """The speed-up, marked as busy if its rounds were disturbed."""
    if row["speedup"] is None:
        return "–"
    return f"{row['speedup']:.2f}×{'' if row['comparable'] else ', busy'}"


def mark(row: Row) -> str:
    """Marks a time or share as busy, unless the speed-up beside it says so."""
    return ", busy" if row["busy"] and row["comparable"] is not False else ""


def ours_compared(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["provider"] == "fastattn" and row["speedup"] is not None]


def stock_and_ours(result: Result) -> dict[tuple[str, str, str], tuple[Row, Row]]:
    """The rows of torch and fastattn for each whole model, by label, pass and dtype."""
    rows: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in summary.summarise(result):
        rows.setdefault((row["label"], row["pass"], row["dtype"]), {})[row["provider"]] = row
    return {
        key: (of_cell["torch"], of_cell["fastattn"])
        for key, of_cell in rows.items()
        if of_cell.get("fastattn", {}).get("speedup") is not None
    }


def models_table(result: Result) -> Table:
    """For whole models: rates, the speed-up with its interval, attention's share, and memory."""
    values = ["a second, torch", "fastattn", "times as fast", "attention, torch"]
    values += ["MB, torch", "MB, fastattn"]
    lines = {}
    for (label, passes, dtype), (stock, ours) in stock_and_ours(result).items():
        interval = f"× [{ours['speedup_low']:.2f}, {ours['speedup_high']:.2f}]"
        both = (stock, ours)
        rates = [f"{summary.milliseconds(row['items_per_second'])} {row['item']}" for row in both]
        lines[label, f"{PASSES[passes]}, {dtype}"] = [
            *(rates[0], rates[1] + mark(ours)),
            speedup_text(ours).replace("×", interval),
            f"{100 * stock['attention_share']:.1f} %",  # a fused layer has none of its own
            *(f"{row['peak_mb']:.0f}" for row in both),
        ]
    return Table(["model", "pass"], values, lines)


def figures_table(result: Result) -> Table:
    """Share of the peak and speed-up over torch, one line per shape, one column per dtype."""
    rows = [row for row in summary.summarise(result) if row["provider"] == "fastattn"]
    return _shares(rows, ["fp32", "bf16", "fp16"], lambda row: row["dtype"])


def isas_table(result: Result) -> Table:
    """The same with a column per dtype and instruction set."""

    def column(row: Row) -> str:
        isa = row["provider"].partition("@")[2] or result.environment["isa"].partition(",")[0]
        return f"{row['dtype']}, {isa}"

    rows = [row for row in summary.summarise(result) if row["provider"] != "torch"]
    return _shares(rows, list(dict.fromkeys(map(column, rows))), column)


def _shares(rows: Sequence[Row], columns: list[str], column: Callable[[Row], str]) -> Table:
    cells = {(_name_of(row), PASSES[row["pass"]], column(row)): row for row in rows}
    lines = {}
    for line in dict.fromkeys(key[:2] for key in cells):
        texts = []
        for name in columns:
            row = cells.get((*line, name))
            text = "" if row is None else row["status"]
            if row is not None and row["ms"] is not None:
                text = f"{row['percent_of_peak']:.0f} %{mark(row)}"
                text += "" if row["speedup"] is None else f", {speedup_text(row)}"
            texts.append(text)
        lines[line] = texts
    return Table(["cell", "pass"], columns, lines)


def family_table(result: Result) -> Table:
    """Time, speed-up over torch, share of the peak, and memory."""
    values = ["ms", "times as fast as torch", "of the peak", "GB/s", "MB", "MB, torch"]
    rows = summary.summarise(result)

    def key(row: Row) -> tuple[str, str, str]:
        return _name_of(row), row["dtype"], row["pass"]

    stock = {key(row): row for row in rows if row["provider"] == "torch"}
    lines = {}
    for row in rows:
        if row["provider"] != "fastattn" or row["ms"] is None:
            continue
        passes = PASSES[row["pass"]] + ("" if row["dtype"] == "fp32" else f", {row['dtype']}")
        lines[_name_of(row), passes] = [
            *(f"{row['ms']:.3g}{mark(row)}", speedup_text(row)),
            *(f"{row['percent_of_peak']:.0f} %", f"{row['gbs']:.1f}"),
            *(_megabytes(x) for x in (row, stock[key(row)])),
        ]
    return Table(["cell", "pass"], values, lines)


def _megabytes(row: Row) -> str:
    return "–" if row["peak_mb"] is None else f"{row['peak_mb']:.1f}"


def options_table(result: Result) -> Table:
    """What each option costs: its time for a visible pair, over that of the plain call."""
    ours = [row for row in summary.summarise(result) if row["provider"] == "fastattn"]
    rows = {(row["label"], row["dtype"], row["pass"]): row for row in ours if row["ms"]}
    plain = ours[0]["label"]
    lines = {}
    for label in dict.fromkeys(row["label"] for row in ours):
        texts = []
        for column in COLUMNS:
            of_plain, row = rows.get((plain, *column)), rows.get((label, *column))
            text = "–"
            if of_plain and row:
                text = f"{of_plain['percent_of_peak'] / row['percent_of_peak']:.2f}"
                text += ", busy" if row["busy"] else ""
            texts.append(text)
        lines[label,] = texts
    del lines[plain,]
    return Table(["option"], [f"{dtype} {PASSES[p]}" for dtype, p in COLUMNS], lines)


def serving_table(result: Result) -> Table:
    """Time, rates and memory, and the speed-up over PyTorch: in one call, in a loop, compiled."""
    rows = summary.summarise(result)

    by_cell: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        line = _name_of(row), f"{PASSES[row['pass']]}, {row['dtype']}"
        by_cell.setdefault(line, {})[row["provider"]] = row
    ran = {row["provider"] for row in rows if row["ms"]}
    others = {name: words for name, words in _OTHERS.items() if name in ran}
    flex = ["torch-flex"] * ("torch-flex" in ran)
    values = ["ms", "times as fast as torch", *others.values(), "of the peak, of the bandwidth"]
    values += [f"MB, {' / '.join(['fastattn', 'torch', *flex])}"]
    lines = {}
    for name, of in by_cell.items():
        ours = of["fastattn"]
        if not ours["ms"]:
            continue
        shares = (ours["percent_of_peak"], ours["percent_of_bandwidth"])
        lines[name] = [
            f"{ours['ms']:.3g}{mark(ours)}",
            speedup_text(ours),
            *(_times_as_fast(ours, of.get(other)) for other in others),
            ", ".join("–" if share is None else f"{share:.0f} %" for share in shares),
            " / ".join(_megabytes(of[each]) for each in ("fastattn", "torch", *flex)),
        ]
    return Table(["cell", "pass"], values, lines)


def server_table(result: Result) -> Table:
    """Tokens a second, and share of the read bandwidth, beside a bf16 cache of the same shape."""
    rows = summary.summarise(result)
    ours = [row for row in rows if row["provider"] == "fastattn" and row["ms"]]
    stock = {_step_of(row): row for row in rows if row["provider"] == "torch"}
    of_bf16 = {_step_of(row)[:2]: row for row in ours if _step_of(row)[2] == "bf16"}
    lines = {}
    for row in ours:
        bf16, bandwidth = of_bf16.get(_step_of(row)[:2]), row["percent_of_bandwidth"]
        texts = [
            _tokens(row) + mark(row),
            _tokens(stock.get(_step_of(row))),
            speedup_text(row),
            "–" if bf16 is None else f"{bf16['ms'] / row['ms']:.2f}×",
            f"{row['gbs']:.1f}" + ("" if bandwidth is None else f", {bandwidth:.0f} %"),
        ]
        lines[_step_of(row)] = texts
    values = ["tokens a second", "torch", "times as fast as torch", "as a bf16 cache"]
    return Table(["step", "cell", "cache"], [*values, "GB/s, of the bandwidth"], lines)


def _step_of(row: Row) -> tuple[str, str, str]:
    """What is computed, the shape, and the kind of cache."""
    kind = row["option"] if row["option"] in ("int8", "fp8") else row["dtype"]
    return row["label"].removesuffix(f", {kind}"), f"`{row['shape']}`", kind


def _tokens(row: Row | None) -> str:
    rate = row["items_per_second"] if row and row["ms"] else None
    return "–" if rate is None else summary.milliseconds(rate)


# Ways of PyTorch beside its function, in the words of a heading.
_OTHERS = {
    **dict.fromkeys(("torch@loop", "benchmarks.torch_loop"), "as a loop in torch"),
    "torch-flex": "as FlexAttention, compiled",
}


def _times_as_fast(ours: Row, other: Row | None) -> str:
    return f"{other['ms'] / ours['ms']:.2f}×" if other and other["ms"] else "–"


def _name_of(row: Row) -> str:
    shape = f"`{row['shape']}`"
    return f"{row['label']}<br>{shape}" if row["label"] else shape


# The columns of a breakdown, each the sum of items.
_ITEMS = {
    "checks": ("checks",),
    "autograd": ("Function.apply", "engine"),
    "tensors": ("adapter", "allocation", "arguments", "threads"),
    **{name: (name,) for name in ("kernel", "call", "floor")},
}


def breakdown_table(result: Result) -> Table:
    """Microseconds of the items of each call, which add up to it, beside the same in PyTorch."""
    lines = {}
    for measured in result.cells:
        cell, times = measured.cell, breakdown.microseconds(measured)
        shape = f"`{cell.op} {cell.shape}`, {PASSES[cell.passes]}"
        texts = [f"{sum(times.get(name, 0.0) for name in names):.1f}" for names in _ITEMS.values()]
        has_torch = "torch" in times
        ratio = f", {times['torch'] / times['call']:.2f}×" if has_torch else ""
        texts.append(f"{times['torch']:.1f}{ratio}" if has_torch else "–")
        lines[f"{cell.label}<br>{shape}" if cell.label else shape,] = texts
    return Table(["cell"], [*_ITEMS, "torch"], lines)


def ranks_table(rows: Sequence[Row]) -> Table:
    """What the busiest rank receives and computes, counted and planned."""
    lines = {}
    for row in rows:
        texts = [
            f"{row[field] / unit:.2f}" if field in row else "–"
            for name, unit in (("received", 2**20), ("flops", 1e9))
            for field in (name, f"{name}_planned")
        ]
        lines[row["scaling"], str(row["ranks"]), str(row["length"]), row["call"]] = texts
    values = ["MiB received", "MiB planned", "GFLOP", "GFLOP planned"]
    return Table(["scaling", "ranks", "rows", "call"], values, lines)
