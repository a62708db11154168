"""Calls on tensors of the CPU while the default device is another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from batched_cases import OPERATORS
from cache_calls import cache_operands
from torch import Tensor

import fastattn

Run = Callable[[], Any]

# The kernels of the CPU have no gradient of what a name calls learned.
GIVEN = [name for name in OPERATORS if "learned" not in name]
# Calls on a cache, without gradients, which the other table lacks: a step, and a prompt.
CACHES: dict[str, dict[str, Any]] = {
    "cache": {},
    "cache-pages": {"paged": True},
    "cache-prompt": {"queries": 40, "capacity": 60},
    "cache-int8": {"cached": torch.int8},
    "cache-int8-pages": {"cached": torch.int8, "paged": True},
    "cache-int8-prompt": {"cached": torch.int8, "queries": 40, "capacity": 60},
}


def call_of(name: str) -> Run:
    """A call on new tensors, the same for each name."""
    if name in CACHES:
        given = cache_operands(**CACHES[name])
        return lambda: fastattn.decode_attention(**given, return_lse=True)
    torch.manual_seed(0)
    function, inputs = OPERATORS[name]()
    tensors = [x.detach().float().requires_grad_() for x in inputs]
    return lambda: function(*tensors)


def results(run: Run) -> list[Tensor]:
    """The tensors that a run returns, after its backward pass."""
    found = run()
    outs = [x for x in (found if isinstance(found, tuple) else (found,)) if isinstance(x, Tensor)]
    if outs[0].requires_grad:
        outs[0].square().sum().backward()
    return outs


@pytest.mark.parametrize("name", [*GIVEN, *CACHES])
def test_results_are_on_the_device_of_the_tensors(name: str, choice: str) -> None:
    expected = results(call_of(name))
    run = call_of(name)
    with torch.device("meta"):
        found = results(run)
    for x, y in zip(found, expected, strict=True):
        assert x.device.type == "cpu"
        assert torch.equal(x, y)
