"""examples/zero_shot_entities.py in a small form: stock's scores, spans apart."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch


def test_spans_are_found_and_scores_equal_stocks_up_to_rounding() -> None:
    pytest.importorskip("transformers")
    path = Path(__file__).parents[2] / "examples/zero_shot_entities.py"
    spec = importlib.util.spec_from_file_location("zero_shot_entities", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    small = ["--layers", "2", "--width", "64", "--rounds", "1"]
    (row,) = example.main(["--tokens", "70", *small])
    assert row["deviation"] < 1e-5
    spans = example.entities(torch.rand(20, example.LONGEST, len(example.TYPES)), 5)
    words = [word for first, last, *_ in spans for word in range(first, last + 1)]
    assert len(spans) == 5
    assert len(set(words)) == len(words)
    assert max(words) < 20
