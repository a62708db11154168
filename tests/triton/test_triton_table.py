"""The table of launches, and the user's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

_table: Any = pytest.importorskip("fastattn.backends.triton._table", exc_type=ImportError)
Launch = _table.Launch


@pytest.fixture
def own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table of the user, empty at first."""
    path = tmp_path / "table.json"
    monkeypatch.setenv("FASTATTN_TRITON_TABLE", str(path))
    monkeypatch.setattr(_table, "table_of", _table.table_of.__wrapped__)
    return path


def test_a_table_of_the_user_comes_first(own_table: Path) -> None:
    own_table.write_text(json.dumps({"sm_90": {"forward": {"16": [[128, [64, 32, 4, 2]]]}}}))

    def chosen(*key: Any) -> Any:
        return _table.choose(*key)

    assert chosen("sm_90", "forward", 16, 100) == Launch(64, 32, 4, 2)
    ours = _table.ARCHITECTURES["sm_90"]
    assert chosen("sm_90", "forward", 16, 200) == ours["forward"][16][2][1]  # wider: ours
    assert chosen("sm_90", "forward", 32, 64) == ours["forward"][32][0][1]
    assert chosen("sm_90", "decode", 16, 64) == ours["decode"][16][0][1]
    assert chosen("sm_80", "forward", 16, 64) == _table.ARCHITECTURES["sm_80"]["forward"][16][0][1]


@pytest.mark.parametrize(
    ("architecture", "nearest"),
    [("sm_86", "sm_80"), ("sm_103", "sm_100"), ("sm_120", "sm_80"), ("gfx950", "gfx942")],
)
def test_an_unknown_chip_uses_the_nearest_table(architecture: str, nearest: str) -> None:
    assert _table.table_of(architecture) is _table.ARCHITECTURES[nearest]


def test_only_ptxas_gets_a_register_limit() -> None:
    """AMD's compiler would reject an option that it does not know."""
    launches = [
        launch
        for by_bits in _table.ARCHITECTURES["gfx942"].values()
        for rows in by_bits.values()
        for _, launch in rows
    ]
    assert launches
    assert not any(launch.greedy for launch in launches)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"sm_90": {"forwards": {"16": []}}}', '{"sm_90": {"forward": {"16": [3]}}}'],
)
def test_an_invalid_table_file_is_named(own_table: Path, text: str) -> None:
    own_table.write_text(text)
    with pytest.raises(ValueError, match=r"table\.json is no table of launches"):
        _table.choose("sm_90", "forward", 16, 64)
