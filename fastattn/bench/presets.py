"""The shapes of real models, from presets.txt."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from fastattn.bench.shapes import Line, parse_line


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
COMMON_FIRST = ("quick", "dropin")
RARER = ("BERT-base MHA, 512 tokens", "BERT-base MHA, 512 tokens, weights returned")
# The presets of `--preset all`.
ALL = tuple(name for name in PRESETS if name not in (*COMMON_FIRST, "serving", "models"))
