"""Packed sequences and decoding on the CUDA kernels, under the emulator: what the case tables of
test_cuda_operators.py do not have."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from fenced import run_fenced
from torch import Tensor

from fastattn import dispatch, masks
from fastattn.backends.primitives import (
    AppendOptions,
    AttentionBackwardOptions,
    DecodeOptions,
    VarlenOptions,
)
from fastattn.testing.decode import DecodeCase, make_decode
from fastattn.testing.packed import VarlenCase, make_varlen

WAYS = {
    "causal": VarlenCase("causal", (40, 1, 140, 0, 7), (40, 9, 140, 3, 80), window=(-1, 0)),
    "options": VarlenCase("options", (90, 70), (70, 90), window=(30, 9), softcap=4.0, alibi="bh",
                          bottom_right=True, dropout_p=0.2, heads=4, kv_heads=2),
    "program": VarlenCase("program", (90, 3, 70), (70, 9, 150), program="many", bottom_right=True),
}  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("case", WAYS.values(), ids=WAYS)
def test_packed_sequences_have_the_bits_of_each_alone(
    adapter: ModuleType, case: VarlenCase, dtype: torch.dtype
) -> None:
    inputs = make_varlen(case, dtype)
    found = inputs.results(adapter)
    expected = inputs.by_sequence(lambda alone: alone.results(adapter))
    for name, want in expected.items():
        assert torch.equal(found[name], want.to(found[name].dtype)), name


def test_distances_beyond_a_table_have_its_last_entry(adapter: ModuleType) -> None:
    """On a GPU the host does not know the longest sequence, and no kernel may read elsewhere."""
    inputs = make_varlen(VarlenCase("short", (40, 9), relative_bias=True), torch.float32)
    *args, table = inputs.args
    assert table is not None
    short = table[:, :, 30:-30]
    long = torch.nn.functional.pad(short, (30, 30), mode="replicate")
    outs = (adapter.varlen_attention(*args, bias, options=inputs.options) for bias in (short, long))
    for found, want in zip(*outs, strict=True):
        assert torch.equal(found, want)


def test_a_decoded_row_has_the_same_bits_whatever_is_in_the_batch(adapter: ModuleType) -> None:
    case = DecodeCase("batch", lengths=(300, 700, 1), capacity=720, heads=4, kv_heads=2)
    inputs = make_decode(case, torch.bfloat16)
    query, keys, values, lengths = inputs.args[:4]
    assert query is not None
    assert keys is not None
    assert values is not None
    assert lengths is not None
    out, lse = adapter.decode_attention(*inputs.args, options=inputs.options)
    for b, length in enumerate(case.lengths):
        one = slice(b, b + 1)
        room = -(-length // 100) * 100  # a smaller cache, too
        alone = (query[one], keys[one, :, :room], values[one, :, :room], lengths[one])
        out_alone, lse_alone = adapter.decode_attention(*alone, options=inputs.options)
        assert torch.equal(out_alone, out[one])
        assert torch.equal(lse_alone, lse[one])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("way", ["relative_bias", "program"])
def test_nan_in_a_hidden_cached_key_reaches_nothing(
    adapter: ModuleType, way: str, dtype: torch.dtype
) -> None:
    """An entry of -inf hides a key, a mask the first 65: a tile, and a part of the next one."""
    case = DecodeCase("hidden", lengths=(70, 129), relative_bias=True, heads=4, kv_heads=2)
    inputs = make_decode(case, dtype)
    query, keys, values, *_, table = inputs.args
    assert query is not None
    assert keys is not None
    assert values is not None
    assert table is not None
    program = None
    if way == "program":
        mask = masks.document((torch.arange(case.capacity) >= 65).int())
        lengths = torch.tensor(case.lengths)
        program = masks.cache_program("testing", mask, query, case.capacity, lengths)
    else:
        table[..., table.shape[2] // 2 + 10] = -math.inf
    args = (*inputs.args, program)
    clean = adapter.decode_attention(*args, options=inputs.options)
    for b, length in enumerate(case.lengths):
        hidden = slice(0, 65) if program is not None else slice(length - 11, length - 10)
        for cache in (keys, values):
            cache[b, :, hidden] = math.nan
    found = adapter.decode_attention(*args, options=inputs.options)
    for got, want in zip(found, clean, strict=True):
        assert torch.equal(got, want)


def nan_stays_in_its_sequence(
    adapter: ModuleType, case: VarlenCase, dtype: torch.dtype = torch.bfloat16
) -> None:
    """The third sequence of a case with the lengths of "causal"."""
    inputs = make_varlen(case, dtype)
    clean = inputs.results(adapter)
    for x, rows in zip(inputs.args[:3], ((41, 181), (49, 189), (49, 189)), strict=True):
        assert x is not None
        x[slice(*rows)] = torch.nan
    for name, found in inputs.results(adapter).items():
        first, last = (41, 181) if name in ("out", "lse", "grad_query") else (49, 189)
        rows = torch.arange(found.shape[1 if name == "lse" else 0])
        others = (rows < first) | (rows >= last)
        one, other = (x.mT if name == "lse" else x for x in (clean[name], found))
        assert torch.equal(one[others], other[others]), name
        assert other[~others].isnan().all(), name


def test_nan_stays_in_its_sequence(adapter: ModuleType) -> None:
    nan_stays_in_its_sequence(adapter, WAYS["causal"])


def _why_not(adapter: ModuleType, op: str, tensors: Sequence[Any], options: Any) -> list[str]:
    """The reasons against a call."""
    return adapter.why_not(op, dispatch.tensors_by_name(op, tensors), options)


@pytest.mark.complete
def test_reasons_against_a_call(adapter: ModuleType) -> None:
    packed, cached = VarlenOptions(scale=1.0), DecodeOptions(scale=1.0)
    x, ends = torch.zeros(3, 2, 300), torch.tensor([0, 3])
    wide = "a head has 300 columns; the kernels take up to 256"
    assert _why_not(adapter, "varlen_attention", (x, x, x, ends, ends), packed) == [wide]
    x = x[None].transpose(1, 2)
    length = torch.tensor([3])
    assert _why_not(adapter, "decode_attention", (x, x, x, length), cached) == [wide]
    table = torch.zeros(1, 2**28, dtype=torch.int32)
    x = torch.zeros(1, 2, 8, 4, dtype=torch.float16)
    for op, tensors, options in (
        ("decode_attention", (x, x, x), cached),
        ("append_to_cache", (x, x, x, x), AppendOptions()),
    ):
        reasons = _why_not(adapter, op, (*tensors, length, table.expand(1, -1)), options)
        assert reasons == ["the cache has more than 1073741824 keys of a sequence, or entries"]


# Invalid numbers: a GPU cannot refuse them, but must not read outside its tensors. Every
# tensor ends where a page begins that may not be read, so this runs in a process of its own.
_FENCED = """
import emulator
from fastattn.backends.primitives import AppendOptions
from fastattn.testing.decode import make_decode
from fastattn.testing.packed import make_varlen
from attention_cases import DECODE_CASES, VARLEN_CASES
adapter = emulator.load()
packed = {case.name: case for case in VARLEN_CASES}
for wrong in ([0, 20, 5, 10**12, -3, 70, 9], [90, 0, 0, 0, 0, 0, 0], [-(10**15)] * 7):
    for name in ("alibi-bottom-right", "relative-everything"):
        print(name, "starts", wrong, flush=True)
        inputs = make_varlen(packed[name], torch.bfloat16)
        for at in (3, 4):
            args = list(inputs.args)
            args[at] = torch.tensor(wrong)
            out, lse = adapter.varlen_attention(*args, options=inputs.options)
            args[7:7] = [out, lse]
            grads = inputs.grads.values()
            adapter.varlen_attention_backward(*grads, *args, options=inputs.options)
cases = {case.name: case for case in DECODE_CASES}
for name, at in (("paged", 3), ("paged", 4), ("entries", 3), ("entries", 5), ("relative", 3)):
    for wrong in (10**9, -(10**9)):
        print(name, at, wrong, flush=True)
        inputs = make_decode(cases[name], torch.float32)
        args = list(inputs.args)
        args[at] = torch.full_like(args[at], wrong)
        adapter.decode_attention(*args, options=inputs.options)
        new = [torch.zeros(4, 2, 3, x.shape[3]) for x in args[1:3]]
        adapter.append_to_cache(*args[1:3], *new, *args[3:6], options=AppendOptions())
"""


@pytest.mark.complete
@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
def test_invalid_numbers_touch_nothing_outside_tensors(adapter: ModuleType) -> None:
    run_fenced(_FENCED)


# -- far apart ------------------------------------------------------------------------------------


def _far(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """x with these strides, in address space of which only the pages that are touched exist."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    last = sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True))
    memory = mmap.mmap(-1, (last + 1) * x.element_size(), flags=flags)
    far = torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, strides)
    far.copy_(x)
    return far


NO_RESERVE = 0x4000  # of Linux; mmap names it from Python 3.13 on
FAR = 2**31 + 64  # elements, beyond what 32 bits hold


@pytest.mark.skipif(sys.platform != "linux", reason="needs MAP_NORESERVE")
def test_places_beyond_two_to_the_31_elements(adapter: ModuleType) -> None:
    draw = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(torch.bfloat16)

    # [B, H, L, D] with far heads and batch entries
    tensors = [normal(2, 2, 20, 16) for _ in range(3)]
    far = [_far(x, (FAR, 2 * FAR, 16, 1)) for x in tensors]
    options = AttentionBackwardOptions(scale=0.25, window_right=0)
    grad = normal(2, 2, 20, 16)
    results = []
    for given in (tensors, far):
        args = (*given, None, None, None)
        out, lse, _ = adapter.scaled_dot_product_attention(*args, options=options)
        grads = adapter.scaled_dot_product_attention_backward(
            grad, None, None, *args, out, lse, options=options
        )
        results.append([out, lse, *grads[:3]])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)

    # [T, H, D] with far rows
    packed = [normal(40, 2, 16) for _ in range(3)]
    far = [_far(x, (FAR // 16, 16, 1)) for x in packed]
    ends = torch.tensor([0, 25, 40])
    options = VarlenOptions(scale=0.25, window_right=0)
    want, got = (
        adapter.varlen_attention(*x, ends, ends, None, None, options=options) for x in (packed, far)
    )
    assert torch.equal(got[0], want[0])

    # [E, H, N, D] with far pages
    query, keys, values = normal(1, 4, 1, 16), normal(3, 2, 32, 16), normal(3, 2, 32, 16)
    table, lengths = torch.tensor([[2, 0, 1]], dtype=torch.int32), torch.tensor([90])
    options = DecodeOptions(scale=0.25)
    caches = [_far(x, (FAR, 512, 16, 1)) for x in (keys, values)]
    want, got = (
        adapter.decode_attention(query, *x, lengths, table, options=options)
        for x in ((keys, values), caches)
    )
    assert torch.equal(got[0], want[0])
    new = [normal(1, 2, 4, 16) for _ in range(2)]
    adapter.append_to_cache(*caches, *new, lengths, table, options=AppendOptions())
    adapter.append_to_cache(keys, values, *new, lengths, table, options=AppendOptions())
    assert torch.equal(caches[0], keys)
