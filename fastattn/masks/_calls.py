"""What masks know of a call of attention, and the checks of what they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.checks import not_dense, wrong_type
from fastattn.eager import runs_eagerly

__all__ = ["Call", "check_device", "check_int", "check_rows", "integers"]


class Call(NamedTuple):
    """What a mask needs to know of a call."""

    op: str
    batch: int
    heads: int
    q_len: int
    k_len: int
    offset: int
    device: torch.device


def check_rows(call: Call, what: str, rows: int) -> None:
    if rows != 1 and rows != call.batch:
        raise RuntimeError(
            f"{call.op}: mask: {what} must be of batch size 1 or {call.batch}, got {rows}"
        )


def check_device(call: Call, what: str, x: Tensor) -> None:
    if x.device != call.device:
        raise RuntimeError(
            f"{call.op}: mask: {what} must be on query's device {call.device}, got {x.device}"
        )


def check_int(function: str, name: str, value: Any, least: int) -> None:
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        raise wrong_type(function, name, value, "int")
    if value < least:
        raise ValueError(f"{function}: {name} must be at least {least}, got {value}")
    if isinstance(value, int) and value >= 2**31:
        raise ValueError(f"{function}: {name} must be below 2**31, got {value}")


def integers(function: str, name: str, x: Any, shape: str, dims: Sequence[int]) -> Tensor:
    """A copy, as int32, so that later changes of ``x`` do not count for some calls only."""
    if not isinstance(x, Tensor):
        raise wrong_type(function, name, x, "Tensor")
    if x.is_nested or x.layout is not torch.strided:
        raise not_dense(function, name, x)
    if x.dim() not in dims:
        raise ValueError(f"{function}: {name} must be {shape}, got shape {tuple(x.shape)}")
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{function}: {name} must be int32 or int64, got {x.dtype}")
    if x.dtype is torch.int64 and x.numel() and runs_eagerly(x):
        least, most = (int(n) for n in x.aminmax())
        if least < -(2**31) or most >= 2**31:
            raise ValueError(f"{function}: {name} must fit int32, got {least} to {most}")
    return x.to(torch.int32, copy=True)
