"""The native functions read tensors by the exchange interface or by methods, and check each."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from batched_cases import OPERATORS, Case, lower, luong
from cache_calls import cache_operands
from recorder import Recorder
from torch import Tensor

import fastattn
from fastattn import compat
from fastattn.backends.primitives import (
    AppendOptions,
    HopfieldOptions,
    MemoryHopBackwardOptions,
    SinusoidalOptions,
)
from fastattn.library import operators
from fastattn.sinusoids import sinusoids

pytestmark = pytest.mark.usefixtures("seeded")

# --- the shapes and dtypes that the operators declare ---------------------------------------------


def decoded(entries: bool = False, **options: Any) -> None:
    """Decode with every option, so that all operands are read."""
    given = {"sinks": torch.ones(4), "alibi_slopes": torch.ones(4)}
    given |= {"relative_bias": torch.ones(4, 41), "mask": fastattn.masks.sliding_window(3, 0)}
    if entries:
        numbers = torch.arange(3)
        given |= {"cache_batch_idx": numbers, "cache_leftpad": numbers.new_zeros(3)}
    fastattn.decode_attention(**cache_operands(**options), **given)


def local() -> Case:
    """Luong attention within windows."""
    positions, padding = torch.tensor([[0.3, 4.6, 5.2], [7.7, 2.1, 1.4]]), ~lower(2, 6)
    options = {"positions": positions, "key_padding_mask": padding, "need_weights": True}
    return luong(window="local-p", D=2, dropout_p=0.5, **options)


def differentiated(make: Callable[[], Case]) -> None:
    """Run a case and its backward pass."""
    function, inputs = make()
    leaves = tuple(x.detach().float().requires_grad_() for x in inputs)
    found = function(*leaves)
    results = [x for x in (found if isinstance(found, tuple) else (found,)) if x.requires_grad]
    grads = [torch.ones_like(x) for x in results]
    torch.autograd.grad(results, leaves, grads, allow_unused=True)


# Between them they give each native function each of its tensors.
CALLS: dict[str, Callable[[], None]] = {
    name: functools.partial(differentiated, OPERATORS[name])
    for name in (
        *("sdpa-biases", "sdpa-alibi", "sdpa-bias-of-each", "sdpa-window2d", "sdpa-dropout"),
        *("sdpa-disentangled", "sdpa-decomposed2d"),
        *("varlen-biases", "varlen-causal-alibi", "varlen-dropout", "varlen-disentangled"),
        *(
            "additive-everything",
            "additive-dropout",
            "encode-memory",
            "encode-memory-tables",
            "hops-of-many-queries",
        ),
        *("hops-stack-masked", "hopfield-unroll", "hopfield-projected", "hopfield-bias"),
        *("merge-states", "flex"),
    )
}
CALLS |= {
    "local": functools.partial(differentiated, local),
    "decode": decoded,
    "decode-entries": functools.partial(decoded, entries=True),
    "decode-pages": functools.partial(decoded, paged=True),
    "decode-int8": functools.partial(decoded, cached=torch.int8),
    "decode-fp8": functools.partial(decoded, cached=torch.float8_e4m3fn),
}


def recorded(call: Callable[[], Any]) -> Iterator[tuple[Any, list[Any], Any]]:
    """The operators that a call runs, with their tensors and options."""
    with fastattn.use_backend("cpu"), Recorder() as recorder:
        call()
    for entry, args in recorder.calls.items():
        operator = operators.get(entry)
        if operator is not None:
            tensors, options = operator.split(args)
            yield operator, [x if x is None else x.detach() for x in tensors], options


RETYPED = {torch.float32: torch.float64, torch.int64: torch.int32, torch.int32: torch.int64}
RETYPED |= {torch.bool: torch.uint8}


def variants(x: Tensor) -> Iterator[tuple[Any, Tensor | None]]:
    """Invalid variants of a tensor, each with its meaning where a function accepts it."""
    yield from ((wrong, None) for wrong in (x.tolist(), x.to(torch.complex64), x.to("meta")))
    yield x.to(RETYPED.get(x.dtype, torch.float32)), x
    if x.ndim > 2:
        yield x.flatten(), None
    for dim, size in enumerate(x.shape):
        if size <= 2:
            yield x.repeat_interleave(7, dim), None
        if size > 1:
            part = x.narrow(dim, 0, size - 1)
            yield part, part.expand_as(x) if size == 2 else None


def fits(operator: Any, tensors: list[Any]) -> bool:
    """Whether the declared shapes and dtypes allow these tensors."""
    with contextlib.suppress(AttributeError, KeyError, RuntimeError):
        operator._shapes.check(tensors)
        operator._dtypes.check(tensors)
        return not any(x is not None and x.is_meta for x in tensors)
    return False


def native_calls(name: str, native: ModuleType) -> Iterator[tuple[Any, list[Any], Any]]:
    """Each call of the native module in a case: the operator, its tensors, and the function."""
    for operator, tensors, options in recorded(CALLS[name]):
        function = getattr(native, operator.name, None)
        if function is not None:
            yield operator, tensors, functools.partial(function, options=options)


def test_the_calls_have_every_tensor(native: ModuleType) -> None:
    given = set()
    for name in CALLS:
        for operator, tensors, _ in native_calls(name, native):
            pairs = zip(operator.names, tensors, strict=True)
            given |= {(operator.name, tensor) for tensor, x in pairs if x is not None}
    missing = {
        (operator.name, tensor)
        for operator in operators.values()
        for tensor in operator.names
        if hasattr(native, operator.name)
    } - given
    assert {op for op, _ in missing} <= {"linear", "sinusoidal_encoding"}, missing


@pytest.mark.parametrize("name", CALLS)
def test_native_functions_refuse_what_their_operators_refuse(
    name: str, way: None, native: ModuleType
) -> None:
    for operator, tensors, call in native_calls(name, native):
        for place, x in enumerate(tensors):
            if x is None or operator.names[place] == "seed":  # a number, which Python reads
                continue

            def first_with(x: Any) -> Any:
                results = call(*tensors[:place], x, *tensors[place + 1 :])  # noqa: B023
                return results[0] if isinstance(results, tuple) else results

            first_with(x)
            missing = [(None, None)] * (operator.names[place] not in operator.declared.optional)
            for wrong, meaning in (*missing, *variants(x)):
                if fits(operator, [*tensors[:place], wrong, *tensors[place + 1 :]]):
                    continue
                try:
                    result = first_with(wrong)
                except (IndexError, TypeError, ValueError):
                    continue
                assert meaning is not None, (operator.name, operator.names[place], wrong)
                torch.testing.assert_close(result, first_with(meaning), check_dtype=False)


def test_results_depend_on_neither_strides_nor_interface(
    native: ModuleType, exchange: Callable[[Any], bool]
) -> None:
    for name in CALLS:
        for _, tensors, call in native_calls(name, native):
            apart = [x.mT.contiguous().mT if x is not None and x.ndim > 1 else x for x in tensors]
            for given in (tensors, apart):
                want = call(*given)
                torch.testing.assert_close(want, call(*tensors))
                exchange(None)
                torch.testing.assert_close(call(*given), want, rtol=0, atol=0)
                exchange(compat.exchange_interface)


def by_blocks() -> Tensor:
    """The program of a mask of blocks, which packed sequences cannot have."""
    mask = fastattn.masks.from_function(lambda b, h, q, k: q >= k, None, None, 6, 7)
    return fastattn.masks.program("test", mask, torch.empty(1, 2, 6, 4), 7, 0)


# What depends on values, or on the options.
@pytest.mark.parametrize(
    ("name", "op", "tensor", "wrong", "message"),
    [
        ("sdpa-biases", "scaled_dot_product_attention", *row)
        for row in (
            ("query", lambda x: x[0], "query is not valid: it must have 4 dimensions, got float32"),
            ("relative_bias", lambda x: x[..., :5], "at least 7"),
            ("mask_program", lambda x: x[:1], "mask_program is not valid"),
        )
    ]
    + [
        ("decode", "decode_attention", *row)
        for row in (
            ("query", lambda x: x[:, :3], "heads of key must be positive and divide 3, got 2"),
            ("cache_seqlens", lambda x: x + 4, "cache_seqlens must be between 0 and the 12 keys"),
            ("relative_bias", lambda x: x[..., :5], "at least"),
            ("mask_program", lambda x: x[:-1], "mask_program is not valid: the length"),
        )
    ]
    + [
        ("varlen-biases", "varlen_attention", *row)
        for row in (
            ("cu_seqlens_q", lambda x: x + 1, "begin"),
            ("cu_seqlens_k", lambda x: x[[0, 2, 1, 3]], "decrease"),
            ("cu_seqlens_k", lambda x: 2 * x, "within the 7 rows"),
            ("relative_bias", lambda x: x[..., :5], "must have at least"),
            ("mask_program", lambda x: x[:-1], "mask_program is not valid"),
            ("mask_program", lambda x: torch.cat([x, x]), "mask_program is not valid"),
            ("mask_program", lambda _: by_blocks(), "mask_program is not valid"),
        )
    ]
    + [
        ("decode-pages", "decode_attention", "block_table", lambda x: x + 1, "one of the 9 pages"),
        ("decode-entries", "decode_attention", "cache_batch_idx", lambda x: x + 1, "the 3 entries"),
        ("decode-entries", "decode_attention", "cache_leftpad", lambda x: x + 13, "between"),
        ("decode-entries", "decode_attention", "cache_leftpad", lambda x: x - 1, "between"),
        ("hops-stack-masked", "memory_hop_attention", "in_memory", lambda x: x[:, :2], "not valid"),
        (
            "hops-of-many-queries",
            "memory_hop_attention",
            "hop_proj",
            lambda x: x[None],
            "(2, 3, 3)",
        ),
        ("hops-of-many-queries", "memory_hop_attention", "out_memory", lambda x: x[:, None], "not"),
        ("local", "local_attention", "factor", lambda x: x[..., :4], "factor is not valid"),
        ("local", "local_attention_backward", "weights", lambda x: x.mT, "weights is not valid"),
        ("local", "local_attention_backward", "weights", lambda x: None, "must be a tensor"),
        (
            *("additive-everything", "additive_attention_backward", "attn_mask"),
            *(lambda x: x[0], "attn_mask must have three dimensions"),
        ),
    ],
)
def test_values_are_checked_and_named(
    name: str,
    op: str,
    tensor: str,
    wrong: Callable[[Tensor], Any],
    message: str,
    way: None,
    native: ModuleType,
) -> None:
    (found,) = (call for call in native_calls(name, native) if call[0].name == op)
    operator, tensors, call = found
    place = operator.names.index(tensor)
    tensors[place] = wrong(tensors[place])
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        call(*tensors)


# --- functions of other signatures ----------------------------------------------------------------


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


def test_only_kept_weights_that_fit_are_used(way: None, native: ModuleType) -> None:
    memories = torch.randn(2, 4, 2, 9, 12)[..., ::2]  # its columns are copied
    mask, bias = torch.ones(4, 9, dtype=torch.bool), torch.randn(9)
    tensors = (torch.randn(4, 12)[:, 1::2], *memories, torch.randn(6, 6).mT, mask, bias)
    options = MemoryHopBackwardOptions(hops=2, needed=15)
    hops = native.memory_hop_attention
    out, *states, weights, kept = hops(*tensors, options=options, keeps=True)
    assert weights is None
    assert kept.shape == (4, 2, 9)

    def gradients(kept: Any) -> Any:
        given = (out, None, *tensors, *states)
        return native.memory_hop_attention_backward(*given, options=options, kept=kept)[:4]

    for got, wanted in zip(gradients(kept), gradients(None), strict=True):
        assert torch.equal(got, wanted)
    for wrong in (kept[:, :1], kept.double(), kept.mT.contiguous().mT):
        with pytest.raises(ValueError, match="kept"):
            gradients(wrong)


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
        ("rotary_positions", lambda x: torch.full((3, 2), 16), "must have a row for each position"),
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


def flags_of_memory(x: Tensor) -> str:
    """Linux's flags of the mapping that holds the middle of the tensor."""
    address, inside = x.data_ptr() + x.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, last = (int(end, 16) for end in mapping.groups())
            inside = first <= address < last
        elif inside and line.startswith("VmFlags:"):
            return line
    raise AssertionError("the tensor is in no mapping")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system is not Linux")
def test_a_large_result_asks_for_huge_pages() -> None:
    x = torch.randn(64, 1, 256, 64)
    assert " hg" not in flags_of_memory(x)
    assert " hg" in flags_of_memory(fastattn.scaled_dot_product_attention(x, x, x))
