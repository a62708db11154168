"""Whether a call may skip PyTorch's dispatcher and go directly to a kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.compat import nothing_watches

__all__ = ["has_plain_memory", "nothing_watches", "runs_eagerly"]

_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter, type(None)})


def has_plain_memory(t: Tensor) -> bool:
    """Whether the values of a tensor are stored at its address.

    They are not for a lazy negation, a gradient without memory, a tensor wrapped by a transform
    (batched gradients; a tensor that outlived ``torch.func``), or a sparse tensor.
    """
    try:
        return not t.is_neg() and (t.data_ptr() != 0 or t.numel() == 0)
    except RuntimeError:  # it has no address
        return False


def runs_eagerly(*tensors: Tensor | None) -> bool:
    """Whether these tensors are plain memory, and no transform or mode is active.

    If False, the call goes through ``torch.ops``, where the tracer, the transform or the subclass
    intercepts it.
    """
    if not (nothing_watches() and _PLAIN_TYPES.issuperset(map(type, tensors))):
        return False
    try:  # as has_plain_memory(), without a call for each
        for t in tensors:
            if t is not None and (t.is_neg() or (not t.data_ptr() and t.numel())):
                return False
    except RuntimeError:
        return False
    return True
