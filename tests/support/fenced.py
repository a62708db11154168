"""Runs a script in a process of its own, which ends there if it touches what it may not.

Tensors are made with `fence=True`: each ends where a page begins that cannot be read.
"""

from __future__ import annotations

import os
import subprocess
import sys

_BEFORE = "import sys, torch\n"


def run_fenced(script: str, *arguments: object) -> None:
    """Run ``script`` with ``sys.argv[1:]``; it prints what it is about to do."""
    child = subprocess.run(
        [sys.executable, "-c", f"{_BEFORE}{script}\nprint('done')", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    last = child.stdout.strip().splitlines()[-1:]
    assert last == ["done"], f"died in {last}, status {child.returncode}\n{child.stderr[-2000:]}"
