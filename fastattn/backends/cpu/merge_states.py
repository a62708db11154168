"""The adapter of merged states: from tensors to addresses and strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastattn import _cpu
from fastattn.backends._states import named_operands, operators, sizes
from fastattn.backends.cpu.operands import DTYPES


def _call(kernel: Callable[..., None]) -> Callable[[dict[str, Any]], None]:
    def run(tensors: dict[str, Any]) -> None:
        out, lse = tensors["out_a"], tensors["lse_a"]
        dtypes = DTYPES[out.dtype], DTYPES[lse.dtype]
        kernel(*dtypes, torch.get_num_threads(), sizes(out), named_operands(tensors))

    return run


merge_states, merge_states_backward = operators(
    _call(_cpu.merge_states), _call(_cpu.merge_states_backward)
)
