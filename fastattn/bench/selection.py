"""The arguments and the presets that select cells, and the grammar of `--shapes`.

A shape is such as `B=1,H=8,Lq=128:8192:x2,Lk=Lq,D=64`. A value may also be a list 1|4|16. A shape
with several ranges or lists means every combination. If an operator has H and one of D and E, the
other of the two may be given instead. A line, on the command line or in a file, may contain more:

    [OPERATOR] [SHAPE] [dtype=LIST] [pass=LIST] [mask=LIST] [weights=LIST] [option=LIST] [# LABEL]
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fastattn import spelling
from fastattn.bench import ops
from fastattn.bench.cells import DTYPES, PASSES, Cell, Defaults, with_defaults
from fastattn.spelling import name_list

MAX_SHAPES = 1000
_VALUE = re.compile(r"(\d+)(?::(\d+):([x+])(\d+))?")
LISTS = ("dtype", "pass", "mask", "weights", "option")  # keys of a line


class Line(NamedTuple):
    """A parsed line of `--shapes`; missing parts are empty."""

    op: str
    shape: str
    lists: dict[str, list[str]]  # by the keys in LISTS
    label: str


def parse_line(text: str) -> Line:
    """Parses a line. Raises ValueError, which names the unexpected word."""
    words, _, label = text.partition("#")
    op, shape, lists = "", "", {}
    for word in words.split():
        key, equals, value = word.partition("=")
        if equals and key in LISTS:
            lists[key] = [name for name in value.split(",") if name]
        elif equals and not shape:
            shape = word
        elif not equals and not op and not shape:
            op = word
        else:
            form = " ".join(f"[{name}=LIST]" for name in LISTS)
            raise ValueError(
                f"--shapes: {word!r} does not belong in {text.strip()!r}; the form is "
                f"[OPERATOR] [SHAPE] {form} [# LABEL]"
            )
    if not shape and not op:
        raise ValueError(f"--shapes: {text.strip()!r} has no KEY=VALUE and no operator")
    return Line(op, shape, lists, label.strip())


def read_lines(path: Path) -> list[Line]:
    """The lines of a file, without empty ones and comments, which begin with #."""
    lines = []
    for number, text in enumerate(path.read_text().splitlines(), 1):
        if text.strip() and not text.lstrip().startswith("#"):
            try:
                lines.append(parse_line(text))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not lines:
        raise ValueError(f"--shapes @{path}: the file has no shape")
    return lines


def parse_shapes(text: str, defaults: Defaults) -> list[dict[str, int]]:
    """Every combination that `text` describes, each with all keys of the operator."""
    # Other keys that may be given instead of one of the operator.
    aliases = ["L"] if "Lq" in defaults and "L" not in defaults else []
    if "H" in defaults:
        aliases += [{"D": "E", "E": "D"}[key] for key in ("D", "E") if key in defaults]
    keys = [*defaults, *aliases]
    ranges: dict[str, list[int]] = {}
    references: dict[str, str] = {}  # to other keys
    for part in text.split(",") if text else ():
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not value:
            raise ValueError(
                f"--shapes: {part.strip()!r} is not KEY=VALUE; keys are {', '.join(keys)}"
            )
        if key not in keys:
            raise ValueError(f"--shapes: unknown key {key!r}; keys are {', '.join(keys)}")
        if key in ranges or key in references:
            raise ValueError(f"--shapes: {key} is given twice")
        if value in keys:
            references[key] = value
        else:
            ranges[key] = _values(key, value, defaults.get(key))
    count = math.prod(map(len, ranges.values()))
    if count > MAX_SHAPES:
        raise ValueError(f"--shapes: {count} combinations, at most {MAX_SHAPES} are allowed")
    return [
        _complete(dict(zip(ranges, combination, strict=True)), references, defaults)
        for combination in itertools.product(*ranges.values())
    ]


def _values(key: str, text: str, default: int | str | None) -> list[int]:
    values: list[int] = []
    for item in text.split("|"):
        match = _VALUE.fullmatch(item)
        if match is None:
            raise ValueError(
                f"--shapes: {key}={text} is neither a number, a list 1|2|4, a range FROM:TO:x2 or "
                "FROM:TO:+64, nor another key"
            )
        value, end, by = int(match[1]), int(match[2] or match[1]), int(match[4] or 1)
        if match[2] and (value < 1 or value > end or by < (2 if match[3] == "x" else 1)):
            raise ValueError(
                f"--shapes: the range {key}={item} does not go upwards from at least 1"
            )
        values.append(value)
        while match[2] and (value := value * by if match[3] == "x" else value + by) <= end:
            values.append(value)
    least = 0 if default == 0 else 1  # only a size whose default is 0 may be 0
    if min(values) < least:
        raise ValueError(f"--shapes: {key}={text} must be at least {least}")
    return values


def _complete(
    sizes: dict[str, int], references: Mapping[str, str], defaults: Defaults
) -> dict[str, int]:
    """Resolves references and aliases, and adds the defaults."""
    for key, other in references.items():
        if other not in sizes:
            raise ValueError(f"--shapes: {key}={other}, but {other} is not given as a number")
        sizes[key] = sizes[other]
    if "L" in sizes and "L" not in defaults:
        if "Lq" in sizes or "Lk" in sizes:
            raise ValueError("--shapes: give either L or Lq and Lk")
        sizes["Lq"] = sizes["Lk"] = sizes.pop("L")
    elif "Lk" in sizes and defaults["Lk"] == "Lq":
        sizes.setdefault("Lq", sizes["Lk"])
    if "H" in defaults:  # E = H·D
        heads = sizes.get("H", int(defaults["H"]))
        if "E" in sizes and "D" in sizes and sizes["D"] * heads != sizes["E"]:
            raise ValueError(
                f"--shapes: E={sizes['E']} is not H·D = {heads}·{sizes['D']}; give either E or D"
            )
        if "D" in defaults and (embed := sizes.pop("E", None)) is not None:
            if embed % heads:
                raise ValueError(f"--shapes: E={embed} is not a multiple of H={heads}")
            sizes["D"] = embed // heads
        if "E" in defaults and (width := sizes.pop("D", None)) is not None:
            sizes["E"] = heads * width
    return with_defaults(sizes, defaults)


# Presets and arguments


class Preset(NamedTuple):
    about: str
    lines: list[Line]


def _read_presets() -> dict[str, Preset]:
    """The sections of presets.txt, and the whole models, which have no description."""
    presets: dict[str, Preset] = {}
    for text in Path(__file__).with_name("presets.txt").read_text(encoding="utf-8").splitlines():
        if text.startswith("["):
            section, _, about = text[1:].partition("] ")
            presets[section] = Preset(about, [])
        elif text and not text.startswith("#"):
            tags, _, shape = text.rpartition(": ")
            for name in (section, *(tags.split(",") if tags else ())):
                presets.setdefault(name, Preset("", [])).lines.append(parse_line(shape))
    return presets


_SECTIONS = _read_presets()
PRESETS = {name: preset for name, preset in _SECTIONS.items() if preset.about}
WHOLE_MODELS = {name: preset.lines for name, preset in _SECTIONS.items() if not preset.about}
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
    what.add_argument(
        "--pass", dest="passes", type=name_list, default=[], metavar="LIST", help=words
    )


def cells_of(args: argparse.Namespace, dtypes: Sequence[str] = DTYPES) -> list[Cell]:
    """The cells that the arguments select. Raises ValueError, which names the wrong argument."""
    check_names("--pass", args.passes, PASSES)
    flags = {"dtype": spelling.dtypes(args.dtype, dtypes), "pass": args.passes}
    if args.models:
        check_names("model", args.models, [*WHOLE_MODELS, "all"])
        chosen = "models" if "all" in args.models else ",".join(args.models)
        if not (cells := preset_cells(chosen, flags)):
            models = ", ".join(args.models)
            raise ValueError(f"--pass {','.join(args.passes)}: {models} has no such pass")
        return cells
    flags |= {key: [vars(args)[key]] for key in ("mask", "weights", "option") if vars(args)[key]}
    only = [ops.resolve(name) for name in args.op]
    if args.shapes and args.preset:
        raise ValueError("give either --shapes or --preset")
    if args.shapes:
        lines: list[Line] = []
        for text in args.shapes:
            lines += read_lines(Path(text[1:])) if text.startswith("@") else [parse_line(text)]
        return [cell for line in lines for cell in cells_in(line, flags, only)]
    preset = args.preset or ("all" if only else "quick")
    check_names("--preset", preset.split(","), [*PRESETS, "all"])
    cells = [cell for cell in preset_cells(preset, flags) if not only or cell.op in only]
    if not cells:
        raise ValueError(f"--preset {preset} has no cell of --op {','.join(args.op)}")
    return cells


def check_names(flag: str, names: Sequence[str], allowed: Collection[str]) -> None:
    for name in names:
        if name not in allowed:
            raise ValueError(f"{flag} {name!r}: allowed are {', '.join(allowed)}")


# The lists of flags, which replace the lists of a line, by the keys in LISTS.
Lists = Mapping[str, Sequence[str]]


def preset_cells(name: str, flags: Mapping[str, Sequence[str]] = {}) -> list[Cell]:
    """The cells of presets and whole models, such as "a,b" or "all"."""
    cells: list[Cell] = []
    for preset in ALL if name == "all" else name.split(","):
        lines = _SECTIONS[preset].lines
        group = [cell for line in lines for cell in cells_in(line, flags, preset=preset)]
        if preset in COMMON_FIRST:
            group.sort(key=lambda c: (c.label in RARER, DTYPES.index(c.dtype), c.passes != "fwd"))
        cells += group
    return cells


def cells_in(line: Line, flags: Lists, only: Sequence[str] = (), preset: str = "") -> list[Cell]:
    """Every combination of a line, without passes that the operator lacks."""
    usual: Lists = {"dtype": ["fp32"], "pass": ["fwd"]}
    if preset:
        usual = {"dtype": ["fp32", "bf16"], "pass": ["fwd", "fwd+bwd"]}
    own = line.lists | {"dtype": spelling.dtypes(line.lists.get("dtype", ()), DTYPES, "dtype=")}
    check_names("pass=", own.get("pass", ()), PASSES)
    lists = {key: flags.get(key) or own.get(key) or usual.get(key, ["none"]) for key in LISTS}
    cells = []
    for op in [ops.resolve(line.op)] if line.op else only or ["sdpa"]:
        if only and op not in only:
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
