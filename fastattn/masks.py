"""Masks of attention that are not stored pair by pair, for ``mask=`` of attention.

    from fastattn import masks, scaled_dot_product_attention

    mask = masks.causal() & masks.document(ids)
    scaled_dot_product_attention(query, key, value, mask=mask)

Masks combine by ``&``, ``|`` and ``~``. Causal masks, windows, prefixes, documents and chunks take
memory in proportion to the lengths; :func:`from_function`, and a ``BlockMask`` of
``torch.nn.attention.flex_attention``, one bit for each pair of a block that is only partly visible.
A kernel skips blocks of pairs that are not visible, and pays nothing for those that are.

A position is the one that ``causal_alignment`` of the call gives to a query: query i is at position
i + offset of the keys, where offset is 0, or Lk - Lq for "bottom_right".

What a kernel reads is built at the first call with given lengths and is kept by the mask, so build
a mask once for all layers.
"""

from __future__ import annotations

import abc
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.backends._mask_program import LEAVES, Kind, Leaf, encode, padded
from fastattn.checks import not_dense, wrong_type
from fastattn.eager import nothing_watches, runs_eagerly

__all__ = [
    "Mask",
    "causal",
    "chunked",
    "document",
    "from_block_mask",
    "from_function",
    "prefix_lm",
    "sliding_window",
]

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_KEPT = 8  # programs that a mask keeps, of different lengths
_lock = threading.Lock()  # of what masks keep


class _Call(NamedTuple):
    """What a mask needs to know of a call."""

    op: str
    batch: int
    heads: int
    q_len: int
    k_len: int
    offset: int
    device: torch.device


class Mask(abc.ABC):
    """Which queries can see which keys; made by the functions of this module."""

    leaves = 1

    def __init__(self) -> None:
        self._programs: dict[tuple[Any, ...], Tensor] = {}

    def __and__(self, other: Any) -> Mask:
        return _combined(Kind.ALL_OF, self, other)

    def __or__(self, other: Any) -> Mask:
        return _combined(Kind.ANY_OF, self, other)

    # A BlockMask on the left.
    __rand__ = __and__
    __ror__ = __or__

    def __bool__(self) -> bool:  # `and`, `or` and `not` would silently drop a mask
        raise TypeError("a mask has no truth value: combine masks by &, | and ~")

    @abc.abstractmethod
    def __invert__(self) -> Mask: ...

    @abc.abstractmethod
    def __repr__(self) -> str: ...

    @abc.abstractmethod
    def _check(self, call: _Call) -> None:
        """Raise an error if the mask does not fit the call."""

    @abc.abstractmethod
    def _steps(self, call: _Call) -> list[Kind | Leaf]: ...

    def _program(self, call: _Call) -> Tensor:
        self._check(call)
        if not nothing_watches():  # a traced tensor must not stay
            return encode(self._steps(call), call.device)
        key = (call.q_len, call.k_len, call.offset, call.device)
        with _lock:
            kept = self._programs.pop(key, None)
            if kept is not None:
                self._programs[key] = kept  # the last used is the last to go
        if kept is None:
            with torch.inference_mode(False):  # autograd must be able to save it
                kept = encode(self._steps(call), call.device)
            with _lock:
                self._programs[key] = kept
                while len(self._programs) > _KEPT:
                    del self._programs[next(iter(self._programs))]
        return kept


def program(op: str, mask: Any, query: Tensor, k_len: int, offset: int) -> Tensor:
    """Return the program of a mask for query [B, Hq, Lq, D], for the operator ``op``."""
    batch, heads, q_len, _ = query.shape
    found = _as_mask(f"{op}: mask", mask)
    if found is None:
        raise wrong_type(op, "mask", mask, "Mask or BlockMask (attn_mask takes tensors)")
    return found._program(_Call(op, batch, heads, q_len, k_len, offset, query.device))


# --- combinations --------------------------------------------------------------------------------


class _Combined(Mask):
    def __init__(self, kind: Kind, left: Mask, right: Mask) -> None:
        super().__init__()
        self.kind, self.left, self.right = kind, left, right
        self.leaves = left.leaves + right.leaves
        if self.leaves > LEAVES:
            raise ValueError(f"a mask can combine at most {LEAVES} others, got {self.leaves}")

    def __invert__(self) -> Mask:  # De Morgan: kernels negate leaves only
        other = Kind.ANY_OF if self.kind is Kind.ALL_OF else Kind.ALL_OF
        return _Combined(other, ~self.left, ~self.right)

    def __repr__(self) -> str:
        return f"({self.left!r} {'&' if self.kind is Kind.ALL_OF else '|'} {self.right!r})"

    def _check(self, call: _Call) -> None:
        self.left._check(call)
        self.right._check(call)

    def _steps(self, call: _Call) -> list[Kind | Leaf]:
        return [*self.left._steps(call), *self.right._steps(call), self.kind]


def _combined(kind: Kind, left: Mask, right: Any) -> Any:
    other = _as_mask("mask", right)
    return NotImplemented if other is None else _Combined(kind, left, other)


def _as_mask(where: str, mask: Any) -> Mask | None:
    if isinstance(mask, Mask):
        return mask
    # Compares the class's name, because importing its module takes seconds.
    if type(mask).__name__ != "BlockMask":
        return None
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"{where}: a BlockMask cannot be converted by compiled code; call "
            "fastattn.masks.from_block_mask before it"
        )
    if mask not in _block_masks:
        _block_masks[mask] = from_block_mask(mask)
    return _block_masks[mask]


_block_masks: weakref.WeakKeyDictionary[Any, Mask] = weakref.WeakKeyDictionary()


class _Leaf(Mask):
    """A mask without operators; ``negated`` if it is the other pairs."""

    def __init__(self, name: str, negated: bool) -> None:
        super().__init__()
        self.name, self.negated = name, negated

    def __invert__(self) -> Mask:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, negated=not self.negated, _programs={})
        return other

    def __repr__(self) -> str:
        return f"{'~' if self.negated else ''}{self.name}"


def _check_rows(call: _Call, what: str, rows: int) -> None:
    if rows != 1 and rows != call.batch:
        raise RuntimeError(
            f"{call.op}: mask: {what} must be of batch size 1 or {call.batch}, got {rows}"
        )


def _check_device(call: _Call, what: str, x: Tensor) -> None:
    if x.device != call.device:
        raise RuntimeError(
            f"{call.op}: mask: {what} must be on query's device {call.device}, got {x.device}"
        )


# --- intervals of keys ---------------------------------------------------------------------------


class _Interval(_Leaf):
    """The keys from low[i] to high[i] are visible to query i."""

    def __init__(
        self,
        name: str,
        bounds: Callable[[Tensor, int], tuple[Tensor, Tensor]],
        lengths: Tensor | None = None,
    ) -> None:
        super().__init__(name, False)
        self.bounds, self.lengths = bounds, lengths

    def _check(self, call: _Call) -> None:
        if self.lengths is not None:
            _check_rows(call, "lengths", self.lengths.shape[0])
            _check_device(call, "lengths", self.lengths)

    def _steps(self, call: _Call) -> list[Kind | Leaf]:
        position = torch.arange(call.q_len, device=call.device) + call.offset
        ends = torch.broadcast_tensors(*self.bounds(position, call.k_len))  # [B|1, Lq], or [Lq]
        data = torch.stack(ends, -2).clamp(0, call.k_len).to(torch.int32)
        rows = 1 if self.lengths is None else self.lengths.shape[0]
        return [Leaf(Kind.INTERVAL, self.negated, padded(data), rows)]


def causal() -> Mask:
    """Keys up to the query's own position.

    >>> import torch
    >>> from fastattn import masks, scaled_dot_product_attention
    >>> x = torch.eye(3)[None, None]
    >>> scaled_dot_product_attention(x, x, x, scale=0.0, mask=masks.causal())[0, 0]
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    """
    return _Interval("causal()", _bounds_of_causal)


def _bounds_of_causal(at: Tensor, k_len: int) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(at), at + 1


def sliding_window(left: int, right: int) -> Mask:
    """Keys at most ``left`` places before and ``right`` places after the query; -1: all.

    >>> from fastattn import masks
    >>> masks.causal() & masks.sliding_window(128, 0)
    (causal() & sliding_window(128, 0))
    """
    for name, size in (("left", left), ("right", right)):
        _check_int("sliding_window", name, size, -1)

    bounds = functools.partial(_bounds_of_window, left, right)
    return _Interval(f"sliding_window({left}, {right})", bounds)


def _bounds_of_window(left: int, right: int, at: Tensor, k_len: int) -> tuple[Tensor, Tensor]:
    low = at - left if left >= 0 else torch.zeros_like(at)
    return low, at + right + 1 if right >= 0 else torch.full_like(at, k_len)


def chunked(size: int) -> Mask:
    """Keys in the query's own chunk of ``size`` positions; usually ``chunked(n) & causal()``."""
    _check_int("chunked", "size", size, 1)

    return _Interval(f"chunked({size})", functools.partial(_bounds_of_chunks, size))


def _bounds_of_chunks(size: int, at: Tensor, k_len: int) -> tuple[Tensor, Tensor]:
    low = at.div(size, rounding_mode="floor") * size
    return low, low + size


def prefix_lm(lengths: int | Tensor) -> Mask:
    """Keys of the prefix, the first ``lengths`` keys, and those up to the query's own position.

    ``lengths`` is one number for all sequences, or a tensor [B] of int32 or int64.
    (https://arxiv.org/abs/1910.10683)
    """
    if not isinstance(lengths, Tensor):
        _check_int("prefix_lm", "lengths", lengths, 0)
        bounds = functools.partial(_bounds_of_prefix, lengths)
        return _Interval(f"prefix_lm({lengths})", bounds)
    own = _integers("prefix_lm", "lengths", lengths, "[B]", (1,))
    bounds = functools.partial(_bounds_of_prefix, own[:, None])
    return _Interval(f"prefix_lm(<lengths {list(own.shape)}>)", bounds, own)


def _bounds_of_prefix(lengths: int | Tensor, at: Tensor, k_len: int) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(at), (at + 1).clamp(min=lengths)


# --- documents -----------------------------------------------------------------------------------


class _Documents(_Leaf):
    """Equal numbers of a query and a key."""

    def __init__(self, query_ids: Tensor, key_ids: Tensor, name: str) -> None:
        super().__init__(name, False)
        self.query_ids, self.key_ids = query_ids, key_ids  # [B|1, Lq], [B|1, Lk] int32

    def _check(self, call: _Call) -> None:
        pairs = (("ids of the queries", self.query_ids, call.q_len),
                 ("ids of the keys", self.key_ids, call.k_len))  # fmt: skip
        for what, ids, length in pairs:
            if ids.shape[1] != length:
                raise RuntimeError(
                    f"{call.op}: mask: the {what} must have length {length}, got {ids.shape[1]}"
                )
            _check_rows(call, f"the {what}", ids.shape[0])
            _check_device(call, f"the {what}", ids)

    def _steps(self, call: _Call) -> list[Kind | Leaf]:
        queries, keys = padded(self.query_ids), padded(self.key_ids)
        rows = queries.shape[0] if keys.shape[0] == 1 else keys.shape[0]
        data = torch.cat([queries.expand(rows, -1), keys.expand(rows, -1)], 1)
        return [Leaf(Kind.IDS, self.negated, data, rows)]


def document(ids: Tensor, key_ids: Tensor | None = None) -> Mask:
    """Keys with the number of the query: packed documents, segments, groups.

    ``ids`` [L] or [B, L], int32 or int64, are the numbers of queries and keys, or of the queries
    alone if there are ``key_ids`` [Lk] or [B, Lk]. They need not be sorted, but blocks are skipped
    only where they are nearly so. They must fit int32, which is checked in eager execution only.

    >>> import torch
    >>> from fastattn import masks, scaled_dot_product_attention
    >>> x = torch.eye(4)[None, None]
    >>> mask = masks.document(torch.tensor([0, 0, 1, 1])) & masks.causal()
    >>> scaled_dot_product_attention(x, x, x, scale=0.0, mask=mask)[0, 0]
    tensor([[1.0000, 0.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000, 0.0000],
            [0.0000, 0.0000, 1.0000, 0.0000],
            [0.0000, 0.0000, 0.5000, 0.5000]])
    """
    of_queries = _documents("ids", ids)
    of_keys = of_queries if key_ids is None else _documents("key_ids", key_ids)
    return _Documents(of_queries, of_keys, f"document(<ids {list(ids.shape)}>)")


def _documents(name: str, ids: Any) -> Tensor:
    own = _integers("document", name, ids, "[L] or [B, L]", (1, 2))
    return own if own.dim() == 2 else own[None]


# --- blocks --------------------------------------------------------------------------------------


class _Blocks(_Leaf):
    """The state of each block, and the bits of those that are partly visible."""

    def __init__(
        self,
        name: str,
        lengths: tuple[int, int],
        block: tuple[int, int],
        states: Tensor,
        bits: Tensor,
    ) -> None:
        super().__init__(name, False)
        self.lengths, self.block = lengths, block
        self.states, self.bits = states, bits  # as in Kind.BLOCKS

    def _check(self, call: _Call) -> None:
        if self.lengths != (call.q_len, call.k_len):
            raise RuntimeError(
                f"{call.op}: mask must be of {call.q_len} queries and {call.k_len} keys, "
                f"got {self.lengths[0]} and {self.lengths[1]}"
            )
        rows, heads = self.states.shape[:2]
        _check_rows(call, "blocks", rows)
        if heads != 1 and heads != call.heads:
            raise RuntimeError(f"{call.op}: mask must have 1 or {call.heads} heads, got {heads}")
        _check_device(call, "blocks", self.states)

    def _steps(self, call: _Call) -> list[Kind | Leaf]:
        rows, heads = self.states.shape[:2]
        data = torch.cat([self.states.flatten(), self.bits.flatten()])
        partial = self.bits.shape[0]
        return [Leaf(Kind.BLOCKS, self.negated, data, rows, heads, *self.block, partial)]


_NONE, _ALL, _PARTIAL = 0, 1, 2  # states of a block


def from_function(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Lq: int,
    Lk: int,
    *,
    device: torch.device | str = "cpu",
) -> Mask:
    """The pairs for which ``mask_mod(b, h, q_idx, kv_idx)`` is True, as in ``create_block_mask``.

    The function gets four integer tensors without dimensions and returns a boolean one. It is
    evaluated once for each pair, here, by ``torch.vmap`` over 128 queries at a time, so it must not
    branch on values. B and H are None (or 1) for a mask that does not depend on the batch or head.

    >>> from fastattn import masks
    >>> masks.from_function(lambda b, h, q, k: (q - k) % 3 == 0, None, None, 256, 256)
    from_function(<lambda>, 256 x 256)
    """
    batch, heads = (1 if n is None else n for n in (B, H))
    for size_of, size, least in (("B", batch, 1), ("H", heads, 1), ("Lq", Lq, 0), ("Lk", Lk, 0)):
        _check_int("from_function", size_of, size, least)
    if not callable(mask_mod):
        raise wrong_type("from_function", "mask_mod", mask_mod, "a function")
    block = (128, 128)
    shape = (batch, heads, -(-Lq // 128), -(-Lk // 128))
    states = torch.full(shape, _PARTIAL, dtype=torch.int32, device=device)
    name = f"from_function({getattr(mask_mod, '__name__', mask_mod)}, {Lq} x {Lk})"
    return _Blocks(name, (Lq, Lk), block, *_evaluated(mask_mod, states, (Lq, Lk), block))


def from_block_mask(block_mask: Any) -> Mask:
    """The mask of a ``BlockMask`` of ``torch.nn.attention.flex_attention``.

    Attention takes these objects directly. This function is for compiled code, which cannot convert
    them: call it before. Only the pairs of partial blocks are evaluated.
    """
    if type(block_mask).__name__ != "BlockMask":
        raise wrong_type("from_block_mask", "block_mask", block_mask, "BlockMask")
    if block_mask.mask_mod is None:
        raise ValueError("from_block_mask: block_mask must have a mask_mod, got None")
    q_len, k_len = block_mask.seq_lengths
    block_q, block_k = block_mask.BLOCK_SIZE
    size = -(-q_len // block_q), -(-k_len // block_k)
    states = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, size) * _PARTIAL
    if block_mask.full_kv_num_blocks is not None:
        full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, size)
        states = torch.where(full == 1, _ALL, states)
    lengths, block = (q_len, k_len), (block_q, block_k)
    name = f"BlockMask({q_len} x {k_len})"
    return _Blocks(name, lengths, block, *_evaluated(block_mask.mask_mod, states, lengths, block))


def _listed(counts: Tensor, indices: Tensor, size: tuple[int, int]) -> Tensor:
    """1 for the blocks [B, H, rows, columns] whose columns a row lists, 0 for others; int32."""
    rows, columns = size
    counts, indices = counts[:, :, :rows], indices[:, :, :rows].long()
    given = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    found = torch.zeros(*indices.shape[:3], columns + 1, dtype=torch.int32, device=indices.device)
    outside = (indices < 0) | (indices >= columns) | ~given
    found.scatter_(3, indices.masked_fill(outside, columns), 1)
    return found[..., :columns].contiguous()


def _evaluated(
    mask_mod: MaskMod, states: Tensor, lengths: tuple[int, int], block: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return the final states, and the bits of the blocks that the function leaves partial."""
    (q_len, k_len), (block_q, block_k) = lengths, block
    batch, heads, rows, _ = states.shape
    states = states.clone()
    words = -(-block_q // 32)
    found, kept = [states.new_empty(0, block_k, words)], 0
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
        seen = _called(mask_mod, batch, heads, queries, index)
        seen = seen.unflatten(3, keys.shape).transpose(2, 3)  # [B, H, columns, Lq, block_k]
        every = (seen | ~exists[:, None]).flatten(3).all(3)
        seen = seen & exists[:, None]
        some = seen.flatten(3).any(3) & ~every & open_blocks[:, :, columns]
        count = int(some.sum())
        state = torch.where(every, _ALL, _NONE)
        state[some] = torch.arange(kept, kept + count, device=states.device) + _PARTIAL
        decided = torch.where(open_blocks[:, :, columns], state, states[:, :, row, columns])
        states[:, :, row, columns] = decided.to(torch.int32)
        found.append(_words(seen[some], words))
        kept += count
    return states, torch.cat(found)


def _words(pairs: Tensor, words: int) -> Tensor:
    """Pairs [n, queries, keys] as the bits [n, keys, words] of int32."""
    pairs = torch.nn.functional.pad(pairs.mT, (0, 32 * words - pairs.shape[1]))
    powers = 1 << torch.arange(32, device=pairs.device)
    values = (pairs.unflatten(2, (words, 32)) * powers).sum(3)  # below 2^32
    return torch.where(values >= 2**31, values - 2**32, values).to(torch.int32)


def _called(mask_mod: MaskMod, batch: int, heads: int, queries: Tensor, keys: Tensor) -> Tensor:
    """mask_mod of all combinations, [B, H, queries, keys]."""

    def checked(*index: Tensor) -> Tensor:
        seen = mask_mod(*index)
        if not isinstance(seen, Tensor) or seen.dtype is not torch.bool or seen.dim():
            got = f"{list(seen.shape)} {seen.dtype}" if isinstance(seen, Tensor) else repr(seen)
            raise TypeError(f"mask_mod must return a boolean tensor without dimensions, got {got}")
        return seen

    function: Any = checked
    for dim in (3, 2, 1, 0):
        function = torch.vmap(function, tuple(0 if n == dim else None for n in range(4)))
    indices = (torch.arange(n, device=queries.device) for n in (batch, heads))
    try:
        seen: Tensor = function(*indices, queries, keys)
    except RuntimeError as error:
        if "data-dependent" not in str(error) and ".item()" not in str(error):
            raise
        raise RuntimeError(
            "mask_mod must not depend on values in its control flow (if, while, int()): it is "
            "evaluated for many pairs at once; use &, |, ~ or torch.where"
        ) from error
    return seen


# --- checks --------------------------------------------------------------------------------------


def _check_int(function: str, name: str, value: Any, least: int) -> None:
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        raise wrong_type(function, name, value, "int")
    if value < least:
        raise ValueError(f"{function}: {name} must be at least {least}, got {value}")
    if isinstance(value, int) and value >= 2**31:
        raise ValueError(f"{function}: {name} must be below 2**31, got {value}")


def _integers(function: str, name: str, x: Any, shape: str, dims: Sequence[int]) -> Tensor:
    """A copy, as int32, so that later changes of ``x`` do not count for some calls only."""
    if not isinstance(x, Tensor):
        raise wrong_type(function, name, x, "Tensor")
    if x.is_nested or x.layout is not torch.strided:
        raise not_dense(function, name, x)
    if x.dim() not in dims:
        raise ValueError(f"{function}: {name} must be {shape}, got shape {tuple(x.shape)}")
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{function}: {name} must be int32 or int64, got {x.dtype}")
    if x.dtype is torch.int64 and x.numel() and runs_eagerly(x):
        least, most = (int(n) for n in x.aminmax())
        if least < -(2**31) or most >= 2**31:
            raise ValueError(f"{function}: {name} must fit int32, got {least} to {most}")
    return x.to(torch.int32, copy=True)
