"""Whether Python may read tensor values and call operators that only support ordinary tensors."""

from __future__ import annotations

from torch import Tensor

from fastattn.eager import runs_eagerly


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether these are ordinary CPU tensors, and no tracer, transform, compiler or mode is active.

    Only then may a branch depend on their values, and only then is it safe to call an operator
    without support for batching, fake tensors and forward-mode derivatives.
    """
    return runs_eagerly(*tensors) and all(t is None or t.is_cpu for t in tensors)
