"""Where models that were saved whole look for what makes their modules again."""

from fastattn.nn._replacement import _new_fused, replace_mha, restore_mha

__all__ = ["_new_fused", "replace_mha", "restore_mha"]
