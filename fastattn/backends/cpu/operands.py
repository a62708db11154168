"""The functions that the native module calls, and its numbers of the dtypes."""

from __future__ import annotations

import torch

from fastattn import _cpu, compat
from fastattn.backends._alloc import empty_output, summed_to
from fastattn.backends._precision import allows_bf16_parts

_cpu.use_torch(torch, compat.exchange_interface)
_cpu.use_rules(empty_output, summed_to, allows_bf16_parts)

DTYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.bool: 4,
}
