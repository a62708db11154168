"""The mask function that transformers calls, and the mask that it returns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn import compat
from fastattn.compat import has_strided_memory
from fastattn.integrations.transformers._patterns import Pattern, in_window, pattern_of
from fastattn.integrations.transformers._support import takes_any_mask
from fastattn.library import watchers


class StructuredMask(Tensor):
    """A boolean mask [B, 1, Lq, Lk], stored as its pattern instead of a matrix; True takes part.

    The attention function reads the attributes. All other code can use it as a tensor: any operator
    first converts it to an ordinary one (:meth:`dense`).

    Row i has the position ``i + offset`` among the keys. ``padding`` [B, Lk] is True at real keys.
    ``starts`` [S + 1] holds the starts of the packed sequences in the rows of all entries.
    """

    pattern: Pattern
    offset: int
    padding: Tensor | None
    starts: Tensor | None

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, int, int, int],
        pattern: Pattern,
        offset: int,
        padding: Tensor | None,
        device: torch.device,
    ) -> StructuredMask:
        mask = compat.wrapper_tensor(cls, shape, dtype=torch.bool, device=device)
        mask.pattern, mask.offset, mask.padding = pattern, offset, padding
        mask.starts = None if pattern.segments is None else _starts(pattern.segments)
        return mask

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StructuredMask({tuple(self.shape)}, {self.pattern}, offset={self.offset})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Checkpointing detaches a mask, and models slice it to the number of keys.
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            (mask,) = args
            return cls(mask.shape, mask.pattern, mask.offset, mask.padding, mask.device)
        return function(*_densify(args), **_densify(kwargs or {}))

    def dense(self) -> Tensor:
        """The mask as an ordinary tensor."""
        shape = (*self.shape,)
        return _padded_mask(shape, self.pattern, self.offset, self.padding, self.device)


def _padded_mask(
    shape: tuple[int, ...],
    pattern: Pattern,
    offset: int,
    padding: Tensor | None,
    device: torch.device,
) -> Tensor:
    mask = dense_mask(shape, pattern, offset, device)
    if padding is not None:
        mask = mask & padding[:, None, None, :]
    return mask.expand(shape)


def _starts(segments: Tensor) -> Tensor:
    """[S + 1], int32: the starts of the packed sequences in all rows [B · L], then the end."""
    is_start = torch.ones_like(segments, dtype=torch.bool)
    is_start[:, 1:] = segments[:, 1:] != segments[:, :-1]
    starts = is_start.flatten().nonzero().flatten()
    return torch.nn.functional.pad(starts, (0, 1), value=segments.numel()).int()


def dense_mask(
    shape: tuple[int, ...], pattern: Pattern, offset: int, device: torch.device
) -> Tensor:
    """The mask [1, 1, Lq, Lk], with packed sequences [B, 1, Lq, Lk], of a pattern."""
    *_, q_len, k_len = shape
    queries = torch.arange(q_len, device=device)[:, None] + offset
    distance = queries - torch.arange(k_len, device=device)
    mask = in_window(distance, pattern.left, pattern.right)[None, None]
    if pattern.segments is not None:
        groups = pattern.segments
        mask = mask & (groups[:, None, :, None] == groups[:, None, None, :])
    return mask


def _densify(x: Any) -> Any:
    if isinstance(x, StructuredMask):
        return x.dense()
    if isinstance(x, dict):
        return {name: _densify(value) for name, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_densify(value) for value in x]
    return x


def attention_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **others: Any,
) -> Tensor | None:
    """Return the mask that ``mask_function`` and the padding describe.

    It is transformers' ``AttentionMaskInterface``. It returns None for full attention, if the
    caller allows that; a :class:`StructuredMask` for causality, a window, packed sequences and
    padding; and a tensor [B, 1, Lq, Lk] for any other mask, or under a compiler. The mask always
    includes causality: models that drop rows of queries slice the mask accordingly.

    Args:
        batch_size, q_length, kv_length: B, Lq, Lk. transformers 5.0 passes ``cache_position`` [Lq]
            instead of ``q_length`` and ``q_offset``.
        q_offset, kv_offset: the positions of the first query and the first key.
        mask_function: (batch, head, query, key) -> whether the pair takes part; None is causal.
        attention_mask: [B, positions so far], True at real tokens; None without padding.
        others: the other arguments of ``transformers.masking_utils.sdpa_mask``.
    """
    from transformers import masking_utils

    if mask_function is None:
        mask_function = masking_utils.causal_mask_function
    arguments = {
        "batch_size": batch_size,
        "kv_length": kv_length,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        **others,
    }
    if "cache_position" not in others:
        arguments |= {"q_length": q_length, "q_offset": q_offset}
    if not takes_any_mask(others.get("config")):
        return masking_utils.eager_mask(**arguments)
    as_tensor = functools.partial(masking_utils.sdpa_mask, **arguments)

    positions = others.get("cache_position")
    values_needed = [x for x in (attention_mask, q_offset, positions) if isinstance(x, Tensor)]
    if torch.compiler.is_compiling():  # it cannot trace the variable of watchers
        return as_tensor()
    modes = len(watchers.get())  # of fastattn.trace, which must not change the mask
    if not (compat.is_unintercepted(modes) and all(map(_is_readable, values_needed))):
        return as_tensor()
    pattern = pattern_of(mask_function)
    if pattern is None:
        return as_tensor()
    if positions is not None:
        q_length, q_offset = len(positions), positions[0]
    assert q_length is not None
    shape = (batch_size, 1, q_length, kv_length)
    offset = int(q_offset) - kv_offset
    pattern = _without_unused_bounds(pattern, offset, q_length, kv_length)
    if pattern.segments is not None and (
        pattern.segments.shape != (batch_size, q_length) or q_length != kv_length or offset != 0
    ):
        return as_tensor()
    visible_keys = offset + q_length if pattern.right == 0 else kv_length
    padding = _padding(attention_mask, kv_offset, kv_length, visible_keys)

    if pattern == Pattern() and padding is not None:  # all queries can see the same keys
        return padding[:, None, None, :].expand(shape)
    if pattern == Pattern() and (
        others.get("allow_is_bidirectional_skip", False)
        or (q_length == 1 and others.get("allow_is_causal_skip", True))
    ):
        return None
    device = torch.device(others.get("device", "cpu") if positions is None else positions.device)
    if q_length == 1:  # decoding may be compiled, and one row is small
        return _padded_mask(shape, pattern, offset, padding, device)
    return StructuredMask(shape, pattern, offset, padding, device)


def _is_readable(x: Tensor) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and has_strided_memory(x)


def _without_unused_bounds(pattern: Pattern, offset: int, q_len: int, k_len: int) -> Pattern:
    """The pattern, unlimited on the sides where no key is excluded."""
    left, right = pattern.left, pattern.right
    return Pattern(
        -1 if left >= offset + q_len - 1 else left,
        -1 if right >= k_len - 1 - offset else right,
        pattern.segments,
    )


def _padding(mask: Tensor | None, kv_offset: int, k_len: int, visible: int) -> Tensor | None:
    """[B, Lk], True at real keys; None if the first ``visible`` keys, which queries see, are real.

    Positions beyond the mask are not real.
    """
    if mask is None:
        return None
    if kv_offset or mask.shape[1] != k_len:
        mask = mask[:, kv_offset : kv_offset + k_len]
        mask = torch.nn.functional.pad(mask, (0, k_len - mask.shape[1]))
    mask = mask if mask.dtype == torch.bool else mask.bool()
    return None if bool(mask[:, :visible].all()) else mask
