"""Models of Hugging Face diffusers on fused kernels.

diffusers looks up the name given to ``set_attention_backend`` in a registry of attention functions.
:func:`register` adds one; diffusers is imported only then.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from torch import Tensor

from fastattn.integrations._registration import Registration, Registry, check_version
from fastattn.ops import scaled_dot_product_attention

__all__ = ["Registration", "register"]

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


# diffusers drops, without an error, each argument that has no parameter here.
def attention_forward(
    query: Tensor,  # [B, Lq, Hq, D]
    key: Tensor,  # [B, Lk, Hkv, D]
    value: Tensor,  # [B, Lk, Hkv, Dv]
    attn_mask: Tensor | None = None,  # [B, Lk], or broadcastable to [B, Hq, Lq, Lk]
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Any:  # [B, Lq, Hq, Dv], with return_lse also [B, Hq, Lq]
    """Attention as diffusers' backend "native" computes it, on fused kernels."""
    if _parallel_config is not None:
        raise ValueError(
            "fastattn's attention for diffusers does not support context parallelism; "
            "call model.set_attention_backend('native') for it"
        )
    padding_shape = (query.shape[0], key.shape[1])
    if attn_mask is not None and attn_mask.shape == padding_shape:
        attn_mask = attn_mask[:, None, None]
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    result = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        return_lse=return_lse,
    )
    if not return_lse:
        return result.transpose(1, 2)
    out, lse = result
    return out.transpose(1, 2), lse


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
        # One member for all registrations, because models keep it and compare it by identity.
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
