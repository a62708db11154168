"""Questions about shapes that several operators ask."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["expands_to"]


def expands_to(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Whether a tensor of this shape broadcasts to the target without changing it."""
    # Without `strict=False`: the compiler of torch 2.6 to 2.8 takes it for True.
    pairs = zip(reversed(shape), reversed(target))  # noqa: B905
    # Not `n in (1, m)`: torch.compile would compare a symbolic m without looking at its value.
    return len(shape) <= len(target) and not [n for n, m in pairs if n != 1 and n != m]
