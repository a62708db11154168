"""Masks without a tensor of all pairs: ``fastattn.masks`` and attention's ``mask=``."""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from fastattn import masks, scaled_dot_product_attention
from fastattn.backends.primitives import AttentionOptions
from fastattn.backends.reference._mask_program import visible_by_program
from fastattn.masks._blocks import _IndexWithTensors
from fastattn.ops._disentangled import NO_TERMS
from fastattn.ops.sdpa import attention

pytestmark = pytest.mark.usefixtures("seeded")


def qkv(q_len: int = 130, k_len: int = 200, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Random queries, keys and values; two query heads share a key head."""
    sizes = (4, q_len), (2, k_len), (2, k_len)
    return [torch.randn(2, heads, n, 8).to(dtype) for heads, n in sizes]


def attend(*args: Any, **options: Any) -> Any:
    """Attention with grouped heads."""
    return scaled_dot_product_attention(*args, enable_gqa=True, **options)


def dense(mask: Any, q_len: int, k_len: int, offset: int = 0, batch: int = 2) -> Tensor:
    """The pairs of a mask, as the reference reads its program."""
    query = torch.empty(batch, 4, q_len, 8)
    return visible_by_program(
        masks.program("test", mask, query, k_len, offset), batch, q_len, k_len
    ).expand(batch, 4, q_len, k_len)


# --- what a mask means: the same pairs from indices -----------------------------------------------

IDS = torch.arange(200).div(30, rounding_mode="floor")
BATCH_IDS = torch.stack([IDS, torch.randint(0, 3, (200,), generator=torch.Generator())])

# The pairs by (b, i, j), where i has the offset already.
Pairs = Callable[[Tensor, Tensor, Tensor], Tensor]
STRUCTURED: dict[str, tuple[masks.Mask, Pairs]] = {
    "causal": (masks.causal(), lambda b, i, j: j <= i),
    "not-causal": (~masks.causal(), lambda b, i, j: j > i),
    "window": (masks.sliding_window(20, 3), lambda b, i, j: (i - j <= 20) & (j - i <= 3)),
    "window-left": (masks.sliding_window(20, -1), lambda b, i, j: i - j <= 20),
    "window-all": (masks.sliding_window(-1, -1), lambda b, i, j: j == j),
    "chunked": (masks.chunked(32), lambda b, i, j: i.div(32, rounding_mode="floor")
                == j.div(32, rounding_mode="floor")),
    "prefix": (masks.prefix_lm(17), lambda b, i, j: (j < 17) | (j <= i)),
    "prefixes": (masks.prefix_lm(torch.tensor([5, 60])),
                 lambda b, i, j: (j < torch.tensor([5, 60])[b]) | (j <= i)),
    "and": (masks.causal() & ~masks.sliding_window(9, 2),
            lambda b, i, j: (j <= i) & ~((i - j <= 9) & (j - i <= 2))),
    "or": (masks.chunked(16) | ~masks.causal() | masks.sliding_window(1, 0), lambda b, i, j:
           (i.div(16, rounding_mode="floor") == j.div(16, rounding_mode="floor"))
           | (j > i) | ((i - j <= 1) & (j <= i))),
    "not-and": (~(masks.causal() & masks.sliding_window(9, 2)),
                lambda b, i, j: ~((j <= i) & (i - j <= 9))),
    "nothing": (masks.causal() & ~masks.causal(), lambda b, i, j: j != j),
}  # fmt: skip


def indices(q_len: int, k_len: int, offset: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of heads, queries and keys that broadcast to all pairs."""
    i, j = torch.arange(q_len) + offset, torch.arange(k_len)
    return torch.arange(2)[:, None, None, None], i[:, None], j


@pytest.mark.parametrize("name", STRUCTURED)
@pytest.mark.parametrize(("q_len", "k_len"), [(130, 200), (200, 130), (1, 1), (0, 3), (3, 0)])
@pytest.mark.parametrize("offset", [0, 70, -70])
def test_structured_masks(name: str, q_len: int, k_len: int, offset: int) -> None:
    mask, pairs = STRUCTURED[name]
    want = pairs(*indices(q_len, k_len, offset)).expand(2, 4, q_len, k_len)
    assert torch.equal(dense(mask, q_len, k_len, offset), want)


def test_documents() -> None:
    for ids in (IDS, BATCH_IDS):
        rows = ids.expand(2, 200)
        want = rows[:, None, :, None] == rows[:, None, None, :]
        assert torch.equal(dense(masks.document(ids), 200, 200), want.expand(2, 4, 200, 200))
        of_keys = rows[:, :150] + 1
        want = rows[:, None, :, None] == of_keys[:, None, None, :]
        got = dense(masks.document(ids, of_keys), 200, 150)
        assert torch.equal(got, want.expand(2, 4, 200, 150))
    mixed = masks.document(IDS, BATCH_IDS) & masks.causal()
    want = (IDS[:, None] == BATCH_IDS[:, None, None, :]).tril()
    assert torch.equal(dense(mixed, 200, 200), want.expand(2, 4, 200, 200))


# Numbers of documents whose keys are next to each other, in any order and with other keys' numbers.
TOGETHER = {
    "sorted": ([0, 0, 1, 1, 1, 4], [0, 1, 1, 2, 4, 4]),
    "padded": ([3, 3, 3, 7, -1, -1], [3, 3, 7, 7, 7, -1]),
    "absent": ([9, 9, 5, 5, -4, 2], [5, 5, 0, 0, 2, 2]),
    "one": ([1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_documents_next_to_each_other_are_intervals(name: str) -> None:
    of_queries, of_keys = (torch.tensor(ids) for ids in TOGETHER[name])
    mask = masks.document(of_queries, of_keys.expand(2, 6))
    want = (of_queries[:, None] == of_keys).expand(2, 4, 6, 6)
    near = torch.tril(torch.ones(6, 6, dtype=torch.bool)).triu(-1)
    for given, pairs in (
        (mask, want),
        (~mask, ~want),
        (masks.causal() & mask & masks.sliding_window(1, -1), want & near),
    ):
        assert torch.equal(dense(given, 6, 6), pairs)
        assert steps(given, 6) == 1


@pytest.mark.parametrize("ids", [[0, 0, 1, 1, 1, 0], [0, 1, 0, 1, 0, 1]])
def test_other_documents_keep_their_numbers(ids: list[int]) -> None:
    own = torch.tensor([ids, [0, 0, 0, 0, 0, 0]])
    mask = masks.document(own) & masks.causal()
    want = (own[:, None, :, None] == own[:, None, None, :]).tril()
    assert torch.equal(dense(mask, 6, 6), want.expand(2, 4, 6, 6))
    assert steps(mask, 6) == 3


def steps(mask: masks.Mask, length: int) -> int:
    """How many leaves and operators its program has."""
    return int(masks.program("test", mask, torch.empty(2, 4, length, 8), length, 0)[0])


def striped(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A mask_mod with empty, full and partial blocks."""
    return ((q - k) % (3 + b) == 0) & (q // 50 <= k // 40) | (h == 1) & (k < 128) & (q < 256)


@pytest.mark.parametrize(("batch", "heads"), [(None, None), (2, 4), (2, None), (None, 4)])
@pytest.mark.parametrize(("q_len", "k_len"), [(300, 260), (128, 256), (5, 700)])
def test_functions(batch: int | None, heads: int | None, q_len: int, k_len: int) -> None:
    mask = masks.from_function(striped, batch, heads, q_len, k_len)
    want = create_mask(striped, batch, heads, q_len, k_len, device="cpu")
    assert torch.equal(dense(mask, q_len, k_len), want.expand(2, 4, q_len, k_len))
    assert torch.equal(dense(~mask, q_len, k_len), ~want.expand(2, 4, q_len, k_len))


def test_functions_gather_with_scalar_tensors() -> None:
    """On every version of PyTorch, even if it would read the value of such an index."""
    calls: list[str] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    table, i = torch.arange(24).view(4, 6), torch.tensor(-3)
    with Recorder(), _IndexWithTensors():
        found = [table[i], table[2, i], table[i][i], table[i.int(), 5]]
    assert [x.tolist() for x in found] == [[6, 7, 8, 9, 10, 11], 15, 9, 11]
    assert calls.count("aten.index.Tensor") == 5
    calls.clear()
    with Recorder(), _IndexWithTensors():
        assert table[3, -1] == 23
        assert table[()].shape == (4, 6)
        assert table[i, :].tolist() == table[1].tolist()
        with pytest.raises(IndexError, match="out of bounds"):
            table[4]
    assert "aten.index.Tensor" not in calls


@pytest.mark.parametrize("block", [128, (64, 32), (40, 100)])
@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("separate", [True, False])
def test_block_masks(block: Any, batch: int | None, separate: bool) -> None:
    q_len, k_len = 300, 260
    given = functools.partial(
        create_block_mask, striped, batch, 4, q_len, k_len, device="cpu", BLOCK_SIZE=block
    )
    block_mask = given() if separate else given(separate_full_blocks=False)
    want = create_mask(striped, batch, 4, q_len, k_len, device="cpu").expand(2, 4, q_len, k_len)
    assert torch.equal(dense(block_mask, q_len, k_len), want)
    assert torch.equal(dense(masks.causal() & block_mask, q_len, k_len), want.tril())
    assert torch.equal(dense(block_mask | masks.causal(), q_len, k_len),
                       want | torch.ones_like(want).tril())  # fmt: skip


@pytest.mark.parametrize("size", [2**16, 2**31, 2**61])
def test_memory_of_blocks_is_linear_in_the_lengths(size: int) -> None:
    count, column = (
        torch.ones(1, 1, 1, dtype=torch.int32),
        torch.zeros(1, 1, 1, 1, dtype=torch.int32),
    )
    block_mask = BlockMask.from_kv_blocks(
        count, column, BLOCK_SIZE=size, mask_mod=striped, seq_lengths=(130, 200)
    )
    program = masks.program("test", masks.from_block_mask(block_mask), qkv()[0], 200, 0)
    assert program.numel() < 200 * 160 // 32 + 100
    expected = create_mask(striped, 1, 4, 130, 200, device="cpu")[:, :1]
    assert torch.equal(dense(block_mask, 130, 200)[:, :1], expected.expand(2, 1, 130, 200))


def test_a_block_mask_without_a_function() -> None:
    counts = torch.tensor([[[2, 1]]], dtype=torch.int32)
    columns = torch.tensor([[[[2, 0, 1], [1, 0, 2]]]], dtype=torch.int32)
    block_mask = BlockMask.from_kv_blocks(counts, columns, BLOCK_SIZE=64)
    want = torch.tensor([[True, False, True], [False, True, False]])
    want = want.repeat_interleave(64, 0).repeat_interleave(64, 1)
    assert torch.equal(dense(block_mask, 128, 192), want.expand(2, 4, 128, 192))


# --- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRUCTURED)
def test_attention_equals_the_dense_masks(name: str) -> None:
    mask, _ = STRUCTURED[name]
    tensors, options = qkv(), {"causal_alignment": "bottom_right", "return_lse": True}
    want = attend(*tensors, attn_mask=dense(mask, 130, 200, 70), **options)
    assert_close(attend(*tensors, mask=mask, **options), want)


def test_memory_grows_with_the_length() -> None:
    length = 1 << 18
    ids = torch.arange(length) // 1000
    mask = masks.document(ids) & masks.causal() | ~masks.prefix_lm(torch.tensor([5, 6]))
    program = masks.program("test", mask, torch.empty(1).expand(2, 4, length, 8), length, 0)
    assert program.numel() < 10 * length
    x = torch.randn(1, 1, length, 2)
    local = masks.sliding_window(10, 0)
    out = scaled_dot_product_attention(x, x, x, mask=local & masks.document(ids))
    want = scaled_dot_product_attention(x[:, :, :1000], x[:, :, :1000], x[:, :, :1000],
                                        window=(10, 0))  # fmt: skip
    assert_close(out[:, :, :1000], want)


def test_a_program_is_built_once() -> None:
    query = torch.empty(2, 4, 130, 8)
    ids = torch.zeros(130, dtype=torch.int32)
    mask = masks.document(ids) & masks.causal()
    with torch.inference_mode():
        first = masks.program("test", mask, query, 130, 0)
    ids[0] = 1  # a mask has its own copy
    assert masks.program("test", mask, query, 130, 0) is first
    assert not first.is_inference()
    assert masks.program("test", mask, query, 130, 1) is not first
    block_mask = create_block_mask(striped, None, None, 130, 130, device="cpu")
    programs = [masks.program("test", block_mask, query, 130, 0) for _ in range(2)]
    assert programs[0] is programs[1]


def test_bits_do_not_depend_on_the_threads(same_for_any_threads: Any) -> None:
    leaves = [x.requires_grad_() for x in qkv(300, 1500)]
    ids = torch.arange(1500) // 400
    mask = masks.document(ids[:300], ids) | masks.from_function(striped, None, None, 300, 1500)

    def results() -> tuple[Tensor, ...]:
        out = attend(*leaves, mask=mask)
        return (out, *torch.autograd.grad(out.sin().sum(), leaves))

    same_for_any_threads(results)


def test_vmap_over_documents() -> None:
    query, key, value = qkv(9, 9)
    ids = torch.randint(0, 3, (3, 2, 9))

    def call(own: Tensor) -> Any:
        return attend(query, key, value, mask=masks.document(own) & masks.causal())

    assert_close(vmap(call)(ids), torch.stack([call(own) for own in ids]))


# --- compiled ------------------------------------------------------------------------------------


@pytest.mark.complete
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    ids = torch.arange(130) // 40
    block_mask = masks.from_function(striped, None, None, 130, 130)

    def call(query: Tensor, key: Tensor, value: Tensor, mask: masks.Mask, own: Tensor) -> Tensor:
        documents = masks.document(own) & masks.sliding_window(50, -1)
        return attend(query, key, value, mask=mask & documents)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for length, mask in ((90, ~masks.chunked(16)), (130, block_mask)):
        leaves = [x.requires_grad_() for x in qkv(length, length)]
        results = []
        for function in (call, compiled):
            out = function(*leaves, mask, ids[:length])
            results.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
        for got, want in zip(*results, strict=True):
            assert torch.equal(got, want)


def test_compiled_code_takes_converted_block_masks() -> None:
    x = torch.randn(1, 4, 200, 8)
    block_mask = create_block_mask(striped, None, None, 200, 200, device="cpu")
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    converted = masks.from_block_mask(block_mask)
    assert torch.equal(compiled(x, x, x, mask=converted), attend(x, x, x, mask=block_mask))
    with pytest.raises(RuntimeError, match="from_block_mask before it"):
        compiled(x, x, x, mask=block_mask)


# --- errors --------------------------------------------------------------------------------------


def test_a_program_that_is_not_valid_is_refused() -> None:
    query, key, value = (x[:, :2] for x in qkv(130, 200))
    odd = create_block_mask(striped, 2, None, 130, 200, device="cpu", BLOCK_SIZE=(40, 24))
    mask = masks.document(IDS[:130] % 4, IDS % 4) & masks.from_block_mask(odd) | masks.causal()
    program = masks.program("test", mask, query, 200, 0)

    def call(given: Tensor) -> Any:
        options = AttentionOptions(scale=1.0)
        return attention(query, key, value, *[None] * 6, given, *NO_TERMS, options)

    call(program)
    refused = 0
    states = 1 + 7 * 5 + 192 + 256  # the first state, after the header and the padded ids
    for at in (*range(1 + 7 * 5), states):
        for wrong in (-1, 1, 2, 3, 77, 1 << 20, (1 << 31) - 1, -(1 << 31)):
            changed = program.clone()
            changed[at] = wrong
            try:
                call(changed)
            except ValueError as error:
                refused += "mask_program is not valid" in str(error)
    assert refused > 100
    for changed in (program[:0], program.long(), program.expand(2, -1)[:, 0]):
        with pytest.raises(ValueError, match="mask_program is not valid: it must be"):
            call(changed)
    for changed in (program[:-1], program[:1], torch.cat([program, program])):
        with pytest.raises(ValueError, match="mask_program is not valid: the length"):
            call(changed.contiguous())


IDS_9 = torch.zeros(9, dtype=torch.int64)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (torch.ones(6, 9, dtype=torch.bool), TypeError, r"argument 'mask' must be Mask or BlockMa"),
        (masks.document(IDS_9), RuntimeError, "ids of the queries must have length 6, got 9"),
        (masks.document(IDS_9[:6]), RuntimeError, "ids of the keys must have length 9, got 6"),
        (masks.document(IDS_9.expand(3, 9)[:, :6], IDS_9), RuntimeError,
         "the ids of the queries must be of batch size 1 or 2, got 3"),
        (masks.document(IDS_9[:6].to("meta"), IDS_9.to("meta")), RuntimeError,
         "ids of the queries must be on query's device cpu, got meta"),
        (masks.prefix_lm(IDS_9[:3]), RuntimeError, "lengths must be of batch size 1 or 2, got 3"),
        (masks.from_function(striped, 3, 4, 6, 9), RuntimeError, "batch size 1 or 2, got 3"),
        (masks.from_function(striped, None, 3, 6, 9), RuntimeError, "1 or 4 heads, got 3"),
        (masks.from_function(striped, None, None, 6, 8), RuntimeError,
         "mask must be of 6 queries and 9 keys, got 6 and 8"),
        (masks.causal() & masks.from_function(striped, None, None, 9, 9), RuntimeError,
         "mask must be of 6 queries and 9 keys, got 9 and 9"),
    ],
)  # fmt: skip
def test_masks_that_do_not_fit(mask: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"scaled_dot_product_attention.*{message}"):
        attend(*qkv(6, 9), mask=mask)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: masks.sliding_window(-2, 0), ValueError, "left must be at least -1, got -2"),
        (lambda: masks.sliding_window(0, 1.5), TypeError, "'right' must be int, not float"),
        (lambda: masks.chunked(0), ValueError, "size must be at least 1, got 0"),
        (lambda: masks.prefix_lm(-1), ValueError, "lengths must be at least 0, got -1"),
        (lambda: masks.prefix_lm(torch.zeros(2)), TypeError, "lengths must be int32 or int64"),
        (lambda: masks.document(torch.zeros(4)), TypeError, "ids must be int32 or int64, got .*32"),
        (lambda: masks.document(IDS_9, IDS_9.bool()), TypeError, "key_ids must be int32 or int64"),
        (lambda: masks.document([1, 2]), TypeError, "'ids' must be Tensor, not list"),
        (lambda: masks.document(torch.zeros(1, 1, 4).long()), ValueError,
         r"ids must be \[L\] or \[B, L\], got shape \(1, 1, 4\)"),
        (lambda: masks.document(IDS_9 + 2**31), ValueError, "ids must fit int32, got 2147483648"),
        (lambda: masks.causal() & torch.ones(3), TypeError, "unsupported operand"),
        (lambda: masks.from_block_mask(masks.causal()), TypeError, "'block_mask' must be BlockMas"),
        (lambda: masks.from_function(None, 1, 1, 4, 4), TypeError, "'mask_mod' must be a function"),
        (lambda: masks.from_function(striped, 1, 1, None, 4), TypeError, "'Lq' must be int"),
        (lambda: masks.from_function(striped, 0, 1, 4, 4), ValueError, "B must be at least 1"),
        (lambda: masks.from_function(lambda b, h, q, k: q if q > k else k, 1, 1, 4, 4),
         RuntimeError, "mask_mod must not depend on values in its control flow"),
        (lambda: masks.from_function(lambda b, h, q, k: IDS_9[: int(k)].sum() > 3, 1, 1, 4, 4),
         RuntimeError, "mask_mod must not depend on values in its control flow"),
        (lambda: masks.from_function(lambda b, h, q, k: IDS_9[k > IDS_9].sum() > 3, 1, 1, 4, 4),
         RuntimeError, "mask_mod must not depend on values"),
        (lambda: masks.from_function(lambda b, h, q, k: torch.tensor(k.tolist() > 1), 1, 1, 4, 4),
         RuntimeError, "mask_mod must not depend on values"),
        (lambda: masks.from_function(lambda b, h, q, k: IDS_9.masked_select(k > IDS_9).any(),
                                     1, 1, 4, 4), RuntimeError, "mask_mod must not depend on valu"),
        (lambda: masks.from_function(lambda b, h, q, k: IDS_9[q] == IDS_9[k], 1, 1, 9, 10),
         RuntimeError, "mask_mod raised IndexError: index 9 is out of bounds"),
        (lambda: masks.from_function(lambda b, h, q: q > 1, 1, 1, 4, 4),
         RuntimeError, "mask_mod raised TypeError: .* takes 3 positional arguments but 4"),
        (lambda: masks.from_function(lambda b, h, q, k: q - k, 1, 1, 4, 4), TypeError,
         r"mask_mod must return a boolean tensor without dimensions, got \[\] torch.int64"),
        (lambda: masks.from_function(lambda b, h, q, k: True, 1, 1, 4, 4), TypeError,
         "mask_mod must return a boolean tensor .* got True"),
        (lambda: functools.reduce(lambda a, b: a | b, [masks.causal()] * 33), ValueError,
         "a mask can combine at most 32 others, got 33"),
    ],
)  # fmt: skip
def test_errors(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_names() -> None:
    mask = ~(masks.causal() & masks.document(IDS_9)) | masks.chunked(4)
    assert repr(mask) == "((~causal() | ~document(<ids [9]>)) | chunked(4))"


def test_a_mask_has_no_truth_value() -> None:
    with pytest.raises(TypeError, match="has no truth value"):
        bool(masks.causal())


def test_masks_are_pickled() -> None:
    mask = masks.sliding_window(3, -1) & (masks.chunked(4) | ~masks.prefix_lm(2)) | masks.causal()
    query, key, value = qkv(9, 9)
    copy = pickle.loads(pickle.dumps(mask))
    call = functools.partial(scaled_dot_product_attention, query, key, value, enable_gqa=True)
    assert torch.equal(call(mask=copy), call(mask=mask))


def test_programs_of_the_last_lengths_are_kept() -> None:
    mask = masks.causal()
    first = masks.program("test", mask, torch.empty(1, 1, 3, 2), 3, 0)
    for length in range(4, 40):
        masks.program("test", mask, torch.empty(1, 1, length, 2), length, 0)
        assert masks.program("test", mask, torch.empty(1, 1, 3, 2), 3, 0) is first


@pytest.mark.parametrize(
    "make", [functools.partial(masks.sliding_window, -1), masks.chunked, masks.prefix_lm]
)
def test_sizes_beyond_int32_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="must be below"):
        make(sys.maxsize)
