"""The layout of a mask program, one int32 tensor that says which pairs are visible.

A program is leaves and operators in postfix order: the number of steps, seven integers for each
step, then the data of the leaves, in their order. An operator combines the two values before it.
Only leaves are negated. A leaf with fewer batch entries or heads than the call repeats.

========  ============================================  ============================================
kind      pair (i, j) is visible if                     data
========  ============================================  ============================================
INTERVAL  low[i] <= j < high[i]                         low and high, [batch, 2, Lq']
IDS       query_id[i] == key_id[j]                      [batch, Lq' + Lk']
BLOCKS    its block is 1, or 2 + n and bit (i, j) of    states [batch, heads, blocks of Lq, of Lk],
          block n is 1                                  bits [n, block_k, words of block_q]
========  ============================================  ============================================

Lq' and Lk' are padded to a multiple of ``PADDING``. Bit l of word w of a block is query 32 w + l.

A program of packed sequences has the rows of all sequences one after the other, and one batch
entry. The keys of an interval count within the sequence. There are no blocks. Lq' and Lk' are
longer by ``PADDING``, because vectors of queries begin at any row, and the last ends past it.

A program for a cache has Lk keys, its capacity, and an entry for each sequence.
``csrc/mask_program.h`` and ``fastattn/backends/triton/_mask_program.py`` read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from fastattn.compat import records_trace

PADDING = 64
LEAVES = 32  # the maximum number of leaves of a program
FIELDS = 7


class Kind(IntEnum):
    ALL_OF = 0
    ANY_OF = 1
    INTERVAL = 2
    IDS = 3
    BLOCKS = 4


class Leaf(NamedTuple):
    kind: Kind
    negated: bool
    data: Tensor  # int32, any shape
    batch: int = 1
    heads: int = 1
    block_q: int = 0
    block_k: int = 0
    partial: int = 0  # the number of blocks with bits


def padded(x: Tensor) -> Tensor:
    """[..., L] with zeros up to a multiple of ``PADDING``."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % PADDING))


def encode(steps: Sequence[Kind | Leaf], device: torch.device) -> Tensor:
    """Return the program [size] int32 of these steps: a leaf, or the kind of an operator."""
    header = [len(steps)]
    for step in steps:
        if isinstance(step, Leaf):
            header += [int(step.kind), int(step.negated), step.batch, step.heads]
            header += [step.block_q, step.block_k, step.partial]
        else:
            header += [int(step), *[0] * (FIELDS - 1)]
    data = [step.data.flatten() for step in steps if isinstance(step, Leaf)]
    if records_trace():  # sizes are tensors, which torch.tensor() would keep as constants
        numbers = torch.stack([torch.as_tensor(n, dtype=torch.int32) for n in header]).to(device)
    else:
        numbers = torch.tensor(header, dtype=torch.int32, device=device)
    return torch.cat([numbers, *data])
