"""A bug put into a source on purpose, for the tests that ask whether a case would find it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """Its quotation and the source are compared without white space, so formatting is free."""

    name: str
    file: str  # in the folder of the kernels
    old: str  # its only occurrence ...
    new: str  # ... becomes this

    def changed(self, source: str) -> str:
        """Return ``source`` with the bug. Raises ValueError unless it has ``old`` exactly once."""
        old, new = ("".join(text.split()) for text in (self.old, self.new))
        if not old or old == new:
            raise ValueError(f"mutant {self.name!r} changes nothing: {self.old!r}")
        found = list(re.finditer(r"\s*".join(map(re.escape, old)), source))
        if not found:
            raise ValueError(f"mutant {self.name!r}: {self.file} does not have {self.old!r}")
        if len(found) > 1:
            lines = ", ".join(str(source.count("\n", 0, match.start()) + 1) for match in found)
            raise ValueError(
                f"mutant {self.name!r}: {self.file} has {self.old!r} in the lines {lines};"
                " quote more of the one that is meant"
            )
        begin, end = found[0].span()
        return source[:begin] + self.new.strip() + source[end:]

    def put_into(self, kernels: Path) -> None:
        """Change the file in the folder ``kernels``."""
        file = kernels / self.file
        file.write_text(self.changed(file.read_text()))
