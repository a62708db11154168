"""Decoding with a cache that is spread over the ranks, against one process."""

from __future__ import annotations

from pathlib import Path

import rank_group
import torch
from distributed_decode import CASES, appended, definition, joined

from fastattn.testing import assert_right


def test_every_case_on_one_to_three_ranks(tmp_path: Path) -> None:
    jobs = [("distributed_decode:run_cases", ranks) for ranks in (1, 2, 3)]
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
                found, caches = joined(case, parts)
                assert_right(found, lambda case=case: definition(case), case.dtype)
                if caches:
                    same = {"rtol": 0.0, "atol": 0.0, "equal_nan": True}
                    torch.testing.assert_close(caches, appended(case), **same)
            except AssertionError as error:
                wrong.append(f"{name}: {error}")
    assert not wrong, f"{len(wrong)} calls:\n" + "\n".join(wrong)
