"""Hopfield retrieval on Triton: when a query stops."""

from __future__ import annotations

import pytest
import torch

import fastattn
from fastattn.backends import reference
from fastattn.backends.primitives import HopfieldOptions
from fastattn.testing import Target

pytestmark = pytest.mark.usefixtures("triton_interpreter")

TRITON = Target("triton")


@pytest.mark.parametrize("together", [1, 5])
@pytest.mark.parametrize("steps_max", [0, 3, -1])
def test_each_query_takes_the_steps_that_it_needs(
    together: int, steps_max: int, generator: torch.Generator
) -> None:
    state = torch.randn(2, 35, 6, generator=generator)
    stored = 2 * torch.randn(2, 9, 6, generator=generator)
    options = HopfieldOptions(steps_max=steps_max, eps=1e-2, together=together)
    tensors = (state, stored, None, None, None)
    found = TRITON.module.hopfield_retrieve(*tensors, options=options)
    wanted = reference.hopfield_retrieve(*tensors, options=options)
    assert torch.equal(found[1], wanted[1])
    assert steps_max == 0 or wanted[1].unique().numel() > 1
    for x, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, want, rtol=1e-4, atol=1e-4)


def test_more_steps_than_one_launch_takes(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a limit there is a launch for every so many steps."""
    state, stored = (torch.randn(1, n, 4, generator=generator) for n in (20, 7))
    options = HopfieldOptions(steps_max=-1, eps=1e-4)
    found = []
    for steps in (256, 2):
        monkeypatch.setattr("fastattn.backends.triton.hopfield.ROUND", steps)
        tensors = (state, stored, None, None, None)
        found.append(TRITON.module.hopfield_retrieve(*tensors, options=options))
    assert found[0][1].max() > 4
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_too_many_that_stop_together_are_declined() -> None:
    x = torch.ones(1, 1, 17, 4)
    with fastattn.use_backend("triton"), pytest.raises(RuntimeError, match="17 queries that stop"):
        fastattn.hopfield_retrieve(x, x, stop="head")
