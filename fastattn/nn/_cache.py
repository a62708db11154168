"""The state of a decoder between its steps: the keys and values of all earlier positions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class KeyValueCache:
    """Keys and values [N, H, S, D] of one attention.

    Rows written after the first ``length`` positions become permanent with ``advance``. Until then
    the next call overwrites them, so a step can be repeated.
    """

    def __init__(self) -> None:
        self.length = 0
        self._keys_values: tuple[Tensor, Tensor] | None = None  # with free space after `length`

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v [N, H, L, D], and return all keys and values."""
        start, end = self.length, self.length + k.shape[2]
        if self._keys_values is not None and self._keys_values[0].shape[0] != k.shape[0]:
            cached = self._keys_values[0].shape[0]
            raise ValueError(f"the cache has batch size {cached}, got {k.shape[0]}")
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            # Tensors that autograd has saved must not be overwritten.
            if self._keys_values is not None:
                k, v = (
                    torch.cat((past[:, :, :start], new), 2)
                    for past, new in zip(self._keys_values, (k, v), strict=True)
                )
            self._keys_values = k, v
            return k, v
        if self._keys_values is None or self._keys_values[0].shape[2] < end:
            self._keys_values = self._grow(k, v, 2 * end)
        for buffer, new in zip(self._keys_values, (k, v), strict=True):
            buffer[:, :, start:end] = new
        return self._keys_values[0][:, :, :end], self._keys_values[1][:, :, :end]

    def get_or_compute(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
        """Return keys and values that never change; the first call computes them."""
        if self._keys_values is None:
            k, v = compute()
            self._keys_values = k, v
        return self._keys_values

    def advance(self, steps: int) -> None:
        """Make the next ``steps`` positions permanent."""
        self.length += steps

    def select(self, index: Tensor) -> None:
        """Keep only these sequences of the batch, in this order."""
        if self._keys_values is not None:
            k, v = (x.index_select(0, index) for x in self._keys_values)
            self._keys_values = k, v

    def _grow(self, k: Tensor, v: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        """Return buffers for ``capacity`` positions, with the permanent positions copied."""
        past_rows = self._keys_values
        buffers = [x.new_empty(*x.shape[:2], capacity, x.shape[3]) for x in (k, v)]
        if past_rows is not None:
            for buffer, past in zip(buffers, past_rows, strict=True):
                buffer[:, :, : self.length] = past[:, :, : self.length]
        return buffers[0], buffers[1]


class DecoderCache:
    """The keys and values of earlier positions in a :class:`fastattn.nn.TransformerDecoder`.

    ``decoder.new_cache()`` creates it, and each call that gets it fills it. It belongs to one batch
    and one memory.

    Attributes:
        length: the number of positions so far.
        layers: for each layer, the caches of self- and of cross-attention.
        padding: [N, length] bool, which of the positions so far are padding, if known.
    """

    def __init__(self, layers: int) -> None:
        self.layers = [(KeyValueCache(), KeyValueCache()) for _ in range(layers)]
        self.padding: Tensor | None = None

    @property
    def length(self) -> int:
        """The number of positions so far."""
        return self.layers[0][0].length

    def select(self, index: Tensor) -> None:
        """Keep only these sequences of the batch, [N'] int64: the selected beams of a search."""
        for caches in self.layers:
            for cache in caches:
                cache.select(index)
        if self.padding is not None:
            self.padding = self.padding.index_select(0, index)
