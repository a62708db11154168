"""``KeyValueMemory``: an external memory that attention writes and reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastattn.nn._sizes import check_optional_sizes, check_sizes
from fastattn.ops import scaled_dot_product_attention


class KeyValueMemory(nn.Module):
    r"""Slots of keys and values: append rows, overwrite the most similar slot, read by attention.

    .. math:: read(q) = softmax(scale \cdot q \, K^T) \, V

    over the used slots (Key-Value Memory Networks, Miller et al. 2016,
    https://arxiv.org/abs/1606.03126). Writing creates new tensors for the slots: earlier results
    keep their gradients, and gradients flow from a result into the rows that were written.
    ``detach_`` cuts them between episodes.

    Args:
        slots: the number of slots.
        key_dim, value_dim: the widths of keys and values; value_dim None is key_dim.
        batch_size: the number of memories.
        scale: of the scores; None is 1 / sqrt(key_dim).
        device, dtype: of the slots.

    Attributes:
        keys, values: [batch_size, slots, ...], in the ``state_dict``.
        written: int64, how many rows were appended so far; the next slot is ``written % slots``.
        used: bool [batch_size, slots], which slots have been written.
    """

    keys: Tensor
    values: Tensor
    used: Tensor
    written: Tensor

    def __init__(
        self,
        slots: int,
        key_dim: int,
        value_dim: int | None = None,
        *,
        batch_size: int = 1,
        scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(slots=slots, key_dim=key_dim, batch_size=batch_size)
        check_optional_sizes(value_dim=value_dim)
        value_dim = key_dim if value_dim is None else value_dim
        self.slots, self.scale = slots, scale
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.register_buffer("keys", torch.zeros(batch_size, slots, key_dim, **factory))
        self.register_buffer("values", torch.zeros(batch_size, slots, value_dim, **factory))
        used = torch.zeros(batch_size, slots, dtype=torch.bool, device=device)
        self.register_buffer("used", used)
        self.register_buffer("written", torch.zeros((), dtype=torch.int64, device=device))

    def reset(self) -> None:
        """Clear all slots."""
        self.keys, self.values = torch.zeros_like(self.keys), torch.zeros_like(self.values)
        self.used, self.written = torch.zeros_like(self.used), torch.zeros_like(self.written)

    def detach_(self) -> None:
        """Detach the slots from the graph; their values stay."""
        self.keys, self.values = self.keys.detach(), self.values.detach()

    def append(self, key: Tensor, value: Tensor) -> None:
        """Write rows [batch_size, n, ...] into the next slots; a full memory drops its oldest."""
        self._check(key, value)
        count = key.shape[1]
        if count > self.slots:
            key, value = key[:, -self.slots :], value[:, -self.slots :]
        total = self.written + count
        slots = (total - key.shape[1] + torch.arange(key.shape[1], device=key.device)) % self.slots
        self.keys, self.values = (
            self.keys.index_copy(1, slots, key),
            self.values.index_copy(1, slots, value),
        )
        self.used = self.used.index_fill(1, slots, True)
        self.written = total

    def overwrite(self, key: Tensor, value: Tensor, slot: Tensor | None = None) -> Tensor:
        """Write one row [batch_size, ...] into a slot, and return its index, int64 [batch_size].

        ``slot`` is [batch_size]; None takes the slot with the largest attention weight for ``key``,
        which is the most similar one. An empty memory takes slot 0.
        """
        self._check(key.unsqueeze(1), value.unsqueeze(1))
        if slot is None:
            slot = self.read(key.detach().unsqueeze(1), need_weights=True)[1][:, 0].argmax(-1)
        elif slot.shape != self.keys.shape[:1] or slot.dtype != torch.int64:
            raise ValueError(
                f"slot must be int64 [batch_size] = {tuple(self.keys.shape[:1])}, "
                f"got {slot.dtype} {tuple(slot.shape)}"
            )
        elif bool(((slot < 0) | (slot >= self.slots)).any()):
            raise IndexError(f"slot must be in [0, {self.slots})")
        is_slot = torch.nn.functional.one_hot(slot, self.slots).bool()  # [batch_size, slots]
        self.keys = torch.where(is_slot[..., None], key.unsqueeze(1), self.keys)
        self.values = torch.where(is_slot[..., None], value.unsqueeze(1), self.values)
        self.used = self.used | is_slot
        return slot

    def read(self, query: Tensor, *, need_weights: bool = False) -> Any:
        """Return the result of queries [batch_size, L, key_dim], [batch_size, L, value_dim].

        With ``need_weights`` also return the weights [batch_size, L, slots]. An empty memory
        gives 0.
        """
        if query.ndim != 3 or query.shape[-1] != self.keys.shape[-1]:
            raise ValueError(
                f"query must be [batch_size, L, key_dim] = [{self.keys.shape[0]}, L, "
                f"{self.keys.shape[-1]}], got {tuple(query.shape)}"
            )
        return scaled_dot_product_attention(
            query,
            self.keys,
            self.values,
            self.used.unsqueeze(1),
            scale=self.scale,
            need_weights=need_weights,
        )

    def forward(self, query: Tensor, need_weights: bool = False) -> Any:
        """As ``read``."""
        return self.read(query, need_weights=need_weights)

    def _check(self, key: Tensor, value: Tensor) -> None:
        """Raise an error unless key and value fit the slots."""
        for name, x, stored in (("key", key, self.keys), ("value", value, self.values)):
            expected = (stored.shape[0], stored.shape[2])
            if (
                x.ndim != 3
                or (x.shape[0], x.shape[2]) != expected
                or key.shape[1] != value.shape[1]
            ):
                raise ValueError(
                    f"{name} must have batch size {expected[0]}, width {expected[1]}, and as many "
                    f"rows as the other tensor, got shape {tuple(x.shape)}"
                )
            if x.dtype != stored.dtype:
                raise TypeError(f"{name} must be {stored.dtype}, got {x.dtype}")

    def extra_repr(self) -> str:
        batch, slots, width = self.keys.shape
        return f"slots={slots}, key_dim={width}, value_dim={self.values.shape[2]}, batch={batch}"
