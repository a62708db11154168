"""Plans of one test alone (``fastattn.call``), and calls without any."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TypeVar

import pytest

from fastattn.call import Plans

Result = TypeVar("Result")


def fresh(monkeypatch: pytest.MonkeyPatch, module: str) -> Plans:
    """Empty plans for the public function of this module of ``fastattn.ops``."""
    owner = importlib.import_module(f"fastattn.ops.{module}")
    plans = Plans(owner.plans.rows)
    monkeypatch.setattr(owner, "plans", plans)
    return plans


def count(plans: Plans) -> int:
    return len(plans._plans)


def without_plans(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Result]) -> Result:
    """The results of the complete path."""
    with monkeypatch.context() as patch:
        patch.setattr("fastattn.call.may_plan", lambda: False)
        return run()
