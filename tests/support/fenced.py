"""Runs a script in a process of its own, which ends there if it touches what it may not.

Tensors are made with `fence=True`: each ends where a page begins that cannot be read.
"""

from __future__ import annotations

from child_process import run_python

_BEFORE = "import sys, torch\n"


def run_fenced(script: str, *arguments: object) -> None:
    """Run ``script`` with ``sys.argv[1:]``; it prints what it is about to do."""
    whole = f"{_BEFORE}{script}\nprint('done')"
    child = run_python("-c", whole, *map(str, arguments), PYTHONFAULTHANDLER="1")
    last = child.stdout.strip().splitlines()[-1:]
    assert last == ["done"], f"died in {last}, status {child.returncode}\n{child.stderr[-2000:]}"
