"""A ``BlockMask`` that its owner changes between calls: every call uses its current value."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask
from torch.testing import assert_close

from fastattn import masks, scaled_dot_product_attention

LQ, LK = 32, 192
shift = 0  # read by `by_global`


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def by_global(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A causal mask_mod that reads a global variable."""
    return q + shift >= k


def shifted(by: Any) -> Any:
    """A causal mask whose queries are moved by a number of positions."""

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q + by >= k

    return mask_mod


def partly(mask_mod: Any) -> Any:
    """All blocks are partial, so that the function alone decides."""
    counts = torch.full((1, 1, 1), 3, dtype=torch.int32)
    columns = torch.arange(3, dtype=torch.int32)[None, None, None]
    lengths = (LQ, LK)
    return BlockMask.from_kv_blocks(
        counts, columns, BLOCK_SIZE=64, mask_mod=mask_mod, seq_lengths=lengths
    )


def pairs(mask_mod: Any, q_len: int = LQ) -> Tensor:
    """All pairs of a mask_mod, as a tensor."""
    none = torch.zeros((), dtype=torch.int64)
    visible: Tensor = mask_mod(none, none, torch.arange(q_len)[:, None], torch.arange(LK))
    return visible.expand(q_len, LK).clone()


def assert_is_current(block_mask: Any) -> None:
    """Attention with the block mask must equal attention with its mask_mod as it is now."""
    query = torch.randn(1, 2, block_mask.seq_lengths[0], 8)
    key = torch.randn(1, 2, LK, 8)
    now = pairs(block_mask.mask_mod, query.shape[2])
    out = scaled_dot_product_attention(query, key, key, mask=block_mask)
    assert_close(out, scaled_dot_product_attention(query, key, key, now))


def test_the_decoding_loop_of_flex_attention() -> None:
    """https://pytorch.org/blog/flexattention-for-inference: the block of a row, another mod."""
    whole: Any = create_block_mask(causal, 1, 1, LK, LK, device="cpu", BLOCK_SIZE=64)
    query, key = torch.randn(1, 2, LK, 8), torch.randn(1, 2, LK, 8)
    want = scaled_dot_product_attention(query, key, key, is_causal=True)
    step: Any = None
    for position in range(LK):
        block = whole[:, :, torch.tensor([position // 64])]
        step = block if step is None else step
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
            setattr(step, name, getattr(block, name))
        step.mask_mod, step.seq_lengths = shifted(torch.tensor(position)), (1, LK)
        out = scaled_dot_product_attention(query[:, :, position, None], key, key, mask=step)
        assert_close(out, want[:, :, position, None])


def in_a_cell() -> tuple[Any, Callable[[], Any]]:
    """A mask_mod that reads a variable of the enclosing function, and what changes it."""
    by = 0

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q + by >= k

    def change() -> None:
        nonlocal by
        by = 100

    return mask_mod, change


def in_a_tensor() -> tuple[Any, Callable[[], Any]]:
    """A mask_mod that reads a tensor, and what changes it."""
    by = torch.tensor(0)
    return shifted(by), lambda: by.fill_(100)


def in_memory_of_numpy() -> tuple[Any, Callable[[], Any]]:
    """A mask_mod that reads memory of NumPy, and what changes it."""
    memory = np.zeros((), dtype=np.int64)  # a write changes no version of the tensor
    return shifted(torch.from_numpy(memory)), lambda: memory.fill(100)


def in_another_function() -> tuple[Any, Callable[[], Any]]:
    """A mask_mod within another one, and what changes it."""
    inner, change = in_a_cell()
    return and_masks(inner, lambda b, h, q, k: k < 150), change


def in_a_list() -> tuple[Any, Callable[[], Any]]:
    """A mask_mod that reads an item of a list, and what changes it."""
    by = [torch.tensor(0)]
    mask_mod = lambda b, h, q, k: q + by[0] >= k  # noqa: E731
    return mask_mod, lambda: by.__setitem__(0, torch.tensor(100))


def in_an_object() -> tuple[Any, Callable[[], Any]]:
    """A mask_mod that reads an attribute of an object, and what changes it."""
    owner = SimpleNamespace(by=0)
    return lambda b, h, q, k: q + owner.by >= k, lambda: setattr(owner, "by", 100)


def in_a_callable() -> tuple[Any, Callable[[], Any]]:
    """A mask_mod that is an object, and what changes its attribute."""

    class MaskMod:
        by = 0

        def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return q + self.by >= k

    mask_mod = MaskMod()
    return mask_mod, lambda: setattr(mask_mod, "by", 100)


def in_a_method() -> tuple[Any, Callable[[], Any]]:
    """A mask_mod that is a method, and what changes it."""
    mask_mod, change = in_a_callable()
    return mask_mod.__call__, change


def in_a_default() -> tuple[Any, Callable[[], Any]]:
    """A mask_mod that reads a default argument, and what changes it."""

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor, by: int = 0) -> Tensor:
        return q + by >= k

    return mask_mod, lambda: setattr(mask_mod, "__defaults__", (100,))


def in_a_partial() -> tuple[Any, Callable[[], Any]]:
    """A mask_mod that is a partial function, and what changes its keyword."""

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor, *, by: int) -> Tensor:
        return q + by >= k

    part = functools.partial(mask_mod, by=0)
    return part, lambda: part.keywords.update(by=100)


def in_an_attribute() -> tuple[Any, Callable[[], Any]]:
    """A mask_mod that reads its own attribute, and what changes it."""

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q + mask_mod.by >= k  # type: ignore[attr-defined]

    mask_mod.by = 0  # type: ignore[attr-defined]
    return mask_mod, lambda: setattr(mask_mod, "by", 100)


def in_the_code() -> tuple[Any, Callable[[], Any]]:
    """A mask_mod whose code is replaced."""
    mask_mod = lambda b, h, q, k: q >= k  # noqa: E731
    return mask_mod, lambda: setattr(
        mask_mod, "__code__", (lambda b, h, q, k: q + 100 >= k).__code__
    )


def in_a_global() -> tuple[Any, Callable[[], Any]]:
    """A mask_mod that reads a global variable, and what changes it."""
    globals()["shift"] = 0
    return by_global, lambda: globals().update(shift=100)


PLACES = (
    in_a_cell, in_a_tensor, in_memory_of_numpy, in_another_function, in_a_list, in_an_object,
    in_a_callable, in_a_method, in_a_default, in_a_partial, in_an_attribute, in_the_code,
    in_a_global,
)  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_function_whose_values_change(place: Any) -> None:
    mask_mod, change = place()
    block_mask = partly(mask_mod)
    assert_is_current(block_mask)
    assert_is_current(block_mask)
    before = pairs(mask_mod)
    change()
    assert not torch.equal(before, pairs(mask_mod))
    assert_is_current(block_mask)


def test_another_function_and_other_lengths() -> None:
    block_mask = partly(shifted(0))
    assert_is_current(block_mask)
    block_mask.mask_mod = shifted(100)
    assert_is_current(block_mask)
    block_mask.seq_lengths = (LQ // 2, LK)
    assert_is_current(block_mask)


def test_block_tensors_written_in_place() -> None:
    block_mask = partly(lambda b, h, q, k: k >= 0)
    query, key = torch.randn(1, 2, LQ, 8), torch.randn(1, 2, LK, 8)
    scaled_dot_product_attention(query, key, key, mask=block_mask)
    block_mask.kv_num_blocks.fill_(1)
    out = scaled_dot_product_attention(query, key, key, mask=block_mask)
    assert_close(out, scaled_dot_product_attention(query, key[:, :, :64], key[:, :, :64]))


@pytest.mark.parametrize(
    "place", [in_a_cell, in_a_tensor, in_another_function, in_a_list, in_a_global],
    ids=lambda place: place.__name__,
)  # fmt: skip
def test_an_unchanged_mask_is_converted_once(place: Any) -> None:
    block_mask = partly(place()[0])
    query = torch.empty(1, 2, LQ, 8)
    first, second = (masks.program("test", block_mask, query, LK, 0) for _ in range(2))
    assert first is second


def test_an_explicit_conversion_is_kept() -> None:
    mask_mod, change = in_a_tensor()
    mask = masks.from_block_mask(partly(mask_mod))
    query = torch.empty(1, 2, LQ, 8)
    before = masks.program("test", mask, query, LK, 0)
    change()
    assert masks.program("test", mask, query, LK, 0) is before
