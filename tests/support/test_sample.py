"""Which tests `make test` leaves to the complete run."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path

import pytest
from child_process import run_python
from sample import sample

pytestmark = pytest.mark.without_kernels
SIZES = {"dtype": "abcd", "target": "xyz", "mask": "0123", "causal": "01"}
ROWS = [dict(zip(SIZES, values, strict=True)) for values in product(*SIZES.values())]


def test_every_two_values_meet_in_a_sample() -> None:
    kept = sample(ROWS)
    assert len(kept) <= 2 * 16  # of 96; 16 dtypes with masks are the least
    for a, b in combinations(SIZES, 2):
        met = {(ROWS[n][a], ROWS[n][b]) for n in kept}
        assert met == set(product(SIZES[a], SIZES[b]))


def test_of_a_case_those_fields_count_that_are_not_the_default() -> None:
    @dataclass(frozen=True)
    class Case:
        name: str
        keys: int = 8
        softcap: float = 0.0

    cases = [Case("a"), Case("b", keys=9), Case("c", softcap=1.0), Case("d", keys=9, softcap=1.0)]
    assert sample([{"case": case} for case in cases]) == {3}
    assert sample([{"case": case} for case in cases[:3]]) == {1, 2}
    assert sample([{"case": case} for case in cases], keep=["b"]) == {1, 3}


TESTS = """
import pytest

@pytest.fixture(params=["cpu", "reference"])
def backend(request):
    return request.param

@pytest.mark.complete
def test_long():
    pass

@pytest.mark.parametrize("n", range(4))
def test_backends_take_turns(backend, n):
    pass

@pytest.mark.sampled
@pytest.mark.parametrize("a", range(2))
@pytest.mark.parametrize("b", range(2))
@pytest.mark.parametrize("c", range(2))
def test_product(a, b, c):
    pass
"""


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        pytest.param([], 4 + 5, id="sample"),
        pytest.param(["--complete"], 1 + 8 + 8, id="complete", marks=pytest.mark.complete),
        pytest.param(["test_it.py::test_product"], 8, id="named", marks=pytest.mark.complete),
    ],
)
def test_what_runs(tmp_path: Path, arguments: list[str], count: int) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    command = ["-m", "pytest", "-q", "-p", "sample", *arguments]
    done = run_python(*command, cwd=tmp_path)
    assert f"{count} passed" in done.stdout, done.stdout
