"""examples/hopfield_digits.py in a small form: recall, energies, resuming, the picture."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path
from types import ModuleType

import pytest
from child_process import run_python

EXAMPLE = Path(__file__).parents[2] / "examples" / "hopfield_digits.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("hopfield_digits", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SMALL = ["--made-up", "--stored", "60", "--queries", "30", "--betas", "0.1", "1"]


def test_recalls_what_was_hidden(example: ModuleType) -> None:
    """At a low beta everything is the mean; at a higher one all random patterns are recalled."""
    low, high = example.main(SMALL)
    assert low["recall"] < 0.2
    assert high["recall"] == 1.0
    assert high["error"] < 1e-3
    assert high["most"] < 20
    for row in (low, high):
        curve = row["energy"]
        assert all(after <= before + 1e-4 for before, after in itertools.pairwise(curve))


def test_an_interrupted_run_resumes(example: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    example.main([*SMALL[:-1], "--out", str(out)])
    first = json.loads(out.read_text())["rows"]
    assert len(first) == 1
    first[0]["seconds"] = -1.0
    out.write_text(json.dumps({"recipe": json.loads(out.read_text())["recipe"], "rows": first}))
    rows = example.main([*SMALL, "--out", str(out)])
    assert [row["seconds"] == -1.0 for row in rows] == [True, False]
    with pytest.raises(SystemExit, match="is of another run"):
        example.main([*SMALL, "--seed", "1", "--out", str(out)])


def test_draws(example: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    example.main([*SMALL, "--picture", str(tmp_path / "digits.png")])
    assert (tmp_path / "digits.png").stat().st_size > 10_000


@pytest.mark.complete
def test_a_missing_scikit_learn_is_named(tmp_path: Path) -> None:
    """Without scikit-learn."""
    hidden = tmp_path / "sklearn.py"
    hidden.write_text("raise ImportError('hidden')")
    run = run_python(str(EXAMPLE), status=1, PYTHONPATH=f"{tmp_path}:{EXAMPLE.parents[1]}")
    assert "pip install 'fastattn[digits]'" in run.stderr
