"""Components whose absence fails a test run."""

from __future__ import annotations

import os


def _is_set(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


# `make` sets it: a native core that is missing then fails the tests that need it.
REQUIRE_NATIVE = _is_set("FASTATTN_REQUIRE_NATIVE")
