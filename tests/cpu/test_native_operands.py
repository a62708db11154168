"""The native functions read their tensors in either way, and check every one of them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from fastattn.backends.primitives import (
    AppendOptions,
    DecodeOptions,
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
    ],
)
def test_native_retrieval_checks_every_tensor(
    name: str, wrong: Callable[[Any], Any], message: str, way: None, native: ModuleType
) -> None:
    state, stored = torch.randn(2, 3, 7, 10), torch.randn(2, 3, 9, 10)
    call = {"state": state, "stored": stored, "keys": stored, "mask": None, "bias": None}
    options = HopfieldOptions(scale=0.5, steps_max=2)
    xi, taken, ends = native.hopfield_retrieve(*call.values(), options=options)
    assert torch.equal(taken.abs(), torch.full((2, 3, 7), 2))
    assert torch.equal(ends[:, :, 1].reshape(xi.shape), xi)
    want = state
    for _ in range(2):
        want = (0.5 * want @ stored.mT).softmax(-1) @ stored
    torch.testing.assert_close(xi, want)
    call[name] = wrong(stored if name == "keys" else call.get(name))
    with pytest.raises((TypeError, ValueError), match=message):
        native.hopfield_retrieve(*call.values(), options=options)


@pytest.mark.parametrize("dims", [3, 4])
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("grad_xi", lambda x: x[..., :6, :]),
        ("grad_xi", lambda x: x.double()),
        ("taken", lambda x: x + 1),
        ("taken", lambda x: x.int()),
        ("taken", lambda x: x[..., :6]),
        ("trace", lambda x: x[:, :, 1:]),
        ("trace", lambda x: x.double()),
        ("trace", lambda x: None),
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
    xi, taken, ends, *steps = native.hopfield_retrieve(*patterns, options=options, keeps=True)
    assert ends is steps[0]
    many = HopfieldOptions(scale=0.5, steps_max=5)
    assert native.hopfield_retrieve(*patterns, options=many, keeps=True)[3:] == (None, None)
    again = native.hopfield_steps(*patterns, taken, options=options, most=3)
    for kept, repeated in zip(steps, again, strict=True):
        assert torch.equal(kept, repeated)
    with pytest.raises(ValueError, match="at most the number of steps, 2, got"):
        native.hopfield_steps(*patterns, taken, options=options, most=2)
    given = dict(zip(("grad_xi", "taken", "trace", "stats"), (xi, taken, *steps), strict=True))

    def gradients(**other: Any) -> Any:
        grad_xi, *steps = (given | other).values()
        return native.hopfield_backward(grad_xi, *patterns, *steps, options=options, needed=3)

    of_state, of_stored, *others = gradients()
    assert of_state.shape == state.shape
    assert of_stored.shape == stored.shape
    assert others == [None, None]
    given["taken"] = taken.abs()
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
        ("pairs", lambda x: torch.cat((x, x[:1])), "the frequencies are not those of 6 columns"),
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
    call: dict[str, Any] = {"offset": 4, "x": torch.randn(2, 3, 6), "positions": None, "out": None}
    for column, numbers in columns._asdict().items():
        call[column] = torch.tensor(numbers.tolist(), dtype=torch.uint64).view(torch.int64)

    def encode() -> Any:
        others = {key: call[key] for key in ("offset", "x", "positions", "out")}
        columns = tuple(call[key] for key in ("frequency", "phase", "pairs"))
        return native.sinusoidal_encoding(**others, columns=columns, options=options)

    out = encode()
    torch.testing.assert_close(out[:, :, 0], call["x"][:, :, 0] + torch.arange(4, 7).sin())
    call[name] = written = wrong(call[name])
    before = written.clone() if name == "out" else None
    with pytest.raises(ValueError, match=message):
        encode()
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


def of_decoding() -> dict[str, Any]:
    caches = torch.randn(2, 3, 2, 16, 8)
    tensors = {"query": torch.randn(3, 4, 1, 8), "key_cache": caches[0], "value_cache": caches[1]}
    tensors["cache_seqlens"] = torch.tensor([3, 16, 0])
    names = "block_table cache_batch_idx alibi_slopes sinks relative_bias mask_program"
    names += " cache_leftpad key_scales value_scales"
    return {**tensors, **dict.fromkeys(names.split())}


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("query", lambda x: x[0], "query is not valid"),
        ("query", lambda x: x.int(), "query is not valid: it must be float32 or"),
        ("query", lambda x: x[..., :7], r"query is not valid: it must be float32 \(3, 4, 1, 8\)"),
        ("query", lambda x: x[:, :3], "heads of key must be positive and divide 3, got 2"),
        ("key_cache", lambda x: x.double(), "key_cache is not valid: it must be float32"),
        ("key_cache", lambda x: x[0], "key_cache is not valid"),
        ("key_cache", lambda x: x.tolist(), "key_cache must be a tensor"),
        ("value_cache", lambda x: x[:, :, :9], "value_cache is not valid"),
        ("value_cache", lambda x: x.half(), "value_cache is not valid: it must be float32"),
        ("cache_seqlens", lambda x: x.int(), r"cache_seqlens is not valid: it must be int64 \(3\)"),
        ("cache_seqlens", lambda x: x[:2], "cache_seqlens is not valid"),
        ("cache_seqlens", lambda x: None, "cache_seqlens must be a tensor, got NoneType"),
        ("cache_seqlens", lambda x: x + 1, "cache_seqlens must be between 0 and the 16 keys"),
        ("block_table", lambda x: torch.zeros(3, 1), "block_table is not valid: it must be int32"),
        ("block_table", lambda x: torch.zeros(2, 1).int(), "block_table is not valid"),
        ("block_table", lambda x: torch.full((3, 1), 3).int(), "must name one of the 3 pages"),
        ("cache_batch_idx", lambda x: torch.zeros(3).int(), "cache_batch_idx is not valid"),
        ("cache_batch_idx", lambda x: torch.tensor([0, 1, 3]), "one of the 3 entries"),
        ("alibi_slopes", lambda x: torch.ones(1, 3), "alibi_slopes is not valid"),
        ("sinks", lambda x: torch.ones(1, 4).double(), "sinks is not valid: it must be float32"),
        ("relative_bias", lambda x: torch.ones(1, 4), "relative_bias is not valid"),
        ("relative_bias", lambda x: torch.ones(1, 4, 29), "at least 31 distances"),
        ("mask_program", lambda x: torch.ones(3), "mask_program is not valid: it must be cont"),
        ("cache_leftpad", lambda x: torch.tensor([0, 17, 0]), "cache_leftpad must be between"),
        ("cache_leftpad", lambda x: torch.tensor([0, 0, -1]), "cache_leftpad must be between"),
        ("key_scales", lambda x: torch.ones(3, 2, 16), "key_cache is not valid: it must be int8"),
    ],
)
def test_native_decoding_checks_every_tensor(
    name: str, wrong: Callable[[Any], Any], message: str, way: None, native: ModuleType
) -> None:
    options, tensors = DecodeOptions(scale=0.4, window_left=3), of_decoding()
    out, lse = native.decode_attention(*tensors.values(), options=options)
    assert out.shape == (3, 4, 1, 8)
    assert lse[2].isinf().all()
    tensors[name] = wrong(tensors[name])
    with pytest.raises((TypeError, ValueError), match=message):
        native.decode_attention(*tensors.values(), options=options)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_native_decoding_reads_quantised_rows(
    dtype: torch.dtype, way: None, native: ModuleType
) -> None:
    tensors = of_decoding()
    for name in ("key", "value"):
        tensors[f"{name}_cache"] = (10 * tensors[f"{name}_cache"]).to(dtype)
        tensors[f"{name}_scales"] = torch.full((3, 2, 16), 0.1)
    options = DecodeOptions(scale=0.4)
    out, _ = native.decode_attention(*tensors.values(), options=options)
    wide = {**tensors, "key_scales": None, "value_scales": None}
    for name in ("key_cache", "value_cache"):
        wide[name] = 0.1 * wide[name].float()
    torch.testing.assert_close(out, native.decode_attention(*wide.values(), options=options)[0])
    for wrong in (torch.ones(3, 2, 15), torch.ones(3, 2, 16).double()):
        with pytest.raises(ValueError, match="value_scales is not valid: it must be float32"):
            native.decode_attention(**{**tensors, "value_scales": wrong}, options=options)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("key_cache", lambda x: x.double(), "key_cache is not valid: it must be float32"),
        ("key", lambda x: x[:, :1], r"key is not valid: it must be float32 \(3, 2, 2, 8\)"),
        ("key", lambda x: x[0], "key is not valid"),
        ("key", lambda x: x.int(), "key is not valid: it must be float32 or"),
        ("value", lambda x: x[:, :, :1], "value is not valid"),
        ("value", lambda x: x.double(), "value is not valid"),
        ("cache_seqlens", lambda x: x + 15, "plus 2 to append, at most 16, got 18"),
        ("rotary_cos", lambda x: x.half(), "rotary_cos is not valid: it must be float32"),
        ("rotary_cos", lambda x: x[:4], "rotary_cos must have a row for each position, got 4"),
        ("rotary_sin", lambda x: x[:, :2], "rotary_sin is not valid"),
        ("rotary_positions", lambda x: torch.zeros(3, 2).int(), "rotary_positions is not valid"),
        ("query", lambda x: x[:2], "query is not valid"),
        ("query", lambda x: x.repeat(1, 1, 3, 1), "each query must be of a new token"),
    ],
)
def test_native_appending_checks_every_tensor(
    name: str, wrong: Callable[[Any], Any], message: str, way: None, native: ModuleType
) -> None:
    cache, new = torch.zeros(2, 3, 2, 16, 8), torch.randn(2, 3, 2, 2, 8)
    tensors: dict[str, Any] = {"key_cache": cache[0], "value_cache": cache[1]}
    tensors |= {"key": new[0], "value": new[1], "cache_seqlens": torch.tensor([3, 6, 0])}
    tensors |= dict.fromkeys(("block_table", "cache_batch_idx"))
    tensors |= {"rotary_cos": torch.ones(16, 3), "rotary_sin": torch.zeros(16, 3)}
    tensors |= {"rotary_positions": None, "query": torch.randn(3, 4, 1, 8)}
    tensors |= dict.fromkeys(("key_scales", "value_scales", "cache_leftpad"))
    options = AppendOptions()
    rotated = native.append_to_cache(*tensors.values(), options=options)
    assert torch.equal(rotated, tensors["query"])
    assert torch.equal(cache[:, 1, :, 6:8], new[:, 1])
    before = cache.clone()
    if name == "rotary_cos":
        tensors["rotary_sin"] = wrong(tensors["rotary_sin"])
    if name == "cache_seqlens":
        tensors["rotary_cos"] = tensors["rotary_sin"] = tensors["query"] = None
    tensors[name] = wrong(tensors[name])
    with pytest.raises((TypeError, ValueError), match=message):
        native.append_to_cache(*tensors.values(), options=options)
    assert torch.equal(cache, before)


@pytest.mark.parametrize(
    ("x", "weight", "bias", "message"),
    [
        (torch.ones(2, 3).int(), torch.ones(4, 3), None, "x is not valid"),
        (torch.ones(2), torch.ones(4, 2), None, "x is not valid"),
        (torch.ones(2, 3), torch.ones(4, 2), None, r"weight is not valid: it must be float32"),
        (torch.ones(2, 3), torch.ones(4, 6)[:, ::2], None, "weight must have dense rows or"),
        (torch.ones(2, 3), torch.ones(4, 3), torch.ones(3), r"bias is not valid: it must be"),
    ],
)
def test_native_linear_checks_every_tensor(
    x: Any, weight: Any, bias: Any, message: str, way: None, native: ModuleType
) -> None:
    with pytest.raises(ValueError, match=message):
        native.linear(x, weight, bias)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("x", lambda x: x.double()),
        ("x", lambda x: x.mT.contiguous().mT),
        ("x", lambda x: x[0]),
        ("x", lambda x: torch._neg_view(x)),
        ("w_in", lambda x: x[:-1]),
        ("w_in", lambda x: x.t().contiguous().t()),
        ("w_in", lambda x: x.requires_grad_()),
        ("b_in", lambda x: x[1:]),
        ("b_in", lambda x: x.to("meta")),
        ("w_out", lambda x: x.tolist()),
        ("b_out", lambda x: x.half()),
        ("padding", lambda x: x.float()),
        ("padding", lambda x: x[:, 1:]),
    ],
)
def test_native_self_attention_leaves_other_tensors_to_the_general_path(
    name: str, wrong: Callable[[Any], Any], way: None, native: ModuleType
) -> None:
    tensors: dict[str, Any] = {"x": torch.randn(2, 5, 8)}
    tensors |= {"w_in": torch.randn(24, 8), "b_in": torch.randn(24)}
    tensors |= {"w_out": torch.randn(8, 8), "b_out": torch.randn(8)}
    tensors |= {"padding": torch.zeros(2, 5, dtype=torch.bool)}
    others = {"num_heads": 2, "batch_first": True, "causal": False, "recorded": True}
    assert native.self_attention(**tensors, **others).shape == (2, 5, 8)
    tensors[name] = wrong(tensors[name])
    assert native.self_attention(**tensors, **others) is None
    if name == "w_in" and tensors[name].requires_grad:
        assert native.self_attention(**tensors, **others | {"recorded": False}) is not None


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
        of_call = (tokens, weight, factors, temporal)
        memory = native.encode_memory(*of_call, options=EncodeMemoryOptions())
        options = EncodeMemoryBackwardOptions(rows=30, temporal=True)
        return memory, *native.encode_memory_backward(grad, tokens, factors, options=options)

    assert [x.shape for x in run(**given)] == [(2, 3, 6, 8), (3, 30, 8), (3, 6, 8)]
    given[name] = wrong(given[name])
    with pytest.raises((TypeError, ValueError), match=r"is not valid|dimensions|must be a tensor"):
        run(**given)
