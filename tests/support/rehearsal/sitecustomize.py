"""Python imports this first in each process of a rehearsal of `make gpu-day`.

`fastattn._cuda` is the emulated module, Triton's interpreter is mended, and packages that a GPU
machine may lack are not found.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

# A GPU machine has torch, triton, numpy and pytest, and what these need. These it may lack:
ABSENT = set(
    """expecttest hypothesis matplotlib ninja peft pybind11 rich scipy sklearn transformers
    xdist""".split()
)


class Rehearsal(PathFinder):
    """The usual finder of modules but for these names."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in ABSENT:
            return None
        if name == "fastattn.backends.triton":
            importlib.import_module("triton_interpreter").mend()
        library = os.environ["FASTATTN_REHEARSAL"]
        if name == "fastattn._cuda" and os.path.exists(library):
            return importlib.util.spec_from_file_location(name, library)
        return super().find_spec(name, path, target)


if "FASTATTN_REHEARSAL" in os.environ:
    sys.meta_path[sys.meta_path.index(PathFinder)] = Rehearsal
