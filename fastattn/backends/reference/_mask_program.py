"""The definition of a mask program, see ``fastattn/backends/_mask_program.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.backends._mask_program import FIELDS, PADDING, Kind


def visible_by_program(
    program: Tensor, batch: int, q_len: int, k_len: int, packed_keys: Tensor | None = None
) -> Tensor:
    """Return which pairs a program makes visible, [B|1, Hq|1, Lq, Lk].

    ``packed_keys`` [Lk] are the indices of packed keys within their sequences; pairs of different
    sequences then have no meaning. The steps of a program are read as Python numbers, so only the
    data of a program can be traced.
    """
    count = int(program[0])
    # One by one: `tolist` fails in a backward pass, within `torch.func.vjp`, of PyTorch 2.6 to 2.8.
    steps = [[int(n) for n in step] for step in program[1 : 1 + FIELDS * count].view(count, FIELDS)]
    unread = program[1 + FIELDS * count :]
    extra_blocks = 0 if packed_keys is None else 1
    padded_q, padded_k = ((-(-n // PADDING) + extra_blocks) * PADDING for n in (q_len, k_len))
    keys = torch.arange(k_len, device=program.device) if packed_keys is None else packed_keys
    stack: list[Tensor] = []
    for kind, negated, leaf_batch, leaf_heads, block_q, block_k, partial in steps:
        if kind in (Kind.ALL_OF, Kind.ANY_OF):
            b, a = stack.pop(), stack.pop()
            stack.append(a & b if kind == Kind.ALL_OF else a | b)
            continue
        if kind == Kind.INTERVAL:
            data, unread = _take(unread, leaf_batch, 2, padded_q)
            low, high = data[:, :, :q_len, None].unbind(1)
            visible = ((low <= keys) & (keys < high))[:, None]
        elif kind == Kind.IDS:
            data, unread = _take(unread, leaf_batch, padded_q + padded_k)
            query_ids, key_ids = data[:, :q_len], data[:, padded_q : padded_q + k_len]
            visible = (query_ids[:, :, None] == key_ids[:, None, :])[:, None]
        else:
            states, unread = _take(
                unread, leaf_batch, leaf_heads, -(-q_len // block_q), -(-k_len // block_k)
            )
            words, unread = _take(unread, partial, block_k, -(-block_q // 32))
            visible = _pairs_of_blocks(states, words, block_q)[..., :q_len, :k_len]
        stack.append(~visible if negated else visible)
    (visible,) = stack
    if visible.shape[0] in (1, batch):
        return visible
    return visible.repeat(batch // visible.shape[0], 1, 1, 1)


def _pairs_of_blocks(states: Tensor, words: Tensor, block_q: int) -> Tensor:
    """Expand states [B, H, M, N] and bits [n, block_k, words] to [B, H, M block_q, N block_k]."""
    bits = words[..., None] >> torch.arange(32, device=words.device) & 1  # [n, block_k, words, 32]
    partial = bits.flatten(2)[:, :, :block_q].mT.bool()
    empty_and_full = torch.zeros(2, *partial.shape[1:], dtype=torch.bool, device=words.device)
    empty_and_full[1] = True
    tiles = torch.cat([empty_and_full, partial])[states.long()]  # [B, H, M, N, block_q, block_k]
    return tiles.transpose(3, 4).flatten(4, 5).flatten(2, 3)


def _take(data: Tensor, *shape: int) -> tuple[Tensor, Tensor]:
    """Return the first elements of ``data`` in this shape, and the other elements."""
    size = torch.Size(shape).numel()
    return data[:size].view(shape), data[size:]
