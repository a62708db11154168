"""What test_compat.py runs where PyTorch lacks a private name.

    python tests/support/compat_without.py torch.Tensor()._base ...  # the commonest calls
    python tests/support/compat_without.py torch.Tensor()._base -- tests/core/test_operators.py

Each name has a process of its own, forked before fastattn is imported. PyTorch itself needs most of
the names, so it lacks one only while `fastattn.compat` is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
import warnings
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as stock_attention
from torch.testing import assert_close


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


def _take_away(path: str, patch: pytest.MonkeyPatch) -> None:
    """Remove a private name of PyTorch, given by its path."""
    *owners, name = path.removesuffix(".default").split(".")
    holder: Any = None
    owner: Any = torch
    for part in owners[1:]:
        holder, owner = owner, getattr(owner, part.removesuffix("()"))
    if owners[-1].endswith("()"):
        patch.setattr(owner, name, _GONE, raising=False)
    elif owners[:2] == ["torch", "ops"]:  # looked up again on every access
        patch.setattr(holder, owners[-1], _Without(owner, name))
    else:
        patch.delattr(owner, name)


def _import_without(path: str) -> Any:
    """Import fastattn, where `fastattn.compat` finds no such name in PyTorch."""
    spec = importlib.util.find_spec("fastattn")
    assert spec is not None
    assert spec.loader is not None
    package = sys.modules["fastattn"] = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.MonkeyPatch.context() as patch:
            _take_away(path, patch)
            compat = importlib.import_module("fastattn.compat")
        spec.loader.exec_module(package)
    assert path in compat.LACKING
    assert [path] * (path in compat.NAMES) == compat.MISSING
    own = [w for w in caught if w.category is RuntimeWarning]
    assert len(own) == len(compat.MISSING)
    for warning in own:
        assert str(warning.message).startswith(f"torch {torch.__version__} lacks {path}, ")
    return package


def check_calls(fa: Any) -> None:
    """The public functions must be right without the private names."""
    torch.manual_seed(0)
    leaves = [torch.randn(2, 2, 5, 4).double().requires_grad_() for _ in range(3)]

    def gradients(attend: Any) -> Any:
        return torch.autograd.grad(attend(*leaves).sin().sum(), leaves)

    assert_close(gradients(fa.scaled_dot_product_attention), gradients(stock_attention))
    stock = torch.nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    module = fa.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    module.load_state_dict(stock.state_dict())
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    with torch.no_grad():
        assert_close(module(x, x, x, padding), stock(x, x, x, padding))
    grads = [
        torch.autograd.grad(m(x, x, x, padding)[0].sin().sum(), list(m.parameters()))
        for m in (module, stock)
    ]
    assert_close(*grads)


def main(paths: list[str], tests: list[str]) -> int:
    """Check each name; return the number of names without which a call or a test fails."""
    failed = 0
    for path in paths:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                warnings.simplefilter("ignore")
                package = _import_without(path)
                status = pytest.main(["-p", "no:cacheprovider", *tests]) if tests else 0
                if not tests:
                    check_calls(package)
            except Exception:
                status = 1
                print(f"without {path}:\n{traceback.format_exc()}", flush=True)
            finally:
                os._exit(status)
        failed += os.waitpid(child, 0)[1] != 0
    return failed


if __name__ == "__main__":
    names = sys.argv[1:]
    at = names.index("--") if "--" in names else len(names)
    sys.exit(main(names[:at], names[at + 1 :]))
