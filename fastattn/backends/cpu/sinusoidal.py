"""The adapter of the sinusoidal encoding."""

from __future__ import annotations

from torch import Tensor

from fastattn import _cpu
from fastattn.backends._sinusoidal import of_any_rank
from fastattn.backends.primitives import SinusoidalOptions
from fastattn.sinusoids import sinusoids


def sinusoidal_encoding(
    x: Tensor,  # [..., L, D]
    positions: Tensor | None,  # [..., L] int64, broadcasts to x
    *,
    options: SinusoidalOptions,
    offset: int | None = None,  # in the place of the one in the options
    out: Tensor | None = None,  # of at most four dimensions
) -> Tensor:
    """Return ``x * scale + PE(positions)``, see ``docs/design.md``."""
    columns = sinusoids(x.shape[-1], options.layout, options.max_timescale)
    if offset is None:
        offset = options.offset

    def encode(x: Tensor, positions: Tensor | None, out: Tensor | None) -> Tensor:
        return _cpu.sinusoidal_encoding(options, offset, x, positions, *columns, out)

    return encode(x, positions, out) if x.ndim <= 4 else of_any_rank(encode, x, positions)
