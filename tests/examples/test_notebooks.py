"""The notebooks in examples/ run, and their stored outputs are current."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.ipynb"))


def value_of(source: str, names: dict[str, Any]) -> Any:
    """The output of a cell: the value of its last expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.usefixtures("native")
def test_stored_outputs_are_current(path: Path) -> None:
    names: dict[str, Any] = {}
    shown = 0
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        value = value_of("".join(cell["source"]), names)
        for output in cell["outputs"]:
            for kind, lines in output["data"].items():
                show = value._repr_html_ if kind == "text/html" else value.__repr__
                assert show() == "".join(lines)
                shown += 1
    assert shown


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS
