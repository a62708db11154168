"""Tables for terminals and notebooks."""

from __future__ import annotations

import html
from collections.abc import Sequence


def as_text(rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to equal widths; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (map(str.ljust, row, widths) for row in rows)
    return "\n".join("  ".join(row).rstrip() for row in padded)


def as_html(rows: Sequence[Sequence[str]]) -> str:
    cells_of_rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    return "<table>" + "".join(f"<tr>{cells}</tr>" for cells in cells_of_rows) + "</table>"
