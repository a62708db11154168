"""A mutant finds what it quotes, however that is formatted, or says what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutants import Mutant

SOURCE = "if (a) {\n  wait(b);\n  f(a,\n    b);\n}\nwait(c);\n"


def _mutant(old: str, new: str) -> Mutant:
    return Mutant("late", "kernel.h", old, new)


@pytest.mark.parametrize(
    "old", ["wait(b);f(a,b);", "wait( b ); f(a, b);", "  wait(b);\n\n\tf(a,b);\n"]
)
def test_white_space_and_lines_do_not_matter(old: str) -> None:
    assert _mutant(old, "f(b);").changed(SOURCE) == "if (a) {\n  f(b);\n}\nwait(c);\n"


def test_what_is_around_it_stays_as_it_is() -> None:
    assert _mutant("wait(c);", "").changed(SOURCE) == SOURCE.replace("wait(c);", "")
    assert _mutant("f(a, b)", " \\1\n ").changed(SOURCE) == SOURCE.replace("f(a,\n    b)", "\\1")


def test_a_quotation_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"mutant 'late': kernel\.h does not have 'wait\(d\);'"):
        _mutant("wait(d);", "").changed(SOURCE)


def test_the_lines_of_an_ambiguous_quotation_are_named() -> None:
    with pytest.raises(ValueError, match=r"kernel\.h has 'wait\(' in the lines 2, 6; quote more"):
        _mutant("wait(", "").changed(SOURCE)


@pytest.mark.parametrize(("old", "new"), [("wait(b);", "wait( b );\n"), (" ", "x")])
def test_a_mutant_must_change_something(old: str, new: str) -> None:
    with pytest.raises(ValueError, match="mutant 'late' changes nothing"):
        _mutant(old, new).changed(SOURCE)


def test_it_is_put_into_its_file(tmp_path: Path) -> None:
    (tmp_path / "kernel.h").write_text(SOURCE)
    _mutant("wait(b); f", "g").put_into(tmp_path)
    assert (tmp_path / "kernel.h").read_text() == "if (a) {\n  g(a,\n    b);\n}\nwait(c);\n"
