"""Whether tensors may be looked at in Python, and handed to an operator that knows only them."""

from __future__ import annotations

from torch import Tensor

from fastattn.eager import runs_eagerly


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether these are ordinary CPU tensors and nobody traces, transforms, compiles or counts.

    Only then may a branch depend on their values, and only then is an operator that knows no
    batching, no fake tensors and no forward-mode derivative in nobody's way.
    """
    return runs_eagerly(*tensors) and all(t is None or t.is_cpu for t in tensors)
