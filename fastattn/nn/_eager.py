"""Whether tensors are what they seem: plain data on the CPU that may be looked at and handed to a
kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter


def is_plain(*tensors: Tensor | None) -> bool:
    """True if every tensor is an ordinary dense CPU tensor and nobody is tracing, transforming or
    compiling.

    Only then may values be read in Python, and only then is an operator without a batching rule, a
    fake implementation or a FLOP formula out of everybody's sight.
    """
    if (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0  # a dual tensor looks plain, its tangent would be lost
    ):
        return False
    return all(
        t is None
        or (
            type(t) in (Tensor, Parameter)
            and t.device.type == "cpu"
            and t.layout == torch.strided
            and not t.is_nested
        )
        for t in tensors
    )
