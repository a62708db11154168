"""Explicit, reversible integrations of fastattn into other libraries."""

from fastattn.integrations.acceleration import accelerate, restore
from fastattn.nn._replacement import replace_mha, restore_mha

__all__ = ["accelerate", "replace_mha", "restore", "restore_mha"]
