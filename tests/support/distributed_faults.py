"""Calls of ``fastattn.distributed.attention`` that fail, run on each rank of a group."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fastattn import masks
from fastattn.distributed import Layout, attention
from fastattn.distributed._peers import Peers

SECONDS = 8.0  # for one message


def tensors(**changed: Any) -> list[Tensor]:
    """Three tensors of ones."""
    shape = {"heads": 4, "length": 6, "width": 8, "dtype": torch.float32} | changed
    x = torch.ones(2, shape["heads"], shape["length"], shape["width"], dtype=shape["dtype"])
    return [x.clone() for _ in range(3)]


def dtensors(dim: int) -> list[Tensor]:
    """Tensors that are sharded as DTensor."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return [DTensor.from_local(x, mesh, [Shard(dim)]) for x in tensors()]


def message_of(call: Callable[[], Any]) -> str:
    """The error of a call as text."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# Each makes a wrong call on rank 1, a right one on the others.
DIFFERENT: dict[str, Callable[[bool], Any]] = {
    "window": lambda odd: attention(*tensors(), window=(4, 0) if odd else None),
    "scale": lambda odd: attention(*tensors(), scale=2.0 if odd else None),
    "dropout_p": lambda odd: attention(*tensors(), dropout_p=0.5 if odd else 0.0),
    "method": lambda odd: attention(*tensors(), method="ring" if odd else "allgather"),
    "layout": lambda odd: attention(*tensors(), layout="zigzag" if odd else "contiguous"),
    "dtype": lambda odd: attention(*tensors(dtype=torch.float64 if odd else torch.float32)),
    "heads": lambda odd: attention(*tensors(heads=2 if odd else 4)),
    "mask": lambda odd: attention(*tensors(), mask=masks.chunked(3 if odd else 2)),
    "sinks": lambda odd: attention(*tensors(), sinks=torch.ones(4) if odd else None),
    "cu_seqlens": lambda odd: attention(*tensors(), cu_seqlens=torch.tensor([0, 9 + odd, 18])),
    "requires_grad": lambda odd: attention(*(x.requires_grad_(odd) for x in tensors())),
    "attn_mask": lambda odd: attention(
        *tensors(), attn_mask=torch.ones(6, 18) > 0 if odd else torch.ones(6, 18)
    ),
    "columns": lambda odd: attention(*tensors(), attn_mask=torch.ones(6, 17 if odd else 18)),
    "own error": lambda odd: attention(*tensors(), softcap=-1.0 if odd else 1.0),
    "positions": lambda odd: attention(
        *tensors(), layout=torch.arange(6) + 6 * dist.get_rank() - (2 if odd else 0)
    ),
    "ranks": lambda odd: attention(
        *tensors(), layout=Layout.contiguous([6, 6] if odd else [6, 6, 6])
    ),
    "lengths": lambda odd: attention(
        *tensors(length=5 if odd else 6), layout=Layout.contiguous([6, 6, 6])
    ),
}
# All ranks make the same wrong call.
WRONG: dict[str, Callable[[], Any]] = {
    "dropout_p": lambda: attention(*tensors(), dropout_p=1.5),
    "cu_seqlens": lambda: attention(*tensors(), cu_seqlens=torch.tensor([0, 9, 8, 18])),
    "cu_seqlens end": lambda: attention(*tensors(), cu_seqlens=torch.tensor([0, 17])),
    "generator": lambda: attention(*tensors(), dropout_p=0.5, generator=1),
    "method": lambda: attention(*tensors(), method="tree"),
    "layout": lambda: attention(*tensors(), layout="striped"),
    "layout ranks": lambda: attention(*tensors(), layout=Layout.contiguous([6, 6])),
    "layout without check": lambda: attention(
        *tensors(), layout=Layout.contiguous([5, 5, 5]), check=False
    ),
    "layout type": lambda: attention(*tensors(), layout=[1, 2]),
    "layout shape": lambda: attention(*tensors(), layout=torch.arange(5)),
    "heads": lambda: attention(*tensors(heads=2), method="ulysses"),
    "rank": lambda: attention(tensors()[0][0], *tensors()[1:]),
    "type": lambda: attention(1, *tensors()[1:]),  # type: ignore[arg-type]
    "grouped": lambda: attention(tensors()[0], *tensors(heads=2)[1:]),
    "mask and causal": lambda: attention(*tensors(), attn_mask=torch.ones(6, 18), is_causal=True),
    "mask": lambda: attention(*tensors(), mask=torch.ones(18, 18)),  # type: ignore[arg-type]
    "mask size": lambda: attention(*tensors(), mask=masks.document(torch.arange(17))),
    "placements": lambda: attention(*dtensors(1)),
    "placements differ": lambda: attention(*dtensors(2)[:2], *dtensors(1)[:1]),
    "one DTensor": lambda: attention(*dtensors(2)[:1], *tensors()[:2]),
    "group of DTensors": lambda: attention(*dtensors(2), group=dist.group.WORLD),
    "group": lambda: attention(*tensors(), group=0),
}


def messages(
    different: Mapping[str, Callable[[bool], Any]], wrong: Mapping[str, Callable[[], Any]]
) -> dict[str, str]:
    """The messages of all calls on this rank."""
    odd = dist.get_rank() == 1
    found = {name: message_of(lambda call=call: call(odd)) for name, call in different.items()}
    return found | {f"all: {name}": message_of(call) for name, call in wrong.items()}


def disagree() -> dict[str, str]:
    """Afterwards the group still works."""
    found = messages(DIFFERENT, WRONG)
    return found | {"afterwards": message_of(lambda: attention(*tensors()))}


def check_messages(
    group: list[dict[str, str]], different: Mapping[str, str], wrong: Mapping[str, str]
) -> None:
    """Each message on each rank holds these words."""
    wanted = {**different, **{f"all: {name}": want for name, want in wrong.items()}}
    for rank, found in enumerate(group):
        for name, want in wanted.items():
            assert want in found[name], f"{name} on rank {rank}: {found[name]}"
        assert found["afterwards"] == "no error"


def at_step(step: str, act: Callable[[], None]) -> None:
    """Act when this rank begins the step of that name."""
    exchange = Peers.exchange

    def watched(self: Peers, sends: Any, receives: Any, name: str) -> Any:
        if name == step:
            act()
        return exchange(self, sends, receives, name)

    Peers.exchange = watched  # type: ignore[method-assign]


def failing(
    ready: Callable[[], Any], step: str, act: Callable[[], None], call: Callable[[], Any]
) -> tuple[str, float]:
    """The message of this rank, and its seconds, where rank 1 fails at a step."""
    ready()  # all ranks are there
    if dist.get_rank() == 1:
        at_step(step, act)
    begin = time.monotonic()

    def differentiated() -> None:
        out: Tensor = call()
        if out.requires_grad:
            out.sum().backward()

    return message_of(differentiated), time.monotonic() - begin


def check_others(
    found: list[Any], ranks: int, step: str, stalls: bool, op: str = "attention"
) -> None:
    """All but rank 1, which has ended or still waits, raised errors that say which step."""
    assert (found[1] is None) == (not stalls)
    errors = [(rank, *found[rank]) for rank in range(ranks) if rank != 1]
    for rank, message, seconds in errors:
        start = f"RuntimeError: fastattn.distributed.{op}: rank {rank} got no answer from rank "
        assert message.startswith(start), message
        assert step in message
        assert "None" not in message.removeprefix(start)[:4]
        assert seconds < 2 * SECONDS
    # A neighbour of rank 1 names it; the next one may name the neighbour, which has ended, too.
    assert any("from rank 1 in" in message for _, message, _ in errors)


def die() -> None:
    """End this process without a message."""
    os.kill(os.getpid(), signal.SIGKILL)


def stall() -> None:
    """Wait longer than the others do."""
    time.sleep(1.5 * SECONDS)


def attend(method: str, heads: int = 4) -> Tensor:
    return attention(*(x.requires_grad_() for x in tensors(heads=heads)), method=method)


fail = partial(failing, lambda: attention(*tensors()))
ring = partial(attend, "ring")
die_in_comparison = partial(fail, "the comparison of the arguments", die, ring)
die_in_ring = partial(fail, "step 2 of 3 of the forward ring", die, ring)
die_in_backward = partial(fail, "step 1 of 3 of the backward ring", die, ring)
die_in_gathering = partial(fail, "gathering the keys", die, partial(attend, "allgather"))
die_in_heads = partial(fail, "the exchange of heads", die, partial(attend, "ulysses", 6))
stall_in_ring = partial(fail, "step 1 of 2 of the forward ring", stall, ring)
