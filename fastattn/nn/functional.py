"""Functions of ``torch.nn.functional`` on the fastest kernels, for modules."""

from fastattn.ops.linear import linear

__all__ = ["linear"]
