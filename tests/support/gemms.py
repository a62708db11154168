"""The choices of evidence for linear and encoder layers, replaced, and their calls counted."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
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
        return gemm(*args)

    counting = {of: functools.partial(counted, of, gemm) for of, gemm in gemms._GEMMS.items()}
    rule = Gemm(*[name] * 3, least=least, least_grad=least, min_tile_rows=0, min_tile_rows_alone=0)
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
def native_layers(gemm: str = "torch") -> Iterator[Rows]:
    """Within the block encoder layers of any size are computed natively, by the GEMM ``gemm``."""
    called = Rows()
    layers, texts = cpu.encoder_layers, cpu.encode_texts

    def counted(y: Tensor | None, rows: Tensor, plans: tuple[Any, ...]) -> Tensor | None:
        if y is not None:
            called.layers.append(len(plans))
            called.extend(int(rows.sum()) for _ in plans)
        return y

    def of_rows(x: Tensor, *args: Any, **named: Any) -> Tensor | None:
        return counted(layers(x, *args, **named), torch.ones(x.shape[:-1]), named["plans"])

    def of_texts(ids: Any, mask: Any, *args: Any, **named: Any) -> Tensor | None:
        y: Tensor | None = texts(ids, mask, *args, **named)
        rows = torch.ones_like(ids) if mask is None and y is not None else mask
        return counted(y, rows, named["texts"].plans)

    rule = Gemm(gemm, gemm, gemm, layer_up_to=2**62)
    try:
        with (
            mock.patch.object(cpu, "encoder_layers", of_rows),
            mock.patch.object(cpu, "encode_texts", of_texts),
            mock.patch.object(cpu, "rule", return_value=rule),
        ):
            evidence.forget()
            yield called
    finally:
        evidence.forget()
