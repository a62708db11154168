"""The arguments that select cells, the presets, and the cells that both select."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Sequence
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
            tags, _, shape = text.rpartition(": ")
            line = parse_line(shape)
            presets[section].lines.append(line)
            for tag in tags.split(",") if tags else ():
                own = models.setdefault(tag, []) if section == "models" else presets[tag].lines
                own.append(line)
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
        lines: list[Line] = []
        for text in args.shapes:
            lines += read_lines(Path(text[1:])) if text.startswith("@") else [parse_line(text)]
        cells = [c for line in lines for c in _cells(line, args.dtype, args.passes, wanted)]
    else:
        preset = args.preset or ("all" if wanted else "quick")
        cells = preset_cells(preset, args.dtype, args.passes)
        cells = [cell for cell in cells if not wanted or cell.op in wanted]
        if not cells:
            raise ValueError(f"--preset {preset} has no cell of --op {','.join(args.op)}")
    changes = {key: vars(args)[key] for key in ("mask", "weights", "option") if vars(args)[key]}
    return [dataclasses.replace(cell, **changes) for cell in cells]


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
    cells = [cell for line in lines for cell in _cells(line, dtypes, passes, preset="models")]
    if not cells:
        raise ValueError(f"--pass {','.join(passes)}: {', '.join(names)} has no such pass")
    return cells


def preset_cells(name: str, dtypes: Sequence[str] = (), passes: Sequence[str] = ()) -> list[Cell]:
    """The cells of presets, such as "a,b" or "all"; dtypes and passes replace their defaults."""
    cells: list[Cell] = []
    check_names("--preset", name.split(","), [*PRESETS, "all"])
    for preset in ALL if name == "all" else name.split(","):
        lines = PRESETS[preset].lines
        found = [cell for line in lines for cell in _cells(line, dtypes, passes, preset=preset)]
        if preset in COMMON_FIRST:
            found.sort(key=lambda c: (c.label in RARER, DTYPES.index(c.dtype), c.passes != "fwd"))
        cells += found
    return cells


def _cells(
    line: Line,
    dtypes: Sequence[str],
    passes: Sequence[str],
    wanted: Sequence[str] = (),
    preset: str = "",
) -> list[Cell]:
    """Every combination of a line; passes that the operator does not have are left out."""
    usual = (("fp32", "bf16"), ("fwd", "fwd+bwd")) if preset else (("fp32",), ("fwd",))
    dtypes = dtypes or spelling.dtypes(line.listed("dtype"), DTYPES, "dtype=") or usual[0]
    check_names("pass=", line.listed("pass"), PASSES)
    passes = passes or line.listed("pass") or usual[1]
    options = [line.listed(key) or ["none"] for key in ("mask", "weights", "option")]
    cells = []
    for op in [ops.resolve(line.op)] if line.op else wanted or ["sdpa"]:
        operator = ops.get(op)
        directions = [name for name in passes if name in operator.PASSES]
        if not directions and not preset:
            raise ValueError(f"--pass {','.join(passes)}: {op} has {','.join(operator.PASSES)}")
        cells += [
            Cell(
                op, sizes, dtype, direction, mask, weights, option, preset=preset, label=line.label
            )
            for sizes in parse_shapes(line.shape, operator.SIZES)
            for mask, weights, option in itertools.product(*options)
            for dtype in dtypes
            for direction in directions
            if op in (wanted or [op])
        ]
    return cells
