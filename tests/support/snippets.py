"""Runs the Python blocks of a page."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
OUTPUT = re.compile(r"\n\n```\n(.*?)^```$", re.MULTILINE | re.DOTALL)  # right after a block


def blocks(page: Path) -> list[tuple[int, str]]:
    """The Python blocks of a page, each with the number of its first line."""
    text = page.read_text()
    return [
        (1 + text.count("\n", 0, match.start(2)), textwrap.dedent(match[2]))
        for match in BLOCK.finditer(text)
    ]


def shown(page: Path) -> str:
    """The output that a page shows for its Python blocks."""
    text = page.read_text()
    after = (OUTPUT.match(text, match.end()) for match in BLOCK.finditer(text))
    return "".join(match[1] for match in after if match)


def run(page: Path, block: tuple[int, str], names: dict[str, Any]) -> None:
    """Run a block; errors name the line of the page."""
    line, source = block
    exec(compile("\n" * (line - 1) + source, str(page), "exec"), names)
