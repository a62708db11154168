"""The native functions read their tensors in either way, and check every one of them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from fastattn.backends.primitives import (
    EncodeMemoryBackwardOptions,
    EncodeMemoryOptions,
    HopfieldOptions,
    SinusoidalOptions,
)
from fastattn.sinusoids import sinusoids


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


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("offset", lambda _: 2**62 + 1, "offset must be within"),
        ("x", lambda x: x[0, 0], "x must have at least two dimensions"),
        ("x", lambda x: x.int(), "x is not valid"),
        ("positions", lambda x: torch.arange(4), "positions is not valid: it must broadcast"),
        ("positions", lambda x: torch.arange(3).int(), "positions is not valid: it must be int64"),
        ("frequency", lambda x: x[:8], "the frequencies are not those of 6 columns"),
        ("phase", lambda x: x[:8], "the frequencies are not those of 6 columns"),
        ("pairs", lambda x: x + x[:1], "the frequencies are not those of 6 columns"),
        ("out", lambda x: torch.ones(1, 3, 6), r"out is not valid: it must be float32 \(2, 3, 6\)"),
        ("out", lambda x: torch.ones(2, 3, 6).double(), "out is not valid"),
        ("out", lambda x: torch.ones(3, 6), "out is not valid"),
        ("out", lambda x: torch.ones(1, 2, 3, 6), "out is not valid"),
    ],
)
def test_native_encoding_checks_every_tensor(
    name: str, wrong: Callable[[Any], Any], message: str, way: None, native: ModuleType
) -> None:
    options, columns = SinusoidalOptions(), sinusoids(6, "interleaved", 10000.0)
    call = {"offset": 4, "x": torch.randn(2, 3, 6), "positions": None, **columns._asdict()}
    call["out"] = None
    out = native.sinusoidal_encoding(options, *call.values())
    torch.testing.assert_close(out[:, :, 0], call["x"][:, :, 0] + torch.arange(4, 7).sin())
    call[name] = written = wrong(call[name])
    before = written.clone() if name == "out" else None
    with pytest.raises(ValueError, match=message):
        native.sinusoidal_encoding(options, *call.values())
    assert before is None or torch.equal(written, before)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("out_a", lambda x: x[0, 0, 0]),
        ("out_a", lambda x: x.int()),
        ("lse_a", lambda x: x.bfloat16()),
        ("lse_a", lambda x: x[..., None]),
        ("out_b", lambda x: x[..., :5]),
        ("out_b", lambda x: x.double()),
        ("lse_b", lambda x: x[:, :1]),
        ("lse_b", lambda x: x.double()),
        ("grad_out", lambda x: x[:1]),
        ("grad_lse", lambda x: x.double()),
    ],
)
def test_native_merging_checks_every_tensor(
    name: str, wrong: Callable[[Any], Any], way: None, native: ModuleType
) -> None:
    (out_a, out_b), (lse_a, lse_b) = torch.randn(2, 2, 4, 7, 6), torch.randn(2, 2, 4, 7)
    states = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    _, lse = native.merge_states(*states.values())
    torch.testing.assert_close(lse, torch.logaddexp(lse_a, lse_b))
    states = {"grad_out": out_a, "grad_lse": lse_a, **states}
    assert len(native.merge_states_backward(*states.values())) == 4
    states[name] = wrong(states[name])
    with pytest.raises(ValueError, match=r"is not valid|at least two dimensions"):
        native.merge_states_backward(*states.values())


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("tokens", lambda x: x.float()),
        ("tokens", lambda x: x[0]),
        ("weight", lambda x: x.int()),
        ("weight", lambda x: x[None].repeat(2, 1, 1, 1)),
        ("weight", lambda x: x[None, None]),
        ("factors", lambda x: x.double()),
        ("factors", lambda x: x[:4]),
        ("temporal", lambda x: x[:, :5]),
        ("temporal", lambda x: x[0]),
        ("grad", lambda x: x[:, :, :5]),
        ("grad", lambda x: x[..., :7]),
        ("grad", lambda x: x.tolist()),
    ],
)
def test_native_memory_encoding_checks_every_tensor(
    name: str, wrong: Callable[[Any], Any], way: None, native: ModuleType
) -> None:
    given: dict[str, Any] = {"tokens": torch.ones(2, 6, 5, dtype=torch.int64)}
    given |= {"weight": torch.randn(3, 30, 8), "factors": torch.randn(5, 8)}
    given |= {"temporal": torch.randn(3, 6, 8), "grad": torch.randn(2, 3, 6, 8)}

    def run(tokens: Any, weight: Any, factors: Any, temporal: Any, grad: Any) -> Any:
        memory = native.encode_memory(EncodeMemoryOptions(), tokens, weight, factors, temporal)
        options = EncodeMemoryBackwardOptions(rows=30, temporal=True)
        return memory, *native.encode_memory_backward(options, grad, tokens, factors)

    assert [x.shape for x in run(**given)] == [(2, 3, 6, 8), (3, 30, 8), (3, 6, 8)]
    given[name] = wrong(given[name])
    with pytest.raises((TypeError, ValueError), match=r"is not valid|dimensions|must be a tensor"):
        run(**given)
