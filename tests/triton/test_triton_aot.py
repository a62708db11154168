"""The Triton kernels cross-compiled for GPUs: nothing spills, and everything fits.

In processes of their own: in this one Triton interprets.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from child_process import run_python
from required import REQUIRE_NATIVE

TOOL = Path(__file__).parents[2] / "tools/triton_aot.py"
CHIPS = ("sm_80", "sm_90", "sm_100", "gfx942")
PRODUCTS = {"attention_forward", "attention_backward_query", "attention_backward_key_value"}


def _compiled(*arguments: str) -> list[dict[str, Any]]:
    """What the compiler reports for each kernel, one row each."""
    if importlib.util.find_spec("triton") is None and not REQUIRE_NATIVE:
        pytest.skip("triton is not installed")
    child = run_python(str(TOOL), *arguments, TRITON_INTERPRET="0")
    return [json.loads(line) for line in child.stdout.splitlines()]


def _faults(usages: list[dict[str, Any]]) -> list[str]:
    """Kernels that spill registers or need too much shared memory."""
    faults = []
    for usage in usages:
        text = (
            f"{usage['chip']} {usage['call']} {usage['dtype']} D={usage['width']} {usage['kernel']}"
        )
        if usage["spills"] and not usage["may_spill"]:
            faults.append(f"{text}: {usage['spills']} spilled")
        if usage["shared"] > usage["shared_limit"]:
            faults.append(f"{text}: {usage['shared']} bytes of shared memory")
        # HGMMA takes 64 rows at least; smaller tiles use what sm_80 has.
        product = usage["kernel"] in PRODUCTS and max(usage["launch"][:2]) >= 64
        if usage["dtype"] == "bfloat16" and product and not usage["matrix_instructions"]:
            faults.append(f"{text}: no matrix instruction")
    return faults


@pytest.mark.complete
@pytest.mark.parametrize(
    "chip",
    [pytest.param(c, marks=() if c in ("sm_80", "gfx942") else pytest.mark.slow) for c in CHIPS],
)
def test_kernels_compile_and_fit(chip: str) -> None:
    usages = _compiled(chip)
    kernels = {usage["kernel"] for usage in usages}
    assert kernels >= PRODUCTS
    assert not _faults(usages), "\n".join(_faults(usages))


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_every_entry_of_the_table_compiles_and_fits(chip: str) -> None:
    usages = _compiled("--complete", chip)
    assert len(usages) > 50
    assert not _faults(usages), "\n".join(_faults(usages))
