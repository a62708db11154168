"""The examples of docs/distributed.md run, as under torchrun."""

from __future__ import annotations

import doctest
from pathlib import Path
from unittest import mock

import rank_group
import torch.distributed as dist
from snippets import blocks, run

PAGE = Path(__file__).resolve().parents[2] / "docs/distributed.md"


def run_example() -> bool:
    """The first block on this rank, whose group is there already."""
    names: dict[str, object] = {}
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        run(PAGE, blocks(PAGE)[0], names)
    return all(x.grad is not None for x in names["own"])  # type: ignore[attr-defined]


def test_the_example_of_the_page(tmp_path: Path) -> None:
    (results,) = rank_group.run(tmp_path, [("test_distributed_docs:run_example", 3)])
    assert results == [True] * 3


def test_the_plan_of_the_page() -> None:
    found = doctest.testfile(str(PAGE), module_relative=False, parser=_Sessions())
    assert (found.failed, found.attempted) == (0, 6)


class _Sessions(doctest.DocTestParser):
    """The sessions of a page, which end at the end of their block."""

    def parse(self, string: str, name: str = "<string>") -> list[str | doctest.Example]:
        return super().parse(string.replace("\n```", "\n\n"), name)
