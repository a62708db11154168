"""What a run of the tests must not go without."""

from __future__ import annotations

import os

# `make` sets it: a native core that is missing then fails the tests that need it.
REQUIRE_NATIVE = os.environ.get("FASTATTN_REQUIRE_NATIVE", "0") not in ("", "0")
