"""Packed sequences on Triton: each as alone, and how they are found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fastattn.testing import Target
from fastattn.testing.packed import (
    VarlenCase,
    check_varlen,
    make_varlen,
)

pytestmark = pytest.mark.usefixtures("triton_interpreter")

TRITON = Target("triton")


@pytest.mark.complete
@pytest.mark.parametrize(
    ("dtype", "program"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float32, "many")],
    ids=str,
)
def test_each_sequence_has_the_bits_that_it_has_alone(
    dtype: torch.dtype, program: str | None
) -> None:
    case = VarlenCase("alone", (40, 0, 33, 7), (70, 3, 33, 0), heads=2, kv_heads=1, dropout_p=0.2)
    case = replace(case, program=program)
    inputs = make_varlen(replace(case, window=(50, 3), bottom_right=True), dtype)
    module = TRITON.module
    expected = inputs.by_sequence(lambda alone: alone.results(module))
    found = inputs.results(module)
    for name, want in expected.items():
        assert torch.equal(found[name], want.to(found[name].dtype)), name


@pytest.mark.complete
def test_sequences_beyond_the_first_128_are_found() -> None:
    """They are looked for 128 at a time."""
    lengths = [0] * 130
    lengths[0], lengths[127], lengths[128], lengths[129] = 3, 5, 40, 2
    verdict = check_varlen(VarlenCase("many", tuple(lengths), heads=1), torch.float32, TRITON)
    assert verdict.ok, verdict.faults


def test_the_gradient_of_a_table_has_a_bounded_number_of_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that its memory does not grow with the number of sequences."""
    monkeypatch.setattr("fastattn.backends.triton._attend._PARTS", 2)
    case = VarlenCase("parts", (9, 2, 35, 0, 4), heads=1, relative_bias=True)
    verdict = check_varlen(case, torch.float32, TRITON)
    assert verdict.ok, verdict.faults
