"""Registration with diffusers, and how to undo it."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from fastattn.integrations._registration import Registration, Registry, check_version
from fastattn.integrations.diffusers._attention import attention_forward

NAME = "fastattn"
# The supported versions; the extra in pyproject.toml says the same.
OLDEST, BELOW = (0, 37), (1, 0)


def register() -> Registration:
    """Serve the attention backend ``"fastattn"`` in diffusers, until it is undone.

    Afterwards ``model.set_attention_backend("fastattn")`` and
    ``diffusers.attention_backend("fastattn")`` run the attention of every model that uses
    diffusers' registry on fused kernels, forward and backward. Models whose processors call
    PyTorch's function themselves, such as ``UNet2DConditionModel``, do not use the registry:
    :func:`fastattn.integrations.torch.activate` serves them.

    Returns:
        A :class:`Registration`: ``undo()`` restores the previous state; so does the end of a
        ``with`` block. A model that is still set to ``"fastattn"`` then raises a KeyError when it
        is called: call its ``reset_attention_backend()`` first.

    Raises:
        ImportError: diffusers is not installed, or its version is out of the range.

    >>> from fastattn.integrations.diffusers import register
    >>> with register():
    ...     pass  # model.set_attention_backend("fastattn")
    """
    return Registration(_registry(), (NAME,))


class _Registry(Registry[str]):
    """diffusers' registry of attention functions.

    Its names are the members of an enumeration, which Python closes when the class is created. So
    a new name must be added to the private tables in which ``enum`` finds members.
    """

    def __init__(self) -> None:
        super().__init__()
        dispatch = importlib.import_module("diffusers.models.attention_dispatch")
        self._names: Any = dispatch.AttentionBackendName
        self._backends: Any = dispatch._AttentionBackendRegistry
        # One member for all registrations: models keep it, and compare it by identity.
        self._member = str.__new__(self._names, NAME)
        self._member._name_, self._member._value_ = NAME.upper(), NAME
        self._active_before: Any = None

    def add(self, name: str) -> None:
        """Add a member to the enumeration, and a function for it to the registry."""
        self._names._member_names_.append(name.upper())
        self._names._member_map_[name.upper()] = self._member
        self._names._value2member_map_[name] = self._member
        self._backends.register(self._member)(attention_forward)
        self._active_before = self._backends._active_backend

    def remove(self, name: str) -> None:
        """Remove both, and the name as the default of all models."""
        # `model.set_attention_backend` also makes its choice the default of all other models.
        if self._backends._active_backend is self._member:
            self._backends.set_active_backend(self._active_before)
        for table in ("_backends", "_constraints", "_supported_arg_names"):
            getattr(self._backends, table).pop(self._member)
        del self._names._value2member_map_[name]
        del self._names._member_map_[name.upper()]
        self._names._member_names_.remove(name.upper())


@functools.cache
def _registry() -> _Registry:
    """The registry, once diffusers is imported and its version checked."""
    check_version("diffusers", OLDEST, BELOW)
    return _Registry()
