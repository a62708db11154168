"""Gathers one value per key from the ranks that hold the keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.distributed._agree import gather
from fastattn.distributed._peers import Peers, process_group
from fastattn.distributed.layout import Layout


def whole_columns(own: Tensor, group: Any, layout: str | Layout) -> Tensor:
    """[B, Lk of this rank] of each rank -> [B, Lk of all ranks], in the order of positions."""
    peers = Peers(process_group(group))
    length = torch.tensor([own.shape[1]], device=own.device)
    step = "gathering the padding of keys"
    lengths = [int(x) for x in gather(peers, length, [1] * peers.size, step)]
    whole: Layout = layout if isinstance(layout, Layout) else getattr(Layout, layout)(lengths)
    sent = own.to(torch.uint8) if own.dtype is torch.bool else own  # gloo has no bool
    sizes = [own.shape[0] * length for length in lengths]
    parts = gather(peers, sent.contiguous().view(-1), sizes, step)
    columns = torch.cat([x.view(len(own), n) for x, n in zip(parts, lengths, strict=True)], 1)
    positions = torch.cat([whole.positions(rank) for rank in range(whole.ranks)])
    # Lengths that do not fit the layout are an error of the attention that follows.
    if positions.shape[0] == columns.shape[1]:
        columns = torch.zeros_like(columns).index_copy(1, positions.to(own.device), columns)
    return columns.to(own.dtype)
