"""Masks of draft trees: some of the new tokens of a cache do not see each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.backends._mask_program import Kind, Leaf
from fastattn.checks import check_strided
from fastattn.compat import runs_eagerly
from fastattn.masks._blocks import words_of_pairs
from fastattn.masks._calls import CacheCall, Call, check_device, check_rows, fix_sizes
from fastattn.masks._mask import LeafMask, Mask

_BLOCK = 64  # keys per block, as decoding on vectors tests them at once


class _DraftTree(LeafMask):
    """Shows the keys before the new tokens, and the new tokens that ``visible`` selects.

    The blocks of the new tokens have bits. Blocks before are visible, blocks after are not.
    """

    def __init__(self, visible: Tensor, name: str) -> None:
        super().__init__(name, False)
        self.visible = visible  # [B|1, Lq, Lq] bool

    def _check(self, call: Call) -> None:
        """Raise an error unless the tree fits the queries and the batch of a cache."""
        if type(call) is not CacheCall:
            raise RuntimeError(
                f"{call.op}: mask must not have a draft tree, which needs the cache of "
                f"decode_attention on one process, got {self!r}"
            )
        if self.visible.shape[1] != call.q_len:
            raise RuntimeError(
                f"{call.op}: mask: the draft tree must have {call.q_len} tokens, one for each "
                f"query, got {self.visible.shape[1]}"
            )
        check_rows(call, "the draft tree", self.visible.shape[0], call.rows)
        check_device(call, "the draft tree", self.visible)

    def _may_show(self, call: Call) -> bool:
        return True

    def _steps(self, call: Call) -> list[Kind | Leaf]:
        """Return blocks: visible before the tree, with bits within it, hidden after it."""
        assert isinstance(call, CacheCall)
        visible = fix_sizes(self.visible, call.q_len, call.q_len)
        q_len, rows = call.q_len, call.rows
        words = -(-max(q_len, 1) // 32)
        blocks_q, blocks_k = -(-q_len // (32 * words)), -(-call.k_len // _BLOCK)
        # The q_len new keys begin anywhere in a block, and end this many blocks later, or earlier.
        span = (q_len + _BLOCK - 2) // _BLOCK + 1
        start = (call.filled - q_len)[:, None]  # [B, 1], of the new tokens
        first_block = start.div(_BLOCK, rounding_mode="floor")  # its block

        column = torch.arange(blocks_k, device=call.device) - first_block  # [B, blocks_k]
        partial_states = 2 + torch.arange(rows, device=call.device)[:, None] * span + column
        states = torch.where(column < 0, 1, torch.where(column < span, partial_states, 0))
        states = states[:, None].expand(rows, blocks_q, blocks_k).to(torch.int32)

        # The keys of the last blocks, as indices of new tokens: negative before them.
        token = first_block * _BLOCK + torch.arange(span * _BLOCK, device=call.device) - start
        in_tree = (token >= 0) & (token < q_len)  # [B, span * _BLOCK]
        index = torch.where(in_tree, token, 0)[:, None].expand(rows, q_len, -1)
        pairs = visible.expand(rows, -1, -1).gather(2, index) & in_tree[:, None]
        pairs = pairs | (token < 0)[:, None]
        pairs = pairs.unflatten(2, (span, _BLOCK)).transpose(1, 2).flatten(0, 1)
        data = torch.cat([states.flatten(), words_of_pairs(pairs, words).flatten()])
        return [Leaf(Kind.BLOCKS, self.negated, data, rows, 1, 32 * words, _BLOCK, rows * span)]


def draft_tree(visible: Tensor) -> Mask:
    """Show the keys before the new tokens of a cache, and the new tokens that ``visible`` selects.

    The mask of ``decode_attention`` that verifies several drafts of the next tokens at once
    (https://arxiv.org/abs/2305.09781). Its Lq queries are the last Lq tokens of each sequence.
    ``visible`` [Lq, Lq] or [B, Lq, Lq], bool, says which of these tokens query i can see: itself
    and, in a tree, its ancestors. All earlier keys are visible.

    Tokens are in an order in which parents come first, so no token sees a later one. Both are
    checked on the CPU in eager execution. ``is_causal`` then has no further effect. Windows, ALiBi
    and relative biases count positions in the cache, not depths in the tree.

    Raises TypeError for a tensor that is not boolean, ValueError for one that is not square, a
    token that does not see itself, and one that sees a later token.

    >>> import torch
    >>> from fastattn import decode_attention, masks
    >>> tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()  # two drafts after token 0
    >>> keys = torch.zeros(1, 1, 5, 5)
    >>> values = torch.eye(5)[None, None]
    >>> query = torch.zeros(1, 1, 3, 5)
    >>> decode_attention(query, keys, values, mask=masks.draft_tree(tree))[0, 0] > 0
    tensor([[ True,  True,  True, False, False],
            [ True,  True,  True,  True, False],
            [ True,  True,  True, False,  True]])
    """
    checked = _check_and_copy(visible)
    shape = list(checked.shape)
    return _DraftTree(checked if checked.dim() == 3 else checked[None], f"draft_tree({shape})")


def _check_and_copy(visible: Any) -> Tensor:
    """Check and copy ``visible``, so that later changes cannot affect only some calls."""
    check_strided("draft_tree", "visible", visible)
    if visible.dtype != torch.bool:
        raise TypeError(f"draft_tree: visible must be bool, got {visible.dtype}")
    if visible.dim() not in (2, 3) or visible.shape[-1] != visible.shape[-2]:
        raise ValueError(
            "draft_tree: visible must be square, [Lq, Lq] or [B, Lq, Lq], got shape "
            f"{tuple(visible.shape)}"
        )
    if visible.is_cpu and runs_eagerly(visible):
        _check_order(visible)
    return visible.clone()


def _check_order(visible: Tensor) -> None:
    """Raise ValueError for a token that sees a later one, or not itself."""
    later = visible.triu(1).nonzero()
    if later.numel():
        token, other = later[0, -2:].tolist()
        raise ValueError(
            f"draft_tree: no token may see a later one, but token {token} sees token {other}; "
            "order the tokens so that parents come first"
        )
    not_self = (~visible.diagonal(dim1=-2, dim2=-1)).nonzero()
    if not_self.numel():
        raise ValueError(
            f"draft_tree: each token must see itself, but token {int(not_self[0, -1])} does not"
        )
