"""Explicit, reversible integrations of fastattn into other libraries."""

from fastattn.integrations.torch_mha import replace_mha, restore_mha

__all__ = ["replace_mha", "restore_mha"]
