"""Gathers one value per key from the ranks that hold the keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.distributed._agree import gather
from fastattn.distributed._peers import Peers, process_group
from fastattn.distributed.layout import Layout


def gather_columns(local: Tensor, group: Any, layout: str | Layout) -> Tensor:
    """Gather [B, Lk of this rank] to [B, Lk of all ranks], in the order of positions."""
    peers = Peers(process_group(group))
    length = torch.tensor([local.shape[1]], device=local.device)
    step = "gathering the padding of keys"
    lengths = [int(x) for x in gather(peers, length, [1] * peers.size, step)]
    key_layout: Layout = layout if isinstance(layout, Layout) else getattr(Layout, layout)(lengths)
    message = local.to(torch.uint8) if local.dtype is torch.bool else local  # gloo has no bool
    sizes = [local.shape[0] * length for length in lengths]
    messages = gather(peers, message.contiguous().view(-1), sizes, step)
    columns = torch.cat([x.view(len(local), n) for x, n in zip(messages, lengths, strict=True)], 1)
    positions = torch.cat([key_layout.positions(rank) for rank in range(key_layout.ranks)])
    # If the lengths do not fit the layout, the attention that follows raises the error.
    if positions.shape[0] == columns.shape[1]:
        columns = torch.zeros_like(columns).index_copy(1, positions.to(local.device), columns)
    return columns.to(local.dtype)
