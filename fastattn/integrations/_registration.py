"""Shared by the integrations: registrations that can be undone, and version checks."""

from __future__ import annotations

import abc
import importlib
import re
import threading
from collections.abc import MutableMapping
from typing import Any, Generic, TypeVar

Self = TypeVar("Self", bound="Undoable")
Name = TypeVar("Name")  # what a registry serves: the name of a function, or a module
ABSENT = object()  # the previous value of an entry that did not exist

# Guards every change that an integration makes. Reentrant: the garbage collector may delete an
# accelerated model, which takes the lock, while the same thread holds it.
lock = threading.RLock()


class Undoable(abc.ABC):
    """A change that is undone by ``undo()``, or by the end of a ``with`` block."""

    @abc.abstractmethod
    def undo(self) -> None: ...

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


class Registry(abc.ABC, Generic[Name]):
    """The registry of another library, with a reference count for each served name."""

    def __init__(self, counts: MutableMapping[Name, int] | None = None) -> None:
        self._counts: MutableMapping[Name, int] = {} if counts is None else counts

    def serve(self, name: Name) -> None:
        """Count a registration of the name; the first one adds it."""
        if not self._counts.get(name):
            self.add(name)
        self._counts[name] = self._counts.get(name, 0) + 1

    def release(self, name: Name) -> None:
        """Undo a registration of the name; the last one removes it."""
        self._counts[name] -= 1
        if not self._counts[name]:
            self.remove(name)

    @abc.abstractmethod
    def add(self, name: Name) -> None: ...

    @abc.abstractmethod
    def remove(self, name: Name) -> None: ...


class Registration(Undoable):
    """The names that one call of ``register`` serves. Usable as a context manager.

    Registrations may be undone in any order and from any thread, each any number of times: a name
    is served until the last registration that serves it is undone. A function that other code has
    registered under the name in the meantime stays.
    """

    def __init__(self, registry: Registry[Name], names: tuple[Name, ...]) -> None:
        self._registry: Registry[Any] = registry
        self._names: tuple[Any, ...] = ()
        with lock:
            for name in names:
                registry.serve(name)
                self._names += (name,)

    def undo(self) -> None:
        """Restore the previous registration. A second call does nothing."""
        with lock:
            names, self._names = self._names, ()
            for name in names:
                self._registry.release(name)


def restore(entries: MutableMapping[str, Any], name: str, before: Any) -> None:
    """Give an entry its previous value, which may be ABSENT."""
    if before is ABSENT:
        del entries[name]
    else:
        entries[name] = before


def check_version(library: str, oldest: tuple[int, int], below: tuple[int, int]) -> None:
    """Raise an ImportError that names the extra if a library is missing or out of its range."""
    allowed = f">={oldest[0]}.{oldest[1]},<{below[0]}"
    hint = f"pip install 'fastattn[{library}]' installs a version in the range {allowed}"
    requirement = f"fastattn.integrations.{library} needs {library}{allowed}"
    try:
        version = importlib.import_module(library).__version__
    except ImportError as error:
        raise ImportError(f"{requirement}: {error}. {hint}") from error
    number = re.match(r"(\d+)\.(\d+)", version)
    if number is None or not oldest <= (int(number[1]), int(number[2])) < below:
        raise ImportError(f"{requirement}, but {library} {version} is installed. {hint}")
