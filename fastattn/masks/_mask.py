"""The base classes of masks, their combinations, and masks of blocks."""

from __future__ import annotations

import abc
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from fastattn.backends._mask_program import LEAVES, Kind, Leaf, encode
from fastattn.checks import wrong_type
from fastattn.compat import is_unintercepted, records_trace
from fastattn.masks._blocks import (
    MaskMod,
    Size,
    blocks_of_block_mask,
    blocks_of_function,
    blocks_of_part,
    listed_blocks,
)
from fastattn.masks._calls import (
    CacheCall,
    Call,
    DenseCall,
    PackedCall,
    PartCall,
    PartOfCacheCall,
    check_device,
    check_int,
    check_rows,
)
from fastattn.masks._observed import Observation, observe

_MAX_PROGRAMS = 8  # programs that a mask caches, for different lengths
_lock = threading.Lock()  # guards the caches of masks


class Mask(abc.ABC):
    """Which queries can see which keys; made by the functions of ``fastattn.masks``."""

    leaves = 1  # how many masks without operators it combines

    def __init__(self) -> None:
        self._programs: dict[tuple[Any, ...], Tensor] = {}

    def __and__(self, other: Any) -> Mask:
        return _combine(Kind.ALL_OF, self, other)

    def __or__(self, other: Any) -> Mask:
        return _combine(Kind.ANY_OF, self, other)

    # With a BlockMask on the left.
    __rand__ = __and__
    __ror__ = __or__

    def __bool__(self) -> bool:  # `and`, `or` and `not` would silently drop a mask
        raise TypeError("a mask has no truth value: combine masks by &, | and ~")

    @abc.abstractmethod
    def __invert__(self) -> Mask: ...

    @abc.abstractmethod
    def __repr__(self) -> str: ...

    @abc.abstractmethod
    def _check(self, call: Call) -> None:
        """Raise an error if the mask does not fit the call."""

    @abc.abstractmethod
    def _steps(self, call: Call) -> list[Kind | Leaf]:
        """Return the leaves and operators of the program for a call, in postfix order."""

    @abc.abstractmethod
    def _may_show(self, call: Call) -> bool:
        """False only if no pair of the call is visible."""

    def _program(self, call: Call) -> Tensor:
        """Return the program for a call, which is cached if its lengths can be read."""
        self._check(call)
        key = call.cache_key()
        if key is None or not is_unintercepted():  # a traced tensor must not be cached
            return encode(self._steps(call), call.device)
        with _lock:
            cached = self._programs.pop(key, None)
            if cached is not None:
                self._programs[key] = cached  # the last one, because the first one is evicted
        if cached is None:
            with torch.inference_mode(False):  # autograd must be able to save it
                cached = encode(self._steps(call), call.device)
            with _lock:
                self._programs[key] = cached
                while len(self._programs) > _MAX_PROGRAMS:
                    del self._programs[next(iter(self._programs))]
        return cached


def program(op: str, mask: Any, query: Tensor, k_len: int, offset: int) -> Tensor:
    """Return the program of a mask for query [B, Hq, Lq, D], for the operator ``op``."""
    batch, heads, q_len, _ = query.shape
    call = DenseCall(op, batch, batch, q_len, k_len, query.device, heads, offset)
    return dense_mask(op, mask)._program(call)


def dense_mask(op: str, mask: Any) -> Mask:
    """Check and convert the ``mask`` argument of attention without packed sequences."""
    return _check_mask(op, mask, "Mask or BlockMask (attn_mask takes tensors)")


def part_program(mask: Mask, part: PartCall) -> Tensor:
    """Return the program for a part of the larger call that a mask is for."""
    return mask._program(part)


def part_is_visible(mask: Mask, part: PartCall) -> bool:
    """False only if the mask makes no pair of the part visible."""
    return mask._may_show(part)


def check_whole(mask: Mask, part: PartCall) -> None:
    """Raise an error if the mask does not fit the larger call of a part."""
    mask._check(part)


def packed_program(
    op: str, mask: Any, query: Tensor, key: Tensor, starts: tuple[Tensor, Tensor], at_end: bool
) -> Tensor:
    """Return the program for packed query [Tq, Hq, D] and key [Tk, Hkv, D], by ``starts``.

    ``at_end``: the last query of a sequence is at its last key.
    """
    batch, lengths = starts[0].shape[0] - 1, (query.shape[0], key.shape[0])
    call = PackedCall(op, batch, 1, *lengths, query.device, *starts, at_end)
    return _check_mask(op, mask, "Mask")._program(call)


def cache_program(op: str, mask: Any, query: Tensor, capacity: int, filled: Tensor) -> Tensor:
    """Return the program for query [B, Hq, Lq, D] and the first ``filled`` [B] keys of a cache."""
    batch, _, q_len, _ = query.shape
    call = CacheCall(op, batch, batch, q_len, capacity, query.device, filled)
    return cache_mask(op, mask)._program(call)


def cache_mask(op: str, mask: Any) -> Mask:
    """Check and convert the ``mask`` argument of attention to a cache."""
    return _check_mask(op, mask, "Mask")


def part_of_cache_program(
    op: str,
    mask: Mask,
    query: Tensor,
    capacity: int,
    filled: Tensor,
    runs: tuple[tuple[int, int], ...],
    position_count: int,
) -> Tensor:
    """Return the program for a cache that has some of the positions, see PartOfCacheCall."""
    batch, _, q_len, _ = query.shape
    call = (op, batch, batch, q_len, capacity, query.device, filled, runs, position_count)
    return mask._program(PartOfCacheCall(*call))


def _check_mask(op: str, mask: Any, expected: str) -> Mask:
    """Return the ``mask`` argument as a mask, or raise an error that names ``expected`` types."""
    converted = _to_mask(f"{op}: mask", mask)
    if converted is None:
        raise wrong_type(op, "mask", mask, expected)
    return converted


# --- combinations --------------------------------------------------------------------------------


class _CombinedMask(Mask):
    def __init__(self, kind: Kind, left: Mask, right: Mask) -> None:
        super().__init__()
        self.kind, self.left, self.right = kind, left, right
        self.leaves = left.leaves + right.leaves
        if self.leaves > LEAVES:
            raise ValueError(f"a mask can combine at most {LEAVES} others, got {self.leaves}")

    def __invert__(self) -> Mask:  # De Morgan: kernels negate leaves only
        other = Kind.ANY_OF if self.kind is Kind.ALL_OF else Kind.ALL_OF
        return _CombinedMask(other, ~self.left, ~self.right)

    def __repr__(self) -> str:
        return f"({self.left!r} {'&' if self.kind is Kind.ALL_OF else '|'} {self.right!r})"

    def _check(self, call: Call) -> None:
        self.left._check(call)
        self.right._check(call)

    def _may_show(self, call: Call) -> bool:
        both = self.left._may_show(call), self.right._may_show(call)
        return all(both) if self.kind is Kind.ALL_OF else any(both)

    def _steps(self, call: Call) -> list[Kind | Leaf]:
        left, right = self.left._steps(call), self.right._steps(call)
        if self.kind is Kind.ALL_OF and _is_interval(left) and _is_interval(right):
            return [_intersect(*left, *right)]  # one leaf instead of two and an operator
        return [*left, *right, self.kind]


def _is_interval(steps: list[Kind | Leaf]) -> bool:
    first, *others = steps
    if others or not isinstance(first, Leaf):
        return False
    return first.kind == Kind.INTERVAL and not first.negated


def _intersect(a: Any, b: Any) -> Leaf:
    """Return the intersection of two leaves that are intervals of keys."""
    (low, high), (other_low, other_high) = a.data.unbind(1), b.data.unbind(1)
    data = torch.stack((torch.maximum(low, other_low), torch.minimum(high, other_high)), 1)
    return Leaf(Kind.INTERVAL, False, data, data.shape[0])


def _combine(kind: Kind, left: Mask, right: Any) -> Any:
    other = _to_mask("mask", right)
    return NotImplemented if other is None else _CombinedMask(kind, left, other)


def _to_mask(where: str, mask: Any) -> Mask | None:
    """Return a mask as it is, a ``BlockMask`` converted, and None for anything else."""
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
    return _convert_cached(mask)


# The conversion of each BlockMask, and the values that it read.
_block_masks: weakref.WeakKeyDictionary[Any, tuple[Observation, Mask]]
_block_masks = weakref.WeakKeyDictionary()


def _convert_cached(block_mask: Any) -> Mask:
    """Convert a ``BlockMask``, cached until a value that the conversion read changes."""
    observation = observe(block_mask)
    if observation is None or not is_unintercepted():  # a traced tensor must not be cached
        return from_block_mask(block_mask)
    last_observation, mask = _block_masks.get(block_mask, (None, None))
    if mask is None or last_observation != observation:
        last_observation, mask = observation.with_copies(), from_block_mask(block_mask)
        _block_masks[block_mask] = last_observation, mask
    return mask


class LeafMask(Mask):
    """A mask without operators; ``negated`` shows the other pairs."""

    def __init__(self, name: str, negated: bool) -> None:
        super().__init__()
        self.name, self.negated = name, negated

    def __invert__(self) -> Mask:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, negated=not self.negated, _programs={})
        return other

    def __repr__(self) -> str:
        return f"{'~' if self.negated else ''}{self.name}"


# --- blocks --------------------------------------------------------------------------------------


class _Blocks(LeafMask):
    """Shows pairs by the state of each block, and the bits of partly visible blocks."""

    def __init__(
        self,
        name: str,
        lengths: Size,
        block: Size,
        states: Tensor,
        bits: Tensor,
    ) -> None:
        super().__init__(name, False)
        self.lengths, self.block = lengths, block
        self.states, self.bits = states, bits  # as in Kind.BLOCKS

    def _check(self, call: Call) -> None:
        if not isinstance(call, DenseCall):
            raise RuntimeError(
                f"{call.op}: mask must be one of positions or documents, or combine such masks: "
                f"blocks need queries and keys of one length each, got {self!r}"
            )
        if records_trace():
            raise RuntimeError(
                f"{call.op}: torch.jit.trace would keep the lengths of mask={self!r}: "
                "use torch.export or torch.compile"
            )
        q_len, k_len = call.whole_lengths()
        if self.lengths != (q_len, k_len):
            raise RuntimeError(
                f"{call.op}: mask must be of {q_len} queries and {k_len} keys, "
                f"got {self.lengths[0]} and {self.lengths[1]}"
            )
        rows, heads = self.states.shape[:2]
        check_rows(call, "blocks", rows, call.batch)
        whole_heads = call.outer_heads if isinstance(call, PartCall) else call.heads
        if heads != 1 and heads != whole_heads:
            raise RuntimeError(f"{call.op}: mask must have 1 or {whole_heads} heads, got {heads}")
        check_device(call, "blocks", self.states)

    def _may_show(self, call: Call) -> bool:
        if self.negated or not isinstance(call, PartCall):
            return True
        (block_q, block_k), first = self.block, (call.offset, call.first_key)
        rows = slice(first[0] // block_q, -(-(first[0] + call.q_len) // block_q))
        columns = slice(first[1] // block_k, -(-(first[1] + call.k_len) // block_k))
        return bool(self.states[:, :, rows, columns].any())

    def _blocks(self, call: Call) -> tuple[Tensor, Tensor]:
        if not isinstance(call, PartCall):
            return self.states, self.bits
        states, first = self.states, (call.offset, call.first_key)
        if states.shape[1] > 1:
            states = states[:, call.first_head : call.first_head + call.heads]
        lengths = (call.q_len, call.k_len)
        return blocks_of_part(states, self.bits, self.block, first, lengths)

    def _steps(self, call: Call) -> list[Kind | Leaf]:
        states, bits = self._blocks(call)
        rows, heads = states.shape[:2]
        data = torch.cat([states.flatten(), bits.flatten()])
        partial = bits.shape[0]
        return [Leaf(Kind.BLOCKS, self.negated, data, rows, heads, *self.block, partial)]


def from_function(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Lq: int,
    Lk: int,
    *,
    device: torch.device | str = "cpu",
) -> Mask:
    """Show the pairs for which ``mask_mod(b, h, q_idx, kv_idx)`` is True, as ``create_block_mask``.

    The function gets four integer tensors without dimensions and returns a boolean one. It is
    evaluated once for each pair, here, by ``torch.vmap`` over 128 queries at a time, so it must not
    branch on values. B and H are None (or 1) for a mask that does not depend on the batch or head.

    >>> from fastattn import masks
    >>> masks.from_function(lambda b, h, q, k: (q - k) % 3 == 0, None, None, 256, 256)
    from_function(<lambda>, 256 x 256)
    """
    batch, heads = (1 if n is None else n for n in (B, H))
    for argument, size, minimum in (("B", batch, 1), ("H", heads, 1), ("Lq", Lq, 0), ("Lk", Lk, 0)):
        check_int("from_function", argument, size, minimum)
    if not callable(mask_mod):
        raise wrong_type("from_function", "mask_mod", mask_mod, "a function")
    lengths, block = (Lq, Lk), (128, 128)
    states, bits = blocks_of_function(mask_mod, (batch, heads), lengths, block, device)
    name = f"from_function({getattr(mask_mod, '__name__', mask_mod)}, {Lq} x {Lk})"
    return _Blocks(name, lengths, block, states, bits)


def from_block_mask(block_mask: Any) -> Mask:
    """Convert a ``BlockMask`` of ``torch.nn.attention.flex_attention``.

    Attention takes these objects directly, and compares in each call whether they have changed.
    This function converts once: later changes of ``block_mask``, and of tensors that its
    ``mask_mod`` reads, have no effect. Compiled code cannot convert, so call this function before.
    Only the pairs of partial blocks are evaluated.
    """
    if type(block_mask).__name__ != "BlockMask":
        raise wrong_type("from_block_mask", "block_mask", block_mask, "BlockMask")
    if block_mask.mask_mod is None:
        raise ValueError("from_block_mask: block_mask must have a mask_mod, got None")
    lengths, block = _sizes(block_mask)
    blocks = blocks_of_block_mask(block_mask, lengths, block)
    name = f"BlockMask({lengths[0]} x {lengths[1]})"
    return _Blocks(name, lengths, block, *blocks)


def mask_of_listed_blocks(block_mask: Any) -> tuple[Mask, Tensor | None, Size]:
    """Return the mask of all listed blocks, 1 for full ones [B|1, H|1, rows, columns], their size.

    The compiler can trace it, and a ``score_mod`` that calls ``mask_mod`` in the other blocks.
    """
    lengths, block = _sizes(block_mask)
    states, full = listed_blocks(block_mask, lengths, block)
    bits = states.new_empty(0, block[1], -(-block[0] // 32))
    return _Blocks("BlockMask", lengths, block, states, bits), full, block


def _sizes(block_mask: Any) -> tuple[Size, Size]:
    """Return the lengths of a ``BlockMask``, and the size of a block."""
    q_len, k_len = block_mask.seq_lengths
    # A block has bits for all its pairs, so it ends with the last query and key. Kernels are faster
    # with a multiple of 32 queries.
    block_q, block_k = block_mask.BLOCK_SIZE
    block = min(block_q, max(-(-q_len // 32) * 32, 32)), min(block_k, max(k_len, 1))
    return (q_len, k_len), block
