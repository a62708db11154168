"""The comparison of all ranks' arguments before a call, and the errors if they disagree.

Each rank sends a digest of its options with a few numbers to all others. Only if digests differ are
the options themselves exchanged, to name the ranks and the arguments.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fastattn.distributed._peers import Peers

_ERROR = "problem"  # the option that only a rank with an error has
_STEP = "the comparison of the arguments"


def compare_options(
    peers: Peers, options: Mapping[str, str], numbers: Sequence[int], device: torch.device
) -> list[list[int]]:
    """Return the numbers of every rank; raise if the options differ between ranks."""
    text = json.dumps(options, sort_keys=True).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True)
    header = torch.tensor([digest, len(text), *numbers], dtype=torch.int64, device=device)
    headers = [x.tolist() for x in gather(peers, header, [header.numel()] * peers.size)]
    if any(header[0] != digest for header in headers):
        encoded = torch.tensor(list(text), dtype=torch.uint8, device=device)
        texts = gather(peers, encoded, [header[1] for header in headers])
        _raise_difference(peers.op, [json.loads(bytes(x.tolist())) for x in texts])
    return [header[2:] for header in headers]


def gather(peers: Peers, local: Tensor, lengths: Sequence[int], step: str = _STEP) -> list[Tensor]:
    """Return the 1-D tensors of all ranks, in their order; ``lengths`` are known to every rank."""
    received = {rank: local.new_empty(lengths[rank]) for rank in peers.others}
    # Point-to-point messages instead of a collective, to name the rank that does not answer.
    peers.exchange(dict.fromkeys(peers.others, local), received, step).wait()
    return [local if rank == peers.rank else received[rank] for rank in range(peers.size)]


def error_as_options(error: Exception) -> dict[str, str]:
    """The options that a rank sends if its own arguments raise an error."""
    return {_ERROR: f"{type(error).__name__}: {error}"}


def _raise_difference(op: str, options: Sequence[Mapping[str, str]]) -> None:
    """Raise the errors of ranks, or an error with all values of the first option that differs."""
    errors = [(rank, values[_ERROR]) for rank, values in enumerate(options) if _ERROR in values]
    if errors:
        message = "; ".join(f"rank {rank} raised {what}" for rank, what in errors)
        raise RuntimeError(f"{op}: {message}")
    for name in options[0]:
        ranks: dict[str, list[int]] = {}
        for rank, values in enumerate(options):
            ranks.setdefault(values[name], []).append(rank)
        if len(ranks) > 1:
            message = "; ".join(
                f"{value} on rank{'s' if len(which) > 1 else ''} {', '.join(map(str, which))}"
                for value, which in ranks.items()
            )
            raise RuntimeError(f"{op}: {name} must be the same on all ranks, got {message}")
    raise AssertionError("digests differ, but no option does")
