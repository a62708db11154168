"""The examples of docs/distributed.md and long_context.md run, as under torchrun."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import rank_group
import torch.distributed as dist
from snippets import blocks, run

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "distributed.md"


def run_first_block(page: Path) -> dict[str, Any]:
    """The names that a page's first block defines on this rank, whose group exists already."""
    names: dict[str, Any] = {}
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        run(page, blocks(page)[0], names)
    return names


def run_example() -> bool:
    """Run the example of the page; every leaf must get a gradient."""
    return all(x.grad is not None for x in run_first_block(PAGE)["own"])


def run_tutorial() -> list[float]:
    """The losses of the tutorial."""
    return run_first_block(DOCS / "long_context.md")["losses"]


@pytest.mark.complete
def test_the_example_of_the_page(tmp_path: Path) -> None:
    (results,) = rank_group.run(tmp_path, [("test_distributed_docs:run_example", 3)])
    assert results == [True] * 3


@pytest.mark.complete
def test_the_tutorials_losses_equal_one_ranks(tmp_path: Path) -> None:
    job = "test_distributed_docs:run_tutorial"
    (one,), three = rank_group.run(tmp_path, [(job, 1), (job, 3)])
    assert one[0] > one[1] > one[2]
    for losses in three:
        assert losses == pytest.approx(one, rel=1e-5)


def test_the_plan_of_the_page() -> None:
    found = doctest.testfile(str(PAGE), module_relative=False, parser=_Sessions())
    assert (found.failed, found.attempted) == (0, 6)


class _Sessions(doctest.DocTestParser):
    """The sessions of a page, which end at the end of their block."""

    def parse(self, string: str, name: str = "<string>") -> list[str | doctest.Example]:
        return super().parse(string.replace("\n```", "\n\n"), name)
