"""Fixtures: a small source tree to build, and an environment to install into."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from installation import STAND_IN_KERNEL, STAND_IN_MODULE, copy_source, run


@pytest.fixture
def small_source(tmp_path: Path) -> Path:
    """A copy of the source whose kernels are a small stand-in that compiles fast."""
    folder = copy_source(tmp_path / "source")
    shutil.rmtree(folder / "csrc/cpu")
    (folder / "csrc/cpu/kernels").mkdir(parents=True)
    # Every instruction set has a table, even if it shares most kernels with another.
    (folder / "csrc/cpu/kernels/table.cpp").write_text(STAND_IN_KERNEL)
    (folder / "csrc/cpu/isa.cpp").write_text(STAND_IN_MODULE)
    return folder


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A new Python environment, which sees torch and what builds need, but no fastattn."""
    environment = tmp_path / "environment"
    run([sys.executable, "-m", "venv", "--without-pip", environment], tmp_path)
    site = next(environment.glob("lib/python*/site-packages"))
    # The .pth file of an editable install, fastattn's own among them, is not read along this way.
    (site / "outer.pth").write_text(str(Path(torch.__file__).parents[1]) + "\n")
    return environment
