"""Explicit, reversible ways to bring fastattn into code written for something else."""

from fastattn.integrations.torch_mha import replace_mha, restore_mha

__all__ = ["replace_mha", "restore_mha"]
