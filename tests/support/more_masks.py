"""Kinds of masks that the complete tables of attention add to ``fastattn.testing``.

Importing it adds them to ``inputs.MASKS`` and ``inputs.PROGRAMS``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from fastattn import masks
from fastattn.testing.cases import Case
from fastattn.testing.inputs import MASKS, PROGRAMS, added, checkered, of_documents, of_function


def _blocks(shape: tuple[int, ...], draw: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Blocks of 64 x 64, a third of them kept."""
    coarse = (*shape[:2], shape[2] // 64 + 1, shape[3] // 64 + 1)
    kept = torch.rand(coarse, generator=draw) < 0.33
    fine = kept.repeat_interleave(64, 2).repeat_interleave(64, 3)
    return fine[:, :, : shape[2], : shape[3]].clone()


def _tril(shape: tuple[int, ...], draw: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.ones(shape, dtype=torch.bool).tril(3)


MASKS |= {"blocks": _blocks, "blocks_inf": added(_blocks)}
MASKS |= {"tril": _tril, "tril_inf": added(_tril)}


def _striped(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Whole, empty and partial blocks of 40 queries and 24 keys."""
    return ((q // 40 + k // 48) % 2 == 0) | ((q + h) % 7 == k % 7) & (k < 90)


def _alternating(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Whole and empty blocks, different in each head."""
    return (q // 150 + k // 128 + h) % 2 == 0


def _block_mask(case: Case, draw: torch.Generator) -> masks.Mask:
    """A BlockMask whose block size is no multiple of a vector."""
    heads = case.heads if case.heads > 1 else None
    return masks.from_block_mask(
        create_block_mask(_striped, None, heads, case.q_len, case.k_len, device="cpu",
                          BLOCK_SIZE=(40, 24))
    )  # fmt: skip


PROGRAMS |= {
    "causal": lambda case, draw: masks.causal(),
    "not_causal": lambda case, draw: ~masks.causal(),
    "window": lambda case, draw: masks.sliding_window(20, 5),
    "not_documents": lambda case, draw: ~of_documents(case, draw, returns=True),
    "gap": lambda case, draw: masks.sliding_window(5, 0) | ~masks.sliding_window(20, -1),
    "not_function": lambda case, draw: ~of_function(case, draw, checkered) & masks.causal(),
    "block_mask": _block_mask,
    "heads": lambda case, draw: of_function(case, draw, _alternating),
    "nothing": lambda case, draw: masks.causal() & ~masks.causal(),
}
