"""Registration with transformers, and how to undo it."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from fastattn.distributed import Layout
from fastattn.integrations._registration import (
    ABSENT,
    Registration,
    Registry,
    check_version,
    restore,
)

# The supported versions; the extra in pyproject.toml says the same.
OLDEST, BELOW = (5, 0), (6, 0)
_OVERRIDABLE = ("sdpa",)  # the values of `override`


def register(override: str | None = None) -> Registration:
    """Serve ``attn_implementation="fastattn"`` in transformers, until it is undone.

    Afterwards ``from_pretrained(..., attn_implementation="fastattn")`` and
    ``model.set_attn_implementation("fastattn")`` run the attention of every model that uses
    transformers' registry on fused kernels, forward and backward. This includes models for which
    PyTorch's own function is not offered: with a softcap (Gemma 2), attention sinks (GPT-OSS), a
    relative position bias (T5) or attention weights (``output_attentions=True`` in a call).
    ``model.set_experts_implementation("fastattn")`` runs the experts of a mixture on the linear
    layers that are the fastest here.

    Args:
        override: None, or ``"sdpa"``: also serve that name, for code that accepts no other, such as
            continuous batching. This includes models that already use it.

    Returns:
        A :class:`Registration`: ``undo()`` restores the previous state; so does the end of a
        ``with`` block.

    Raises:
        ImportError: transformers is not installed, or its version is out of the range.
        ValueError: ``override`` is another name.

    >>> from fastattn.integrations.transformers import register
    >>> with register():
    ...     pass  # model = AutoModel.from_pretrained(name, attn_implementation="fastattn")
    """
    if override is not None and override not in _OVERRIDABLE:
        allowed = ", ".join(map(repr, _OVERRIDABLE))
        raise ValueError(f"register: override must be None or {allowed}, got {override!r}")
    return Registration(
        _registries(), ("fastattn",) if override is None else ("fastattn", override)
    )


def context_parallel(
    group: Any = None, *, method: str = "auto", layout: str | Layout = "contiguous"
) -> Registration:
    """Serve ``attn_implementation="fastattn_context_parallel"``, until it is undone.

    Models with it compute one rank's rows of sequences, and each layer attends to the keys of all
    ranks by :func:`fastattn.distributed.attention`: full, causal and sliding-window attention with
    grouped heads, softcap, sinks and padding. Pass the rank's ``position_ids``
    (:meth:`fastattn.distributed.Layout.positions`), its part of ``attention_mask`` if there is
    padding, on all ranks or on none, and ``use_cache=False``. Shift labels before the sequence is
    sharded. Each rank has a part of the gradients of the parameters; their sum over the ranks is
    the gradient.

    Args:
        group, method, layout: as in :func:`fastattn.distributed.attention`.

    Returns:
        A :class:`Registration`, as :func:`register`.

    Raises:
        ImportError: transformers is not installed, or its version is out of the range.
        NotImplementedError: in a call of the model, for another mask, a cache, attention weights,
            and packed sequences. transformers also interprets ``position_ids`` that jump as packed,
            as in the zigzag layout: pass ``attention_mask=torch.ones_like(input_ids)``.
    """
    check_version("transformers", OLDEST, BELOW)
    from fastattn.integrations.transformers._context import TransformersContext

    context = TransformersContext.create(group, method, layout)
    registries = _Registries(context.attention_forward, context.attention_mask)
    return Registration(registries, ("fastattn_context_parallel",))


class _Registries(Registry[str]):
    """transformers' registries: fastattn's functions for each name, and the previous functions."""

    def __init__(self, attention_forward: Any, attention_mask: Any, *others: Any) -> None:
        super().__init__()
        attention = importlib.import_module("transformers.modeling_utils").AttentionInterface
        masks = importlib.import_module("transformers.masking_utils").AttentionMaskInterface
        self._served = ((attention, attention_forward), (masks, attention_mask), *others)
        self._before: dict[str, list[Any]] = {}

    def serve(self, name: str) -> None:
        """Put fastattn's functions under a name, with each registration."""
        super().serve(name)
        for interface, function in self._served:
            interface.register(name, function)

    def add(self, name: str) -> None:
        """Remember the previous functions."""
        tables = [_entries(interface) for interface, _ in self._served]
        self._before[name] = [table.get(name, ABSENT) for table in tables]

    def remove(self, name: str) -> None:
        """Put the previous functions back, where ours are still registered."""
        for (interface, function), before in zip(self._served, self._before.pop(name), strict=True):
            if _entries(interface).get(name) is function:
                restore(_entries(interface), name, before)


def _entries(interface: Any) -> dict[str, Any]:
    """The dictionary of a registry, which has no public function to remove a name."""
    return interface._global_mapping


@functools.cache
def _registries() -> _Registries:
    """The registries, once transformers is imported and its version checked."""
    check_version("transformers", OLDEST, BELOW)
    from fastattn.integrations.transformers._attention import attention_forward
    from fastattn.integrations.transformers._experts import experts_forward, experts_interface
    from fastattn.integrations.transformers._masks import attention_mask

    experts = experts_interface()
    others = [] if experts is None else [(experts, experts_forward)]
    return _Registries(attention_forward, attention_mask, *others)
