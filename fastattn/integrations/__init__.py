"""Explicit, reversible integrations of fastattn into other libraries."""

from fastattn.integrations.acceleration import accelerate, restore
from fastattn.integrations.torch_mha import replace_mha, restore_mha

__all__ = ["accelerate", "replace_mha", "restore", "restore_mha"]
