"""Memories whose rows are on several ranks, against one process."""

from __future__ import annotations

from pathlib import Path

import rank_group
import torch
from distributed_memory import CASES, Case, definition, joined

from fastattn.testing import assert_right


def check(case: Case, found: dict[str, torch.Tensor]) -> None:
    steps = found.pop("steps", None)

    def exact() -> dict[str, torch.Tensor]:
        return {name: x for name, x in definition(case).items() if name != "steps"}

    assert steps is None or torch.equal(steps, definition(case)["steps"])
    if case.dtype is torch.float64:
        torch.testing.assert_close(found, exact(), rtol=1e-11, atol=1e-11)
    else:
        assert_right(found, exact, case.dtype)


def test_every_case_on_one_to_three_ranks(tmp_path: Path) -> None:
    jobs = [("distributed_memory:run_cases", ranks) for ranks in (1, 2, 3)]
    wrong = []
    for group in rank_group.run(tmp_path, jobs):
        for case in CASES:
            name = f"{case.name} on {len(group)} ranks"
            parts = [result[case.name] for result in group]
            errors = {part for part in parts if isinstance(part, str)}
            if errors:
                wrong.append(f"{name}: {errors}")
                continue
            try:
                check(case, joined(case, parts))
            except AssertionError as error:
                wrong.append(f"{name}: {error}")
    assert not wrong, f"{len(wrong)} calls:\n" + "\n".join(wrong)
