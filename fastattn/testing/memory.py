"""Tensors in memory where every byte around them is poison, so a wrong read changes the results."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_GUARD = 2048  # poisoned elements before and after a tensor, a multiple of all vector widths

# A layout makes an empty [B, H, L, D] view; `new` allocates contiguous memory of a shape.
_New = Callable[..., Tensor]
LAYOUTS: dict[str, Callable[[_New, int, int, int, int], Tensor]] = {
    "contiguous": lambda new, b, h, n, d: new(b, h, n, d),
    # one element off the alignment
    "unaligned": lambda new, b, h, n, d: new(b * h * n * d + 1)[1:].view(b, h, n, d),
    # [B, L, H, D], the output of a projection
    "blhd": lambda new, b, h, n, d: new(b, n, h, d).transpose(1, 2),
    # [L, B, H, D], nn.MultiheadAttention without batch_first
    "lbhd": lambda new, b, h, n, d: new(n, b, h, d).permute(1, 2, 0, 3),
    # the middle one of a packed projection [B, L, 3, H, D]
    "packed": lambda new, b, h, n, d: new(b, n, 3, h, d)[:, :, 1].transpose(1, 2),
    # D is not the contiguous dimension
    "transposed": lambda new, b, h, n, d: new(b, h, d, n).mT,
    # nothing is contiguous
    "every_second": lambda new, b, h, n, d: new(b, 2 * h, 2 * n, 2 * d)[:, ::2, ::2, 1::2],
    # a window of a larger tensor, such as a preallocated cache
    "sliced": lambda new, b, h, n, d: new(b, h, n + 5, d + 3)[:, :, 2 : n + 2, 1 : d + 1],
    # one row, head or sequence expanded: stride 0
    "expanded_batch": lambda new, b, h, n, d: new(min(b, 1), h, n, d).expand(b, h, n, d),
    "expanded_heads": lambda new, b, h, n, d: new(b, min(h, 1), n, d).expand(b, h, n, d),
    "expanded_rows": lambda new, b, h, n, d: new(b, h, min(n, 1), d).expand(b, h, n, d),
    "expanded_dims": lambda new, b, h, n, d: new(b, h, n, min(d, 1)).expand(b, h, n, d),
    "expanded_all": lambda new, b, h, n, d: new(1, 1, 1, 1).expand(b, h, n, d),
}
# Those in which every element has a place of its own, but for the first.
STRIDED = [name for name in LAYOUTS if not name.startswith(("contiguous", "expanded"))]


def allocate(numel: int, dtype: torch.dtype) -> Tensor:
    """A tensor [numel] inside a larger one."""
    return torch.empty(numel + 2 * _GUARD, dtype=dtype)[_GUARD : numel + _GUARD]


def place(values: Tensor, layout: str = "contiguous") -> Tensor:
    """Return a tensor of ``layout`` inside poisoned memory, equal to ``values`` [..., H, L, D].

    The dimensions before the last three are as one, B; missing ones are as 1. An expanded layout
    repeats the first of the values along its dimension.
    """
    missing = 4 - values.ndim
    if missing < 0:
        return place(values.flatten(0, -4), layout).unflatten(0, values.shape[:-3])
    if missing > 0:
        return place(values[(None,) * missing], layout)[(0,) * missing]
    poison: float = float("nan")
    if not values.is_floating_point():
        poison = True if values.dtype == torch.bool else 2**30
        if values.dtype == torch.int8:
            poison = 127

    def new(*shape: int) -> Tensor:
        buffer = allocate(math.prod(shape), values.dtype)
        count = buffer.untyped_storage().nbytes() // buffer.itemsize
        buffer.as_strided((count,), (1,), 0).fill_(poison)
        return buffer.view(shape)

    view = LAYOUTS[layout](new, *values.shape)
    first = values
    for dim, stride in enumerate(view.stride()):
        if stride == 0 and layout.startswith("expanded"):
            first = first.narrow(dim, 0, min(first.shape[dim], 1))
    # An expanded tensor cannot be written to, only its single copy.
    target = view.as_strided(first.shape, view.stride(), view.storage_offset())
    target.copy_(first)
    return view


class Watch:
    """Copies the storage of some tensors, and detects writes to it."""

    def __init__(self, **tensors: Tensor | None) -> None:
        self._memory = {
            name: (bytes_of(tensor), bytes_of(tensor).clone())
            for name, tensor in tensors.items()
            if tensor is not None
        }

    def written(self) -> list[str]:
        return [name for name, (now, then) in self._memory.items() if not torch.equal(now, then)]


def bytes_of(tensor: Tensor) -> Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())
