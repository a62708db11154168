"""The arguments that select cells, the presets, and the cells that both select."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from fastattn import spelling
from fastattn.bench import ops
from fastattn.bench.cells import DTYPES, MASKS, OPTIONS, PASSES, WEIGHTS, Cell
from fastattn.bench.shapes import Line, parse_line, parse_shapes, read_lines
from fastattn.spelling import names


class Preset(NamedTuple):
    about: str
    lines: list[Line]


def _read_presets() -> tuple[dict[str, Preset], dict[str, list[Line]]]:
    """The sections of presets.txt, and the lines of each whole model."""
    presets: dict[str, Preset] = {}
    models: dict[str, list[Line]] = {}
    for text in Path(__file__).with_name("presets.txt").read_text(encoding="utf-8").splitlines():
        if text.startswith("["):
            section, _, about = text[1:].partition("]")
            presets[section] = Preset(about.strip(), [])
        elif text and not text.startswith("#"):
            model, _, line = text.rpartition(": " if section == "models" else "\n")
            presets[section].lines.append(parse_line(line))
            if model:
                models.setdefault(model, []).append(presets[section].lines[-1])
    about = f"whole models: {', '.join(models)} (one alone: `bench model NAME`)"
    return presets | {"models": Preset(about, presets["models"].lines)}, models


PRESETS, WHOLE_MODELS = _read_presets()
# Runs in little time may end after any cell, so here the common cells come first.
COMMON_FIRST = ("quick", "dropin")
RARER = ("BERT-base MHA, 512 tokens", "BERT-base MHA, 512 tokens, weights returned")
# The presets of `--preset all`.
ALL = tuple(name for name in PRESETS if name not in (*COMMON_FIRST, "serving", "models"))


def add_what(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that select cells."""
    parser.set_defaults(models=[])
    what = parser.add_argument_group("what to measure")
    words = f"shapes of real models, comma-separated: {', '.join(PRESETS)}, all (default: quick)"
    what.add_argument("--preset", metavar="LIST", help=words)
    words = f"only these operators (default with --shapes: sdpa): {', '.join(ops.OPS)}"
    spelling.add_list(what, "--op", words)
    words = (
        'e.g. "B=1,H=8,Lq=128:8192:x2,Lk=Lq,D=64", "mha B=8,L=512,E=768,H=12 mask=padding", '
        "or @FILE with one such line per line; may be repeated"
    )
    what.add_argument("--shapes", action="append", metavar="S", help=words)
    add_passes(what)
    what.add_argument("--mask", choices=MASKS, help="the mask of every cell")
    what.add_argument("--weights", choices=WEIGHTS, help="the attention weights that are returned")
    what.add_argument("--option", choices=OPTIONS, help="the option of every cell")


def add_passes(what: argparse._ActionsContainer) -> None:
    spelling.add_list(what, "--dtype", "fp32,bf16,fp16, or float32,bfloat16,float16")
    what.add_argument(
        "--pass", dest="passes", type=names, default=[], metavar="LIST", help="fwd,bwd,fwd+bwd"
    )


def cells_of(args: argparse.Namespace, dtypes: Sequence[str] = DTYPES) -> list[Cell]:
    """The cells that the arguments select. Raises ValueError, which names the wrong argument."""
    args.dtype = spelling.dtypes(args.dtype, dtypes)
    check_names("--pass", args.passes, PASSES)
    if args.models:
        return model_cells(args.models, args.dtype, args.passes)
    wanted = [ops.resolve(name) for name in args.op]
    if args.shapes and args.preset:
        raise ValueError("give either --shapes or --preset")
    if args.shapes:
        cells = []
        for text in args.shapes:
            is_file = text.startswith("@")
            for line in read_lines(Path(text[1:])) if is_file else [parse_line(text)]:
                cells += _given_cells(line, args, wanted)
    else:
        preset = args.preset or ("all" if wanted else "quick")
        cells = preset_cells(preset, args.dtype, args.passes)
        cells = [cell for cell in cells if not wanted or cell.op in wanted]
        if not cells:
            raise ValueError(f"--preset {preset} has no cell of --op {','.join(args.op)}")
    given = {key: getattr(args, key) for key in ("mask", "weights", "option")}
    changes = {key: value for key, value in given.items() if value}
    return [dataclasses.replace(cell, **changes) for cell in cells] if changes else cells


def check_names(flag: str, given: Sequence[str], allowed: Sequence[str]) -> None:
    for name in given:
        if name not in allowed:
            raise ValueError(f"{flag} {name!r}: allowed are {', '.join(allowed)}")


def model_cells(
    names: Sequence[str], dtypes: Sequence[str] = (), passes: Sequence[str] = ()
) -> list[Cell]:
    """The cells of whole models; `all` is every one. Raises ValueError for an unknown name."""
    check_names("model", names, [*WHOLE_MODELS, "all"])
    chosen = WHOLE_MODELS if "all" in names else dict.fromkeys(names)
    lines = (line for name in chosen for line in WHOLE_MODELS[name])
    cells = _preset_lines(lines, dtypes, passes, "models")
    if not cells:
        raise ValueError(f"--pass {','.join(passes)}: {', '.join(names)} has no such pass")
    return cells


def preset_cells(name: str, dtypes: Sequence[str] = (), passes: Sequence[str] = ()) -> list[Cell]:
    """The cells of presets, such as "a,b" or "all"; dtypes and passes replace their defaults."""
    cells = []
    check_names("--preset", name.split(","), [*PRESETS, "all"])
    for preset in ALL if name == "all" else name.split(","):
        found = _preset_lines(PRESETS[preset].lines, dtypes, passes, preset)
        cells += sorted(found, key=_rarity) if preset in COMMON_FIRST else found
    return cells


def _rarity(cell: Cell) -> tuple[bool, int, int]:
    return cell.label in RARER, DTYPES.index(cell.dtype), PASSES.index(cell.passes)


def _preset_lines(
    lines: Iterable[Line], dtypes: Sequence[str], passes: Sequence[str], preset: str
) -> list[Cell]:
    cells = []
    for line in lines:
        own = dtypes or line.listed("dtype") or ("fp32", "bf16")
        directions = passes or line.listed("pass") or ("fwd", "fwd+bwd")
        cells += _cells(line, line.op, own, directions, preset)
    return cells


def _given_cells(line: Line, args: argparse.Namespace, wanted: list[str]) -> list[Cell]:
    """The cells of a line of --shapes; none for an operator that --op excludes."""
    dtypes = args.dtype or spelling.dtypes(line.listed("dtype"), DTYPES, "dtype=") or ["fp32"]
    check_names("pass=", line.listed("pass"), PASSES)
    passes = args.passes or line.listed("pass") or ["fwd"]
    named = [ops.resolve(line.op)] if line.op else wanted or ["sdpa"]
    for op in named:
        if not set(passes) & set(ops.get(op).PASSES):
            raise ValueError(f"--pass {','.join(passes)}: {op} has {','.join(ops.get(op).PASSES)}")
    chosen = [op for op in named if op in (wanted or named)]
    return [cell for op in chosen for cell in _cells(line, op, dtypes, passes)]


def _cells(
    line: Line, op: str, dtypes: Sequence[str], passes: Sequence[str], preset: str = ""
) -> list[Cell]:
    """Every combination; passes that the operator does not have are left out."""
    operator = ops.get(op)
    options = [line.listed(key) or ["none"] for key in ("mask", "weights", "option")]
    return [
        Cell(op, sizes, dtype, direction, mask, weights, option, preset=preset, label=line.label)
        for sizes in parse_shapes(line.shape, operator.SIZES)
        for mask, weights, option in itertools.product(*options)
        for dtype in dtypes
        for direction in passes
        if direction in operator.PASSES
    ]
