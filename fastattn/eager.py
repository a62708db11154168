"""Whether a call may skip PyTorch's dispatcher and go directly to a kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.compat import is_unintercepted as is_unintercepted

# A tensor whose storage was freed, as FSDP does, has the address 0, or, if it is a view, its offset
# in bytes. So addresses below this one are looked at twice (`was_freed`).
LOW = 2**32

_EXACT_TYPES = frozenset({Tensor, torch.nn.Parameter, type(None)})


def has_strided_memory(t: Tensor) -> bool:
    """Whether the values of a tensor are stored in strided memory at its address.

    False for a lazy negation, a gradient without memory, a tensor wrapped by a transform (batched
    gradients; a tensor that outlived ``torch.func``), or a sparse tensor.
    """
    try:
        return not t.is_neg() and (t.data_ptr() >= LOW or t.numel() == 0)
    except RuntimeError:  # it has no address
        return False


def was_freed(t: Tensor) -> bool:
    """Whether a tensor that is not empty has no memory."""
    return t.numel() > 0 and t.data_ptr() == t.storage_offset() * t.element_size()


def runs_eagerly(*tensors: Tensor | None) -> bool:
    """Whether these tensors have strided memory, and no transform or mode is active.

    If False, the call goes through ``torch.ops``, where the tracer, the transform or the subclass
    intercepts it.
    """
    if not (is_unintercepted() and _EXACT_TYPES.issuperset(map(type, tensors))):
        return False
    try:  # as has_strided_memory(), without a call for each
        for t in tensors:
            if t is not None and (t.is_neg() or (t.data_ptr() < LOW and t.numel())):
                return False
    except RuntimeError:
        return False
    return True


def is_eager_on_cpu(*tensors: Tensor | None) -> bool:
    """Whether these are ordinary CPU tensors, and no tracer, transform, compiler or mode is active.

    Only then may a branch depend on their values.
    """
    return runs_eagerly(*tensors) and all(t is None or t.is_cpu for t in tensors)
