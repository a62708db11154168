"""The import path by which models saved as a whole restore their modules."""

from fastattn.nn._replacement import _new_fused, replace_mha, restore_mha

__all__ = ["_new_fused", "replace_mha", "restore_mha"]
