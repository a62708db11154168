"""What can be tested here: the backends that are built, each on every instruction set it has."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

__all__ = ["Target", "targets"]


@dataclass(frozen=True)
class Target:
    """A backend, on one of its instruction sets if it has several."""

    backend: str
    isa: str | None = None

    def __str__(self) -> str:
        return self.backend if self.isa is None else f"{self.backend}-{self.isa}"

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(f"fastattn.backends.{self.backend}")

    def is_current(self) -> bool:
        """Is this what runs when nobody asks for anything else?"""
        if self.isa is None:
            return True
        isa: str = importlib.import_module("fastattn._cpu").build_info()["isa"]
        return self.isa == isa

    @contextlib.contextmanager
    def active(self) -> Iterator[ModuleType]:
        """Run on this target's instruction set within the block."""
        if self.isa is None:
            yield self.module
            return
        native = importlib.import_module("fastattn._cpu")
        before = native.build_info()["isa"]
        native.set_isa(self.isa)
        try:
            yield self.module
        finally:
            native.set_isa(before)


def targets() -> list[Target]:
    """Return the native targets of this machine and build, the one that is used by default last."""
    found: list[Target] = []
    if importlib.util.find_spec("fastattn._cpu") is not None:
        native = importlib.import_module("fastattn._cpu")
        found += [Target("cpu", isa) for isa in native.build_info()["supported"]]
    return found
