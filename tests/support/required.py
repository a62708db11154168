"""What a run of the tests must not go without."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def _is_set(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


# `make` sets it: a native core that is missing then fails the tests that need it.
REQUIRE_NATIVE = _is_set("FASTATTN_REQUIRE_NATIVE")
# `make test-complete COUNTS=1` sets it: instructions of the GPU kernels are counted, or tests fail.
REQUIRE_COUNTS = _is_set("FASTATTN_REQUIRE_COUNTS")


def no_counts(reason: str) -> NoReturn:
    """Skips a test that cannot compare its counts of instructions, or fails it."""
    words = f"instructions were not counted: {reason}"
    if REQUIRE_COUNTS:
        pytest.fail(words, pytrace=False)
    pytest.skip(words)
