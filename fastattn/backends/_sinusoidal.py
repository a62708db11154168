"""The sinusoidal encoding of any rank, on native kernels of at most four dimensions."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable

import torch
from torch import Tensor

from fastattn.backends.primitives import SinusoidalOptions
from fastattn.sinusoids import sinusoids


@functools.lru_cache(maxsize=256)
def _column_angles(
    width: int, layout: str, max_timescale: float, device: torch.device
) -> tuple[Tensor, ...]:
    """The frequency and the phase of every column, uint64 with its bits read as int64."""
    table = sinusoids(width, layout, max_timescale)

    def copy_to_device(
        column: array[int],
    ) -> Tensor:  # on the CPU, too: tensors must own their memory
        words = torch.tensor(column.tolist(), dtype=torch.uint64, device="cpu")
        return words.view(torch.int64).to(device)

    return tuple(map(copy_to_device, table))


def make_encoding(native: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make ``sinusoidal_encoding`` of a kernel for tensors of at most four dimensions."""

    def sinusoidal_encoding(
        x: Tensor,  # [..., L, D]
        positions: Tensor | None,  # [..., L] int64, broadcasts to x
        *,
        options: SinusoidalOptions,
        offset: int | None = None,  # overrides the offset of the options
        out: Tensor | None = None,  # of at most four dimensions
    ) -> Tensor:
        """Return ``x * scale + PE(positions)``, see ``docs/design.md``."""
        columns = _column_angles(x.shape[-1], options.layout, options.max_timescale, x.device)
        if x.ndim <= 4:
            return native(x, positions, options=options, columns=columns, offset=offset, out=out)
        encoded = torch.empty_like(x)
        target = encoded.flatten(0, -4)  # leading dimensions that cannot be merged are copied
        if positions is not None:
            positions = positions.expand(x.shape[:-1]).flatten(0, -3)
        rows = x.flatten(0, -4)
        native(rows, positions, options=options, columns=columns, offset=offset, out=target)
        is_view = target.data_ptr() == encoded.data_ptr()
        return encoded if is_view else encoded.copy_(target.view(x.shape))

    return sinusoidal_encoding
