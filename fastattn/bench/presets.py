"""The cells of presets.txt, which has the shapes of real models."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fastattn.bench import ops
from fastattn.bench.cells import DTYPES, PASSES, Cell
from fastattn.bench.shapes import Line, parse_line, parse_shapes


class Preset(NamedTuple):
    about: str
    lines: list[Line]


def _read(path: Path) -> dict[str, Preset]:
    """The sections of the file by their names."""
    found: dict[str, Preset] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        if text.startswith("["):
            name, _, about = text[1:].partition("]")
            found[name] = preset = Preset(about.strip(), [])
        elif text and not text.startswith("#"):
            preset.lines.append(parse_line(text))
    return found


_SECTIONS = _read(Path(__file__).with_name("presets.txt"))
# Whole models, by their names in `bench model`.
WHOLE_MODELS = {
    name.removeprefix("model "): preset.lines
    for name, preset in _SECTIONS.items()
    if name.startswith("model ")
}
PRESETS = {name: preset for name, preset in _SECTIONS.items() if " " not in name}
PRESETS["models"] = Preset(
    f"whole models: {', '.join(WHOLE_MODELS)} (one alone: `bench model NAME`)",
    [line for lines in WHOLE_MODELS.values() for line in lines],
)
# Runs in little time may end after any cell, so here the common cells come first.
_COMMON_FIRST = ("quick", "dropin")
_RARER = ("BERT-base MHA, 512 tokens", "BERT-base MHA, 512 tokens, weights returned")
_ALL = tuple(name for name in PRESETS if name not in (*_COMMON_FIRST, "serving", "models"))


def line_cells(
    line: Line, dtypes: Sequence[str], passes: Sequence[str], op: str = "", preset: str = ""
) -> list[Cell]:
    """Every combination of the line's shapes with dtypes and passes.

    Passes that the operator does not have are left out.
    """
    operator = ops.get(op := op or line.op)
    options = [line.listed(key) or ["none"] for key in ("mask", "weights", "option")]
    return [
        Cell(op, sizes, dtype, direction, *chosen, preset=preset, label=line.label)
        for sizes in parse_shapes(line.shape, operator.SIZES)
        for chosen in itertools.product(*options)
        for dtype in dtypes
        for direction in passes
        if direction in operator.PASSES
    ]


def _cells(
    lines: Sequence[Line], dtypes: Sequence[str], passes: Sequence[str], preset: str
) -> list[Cell]:
    cells = []
    for line in lines:
        of_line = dtypes or line.listed("dtype") or ("fp32", "bf16")
        directions = passes or line.listed("pass") or ("fwd", "fwd+bwd")
        cells += line_cells(line, of_line, directions, preset=preset)
    return cells


def model_cells(
    names: Sequence[str], dtypes: Sequence[str] = (), passes: Sequence[str] = ()
) -> list[Cell]:
    """The cells of whole models; `all` is every one. Raises ValueError for an unknown name."""
    for name in names:
        if name not in (*WHOLE_MODELS, "all"):
            raise ValueError(f"model {name!r}: known are {', '.join([*WHOLE_MODELS, 'all'])}")
    chosen = WHOLE_MODELS if "all" in names else dict.fromkeys(names)
    lines = [line for name in chosen for line in WHOLE_MODELS[name]]
    cells = _cells(lines, dtypes, passes, "models")
    if not cells:
        raise ValueError(f"--pass {','.join(passes)}: {', '.join(names)} has no such pass")
    return cells


def preset_cells(name: str, dtypes: Sequence[str] = (), passes: Sequence[str] = ()) -> list[Cell]:
    """The cells of presets, such as "a,b" or "all"; dtypes and passes replace their defaults."""
    cells = []
    for preset in _ALL if name == "all" else name.split(","):
        if preset not in PRESETS:
            raise ValueError(f"--preset {preset!r}: allowed are {', '.join([*PRESETS, 'all'])}")
        of_preset = _cells(PRESETS[preset].lines, dtypes, passes, preset)
        if preset in _COMMON_FIRST:
            of_preset.sort(key=_rarity)
        cells += of_preset
    return cells


def _rarity(cell: Cell) -> tuple[bool, int, int]:
    return cell.label in _RARER, DTYPES.index(cell.dtype), PASSES.index(cell.passes)
