"""Additive attention on Triton: the table of cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fastattn.testing import Target
from fastattn.testing.additive import ADDITIVE_CASES, AdditiveCase, check_additive

pytestmark = pytest.mark.usefixtures("triton_interpreter")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TABLE = [case for case in ADDITIVE_CASES if case.value_dim <= 512]
NAMED = ("size-step", "mask-bool_rows-qk", "mask-float-k", "poison-padding", "causal-mask",
         "dropout-mask", "mask-float32", "size-no-key", "mask-nothing-k", "size-one")  # fmt: skip


def _work(case: AdditiveCase) -> int:
    return case.batch * (-(-case.q_len // 32)) * (-(-case.k_len // 32)) * case.width


WORK = [
    pytest.param(case, DTYPES[n % 3], id=f"{case.name}-{DTYPES[n % 3]}")
    for n, case in enumerate(case for case in TABLE if case.name in NAMED)
]
# Large q and k that nearly cancel, in a size for the interpreter.
CANCEL = replace(next(case for case in TABLE if case.name == "saturated"), q_len=30, k_len=60)
WORK.append(pytest.param(CANCEL, torch.float32, id="saturated-small"))


@pytest.mark.parametrize(("case", "dtype"), WORK)
def test_case(case: AdditiveCase, dtype: torch.dtype) -> None:
    verdict = check_additive(case, dtype, Target("triton"))
    assert not verdict.declined, verdict.declined
    assert verdict.ok, "\n".join(verdict.faults)


@pytest.mark.slow
@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_case_in_every_dtype(case: AdditiveCase) -> None:
    if _work(case) > 4000:
        pytest.skip("takes the interpreter many minutes")
    for dtype in DTYPES:
        if dtype in case.dtypes:
            verdict = check_additive(case, dtype, Target("triton"))
            assert verdict.ok, f"{dtype}: {verdict.faults}"
