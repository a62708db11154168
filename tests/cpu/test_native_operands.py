"""The native functions read their tensors in either way, and check every one of them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from fastattn.backends.primitives import HopfieldOptions


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("state", lambda x: x[0, 0], "state is not valid"),
        ("state", lambda x: x[..., :9], "stored is not valid: it must be float32"),
        ("state", lambda x: x.int(), "state is not valid: it must be float32 or"),
        ("stored", lambda x: x[:1], "stored is not valid"),
        ("stored", lambda x: x.double(), "stored is not valid: it must be float32"),
        ("stored", lambda x: x.tolist(), "stored must be a tensor"),
        ("keys", lambda x: x[:, :, :8], "keys is not valid"),
        ("mask", lambda x: torch.ones(8, dtype=torch.bool), "mask is not valid: it must broadcast"),
        ("mask", lambda x: torch.ones(9), "mask is not valid: it must be bool"),
        ("bias", lambda x: torch.ones(9).bool(), "bias is not valid"),
        ("bias", lambda x: torch.ones(3, 1, 9), "bias is not valid: it must broadcast"),
        ("keeps", lambda x: x, "can be kept"),
    ],
)
def test_native_retrieval_checks_every_tensor(
    name: str, wrong: Callable[[Any], Any], message: str, way: None, native: ModuleType
) -> None:
    state, stored = torch.randn(2, 3, 7, 10), torch.randn(2, 3, 9, 10)
    call = {"state": state, "stored": stored, "keys": stored, "mask": None, "bias": None}
    options = HopfieldOptions(scale=0.5, steps_max=2)
    xi, taken, ends, stats = native.hopfield_retrieve(options, *call.values(), False)
    assert stats is None
    assert torch.equal(taken.abs(), torch.full((2, 3, 7), 2))
    assert torch.equal(ends[:, :, 1].reshape(xi.shape), xi)
    want = state
    for _ in range(2):
        want = (0.5 * want @ stored.mT).softmax(-1) @ stored
    torch.testing.assert_close(xi, want)
    call[name] = wrong(stored if name == "keys" else call.get(name))
    if name == "keeps":
        options = HopfieldOptions(scale=0.5, steps_max=-1)
        del call["keeps"]
    with pytest.raises((TypeError, ValueError), match=message):
        native.hopfield_retrieve(options, *call.values(), name == "keeps")


@pytest.mark.parametrize("dims", [3, 4])
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("grad_xi", lambda x: x[..., :6, :]),
        ("grad_xi", lambda x: x.double()),
        ("taken", lambda x: x + 1),
        ("taken", lambda x: x.int()),
        ("taken", lambda x: x[..., :6]),
        ("states", lambda x: x[:, :, 1:]),
        ("states", lambda x: x.double()),
        ("states", lambda x: None),
        ("stats", lambda x: x[:, :, :1]),
        ("stats", lambda x: x.mT),
    ],
)
def test_native_retrieval_backward_checks_every_tensor(
    name: str, wrong: Callable[[Any], Any], dims: int, way: None, native: ModuleType
) -> None:
    state, stored = torch.randn(2, 3, 7, 10), torch.randn(2, 3, 9, 10)
    if dims == 3:
        state, stored = state.flatten(0, 1), stored.flatten(0, 1)
    options = HopfieldOptions(scale=0.5, steps_max=3)
    patterns = (state, stored, None, None, None)
    xi, taken, states, stats = native.hopfield_retrieve(options, *patterns, True)
    again = native.hopfield_steps(options, *patterns, taken, 3)
    for kept, repeated in zip((states, stats), again, strict=True):
        assert torch.equal(kept, repeated)
    with pytest.raises(ValueError, match="at most the number of steps, 2, got"):
        native.hopfield_steps(options, *patterns, taken, 2)

    def gradients(**other: Any) -> Any:
        given = {"grad_xi": xi, "taken": taken, "states": states, "stats": stats, **other}
        grad_xi, *steps = given.values()
        return native.hopfield_backward(options, grad_xi, *patterns, *steps, 3)

    of_state, of_stored, *others = gradients()
    assert of_state.shape == state.shape
    assert of_stored.shape == stored.shape
    assert others == [None, None]
    given = {"grad_xi": xi, "taken": taken.abs(), "states": states, "stats": stats}
    with pytest.raises((TypeError, ValueError), match=f"{name}|stats is not valid"):
        gradients(**{name: wrong(given[name])})
