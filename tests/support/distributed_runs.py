"""Each call of a table twice on this rank, definitions, and the check of all ranks' results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fastattn

Results = dict[str, Tensor]


@contextlib.contextmanager
def as_operations() -> Iterator[None]:
    """Public functions run the reference, as single operations of PyTorch: in forward mode."""
    with fastattn.use_backend("reference"), torch.autograd.forward_ad.dual_level():
        yield


def run_twice(
    call: Callable[[Any, int, int], Results], cases: Sequence[Any], names: Sequence[str] = ()
) -> dict[str, Results | str]:
    """The results of each case by its name, or an error as text.

    The results of ``names`` (by default all) must have the same bits in both runs.
    """
    return {case.name: _twice(call, case, names) for case in cases}


def _twice(
    call: Callable[[Any, int, int], Results], case: Any, names: Sequence[str]
) -> Results | str:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    try:
        first, second = call(case, rank, ranks), call(case, rank, ranks)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    same = all(torch.equal(first[name], second[name]) for name in names or first)
    return first if same else "differs from run to run"


def check_cases(
    group: Sequence[Any], cases: Sequence[Any], check: Callable[[Any, list[Any]], None]
) -> None:
    """Check each case with the results of all ranks."""
    wrong = []
    for case in cases:
        parts = [result[case.name] for result in group]
        errors = {part for part in parts if isinstance(part, str)}
        try:
            assert not errors, errors
            check(case, parts)
        except AssertionError as error:
            wrong.append(f"{case.name} on {len(group)} ranks: {error}")
    assert not wrong, f"{len(wrong)} calls:\n" + "\n".join(wrong)
