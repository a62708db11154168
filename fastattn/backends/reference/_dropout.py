"""Which pairs dropout keeps: Philox4x32-10 (Salmon et al. 2011).

https://doi.org/10.1145/2063384.2063405
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 0xFFFFFFFF  # the low 32 bits of an int64


def keep_threshold(dropout_p: float) -> int:
    """T: a pair is kept iff its 16-bit draw is less than T."""
    return round((1.0 - dropout_p) * 65536)


def kept_scale(dropout_p: float) -> float:
    """The factor of the kept weights, 65536 / T; 0 if nothing is kept."""
    threshold = keep_threshold(dropout_p)
    return 65536 / threshold if threshold else 0.0


def dropout_keep(
    shape: tuple[int, int, int, int],
    dropout_p: float,
    seed: Tensor,
    first: tuple[int, int, int] = (0, 0, 0),
) -> Tensor:
    """Return which pairs dropout keeps, bool [B, Hq, Lq, Lk].

    The pair (i, j) of query head h in batch b takes the 16-bit draw j % 8 of the Philox4x32-10
    block with counter (i, j // 8, h, b) and key (low, high word of the seed). It is kept iff
    draw < T = round((1 - dropout_p) * 65536), a half rounded to even. The four words of a block
    give its eight draws, the low half of each word first. ``first`` is the smallest i, j and h.
    """
    batch, heads, q_len, k_len = shape
    first_i, first_j, first_h = first
    skipped = first_j % 8  # draws of the first block
    blocks = (skipped + k_len + 7) // 8
    sizes = ((first_i, q_len), (first_j // 8, blocks), (first_h, heads), (0, batch))
    views = ((-1, 1), (-1,), (-1, 1, 1), (-1, 1, 1, 1))
    i, j8, h, b = (
        (torch.arange(n, device=seed.device) + start).view(v)
        for (start, n), v in zip(sizes, views, strict=True)
    )
    words = philox4x32((i, j8, h, b), (seed & WORD, (seed >> 32) & WORD))
    draws = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], dim=-1)
    draws = draws.expand(batch, heads, q_len, blocks, 8).flatten(-2)
    draws = draws[..., skipped : skipped + k_len]
    return draws < keep_threshold(dropout_p)


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor], rounds: int = 10
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four words of Philox4x32 for every broadcast (counter, key): uint32 in int64.

    A round is (c0, c1, c2, c3) <- (hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0)),
    and between rounds a constant is added to each key word. The 64-bit products wrap around in
    int64, so all of their bits are correct.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for n in range(rounds):
        if n > 0:
            k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        hi0, lo0, hi1, lo1 = (p0 >> 32) & WORD, p0 & WORD, (p1 >> 32) & WORD, p1 & WORD
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
    return c0, c1, c2, c3
