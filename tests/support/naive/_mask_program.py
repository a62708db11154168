"""The pairs of a mask program, by the table of ``fastattn/backends/_mask_program.py``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_ALL_OF, _ANY_OF, _INTERVAL, _IDS = range(4)


def visible_by_program(program: Tensor, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Which pairs a program makes visible, of this shape [B, Hq, Lq, Lk]."""
    words = program.numpy()
    b, h, i, j = np.indices(shape, sparse=True)
    padded_q, padded_k = (-(-n // 64) * 64 for n in shape[2:])
    at = 1 + 7 * int(words[0])
    stack: list[NDArray[np.bool_]] = []
    for n in range(int(words[0])):
        step = [int(x) for x in words[1 + 7 * n : 8 + 7 * n]]
        kind, negated, batch, heads, block_q, block_k, partial = step
        if kind in (_ALL_OF, _ANY_OF):
            combine = np.logical_and if kind == _ALL_OF else np.logical_or
            stack[-2:] = [combine(*stack[-2:])]
            continue
        if kind == _INTERVAL:
            low = at + b % batch * 2 * padded_q + i
            seen = (words[low] <= j) & (j < words[low + padded_q])
            at += batch * 2 * padded_q
        elif kind == _IDS:
            row = at + b % batch * (padded_q + padded_k)
            seen = words[row + i] == words[row + padded_q + j]
            at += batch * (padded_q + padded_k)
        else:
            rows, columns = -(-shape[2] // block_q), -(-shape[3] // block_k)
            head = b % batch * heads + h % heads
            state = words[at + (head * rows + i // block_q) * columns + j // block_k]
            at += batch * heads * rows * columns
            count = -(-block_q // 32)
            word = (np.maximum(state, 2) - 2) * block_k + j % block_k
            word = at + word * count + i % block_q // 32
            bit = words[np.minimum(word, len(words) - 1)] >> (i % block_q % 32) & 1
            seen = np.where(state < 2, state == 1, bit == 1)
            at += partial * block_k * count
        stack.append(seen != bool(negated))
    assert at == len(words), "a program of another length"
    assert len(stack) == 1, "a program with more than one value"
    return np.broadcast_to(stack[0], shape)
