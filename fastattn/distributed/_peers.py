"""Messages between the ranks of a group, and errors that name the rank that did not answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastattn.checks import wrong_type

OP = "fastattn.distributed.attention"


class Exchange:
    """Messages in flight; holds their tensors until they have been sent and received."""

    def __init__(self, peers: Peers, step: str) -> None:
        self._peers, self._step = peers, step
        self._works: list[tuple[Any, Sequence[int]]] = []
        self._tensors: list[Tensor] = []

    def start(self, operations: Sequence[tuple[int, dist.P2POp]]) -> None:
        """Start all operations, each with its peer, together."""
        ranks = [peer for peer, _ in operations]
        self._tensors += [operation.tensor for _, operation in operations]
        try:
            works = dist.batch_isend_irecv([operation for _, operation in operations])
        except RuntimeError as error:
            raise self._no_answer_error(ranks, error) from error
        # A backend that joins the operations returns one object for all of them.
        one_work_each = len(works) == len(ranks)
        self._works += [(w, [ranks[n]] if one_work_each else ranks) for n, w in enumerate(works)]

    def wait(self) -> None:
        """Wait for all messages; an error names the rank that did not answer."""
        for work, ranks in self._works:
            try:
                work.wait()
            except RuntimeError as error:  # noqa: PERF203  (it names the work)
                raise self._no_answer_error(ranks, error) from error

    def _no_answer_error(self, ranks: Sequence[int], error: RuntimeError) -> RuntimeError:
        """The error for a failed message from or to one of these ranks."""
        silent = " or ".join(str(rank) for rank in sorted(set(ranks)))
        reason = str(error).partition("\n")[0]
        return RuntimeError(
            f"{self._peers.op}: rank {self._peers.rank} got no answer from rank {silent} in "
            f"{self._step}: {reason}"
        )


class Peers:
    """The ranks of a group, numbered within the group; errors begin with ``op``."""

    def __init__(self, group: dist.ProcessGroup | None, op: str = OP) -> None:
        self.group, self.op = group, op
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        if self.rank < 0:
            raise RuntimeError(f"{op}: this process is not a rank of the group")

    @property
    def others(self) -> list[int]:
        """All ranks but this one."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def exchange(
        self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], step: str
    ) -> Exchange:
        """Start to send and receive contiguous tensors; empty ones are neither sent nor received.

        Between two ranks, messages arrive in the order in which they were started. So all ranks
        must start their messages in the same order of steps.
        """
        messages: list[tuple[Any, int, Tensor]] = [(dist.irecv, *item) for item in receives.items()]
        messages += [(dist.isend, *item) for item in sends.items()]
        operations = [
            (peer, dist.P2POp(kind, x, self._global(peer), self.group))
            for kind, peer, x in messages
            if x.numel()
        ]
        exchange = Exchange(self, step)
        if any(message.tensor.is_cpu for _, message in operations):
            for operation in operations:  # one by one, so that an error names its peer
                exchange.start([operation])
        elif operations:  # in one launch: NCCL could deadlock on separate ones
            exchange.start(operations)
        return exchange

    def _global(self, rank: int) -> int:
        """The rank's number outside the group."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


class KeyMessages:
    """The form of messages with keys [B, Hkv, L, D] and values [B, Hkv, L, Dv], or their gradients.

    The length L differs between ranks.
    """

    def __init__(self, key: Tensor, value: Tensor, lengths: Sequence[int]) -> None:
        self.lengths, self.shapes = lengths, (key.shape, value.shape)

    def pack(self, key: Tensor, value: Tensor) -> Tensor:
        """Make one message of keys and values."""
        return torch.cat([key.flatten(), value.flatten()])

    def empty(self, rank: int, like: Tensor) -> Tensor:
        """An uninitialised message of a rank."""
        (batch, heads, _, width), (*_, value_width) = self.shapes
        return like.new_empty(batch * heads * self.lengths[rank] * (width + value_width))

    def unpack(self, message: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Split a message of a rank into keys and values."""
        shapes = [(batch, heads, self.lengths[rank], d) for batch, heads, _, d in self.shapes]
        key, value = message.split([math.prod(shape) for shape in shapes])
        return key.view(shapes[0]), value.view(shapes[1])


def process_group(group: Any, op: str = OP) -> dist.ProcessGroup | None:
    """Check ``group``, and return the process group of a one-dimensional mesh."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{op}: torch.distributed is not initialized, call "
            "torch.distributed.init_process_group() first, for example under torchrun"
        )
    if hasattr(group, "get_group"):  # a mesh; importing its class takes long
        if group.ndim != 1:
            raise ValueError(f"{op}: group must be a mesh of one dimension, got {group.ndim}")
        return group.get_group()
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise wrong_type(op, "group", group, "ProcessGroup, DeviceMesh or None")
    return group
