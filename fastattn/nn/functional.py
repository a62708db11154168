"""Functions that modules call: those of ``torch.nn.functional``, on the fastest kernels."""

from fastattn.ops.linear import linear

__all__ = ["linear"]
