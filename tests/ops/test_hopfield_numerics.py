"""hopfield_retrieve: every kernel against extended precision, in hostile memory; transforms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from case_table import within_the_bound
from torch import Tensor

import fastattn
from fastattn import hopfield_energy, hopfield_retrieve

pytestmark = pytest.mark.filterwarnings("ignore::fastattn.FallbackWarning")

test_case = within_the_bound("hopfield_retrieve")


# --- transforms ----------------------------------------------------------------------------------


@pytest.fixture
def inputs(normal: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """State and stored patterns."""
    return normal(2, 2, 3, 4), 0.6 * normal(2, 2, 5, 4)


def test_compiles_with_patterns_for_all(backend: str, inputs: tuple[Tensor, Tensor]) -> None:
    torch._dynamo.reset()

    def f(state: Tensor, stored: Tensor) -> Tensor:
        out, steps = hopfield_retrieve(state, stored, beta=0.5, stop="head", need_steps=True)
        return out * steps[..., None] + hopfield_energy(out, stored)[..., None]

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    one = inputs[1][:1]
    torch.testing.assert_close(compiled(inputs[0], one), f(inputs[0], one))


def test_what_is_saved_does_not_grow_with_the_steps() -> None:
    """Beyond the few steps whose states are kept."""
    state, stored = torch.randn(1, 1, 4, 3, requires_grad=True), torch.randn(1, 1, 50, 3)
    sizes = []
    for steps in (5, 40):
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda s: s):
            fastattn.hopfield_retrieve(
                state, stored, beta=0.1, update_steps_max=steps, update_steps_eps=0.0
            )
        sizes.append(sum(x.numel() for x in saved))
    assert sizes[0] == sizes[1]
