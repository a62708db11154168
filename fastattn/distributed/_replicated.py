"""Values that all ranks have, and computations of which each rank has a part.

A replicated value, for example a query, enters the part of each rank by :func:`enter`. The results
of the parts become replicated values by :func:`sum_over_ranks` or :func:`merge_over_ranks`, which
merges states of attention. Since all ranks then compute the same loss, each has the whole gradient
of such a result, and the derivatives of sum and merge need no message. The derivative of ``enter``
is the sum over the parts of all ranks. Sums and merges are in the order of ranks, so all ranks get
the same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastattn import checks
from fastattn.backends._partial import gradients_of_part
from fastattn.distributed._agree import compare_options, error_as_options, gather
from fastattn.distributed._peers import Peers
from fastattn.ops.merge_states import merge as merge_states

T = TypeVar("T")
# A call made of this rank's arguments, a function that returns the options that must be the same on
# all ranks, and numbers of this rank that the others need.
LocalCall = tuple[T, Callable[[], Mapping[str, str]], tuple[int, ...]]


# --- the comparison of the ranks' arguments ------------------------------------------------------


def prepare_on_ranks(
    peers: Peers,
    check: Any,
    tensor: Any,
    prepare: Callable[[], LocalCall[T]],
    numbers: int = 0,  # how many numbers `prepare` returns
) -> tuple[T, list[list[int]]]:
    """Return the call that ``prepare`` makes of this rank's arguments, and every rank's numbers.

    If ``prepare`` raises, or the options differ, all ranks raise. Without ``check`` the options are
    not computed, and the numbers of all ranks are assumed to be equal.
    """
    device = tensor.device if isinstance(tensor, Tensor) else torch.device("cpu")
    try:
        checks.check_flag(peers.op, "check", check)
        call, options_to_compare, local = prepare()
        options = options_to_compare() if check else {}
    except Exception as error:
        if check is True:
            with contextlib.suppress(RuntimeError):  # of the comparison; this rank's error follows
                compare_options(peers, error_as_options(error), (0,) * numbers, device)
        raise
    if check:
        return call, compare_options(peers, options, local, device)
    return call, [list(local)] * peers.size


def describe(name: str, x: Tensor | None, rows: bool = False) -> dict[str, str]:
    """The properties of an argument to compare: shape, dtype and a checksum of its values.

    With ``rows``, each rank has its own rows of the argument: their number and values may differ.
    """
    if x is None:
        return {name: "None"}
    sizes = [str(n) for n in x.shape]
    if rows:
        sizes[-2] = "N"
        return {name: f"{checks.name_of(x)} [{', '.join(sizes)}]"}
    properties = {name: f"{checks.name_of(x)} [{', '.join(sizes)}]"}
    return properties | {f"the values of {name}": f"those with checksum {_checksum(x)}"}


def _checksum(x: Tensor) -> int:
    """A 64-bit checksum that depends on each element and its place."""
    widths = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    words = x.detach().contiguous().view(-1).view(widths[x.element_size()]).long()
    odd_numbers = torch.arange(1, 2 * words.numel(), 2, device=x.device)
    mixed = (words ^ (words >> 17)) * (odd_numbers * 0x9E3779B97F4A7C1 + 0x632BE59BD9B4E01)
    return int((mixed ^ (mixed >> 29)).sum())


# --- in and out of the part of a rank ------------------------------------------------------------


def enter(peers: Peers, step: str, x: Tensor) -> Tensor:
    """Return the replicated x for this rank's part; its gradient is the sum over all ranks."""
    return _Enter.apply(peers, step, x)


def sum_over_ranks(peers: Peers, step: str, x: Tensor) -> Tensor:
    """The sum of the results of all ranks."""
    return _SumOverRanks.apply(peers, step, x)


def merge_over_ranks(peers: Peers, step: str, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the states of all ranks: out [..., Dv] in float32 or wider, lse [...] in float64."""
    return _MergeOverRanks.apply(peers, step, out, lse)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, peers: Peers, step: str, x: Tensor) -> Tensor:
        ctx.peers, ctx.step = peers, step
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        return None, None, _gather_and_sum(ctx.peers, ctx.step, grad)


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, peers: Peers, step: str, x: Tensor) -> Tensor:
        return _gather_and_sum(peers, step, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        return None, None, grad


class _MergeOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, peers: Peers, step: str, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor]:
        results = gather_and_merge(peers, step, out, lse)
        ctx.save_for_backward(out, lse, *results)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        out_of_rank, lse_of_rank, out, lse = ctx.saved_tensors
        return (
            None,
            None,
            *gradients_of_part(grad_out, grad_lse, out_of_rank, lse_of_rank, out, lse),
        )


def gather_and_merge(peers: Peers, step: str, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`merge_over_ranks`, without a derivative; 16-bit states are merged in float32."""
    # One message with both: D + 2 float32 numbers per row.
    widths = out.shape[-1] * out.element_size(), lse.element_size()
    own = torch.cat([_bytes(out), _bytes(lse[..., None])], -1)
    wide = torch.promote_types(out.dtype, torch.float32)
    state: tuple[Tensor, Tensor] | None = None
    for message in gather(peers, own.view(-1), [own.numel()] * peers.size, step):
        out_bytes, lse_bytes = (x.contiguous() for x in message.view(own.shape).split(widths, -1))
        state_of_rank = out_bytes.view(out.dtype).to(wide), lse_bytes.view(lse.dtype).squeeze(-1)
        state = state_of_rank if state is None else merge_states(*state, *state_of_rank)
    assert state is not None
    return state


def _bytes(x: Tensor) -> Tensor:
    """The elements as bytes [..., n * size of an element], for x [..., n]."""
    return x.contiguous().view(torch.uint8)


def _gather_and_sum(peers: Peers, step: str, x: Tensor) -> Tensor:
    """The sum of every rank's x, in the order of ranks."""
    first, *remaining = gather(peers, x.contiguous().view(-1), [x.numel()] * peers.size, step)
    result = first.clone()
    for addend in remaining:
        result += addend
    return result.view(x.shape)
