"""Models of Hugging Face diffusers on fused kernels.

diffusers looks up the name given to ``set_attention_backend`` in a registry of attention functions.
:func:`register` adds one; diffusers is imported only then.
"""

from __future__ import annotations

from fastattn.integrations._registration import Registration
from fastattn.integrations.diffusers._registry import register

__all__ = ["Registration", "register"]
