"""No kernel reads past the end of a tensor, where an inaccessible page begins."""

from __future__ import annotations

import sys

import pytest
from child_process import run_python
from fenced import CPU, run_cases

from fastattn.testing import PROOFS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="fences need mprotect")

STEPS = dict.fromkeys(PROOFS, 1) | {"scaled_dot_product_attention": 24}
STEPS |= dict.fromkeys(("varlen_attention", "decode_attention", "append_to_cache"), 4)


@pytest.mark.parametrize("share", [8, pytest.param(1, marks=pytest.mark.complete)])
def test_nothing_is_read_past_the_end(share: int, native: object) -> None:
    run_cases(CPU, "quick", {operator: every * share for operator, every in STEPS.items()})


@pytest.mark.slow
@pytest.mark.parametrize("operator", STEPS)
def test_nothing_is_read_past_the_end_in_any_case(operator: str, native: object) -> None:
    run_cases(CPU, "complete", {operator: 1})


def test_a_fence_stops_a_read_past_the_end() -> None:
    child = run_python(
        "-c",
        """
import ctypes, fenced, torch
x = fenced.place(torch.ones(1, 1, 3, 5))
end = x.data_ptr() + x.numel() * 4
print(ctypes.string_at(end - 1, 1) is not None, flush=True)
print(ctypes.string_at(end, 1))
""",
        status=None,
    )
    assert child.stdout == "True\n"
    assert child.returncode != 0  # killed by a signal, which a sanitizer may catch
