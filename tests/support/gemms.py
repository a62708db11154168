"""The choices of evidence for linear and encoder layers, replaced, and their calls counted."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import Tensor

from fastattn import evidence
from fastattn.evidence import Gemm

cpu: Any = importlib.import_module("fastattn.backends.cpu")
gemms: Any = importlib.import_module("fastattn.backends.cpu.linear")


@contextlib.contextmanager
def only(name: str, least: int = 0) -> Iterator[list[str]]:
    """Within the block one GEMM computes all products from ``least`` on; yields the called ones.

    Calls of ``torch.nn.functional.linear`` instead of our function are not among them.
    """
    called: list[str] = []

    def counted(of: str, gemm: Any, *args: Any) -> Tensor:
        called.append(of)
        y: Tensor = gemm(*args)
        return y

    counting = {of: functools.partial(counted, of, gemm) for of, gemm in gemms._GEMMS.items()}
    rule = Gemm(name, name, name, least=least, least_grad=least)
    try:
        with (
            mock.patch.dict(gemms._GEMMS, counting),
            mock.patch.object(gemms, "_by_ours", counting["ours"]),
            mock.patch.object(gemms, "rule", return_value=rule),
            mock.patch.object(cpu, "rule", return_value=rule),
        ):
            evidence.forget()
            yield called
    finally:
        evidence.forget()


class Rows(list[int]):
    """The rows of each layer, and the number of layers of each call."""

    def __init__(self) -> None:
        self.layers: list[int] = []


@contextlib.contextmanager
def native_layers() -> Iterator[Rows]:
    """Within the block encoder layers of any size are computed natively."""
    called = Rows()
    native = cpu.encoder_layers

    def counted(x: Tensor, *args: Any, **named: Any) -> Tensor | None:
        y: Tensor | None = native(x, *args, **named)
        if y is not None:
            called.layers.append(len(named["plans"]))
            called.extend(y[..., 0].numel() for _ in named["plans"])
        return y

    rule = Gemm("torch", "torch", "torch", layer_up_to=2**62)
    try:
        with (
            mock.patch.object(cpu, "encoder_layers", counted),
            mock.patch.object(cpu, "rule", return_value=rule),
        ):
            evidence.forget()
            yield called
    finally:
        evidence.forget()
