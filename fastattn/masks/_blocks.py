"""The blocks of a mask whose pairs are known one by one: a function of indices, or a ``BlockMask``.

A block has a state: none or all of its pairs are visible, or it is partial and has one bit for each
pair. Functions are evaluated once for each pair of the blocks that are not decided yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Size = tuple[int, int]  # of queries and keys

_NONE, _ALL, _PARTIAL = 0, 1, 2  # states of a block


def blocks_of_function(
    mask_mod: MaskMod,
    heads: Size,  # of the batch and heads
    lengths: Size,
    block: Size,
    device: torch.device | str,
) -> tuple[Tensor, Tensor]:
    """Return the states [B, H, rows, columns] and the bits, as in ``Kind.BLOCKS``."""
    size = (-(-n // side) for n, side in zip(lengths, block, strict=True))
    states = torch.full((*heads, *size), _PARTIAL, dtype=torch.int32, device=device)
    return _evaluate(mask_mod, states, lengths, block)


def blocks_of_block_mask(block_mask: Any, lengths: Size, block: Size) -> tuple[Tensor, Tensor]:
    """Return states and bits of a ``BlockMask``; evaluates only pairs of its partial blocks."""
    (q_len, k_len), (block_q, block_k) = lengths, block
    size = -(-q_len // block_q), -(-k_len // block_k)
    states = _mark_listed(block_mask.kv_num_blocks, block_mask.kv_indices, size) * _PARTIAL
    if block_mask.full_kv_num_blocks is not None:
        full = _mark_listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, size)
        states = torch.where(full == 1, _ALL, states)
    return _evaluate(block_mask.mask_mod, states, lengths, block)


def listed_blocks(block_mask: Any, lengths: Size, block: Size) -> tuple[Tensor, Tensor | None]:
    """Return states in which all listed blocks are visible, and 1 for the full ones, or None."""
    size = -(-lengths[0] // block[0]), -(-lengths[1] // block[1])
    states, full = _mark_listed(block_mask.kv_num_blocks, block_mask.kv_indices, size) * _ALL, None
    if block_mask.full_kv_num_blocks is not None:
        full = _mark_listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, size)
        states = torch.maximum(states, full * _ALL)
    return states, full


def blocks_of_part(
    states: Tensor, bits: Tensor, block: Size, first: Size, lengths: Size
) -> tuple[Tensor, Tensor]:
    """Return states and bits of the rectangle that begins at pair ``first``, in equal blocks."""
    (block_q, block_k), (first_q, first_k) = block, first
    # Append a block of zeros, which blocks without bits can index.
    bits = torch.nn.functional.pad(bits, (0, 0, 0, 0, 0, 1))

    def is_visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Read the pair's bit, or the state of its block."""
        q, k = q + first_q, k + first_k
        state = states[b, h, q // block_q, k // block_k]
        word = bits[state.clamp(min=_PARTIAL) - _PARTIAL, k % block_k, q % block_q // 32]
        bit = word >> (q % block_q % 32) & 1
        return (state == _ALL) | ((state >= _PARTIAL) & (bit == 1))

    heads = states.shape[0], states.shape[1]
    return blocks_of_function(is_visible, heads, lengths, block, states.device)


def _mark_listed(counts: Tensor, indices: Tensor, size: Size) -> Tensor:
    """Return 1 for the blocks [B, H, rows, columns] that ``indices`` list, 0 for others; int32."""
    rows, columns = size
    counts, indices = counts[:, :, :rows], indices[:, :, :rows].long()
    in_list = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    states = torch.zeros(*indices.shape[:3], columns + 1, dtype=torch.int32, device=indices.device)
    outside = (indices < 0) | (indices >= columns) | ~in_list
    states.scatter_(3, indices.masked_fill(outside, columns), 1)
    return states[..., :columns].contiguous()


def _evaluate(
    mask_mod: MaskMod, states: Tensor, lengths: Size, block: Size
) -> tuple[Tensor, Tensor]:
    """Evaluate the partial blocks; return all states, and the bits of blocks that stay partial."""
    (q_len, k_len), (block_q, block_k) = lengths, block
    batch, heads, rows, _ = states.shape
    states = states.clone()
    words = -(-block_q // 32)
    bits_of_rows, partial_count = [states.new_empty(0, block_k, words)], 0
    in_block = torch.arange(block_k, device=states.device)
    for row in range(rows):
        open_blocks = states[:, :, row] == _PARTIAL  # [B, H, columns]
        (columns,) = open_blocks.any(0).any(0).nonzero(as_tuple=True)
        if not columns.numel():
            continue
        queries = torch.arange(row * block_q, min(q_len, (row + 1) * block_q), device=states.device)
        keys = columns[:, None] * block_k + in_block  # [columns, block_k], the last ones outside
        exists = keys < k_len
        index = keys.clamp(max=k_len - 1).flatten()
        visible = _call_pairs(mask_mod, batch, heads, queries, index)
        visible = visible.unflatten(3, keys.shape).transpose(2, 3)  # [B, H, columns, Lq, block_k]
        fully_visible = (visible | ~exists[:, None]).flatten(3).all(3)
        visible = visible & exists[:, None]
        partly_visible = visible.flatten(3).any(3) & ~fully_visible & open_blocks[:, :, columns]
        count = int(partly_visible.sum())
        state = torch.where(fully_visible, _ALL, _NONE)
        state[partly_visible] = (
            torch.arange(partial_count, partial_count + count, device=states.device) + _PARTIAL
        )
        new_states = torch.where(open_blocks[:, :, columns], state, states[:, :, row, columns])
        states[:, :, row, columns] = new_states.to(torch.int32)
        bits_of_rows.append(words_of_pairs(visible[partly_visible], words))
        partial_count += count
    return states, torch.cat(bits_of_rows)


def words_of_pairs(pairs: Tensor, words: int) -> Tensor:
    """Pack pairs [n, queries, keys] into the bits of int32 [n, keys, words]."""
    pairs = torch.nn.functional.pad(pairs.mT, (0, 32 * words - pairs.shape[1]))
    powers = 1 << torch.arange(32, device=pairs.device)
    values = (pairs.unflatten(2, (words, 32)) * powers).sum(3)  # below 2^32
    return torch.where(values >= 2**31, values - 2**32, values).to(torch.int32)


def _call_pairs(mask_mod: MaskMod, batch: int, heads: int, queries: Tensor, keys: Tensor) -> Tensor:
    """Evaluate mask_mod for all combinations, [B, H, queries, keys]."""

    def call_checked(*index: Tensor) -> Tensor:
        """Call mask_mod; raise errors that name it and its result."""
        try:
            visible = mask_mod(*index)
        except Exception as error:
            raise RuntimeError(_call_error_text(error)) from error
        if not isinstance(visible, Tensor) or visible.dtype is not torch.bool or visible.dim():
            got = (
                f"{list(visible.shape)} {visible.dtype}"
                if isinstance(visible, Tensor)
                else repr(visible)
            )
            raise TypeError(f"mask_mod must return a boolean tensor without dimensions, got {got}")
        return visible

    function: Any = call_checked
    for dim in (3, 2, 1, 0):
        function = torch.vmap(function, tuple(0 if n == dim else None for n in range(4)))
    indices = (torch.arange(n, device=queries.device) for n in (batch, heads))
    with _IndexWithTensors():
        visible: Tensor = function(*indices, queries, keys)
    return visible


class _IndexWithTensors(TorchFunctionMode):
    """A mode in which ``x[i]`` gathers even if ``i`` is a tensor without dimensions.

    PyTorch up to 2.8 reads the value of such an index, which ``torch.vmap`` refuses; yet functions
    of indices begin with it, as in ``document[q] == document[k]``.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__:
            x, index = args
            indices = index if isinstance(index, tuple) else (index,)
            is_tensor = [_is_integer_tensor(i) for i in indices]
            if any(is_tensor) and all(
                t or type(i) is int for t, i in zip(is_tensor, indices, strict=True)
            ):
                index_tensors = [
                    torch.tensor(i, device=x.device) if type(i) is int else i for i in indices
                ]
                return torch.ops.aten.index.Tensor(x, index_tensors)
        return func(*args, **(kwargs or {}))


def _is_integer_tensor(i: Any) -> bool:
    """Whether i is a tensor of integers."""
    return isinstance(i, Tensor) and i.dtype in (torch.int64, torch.int32)


# Parts of torch.vmap's messages for functions that read a value.
_READS_VALUES = (
    "data-dependent",
    ".item()",
    "dynamic shape",
    "differently shaped",
    "Cannot access data pointer",
)


def _call_error_text(error: Exception) -> str:
    """Return the error text for a function that ``torch.vmap`` cannot evaluate."""
    if isinstance(error, RuntimeError) and any(part in str(error) for part in _READS_VALUES):
        return (
            "mask_mod must not depend on values in its control flow (if, while, int()) or shapes "
            "(x[x > 0]): it is evaluated for many pairs at once; use &, |, ~ or torch.where"
        )
    return f"mask_mod raised {type(error).__name__}: {error}"
