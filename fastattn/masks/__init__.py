"""Masks of attention that are not stored pair by pair, for ``mask=`` of attention.

::

    from fastattn import masks, scaled_dot_product_attention

    mask = masks.causal() & masks.document(ids)
    scaled_dot_product_attention(query, key, value, mask=mask)

Masks combine by ``&``, ``|`` and ``~``. Causal masks, windows, prefixes, documents and chunks take
memory in proportion to the lengths; :func:`from_function`, and a ``BlockMask`` of
``torch.nn.attention.flex_attention``, one bit for each pair of a block that is only partly visible.
A kernel skips blocks without a visible pair, and pays nothing for fully visible blocks.

``causal_alignment`` of the call decides the positions of queries: query i is at position i + offset
of the keys, where offset is 0, or Lk - Lq for "bottom_right". For packed sequences and caches,
positions count within each sequence, and masks of blocks are not supported. :func:`draft_tree` is
for caches only.

The mask builds and caches its program for a kernel at the first call with given lengths, so build a
mask once for all layers. A ``BlockMask`` is converted again if it has changed since the last call;
:func:`from_block_mask` converts once. On a GPU, where reading the lengths of packed sequences and
caches would synchronize, each of their calls builds the program.
"""

from fastattn.masks._blocks import MaskMod as MaskMod
from fastattn.masks._calls import PartCall as PartCall
from fastattn.masks._calls import keys_before as keys_before
from fastattn.masks._draft_tree import draft_tree
from fastattn.masks._mask import Mask, from_block_mask, from_function
from fastattn.masks._mask import cache_mask as cache_mask
from fastattn.masks._mask import cache_program as cache_program
from fastattn.masks._mask import check_whole as check_whole
from fastattn.masks._mask import dense_mask as dense_mask
from fastattn.masks._mask import mask_of_listed_blocks as mask_of_listed_blocks
from fastattn.masks._mask import packed_program as packed_program
from fastattn.masks._mask import part_is_visible as part_is_visible
from fastattn.masks._mask import part_of_cache_program as part_of_cache_program
from fastattn.masks._mask import part_program as part_program
from fastattn.masks._mask import program as program
from fastattn.masks._observed import values_of as values_of
from fastattn.masks._positions import causal, chunked, document, prefix_lm, sliding_window

__all__ = [
    "Mask",
    "causal",
    "chunked",
    "document",
    "draft_tree",
    "from_block_mask",
    "from_function",
    "prefix_lm",
    "sliding_window",
]
