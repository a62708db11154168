"""Packed sequences on Triton: each as alone, and how they are found."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from fastattn.testing import Target, oracle
from fastattn.testing.varlen import (
    VarlenCase,
    check_varlen,
    make_varlen,
    run_varlen,
    sequence_by_sequence,
)

pytestmark = pytest.mark.usefixtures("triton_interpreter")

TRITON = Target("triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_sequence_has_the_bits_that_it_has_alone(dtype: torch.dtype) -> None:
    case = VarlenCase("alone", (40, 0, 33, 7), (70, 3, 33, 0), heads=2, kv_heads=1, dropout_p=0.2)
    inputs = make_varlen(replace(case, window=(50, 3), bottom_right=True), dtype)
    module = TRITON.module
    expected = sequence_by_sequence(inputs, functools.partial(oracle.run, module))
    found = run_varlen(module, inputs)
    for name, want in expected.items():
        assert torch.equal(found[name], want.to(found[name].dtype)), name


def test_sequences_beyond_the_first_128_are_found() -> None:
    """They are looked for 128 at a time."""
    lengths = [0] * 130
    lengths[0], lengths[127], lengths[128], lengths[129] = 3, 5, 40, 2
    verdict = check_varlen(VarlenCase("many", tuple(lengths), heads=1), torch.float32, TRITON)
    assert verdict.ok, verdict.faults
