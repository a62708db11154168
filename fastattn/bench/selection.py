"""The arguments and the presets that select cells, and the selected cells."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fastattn import spelling
from fastattn.bench import ops
from fastattn.bench.cells import DTYPES, PASSES, Cell
from fastattn.bench.shapes import LISTS, Line, parse_line, parse_shapes, read_lines
from fastattn.spelling import names


class Preset(NamedTuple):
    about: str
    lines: list[Line]


def _read_presets() -> dict[str, Preset]:
    """The sections of presets.txt, and the whole models, which have no description."""
    found: dict[str, Preset] = {}
    for text in Path(__file__).with_name("presets.txt").read_text(encoding="utf-8").splitlines():
        if text.startswith("["):
            section, _, about = text[1:].partition("] ")
            found[section] = Preset(about, [])
        elif text and not text.startswith("#"):
            tags, _, shape = text.rpartition(": ")
            for name in (section, *(tags.split(",") if tags else ())):
                found.setdefault(name, Preset("", [])).lines.append(parse_line(shape))
    return found


_FOUND = _read_presets()
PRESETS = {name: preset for name, preset in _FOUND.items() if preset.about}
WHOLE_MODELS = {name: preset.lines for name, preset in _FOUND.items() if not preset.about}
# Short runs may end after any cell, so these presets have the common cells first.
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
    for flag, field, words in (
        ("--mask", "MASKS", "the mask of every cell"),
        ("--weights", "WEIGHTS", "the attention weights that are returned"),
        ("--option", "OPTIONS", "the option of every cell"),
    ):
        choices = dict.fromkeys(x for op in ops.OPS for x in getattr(ops.get(op), field))
        what.add_argument(flag, choices=choices, help=words)


def add_passes(what: argparse._ActionsContainer) -> None:
    spelling.add_list(what, "--dtype", "fp32,bf16,fp16, or float32,bfloat16,float16")
    words = ",".join(PASSES)
    what.add_argument("--pass", dest="passes", type=names, default=[], metavar="LIST", help=words)


def cells_of(args: argparse.Namespace, dtypes: Sequence[str] = DTYPES) -> list[Cell]:
    """The cells that the arguments select. Raises ValueError, which names the wrong argument."""
    check_names("--pass", args.passes, PASSES)
    given = {"dtype": spelling.dtypes(args.dtype, dtypes), "pass": args.passes}
    if args.models:
        check_names("model", args.models, [*WHOLE_MODELS, "all"])
        chosen = "models" if "all" in args.models else ",".join(args.models)
        if not (cells := preset_cells(chosen, given)):
            models = ", ".join(args.models)
            raise ValueError(f"--pass {','.join(args.passes)}: {models} has no such pass")
        return cells
    given |= {key: [vars(args)[key]] for key in ("mask", "weights", "option") if vars(args)[key]}
    wanted = [ops.resolve(name) for name in args.op]
    if args.shapes and args.preset:
        raise ValueError("give either --shapes or --preset")
    if args.shapes:
        lines: list[Line] = []
        for text in args.shapes:
            lines += read_lines(Path(text[1:])) if text.startswith("@") else [parse_line(text)]
        return [cell for line in lines for cell in cells_in(line, given, wanted)]
    preset = args.preset or ("all" if wanted else "quick")
    check_names("--preset", preset.split(","), [*PRESETS, "all"])
    cells = [cell for cell in preset_cells(preset, given) if not wanted or cell.op in wanted]
    if not cells:
        raise ValueError(f"--preset {preset} has no cell of --op {','.join(args.op)}")
    return cells


def check_names(flag: str, given: Sequence[str], allowed: Collection[str]) -> None:
    for name in given:
        if name not in allowed:
            raise ValueError(f"{flag} {name!r}: allowed are {', '.join(allowed)}")


# Lists that replace the lists of a line, by the keys in `shapes.LISTS`.
Lists = Mapping[str, Sequence[str]]
_NONE: Lists = {}


def preset_cells(name: str, given: Lists = _NONE) -> list[Cell]:
    """The cells of presets and whole models, such as "a,b" or "all"."""
    cells: list[Cell] = []
    for preset in ALL if name == "all" else name.split(","):
        lines = _FOUND[preset].lines
        found = [cell for line in lines for cell in cells_in(line, given, preset=preset)]
        if preset in COMMON_FIRST:
            found.sort(key=lambda c: (c.label in RARER, DTYPES.index(c.dtype), c.passes != "fwd"))
        cells += found
    return cells


def cells_in(line: Line, given: Lists, wanted: Sequence[str] = (), preset: str = "") -> list[Cell]:
    """Every combination of a line, without passes that the operator lacks."""
    usual: Lists = {"dtype": ["fp32"], "pass": ["fwd"]}
    if preset:
        usual = {"dtype": ["fp32", "bf16"], "pass": ["fwd", "fwd+bwd"]}
    own = line.lists | {"dtype": spelling.dtypes(line.lists.get("dtype", ()), DTYPES, "dtype=")}
    check_names("pass=", own.get("pass", ()), PASSES)
    lists = {key: given.get(key) or own.get(key) or usual.get(key, ["none"]) for key in LISTS}
    cells = []
    for op in [ops.resolve(line.op)] if line.op else wanted or ["sdpa"]:
        if wanted and op not in wanted:
            continue
        operator = ops.get(op)
        passes = [name for name in lists["pass"] if name in operator.PASSES]
        if not passes and not preset:
            wrong = ",".join(lists["pass"])
            raise ValueError(f"--pass {wrong}: {op} has {','.join(operator.PASSES)}")
        kinds = [*itertools.product(*(lists | {"pass": passes}).values())]
        cells += [
            Cell(op, sizes, dtype, name, mask, weights, option, preset=preset, label=line.label)
            for sizes in parse_shapes(line.shape, operator.SIZES)
            for dtype, name, mask, weights, option in kinds
        ]
    return cells
