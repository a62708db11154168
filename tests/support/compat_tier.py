"""What test_compat.py runs with every promised version of PyTorch, and without each of its
private names: each way that a call can take, once, against an equation.

    python tests/support/compat_tier.py                        # all of it
    python tests/support/compat_tier.py 3 torch._C._any_requires_grad torch.Tensor()._base

With a number and names, the quick part runs for each name in a process that is forked before
fastattn is imported, where PyTorch does not have that name while `fastattn.compat` looks for it.
With 3, every third operator runs: which ones takes turns from name to name.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from compat_cases import operators, rand, softmax_over
from compat_tools import TOOLS
from compat_ways import (
    EXPECTED,
    FORWARD_ALONE,
    QUICK,
    by_the_reference_below_a_mode,
    check_operator,
    expected,
)

# --- taking names away ----------------------------------------------------------------------------


class _Gone:
    """An attribute of a class that no instance has."""

    def __get__(self, instance: Any, owner: Any) -> Any:
        raise AttributeError("taken away by a test")

    def __set__(self, instance: Any, value: Any) -> None:
        pass


_GONE = _Gone()


class _Without:
    """Another object, but for one attribute."""

    def __init__(self, whole: Any, name: str) -> None:
        self._whole, self._name = whole, name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise AttributeError(name)
        return getattr(self._whole, name)


@contextlib.contextmanager
def without(path: str) -> Iterator[None]:
    """Take a name of PyTorch away. PyTorch itself needs most of them: give it back soon."""
    *owners, name = path.removesuffix(".default").split(".")
    holder: Any = None
    owner: Any = torch
    for part in owners[1:]:
        holder, owner = owner, getattr(owner, part.removesuffix("()"))
    if owners[-1].endswith("()"):
        own = vars(owner).get(name, _GONE)
        setattr(owner, name, _GONE)
        try:
            yield
        finally:
            delattr(owner, name) if own is _GONE else setattr(owner, name, own)
    elif owners[:2] == ["torch", "ops"]:  # looked up again on every access
        setattr(holder, owners[-1], _Without(owner, name))
        try:
            yield
        finally:
            setattr(holder, owners[-1], owner)
    else:
        value = getattr(owner, name)
        delattr(owner, name)
        try:
            yield
        finally:
            setattr(owner, name, value)


# --- without a name -------------------------------------------------------------------------------


def _import_without(path: str) -> None:
    """Import fastattn, where `fastattn.compat` finds no such name in PyTorch."""
    spec = importlib.util.find_spec("fastattn")
    assert spec is not None
    assert spec.loader is not None
    package = sys.modules["fastattn"] = importlib.util.module_from_spec(spec)
    with without(path):  # all else is imported with PyTorch whole
        compat = importlib.import_module("fastattn.compat")
    spec.loader.exec_module(package)
    assert package.compat is compat
    assert compat.NAMES[path] is False


def failures_without(path: str, some: slice) -> list[str]:
    """What goes wrong in some of the operators without that name, in a process of its own."""
    _import_without(path)
    tasks: list[tuple[Callable[..., Any], Any]] = [(tool, ()) for tool in TOOLS]
    tasks += [(check_operator, (name, way)) for way in QUICK for name in list(operators())[some]]
    failed = []
    for task, arguments in tasks:
        try:
            task(*arguments)
        except Exception:  # noqa: PERF203
            names = [getattr(x, "__name__", x) for x in (task, *arguments)]
            failed.append(f"without {path}: {names}\n{traceback.format_exc()}")
    return failed


def _modules_that_are_imported_late() -> list[str]:
    """What PyTorch imports when it is first asked for something, in the order in which it does."""
    before = set(sys.modules)
    for way in set(QUICK) - {by_the_reference_below_a_mode}:
        way(lambda *xs: softmax_over(xs[0], xs[0].mT), [rand(2, 3)])
    return [name for name in sys.modules if name not in before]


def _all_expected() -> bytes:
    for way in QUICK:
        for name in operators():
            if way not in FORWARD_ALONE.get(name, ()):
                expected(name, way)
    return pickle.dumps(EXPECTED)  # as bytes: tensors would be sent as shared memory


def main(every: int, paths: list[str]) -> int:
    warnings.simplefilter("ignore")
    # Imported and computed once for all of them. In a process of its own, since some versions of
    # PyTorch take no backward pass in a fork of a process that has made one.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as elsewhere:
        late = elsewhere.submit(_modules_that_are_imported_late).result()
        EXPECTED.update(pickle.loads(elsewhere.submit(_all_expected).result()))
    for name in late:
        if not name.startswith("fastattn"):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would copy the pages of all that is imported
    failed = 0
    for n, path in enumerate(paths):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            status = 2
            try:
                failures = failures_without(path, slice(n % every, None, every))
                print(*failures[:9], f"{path}: {len(failures)} failed", sep="\n", flush=True)
                status = bool(failures)
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(status)
        failed += os.waitpid(child, 0)[1] != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else 1, sys.argv[2:]))
